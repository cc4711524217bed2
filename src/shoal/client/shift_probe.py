"""Sums of a model's features for each class of a client, from which conditional shift is estimated.

Read `clusterers/conditional_shift` for what the server does with the sums.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from shoal.models import Model
from shoal.types import Batch, HasOptions, Params, Phase, Report, Task, Tree, option


@dataclass(frozen=True)
class SumClassFeatures(HasOptions):
    """Reports sums of the received model's features over the training samples, without training.

    The samples are divided into two halves (every other sample). For each half and each class the report has the number
    of samples and the sum of their features. For all samples it has the sum of squared features. Features are the
    outputs of the last ReLU layers, at most `max_features` channels, or the logits of a network without ReLUs. If a
    class has a single sample in a half, its sum is that sample's features.
    """

    model: Model
    max_features: int = option(
        256,
        "Compare clients by the last ReLU layer and by as many layers before it as have at most this many channels in "
        "total.",
        ge=1,
    )
    name: str = "probe"
    batchable: bool = True  # features of a sample do not depend on other samples

    @property
    def phases(self) -> tuple[Phase, ...]:
        return (Phase("train", 1, 256, self.step, shuffle=False),)

    def begin(self, task: Task, private: Tree) -> Tree:
        received = next(iter(task.models.values()))
        x = torch.zeros(1, *self.model.input_shape, device=self.model.device)
        with torch.no_grad():
            channels = self.features(received, x).shape[1]
        shapes = {
            "count": (2, self.model.num_classes),
            "sum": (2, self.model.num_classes, channels),
            "square": (channels,),
        }
        return {"model": received} | {k: torch.zeros(shape, device=self.model.device) for k, shape in shapes.items()}

    def features(self, params: Params, x: Tensor) -> Tensor:
        """Returns the features of samples, or the logits of a network without ReLUs."""
        if not self.model.has_relu:
            return self.model.predict(params, x)
        return self.model.features(params, x, self.max_features)

    def step(self, state: Tree, batch: Batch) -> Tree:
        h = self.features(state["model"], batch.x)
        classes = torch.arange(self.model.num_classes, device=batch.y.device)
        is_odd = torch.arange(len(batch.w), device=batch.w.device) % 2
        one_hot = (batch.y[:, None] == classes) * batch.w[:, None]  # [samples, classes]
        halves = torch.stack([one_hot * (1 - is_odd)[:, None], one_hot * is_odd[:, None]])  # [2, samples, classes]
        return state | {
            "count": state["count"] + halves.sum(1),
            "sum": state["sum"] + halves.transpose(1, 2) @ h,
            "square": state["square"] + batch.w @ h**2,
        }

    def end(self, task: Task, state: Tree, counts: Mapping[str, int]) -> tuple[Report, Tree | None]:
        sums = {k: {k: state[k]} for k in ("count", "sum", "square")}
        return Report(sums, {}, {"train": counts["train"]}), None
