"""Groups from the first steps of some clients, everybody else by the first steps of their own (FedGroup)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from shoal import tree
from shoal.errors import UserError
from shoal.rng import derive_seed, generator
from shoal.stages.base import EveryRound, OneProgram, ServerOnly, with_rows
from shoal.stages.cluster import GROUPS
from shoal.stages.experts import grouped, joined, noted, without_group
from shoal.stages.vectors import restored, vector
from shoal.types import ClientId, ClientProgram, Params, Plan, Report, ServerState, Task


@dataclass(frozen=True)
class GroupColdStart(OneProgram, EveryRound):
    """Once: some clients, by chance, train the first model a little, and are grouped by where that took them. Each
    group's model is the mean of its members'. Kept are the first model and the directions of the groups, for those who
    come later. Who has no rows goes nowhere, and is in no group."""

    program: ClientProgram
    trainable: tuple[str, ...]
    groups: int = 3
    alpha: int = 20  # clients that are asked, for each group
    name: str = GROUPS

    def __post_init__(self) -> None:
        for key in ("groups", "alpha"):
            if getattr(self, key) < 1:
                raise UserError(f"{self.name}.{key} is {getattr(self, key)}; it must be 1 or more")

    def plan(self, state: ServerState, seed: int) -> Plan:
        if state.membership:
            return Plan()
        order = torch.randperm(len(state.roster), generator=generator(seed))[: self.alpha * self.groups]
        return _trial(self.program, _first(state), [state.roster[i] for i in sorted(order.tolist())], seed)

    def fold(self, state: ServerState, reports: Mapping[ClientId, Report], seed: int) -> ServerState:
        trained = _trained(reports)
        if not trained:
            return state
        from shoal.clusterers import DecomposedClusters

        first, clients = _first(state), list(trained)
        changes = _changes(first, trained, self.trainable)
        labels = DecomposedClusters(self.groups, random_state=seed).fit(changes.double().numpy()).labels_
        insides = [np.flatnonzero(labels == k).tolist() for k in range(int(labels.max()) + 1)]
        directions = torch.stack([changes[inside].mean(0) for inside in insides])
        kept = {"first": vector(first), "directions": directions}
        models = [tree.weighted_mean([trained[clients[i]] for i in inside], [1] * len(inside)) for inside in insides]
        return grouped(replace(state, memory={**state.memory, self.name: kept}), models, clients, labels)


@dataclass(frozen=True)
class ClientColdStart(OneProgram, EveryRound):
    """Whoever is in no group trains the first model a little and joins the group that went the most similar way."""

    program: ClientProgram
    trainable: tuple[str, ...]
    source: str = GROUPS
    name: str = "join"

    def plan(self, state: ServerState, seed: int) -> Plan:
        if self.source not in state.memory:
            return Plan()
        return _trial(self.program, self._start(state), without_group(state, self.name), seed)

    def fold(self, state: ServerState, reports: Mapping[ClientId, Report], seed: int) -> ServerState:
        trained, state = _trained(reports), noted(state, self.name, reports)
        if not trained:
            return state
        changes = _changes(self._start(state), trained, self.trainable)
        directions = state.memory[self.source]["directions"]
        cosines = F.normalize(changes, dim=1) @ F.normalize(directions, dim=1).T
        return joined(state, list(trained), cosines.argmax(1).numpy())  # the least (1 - cosine) / 2

    def _start(self, state: ServerState) -> Params:
        return restored(state.memory[self.source]["first"], _first(state))


@dataclass(frozen=True)
class InterGroup(ServerOnly):
    """Every group's model becomes a mean of all: its own with weight 1, another w with weight eta / |w|."""

    trainable: tuple[str, ...]
    eta: float = 0.0
    name: str = "exchange"

    def __post_init__(self) -> None:
        if self.eta < 0:
            raise UserError(f"cluster.eta is {self.eta}; it must be 0 (no exchange) or more")

    def fold(self, state: ServerState, reports: Mapping[ClientId, Report], seed: int) -> ServerState:
        if not self.eta:
            return state
        lengths = {k: float(vector({n: m[n] for n in self.trainable}).norm()) for k, m in state.models.items()}
        others = {k: self.eta / max(length, 1e-12) for k, length in lengths.items()}
        models = list(state.models.values())
        mixed = {k: tree.weighted_mean(models, list((others | {k: 1.0}).values())) for k in state.models}
        return replace(state, models=mixed)


def _first(state: ServerState) -> Params:
    return next(iter(state.models.values()))


def _trial(program: ClientProgram, model: Params, clients: Sequence[ClientId], seed: int) -> Plan:
    return Plan(program, {c: Task({"first": model}, {}, derive_seed(seed, c)) for c in clients})


def _trained(reports: Mapping[ClientId, Report]) -> dict[ClientId, Params]:
    return {c: r.tensors["model"] for c, r in sorted(with_rows(reports).items())}


def _changes(first: Params, models: Mapping[ClientId, Params], trainable: Sequence[str]) -> Tensor:
    """What each client's training changed: a row of all trainable numbers."""
    return torch.stack([vector({k: m[k] - first[k] for k in trainable}) for m in models.values()])
