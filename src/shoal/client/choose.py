"""Several models are received, and the one that fits the client's own rows best is its choice."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch

from shoal.client.train import LocalTraining, cross_entropy
from shoal.models import Model
from shoal.types import FIXED, Batch, Phase, Report, Task, Tree


@dataclass(frozen=True)
class Choose:
    """Which of the received models, by their sorted names, has the lowest loss over the client's training rows, as
    served; of several, the first."""

    model: Model
    name: str = "choose"
    batchable: bool = field(default=True, metadata=FIXED)  # as served, a row is its own affair

    @property
    def phases(self) -> tuple[Phase, ...]:
        return (Phase("train", 1, 1024, self.step, shuffle=False),)

    def begin(self, task: Task, private: Tree) -> Tree:
        models = {name: task.models[name] for name in sorted(task.models)}
        return {"models": models, "losses": torch.zeros(len(models), device=self.model.device)}

    def step(self, s: Tree, b: Batch) -> Tree:
        """One model after the other: stacked they would be copied for every client."""
        losses = [cross_entropy(self.model.predict(m, b.x), b) for m in s["models"].values()]
        return s | {"losses": s["losses"] + torch.stack(losses)}

    def end(self, task: Task, s: Tree, counts: Mapping[str, int]) -> tuple[Report, Tree | None]:
        choice, rows = s["losses"].argmin(), counts["train"]
        loss = (float(s["losses"][choice]), float(rows))
        return Report({"choice": {"place": choice}}, {"loss": loss}, {"train": rows}), None


@dataclass(frozen=True)
class ChooseAndTrain:
    """The model of its choice is what the client trains."""

    training: LocalTraining
    name: str = "train"

    @property
    def batchable(self) -> bool:
        return self.training.batchable

    @property
    def choice(self) -> Choose:
        return Choose(self.training.model)

    @property
    def phases(self) -> tuple[Phase, ...]:
        (compare,) = self.choice.phases
        return (replace(compare, finish=self.take), *self.training.phases)

    def begin(self, task: Task, private: Tree) -> Tree:
        return self.training.begin(task, private) | self.choice.begin(task, private)

    def take(self, s: Tree) -> Tree:
        place, models = s["losses"].argmin(), list(s["models"].values())
        chosen = {k: torch.stack([m[k] for m in models]).index_select(0, place[None]).squeeze(0) for k in models[0]}
        kept = {k: v for k, v in s.items() if k not in ("models", "losses")}
        return kept | self.training.start_at(chosen, towards=chosen) | {"place": place}

    def end(self, task: Task, s: Tree, counts: Mapping[str, int]) -> tuple[Report, Tree | None]:
        report, private = self.training.end(task, s, counts)
        return replace(report, tensors={**report.tensors, "choice": {"place": s["place"]}}), private
