"""No personalisation."""

from shoal.methods.composition.capability import SERVED_MODEL_PREDICTIONS
from shoal.methods.composition.piece import Piece, register


@register("personalise", "none")
class NoPersonalisation(Piece):
    """Clients predict with the models that they are served."""

    is_default = True
    provides = (SERVED_MODEL_PREDICTIONS,)
