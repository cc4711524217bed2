"""Clusters that overlap, found anew from what training changed, and a model for each (SCMoE-PFL)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import ClassVar, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from shoal import tree
from shoal.client_table import ClientTable
from shoal.clusterers.directions import principal_directions
from shoal.rng import derive_seed, generator
from shoal.stages.base import CLUSTERING, with_rows
from shoal.stages.experts import numbered
from shoal.stages.train import Federate, ServerUpdate
from shoal.stages.vectors import UNBOUNDED, nearest_direction, vector
from shoal.types import ClientId, HasOptions, OnlyIf, Params, Plan, Report, ServerState, option

Floats = NDArray[np.float64]
SKETCH = 2**18  # numbers of an update that are kept
OVERLAPPING = OnlyIf("cluster.by is mctc", lambda rule: rule.by == "mctc")
DIRECTIONS_ARE_COMPARED = OnlyIf(
    "cluster.by is not one or cluster.compare is true", lambda rule: rule.by != "one" or rule.compare
)


@dataclass(frozen=True)
class Overlap(HasOptions):
    """Which clients train a model together: each in one cluster or several, by where training took them.

    Updates are made as long as each other and projected on the principal components that hold `share` of their variance
    (Eq. 1-2). `mctc` finds overlapping clusters among them; k-means and hierarchical clustering are there to compare,
    and `one` is a single cluster. Clients are clustered every so many rounds (0: once), and whenever somebody is new.
    With `compare` the record of a round says how well apart clusters are, and those of the other two on the same rows.
    """

    group: ClassVar[str] = "cluster"
    by: Literal["mctc", "kmeans", "hierarchical", "one"] = option(
        "mctc",
        "Cluster the directions of updates by overlapping clusters (mctc), k-means (kmeans) or hierarchical clustering "
        "(hierarchical), or put all clients into one cluster (one).",
    )
    clusters: int = option(
        4, "Form at most this many clusters from the directions of updates.", ge=1, only_if=DIRECTIONS_ARE_COMPARED
    )
    threshold: float = option(
        0.2,
        "A client belongs to each cluster if the cosine between its update and the cluster's centre is at least this "
        "value. Otherwise it joins only the nearest cluster.",
        ge=-1,
        only_if=OVERLAPPING,
    )
    guarded: bool = option(
        True,
        "Do not start a cluster from a client that would already belong to an earlier cluster. With false clusters "
        "start as in the paper.",
        only_if=OVERLAPPING,
    )
    validate: bool = option(
        True,
        "Raise the threshold and then reduce the number of clusters while cluster centres are too similar.",
        only_if=OVERLAPPING,
    )
    limit: float = option(
        0.3,
        "Cluster centres are too similar if the mean cosine between two of them is above this value.",
        ge=-1,
        only_if=OnlyIf(
            "cluster.by is mctc and cluster.validate is true", lambda rule: rule.by == "mctc" and rule.validate
        ),
    )
    share: float = option(
        0.95,
        "Keep as many principal components of the updates as explain this fraction of the variance.",
        gt=0,
        le=1,
        only_if=DIRECTIONS_ARE_COMPARED,
    )
    centred: bool = option(
        False,
        "Subtract the mean update before the principal components are computed.",
        only_if=DIRECTIONS_ARE_COMPARED,
    )
    every: int = option(
        1,
        "Cluster the updates again after this many rounds. 0 clusters again only when a new client has trained.",
        ge=0,
    )
    compare: bool = option(
        False,
        "Record in every round how well clusters are separated, and the same for k-means and hierarchical clusters.",
    )

    def __call__(self, updates: NDArray[np.float32], seed: int) -> tuple[Floats, dict[str, float]]:
        """The membership of each client, [clients, clusters] of 0 and 1, and figures of the partition."""
        z = principal_directions(updates, self.share, self.centred)
        member = self._found(z, seed)
        figures = {"experts": float(member.shape[1]), "overlap": float(member.sum(1).mean())}
        if self.compare:
            from shoal.clusterers.quality import compare_partitions, overlap_quality

            figures |= overlap_quality(z, member)
            for name, quality in compare_partitions(z, self.clusters, seed).items():
                figures |= {f"{name}_{k}": v for k, v in quality.items() if k == "silhouette"}
        return member.astype(np.float64), figures

    def _found(self, z: Floats, seed: int) -> NDArray[np.bool_]:
        if self.by == "mctc":
            from shoal.clusterers import OverlappingClusters

            rule = OverlappingClusters(
                self.clusters,
                threshold=self.threshold,
                distinct_seeds=self.guarded,
                validate=self.validate,
                max_centre_similarity=self.limit,
            )
            return rule.fit(z).membership_
        if self.by == "one":
            return np.ones((len(z), 1), dtype=bool)
        from shoal.clusterers.quality import partitions

        labels = partitions(z, self.clusters, seed)[self.by]
        return labels[:, None] == np.arange(labels.max() + 1)


@lru_cache(maxsize=1)
def _buckets(numbers: int) -> tuple[Tensor, Tensor]:
    g = generator(derive_seed(0, "sketch"))
    return torch.randint(SKETCH, (numbers,), generator=g), torch.randint(2, (numbers,), generator=g, dtype=torch.int8)


def direction(update: Tensor) -> Tensor:
    """An update of unit length; of a large model a sketch of it, sums of its numbers with random signs, which keeps
    cosines to about 1 / sqrt(SKETCH)."""
    unit = F.normalize(update, dim=0)
    if len(unit) <= SKETCH:
        return unit
    places, signs = _buckets(len(unit))
    return torch.zeros(SKETCH).index_add_(0, places, unit * (2.0 * signs - 1))


@dataclass(frozen=True)
class FormOverlappingClusters(ServerUpdate):
    """Clusters clients by what their training changed, before the clusters' models are averaged.

    A client is known by the last update that it sent. A cluster none of whose members took part has the mean of the
    models that they had.
    """

    imports_later: ClassVar[tuple[str, ...]] = CLUSTERING

    rule: Overlap
    slot: str = "train"

    def adjust_plan(self, train: Federate, state: ServerState, plan: Plan) -> Plan:
        return replace(plan, cache_models=True)

    def before(self, train: Federate, state: ServerState, reports: Mapping[ClientId, Report], seed: int) -> ServerState:
        reports = with_rows(reports)
        updates = {c: _update(train, state, c, r) for c, r in reports.items()}
        if not updates or not all(bool(x.isfinite().all()) for x in updates.values()):
            return state  # aggregating shows whether training diverged
        told = {c: {"direction": direction(x)} for c, x in updates.items()}
        known = ClientTable.load(state, self.slot).updated_with(ClientTable.from_rows(told))
        state = replace(state, memory={**state.memory, self.slot: known.to_tree()})
        again = self.rule.every > 0 and state.round % self.rule.every == 0
        if again or any(c not in state.membership for c in known.clients):
            state = self._clustered(state, known, reports, seed)
        return state

    @property
    def representation_bounds(self) -> tuple[float, float]:
        return UNBOUNDED

    def representation_width(self, state: ServerState) -> int | None:
        directions = self._mean_directions(state)
        return None if directions is None else int(directions.shape[1])

    def cluster_weights(self, state: ServerState, representation: Floats) -> Floats:
        directions = self._mean_directions(state)
        assert directions is not None, "the width of a representation was asked for first"
        return nearest_direction(directions, representation)

    def _mean_directions(self, state: ServerState) -> Tensor | None:
        """The direction of each cluster, [clusters, numbers]: the sum of its members' directions."""
        known = ClientTable.load(state, self.slot)
        members = [c for c in known.clients if c in state.membership]
        if not members:
            return None
        weights = torch.stack([state.membership[c] for c in members]).double()  # [clients, clusters]
        rows = known["direction"].double()[[known.clients.index(c) for c in members]]
        return weights.T @ rows

    def _clustered(
        self, state: ServerState, known: ClientTable, reports: Mapping[ClientId, Report], seed: int
    ) -> ServerState:
        member, figures = self.rule(known["direction"].numpy(), seed)
        took_part = np.array([c in reports for c in known.clients])
        models = [
            next(iter(state.models.values())) if member[took_part, k].any() else _carried(state, known, member[:, k])
            for k in range(member.shape[1])
        ]
        rows = dict(zip(known.clients, torch.from_numpy(member).float(), strict=True))
        told = {f"{self.slot}.{k}": v for k, v in figures.items()}
        return replace(state, models=numbered(models), membership=rows, round_metrics={**state.round_metrics, **told})


