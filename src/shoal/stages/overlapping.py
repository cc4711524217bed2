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
from shoal.stages.base import CLUSTERING_LIBRARIES, with_samples
from shoal.stages.experts import named_experts
from shoal.stages.train import ServerUpdate, TrainAndAggregate
from shoal.stages.vectors import UNBOUNDED, flatten_params, nearest_direction
from shoal.types import ClientId, HasOptions, OnlyIf, Params, Plan, Report, ServerState, option

Floats = NDArray[np.float64]
SKETCH_SIZE = 2**18  # numbers of an update that are kept
IF_CLUSTERS_OVERLAP = OnlyIf("cluster.by is mctc", lambda rule: rule.by == "mctc")
IF_DIRECTIONS_ARE_COMPARED = OnlyIf(
    "cluster.by is not one or cluster.compare is true", lambda rule: rule.by != "one" or rule.report_baselines
)


@dataclass(frozen=True)
class OverlapRule(HasOptions):
    """Which clients train a model together: each in one cluster or several, by where training took them.

    Updates are made as long as each other and projected on the principal components that hold `share` of their variance
    (Eq. 1-2). `mctc` finds overlapping clusters among them; k-means and hierarchical clustering are there to compare,
    and `one` is a single cluster. Clients are clustered every so many rounds (0: once), and whenever somebody is new.
    With `compare` the record of a round says how well apart clusters are, and those of the other two on the same rows.
    """

    group: ClassVar[str] = "cluster"
    algorithm: Literal["mctc", "kmeans", "hierarchical", "one"] = option(
        "mctc",
        "Cluster the directions of updates by overlapping clusters (mctc), k-means (kmeans) or hierarchical clustering "
        "(hierarchical), or put all clients into one cluster (one).",
    )
    num_clusters: int = option(
        4, "Form at most this many clusters from the directions of updates.", ge=1, only_if=IF_DIRECTIONS_ARE_COMPARED
    )
    threshold: float = option(
        0.2,
        "A client belongs to each cluster if the cosine between its update and the cluster's centre is at least this "
        "value. Otherwise it joins only the nearest cluster.",
        ge=-1,
        only_if=IF_CLUSTERS_OVERLAP,
    )
    distinct_seeds: bool = option(
        True,
        "Do not start a cluster from a client that would already belong to an earlier cluster. With false clusters "
        "start as in the paper.",
        only_if=IF_CLUSTERS_OVERLAP,
    )
    validate: bool = option(
        True,
        "Raise the threshold and then reduce the number of clusters while cluster centres are too similar.",
        only_if=IF_CLUSTERS_OVERLAP,
    )
    max_centre_similarity: float = option(
        0.3,
        "Cluster centres are too similar if the mean cosine between two of them is above this value.",
        ge=-1,
        only_if=OnlyIf(
            "cluster.by is mctc and cluster.validate is true", lambda rule: rule.by == "mctc" and rule.validate
        ),
    )
    explained_variance: float = option(
        0.95,
        "Keep as many principal components of the updates as explain this fraction of the variance.",
        gt=0,
        le=1,
        only_if=IF_DIRECTIONS_ARE_COMPARED,
    )
    subtract_mean: bool = option(
        False,
        "Subtract the mean update before the principal components are computed.",
        only_if=IF_DIRECTIONS_ARE_COMPARED,
    )
    every_rounds: int = option(
        1,
        "Cluster the updates again after this many rounds. 0 clusters again only when a new client has trained.",
        ge=0,
    )
    report_baselines: bool = option(
        False,
        "Record in every round how well clusters are separated, and the same for k-means and hierarchical clusters.",
    )

    def __call__(self, updates: NDArray[np.float32], seed: int) -> tuple[Floats, dict[str, float]]:
        """The membership of each client, [clients, clusters] of 0 and 1, and figures of the partition."""
        z = principal_directions(updates, self.explained_variance, self.subtract_mean)
        member = self._memberships(z, seed)
        figures = {"experts": float(member.shape[1]), "overlap": float(member.sum(1).mean())}
        if self.report_baselines:
            from shoal.clusterers.quality import compare_partitions, overlap_quality

            figures |= overlap_quality(z, member)
            for name, quality in compare_partitions(z, self.num_clusters, seed).items():
                figures |= {f"{name}_{k}": v for k, v in quality.items() if k == "silhouette"}
        return member.astype(np.float64), figures

    def _memberships(self, z: Floats, seed: int) -> NDArray[np.bool_]:
        if self.algorithm == "mctc":
            from shoal.clusterers import OverlappingClusters

            rule = OverlappingClusters(
                self.num_clusters,
                threshold=self.threshold,
                distinct_seeds=self.distinct_seeds,
                validate=self.validate,
                max_centre_similarity=self.max_centre_similarity,
            )
            return rule.fit(z).membership_
        if self.algorithm == "one":
            return np.ones((len(z), 1), dtype=bool)
        from shoal.clusterers.quality import partitions

        labels = partitions(z, self.num_clusters, seed)[self.algorithm]
        return labels[:, None] == np.arange(labels.max() + 1)


