"""The weighted mean, as in FedAvg."""

from __future__ import annotations

from shoal.methods.composition.aggregation import average_models
from shoal.methods.composition.builder import MethodBuilder
from shoal.methods.composition.capability import INDIVIDUAL_UPDATES, UPDATE_SUMMARIES
from shoal.methods.composition.piece import Piece, register


@register("aggregate", "mean")
class Mean(Piece):
    """Averages the trained models, weighted by numbers of samples or equally."""

    is_default = True
    source = "McMahan et al. 2017"
    provides = (INDIVIDUAL_UPDATES, UPDATE_SUMMARIES)
    server_learns = "the model that each client trained, and its number of samples"

    def add_to(self, method: MethodBuilder) -> None:
        average_models(method)