def _update(train: Federate, state: ServerState, client: ClientId, report: Report) -> Tensor:
    sent, got = train.models_for(state, client), report.tensors["model"]
    received = sent[sorted(sent)[int(report.tensors["choice"]["place"])]]
    return vector({k: received[k] - got[k] for k in train.trainable})


def _carried(state: ServerState, known: ClientTable, inside: Floats) -> Params:
    """The mean of the models that the members of a cluster had."""
    members = [c for c, here in zip(known.clients, inside.tolist(), strict=True) if here]
    rows = [state.membership[c] for c in members if c in state.membership]
    weights = torch.stack([row / row.sum() for row in rows]).sum(0) if rows else torch.ones(len(state.models))
    used = [(state.models[k], w) for k, w in zip(sorted(state.models), weights.tolist(), strict=True) if w > 0]
    return used[0][0] if len(used) == 1 else tree.weighted_mean([m for m, _ in used], [w for _, w in used])


def experts_for(state: ServerState, client: ClientId | None) -> Mapping[str, Params]:
    """The models of all clusters that a client is in; of whoever is in none, all there are."""
    names = sorted(state.models)
    if client is not None and client in state.membership:
        names = [k for k, here in zip(names, state.membership[client].tolist(), strict=True) if here > 0]
    return numbered([state.models[k] for k in names])
