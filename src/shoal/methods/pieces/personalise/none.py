"""No personalisation."""

from shoal.methods.composition.capability import SERVED_MODEL_PREDICTIONS
from shoal.methods.composition.piece import Piece, register


@register("personalise", "none")
class NoPersonalisation(Piece):
    """Leaves the serving models as they are."""

    is_default = True
    provides = (SERVED_MODEL_PREDICTIONS,)
