"""The order of a client's rows, fixed by the task's seed and the same on every fleet; and quick access to rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from shoal.rng import derive_seed, generator
from shoal.types import Phase


def epoch_indices(num_available: int, phase: Phase, seed: int) -> Iterator[Tensor]:
    """Row numbers, epoch after epoch."""
    shuffler, num_samples = generator(seed), phase.num_samples(num_available)
    subset = (
        torch.randperm(num_available, generator=shuffler)[:num_samples].sort().values
        if num_samples < num_available
        else torch.arange(num_available)
    )
    for _ in range(phase.epochs if num_available else 0):
        yield subset[torch.randperm(num_samples, generator=shuffler)] if phase.shuffle else subset


def batch_indices(num_available: int, phase: Phase, seed: int) -> Tensor:
    """[steps, batch_size] row numbers; -1 where the last batch of an epoch is short."""
    num_samples = phase.num_samples(num_available)
    per_epoch = -(-num_samples // phase.batch_size)
    order = torch.full((phase.epochs if num_available else 0, per_epoch * phase.batch_size), -1)
    for epoch, numbers in enumerate(epoch_indices(num_available, phase, seed)):
        order[epoch, :num_samples] = numbers
    return order.view(-1, phase.batch_size)


def step_keys(num_steps: int, seed: int) -> Tensor:
    """One key per step: neighbouring keys give unrelated numbers (see rng.uniform)."""
    return torch.arange(num_steps) + derive_seed(seed, "keys")


def phase_seed(seed: int, phases: Sequence[Phase], phase_index: int) -> int:
    """Passes in order use no chance, so they are not counted: whoever looks at its rows before it trains, trains as if
    it had not."""
    return derive_seed(seed, "phase", sum(phase.shuffle for phase in phases[:phase_index]))


def index_reader(x: Tensor) -> Callable[[Tensor], Tensor]:
    """`x[rows]` for row numbers of any shape, several times as fast, with images' channels still last in memory."""
    if x.dim() == 4 and x.is_contiguous(memory_format=torch.channels_last):
        take = index_reader(x.permute(0, 2, 3, 1))
        return lambda rows: take(rows).movedim(-1, -3)
    flat, shape = x.reshape(len(x), -1) if x.dim() > 1 and x.numel() else x, x.shape[1:]
    return lambda rows: flat.index_select(0, rows.reshape(-1)).view(*rows.shape, *shape)
