"""Server momentum."""

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
    """The mean, with momentum of the server's update of every model."""

    source = "Hsu et al. 2019"
    group = "server"
    requires = (PERSISTENT_MODELS,)
    requires_reason = "a velocity belongs to a model that stays the same one between rounds"
    provides = (INDIVIDUAL_UPDATES, UPDATE_SUMMARIES)
    server_learns = "the model that each client trained, and its number of samples"

    momentum: float = option(0.7, "Momentum of the server's update of every model.", ge=0, lt=1)
    lr: float = option(1.0, "Server learning rate: the update of every model is multiplied by it.", gt=0)

    def add_to(self, method: MethodBuilder) -> None:
        average_models(method)
        method.server_updates.append(ApplyMomentum(self.momentum, self.lr))
