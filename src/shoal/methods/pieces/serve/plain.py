"""Predictions of the models without correction."""

from shoal.methods.composition.piece import Piece, register


@register("serve", "plain")
class Plain(Piece):
    """Predicts with the models as they were trained or personalised."""

    is_default = True