@lru_cache(maxsize=1)
def _buckets(num_values: int) -> tuple[Tensor, Tensor]:
    g = generator(derive_seed(0, "sketch"))
    return torch.randint(SKETCH_SIZE, (num_values,), generator=g), torch.randint(
        2, (num_values,), generator=g, dtype=torch.int8
    )


def update_direction(update: Tensor) -> Tensor:
    """An update of unit length; of a large model a sketch of it, sums of its numbers with random signs, which keeps
    cosines to about 1 / sqrt(SKETCH)."""
    unit = F.normalize(update, dim=0)
    if len(unit) <= SKETCH_SIZE:
        return unit
    places, signs = _buckets(len(unit))
    return torch.zeros(SKETCH_SIZE).index_add_(0, places, unit * (2.0 * signs - 1))


@dataclass(frozen=True)
class FormOverlappingClusters(ServerUpdate):
    """Clusters clients by what their training changed, before the clusters' models are averaged.

    A client is known by the last update that it sent. A cluster none of whose members took part has the mean of the
    models that they had.
    """

    imports_later: ClassVar[tuple[str, ...]] = CLUSTERING_LIBRARIES

    rule: OverlapRule
    slot: str = "train"

    def adjust_plan(self, train: TrainAndAggregate, state: ServerState, plan: Plan) -> Plan:
        return replace(plan, cache_models=True)

    def before_aggregation(
        self, train: TrainAndAggregate, state: ServerState, reports: Mapping[ClientId, Report], seed: int
    ) -> ServerState:
        reports = with_samples(reports)
        updates = {c: _client_update(train, state, c, r) for c, r in reports.items()}
        if not updates or not all(bool(x.isfinite().all()) for x in updates.values()):
            return state  # aggregating shows whether training diverged
        told = {c: {"direction": update_direction(x)} for c, x in updates.items()}
        known = ClientTable.load(state, self.slot).updated_with(ClientTable.from_rows(told))
        state = replace(state, memory={**state.memory, self.slot: known.to_tree()})
        again = self.rule.every_rounds > 0 and state.round % self.rule.every_rounds == 0
        if again or any(c not in state.membership for c in known.clients):
            state = self._with_clusters(state, known, reports, seed)
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

    def _with_clusters(
        self, state: ServerState, known: ClientTable, reports: Mapping[ClientId, Report], seed: int
    ) -> ServerState:
        member, figures = self.rule(known["direction"].numpy(), seed)
        took_part = np.array([c in reports for c in known.clients])
        models = [
            next(iter(state.models.values()))
            if member[took_part, k].any()
            else _carried_over_model(state, known, member[:, k])
            for k in range(member.shape[1])
        ]
        rows = dict(zip(known.clients, torch.from_numpy(member).float(), strict=True))
        new_metrics = {f"{self.slot}.{k}": v for k, v in figures.items()}
        return replace(
            state, models=named_experts(models), membership=rows, round_metrics={**state.round_metrics, **new_metrics}
        )


def _client_update(train: TrainAndAggregate, state: ServerState, client: ClientId, report: Report) -> Tensor:
    sent, got = train.models_for(state, client), report.tensors["model"]
    received = sent[sorted(sent)[int(report.tensors["choice"]["place"])]]
    return flatten_params({k: received[k] - got[k] for k in train.trainable})


def _carried_over_model(state: ServerState, known: ClientTable, is_member: Floats) -> Params:
    """The mean of the models that the members of a cluster had."""
    members = [c for c, here in zip(known.clients, is_member.tolist(), strict=True) if here]
    rows = [state.membership[c] for c in members if c in state.membership]
    weights = torch.stack([row / row.sum() for row in rows]).sum(0) if rows else torch.ones(len(state.models))
    used = [(state.models[k], w) for k, w in zip(sorted(state.models), weights.tolist(), strict=True) if w > 0]
    return used[0][0] if len(used) == 1 else tree.weighted_mean([m for m, _ in used], [w for _, w in used])


def experts_for(state: ServerState, client: ClientId | None) -> Mapping[str, Params]:
    """The models of all clusters that a client is in; of whoever is in none, all there are."""
    names = sorted(state.models)
    if client is not None and client in state.membership:
        names = [k for k, here in zip(names, state.membership[client].tolist(), strict=True) if here > 0]
    return named_experts([state.models[k] for k in names])
