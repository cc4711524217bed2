"""SPRE: the fraction of zeros of each channel of a ReLU over a client's samples (FedEPC, Sec. 3.2).

The clusterer of these vectors is in `clusterers/density`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from shoal.client.gaussian_mechanism import epsilon, gaussian_privacy_guarantee
from shoal.client.train import LocalTraining
from shoal.rng import derive_seed, generator
from shoal.types import Batch, HasOptions, Params, Phase, Report, Task, Tree, option

RELEASED_SPARSITY = "released sparsity"  # key of the private state


@dataclass(frozen=True)
class MeasureSparsity(HasOptions):
    """Reports the sparsity vector s of Eq. (2) after `adaptation.epochs` of training from the received model.

    Zeros are counted for each sample and averaged over samples (Eq. 1 is for one feature map only). Four vectors are
    sent: that of the adapted model, and those of the received model over all samples and over each half of them. The
    halves show the server which differences between clients are random. Vectors of adapted models could not show this,
    because separate training makes even clients with the same data differ.

    With noise the vectors are kept and sent again in later tasks, because new noise each time could be averaged away.
    """

    adaptation: LocalTraining
    layer: str = option(
        "last", "Measure the sparsity of this ReLU layer: last, its number counted from 1, or the name of its module."
    )
    noise_std: float = option(
        0.0,
        "Add Gaussian noise with this standard deviation to each reported sparsity vector. 0 adds no noise.",
        ge=0,
    )
    name: str = "represent"

    @cached_property
    def layer_index(self) -> int:
        """The index of the measured ReLU layer."""
        return self.adaptation.model.relu_index(self.layer)

    @cached_property
    def num_channels(self) -> int:
        """The number of channels of the measured layer, which is the length of a vector."""
        model = self.adaptation.model
        x = torch.zeros(2, *model.input_shape, device=model.device)
        return model.relu_output(model.init(0), x, self.layer_index).shape[1]

    @property
    def batchable(self) -> bool:
        return self.adaptation.batchable

    @property
    def phases(self) -> tuple[Phase, ...]:
        count = Phase("train", 1, 1024, self.step, shuffle=False)
        adapted = (*self.adaptation.phases, count) if self.adaptation.epochs else ()
        return (replace(count, on_end=self.store_received_zeros), *adapted)

    def begin(self, task: Task, private: Tree) -> Tree:
        state = self.adaptation.begin(task, private)
        zeros = torch.zeros(2, self.num_channels, device=state["loss"].device)
        return state | {
            "zeros": zeros,
            "received": zeros,
            "released": {k: private[k] for k in (RELEASED_SPARSITY,) if k in private},
        }

    def step(self, state: Tree, batch: Batch) -> Tree:
        zero = (
            self.adaptation.model.relu_output(state["params"] | state["rest"], batch.x, self.layer_index) == 0
        ).float()
        sparsity = zero.flatten(2).mean(-1) if zero.dim() > 2 else zero  # [samples, channels]: Eq. (1)
        is_odd = torch.arange(len(batch.w), device=batch.w.device) % 2
        halves = torch.stack([batch.w * (1 - is_odd), batch.w * is_odd])  # [2, samples]
        return state | {"zeros": state["zeros"] + halves @ sparsity}

    def store_received_zeros(self, state: Tree) -> Tree:
        """Returns the state between measuring the received model and adapting it."""
        return state | {"received": state["zeros"], "zeros": torch.zeros_like(state["zeros"])}

    def end(self, task: Task, state: Tree, counts: Mapping[str, int]) -> tuple[Report, Tree | None]:
        new_private: Tree | None = None
        if self.noise_std and RELEASED_SPARSITY in state["released"]:
            vectors = state["released"][RELEASED_SPARSITY]
        else:
            num_samples = counts["train"]
            adapted, received = state["zeros"].cpu().sum(0, keepdim=True), state["received"].cpu()
            exact = torch.cat(
                [adapted / max(1, num_samples), received / _half_sizes(num_samples).clamp(min=1)[:, None]]
            )  # Eq. (2)
            vectors = self.release_vectors(exact, num_samples, task.seed)
            new_private = {RELEASED_SPARSITY: vectors} if self.noise_std else None
        return Report({"sparsity": {"s": vectors}}, {}, {"train": counts["train"]}), new_private

    def sparsity_vector(self, model: Params, x: Tensor) -> Tensor:
        """The vector of a model as received, over rows without labels."""
        zero = (self.adaptation.model.relu_output(model, x, self.layer_index) == 0).float()
        return zero.flatten(2).mean(-1).mean(0) if zero.dim() > 2 else zero.mean(0)

    def release_vectors(self, exact: Tensor, num_samples: int, seed: int) -> Tensor:
        """Returns all four vectors from the adapted vector and those of both halves.

        Only these three get noise. The vector over all samples is the mean of the noisy halves, and without adaptation
        it is the adapted vector too, so neither reveals anything more.
        """
        noise = torch.randn(exact.shape, generator=generator(derive_seed(seed, "noise"))) if self.noise_std else 0.0
        noisy = exact + self.noise_std * noise
        noisy = noisy if num_samples > 1 else noisy[[0, 1, 1]]  # a single sample is sent as both halves
        received = (_half_sizes(num_samples) / max(1, num_samples)) @ noisy[1:]
        adapted = noisy[0] if self.adaptation.epochs else received
        return torch.stack([adapted, received, *noisy[1:]]).clamp(0, 1)

    def privacy_guarantee(self, num_train_samples: Sequence[int], num_tasks: int = 1) -> dict[str, float]:
        """Returns the guarantees of the noise, empty without noise.

        With adaptation no bound can be proved for the effect of one sample on the adapted vector, except its range. A
        client releases its vectors once for any number of tasks.
        """
        if not self.noise_std:
            return {}
        smallest, vectors = min(num_train_samples), 3 if self.adaptation.epochs else 2
        halves = halves_sensitivity(self.num_channels, smallest)
        record = math.hypot(halves, range_sensitivity(self.num_channels)) if self.adaptation.epochs else halves
        in_range = range_sensitivity(self.num_channels, vectors)
        guarantee = gaussian_privacy_guarantee(self.noise_std, smallest, record, in_range)
        return guarantee | {"record_epsilon_without_adaptation": epsilon(self.noise_std, halves)}


def _half_sizes(num_samples: int) -> Tensor:
    return torch.tensor([(num_samples + 1) // 2, num_samples // 2], dtype=torch.float32)


def halves_sensitivity(num_channels: int, num_samples: int) -> float:
    """Returns the largest L2 change of both halves' vectors together when one sample is replaced.

    The sample is in one half, perhaps the smaller, and counts between 0 and 1 in each channel. The model must not have
    been trained on the sample.
    """
    return math.sqrt(num_channels) / max(1, num_samples // 2)


def range_sensitivity(num_channels: int, num_vectors: int = 1) -> float:
    """Returns the largest L2 distance of vectors of fractions."""
    return math.sqrt(num_vectors * num_channels)
