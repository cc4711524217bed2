"""Server momentum for training, and exponential moving averages (EMA models) for serving."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from shoal import tree
from shoal.errors import UserError
from shoal.stages.base import ServerOnly
from shoal.stages.train import ServerUpdate, TrainAndAggregate
from shoal.types import ClientId, Params, Report, ServerState

EMA_SLOT = "average"


@dataclass(frozen=True)
class ApplyMomentum(ServerUpdate):
    """Applies momentum to the server's update of each model: v ← β v + η (mean - w), w ← w + v.

    Only models that a client trained in this round are updated. Values that are not trainable, such as the statistics
    of batch norm, become the mean. With β = 0 and η = 1 the update is exactly plain averaging.
    """

    beta: float = 0.7
    lr: float = 1.0  # η
    slot: str = "momentum"

    def after_aggregation(
        self, train: TrainAndAggregate, before: ServerState, after: ServerState, reports: Mapping[ClientId, Report]
    ) -> ServerState:
        if not self.beta and self.lr == 1:
            return after
        velocities = {k: v for k, v in before.memory.get(self.slot, {}).items() if k in after.models}
        models = dict(after.models)
        for name, mean in after.models.items():
            model = before.models[name]
            if mean is not model:  # a client trained it
                models[name], velocities[name] = self._with_velocity(model, mean, velocities.get(name), train.trainable)
        return replace(after, models=models, memory={**after.memory, self.slot: velocities})

    def _with_velocity(
        self, before: Params, mean: Params, velocity: Params | None, trainable: tuple[str, ...]
    ) -> tuple[Params, Params]:
        change = {k: self.lr * (mean[k] - before[k]) for k in trainable}
        if velocity is not None:
            change = {k: torch.add(x, velocity[k], alpha=self.beta) for k, x in change.items()}
        return {k: before[k] + change[k] if k in change else x for k, x in mean.items()}, change


@dataclass(frozen=True)
class UpdateEmaModels(ServerOnly):
    """Updates the EMA model of each model: a ← d a + (1 - d) w.

    An EMA model starts as a copy of its model and varies less between rounds. Integers are copied from the model.
    """

    decay: float = 0.8
    name: str = EMA_SLOT

    def __post_init__(self) -> None:
        if not 0 <= self.decay < 1:
            raise UserError(f"server.ema_decay is {self.decay}; it must be from 0 to below 1")

    def fold(self, state: ServerState, reports: Mapping[ClientId, Report], seed: int) -> ServerState:
        before = state.memory.get(self.name, {})
        after = {
            k: self._updated_ema(before[k], model) if k in before else dict(model) for k, model in state.models.items()
        }
        return replace(state, memory={**state.memory, self.name: after})

    def _updated_ema(self, average: Params, model: Params) -> Params:
        return tree.map_leaves(
            lambda a, x: torch.lerp(a, x, 1 - self.decay) if x.is_floating_point() else x, average, model
        )


def ema_models(state: ServerState, slot: str = EMA_SLOT) -> Mapping[str, Params]:
    """Returns the EMA model of each model, or the model itself if it has none."""
    averages = state.memory.get(slot, {})
    return {name: averages.get(name, model) for name, model in state.models.items()}
