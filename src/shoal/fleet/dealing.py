"""Cuts a plan into pieces. The clients of a piece are stacked together.

Rounding errors depend on which clients are stacked together. The pieces therefore follow from the plan, the clients'
data and one recorded number, and never from the number of workers. Any worker can do a piece, also a second time, and
its reports are the same bytes.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping

from shoal.types import ClientData, ClientId, Plan, Task

PIECE_CLIENTS = 64  # a good size for a stack; larger pieces make messages large and let workers wait for each other


def deal(plan: Plan, data: Mapping[ClientId, ClientData], pieces: int) -> list[dict[ClientId, Task]]:
    """Deals the clients of a plan to pieces of about the same work.

    Parameters
    ----------
    plan
        The tasks, and the program whose epochs are the work.
    data
        The clients' data. Only the numbers of samples are used.
    pieces
        The number of pieces. A plan with fewer clients has one piece for each client. A plan with more than 64 clients
        per piece is cut into the smallest multiple of `pieces` that is large enough.

    Returns
    -------
    list
        The tasks of each piece. A piece has at least one task and at most 64.
    """
    assert plan.program is not None
    epochs_of_split = [(phase.split, phase.epochs) for phase in plan.program.phases]
    work = {c: sum(n * len(data[c][split].y) for split, n in epochs_of_split) for c in plan.tasks}
    num_pieces = min(len(work), pieces * -(-len(work) // (pieces * PIECE_CLIENTS)))
    tasks_by_piece: list[dict[ClientId, Task]] = [{} for _ in range(num_pieces)]
    # The clients with the most work come first, and each goes to the piece with the least work. The pieces are a heap.
    open_pieces = [(0, i) for i in range(num_pieces)]
    for client in sorted(work, key=lambda c: (-work[c], c)):
        piece_work, i = heapq.heappop(open_pieces)
        tasks_by_piece[i][client] = plan.tasks[client]
        if len(tasks_by_piece[i]) < PIECE_CLIENTS:
            heapq.heappush(open_pieces, (piece_work + work[client], i))
    return [tasks for tasks in tasks_by_piece if tasks]  # clients without work are all in the first pieces
