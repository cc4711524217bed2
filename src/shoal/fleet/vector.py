"""Many clients in one tensor: their states are stacked on a leading axis and a step runs on all at once.

Clients of unequal size are padded with rows of weight 0 and with steps that change nothing, so which
clients are stacked together never changes a result (beyond the last bits of floating point).
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.func import vmap

from shoal import tree
from shoal.fleet.batches import phase_seed, row_order, step_keys
from shoal.fleet.plain import PlainFleet, blaming, counts_of
from shoal.types import Batch, ClientData, ClientId, ClientProgram, Examples, Phase, Plan, Report, Task, Tree

log = logging.getLogger(__name__)

STACK_BYTES = 256 * 2**20  # of client state in one stack: small enough for any laptop, large enough to pay
STACK_CLIENTS = 128


class VectorFleet(PlainFleet):
    def __init__(
        self,
        data: Mapping[ClientId, ClientData],
        private: MutableMapping[ClientId, Tree] | None = None,
        stack_clients: int = STACK_CLIENTS,
    ) -> None:
        super().__init__(data, private)
        self.stack_clients = stack_clients
        self._refused: set[str] = set()  # programs that cannot be stacked

    def execute(self, plan: Plan) -> Mapping[ClientId, Report]:
        program = plan.program
        assert program is not None
        if not program.batchable:
            self._refuse(program, "it mixes the rows of a batch (batch norm)")
        if program.name in self._refused or len(plan.tasks) == 1:
            return super().execute(plan)
        begun = {c: self._begin(program, c, task) for c, task in plan.tasks.items()}
        reports: dict[ClientId, Report] = {}
        for ids in self._stacks(begun):
            try:
                stacked = self._run(program, ids, plan.tasks, tree.stack([begun[c] for c in ids]))
            except (RuntimeError, ValueError, NotImplementedError) as error:
                # Either torch cannot batch the network, or the program is wrong. Plain execution tells:
                # it succeeds in the first case and raises with the client's name in the second.
                self._refuse(program, f"torch cannot batch it ({str(error).split(chr(46))[0][:120]})")
                rest = {c: t for c, t in plan.tasks.items() if c not in reports}
                return reports | dict(super().execute(Plan(program, rest)))
            for i, c in enumerate(ids):
                task, counts = plan.tasks[c], counts_of(self.data[c])
                with blaming(program, c):
                    reports[c], private = program.end(task, tree.select(stacked, i), counts)
                if private is not None:
                    self.private[c] = private
        return {c: reports[c] for c in plan.tasks}

    def _begin(self, program: ClientProgram, client: ClientId, task: Task) -> Tree:
        with blaming(program, client):
            return program.begin(task, self.private.get(client, {}))

    def _refuse(self, program: ClientProgram, reason: str) -> None:
        if program.name not in self._refused:
            self._refused.add(program.name)
            log.warning("program %r runs client by client, not stacked: %s", program.name, reason)

    def _stacks(self, begun: Mapping[ClientId, Tree]) -> Iterator[Sequence[ClientId]]:
        """Clients whose states have one shape, in groups that fit in memory."""
        alike: dict[tuple[Any, ...], list[ClientId]] = defaultdict(list)
        for c, s in begun.items():
            alike[tree.signature(s)].append(c)
        for ids in alike.values():
            fit = STACK_BYTES // max(1, tree.size_bytes(begun[ids[0]]))
            width = max(1, min(self.stack_clients, fit))
            for i in range(0, len(ids), width):
                yield ids[i : i + width]

    def _run(self, program: ClientProgram, ids: Sequence[ClientId], tasks: Mapping[ClientId, Task], s: Tree) -> Tree:
        for number, phase in enumerate(program.phases):
            seeds = [phase_seed(tasks[c].seed, number) for c in ids]
            held = [self.data[c][phase.split] for c in ids]
            for batch, live in batches(held, phase, seeds):
                after = vmap(phase.step)(s, batch)
                s = after if live.all() else tree.map(partial(_where, live), after, s)
            s = vmap(phase.finish)(s)
        return s


def _where(live: Tensor, new: Tensor, old: Tensor) -> Tensor:
    return torch.where(live.view(-1, *[1] * (new.dim() - 1)), new, old)


def batches(held: Sequence[Examples], phase: Phase, seeds: Sequence[int]) -> Iterator[tuple[Batch, Tensor]]:
    """Stacked batches, each with the clients for which it holds any row."""
    device = held[0].y.device
    orders = [row_order(len(e.y), phase, seed) for e, seed in zip(held, seeds, strict=True)]
    steps = max(len(order) for order in orders)
    starts = torch.tensor([0] + [len(e.y) for e in held[:-1]]).cumsum(0)
    rows = torch.full((len(held), steps, phase.batch_size), -1)
    for i, order in enumerate(orders):
        rows[i, : len(order)] = order
    weights = (rows >= 0).to(torch.float32).to(device)
    places = (rows.clamp(min=0) + starts[:, None, None]).clamp(max=sum(len(e.y) for e in held) - 1).to(device)
    x, y = torch.cat([e.x for e in held]), torch.cat([e.y for e in held])
    keys = torch.stack([step_keys(steps, seed) for seed in seeds]).to(device)
    live = weights.amax(-1) > 0  # [clients, steps]
    for t in range(steps):
        at = places[:, t]
        yield Batch(x[at], y[at], weights[:, t], keys[:, t]), live[:, t]
