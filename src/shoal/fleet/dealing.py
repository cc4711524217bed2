"""How a plan is cut into pieces: which clients are stacked together.

Stacking other clients together rounds differently. The pieces therefore follow from the plan, the clients' data and
one recorded number, and never from the number of workers: a piece can be done by any worker, again, or twice, and its
reports are the same bytes.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping

from shoal.types import ClientData, ClientId, Plan, Task

PIECE_CLIENTS = 64  # enough to stack, few enough that messages stay small and no worker waits long for another


def deal(plan: Plan, data: Mapping[ClientId, ClientData], pieces: int) -> list[dict[ClientId, Task]]:
    """Deals the clients of a plan to pieces of about the same work.

    Parameters
    ----------
    plan
        The tasks, and the program whose passes over the data are the work.
    data
        The clients' data, of which only the numbers of samples count.
    pieces
        Into how many pieces a plan is cut. A plan with fewer clients has one piece for each of them. A plan with more
        than 64 clients for each piece is cut into the smallest multiple of `pieces` that is enough.

    Returns
    -------
    list
        The tasks of each piece: at least one and at most 64.
    """
    assert plan.program is not None
    passes = [(phase.split, phase.epochs) for phase in plan.program.phases]
    work = {c: sum(n * len(data[c][split].y) for split, n in passes) for c in plan.tasks}
    count = min(len(work), pieces * -(-len(work) // (pieces * PIECE_CLIENTS)))
    dealt: list[dict[ClientId, Task]] = [{} for _ in range(count)]
    open_pieces = [(0, i) for i in range(count)]  # a heap: largest clients first, each to the piece with the least work
    for client in sorted(work, key=lambda c: (-work[c], c)):
        least, i = heapq.heappop(open_pieces)
        dealt[i][client] = plan.tasks[client]
        if len(dealt[i]) < PIECE_CLIENTS:
            heapq.heappush(open_pieces, (least + work[client], i))
    return [piece for piece in dealt if piece]  # clients without any work all go to the first open piece
