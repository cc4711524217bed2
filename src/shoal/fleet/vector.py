"""Many clients in one tensor: their states are stacked on a leading axis and a step runs on all at once.

Clients of unequal size are padded with rows of weight 0 and with steps that change nothing, so which
clients are stacked together never changes a result (beyond the last bits of floating point). What all
clients of a stack have in common, such as the model they were sent, is kept once and not copied.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.func import vmap

from shoal import tree
from shoal.fleet.batches import phase_seed, row_order, step_keys, taker
from shoal.fleet.dealing import deal
from shoal.fleet.plain import INPUT_ROWS, PlainFleet, blaming, counts_of
from shoal.fleet.tracing import Flat, FlatStep, Form, Recorder, State
from shoal.types import Batch, ClientData, ClientId, ClientProgram, Examples, Phase, Plan, Report, Task, Tree, unchanged

log = logging.getLogger(__name__)

STACK_BYTES = 256 * 2**20  # of client state in one stack: small enough for any laptop, large enough to pay
STACK_CLIENTS = 128
NO_BATCH = Batch(*[torch.empty(0)] * 4)


class VectorFleet(PlainFleet):
    """Stacks the clients of a plan: all together, or those of each piece if `pieces` says how a plan is cut. Cut into
    pieces, it gives the same bytes as a pool whose workers stack."""

    def __init__(
        self,
        data: Mapping[ClientId, ClientData],
        private: MutableMapping[ClientId, Tree] | None = None,
        stack_clients: int = STACK_CLIENTS,
        pieces: int | None = None,
    ) -> None:
        super().__init__(data, private)
        self.pieces = pieces
        self.stack_clients = stack_clients
        self._refused: set[str] = set()  # programs that cannot be stacked

    def execute(self, plan: Plan) -> Mapping[ClientId, Report]:
        if self.pieces is None:
            return self._execute_stacked(plan)
        reports: dict[ClientId, Report] = {}
        for tasks in deal(plan, self.data, self.pieces):
            reports |= self._execute_stacked(Plan(plan.program, tasks))
        return {c: reports[c] for c in plan.tasks}

    def _execute_stacked(self, plan: Plan) -> Mapping[ClientId, Report]:
        program = plan.program
        assert program is not None
        if not program.batchable:
            self._refuse(program, "it mixes the rows of a batch (batch norm)")
        if program.name in self._refused or len(plan.tasks) == 1:
            return super().execute(plan)
        reports: dict[ClientId, Report] = {}
        for begun in self._stacks(program, plan.tasks):
            ids = list(begun)
            try:
                stack, flops = self._run(program, plan.tasks, begun)
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
                    report, private = program.end(task, picked(stack, i), counts)
                reports[c] = replace(report, flops=flops[i])
                if private is not None:
                    self.private[c] = {**self.private.get(c, {}), **private}
        return {c: reports[c] for c in plan.tasks}

    def _begin(self, program: ClientProgram, client: ClientId, task: Task) -> Tree:
        with blaming(program, client):
            return program.begin(task, self.private.get(client, {}))

    def _refuse(self, program: ClientProgram, reason: str) -> None:
        if program.name not in self._refused:
            self._refused.add(program.name)
            log.warning("program %r runs client by client, not stacked: %s", program.name, reason)

    def _stacks(self, program: ClientProgram, tasks: Mapping[ClientId, Task]) -> Iterator[dict[ClientId, Tree]]:
        """First states of one shape, clients of like size together, in groups that fit in memory. States are begun
        as they are needed: those of a whole fleet may be too many."""
        ids = list(tasks)
        if len(ids) > self.stack_clients:
            splits = sorted({phase.split for phase in program.phases})
            ids.sort(key=lambda c: [len(self.data[c][split].y) for split in splits])
        for i in range(0, len(ids), self.stack_clients):
            alike: dict[tuple[Any, ...], dict[ClientId, Tree]] = defaultdict(dict)
            for c in ids[i : i + self.stack_clients]:
                s = self._begin(program, c, tasks[c])
                alike[tree.signature(s)][c] = s
            for begun in alike.values():
                width = max(1, STACK_BYTES // max(1, tree.size_bytes(next(iter(begun.values())))))
                items = list(begun.items())
                for j in range(0, len(items), width):
                    yield dict(items[j : j + width])

    def _run(
        self, program: ClientProgram, tasks: Mapping[ClientId, Task], begun: Mapping[ClientId, Tree]
    ) -> tuple[State, list[int]]:
        """The last states, and what each client computed."""
        stack, ids = stacked(self.recorder, list(begun.values())), list(begun)
        flops = [0] * len(ids)
        for number, phase in enumerate(program.phases):
            step = self.recorder.steps(program, number, together)
            seeds = [phase_seed(tasks[c].seed, program.phases, number) for c in ids]
            held = [self.data[c][phase.split] for c in ids]
            work = step.work(stack, held[0].x, lambda stack: picked(stack, 0))
            flops = [so_far + work.flops(len(e.y), phase) for so_far, e in zip(flops, held, strict=True)]
            held = with_inputs(phase, stack, held)
            for i, (batch, live) in enumerate(batches(held, phase, seeds)):
                stack = step.ready(stack, batch) if i == 0 else stack
                if all(live):
                    stack = step(stack, batch)
                else:
                    stack = held_back(self.recorder, stack, step(stack._replace(by=None), batch), live)
            if phase.finish is not unchanged:
                stack = finished(self.recorder, stack, phase)
        return stack, flops


def stacked(recorder: Recorder, states: Sequence[Tree]) -> State:
    """Leaves that differ are stacked, leaves that all clients share are kept once."""
    flat = [tree.flatten(s) for s in states]
    shared = frozenset(k for k, x in flat[0].items() if all(f[k] is x for f in flat))
    tensors = [x if k in shared else torch.stack([f[k] for f in flat]) for k, x in flat[0].items()]
    return recorder.formed(tree.skeleton(states[0]), tuple(flat[0]), shared, tensors)


def picked(stack: State, i: int) -> Tree:
    """One client's state, in memory of its own: a view would keep the whole stack alive."""
    shared = stack.form.shared
    return tree.filled(stack.form.bones, {k: x if k in shared else x[i].clone() for k, x in stack.leaves().items()})


