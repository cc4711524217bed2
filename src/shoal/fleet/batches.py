"""The order of a client's samples, and fast access to samples by index.

The order follows from the seed of the task, so it is the same in every fleet.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from shoal.rng import derive_seed, generator
from shoal.types import Phase


def epoch_indices(num_available: int, phase: Phase, seed: int) -> Iterator[Tensor]:
    """Yields the sample indices of each epoch."""
    shuffler, num_samples = generator(seed), phase.num_samples(num_available)
    subset = (
        torch.randperm(num_available, generator=shuffler)[:num_samples].sort().values
        if num_samples < num_available
        else torch.arange(num_available)
    )
    for _ in range(phase.epochs if num_available else 0):
        yield subset[torch.randperm(num_samples, generator=shuffler)] if phase.shuffle else subset


def batch_indices(num_available: int, phase: Phase, seed: int) -> Tensor:
    """Returns the sample indices of all steps, as [steps, batch_size]. An index of -1 is padding."""
    num_samples = phase.num_samples(num_available)
    per_epoch = -(-num_samples // phase.batch_size)
    order = torch.full((phase.epochs if num_available else 0, per_epoch * phase.batch_size), -1)
    for epoch, indices in enumerate(epoch_indices(num_available, phase, seed)):
        order[epoch, :num_samples] = indices
    return order.view(-1, phase.batch_size)


def step_keys(num_steps: int, seed: int) -> Tensor:
    """Returns a key for each step. Successive keys give unrelated random numbers (see `shoal.rng.uniform`)."""
    return torch.arange(num_steps) + derive_seed(seed, "keys")


def phase_seed(seed: int, phases: Sequence[Phase], phase_index: int) -> int:
    """Returns the seed of a phase, which depends on the number of earlier phases that shuffle.

    Phases without shuffling use no random numbers. They are not counted, so a program that goes over the samples before
    training trains as if it had not.
    """
    return derive_seed(seed, "phase", sum(phase.shuffle for phase in phases[:phase_index]))


def index_reader(x: Tensor) -> Callable[[Tensor], Tensor]:
    """Returns a function that computes `x[indices]`, for indices of any shape, several times as fast.

    Images whose channels are last in memory keep that layout.
    """
    if x.dim() == 4 and x.is_contiguous(memory_format=torch.channels_last):
        read_channels_last = index_reader(x.permute(0, 2, 3, 1))
        return lambda indices: read_channels_last(indices).movedim(-1, -3)
    flat, shape = x.reshape(len(x), -1) if x.dim() > 1 and x.numel() else x, x.shape[1:]
    return lambda indices: flat.index_select(0, indices.reshape(-1)).view(*indices.shape, *shape)
