"""Several models are received, and the one that fits the client's own rows best is its choice."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from shoal.client.train import LocalTraining, cross_entropy
from shoal.models import Model
from shoal.types import Batch, Params, Phase, Report, Task, Tree


@dataclass(frozen=True)
class Choose:
    """Which of the received models, by their sorted names, has the lowest loss over the client's rows, as served, or
    the most hits, and of those with equally many the lowest loss; of several, the first."""

    model: Model
    by: Literal["loss", "hits"] = "loss"
    split: str = "train"
    name: str = "choose"
    batchable: bool = True  # as served, a row is its own affair

    @property
    def phases(self) -> tuple[Phase, ...]:
        return (Phase(self.split, 1, 1024, self.step, shuffle=False),)

    def begin(self, task: Task, private: Tree) -> Tree:
        models = {name: task.models[name] for name in sorted(task.models)}
        zeros = torch.zeros(len(models), device=self.model.device)
        return {"models": models, "losses": zeros, **({"hits": zeros} if self.by == "hits" else {})}

    def step(self, s: Tree, b: Batch) -> Tree:
        """One model after the other: stacked they would be copied for every client."""
        logits = [self.model.predict(m, b.x) for m in s["models"].values()]
        losses = s["losses"] + torch.stack([cross_entropy(x, b) for x in logits])
        if self.by == "loss":
            return s | {"losses": losses}
        hits = torch.stack([((x.argmax(-1) == b.y) * b.w).sum() for x in logits])
        return s | {"losses": losses, "hits": s["hits"] + hits}

    def best(self, s: Tree) -> Tensor:
        losses: Tensor = s["losses"]
        if self.by == "hits":
            finite = losses.clamp(max=torch.finfo(losses.dtype).max)
            losses = torch.where(s["hits"] == s["hits"].amax(), finite, torch.inf)
        return losses.argmin()

    def chosen(self, s: Tree) -> Params:
        place, models = self.best(s), list(s["models"].values())
        return {k: torch.stack([m[k] for m in models]).index_select(0, place[None]).squeeze(0) for k in models[0]}

    def end(self, task: Task, state: Tree, counts: Mapping[str, int]) -> tuple[Report, Tree | None]:
        choice, rows = self.best(state), counts[self.split]
        loss = (float(state["losses"][choice]), float(rows))
        return Report({"choice": {"place": choice}}, {"loss": loss}, {"train": rows}), None


@dataclass(frozen=True)
class ChooseAndTrain:
    """The model of its choice is what the client trains."""

    training: LocalTraining
    by: Literal["loss", "hits"] = "loss"
    split: str = "train"  # on which models are compared
    name: str = "train"

    @property
    def batchable(self) -> bool:
        return self.training.batchable

    @property
    def choice(self) -> Choose:
        return Choose(self.training.model, self.by, self.split)

    @property
    def phases(self) -> tuple[Phase, ...]:
        (compare,) = self.choice.phases
        return (replace(compare, on_end=self.take), *self.training.phases)

    def begin(self, task: Task, private: Tree) -> Tree:
        return self.training.begin(task, private) | self.choice.begin(task, private)

    def take(self, s: Tree) -> Tree:
        chosen = self.choice.chosen(s)
        kept = {k: v for k, v in s.items() if k not in ("models", "losses", "hits")}
        return kept | self.training.start_at(chosen, towards=chosen) | {"place": self.choice.best(s)}

    def end(self, task: Task, state: Tree, counts: Mapping[str, int]) -> tuple[Report, Tree | None]:
        report, private = self.training.end(task, state, counts)
        return replace(report, tensors={**report.tensors, "choice": {"place": state["place"]}}), private
