"""Groups that grow while all train one model, and part when they grow no more (FLACC)."""

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
    """After training: clients of one round started from one model, so their updates can be compared. Every client is a
    group; those that pull in one direction, on average over the rounds they met in, are merged. When nothing has
    changed for `patience` rounds, not counting those in which fewer than two trained, each group is given a copy of the
    model and goes its own way; clients of groups with fewer than `smallest` are then in none."""

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
        state = replace(
            state, memory={k: v for k, v in state.memory.items() if k != TRAIN_STAGE}
        )  # large, and used now
        if state.membership or len(sent) < 2:
            return state  # nothing to compare: that nothing changes then means nothing
        from shoal.clusterers import GreedyClusters

        before = state.memory.get(self.name, {"met": {}, "quiet": torch.tensor(0)})
        known = _with_new_cosines(ClientTable.from_tree(before["met"]), sent)
        groups = known["group"].numpy()
        means = (known["cosines"] / known["meetings"]).numpy()  # 0 / 0 where two never met: not a number
        found = GreedyClusters(self.threshold).fit(means, start=None if self.remerge else groups).labels_
        quiet = int(before["quiet"]) + 1 if np.array_equal(found, number_by_first_appearance(groups)[0]) else 0
        if quiet >= self.patience and np.bincount(found).max() >= self.min_size:
            return self._split_into_experts(state, known.clients, found)
        met = ClientTable(known.clients, {**known.columns, "group": torch.from_numpy(found)}).to_tree()
        return replace(state, memory={**state.memory, self.name: {"met": met, "quiet": torch.tensor(quiet)}})

    def _split_into_experts(self, state: ServerState, clients: tuple[ClientId, ...], labels: Labels) -> ServerState:
        kept = np.bincount(labels)[labels] >= self.min_size
        groups, numbers = number_by_first_appearance(labels[kept])
        (model,) = state.models.values()
        memory = {**state.memory, self.name: {"formed": torch.tensor(state.round)}}
        members = [c for c, k in zip(clients, kept.tolist(), strict=True) if k]
        return set_clusters(replace(state, memory=memory), [model] * len(numbers), members, groups)


def _with_new_cosines(known: ClientTable, sent: ClientTable) -> ClientTable:
    """Of all pairs of clients that have trained: how often in the same round, and the sum of their cosines then. Who
    trained for the first time is a group of its own."""
    clients = tuple(sorted({*known.clients, *sent.clients}))
    place = {c: i for i, c in enumerate(clients)}
    cosines = torch.zeros(len(clients), len(clients), dtype=torch.float64)
    meetings = torch.zeros_like(cosines)
    group = len(clients) + torch.arange(len(clients))
    if len(known):
        old = torch.tensor([place[c] for c in known.clients])
        cosines[old[:, None], old], meetings[old[:, None], old] = known["cosines"], known["meetings"]
        group[old] = known["group"]
    unit = F.normalize(sent["update"].double(), dim=1)
    now = torch.tensor([place[c] for c in sent.clients])
    cosines[now[:, None], now] += unit @ unit.T
    meetings[now[:, None], now] += 1
    return ClientTable(clients, {"cosines": cosines, "meetings": meetings, "group": group})


@dataclass(frozen=True)
class JoinBestCluster(OneProgram):
    """Whoever is in no group chooses among the models of groups, and joins that group. Groups part with one model:
    those that still have the same as another are not offered, and nobody is asked while that leaves no choice."""

    program: ClientProgram
    name: str = "join"
    schedule: ClassVar[Schedule] = Schedule("unassigned")

    def plan(self, state: ServerState, seed: int) -> Plan:
        asked = unassigned_clients(state, self.name)
        if not state.membership or not asked:
            return Plan()
        offered = _distinct_models(state.models)
        if len(offered) < min(2, len(state.models)):
            return Plan()
        return Plan(self.program, {c: Task(offered, {}, derive_seed(seed, c)) for c in asked})

    def fold(self, state: ServerState, reports: Mapping[ClientId, Report], seed: int) -> ServerState:
        return (
            assign_by_choice(
                remember_without_samples(state, self.name, reports), reports, _distinct_models(state.models)
            )
            if reports
            else state
        )


def _distinct_models(models: Mapping[str, Params]) -> dict[str, Params]:
    """Those that no other is the same as."""
    twins = {name for a, b in combinations(models, 2) if _are_equal(models[a], models[b]) for name in (a, b)}
    return {name: model for name, model in models.items() if name not in twins}


def _are_equal(a: Params, b: Params) -> bool:
    return all(torch.equal(x, b[k]) for k, x in a.items())
