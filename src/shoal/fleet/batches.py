"""The order of a client's rows: fixed by the task's seed, the same on every fleet."""

from __future__ import annotations

import torch
from torch import Tensor

from shoal.rng import derive_seed, generator
from shoal.types import Phase


def row_order(rows: int, phase: Phase, seed: int) -> Tensor:
    """[steps, batch_size] row numbers, epoch after epoch; -1 where the last batch of an epoch is short."""
    per_epoch = -(-rows // phase.batch_size)
    padding = torch.full((per_epoch * phase.batch_size - rows,), -1)
    g = generator(seed)
    passes = (
        torch.cat([torch.randperm(rows, generator=g) if phase.shuffle else torch.arange(rows), padding])
        for _ in range(phase.epochs)
    )
    order = [p.view(-1, phase.batch_size) for p in passes if rows]
    return torch.cat(order) if order else torch.empty((0, phase.batch_size), dtype=torch.int64)


def step_keys(steps: int, seed: int) -> Tensor:
    """One key per step: neighbouring keys give unrelated numbers (see rng.uniform)."""
    return torch.arange(steps) + derive_seed(seed, "keys")


def phase_seed(seed: int, phase: int) -> int:
    return derive_seed(seed, "phase", phase)
