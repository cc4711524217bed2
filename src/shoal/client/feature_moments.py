"""Moments of a model's features over a client's samples: sums that can be added over clients."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from shoal.models import Model
from shoal.types import Batch, Phase, Report, Task, Tree


@dataclass(frozen=True)
class ComputeFeatureMoments:
    """Reports moments of the received model's features h over the training samples.

    These are the number of samples of each class, the sum of h for each class, and the sum of h hᵀ over all samples.
    Both sums are divided by the client's number of samples.
    """

    model: Model
    max_features: int  # largest number of feature channels
    split: str = "train"  # the samples that the client trains on
    name: str = "describe"
    batchable: bool = True  # features of a sample do not depend on other samples

    @property
    def phases(self) -> tuple[Phase, ...]:
        return (Phase(self.split, 1, 256, self.step, shuffle=False),)

    def begin(self, task: Task, private: Tree) -> Tree:
        received = next(iter(task.models.values()))
        with torch.no_grad():
            x = torch.zeros(1, *self.model.input_shape, device=self.model.device)
            channels = self.model.features(received, x, self.max_features).shape[1]
        shapes = {"count": (), "mean": (channels,)}
        zeros = {k: torch.zeros(self.model.num_classes, *shape, device=x.device) for k, shape in shapes.items()}
        return {"model": received, **zeros, "square": torch.zeros(channels, channels, device=x.device)}

    def step(self, state: Tree, batch: Batch) -> Tree:
        h = self.model.features(state["model"], batch.x, self.max_features)
        classes = torch.arange(self.model.num_classes, device=batch.y.device)
        one_hot = (batch.y[:, None] == classes) * batch.w[:, None]  # [samples, classes]
        return state | {
            "count": state["count"] + one_hot.sum(0),
            "mean": state["mean"] + one_hot.T @ h,
            "square": state["square"] + (batch.w[:, None] * h).T @ h,
        }

    def end(self, task: Task, state: Tree, counts: Mapping[str, int]) -> tuple[Report, Tree | None]:
        num_samples = max(1, counts["train"])
        moments = {
            "count": state["count"],
            "mean": state["mean"] / num_samples,
            "square": state["square"] / num_samples,
        }
        return Report({"moments": moments}, {}, {"train": counts["train"]}), None
