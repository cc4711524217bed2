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
from shoal.fleet.batches import batch_indices, index_reader, phase_seed, step_keys
from shoal.fleet.dealing import deal
from shoal.fleet.plain import PRECOMPUTE_BATCH_SIZE, PlainFleet, name_client_in_errors, sample_counts
from shoal.fleet.tracing import FlatFunction, FlatStep, Recorder, State, StateForm
from shoal.types import Batch, ClientData, ClientId, ClientProgram, Phase, Plan, Report, Samples, Task, Tree, identity

log = logging.getLogger(__name__)

MAX_STACK_BYTES = 256 * 2**20  # of client state in one stack: small enough for any laptop, large enough to pay
MAX_STACK_CLIENTS = 128
EMPTY_BATCH = Batch(*[torch.empty(0)] * 4)


class VectorFleet(PlainFleet):
    """Stacks the clients of a plan: all together, or those of each piece if `pieces` says how a plan is cut. Cut into
    pieces, it gives the same bytes as a pool whose workers stack."""

    def __init__(
        self,
        data: Mapping[ClientId, ClientData],
        private: MutableMapping[ClientId, Tree] | None = None,
        max_stack_clients: int = MAX_STACK_CLIENTS,
        pieces: int | None = None,
    ) -> None:
        super().__init__(data, private)
        self.pieces = pieces
        self.max_stack_clients = max_stack_clients
        self._unstackable_programs: set[str] = set()  # programs that cannot be stacked

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
            self._mark_unstackable(program, "it mixes the rows of a batch (batch norm)")
        if program.name in self._unstackable_programs or len(plan.tasks) == 1:
            return super().execute(plan)
        reports: dict[ClientId, Report] = {}
        for first_states in self._stacks(program, plan.tasks):
            ids = list(first_states)
            try:
                stack, flops = self._run(program, plan.tasks, first_states)
            except (RuntimeError, ValueError, NotImplementedError) as error:
                # Either torch cannot batch the network, or the program is wrong. Plain execution tells:
                # it succeeds in the first case and raises with the client's name in the second.
                reason = str(error).split(". ")[0].splitlines()[0]
                self._mark_unstackable(program, f"torch cannot batch it ({reason})")
                rest = {c: t for c, t in plan.tasks.items() if c not in reports}
                return reports | dict(super().execute(Plan(program, rest)))
            for i, c in enumerate(ids):
                task, counts = plan.tasks[c], sample_counts(self.data[c])
                with name_client_in_errors(program, c):
                    report, private = program.end(task, state_of_client(stack, i), counts)
                reports[c] = replace(report, flops=flops[i])
                if private is not None:
                    self.private[c] = {**self.private.get(c, {}), **private}
        return {c: reports[c] for c in plan.tasks}

    def _begin(self, program: ClientProgram, client: ClientId, task: Task) -> Tree:
        with name_client_in_errors(program, client):
            return program.begin(task, self.private.get(client, {}))

    def _mark_unstackable(self, program: ClientProgram, reason: str) -> None:
        if program.name not in self._unstackable_programs:
            self._unstackable_programs.add(program.name)
            log.warning("program %r runs client by client, not stacked: %s", program.name, reason)

    def _stacks(self, program: ClientProgram, tasks: Mapping[ClientId, Task]) -> Iterator[dict[ClientId, Tree]]:
        """First states of one shape, clients of like size together, in groups that fit in memory. States are begun
        as they are needed: those of a whole fleet may be too many."""
        ids = list(tasks)
        if len(ids) > self.max_stack_clients:
            splits = sorted({phase.split for phase in program.phases})
            ids.sort(key=lambda c: [len(self.data[c][split].y) for split in splits])
        for i in range(0, len(ids), self.max_stack_clients):
            states_by_signature: dict[tuple[Any, ...], dict[ClientId, Tree]] = defaultdict(dict)
            for c in ids[i : i + self.max_stack_clients]:
                s = self._begin(program, c, tasks[c])
                states_by_signature[tree.signature(s)][c] = s
            for first_states in states_by_signature.values():
                width = max(1, MAX_STACK_BYTES // max(1, tree.size_bytes(next(iter(first_states.values())))))
                items = list(first_states.items())
                for j in range(0, len(items), width):
                    yield dict(items[j : j + width])

    def _run(
        self, program: ClientProgram, tasks: Mapping[ClientId, Task], first_states: Mapping[ClientId, Tree]
    ) -> tuple[State, list[int]]:
        """The last states, and what each client computed."""
        stack, ids = stack_states(self.recorder, list(first_states.values())), list(first_states)
        flops = [0] * len(ids)
        for number, phase in enumerate(program.phases):
            step = self.recorder.recorded_step(program, number, for_stack)
            seeds = [phase_seed(tasks[c].seed, program.phases, number) for c in ids]
            samples = [self.data[c][phase.split] for c in ids]
            work = step.flop_counts(stack, samples[0].x, lambda stack: state_of_client(stack, 0))
            flops = [so_far + work.total(len(e.y), phase) for so_far, e in zip(flops, samples, strict=True)]
            samples = with_precomputed_inputs(phase, stack, samples)
            for i, (batch, has_samples) in enumerate(stacked_batches(samples, phase, seeds)):
                stack = step.prepare(stack, batch) if i == 0 else stack
                if all(has_samples):
                    stack = step(stack, batch)
                else:
                    stack = restore_idle_clients(
                        self.recorder, stack, step(stack._replace(made_by=None), batch), has_samples
                    )
            if phase.on_end is not identity:
                stack = end_phase(self.recorder, stack, phase)
        return stack, flops


def stack_states(recorder: Recorder, states: Sequence[Tree]) -> State:
    """Leaves that differ are stacked, leaves that all clients share are kept once."""
    flat = [tree.flatten(s) for s in states]
    shared = frozenset(k for k, x in flat[0].items() if all(f[k] is x for f in flat))
    tensors = [x if k in shared else torch.stack([f[k] for f in flat]) for k, x in flat[0].items()]
    return recorder.make_state(tree.skeleton(states[0]), tuple(flat[0]), shared, tensors)


def state_of_client(stack: State, i: int) -> Tree:
    """One client's state, in memory of its own: a view would keep the whole stack alive."""
    shared = stack.form.shared
    return tree.fill_skeleton(
        stack.form.skeleton, {k: x if k in shared else x[i].clone() for k, x in stack.leaves().items()}
    )


def _stack_dims(form: StateForm) -> list[int | None]:
    return [None if k in form.shared else 0 for k in form.names]


def for_stack(step: FlatStep) -> FlatFunction:
    """A step of one client as a step of a stack."""
    batched = vmap(step, in_dims=(_stack_dims(step.form), 0))
    return lambda *tensors: batched(list(tensors[:-4]), Batch(*tensors[-4:]))


def end_phase(recorder: Recorder, stack: State, phase: Phase) -> State:
    one = FlatStep(lambda s, b: phase.on_end(s), stack.form)
    outputs = vmap(lambda leaves: one(leaves, EMPTY_BATCH), in_dims=(_stack_dims(stack.form),))(list(stack.tensors))
    return recorder.make_state(
        one.skeleton, one.names, stack.form.shared - set(one.changed), one.all_leaves(stack.leaves(), outputs)
    )


def with_precomputed_inputs(phase: Phase, stack: State, samples: list[Samples]) -> list[Samples]:
    """The rows that the passes go over: as they are, or what is computed of each once."""
    compute = phase.precompute
    if compute is None:
        return samples
    form = stack.form

    def one(leaves: list[Tensor], x: Tensor) -> Tensor:
        return compute(tree.fill_skeleton(form.skeleton, dict(zip(form.names, leaves, strict=True))), x)

    together = vmap(one, in_dims=(_stack_dims(form), 0))
    once = Phase(phase.split, 1, PRECOMPUTE_BATCH_SIZE, phase.step, shuffle=False)
    with torch.no_grad():
        parts = [
            together(list(stack.tensors), batch.x) for batch, _ in stacked_batches(samples, once, [0] * len(samples))
        ]
    if not parts:
        return samples
    rows = torch.cat(parts, dim=1)
    return [Samples(rows[i, : len(e.y)], e.y) for i, e in enumerate(samples)]


def restore_idle_clients(recorder: Recorder, before: State, after: State, has_samples: Sequence[bool]) -> State:
    """The old leaves for clients whose batch was all padding."""
    old, mask = before.leaves(), torch.tensor(has_samples, device=after.tensors[0].device)

    def kept(name: str, new: Tensor) -> Tensor:
        return new if new is old[name] else torch.where(mask.view(-1, *[1] * (new.dim() - 1)), new, old[name])

    tensors = [kept(k, x) for k, x in after.leaves().items()]
    return recorder.make_state(after.form.skeleton, after.form.names, after.form.shared, tensors)


def stacked_batches(
    samples: Sequence[Samples], phase: Phase, seeds: Sequence[int]
) -> Iterator[tuple[Batch, Sequence[bool]]]:
    """Stacked batches, each with the clients for which it holds any row. No wider than the widest real batch."""
    device = samples[0].y.device
    orders = [batch_indices(len(e.y), phase, seed) for e, seed in zip(samples, seeds, strict=True)]
    steps = max(len(order) for order in orders)
    if not steps:
        return
    width = min(phase.batch_size, max(phase.num_samples(len(e.y)) for e in samples))
    rows = torch.full((len(samples), steps, phase.batch_size), -1)
    for i, order in enumerate(orders):
        rows[i, : len(order)] = order
    rows = rows[..., :width]
    weights = (rows >= 0).to(torch.float32)
    has_samples = (weights.amax(-1) > 0).T.tolist()  # [steps, clients]
    x, y, starts = concatenate_samples(samples)
    indices = (rows.clamp(min=0) + starts[:, None, None]).clamp(max=len(y) - 1)
    by_step = indices.transpose(0, 1).contiguous().to(device)
    weights = weights.transpose(0, 1).contiguous().to(device)
    keys = torch.stack([step_keys(steps, seed) for seed in seeds], dim=1).to(device)
    take_x, take_y = index_reader(x), index_reader(y)
    for t in range(steps):
        yield Batch(take_x(by_step[t]), take_y(by_step[t]), weights[t], keys[t]), has_samples[t]


def concatenate_samples(samples: Sequence[Samples]) -> tuple[Tensor, Tensor, Tensor]:
    """All rows in one tensor, and where each client's begin. Clients of one federation are views of one tensor
    already: then nothing is copied."""
    sizes = torch.tensor([len(e.y) for e in samples])
    whole = _shared_storage(samples)
    if whole is not None:
        return whole
    return torch.cat([e.x for e in samples]), torch.cat([e.y for e in samples]), sizes.cumsum(0) - sizes


def _shared_storage(samples: Sequence[Samples]) -> tuple[Tensor, Tensor, Tensor] | None:
    x, y = samples[0]
    per_row = x.stride(0)
    is_shared = all(
        e.x.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()
        and e.y.untyped_storage().data_ptr() == y.untyped_storage().data_ptr()
        and e.x.stride() == x.stride()
        and e.y.stride() == y.stride() == (1,)
        and e.x.storage_offset() == e.y.storage_offset() * per_row
        for e in samples
    )
    if not is_shared:
        return None
    starts = [e.y.storage_offset() for e in samples]
    end = max(start + len(e.y) for start, e in zip(starts, samples, strict=True))
    return x.as_strided((end, *x.shape[1:]), x.stride(), 0), y.as_strided((end,), (1,), 0), torch.tensor(starts)
