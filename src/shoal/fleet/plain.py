"""The reference fleet: one client after the other, as a real client would work."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import contextmanager

import torch
from torch import Tensor

from shoal.fleet.batches import phase_seed, row_order, step_keys
from shoal.types import Batch, ClientData, ClientId, ClientProgram, Plan, Report, Task, Tree


def counts_of(data: ClientData) -> dict[str, int]:
    return {split: len(examples.y) for split, examples in data.items()}


def run_one(program: ClientProgram, task: Task, data: ClientData, private: Tree) -> tuple[Report, Tree | None]:
    """What one client does with one task. Batches have their true size: nothing is padded here."""
    with torch.random.fork_rng(devices=[]):  # a network of the user's own may draw from the global generator
        torch.default_generator.manual_seed(task.seed)
        s = program.begin(task, private)
        for number, phase in enumerate(program.phases):
            x, y = data[phase.split]
            order = true_batches(row_order(len(y), phase, phase_seed(task.seed, number)), program.batchable)
            keys = step_keys(len(order), phase_seed(task.seed, number)).to(x.device)
            for rows, key in zip(order, keys, strict=True):
                rows = rows.to(x.device)
                s = phase.step(s, Batch(x[rows], y[rows], torch.ones(len(rows), device=x.device), key))
            s = phase.finish(s)
        return program.end(task, s, counts_of(data))


def true_batches(order: Tensor, single_rows: bool) -> list[Tensor]:
    """The rows of each step without padding. Batch norm has no statistics of a single row, so there a row
    that is left over joins the batch before it, and a client with only one row takes no step."""
    batches = [rows[rows >= 0] for rows in order]
    if single_rows:
        return batches
    whole: list[Tensor] = []
    for rows in batches:
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
        self.private: MutableMapping[ClientId, Tree] = {} if private is None else private

    def roster(self) -> tuple[ClientId, ...]:
        return tuple(sorted(self.data))

    def execute(self, plan: Plan) -> Mapping[ClientId, Report]:
        assert plan.program is not None
        return {c: self.execute_one(plan.program, c, task) for c, task in plan.tasks.items()}

    def execute_one(self, program: ClientProgram, client: ClientId, task: Task) -> Report:
        with blaming(program, client):
            report, private = run_one(program, task, self.data[client], self.private.get(client, {}))
        if private is not None:
            self.private[client] = private
        return report
