"""Choice of the learning rate and the number of epochs of fine-tuning by the validation samples of all clients."""

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
    """Chooses the candidate with the most correct predictions over all clients, which all try every candidate.

    If no client reports, the last choice stays.
    """

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
        epochs_index, rate_index = index_of_most_hits(hits)
        chosen = {"passes": torch.tensor(epochs_index), "rate": torch.tensor(rate_index)}
        new_metrics = {
            "tune.epochs": float(self.program.epochs_grid[epochs_index]),
            "tune.lr": self.program.lr_grid[rate_index],
        }
        return replace(
            state, memory={**state.memory, self.name: chosen}, round_metrics={**state.round_metrics, **new_metrics}
        )


@dataclass(frozen=True)
class PersonaliseTuned(Scheduled):
    """Fine-tunes the serving model of every client with the chosen candidate, once there is one."""

    tune: ChooseTuning
    training: LocalTraining
    name: str = "personalise"
    purpose: ClassVar[StagePurpose] = "training"

    @property
    def programs(self) -> tuple[ClientProgram, ...]:
        """Returns a program for each number of epochs, because the number is part of a program."""
        epochs_grid = self.tune.program.epochs_grid
        return tuple(replace(self.training, epochs=n, name=f"{self.name}-{n}") for n in epochs_grid)

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
