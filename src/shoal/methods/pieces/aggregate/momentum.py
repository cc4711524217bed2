"""Server momentum, as in FedAvgM."""

from __future__ import annotations

from dataclasses import dataclass

from shoal.methods.composition.aggregation import average_models
from shoal.methods.composition.builder import MethodBuilder
from shoal.methods.composition.capability import INDIVIDUAL_UPDATES, PERSISTENT_MODELS, UPDATE_SUMMARIES
from shoal.methods.composition.piece import Piece, register
from shoal.stages.momentum import ApplyMomentum
from shoal.types import option


@register("aggregate", "momentum")
@dataclass(frozen=True)
class ServerMomentum(Piece):
    """Averages the trained models and applies momentum to the server's update of every model."""

    source = "Hsu et al. 2019"
    group = "server"
    requires = (PERSISTENT_MODELS,)
    requires_reason = "a velocity belongs to a model that keeps its identity between rounds"
    provides = (INDIVIDUAL_UPDATES, UPDATE_SUMMARIES)
    server_learns = "the model that each client trained, and its number of samples"

    momentum: float = option(
        0.7,
        "Add this fraction of the server's last update of a model to its new update. 0 turns server momentum off.",
        ge=0,
        lt=1,
    )
    lr: float = option(
        1.0,
        "Multiply the mean change of a model by this server learning rate, before the momentum is added.",
        gt=0,
    )

    def add_to(self, method: MethodBuilder) -> None:
        average_models(method)
        method.server_updates.append(ApplyMomentum(self.momentum, self.lr))
