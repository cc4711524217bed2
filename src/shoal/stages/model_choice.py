"""Clients that choose among all models: who chose what, and which first models to choose from."""

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
    return state.models


def assign_by_choice(
    state: ServerState, reports: Mapping[ClientId, Report], offered: Iterable[str] = ()
) -> ServerState:
    """Who told a choice is a member of that model, and of no other, from then on; who has no rows has no choice. Of all
    models, or of those that were `offered`."""
    names = sorted(state.models)
    offered_indices = [names.index(name) for name in sorted(offered or names)]
    places = {c: offered_indices[int(r.tensors["choice"]["place"])] for c, r in with_samples(reports).items()}
    return assign_clients(state, tuple(places), np.array(list(places.values()), dtype=np.int64))


def _choice_plan(program: ClientProgram, state: ServerState, seed: int) -> Plan:
    return Plan(program, {c: Task(state.models, {}, derive_seed(seed, c)) for c in state.roster})


@dataclass(frozen=True)
class AggregateByChoice(TrainAndAggregate):
    """The cohort is sent all models; each becomes the mean of what those made of it who chose it."""

    def aggregate(self, state: ServerState, reports: Mapping[ClientId, Report]) -> ServerState:
        return super().aggregate(assign_by_choice(state, reports), reports)


@dataclass(frozen=True)
class RechooseModels(OneProgram, DueWhenEvaluated):
    """Everybody chooses among the models as they are after the round: also who took part, for it chose before."""

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
    """First models by chance, one for each group. With `restarts` the first half of the run is divided among as many
    starts; after each, all clients tell the loss of what they would choose, and the best start goes on."""

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
        return ServerState(
            0, named_experts([self.model.init(derive_seed(seed, "init", k)) for k in range(self.num_clusters)])
        )

    @property
    def num_starts(self) -> int:
        return min(self.restarts, max(1, self.rounds // 2))

    @property
    def rounds_per_start(self) -> int:
        """Rounds of each start."""
        return max(1, self.rounds // (2 * self.num_starts))

    @property
    def schedule(self) -> Schedule:
        """At the beginning of a round, so that a round is evaluated with what was trained in it."""
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
        rows = sum(rows for _, rows in losses)
        loss = torch.tensor(sum(total for total, _ in losses) / rows if rows else torch.inf, dtype=torch.float64)
        if kept and not loss < kept["loss"]:
            return kept
        return {"loss": loss, "models": tree.to_device(state.models, "cpu"), "membership": dict(state.membership)}
