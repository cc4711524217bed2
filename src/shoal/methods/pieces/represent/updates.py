"""Directions of updates, as in SCMoE-PFL."""

from shoal.methods.composition.capability import INDIVIDUAL_UPDATES, UPDATE_DIRECTIONS
from shoal.methods.composition.piece import Piece, register


@register("represent", "updates")
class UpdateDirections(Piece):
    """Compares clients by the directions of their updates, which clients send in training anyway."""

    source = "Li et al. 2026 (SCMoE-PFL), Eq. 1-2"
    requires = (INDIVIDUAL_UPDATES,)
    provides = (UPDATE_DIRECTIONS,)
    must_be_used = (UPDATE_DIRECTIONS,)
    client_sends = "nothing but the model that it trained"
    server_learns = "the direction of each client's last update, which the server keeps"
