"""The reference fleet: one client after the other, as a real client would work."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from shoal import tree
from shoal.fleet.batches import phase_seed, row_order, step_keys
from shoal.fleet.tracing import FlatStep, Recorder, kind_of
from shoal.types import Batch, ClientData, ClientId, ClientProgram, Examples, Phase, Plan, Report, Task, Tree


def counts_of(data: ClientData) -> dict[str, int]:
    return {split: len(examples.y) for split, examples in data.items()}


def run_one(
    program: ClientProgram, task: Task, data: ClientData, private: Tree, recorder: Recorder | None = None
) -> tuple[Report, Tree | None]:
    """What one client does with one task. Batches have their true size: nothing is padded here."""
    recorder = Recorder() if recorder is None else recorder
    with torch.random.fork_rng(devices=[]):  # a network of the user's own may draw from the global generator
        torch.default_generator.manual_seed(task.seed)
        s = program.begin(task, private)
        for number, phase in enumerate(program.phases):
            kind, seed = kind_of(program, number), phase_seed(task.seed, number)
            bones, leaves = tree.skeleton(s), tree.flatten(s)
            for batch in true_batches(data[phase.split], phase, seed, program.batchable):
                bones, leaves = _stepped(recorder, kind, phase, bones, leaves, batch)
            s = phase.finish(tree.filled(bones, leaves))
        return program.end(task, s, counts_of(data))


def _stepped(
    recorder: Recorder, kind: Hashable, phase: Phase, bones: Tree, leaves: dict[str, Tensor], batch: Batch
) -> tuple[Tree, dict[str, Tensor]]:
    flat = FlatStep(phase.step, bones, tuple(leaves))

    def step(*tensors: Tensor) -> list[Tensor]:
        return flat(tensors[:-4], Batch(*tensors[-4:]))

    outputs, done = recorder(kind, step, [*leaves.values(), *batch], flat)
    return done.bones, done.merged(leaves, outputs)


def true_batches(held: Examples, phase: Phase, seed: int, single_rows: bool) -> Iterator[Batch]:
    """Without padding. Batch norm has no statistics of a single row, so there a row that is left over joins
    the batch before it, and a client with only one row takes no step."""
    x, y = held
    order = [rows[rows >= 0] for rows in row_order(len(y), phase, seed)]
    if not single_rows:
        order = _without_single_rows(order)
    for rows, key in zip(order, step_keys(len(order), seed).to(x.device), strict=True):
        rows = rows.to(x.device)
        yield Batch(x[rows], y[rows], torch.ones(len(rows), device=x.device), key)


def _without_single_rows(order: Sequence[Tensor]) -> list[Tensor]:
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
def blaming(program: ClientProgram, client: ClientId) -> Iterator[None]:
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
        with blaming(program, client):
            report, private = run_one(program, task, self.data[client], self.private.get(client, {}), self.recorder)
        if private is not None:
            self.private[client] = private
        return report
