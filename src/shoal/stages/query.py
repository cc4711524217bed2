"""The server queries clients, for example for their label distribution, before it selects or clusters them."""

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
    """Queries every client that has not reported yet and remembers the reports with their round.

    A late-joining client is queried when it joins, unless `includes_late_clients` is false. With `every_rounds` above 0
    all clients are queried again after that many rounds. The first query is in round `first_round`.
    """

    program: ClientProgram
    models_for: ModelsFor | None = None  # None: the task contains no model
    includes_late_clients: bool = True
    every_rounds: int = option(
        0,
        "Let all clients report their representation again after this many rounds. 0 queries each client only once.",
        ge=0,
    )
    first_round: int = 0
    cache_models: bool = False  # whether clients cache the models of the task
    name: str = "represent"

    @property
    def schedule(self) -> Schedule:
        if not self.includes_late_clients:
            return Schedule("all", (Rounds(self.first_round, 0),), "retry")
        return Schedule("all", (Rounds(self.first_round, self.every_rounds),), "late-joining")

    def plan(self, state: ServerState, seed: int) -> Plan:
        reported_clients, recipients = (
            set(ClientTable.load(state, self.name).clients),
            self.schedule.clients_in(state.round),
        )
        if recipients == "none" or (reported_clients and not self.includes_late_clients):
            return Plan()
        queries_all = recipients == "all" and state.round > self.first_round
        queried = [c for c in state.roster if queries_all or c not in reported_clients]
        models = {c: self.models_for(state, c) if self.models_for else {} for c in queried}
        return Plan(self.program, {c: Task(models[c], {}, derive_seed(seed, c)) for c in queried}, self.cache_models)

    def fold(self, state: ServerState, reports: Mapping[ClientId, Report], seed: int) -> ServerState:
        if not reports:
            return state
        report_round = {"told": torch.tensor(state.round)}
        reported = ClientTable.load(state, self.name).updated_with(
            ClientTable.from_rows({c: report_row(r) | report_round for c, r in reports.items()})
        )
        return replace(state, memory={**state.memory, self.name: reported.to_tree()})
