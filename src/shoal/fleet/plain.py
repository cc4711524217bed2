"""The reference fleet: it runs one client after the other, each as a real client would work."""

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
    """Returns the number of samples in each split."""
    return {split: len(samples.y) for split, samples in data.items()}


def run_program(
    program: ClientProgram, task: Task, data: ClientData, private: Tree, recorder: Recorder | None = None
) -> tuple[Report, Tree | None]:
    """Runs a task on one client, without padding.

    Parameters
    ----------
    program
        The program of the task.
    task
        The task.
    data
        The client's data.
    private
        The client's private tree.
    recorder
        Records the steps, and may be shared by all clients. None for a new one.

    Returns
    -------
    tuple
        The report, and the new entries of the private tree, or None if there are none.
    """
    recorder = Recorder() if recorder is None else recorder
    with torch.random.fork_rng(devices=[]):  # a user's network may draw from the global generator
        torch.default_generator.manual_seed(task.seed)
        client_state, flops = program.begin(task, private), 0
        for number, phase in enumerate(program.phases):
            step, flat_state = recorder.recorded_step(program, number), recorder.flatten_state(client_state)
            seed, samples = phase_seed(task.seed, program.phases, number), data[phase.split]
            flops += step.flop_counts(flat_state, samples.x).total(len(samples.y), phase)
            samples = with_precomputed_inputs(phase, client_state, samples)
            # Without shuffling, a program predicts as the model is served, and single samples are no problem.
            allows_single_samples = program.batchable or not phase.shuffle
            for i, batch in enumerate(unpadded_batches(samples, phase, seed, allows_single_samples)):
                flat_state = step(step.prepare(flat_state, batch) if i == 0 else flat_state, batch)
            client_state = phase.on_end(flat_state.tree())
        report, new_private = program.end(task, client_state, sample_counts(data))
        return replace(report, flops=flops), new_private


def with_precomputed_inputs(phase: Phase, state: Tree, samples: Samples) -> Samples:
    """Returns the samples of a phase, with the result of `phase.precompute` as inputs if there is one."""
    if phase.precompute is None:
        return samples
    with torch.no_grad():
        return Samples(
            torch.cat([phase.precompute(state, x) for x in torch.split(samples.x, PRECOMPUTE_BATCH_SIZE)]), samples.y
        )


def unpadded_batches(samples: Samples, phase: Phase, seed: int, allows_single_samples: bool) -> Iterator[Batch]:
    """Yields batches without padding.

    Batch norm has no statistics of a single sample. Without `allows_single_samples`, a single sample at the end of an
    epoch joins the batch before it, and a client with only one sample takes no step.
    """
    device = samples.y.device
    epochs = (indices.to(device) for indices in epoch_indices(len(samples.y), phase, seed))
    order = [batch for indices in epochs for batch in torch.split(indices, phase.batch_size)]
    if not allows_single_samples:
        order = _merge_single_samples(order)
    read_x, read_y = index_reader(samples.x), index_reader(samples.y)
    ones = torch.ones(min(len(samples.y), phase.batch_size + 1), device=device)
    for indices, key in zip(order, step_keys(len(order), seed).to(device).unbind(), strict=True):
        yield Batch(read_x(indices), read_y(indices), ones[: len(indices)], key)


def _merge_single_samples(order: Sequence[Tensor]) -> list[Tensor]:
    """Joins every batch of a single sample to the batch before it."""
    batches: list[Tensor] = []
    for indices in order:
        if len(indices) > 1:
            batches.append(indices)
        elif batches:
            batches[-1] = torch.cat([batches[-1], indices])
    return batches


class ClientError(RuntimeError):
    """A program failed on a client. The message names both."""


@contextmanager
def name_client_in_errors(program: ClientProgram, client: ClientId) -> Iterator[None]:
    """Raises ClientError for any exception inside, with the names of the program and the client."""
    try:
        yield
    except Exception as error:
        raise ClientError(f"program {program.name!r} failed on client {client!r}: {error}") from error


class PlainFleet:
    """Runs one client after the other.

    Parameters
    ----------
    data
        The data of the clients.
    private
        The private trees of the clients. The server's code has no access to them.
    """

    def __init__(
        self, data: Mapping[ClientId, ClientData], private: MutableMapping[ClientId, Tree] | None = None
    ) -> None:
        self.data = data
        self._roster = tuple(sorted(data))
        self.private: MutableMapping[ClientId, Tree] = {} if private is None else private
        self.recorder = Recorder()

    def roster(self) -> tuple[ClientId, ...]:
        """Returns all clients."""
        return self._roster

    def execute(self, plan: Plan) -> Mapping[ClientId, Report]:
        """Runs the tasks of the plan and returns the reports."""
        assert plan.program is not None
        return {c: self.execute_one(plan.program, c, task) for c, task in plan.tasks.items()}

    def execute_one(self, program: ClientProgram, client: ClientId, task: Task) -> Report:
        """Runs one task, updates the client's private tree, and returns the report."""
        with name_client_in_errors(program, client):
            report, private = run_program(program, task, self.data[client], self.private.get(client, {}), self.recorder)
        if private is not None:
            self.private[client] = {**self.private.get(client, {}), **private}
        return report
