"""Round-robin selection: the clients that have waited longest are next (Freitas et al. 2025).

The clients of a cluster C form a queue. A round selects the first k present clients and moves them to the end in the
same order. While the cluster does not change, this is the schedule i, i + 1, ... modulo |C|, so that any |C| rounds in
a row select each member exactly k times. New clients start at the end of the queue. A client that is always present
is never overtaken and waits at most |C| / k rounds.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from shoal.errors import UserError
from shoal.selectors.sampling import Indices, available_indices, num_selected


def select_in_turn(turns: ArrayLike, available: ArrayLike, k: int) -> tuple[Indices, Indices]:
    """Returns the k available clients with the lowest turns, and the new turns, in which these have the highest.

    The lower index wins a tie.
    """
    turn = np.asarray(turns)
    if turn.ndim != 1 or (turn.size and turn.dtype.kind not in "iu"):
        raise UserError(f"turns is {turns!r}; it must hold one whole number per client")
    turn = turn.astype(np.int64)
    present = available_indices(available, len(turn))
    selected = present[np.argsort(turn[present], kind="stable")[: num_selected(k, present)]]
    new_turns = turn.copy()
    new_turns[selected] = turn.max(initial=-1) + 1 + np.arange(len(selected))
    return np.sort(selected), new_turns


def num_selected_of(num_members: int, fraction: float) -> int:
    """Returns how many clients of a cluster are selected, at least one unless the cluster is empty."""
    return min(num_members, max(1, round(fraction * num_members)))
