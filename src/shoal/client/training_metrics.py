"""Accuracy and loss of a model on the client's training samples, alone or together with training."""

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
    """Returns the number of hits, the summed loss and the number of samples of a batch."""
    logits = model.predict(params, batch.x)
    hits = ((logits.argmax(-1) == batch.y) * batch.w).sum()
    return torch.stack([hits, cross_entropy(logits, batch), batch.w.sum()])


def to_metrics(total: Tensor) -> dict[str, tuple[float, float]]:
    """Returns the metrics of a report from the summed results of `hits_and_loss`."""
    hits, loss, num_samples = total.tolist()
    return {"accuracy": (hits, num_samples), "loss_after": (loss, num_samples)}


@dataclass(frozen=True)
class MeasureAccuracy:
    """Reports accuracy and loss of the personal model, or of the received model if the client has no personal one."""

    model: Model
    split: str = "train"  # the samples that the client trains on
    name: str = "measure"
    batchable: bool = True  # predictions of a sample do not depend on other samples

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
    """Local training that also reports accuracy and loss of the trained model on its training samples."""

    @property
    def phases(self) -> tuple[Phase, ...]:
        return (*super().phases, Phase(self.split, 1, BATCH_SIZE, self.count_hits, shuffle=False))

    def begin(self, task: Task, private: Tree) -> Tree:
        return super().begin(task, private) | {"seen": torch.zeros(3, device=self.model.device)}

    def count_hits(self, state: Tree, batch: Batch) -> Tree:
        """Returns the state with the hits and the loss of a batch added."""
        return state | {"seen": state["seen"] + hits_and_loss(self.model, state["params"] | state["rest"], batch)}

    def end(self, task: Task, state: Tree, counts: Mapping[str, int]) -> tuple[Report, Tree | None]:
        report, private = super().end(task, state, counts)
        return replace(report, metrics={**report.metrics, **to_metrics(state["seen"])}), private
