"""Counts the floating-point operations of the steps that a client's program runs.

Torch counts them on the step itself, once for each program and shape. Two batches of different sizes separate the
operations per step from those per sample. The total grows linearly with the number of steps and of samples.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from shoal.types import Batch, Phase, Tree


class FlopCounts(NamedTuple):
    """The floating-point operations of a phase."""

    per_step: int
    per_sample: int  # in every epoch
    at_end: int
    precompute_per_sample: int  # once, before the first epoch

    def total(self, num_available: int, phase: Phase) -> int:
        """Returns the operations of all epochs of a client with this number of samples."""
        num_samples = phase.num_samples(num_available)
        steps = -(-num_samples // phase.batch_size)
        return (
            phase.epochs * (steps * self.per_step + num_samples * self.per_sample)
            + self.at_end
            + num_available * self.precompute_per_sample
        )


def count_flops(phase: Phase, state: Tree, x: Tensor) -> FlopCounts:
    """Returns the counts for the state of one client and inputs of the shape of `x`.

    Batches have two and three samples, because batch norm does not work with one.
    """
    precompute_flops, compute = 0, phase.precompute
    if compute is not None:
        two, three = (_count(lambda n=n: compute(state, _zero_batch(x, n).x)) for n in (2, 3))  # type: ignore[misc]
        precompute_flops, x = three - two, compute(state, _zero_batch(x, 2).x)
    two, three = (_count(lambda n=n: phase.step(state, _zero_batch(x, n))) for n in (2, 3))  # type: ignore[misc]
    return FlopCounts(3 * two - 2 * three, three - two, _count(lambda: phase.on_end(state)), precompute_flops)


def _count(work: Callable[[], object]) -> int:
    from torch.utils.flop_counter import FlopCounterMode

    # Counting must not use up random numbers of the global generator.
    with torch.random.fork_rng(devices=[]), FlopCounterMode(display=False) as counter:
        work()
    return counter.get_total_flops()


def _zero_batch(x: Tensor, num_samples: int) -> Batch:
    zeros = torch.zeros(num_samples, dtype=torch.long, device=x.device)
    inputs = torch.empty_strided((num_samples, *x.shape[1:]), x.stride(), dtype=x.dtype, device=x.device).zero_()
    return Batch(inputs, zeros, torch.ones(num_samples, device=x.device), zeros[0])
