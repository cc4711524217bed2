"""A model of the client's own, trained beside the shared one and never sent."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from shoal.client.choose import ChooseAndTrain
from shoal.client.train import LocalTraining
from shoal.types import Batch, Phase, Report, Task, Tree


@dataclass(frozen=True)
class TrainBoth:
    """The shared model as `shared` says, then the client's own goes on where it was; at first it is the first of the
    models that the client was ever sent."""

    shared: ChooseAndTrain
    own: LocalTraining
    name: str = "train"

    @property
    def batchable(self) -> bool:
        return self.shared.batchable

    @property
    def phases(self) -> tuple[Phase, ...]:
        (train,) = self.own.phases
        return (*self.shared.phases, replace(train, step=self.step))

    def begin(self, task: Task, private: Tree) -> Tree:
        first = private.get("model", task.models[min(task.models)])
        rest = {k: v for k, v in private.items() if k != "model"}
        own = self.own.begin(replace(task, models={"own": first}), {})
        return self.shared.begin(task, private) | {"own": own, "rest": rest}

    def step(self, s: Tree, b: Batch) -> Tree:
        return s | {"own": self.own.step(s["own"], b)}

    def end(self, task: Task, s: Tree, counts: Mapping[str, int]) -> tuple[Report, Tree | None]:
        report, _ = self.shared.end(task, s, counts)
        model = s["own"]["params"] | s["own"]["buffers"]
        return report, s["rest"] | {"model": {k: model[k] for k in sorted(model)}}
