"""A program that clients run once, in the second round in which they are selected."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from shoal.client_table import ClientTable
from shoal.rng import derive_seed
from shoal.stages.base import OneProgram
from shoal.types import ClientId, ClientProgram, ModelsFor, Plan, Report, Schedule, ServerState, StagePurpose, Task


@dataclass(frozen=True)
class RunOnSecondParticipation(OneProgram):
    """Runs `program` on clients that are selected again, until a client has reported that it is done."""

    program: ClientProgram
    models_for: ModelsFor
    name: str
    purpose: ClassVar[StagePurpose] = "training"
    schedule: ClassVar[Schedule] = Schedule("returning")

    def plan(self, state: ServerState, seed: int) -> Plan:
        done = self._done_by_client(state)
        returning = [c for c in state.cohort if done.get(c) == 0]
        if not returning:
            return Plan()
        return Plan(self.program, {c: Task(self.models_for(state, c), {}, derive_seed(seed, c)) for c in returning})

    def fold(self, state: ServerState, reports: Mapping[ClientId, Report], seed: int) -> ServerState:
        done = dict.fromkeys(state.cohort, 0.0) | self._done_by_client(state)
        done |= {c: report.metrics["done"][0] for c, report in reports.items()}
        table = ClientTable.from_rows({c: {"done": torch.tensor(x)} for c, x in done.items()})
        return replace(state, memory={**state.memory, self.name: table.to_tree()})

    def _done_by_client(self, state: ServerState) -> dict[ClientId, float]:
        table = ClientTable.load(state, self.name)
        return table.to_dict("done")
