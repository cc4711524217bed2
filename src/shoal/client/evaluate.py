"""Evaluation of the models that a client is served, by the method's `models_for` and `predict`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch.nn import functional as F

from shoal.types import Batch, Method, Phase, Predict, Report, Task, Tree


@dataclass(frozen=True)
class Evaluate:
    """Counts hits, predictions and samples of each class on one split and sums the loss.

    No other program uses the split "test".
    """

    predict: Predict
    num_classes: int
    batchable: bool = True  # predictions of a sample do not depend on other samples, not even with batch norm
    split: str = "test"
    batch_size: int = 1024  # affects speed only
    name: str = "evaluate"

    @classmethod
    def for_method(cls, method: Method) -> Evaluate:
        """Returns the program that evaluates a method on the test split."""
        return cls(method.predict, method.num_classes)

    @property
    def phases(self) -> tuple[Phase, ...]:
        return (Phase(self.split, 1, self.batch_size, self.step, shuffle=False),)

    def begin(self, task: Task, private: Tree) -> Tree:
        counts = torch.zeros(3, self.num_classes)  # hits, predictions and samples of each class
        return {"models": dict(task.models), "private": private, "counts": counts, "loss": torch.zeros(2)}

    def step(self, state: Tree, batch: Batch) -> Tree:
        logits = self.predict(state["models"], state["private"], batch.x)
        classes = torch.arange(self.num_classes, device=batch.y.device)
        predicted = (logits.argmax(-1)[:, None] == classes) * batch.w[:, None]  # [samples, classes]
        actual = (batch.y[:, None] == classes) * batch.w[:, None]
        counts = torch.stack([(predicted * actual).sum(0), predicted.sum(0), actual.sum(0)])
        loss = (F.cross_entropy(logits, batch.y, reduction="none") * batch.w).sum()
        return state | {
            "counts": state["counts"].to(counts.device) + counts,
            "loss": state["loss"].to(loss.device) + torch.stack([loss, batch.w.sum()]),
        }

    def end(self, task: Task, state: Tree, counts: Mapping[str, int]) -> tuple[Report, Tree | None]:
        hits, _, num_samples = state["counts"].sum(1).tolist()
        metrics = {"accuracy": (hits, num_samples), "loss": (float(state["loss"][0]), num_samples)}
        return Report({"classes": {"counts": state["counts"]}}, metrics, {self.split: counts[self.split]}), None
