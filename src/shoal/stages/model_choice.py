"""Clients that choose among all models: the server assigns them to the chosen model (IFCA)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import torch

from shoal import tree
from shoal.models import Model
from shoal.rng import derive_seed
from shoal.stages.base import DueWhenEvaluated, OneProgram, with_samples
from shoal.stages.experts import assign_clients, named_experts
from shoal.stages.train import TrainAndAggregate
from shoal.types import (
    ClientId,
    ClientProgram,
    HasOptions,
    Params,
    Plan,
    Report,
    Rounds,
    Schedule,
    ServerState,
    Task,
    Tree,
    option,
)


def all_models(state: ServerState, client: ClientId | None) -> Mapping[str, Params]:
    """Returns all models, for every client."""
    return state.models


def assign_by_choice(
    state: ServerState, reports: Mapping[ClientId, Report], offered: Iterable[str] = ()
) -> ServerState:
    """Returns the state in which each client that reported a choice belongs to the chosen model alone.

    The choice is an index into the sorted names of `offered`, or of all models. Clients without samples choose nothing.
    """
    names = sorted(state.models)
    offered_indices = [names.index(name) for name in sorted(offered or names)]
    index_by_client = {c: offered_indices[int(r.tensors["choice"]["place"])] for c, r in with_samples(reports).items()}
    return assign_clients(state, tuple(index_by_client), np.array(list(index_by_client.values()), dtype=np.int64))


def _choice_plan(program: ClientProgram, state: ServerState, seed: int) -> Plan:
    return Plan(program, {c: Task(state.models, {}, derive_seed(seed, c)) for c in state.roster})


@dataclass(frozen=True)
class AggregateByChoice(TrainAndAggregate):
    """Sends all models to the cohort and averages each over the clients that chose and trained it."""

    def aggregate(self, state: ServerState, reports: Mapping[ClientId, Report]) -> ServerState:
        return super().aggregate(assign_by_choice(state, reports), reports)


@dataclass(frozen=True)
class RechooseModels(OneProgram, DueWhenEvaluated):
    """Lets all clients choose among the models after the round, also the cohort, which chose before its training."""

    program: ClientProgram
    rounds: int
    every_rounds: int
    name: str = "choose"

    def plan(self, state: ServerState, seed: int) -> Plan:
        return _choice_plan(self.program, state, seed)

    def fold(self, state: ServerState, reports: Mapping[ClientId, Report], seed: int) -> ServerState:
        return assign_by_choice(state, reports)


@dataclass(frozen=True)
class RandomRestarts(OneProgram, HasOptions):
    """Initialises one random model for each cluster, several times with `restarts`.

    With `restarts` above 1 the first half of the run is divided among as many starts. After each start all clients
    report the loss of the model that they would choose, and the run continues with the best start.
    """

    group: ClassVar[str] = "cluster"
    program: ClientProgram
    model: Model
    rounds: int
    num_clusters: int = option(
        3, "Train this many models, of which each client selects the one with the lowest loss.", ge=1
    )
    restarts: int = option(
        1,
        "Divide the first half of the run among this many random initialisations and continue with the best one. 1 "
        "uses a single initialisation for the whole run.",
        ge=1,
    )
    name: str = "restart"

    def init(self, seed: int) -> ServerState:
        """Returns the first state, with random models."""
        return ServerState(
            0, named_experts([self.model.init(derive_seed(seed, "init", k)) for k in range(self.num_clusters)])
        )

    @property
    def num_starts(self) -> int:
        """Number of starts, which is at most half of the rounds."""
        return min(self.restarts, max(1, self.rounds // 2))

    @property
    def rounds_per_start(self) -> int:
        """Number of rounds of each start."""
        return max(1, self.rounds // (2 * self.num_starts))

    @property
    def schedule(self) -> Schedule:
        """Is due at the beginning of the round after each start, before that round trains the next models."""
        ends = Rounds(self.rounds_per_start, self.rounds_per_start, last=self.num_starts * self.rounds_per_start)
        return Schedule("all", (ends,) if self.num_starts > 1 else ())

    def plan(self, state: ServerState, seed: int) -> Plan:
        return _choice_plan(self.program, state, seed)

    def fold(self, state: ServerState, reports: Mapping[ClientId, Report], seed: int) -> ServerState:
        best = self._better_start(state.memory.get(self.name, {}), assign_by_choice(state, reports), reports)
        if state.round < self.num_starts * self.rounds_per_start:
            memory = {**state.memory, self.name: best}
            return replace(state, models=self.init(seed).models, membership={}, memory=memory)
        memory = {k: v for k, v in state.memory.items() if k != self.name}
        models = tree.to_device(best["models"], self.model.device)
        return replace(state, models=models, membership=best.get("membership", {}), memory=memory)

    def _better_start(self, kept: Tree, state: ServerState, reports: Mapping[ClientId, Report]) -> Tree:
        losses = [r.metrics["loss"] for r in reports.values()]
        num_samples = sum(num_samples for _, num_samples in losses)
        loss = torch.tensor(
            sum(total for total, _ in losses) / num_samples if num_samples else torch.inf, dtype=torch.float64
        )
        if kept and not loss < kept["loss"]:
            return kept
        return {"loss": loss, "models": tree.to_device(state.models, "cpu"), "membership": dict(state.membership)}
