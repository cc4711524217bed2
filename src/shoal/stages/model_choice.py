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
from shoal.stages.base import OneProgram, WhenEvaluated, with_rows
from shoal.stages.experts import joined, numbered
from shoal.stages.train import Federate
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


def every_model(state: ServerState, client: ClientId | None) -> Mapping[str, Params]:
    return state.models


def chosen(state: ServerState, reports: Mapping[ClientId, Report], offered: Iterable[str] = ()) -> ServerState:
    """Who told a choice is a member of that model, and of no other, from then on; who has no rows has no choice. Of all
    models, or of those that were `offered`."""
    names = sorted(state.models)
    place = [names.index(name) for name in sorted(offered or names)]
    places = {c: place[int(r.tensors["choice"]["place"])] for c, r in with_rows(reports).items()}
    return joined(state, tuple(places), np.array(list(places.values()), dtype=np.int64))


def _choice(program: ClientProgram, state: ServerState, seed: int) -> Plan:
    return Plan(program, {c: Task(state.models, {}, derive_seed(seed, c)) for c in state.roster})


@dataclass(frozen=True)
class FederateChoices(Federate):
    """The cohort is sent all models; each becomes the mean of what those made of it who chose it."""

    def aggregate(self, state: ServerState, reports: Mapping[ClientId, Report]) -> ServerState:
        return super().aggregate(chosen(state, reports), reports)


@dataclass(frozen=True)
class ChooseAgain(OneProgram, WhenEvaluated):
    """Everybody chooses among the models as they are after the round: also who took part, for it chose before."""

    program: ClientProgram
    rounds: int
    every: int
    name: str = "choose"

    def plan(self, state: ServerState, seed: int) -> Plan:
        return _choice(self.program, state, seed)

    def fold(self, state: ServerState, reports: Mapping[ClientId, Report], seed: int) -> ServerState:
        return chosen(state, reports)


@dataclass(frozen=True)
class Starts(OneProgram, HasOptions):
    """First models by chance, one for each group. With `restarts` the first half of the run is divided among as many
    starts; after each, all clients tell the loss of what they would choose, and the best start goes on."""

    group: ClassVar[str] = "cluster"
    program: ClientProgram
    model: Model
    rounds: int
    groups: int = option(3, "Train this many models, of which each client selects the one with the lowest loss.", ge=1)
    restarts: int = option(
        1,
        "Divide the first half of the run among this many random initialisations and continue with the best one. 1 "
        "uses a single initialisation for the whole run.",
        ge=1,
    )
    name: str = "restart"

    def init(self, seed: int) -> ServerState:
        return ServerState(0, numbered([self.model.init(derive_seed(seed, "init", k)) for k in range(self.groups)]))

    @property
    def starts(self) -> int:
        return min(self.restarts, max(1, self.rounds // 2))

    @property
    def trial(self) -> int:
        """Rounds of each start."""
        return max(1, self.rounds // (2 * self.starts))

    @property
    def schedule(self) -> Schedule:
        """At the beginning of a round, so that a round is evaluated with what was trained in it."""
        ends = Rounds(self.trial, self.trial, last=self.starts * self.trial)
        return Schedule("all", (ends,) if self.starts > 1 else ())

    def plan(self, state: ServerState, seed: int) -> Plan:
        return _choice(self.program, state, seed)

    def fold(self, state: ServerState, reports: Mapping[ClientId, Report], seed: int) -> ServerState:
        best = self._better(state.memory.get(self.name, {}), chosen(state, reports), reports)
        if state.round < self.starts * self.trial:
            memory = {**state.memory, self.name: best}
            return replace(state, models=self.init(seed).models, membership={}, memory=memory)
        memory = {k: v for k, v in state.memory.items() if k != self.name}
        models = tree.to_device(best["models"], self.model.device)
        return replace(state, models=models, membership=best.get("membership", {}), memory=memory)

    def _better(self, kept: Tree, state: ServerState, reports: Mapping[ClientId, Report]) -> Tree:
        told = [r.metrics["loss"] for r in reports.values()]
        rows = sum(rows for _, rows in told)
        loss = torch.tensor(sum(total for total, _ in told) / rows if rows else torch.inf, dtype=torch.float64)
        if kept and not loss < kept["loss"]:
            return kept
        return {"loss": loss, "models": tree.to_device(state.models, "cpu"), "membership": dict(state.membership)}
