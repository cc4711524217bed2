"""How much a client computes: floating-point operations of the steps that its program really runs.

Counted by torch on the step itself, once for every program and shape. Operations per batch and per row are told
apart by running two batches of different size; both grow linearly in a client's rows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from shoal.types import Batch, Phase, Tree


class FlopCounts(NamedTuple):
    per_step: int
    per_sample: int
    at_end: int
    precompute_per_sample: int  # of a row, once

    def total(self, num_available: int, phase: Phase) -> int:
        taken = phase.num_samples(num_available)
        steps = -(-taken // phase.batch_size)
        return (
            phase.epochs * (steps * self.per_step + taken * self.per_sample)
            + self.at_end
            + num_available * self.precompute_per_sample
        )


def count_flops(phase: Phase, state: Tree, x: Tensor) -> FlopCounts:
    """For one client's state `s` and inputs like `x`. Two rows at least: batch norm knows no single one."""
    inputs, compute = 0, phase.precompute
    if compute is not None:
        two, three = (_count(lambda n=n: compute(state, _zero_batch(x, n).x)) for n in (2, 3))  # type: ignore[misc]
        inputs, x = three - two, compute(state, _zero_batch(x, 2).x)
    two, three = (_count(lambda n=n: phase.step(state, _zero_batch(x, n))) for n in (2, 3))  # type: ignore[misc]
    return FlopCounts(3 * two - 2 * three, three - two, _count(lambda: phase.on_end(state)), inputs)


def _count(work: Callable[[], object]) -> int:
    from torch.utils.flop_counter import FlopCounterMode

    with torch.random.fork_rng(devices=[]), FlopCounterMode(display=False) as counter:  # must not use up chance
        work()
    return counter.get_total_flops()


def _zero_batch(x: Tensor, num_samples: int) -> Batch:
    zeros = torch.zeros(num_samples, dtype=torch.long, device=x.device)
    inputs = torch.empty_strided((num_samples, *x.shape[1:]), x.stride(), dtype=x.dtype, device=x.device).zero_()
    return Batch(inputs, zeros, torch.ones(num_samples, device=x.device), zeros[0])
