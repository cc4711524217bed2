"""How good a model is on a client's own training rows: asked for, or told with what was trained."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from shoal.client.train import LocalTraining, cross_entropy
from shoal.models import Model
from shoal.types import Batch, Params, Phase, Report, Task, Tree

BATCH_SIZE = 1024


def hits_and_loss(model: Model, params: Params, batch: Batch) -> Tensor:
    """Hits and loss of a batch, summed, and its rows."""
    logits = model.predict(params, batch.x)
    hits = ((logits.argmax(-1) == batch.y) * batch.w).sum()
    return torch.stack([hits, cross_entropy(logits, batch), batch.w.sum()])


def to_metrics(total: Tensor) -> dict[str, tuple[float, float]]:
    hits, loss, rows = total.tolist()
    return {"accuracy": (hits, rows), "loss_after": (loss, rows)}


@dataclass(frozen=True)
class MeasureAccuracy:
    """Accuracy and loss of the client's own model, or of the received one where it has none."""

    model: Model
    split: str = "train"  # what the client trains on
    name: str = "measure"
    batchable: bool = True  # as served, a row is its own affair

    @property
    def phases(self) -> tuple[Phase, ...]:
        return (Phase(self.split, 1, BATCH_SIZE, self.step, shuffle=False),)

    def begin(self, task: Task, private: Tree) -> Tree:
        (received,) = task.models.values()
        return {"model": private.get("model", received), "seen": torch.zeros(3, device=self.model.device)}

    def step(self, state: Tree, batch: Batch) -> Tree:
        return state | {"seen": state["seen"] + hits_and_loss(self.model, state["model"], batch)}

    def end(self, task: Task, state: Tree, counts: Mapping[str, int]) -> tuple[Report, Tree | None]:
        return Report({}, to_metrics(state["seen"]), {"train": counts[self.split]}), None


@dataclass(frozen=True)
class MeasuredTraining(LocalTraining):
    """Training after which the client tells how good the result is on the rows that it was trained on."""

    @property
    def phases(self) -> tuple[Phase, ...]:
        return (*super().phases, Phase(self.split, 1, BATCH_SIZE, self.count_hits, shuffle=False))

    def begin(self, task: Task, private: Tree) -> Tree:
        return super().begin(task, private) | {"seen": torch.zeros(3, device=self.model.device)}

    def count_hits(self, state: Tree, batch: Batch) -> Tree:
        return state | {"seen": state["seen"] + hits_and_loss(self.model, state["params"] | state["rest"], batch)}

    def end(self, task: Task, state: Tree, counts: Mapping[str, int]) -> tuple[Report, Tree | None]:
        report, private = super().end(task, state, counts)
        return replace(report, metrics={**report.metrics, **to_metrics(state["seen"])}), private
