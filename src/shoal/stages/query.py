"""What the server learns about clients before it chooses among them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from shoal.client_table import ClientTable
from shoal.rng import derive_seed
from shoal.stages.base import OneProgram
from shoal.stages.vectors import report_row
from shoal.types import (
    ClientId,
    ClientProgram,
    HasOptions,
    ModelsFor,
    Plan,
    Report,
    Rounds,
    Schedule,
    ServerState,
    Task,
    option,
)


@dataclass(frozen=True)
class QueryClients(OneProgram, HasOptions):
    """Everyone who has not answered yet is asked; answers are kept, with the round they are of ("told"). Newcomers are
    asked when they come, or never. With `every` all are asked anew every so many rounds, and nobody before round
    `after`."""

    program: ClientProgram
    models_for: ModelsFor | None = None  # none: nothing needs to be sent
    includes_late_clients: bool = True
    every_rounds: int = option(
        0, "Query all clients again after this many rounds. 0 queries each client only once.", ge=0
    )
    first_round: int = 0
    cache_models: bool = False  # clients keep what they are sent
    name: str = "represent"

    @property
    def schedule(self) -> Schedule:
        if not self.includes_late_clients:
            return Schedule("all", (Rounds(self.first_round, 0),), "retry")
        return Schedule("all", (Rounds(self.first_round, self.every_rounds),), "late-joining")

    def plan(self, state: ServerState, seed: int) -> Plan:
        known, now = set(ClientTable.load(state, self.name).clients), self.schedule.clients_in(state.round)
        if now == "none" or (known and not self.includes_late_clients):
            return Plan()
        again = now == "all" and state.round > self.first_round
        asked = [c for c in state.roster if again or c not in known]
        models = {c: self.models_for(state, c) if self.models_for else {} for c in asked}
        return Plan(self.program, {c: Task(models[c], {}, derive_seed(seed, c)) for c in asked}, self.cache_models)

    def fold(self, state: ServerState, reports: Mapping[ClientId, Report], seed: int) -> ServerState:
        if not reports:
            return state
        told = {"told": torch.tensor(state.round)}
        known = ClientTable.load(state, self.name).updated_with(
            ClientTable.from_rows({c: report_row(r) | told for c, r in reports.items()})
        )
        return replace(state, memory={**state.memory, self.name: known.to_tree()})
