"""The order of a client's rows, fixed by the task's seed and the same on every fleet; and quick access to rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from shoal.rng import derive_seed, generator
from shoal.types import Phase


def passes(rows: int, phase: Phase, seed: int) -> Iterator[Tensor]:
    """Row numbers, epoch after epoch."""
    g, taken = generator(seed), phase.taken(rows)
    drawn = torch.randperm(rows, generator=g)[:taken].sort().values if taken < rows else torch.arange(rows)
    for _ in range(phase.epochs if rows else 0):
        yield drawn[torch.randperm(taken, generator=g)] if phase.shuffle else drawn


def row_order(rows: int, phase: Phase, seed: int) -> Tensor:
    """[steps, batch_size] row numbers; -1 where the last batch of an epoch is short."""
    taken = phase.taken(rows)
    per_epoch = -(-taken // phase.batch_size)
    order = torch.full((phase.epochs if rows else 0, per_epoch * phase.batch_size), -1)
    for epoch, numbers in enumerate(passes(rows, phase, seed)):
        order[epoch, :taken] = numbers
    return order.view(-1, phase.batch_size)


def step_keys(steps: int, seed: int) -> Tensor:
    """One key per step: neighbouring keys give unrelated numbers (see rng.uniform)."""
    return torch.arange(steps) + derive_seed(seed, "keys")


def phase_seed(seed: int, phases: Sequence[Phase], number: int) -> int:
    """Passes in order use no chance, so they are not counted: whoever looks at its rows before it trains, trains as if
    it had not."""
    return derive_seed(seed, "phase", sum(phase.shuffle for phase in phases[:number]))


def taker(x: Tensor) -> Callable[[Tensor], Tensor]:
    """`x[rows]` for row numbers of any shape, several times as fast, with images' channels still last in memory."""
    if x.dim() == 4 and x.is_contiguous(memory_format=torch.channels_last):
        take = taker(x.permute(0, 2, 3, 1))
        return lambda rows: take(rows).movedim(-1, -3)
    flat, shape = x.reshape(len(x), -1) if x.dim() > 1 and x.numel() else x, x.shape[1:]
    return lambda rows: flat.index_select(0, rows.reshape(-1)).view(*rows.shape, *shape)
