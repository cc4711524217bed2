"""Weights by contribution, as APCSMA aggregates."""

from __future__ import annotations

from shoal.methods.composition.aggregation import average_by_contribution
from shoal.methods.composition.builder import MethodBuilder
from shoal.methods.composition.capability import INDIVIDUAL_UPDATES, ONE_MODEL_PER_CLIENT, TRAINING_METRICS
from shoal.methods.composition.piece import Piece, register


@register("aggregate", "contribution")
class ContributionWeighted(Piece):
    """The mean of the trained models, weighted by the contribution function F2."""

    source = "APCSMA, Eq. 12-13"
    requires = (ONE_MODEL_PER_CLIENT, TRAINING_METRICS)
    requires_reason = "an update is compared with the one model that training started from"
    provides = (INDIVIDUAL_UPDATES,)
    client_sends = "accuracy and loss on its own samples after training"
    server_learns = (
        "the model that each client trained, how good it is, and its number of samples; it keeps the last ones"
    )

    def add_to(self, method: MethodBuilder) -> None:
        average_by_contribution(method, "contribution")
