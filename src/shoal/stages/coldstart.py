"""Clusters from the first updates of some clients. All others join by their own first update (FedGroup)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from shoal import tree
from shoal.rng import derive_seed, generator
from shoal.stages.base import CLUSTERING_LIBRARIES, OneProgram, ServerOnly, with_samples
from shoal.stages.cluster import CLUSTER_STAGE, Floats
from shoal.stages.experts import assign_clients, remember_without_samples, set_clusters, unassigned_clients
from shoal.stages.vectors import UNBOUNDED, flatten_params, nearest_direction, unflatten_params
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
    option,
)


@dataclass(frozen=True)
class FormColdStartClusters(OneProgram, HasOptions):
    """Forms clusters once, from the updates with which some random clients change the first model.

    The model of a cluster is the mean of its members' trained models. The server remembers the first model and the
    mean update of each cluster, so that other clients can join later. A client without samples is in no cluster.
    """

    imports_later: ClassVar[tuple[str, ...]] = CLUSTERING_LIBRARIES

    program: ClientProgram
    trainable: tuple[str, ...]
    num_clusters: int = option(3, "Form this many clusters from the directions of first updates.", ge=1)
    alpha: int = option(20, "This many clients per cluster, drawn at random, train once to form the clusters.", ge=1)
    name: str = CLUSTER_STAGE
    schedule: ClassVar[Schedule] = Schedule("sample", (Rounds(0, 0),), "retry")

    def plan(self, state: ServerState, seed: int) -> Plan:
        if state.membership:
            return Plan()
        order = torch.randperm(len(state.roster), generator=generator(seed))[: self.alpha * self.num_clusters]
        return _first_training_plan(
            self.program, _first_model(state), [state.roster[i] for i in sorted(order.tolist())], seed
        )

    def fold(self, state: ServerState, reports: Mapping[ClientId, Report], seed: int) -> ServerState:
        trained = _trained_models(reports)
        if not trained:
            return state
        from shoal.clusterers import DecomposedClusters

        first, clients = _first_model(state), list(trained)
        updates = _flattened_updates(first, trained, self.trainable)
        labels = DecomposedClusters(self.num_clusters, random_state=seed).fit(updates.double().numpy()).labels_
        members_by_cluster = [np.flatnonzero(labels == k).tolist() for k in range(int(labels.max()) + 1)]
        directions = torch.stack([updates[members].mean(0) for members in members_by_cluster])
        remembered = {"first": flatten_params(first), "directions": directions}
        models = [
            tree.weighted_mean([trained[clients[i]] for i in members], [1] * len(members))
            for members in members_by_cluster
        ]
        return set_clusters(replace(state, memory={**state.memory, self.name: remembered}), models, clients, labels)

    @property
    def representation_bounds(self) -> tuple[float, float]:
        return UNBOUNDED

    def representation_width(self, state: ServerState) -> int | None:
        directions = self._directions(state)
        return None if directions is None else int(directions.shape[1])

    def cluster_weights(self, state: ServerState, representation: Floats) -> Floats:
        directions = self._directions(state)
        assert directions is not None, "representation_width must be checked before cluster_weights"
        return nearest_direction(directions, representation)

    def _directions(self, state: ServerState) -> Tensor | None:
        directions: Tensor | None = state.memory.get(self.name, {}).get("directions")
        return directions


@dataclass(frozen=True)
class JoinByFirstUpdate(OneProgram):
    """Lets a client without a cluster train the first model and join the cluster with the most similar update."""

    program: ClientProgram
    trainable: tuple[str, ...]
    source: str = CLUSTER_STAGE
    name: str = "join"
    schedule: ClassVar[Schedule] = Schedule("unassigned")

    def plan(self, state: ServerState, seed: int) -> Plan:
        if self.source not in state.memory:
            return Plan()
        return _first_training_plan(self.program, self._start_model(state), unassigned_clients(state, self.name), seed)

    def fold(self, state: ServerState, reports: Mapping[ClientId, Report], seed: int) -> ServerState:
        trained, state = _trained_models(reports), remember_without_samples(state, self.name, reports)
        if not trained:
            return state
        updates = _flattened_updates(self._start_model(state), trained, self.trainable)
        directions = state.memory[self.source]["directions"]
        cosines = F.normalize(updates, dim=1) @ F.normalize(directions, dim=1).T
        return assign_clients(state, list(trained), cosines.argmax(1).numpy())  # the smallest distance (1 - cosine) / 2

    def _start_model(self, state: ServerState) -> Params:
        return unflatten_params(state.memory[self.source]["first"], _first_model(state))


@dataclass(frozen=True)
class ExchangeBetweenClusters(ServerOnly, HasOptions):
    """Averages every expert with all others: its own parameters have weight 1, and others w have weight eta / |w|."""

    group: ClassVar[str] = CLUSTER_STAGE
    trainable: tuple[str, ...]
    eta: float = option(
        0.0,
        "Average each expert with all others after every round. Another expert has this weight divided by the norm of "
        "its parameters, and 0 turns the exchange off.",
        ge=0,
    )
    name: str = "exchange"

    def fold(self, state: ServerState, reports: Mapping[ClientId, Report], seed: int) -> ServerState:
        if not self.eta:
            return state
        norms = {k: float(flatten_params({n: m[n] for n in self.trainable}).norm()) for k, m in state.models.items()}
        weights = {k: self.eta / max(norm, 1e-12) for k, norm in norms.items()}
        models = list(state.models.values())
        mixed = {k: tree.weighted_mean(models, list((weights | {k: 1.0}).values())) for k in state.models}
        return replace(state, models=mixed)


def _first_model(state: ServerState) -> Params:
    return next(iter(state.models.values()))


def _first_training_plan(program: ClientProgram, model: Params, clients: Sequence[ClientId], seed: int) -> Plan:
    return Plan(program, {c: Task({"first": model}, {}, derive_seed(seed, c)) for c in clients})


def _trained_models(reports: Mapping[ClientId, Report]) -> dict[ClientId, Params]:
    return {c: r.tensors["model"] for c, r in sorted(with_samples(reports).items())}


def _flattened_updates(first: Params, models: Mapping[ClientId, Params], trainable: Sequence[str]) -> Tensor:
    """Returns the update of each client as a row of all trainable parameters."""
    return torch.stack([flatten_params({k: m[k] - first[k] for k in trainable}) for m in models.values()])
