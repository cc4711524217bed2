"""Clusters that are merged while all clients train one model, and get experts when they are stable (FLACC)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import combinations
from typing import ClassVar

import numpy as np
import torch
from torch.nn import functional as F

from shoal.client_table import ClientTable
from shoal.clusterers.validation import number_by_first_appearance
from shoal.rng import derive_seed
from shoal.stages.base import CLUSTERING_LIBRARIES, OneProgram, ServerOnly
from shoal.stages.cluster import Labels
from shoal.stages.experts import remember_without_samples, set_clusters, unassigned_clients
from shoal.stages.model_choice import assign_by_choice
from shoal.types import ClientId, ClientProgram, HasOptions, Params, Plan, Report, Schedule, ServerState, Task, option

TRAIN_STAGE = "train"


@dataclass(frozen=True)
class FormAgglomerativeClusters(ServerOnly, HasOptions):
    """Merges clusters of clients by the cosines of their updates, and ends with an expert for each cluster.

    Every client starts as a cluster of its own. The clients of a round train the same model, so their updates can be
    compared. Clusters are merged if the cosines, averaged over the rounds that two clients share, are large. When no
    cluster has changed for `patience` rounds, each cluster gets a copy of the model as its expert. Rounds in which
    fewer than two clients trained do not count. Clients of clusters with fewer than `min_size` clients then have none.
    """

    imports_later: ClassVar[tuple[str, ...]] = CLUSTERING_LIBRARIES

    threshold: float = option(
        0.0,
        "Merge two clusters only while all pairs of their clients have updates with a mean cosine above this value.",
        ge=-1,
        le=1,
    )
    patience: int = option(
        5,
        "Give each cluster its own expert after this many rounds without a change of clusters. Rounds in which fewer "
        "than two clients trained do not count.",
        ge=1,
    )
    min_size: int = option(
        2,
        "A cluster with fewer clients than this gets no expert. Its clients join the cluster with the expert that fits "
        "them best.",
        ge=1,
    )
    remerge: bool = option(
        True, "Form the clusters again from single clients in every round. With false every merge is final."
    )
    name: str = "cluster"

    def fold(self, state: ServerState, reports: Mapping[ClientId, Report], seed: int) -> ServerState:
        sent = ClientTable.load(state, TRAIN_STAGE)
        # The updates are large and not needed any more.
        state = replace(state, memory={k: v for k, v in state.memory.items() if k != TRAIN_STAGE})
        if state.membership or len(sent) < 2:
            return state  # nothing can be compared, so this round does not count as one without changes
        from shoal.clusterers import GreedyClusters

        before = state.memory.get(self.name, {"met": {}, "quiet": torch.tensor(0)})
        pairs = _with_new_cosines(ClientTable.from_tree(before["met"]), sent)
        old_labels = pairs["group"].numpy()
        # NaN for two clients that never trained in the same round
        mean_cosines = (pairs["cosines"] / pairs["meetings"]).numpy()
        labels = GreedyClusters(self.threshold).fit(mean_cosines, start=None if self.remerge else old_labels).labels_
        num_unchanged_rounds = (
            int(before["quiet"]) + 1 if np.array_equal(labels, number_by_first_appearance(old_labels)[0]) else 0
        )
        if num_unchanged_rounds >= self.patience and np.bincount(labels).max() >= self.min_size:
            return self._split_into_experts(state, pairs.clients, labels)
        remembered = ClientTable(pairs.clients, {**pairs.columns, "group": torch.from_numpy(labels)}).to_tree()
        return replace(
            state, memory={**state.memory, self.name: {"met": remembered, "quiet": torch.tensor(num_unchanged_rounds)}}
        )

    def _split_into_experts(self, state: ServerState, clients: tuple[ClientId, ...], labels: Labels) -> ServerState:
        is_kept = np.bincount(labels)[labels] >= self.min_size
        clusters, numbers = number_by_first_appearance(labels[is_kept])
        (model,) = state.models.values()
        memory = {**state.memory, self.name: {"formed": torch.tensor(state.round)}}
        members = [c for c, k in zip(clients, is_kept.tolist(), strict=True) if k]
        return set_clusters(replace(state, memory=memory), [model] * len(numbers), members, clusters)


def _with_new_cosines(pairs: ClientTable, sent: ClientTable) -> ClientTable:
    """Returns, for all pairs of clients, in how many rounds both trained and the sum of their cosines in these rounds.

    A client that trained for the first time is a cluster of its own.
    """
    clients = tuple(sorted({*pairs.clients, *sent.clients}))
    index_of_client = {c: i for i, c in enumerate(clients)}
    cosines = torch.zeros(len(clients), len(clients), dtype=torch.float64)
    meetings = torch.zeros_like(cosines)
    cluster = len(clients) + torch.arange(len(clients))
    if len(pairs):
        old_indices = torch.tensor([index_of_client[c] for c in pairs.clients])
        cosines[old_indices[:, None], old_indices], meetings[old_indices[:, None], old_indices] = (
            pairs["cosines"],
            pairs["meetings"],
        )
        cluster[old_indices] = pairs["group"]
    unit = F.normalize(sent["update"].double(), dim=1)
    new_indices = torch.tensor([index_of_client[c] for c in sent.clients])
    cosines[new_indices[:, None], new_indices] += unit @ unit.T
    meetings[new_indices[:, None], new_indices] += 1
    return ClientTable(clients, {"cosines": cosines, "meetings": meetings, "group": cluster})


@dataclass(frozen=True)
class JoinBestCluster(OneProgram):
    """Lets a client without a cluster choose the best expert and join its cluster.

    All clusters start with the same model. Models that still equal another one are not offered, and no client is
    queried while fewer than two different models remain.
    """

    program: ClientProgram
    name: str = "join"
    schedule: ClassVar[Schedule] = Schedule("unassigned")

    def plan(self, state: ServerState, seed: int) -> Plan:
        unassigned = unassigned_clients(state, self.name)
        if not state.membership or not unassigned:
            return Plan()
        offered = _distinct_models(state.models)
        if len(offered) < min(2, len(state.models)):
            return Plan()
        return Plan(self.program, {c: Task(offered, {}, derive_seed(seed, c)) for c in unassigned})

    def fold(self, state: ServerState, reports: Mapping[ClientId, Report], seed: int) -> ServerState:
        return (
            assign_by_choice(
                remember_without_samples(state, self.name, reports), reports, _distinct_models(state.models)
            )
            if reports
            else state
        )


def _distinct_models(models: Mapping[str, Params]) -> dict[str, Params]:
    """Returns the models that differ from all others."""
    twins = {name for a, b in combinations(models, 2) if _are_equal(models[a], models[b]) for name in (a, b)}
    return {name: model for name, model in models.items() if name not in twins}


def _are_equal(a: Params, b: Params) -> bool:
    return all(torch.equal(x, b[k]) for k, x in a.items())
