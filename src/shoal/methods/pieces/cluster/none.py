"""No clusters."""

from shoal.methods.composition.capability import GLOBAL_MODEL, ONE_MODEL, ONE_MODEL_PER_CLIENT, PERSISTENT_MODELS
from shoal.methods.composition.piece import Piece, register


@register("cluster", "none")
class NoClusters(Piece):
    """Forms no clusters: all clients share one model."""

    is_default = True
    provides = (ONE_MODEL, GLOBAL_MODEL, PERSISTENT_MODELS, ONE_MODEL_PER_CLIENT)
