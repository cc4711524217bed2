"""A fleet that stacks clients: their states are stacked on a leading axis, and a step runs on all of them at once.

Clients with fewer samples are padded with samples of weight 0 and with steps that change nothing. Which clients are
stacked together therefore never changes a result, beyond the last bits of floating-point numbers. Leaves that all
clients of a stack share, such as the model that they were sent, exist once and are not copied.
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

MAX_STACK_BYTES = 256 * 2**20  # of client states in a stack; fits into the memory of a laptop
MAX_STACK_CLIENTS = 128
EMPTY_BATCH = Batch(*[torch.empty(0)] * 4)


class VectorFleet(PlainFleet):
    """Stacks the clients of a plan.

    Parameters
    ----------
    data
        The data of the clients.
    private
        The private trees of the clients.
    max_stack_clients
        The largest number of clients in a stack.
    pieces
        The number of pieces into which a plan is cut, each with its own stacks. The results are then the same bytes as
        those of a pool whose workers stack. None for a plan in one piece.
    """

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
        self._unstackable_programs: set[str] = set()

    def execute(self, plan: Plan) -> Mapping[ClientId, Report]:
        """Runs the tasks of the plan and returns the reports.

        A program that cannot be stacked runs one client after the other, with a warning.
        """
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
            self._mark_unstackable(program, "it mixes the samples of a batch (batch norm)")
        if program.name in self._unstackable_programs or len(plan.tasks) == 1:
            return super().execute(plan)
        reports: dict[ClientId, Report] = {}
        for first_states in self._stacks(program, plan.tasks):
            ids = list(first_states)
            try:
                stack, flops = self._run(program, plan.tasks, first_states)
            except (RuntimeError, ValueError, NotImplementedError) as error:
                # Either torch cannot stack the network, or the program has an error. Plain execution succeeds in the
                # first case, and raises an error with the name of the client in the second.
                reason = str(error).split(". ")[0].splitlines()[0]
                self._mark_unstackable(program, f"torch cannot stack it ({reason})")
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
            log.warning("Program %r runs client by client, not stacked: %s.", program.name, reason)

    def _stacks(self, program: ClientProgram, tasks: Mapping[ClientId, Task]) -> Iterator[dict[ClientId, Tree]]:
        """Yields the first states of each stack.

        The states of a stack have the same shape and fit into memory, and its clients have similar numbers of samples.
        States are created when they are needed, because those of all clients may not fit into memory.
        """
        ids = list(tasks)
        if len(ids) > self.max_stack_clients:
            splits = sorted({phase.split for phase in program.phases})
            ids.sort(key=lambda c: [len(self.data[c][split].y) for split in splits])
        for i in range(0, len(ids), self.max_stack_clients):
            states_by_signature: dict[tuple[Any, ...], dict[ClientId, Tree]] = defaultdict(dict)
            for c in ids[i : i + self.max_stack_clients]:
                state = self._begin(program, c, tasks[c])
                states_by_signature[tree.signature(state)][c] = state
            for first_states in states_by_signature.values():
                state_bytes = tree.size_bytes(next(iter(first_states.values())))
                max_clients = max(1, MAX_STACK_BYTES // max(1, state_bytes))
                items = list(first_states.items())
                for j in range(0, len(items), max_clients):
                    yield dict(items[j : j + max_clients])

    def _run(
        self, program: ClientProgram, tasks: Mapping[ClientId, Task], first_states: Mapping[ClientId, Tree]
    ) -> tuple[State, list[int]]:
        """Runs all phases on a stack and returns its last state, and the operations of each client."""
        stack, ids = stack_states(self.recorder, list(first_states.values())), list(first_states)
        flops = [0] * len(ids)
        for number, phase in enumerate(program.phases):
            step = self.recorder.recorded_step(program, number, for_stack)
            seeds = [phase_seed(tasks[c].seed, program.phases, number) for c in ids]
            samples = [self.data[c][phase.split] for c in ids]
            counts = step.flop_counts(stack, samples[0].x, lambda stack: state_of_client(stack, 0))
            flops = [total + counts.total(len(s.y), phase) for total, s in zip(flops, samples, strict=True)]
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
    """Returns a stack of the states. Leaves that all clients share exist once."""
    flat = [tree.flatten(s) for s in states]
    shared = frozenset(k for k, x in flat[0].items() if all(f[k] is x for f in flat))
    tensors = [x if k in shared else torch.stack([f[k] for f in flat]) for k, x in flat[0].items()]
    return recorder.make_state(tree.skeleton(states[0]), tuple(flat[0]), shared, tensors)


def state_of_client(stack: State, i: int) -> Tree:
    """Returns the state of one client as a copy, because a view would keep the memory of the stack."""
    shared = stack.form.shared
    return tree.fill_skeleton(
        stack.form.skeleton, {k: x if k in shared else x[i].clone() for k, x in stack.leaves().items()}
    )


def _stack_dims(form: StateForm) -> list[int | None]:
    """Returns the stacked dimension of each leaf for vmap: None for shared leaves, otherwise 0."""
    return [None if k in form.shared else 0 for k in form.names]


def for_stack(step: FlatStep) -> FlatFunction:
    """Returns a step of one client as a step of a stack."""
    batched = vmap(step, in_dims=(_stack_dims(step.form), 0))
    return lambda *tensors: batched(list(tensors[:-4]), Batch(*tensors[-4:]))


def end_phase(recorder: Recorder, stack: State, phase: Phase) -> State:
    """Returns the stack after `phase.on_end`."""
    step = FlatStep(lambda s, b: phase.on_end(s), stack.form)
    outputs = vmap(lambda leaves: step(leaves, EMPTY_BATCH), in_dims=(_stack_dims(stack.form),))(list(stack.tensors))
    shared = stack.form.shared - set(step.changed)
    return recorder.make_state(step.skeleton, step.names, shared, step.all_leaves(stack.leaves(), outputs))


def with_precomputed_inputs(phase: Phase, stack: State, samples: list[Samples]) -> list[Samples]:
    """Returns the samples of a phase, with the result of `phase.precompute` as inputs if there is one."""
    compute = phase.precompute
    if compute is None:
        return samples
    form = stack.form

    def compute_one(leaves: list[Tensor], x: Tensor) -> Tensor:
        return compute(tree.fill_skeleton(form.skeleton, dict(zip(form.names, leaves, strict=True))), x)

    compute_stack = vmap(compute_one, in_dims=(_stack_dims(form), 0))
    single_epoch = Phase(phase.split, 1, PRECOMPUTE_BATCH_SIZE, phase.step, shuffle=False)
    batches = stacked_batches(samples, single_epoch, [0] * len(samples))
    with torch.no_grad():
        parts = [compute_stack(list(stack.tensors), batch.x) for batch, _ in batches]
    if not parts:
        return samples
    inputs = torch.cat(parts, dim=1)
    return [Samples(inputs[i, : len(s.y)], s.y) for i, s in enumerate(samples)]


def restore_idle_clients(recorder: Recorder, before: State, after: State, has_samples: Sequence[bool]) -> State:
    """Returns the state after a step, with the old leaves for clients whose batch was padding only."""
    old, mask = before.leaves(), torch.tensor(has_samples, device=after.tensors[0].device)

    def restore(name: str, new: Tensor) -> Tensor:
        return new if new is old[name] else torch.where(mask.view(-1, *[1] * (new.dim() - 1)), new, old[name])

    tensors = [restore(k, x) for k, x in after.leaves().items()]
    return recorder.make_state(after.form.skeleton, after.form.names, after.form.shared, tensors)


def stacked_batches(
    samples: Sequence[Samples], phase: Phase, seeds: Sequence[int]
) -> Iterator[tuple[Batch, Sequence[bool]]]:
    """Yields stacked batches, and for each the information which clients have samples in it.

    The batches are no larger than the largest batch without padding.
    """
    device = samples[0].y.device
    orders = [batch_indices(len(s.y), phase, seed) for s, seed in zip(samples, seeds, strict=True)]
    steps = max(len(order) for order in orders)
    if not steps:
        return
    batch_size = min(phase.batch_size, max(phase.num_samples(len(s.y)) for s in samples))
    own_indices = torch.full((len(samples), steps, phase.batch_size), -1)
    for i, order in enumerate(orders):
        own_indices[i, : len(order)] = order
    own_indices = own_indices[..., :batch_size]
    weights = (own_indices >= 0).to(torch.float32)
    has_samples = (weights.amax(-1) > 0).T.tolist()  # [steps, clients]
    x, y, starts = concatenate_samples(samples)
    indices = (own_indices.clamp(min=0) + starts[:, None, None]).clamp(max=len(y) - 1)
    by_step = indices.transpose(0, 1).contiguous().to(device)
    weights = weights.transpose(0, 1).contiguous().to(device)
    keys = torch.stack([step_keys(steps, seed) for seed in seeds], dim=1).to(device)
    read_x, read_y = index_reader(x), index_reader(y)
    for t in range(steps):
        yield Batch(read_x(by_step[t]), read_y(by_step[t]), weights[t], keys[t]), has_samples[t]


def concatenate_samples(samples: Sequence[Samples]) -> tuple[Tensor, Tensor, Tensor]:
    """Returns all inputs in one tensor, all labels in one, and the index of each client's first sample.

    If the clients of a federation are views of one tensor already, nothing is copied.
    """
    sizes = torch.tensor([len(s.y) for s in samples])
    shared = _shared_storage(samples)
    if shared is not None:
        return shared
    return torch.cat([s.x for s in samples]), torch.cat([s.y for s in samples]), sizes.cumsum(0) - sizes


def _shared_storage(samples: Sequence[Samples]) -> tuple[Tensor, Tensor, Tensor] | None:
    """Returns the result of `concatenate_samples` if all samples are views of one tensor, otherwise None."""
    x, y = samples[0]
    x_stride = x.stride(0)
    is_shared = all(
        s.x.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()
        and s.y.untyped_storage().data_ptr() == y.untyped_storage().data_ptr()
        and s.x.stride() == x.stride()
        and s.y.stride() == y.stride() == (1,)
        and s.x.storage_offset() == s.y.storage_offset() * x_stride
        for s in samples
    )
    if not is_shared:
        return None
    starts = [s.y.storage_offset() for s in samples]
    end = max(start + len(s.y) for start, s in zip(starts, samples, strict=True))
    return x.as_strided((end, *x.shape[1:]), x.stride(), 0), y.as_strided((end,), (1,), 0), torch.tensor(starts)
