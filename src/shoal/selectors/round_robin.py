"""Clients in turn: those who have waited longest come next (the cyclic selection of FedClusterEnsemble, paper 004).

A group stands in line. A round takes the first k who are there and sends them to the end, in the order in which they
stood. While the group stays as it is, this is the schedule i, i + 1, ... modulo its size: any |C| rounds in a row take
each member exactly k times. Whoever is there is passed by nobody who stands behind it, so that it waits |C| / k rounds
at most, however others come and go: newcomers stand behind all.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from shoal.errors import UserError
from shoal.selectors.sampling import Indices, available_indices, num_selected


def select_in_turn(turns: ArrayLike, available: ArrayLike, k: int) -> tuple[Indices, Indices]:
    """The k of those available with the lowest turns, the lower index first where turns are equal; and the turns after
    it, in which these are the highest."""
    turn = np.asarray(turns)
    if turn.ndim != 1 or (turn.size and turn.dtype.kind not in "iu"):
        raise UserError(f"turns is {turns!r}; it must hold one whole number per client")
    turn = turn.astype(np.int64)
    there = available_indices(available, len(turn))
    chosen = there[np.argsort(turn[there], kind="stable")[: num_selected(k, there)]]
    after = turn.copy()
    after[chosen] = turn.max(initial=-1) + 1 + np.arange(len(chosen))
    return np.sort(chosen), after


def num_selected_of(num_members: int, fraction: float) -> int:
    """How many of a group take part: one at least, where there is anybody."""
    return min(num_members, max(1, round(fraction * num_members)))
