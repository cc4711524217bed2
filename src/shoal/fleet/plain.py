"""The reference fleet: one client after the other, as a real client would work."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor

from shoal.fleet.batches import epoch_indices, index_reader, phase_seed, step_keys
from shoal.fleet.tracing import Recorder
from shoal.types import Batch, ClientData, ClientId, ClientProgram, Phase, Plan, Report, Samples, Task, Tree

PRECOMPUTE_BATCH_SIZE = 1024


def sample_counts(data: ClientData) -> dict[str, int]:
    return {split: len(examples.y) for split, examples in data.items()}


def run_program(
    program: ClientProgram, task: Task, data: ClientData, private: Tree, recorder: Recorder | None = None
) -> tuple[Report, Tree | None]:
    """What one client does with one task. Batches have their true size: nothing is padded here."""
    recorder = Recorder() if recorder is None else recorder
    with torch.random.fork_rng(devices=[]):  # a network of the user's own may draw from the global generator
        torch.default_generator.manual_seed(task.seed)
        client_state, flops = program.begin(task, private), 0
        for number, phase in enumerate(program.phases):
            step, flat_state = recorder.recorded_step(program, number), recorder.flatten_state(client_state)
            seed, samples = phase_seed(task.seed, program.phases, number), data[phase.split]
            flops += step.flop_counts(flat_state, samples.x).total(len(samples.y), phase)
            samples = with_precomputed_inputs(phase, client_state, samples)
            single_rows = program.batchable or not phase.shuffle  # passes in order look at rows as served
            for i, batch in enumerate(unpadded_batches(samples, phase, seed, single_rows)):
                flat_state = step(step.prepare(flat_state, batch) if i == 0 else flat_state, batch)
            client_state = phase.on_end(flat_state.tree())
        report, new_private = program.end(task, client_state, sample_counts(data))
        return replace(report, flops=flops), new_private


def with_precomputed_inputs(phase: Phase, state: Tree, samples: Samples) -> Samples:
    """The rows that the passes go over: as they are, or what is computed of each once."""
    if phase.precompute is None:
        return samples
    with torch.no_grad():
        return Samples(
            torch.cat([phase.precompute(state, x) for x in torch.split(samples.x, PRECOMPUTE_BATCH_SIZE)]), samples.y
        )


def unpadded_batches(samples: Samples, phase: Phase, seed: int, allows_single_samples: bool) -> Iterator[Batch]:
    """Without padding. Batch norm has no statistics of a single row, so there a row that is left over joins
    the batch before it, and a client with only one row takes no step."""
    device = samples.y.device
    epochs = (numbers.to(device) for numbers in epoch_indices(len(samples.y), phase, seed))
    order = [rows for numbers in epochs for rows in torch.split(numbers, phase.batch_size)]
    if not allows_single_samples:
        order = _merge_single_samples(order)
    take_x, take_y = index_reader(samples.x), index_reader(samples.y)
    ones = torch.ones(min(len(samples.y), phase.batch_size + 1), device=device)
    for rows, key in zip(order, step_keys(len(order), seed).to(device).unbind(), strict=True):
        yield Batch(take_x(rows), take_y(rows), ones[: len(rows)], key)


def _merge_single_samples(order: Sequence[Tensor]) -> list[Tensor]:
    whole: list[Tensor] = []
    for rows in order:
        if len(rows) > 1:
            whole.append(rows)
        elif whole:
            whole[-1] = torch.cat([whole[-1], rows])
    return whole


class ClientError(RuntimeError):
    """A program failed on a client; the message says which."""


@contextmanager
def name_client_in_errors(program: ClientProgram, client: ClientId) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        raise ClientError(f"program {program.name!r} failed on client {client!r}: {error}") from error


class PlainFleet:
    """`private` belongs to the clients: the server's code has no way to it."""

    def __init__(
        self, data: Mapping[ClientId, ClientData], private: MutableMapping[ClientId, Tree] | None = None
    ) -> None:
        self.data = data
        self._roster = tuple(sorted(data))
        self.private: MutableMapping[ClientId, Tree] = {} if private is None else private
        self.recorder = Recorder()

    def roster(self) -> tuple[ClientId, ...]:
        return self._roster

    def execute(self, plan: Plan) -> Mapping[ClientId, Report]:
        assert plan.program is not None
        return {c: self.execute_one(plan.program, c, task) for c, task in plan.tasks.items()}

    def execute_one(self, program: ClientProgram, client: ClientId, task: Task) -> Report:
        with name_client_in_errors(program, client):
            report, private = run_program(program, task, self.data[client], self.private.get(client, {}), self.recorder)
        if private is not None:
            self.private[client] = {**self.private.get(client, {}), **private}
        return report
