"""Evaluation of exactly what a client is served: the method's `models_for` and `predict`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch.nn import functional as F

from shoal.types import Batch, Method, Phase, Predict, Report, Task, Tree


@dataclass(frozen=True)
class Evaluate:
    """Counts per class and the summed loss over one split. The only program that opens "test"."""

    predict: Predict
    num_classes: int
    batchable: bool = True  # as served, a row is its own affair, with batch norm too
    split: str = "test"
    batch_size: int = 1024  # large: nothing depends on it but speed
    name: str = "evaluate"

    @classmethod
    def for_method(cls, method: Method) -> Evaluate:
        return cls(method.predict, method.num_classes)

    @property
    def phases(self) -> tuple[Phase, ...]:
        return (Phase(self.split, 1, self.batch_size, self.step, shuffle=False),)

    def begin(self, task: Task, private: Tree) -> Tree:
        counts = torch.zeros(3, self.num_classes)  # hits, predicted and actual rows of each class
        return {"models": dict(task.models), "private": private, "counts": counts, "loss": torch.zeros(2)}

    def step(self, state: Tree, batch: Batch) -> Tree:
        logits = self.predict(state["models"], state["private"], batch.x)
        each = torch.arange(self.num_classes, device=batch.y.device)
        chosen = (logits.argmax(-1)[:, None] == each) * batch.w[:, None]  # [rows, classes]
        actual = (batch.y[:, None] == each) * batch.w[:, None]
        seen = torch.stack([(chosen * actual).sum(0), chosen.sum(0), actual.sum(0)])
        loss = (F.cross_entropy(logits, batch.y, reduction="none") * batch.w).sum()
        return state | {
            "counts": state["counts"].to(seen.device) + seen,
            "loss": state["loss"].to(loss.device) + torch.stack([loss, batch.w.sum()]),
        }

    def end(self, task: Task, state: Tree, counts: Mapping[str, int]) -> tuple[Report, Tree | None]:
        hits, _, rows = state["counts"].sum(1).tolist()
        metrics = {"accuracy": (hits, rows), "loss": (float(state["loss"][0]), rows)}
        return Report({"classes": {"counts": state["counts"]}}, metrics, {self.split: counts[self.split]}), None
