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


class Work(NamedTuple):
    per_step: int
    per_row: int
    at_end: int
    inputs: int  # of a row, once

    def flops(self, rows: int, phase: Phase) -> int:
        taken = phase.taken(rows)
        steps = -(-taken // phase.batch_size)
        return phase.epochs * (steps * self.per_step + taken * self.per_row) + self.at_end + rows * self.inputs


def work_of(phase: Phase, s: Tree, x: Tensor) -> Work:
    """For one client's state `s` and inputs like `x`. Two rows at least: batch norm knows no single one."""
    inputs, compute = 0, phase.inputs
    if compute is not None:
        two, three = (_counted(lambda n=n: compute(s, _blank(x, n).x)) for n in (2, 3))  # type: ignore[misc]
        inputs, x = three - two, compute(s, _blank(x, 2).x)
    two, three = (_counted(lambda n=n: phase.step(s, _blank(x, n))) for n in (2, 3))  # type: ignore[misc]
    return Work(3 * two - 2 * three, three - two, _counted(lambda: phase.finish(s)), inputs)


def _counted(work: Callable[[], object]) -> int:
    from torch.utils.flop_counter import FlopCounterMode

    with torch.random.fork_rng(devices=[]), FlopCounterMode(display=False) as counter:  # must not use up chance
        work()
    return counter.get_total_flops()


def _blank(x: Tensor, rows: int) -> Batch:
    zeros = torch.zeros(rows, dtype=torch.long, device=x.device)
    inputs = torch.empty_strided((rows, *x.shape[1:]), x.stride(), dtype=x.dtype, device=x.device).zero_()
    return Batch(inputs, zeros, torch.ones(rows, device=x.device), zeros[0])
