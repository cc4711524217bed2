"""Averages of the models over rounds (EMA)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from shoal.methods.composition.builder import MethodBuilder
from shoal.methods.composition.capability import PERSISTENT_MODELS
from shoal.methods.composition.piece import Piece, register
from shoal.stages.momentum import UpdateEmaModels, ema_models
from shoal.types import ClientId, Params, ServerState, option


@register("serve", "average")
@dataclass(frozen=True)
class ExponentialAverage(Piece):
    """Serves clients an exponential moving average of the models over rounds (EMA)."""

    source = "shoal"
    group = "server"
    requires = (PERSISTENT_MODELS,)
    requires_reason = "an average over rounds needs a model that keeps its identity"
    client_keeps = "the EMA model"

    ema_decay: float = option(
        0.8,
        "Weight the last EMA model by this number in each round, and the newest model by the rest. 0 serves the "
        "newest models.",
        ge=0,
        lt=1,
    )

    def add_to(self, method: MethodBuilder) -> None:
        method.stages["serve"].insert(0, UpdateEmaModels(self.ema_decay))
        served = method.serving_models_for

        def models_to_serve(state: ServerState, client: ClientId | None) -> Mapping[str, Params]:
            return served(replace(state, models=ema_models(state)), client)

        method.models_to_serve = models_to_serve
