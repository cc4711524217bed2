"""What the server learns about clients before it chooses among them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from shoal.client_table import ClientTable
from shoal.rng import derive_seed
from shoal.stages.base import OneProgram
from shoal.stages.vectors import row
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
class AskOnce(OneProgram, HasOptions):
    """Everyone who has not answered yet is asked; answers are kept, with the round they are of ("told"). Newcomers are
    asked when they come, or never. With `every` all are asked anew every so many rounds, and nobody before round
    `after`."""

    program: ClientProgram
    models_for: ModelsFor | None = None  # none: nothing needs to be sent
    newcomers: bool = True
    every: int = option(0, "Query all clients again after this many rounds. 0 queries each client only once.", ge=0)
    after: int = 0
    reuse: bool = False  # clients keep what they are sent
    name: str = "represent"

    @property
    def schedule(self) -> Schedule:
        if not self.newcomers:
            return Schedule("all", (Rounds(self.after, 0),), "retry")
        return Schedule("all", (Rounds(self.after, self.every),), "late-joining")

    def plan(self, state: ServerState, seed: int) -> Plan:
        known, now = set(ClientTable.load(state, self.name).clients), self.schedule.clients_in(state.round)
        if now == "none" or (known and not self.newcomers):
            return Plan()
        again = now == "all" and state.round > self.after
        asked = [c for c in state.roster if again or c not in known]
        models = {c: self.models_for(state, c) if self.models_for else {} for c in asked}
        return Plan(self.program, {c: Task(models[c], {}, derive_seed(seed, c)) for c in asked}, self.reuse)

    def fold(self, state: ServerState, reports: Mapping[ClientId, Report], seed: int) -> ServerState:
        if not reports:
            return state
        told = {"told": torch.tensor(state.round)}
        known = ClientTable.load(state, self.name).updated_with(
            ClientTable.from_rows({c: row(r) | told for c, r in reports.items()})
        )
        return replace(state, memory={**state.memory, self.name: known.to_tree()})
