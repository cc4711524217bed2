"""Many clients in one tensor: their states are stacked on a leading axis and a step runs on all at once.

Clients of unequal size are padded with rows of weight 0 and with steps that change nothing, so which
clients are stacked together never changes a result (beyond the last bits of floating point). What all
clients of a stack have in common, such as the model they were sent, is kept once and not copied.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Hashable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.func import vmap

from shoal import tree
from shoal.fleet.batches import phase_seed, row_order, step_keys
from shoal.fleet.plain import PlainFleet, blaming, counts_of
from shoal.fleet.tracing import FlatStep, Recorder, kind_of
from shoal.types import Batch, ClientData, ClientId, ClientProgram, Examples, Phase, Plan, Report, Task, Tree, unchanged

log = logging.getLogger(__name__)

STACK_BYTES = 256 * 2**20  # of client state in one stack: small enough for any laptop, large enough to pay
STACK_CLIENTS = 128
NO_BATCH = Batch(*[torch.empty(0)] * 4)


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
        for ids in self._stacks(program, begun):
            try:
                stack = self._run(program, ids, plan.tasks, Stack.of([begun[c] for c in ids]))
            except (RuntimeError, ValueError, NotImplementedError) as error:
                # Either torch cannot batch the network, or the program is wrong. Plain execution tells:
                # it succeeds in the first case and raises with the client's name in the second.
                reason = str(error).split(". ")[0].splitlines()[0]
                self._refuse(program, f"torch cannot batch it ({reason})")
                rest = {c: t for c, t in plan.tasks.items() if c not in reports}
                return reports | dict(super().execute(Plan(program, rest)))
            for i, c in enumerate(ids):
                task, counts = plan.tasks[c], counts_of(self.data[c])
                with blaming(program, c):
                    reports[c], private = program.end(task, stack.select(i), counts)
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

    def _stacks(self, program: ClientProgram, begun: Mapping[ClientId, Tree]) -> Iterator[Sequence[ClientId]]:
        """Clients whose states have one shape, those of like size together, in groups that fit in memory."""
        alike: dict[tuple[Any, ...], list[ClientId]] = defaultdict(list)
        for c, s in begun.items():
            alike[tree.signature(s)].append(c)
        splits = {phase.split for phase in program.phases}
        for ids in alike.values():
            fit = STACK_BYTES // max(1, tree.size_bytes(begun[ids[0]]))
            width = max(1, min(self.stack_clients, fit))
            if len(ids) > width:
                ids.sort(key=lambda c: [len(self.data[c][split].y) for split in sorted(splits)])
            for i in range(0, len(ids), width):
                yield ids[i : i + width]

    def _run(
        self, program: ClientProgram, ids: Sequence[ClientId], tasks: Mapping[ClientId, Task], stack: Stack
    ) -> Stack:
        for number, phase in enumerate(program.phases):
            seeds = [phase_seed(tasks[c].seed, number) for c in ids]
            held = [self.data[c][phase.split] for c in ids]
            for batch, live in batches(held, phase, seeds):
                stack = stack.stepped(self.recorder, kind_of(program, number), phase, batch, live)
            if phase.finish is not unchanged:
                stack = stack.finished(phase)
        return stack


class Stack:
    """The states of several clients: leaves that differ are stacked, leaves that all share are kept once."""

    def __init__(self, bones: Tree, leaves: dict[str, Tensor], shared: frozenset[str]) -> None:
        self.bones, self.leaves, self.shared = bones, leaves, shared

    @classmethod
    def of(cls, states: Sequence[Tree]) -> Stack:
        flat = [tree.flatten(s) for s in states]
        shared = frozenset(k for k, x in flat[0].items() if all(f[k] is x for f in flat))
        leaves = {k: x if k in shared else torch.stack([f[k] for f in flat]) for k, x in flat[0].items()}
        return cls(tree.skeleton(states[0]), leaves, shared)

    def select(self, i: int) -> Tree:
        """One client's state, in memory of its own: a view would keep the whole stack alive."""
        return tree.filled(self.bones, {k: x if k in self.shared else x[i].clone() for k, x in self.leaves.items()})

    def stepped(self, recorder: Recorder, kind: Hashable, phase: Phase, batch: Batch, live: Sequence[bool]) -> Stack:
        one = FlatStep(phase.step, self.bones, tuple(self.leaves))
        dims = self._dims()

        def step(*tensors: Tensor) -> list[Tensor]:
            outputs: list[Tensor] = vmap(one, in_dims=(dims, 0))(list(tensors[:-4]), Batch(*tensors[-4:]))
            return outputs

        outputs, leaves = recorder((kind, self.shared), step, [*self.leaves.values(), *batch], one)
        if not all(live):
            outputs = [self._held_back(k, x, live) for k, x in zip(leaves.changed, outputs, strict=True)]
        return Stack(leaves.bones, leaves.merged(self.leaves, outputs), self.shared - set(leaves.changed))

    def _dims(self) -> list[int | None]:
        return [None if k in self.shared else 0 for k in self.leaves]

    def _held_back(self, name: str, new: Tensor, live: Sequence[bool]) -> Tensor:
        """The old leaf for clients whose batch was all padding."""
        mask = torch.tensor(live, device=new.device).view(-1, *[1] * (new.dim() - 1))
        return torch.where(mask, new, self.leaves[name])

    def finished(self, phase: Phase) -> Stack:
        one = FlatStep(lambda s, b: phase.finish(s), self.bones, tuple(self.leaves))
        outputs = vmap(lambda leaves: one(leaves, NO_BATCH), in_dims=(self._dims(),))(list(self.leaves.values()))
        done = one.leaves
        return Stack(done.bones, done.merged(self.leaves, outputs), self.shared - set(done.changed))


def batches(held: Sequence[Examples], phase: Phase, seeds: Sequence[int]) -> Iterator[tuple[Batch, Sequence[bool]]]:
    """Stacked batches, each with the clients for which it holds any row. No wider than the widest real batch."""
    device = held[0].y.device
    orders = [row_order(len(e.y), phase, seed) for e, seed in zip(held, seeds, strict=True)]
    steps = max(len(order) for order in orders)
    width = min(phase.batch_size, max(len(e.y) for e in held))
    starts = torch.tensor([0] + [len(e.y) for e in held[:-1]]).cumsum(0)
    rows = torch.full((len(held), steps, phase.batch_size), -1)
    for i, order in enumerate(orders):
        rows[i, : len(order)] = order
    rows = rows[..., :width]
    weights = (rows >= 0).to(torch.float32)
    live = (weights.amax(-1) > 0).T.tolist()  # [steps, clients]
    places = (rows.clamp(min=0) + starts[:, None, None]).clamp(max=sum(len(e.y) for e in held) - 1)
    by_step = places.transpose(0, 1).contiguous().to(device)
    weights = weights.transpose(0, 1).contiguous().to(device)
    x, y = torch.cat([e.x for e in held]), torch.cat([e.y for e in held])
    keys = torch.stack([step_keys(steps, seed) for seed in seeds], dim=1).to(device)
    for t in range(steps):
        at = by_step[t]
        yield Batch(x[at], y[at], weights[t], keys[t]), live[t]
