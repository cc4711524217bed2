"""Where a client's rows of each class lie among the features of a model: what p(x|y) looks like from there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from shoal.models import Model
from shoal.types import Batch, HasOptions, Params, Phase, Report, Task, Tree, option


@dataclass(frozen=True)
class SumClassFeatures(HasOptions):
    """One look at the training rows with the received model; nothing is trained. Told are, of every other row and of
    the rest apart, how many are of each class and the sum of their features, and over all rows the sum of squared
    features. Features are what the last ReLUs give, of at most `width` channels (of a network without ReLUs its
    logits). The sum of a class with a single row in a half is that row's features."""

    model: Model
    max_features: int = option(
        256,
        "Compare clients in the shift probe by at most this many feature channels. The last ReLU layer is always used.",
        ge=1,
    )
    name: str = "probe"
    batchable: bool = True  # as served, a row is its own affair

    @property
    def phases(self) -> tuple[Phase, ...]:
        return (Phase("train", 1, 256, self.step, shuffle=False),)

    def begin(self, task: Task, private: Tree) -> Tree:
        received = next(iter(task.models.values()))
        blank = torch.zeros(1, *self.model.input_shape, device=self.model.device)
        with torch.no_grad():
            channels = self.features(received, blank).shape[1]
        shapes = {
            "count": (2, self.model.num_classes),
            "sum": (2, self.model.num_classes, channels),
            "square": (channels,),
        }
        return {"model": received} | {k: torch.zeros(shape, device=self.model.device) for k, shape in shapes.items()}

    def features(self, params: Params, x: Tensor) -> Tensor:
        return (
            self.model.features(params, x, self.max_features) if self.model.has_relu else self.model.predict(params, x)
        )

    def step(self, state: Tree, batch: Batch) -> Tree:
        h = self.features(state["model"], batch.x)
        each, odd = (
            torch.arange(self.model.num_classes, device=batch.y.device),
            torch.arange(len(batch.w), device=batch.w.device) % 2,
        )
        held = (batch.y[:, None] == each) * batch.w[:, None]  # [rows, classes]
        halves = torch.stack([held * (1 - odd)[:, None], held * odd[:, None]])  # [2, rows, classes]
        return state | {
            "count": state["count"] + halves.sum(1),
            "sum": state["sum"] + halves.transpose(1, 2) @ h,
            "square": state["square"] + batch.w @ h**2,
        }

    def end(self, task: Task, state: Tree, counts: Mapping[str, int]) -> tuple[Report, Tree | None]:
        told = {k: {k: state[k]} for k in ("count", "sum", "square")}
        return Report(told, {}, {"train": counts["train"]}), None
