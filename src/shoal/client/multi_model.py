"""Training of several received models on the same samples."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from shoal.client.train import LocalTraining
from shoal.types import Batch, Phase, Report, Task, Tree


@dataclass(frozen=True)
class TrainAllModels:
    """Trains every received model on the same batches and sends all of them back.

    The model with the name `main_name` is sent as "model", the others by their names. The order in which models arrive
    does not matter. The result for a model is the same as if it was trained alone.
    """

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
        return {k: self.training.step(model_state, batch) for k, model_state in state.items()}

    def end(self, task: Task, state: Tree, counts: Mapping[str, int]) -> tuple[Report, Tree | None]:
        main = self.main_name if self.main_name in task.models else next(iter(task.models))
        report, private = self.training.end(task, state[main], counts)
        others = {k: self.training.current_model(state[k]) for k in task.models if k != main}
        return replace(report, tensors={**report.tensors, **others}), private
