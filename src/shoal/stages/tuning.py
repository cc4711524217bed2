"""How clients fine-tune, chosen by what the fleet's validation rows say of a few candidates."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from shoal.client.train import LocalTraining
from shoal.client.tuning import TryTuning, index_of_most_hits
from shoal.rng import derive_seed
from shoal.stages.base import DueWhenEvaluated, OneProgram, Scheduled
from shoal.types import ClientId, ClientProgram, ModelsFor, Plan, Report, Schedule, ServerState, StagePurpose, Task


@dataclass(frozen=True)
class ChooseTuning(OneProgram, DueWhenEvaluated):
    """Everybody tries all candidates from what it is served; the one with most hits over all clients is taken. Where
    nobody answers, the last choice stands."""

    program: TryTuning
    models_for: ModelsFor
    rounds: int
    every_rounds: int
    name: str = "tune"

    def plan(self, state: ServerState, seed: int) -> Plan:
        return Plan(self.program, {c: Task(self.models_for(state, c), {}, derive_seed(seed, c)) for c in state.roster})

    def fold(self, state: ServerState, reports: Mapping[ClientId, Report], seed: int) -> ServerState:
        if not reports:
            return state
        hits = torch.stack([r.tensors["val"]["hits"] for _, r in sorted(reports.items())]).sum(0)
        epochs_index, rate = index_of_most_hits(hits)
        chosen = {"passes": torch.tensor(epochs_index), "rate": torch.tensor(rate)}
        new_metrics = {
            "tune.epochs": float(self.program.epochs_grid[epochs_index]),
            "tune.lr": self.program.lr_grid[rate],
        }
        return replace(
            state, memory={**state.memory, self.name: chosen}, round_metrics={**state.round_metrics, **new_metrics}
        )


@dataclass(frozen=True)
class PersonaliseTuned(Scheduled):
    """Every client fine-tunes as was chosen and keeps the result; while nothing is chosen, nobody does."""

    tune: ChooseTuning
    training: LocalTraining
    name: str = "personalise"
    purpose: ClassVar[StagePurpose] = "train"

    @property
    def programs(self) -> tuple[ClientProgram, ...]:
        """One for each number of passes: how many there are is part of a program."""
        passes = self.tune.program.epochs_grid
        return tuple(replace(self.training, epochs=n, name=f"{self.name}-{n}") for n in passes)

    @property
    def schedule(self) -> Schedule:
        return self.tune.schedule

    def plan(self, state: ServerState, seed: int) -> Plan:
        if self.tune.name not in state.memory:
            return Plan()
        chosen = state.memory[self.tune.name]
        config = {"lr": self.tune.program.lr_grid[int(chosen["rate"])]}
        models_for = self.tune.models_for
        tasks = {c: Task(models_for(state, c), config, derive_seed(seed, c)) for c in state.roster}
        return Plan(self.programs[int(chosen["passes"])], tasks)

    def fold(self, state: ServerState, reports: Mapping[ClientId, Report], seed: int) -> ServerState:
        return state
