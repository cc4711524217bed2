"""Predictions of the models as they were trained or personalised."""

from shoal.methods.composition.piece import Piece, register


@register("serve", "plain")
class Plain(Piece):
    """Clients predict with the models as they were trained or personalised."""

    is_default = True
