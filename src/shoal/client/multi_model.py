"""Several received models, each trained on the same rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from shoal.client.train import LocalTraining
from shoal.types import Batch, Phase, Report, Task, Tree


@dataclass(frozen=True)
class TrainAllModels:
    """Every received model is trained as `training` says, batch by batch side by side, and sent back: the one that is
    called `first` as the model, others by their names; in which order they came is the transport's affair. Of one model
    nothing differs from training it alone."""

    training: LocalTraining
    main_name: str = "global"
    name: str = "train"

    @property
    def batchable(self) -> bool:
        return self.training.batchable

    @property
    def phases(self) -> tuple[Phase, ...]:
        return tuple(replace(phase, step=self.step) for phase in self.training.phases)

    def begin(self, task: Task, private: Tree) -> Tree:
        return {k: self.training.begin(replace(task, models={k: model}), private) for k, model in task.models.items()}

    def step(self, state: Tree, batch: Batch) -> Tree:
        return {k: self.training.step(part, batch) for k, part in state.items()}

    def end(self, task: Task, state: Tree, counts: Mapping[str, int]) -> tuple[Report, Tree | None]:
        first = self.main_name if self.main_name in task.models else next(iter(task.models))
        report, private = self.training.end(task, state[first], counts)
        beside = {k: self.training.current_model(state[k]) for k in task.models if k != first}
        return replace(report, tensors={**report.tensors, **beside}), private
