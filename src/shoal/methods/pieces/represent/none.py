"""No representation of clients."""

from shoal.methods.composition.piece import Piece, register


@register("represent", "none")
class NoRepresentation(Piece):
    """Clients are not described."""

    is_default = True
