"""Where a client's rows lie among the features of a model: sums that add up over clients."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from shoal.models import Model
from shoal.types import Batch, Phase, Report, Task, Tree


@dataclass(frozen=True)
class ComputeFeatureMoments:
    """Of the received model's features h over the training rows: how many rows each class has, the sum of h over them,
    and the sum of h hᵀ over all. The last two leave divided by the number of rows."""

    model: Model
    max_features: int  # channels at most
    split: str = "train"  # what the client trains on
    name: str = "describe"
    batchable: bool = True  # as served, a row is its own affair

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
        each = torch.arange(self.model.num_classes, device=batch.y.device)
        held = (batch.y[:, None] == each) * batch.w[:, None]  # [rows, classes]
        return state | {
            "count": state["count"] + held.sum(0),
            "mean": state["mean"] + held.T @ h,
            "square": state["square"] + (batch.w[:, None] * h).T @ h,
        }

    def end(self, task: Task, state: Tree, counts: Mapping[str, int]) -> tuple[Report, Tree | None]:
        rows = max(1, counts["train"])
        told = {"count": state["count"], "mean": state["mean"] / rows, "square": state["square"] / rows}
        return Report({"moments": told}, {}, {"train": counts["train"]}), None
