"""Programs without training: the loss or the gradient of a received model, and samples that a client shares."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch.func import grad
from torch.nn import functional as F

from shoal.client.sgd import squared_norm
from shoal.client.train import cross_entropy
from shoal.models import Model
from shoal.types import Batch, HasOptions, Params, Phase, Report, Task, Tree, option


@dataclass(frozen=True)
class LossProbe:
    """Reports the loss of the received model on the client's training samples."""

    model: Model
    name: str = "probe"
    batchable: bool = True  # the loss of a sample does not depend on other samples

    @property
    def phases(self) -> tuple[Phase, ...]:
        return (Phase("train", 1, 1024, self.step, shuffle=False),)

    def begin(self, task: Task, private: Tree) -> Tree:
        return {"model": next(iter(task.models.values())), "loss": torch.zeros(2)}

    def step(self, state: Tree, batch: Batch) -> Tree:
        total = cross_entropy(self.model.predict(state["model"], batch.x), batch)
        return state | {"loss": state["loss"].to(total.device) + torch.stack([total, batch.w.sum()])}

    def end(self, task: Task, state: Tree, counts: Mapping[str, int]) -> tuple[Report, Tree | None]:
        total, num_samples = state["loss"].tolist()
        return Report({}, {"loss": (total, num_samples)}, {"train": counts["train"]}), None


@dataclass(frozen=True)
class GradientProbe:
    """Reports the gradient of the client's loss at the received model without dropout, and its variance over batches.

    The variance is 0 for a client with one batch.
    """

    model: Model
    batch_size: int = 64
    name: str = "probe"
    batchable: bool = True

    @property
    def phases(self) -> tuple[Phase, ...]:
        return (Phase("train", 1, self.batch_size, self.step),)

    def begin(self, task: Task, private: Tree) -> Tree:
        model = next(iter(task.models.values()))
        params = {k: model[k] for k in self.model.trainable}
        return {
            "params": params,
            "buffers": {k: v for k, v in model.items() if k not in params},
            "gradient_sum": {k: torch.zeros_like(p) for k, p in params.items()},  # weighted by samples
            "squares": torch.zeros(2),  # squared norms of the batches' gradients times samples, and samples
        }

    def objective(self, params: Params, state: Tree, batch: Batch) -> torch.Tensor:
        """Returns the mean loss of a batch."""
        return cross_entropy(self.model.predict(params | state["buffers"], batch.x), batch) / batch.w.sum().clamp(min=1)

    def step(self, state: Tree, batch: Batch) -> Tree:
        gradients = grad(self.objective)(state["params"], state, batch)
        num_samples, square = batch.w.sum(), squared_norm(gradients)
        return state | {
            "gradient_sum": {k: total + num_samples * gradients[k] for k, total in state["gradient_sum"].items()},
            "squares": state["squares"].to(square.device) + torch.stack([num_samples * square, num_samples]),
        }

    def end(self, task: Task, state: Tree, counts: Mapping[str, int]) -> tuple[Report, Tree | None]:
        total, num_samples = state["squares"].tolist()
        mean = {k: g / max(1.0, num_samples) for k, g in state["gradient_sum"].items()}
        variance = max(0.0, total / max(1.0, num_samples) - float(squared_norm(mean)))  # E|g|^2 - |E g|^2
        report = Report({"gradient": mean}, {"variance": (variance, 1.0)}, {"train": counts["train"]})
        return report, None


@dataclass(frozen=True)
class SendSamples(HasOptions):
    """Reports some of the client's samples, with their labels if `sends_labels` is True.

    A server without data can use them to evaluate models. They are raw data, so this gives up the clients' privacy.
    """

    input_shape: tuple[int, ...]
    num_samples: int = option(
        5, "Each client sends this many of its training samples to the server, drawn at random.", ge=1
    )
    sends_labels: bool = False
    split: str = "train"  # the samples that the method trains on; no others may be sent
    name: str = "share"
    batchable: bool = True

    @property
    def phases(self) -> tuple[Phase, ...]:
        return (Phase(self.split, 1, self.num_samples, self.step),)

    def begin(self, task: Task, private: Tree) -> Tree:
        return {
            "x": torch.zeros(self.num_samples, *self.input_shape),
            "y": torch.zeros(self.num_samples, dtype=torch.int64),
            "w": torch.zeros(self.num_samples),
        }

    def step(self, state: Tree, batch: Batch) -> Tree:
        """Returns the state with the first batch of a shuffled epoch, padded if it is short."""
        missing = self.num_samples - len(batch.w)
        is_first = state["w"].sum() == 0
        x = F.pad(batch.x.flatten(1), (0, 0, 0, missing)).view(self.num_samples, *self.input_shape)
        padded = {"x": x, "y": F.pad(batch.y, (0, missing)), "w": F.pad(batch.w, (0, missing))}
        return {k: torch.where(is_first, v, state[k]) for k, v in padded.items()}

    def end(self, task: Task, state: Tree, counts: Mapping[str, int]) -> tuple[Report, Tree | None]:
        sent = {"rows": {"w": state["w"], "x": state["x"]}} | (
            {"labels": {"y": state["y"]}} if self.sends_labels else {}
        )
        return Report(sent, {}, {"train": counts[self.split]}), None
