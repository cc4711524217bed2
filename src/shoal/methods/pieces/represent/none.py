"""No representation of clients."""

from shoal.methods.composition.piece import Piece, register


@register("represent", "none")
class NoRepresentation(Piece):
    """Collects no representation of clients."""

    is_default = True