def _dims(form: Form) -> list[int | None]:
    return [None if k in form.shared else 0 for k in form.names]


def together(step: FlatStep) -> Flat:
    """A step of one client as a step of a stack."""
    batched = vmap(step, in_dims=(_dims(step.form), 0))
    return lambda *tensors: batched(list(tensors[:-4]), Batch(*tensors[-4:]))


def finished(recorder: Recorder, stack: State, phase: Phase) -> State:
    one = FlatStep(lambda s, b: phase.finish(s), stack.form)
    outputs = vmap(lambda leaves: one(leaves, NO_BATCH), in_dims=(_dims(stack.form),))(list(stack.tensors))
    return recorder.formed(
        one.bones, one.names, stack.form.shared - set(one.changed), one.merged(stack.leaves(), outputs)
    )


def with_inputs(phase: Phase, stack: State, held: list[Examples]) -> list[Examples]:
    """The rows that the passes go over: as they are, or what is computed of each once."""
    compute = phase.inputs
    if compute is None:
        return held
    form = stack.form

    def one(leaves: list[Tensor], x: Tensor) -> Tensor:
        return compute(tree.filled(form.bones, dict(zip(form.names, leaves, strict=True))), x)

    together = vmap(one, in_dims=(_dims(form), 0))
    once = Phase(phase.split, 1, INPUT_ROWS, phase.step, shuffle=False)
    with torch.no_grad():
        parts = [together(list(stack.tensors), batch.x) for batch, _ in batches(held, once, [0] * len(held))]
    if not parts:
        return held
    rows = torch.cat(parts, dim=1)
    return [Examples(rows[i, : len(e.y)], e.y) for i, e in enumerate(held)]


def held_back(recorder: Recorder, before: State, after: State, live: Sequence[bool]) -> State:
    """The old leaves for clients whose batch was all padding."""
    old, mask = before.leaves(), torch.tensor(live, device=after.tensors[0].device)

    def kept(name: str, new: Tensor) -> Tensor:
        return new if new is old[name] else torch.where(mask.view(-1, *[1] * (new.dim() - 1)), new, old[name])

    tensors = [kept(k, x) for k, x in after.leaves().items()]
    return recorder.formed(after.form.bones, after.form.names, after.form.shared, tensors)


def batches(held: Sequence[Examples], phase: Phase, seeds: Sequence[int]) -> Iterator[tuple[Batch, Sequence[bool]]]:
    """Stacked batches, each with the clients for which it holds any row. No wider than the widest real batch."""
    device = held[0].y.device
    orders = [row_order(len(e.y), phase, seed) for e, seed in zip(held, seeds, strict=True)]
    steps = max(len(order) for order in orders)
    if not steps:
        return
    width = min(phase.batch_size, max(phase.taken(len(e.y)) for e in held))
    rows = torch.full((len(held), steps, phase.batch_size), -1)
    for i, order in enumerate(orders):
        rows[i, : len(order)] = order
    rows = rows[..., :width]
    weights = (rows >= 0).to(torch.float32)
    live = (weights.amax(-1) > 0).T.tolist()  # [steps, clients]
    x, y, starts = joined(held)
    places = (rows.clamp(min=0) + starts[:, None, None]).clamp(max=len(y) - 1)
    by_step = places.transpose(0, 1).contiguous().to(device)
    weights = weights.transpose(0, 1).contiguous().to(device)
    keys = torch.stack([step_keys(steps, seed) for seed in seeds], dim=1).to(device)
    take_x, take_y = taker(x), taker(y)
    for t in range(steps):
        yield Batch(take_x(by_step[t]), take_y(by_step[t]), weights[t], keys[t]), live[t]


def joined(held: Sequence[Examples]) -> tuple[Tensor, Tensor, Tensor]:
    """All rows in one tensor, and where each client's begin. Clients of one federation are views of one tensor
    already: then nothing is copied."""
    sizes = torch.tensor([len(e.y) for e in held])
    whole = _common(held)
    if whole is not None:
        return whole
    return torch.cat([e.x for e in held]), torch.cat([e.y for e in held]), sizes.cumsum(0) - sizes


def _common(held: Sequence[Examples]) -> tuple[Tensor, Tensor, Tensor] | None:
    x, y = held[0]
    per_row = x.stride(0)
    one_place = all(
        e.x.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()
        and e.y.untyped_storage().data_ptr() == y.untyped_storage().data_ptr()
        and e.x.stride() == x.stride()
        and e.y.stride() == y.stride() == (1,)
        and e.x.storage_offset() == e.y.storage_offset() * per_row
        for e in held
    )
    if not one_place:
        return None
    starts = [e.y.storage_offset() for e in held]
    end = max(start + len(e.y) for start, e in zip(starts, held, strict=True))
    return x.as_strided((end, *x.shape[1:]), x.stride(), 0), y.as_strided((end,), (1,), 0), torch.tensor(starts)
