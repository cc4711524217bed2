"""Personalisation of the models that a client is served."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from shoal.rng import derive_seed
from shoal.stages.base import DueWhenEvaluated, OneProgram
from shoal.types import ClientId, ClientProgram, ModelsFor, Plan, Report, ServerState, StagePurpose, Task


@dataclass(frozen=True)
class Personalise(OneProgram, DueWhenEvaluated):
    """Every client, not only the cohort, adapts its serving model and keeps the result private."""

    program: ClientProgram
    models_for: ModelsFor
    rounds: int
    every_rounds: int
    cache_models: bool = False
    name: str = "personalise"
    purpose: ClassVar[StagePurpose] = "training"

    def plan(self, state: ServerState, seed: int) -> Plan:
        return Plan(
            self.program,
            {c: Task(self.models_for(state, c), {}, derive_seed(seed, c)) for c in state.roster},
            self.cache_models,
        )

    def fold(self, state: ServerState, reports: Mapping[ClientId, Report], seed: int) -> ServerState:
        return state
