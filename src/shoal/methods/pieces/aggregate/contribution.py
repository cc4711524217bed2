"""Weighting of clients by contribution, as in APCSMA."""

from __future__ import annotations

from shoal.methods.composition.aggregation import average_by_contribution
from shoal.methods.composition.builder import MethodBuilder
from shoal.methods.composition.capability import INDIVIDUAL_UPDATES, ONE_MODEL_PER_CLIENT, TRAINING_METRICS
from shoal.methods.composition.piece import Piece, register


@register("aggregate", "contribution")
class ContributionWeighted(Piece):
    """Averages the trained models, weighted by the contribution function F2."""

    source = "APCSMA, Eq. 12-13"
    requires = (ONE_MODEL_PER_CLIENT, TRAINING_METRICS)
    requires_reason = "an update is compared with the model from which training started"
    provides = (INDIVIDUAL_UPDATES,)
    client_sends = "accuracy and loss on its own samples after training"
    server_learns = (
        "the model that each client trained, its accuracy, loss and number of samples; the server keeps the last model"
    )

    def add_to(self, method: MethodBuilder) -> None:
        average_by_contribution(method, "contribution")
