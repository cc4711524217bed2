"""Overlapping clusters, formed from the updates of clients, and a model for each (SCMoE-PFL)."""

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
SKETCH_SIZE = 2**18  # length of the sketch of a large update
IF_CLUSTERS_OVERLAP = OnlyIf("cluster.algorithm is mctc", lambda rule: rule.algorithm == "mctc")
IF_DIRECTIONS_ARE_COMPARED = OnlyIf(
    "cluster.algorithm is not one or cluster.report_baselines is true",
    lambda rule: rule.algorithm != "one" or rule.report_baselines,
)


@dataclass(frozen=True)
class OverlapRule(HasOptions):
    """Assigns each client to one or several clusters by the direction of its update.

    Updates are scaled to the same length and projected on the principal components that explain the fraction
    `explained_variance` of their variance (Eq. 1-2). The algorithm `mctc` forms overlapping clusters. The others are
    baselines. Clusters are formed every `every_rounds` rounds (0: once) and whenever a new client has trained. With
    `report_baselines` the metrics of a round say how well separated the clusters are, compared to those of k-means and
    hierarchical clustering on the same updates.
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
            "cluster.algorithm is mctc and cluster.validate is true",
            lambda rule: rule.algorithm == "mctc" and rule.validate,
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
        """Returns the memberships [clients, clusters] of 0 and 1, and metrics of the clusters."""
        z = principal_directions(updates, self.explained_variance, self.subtract_mean)
        membership = self._memberships(z, seed)
        metrics = {"experts": float(membership.shape[1]), "overlap": float(membership.sum(1).mean())}
        if self.report_baselines:
            from shoal.clusterers.quality import compare_partitions, overlap_quality

            metrics |= overlap_quality(z, membership)
            for name, quality in compare_partitions(z, self.num_clusters, seed).items():
                metrics |= {f"{name}_{k}": v for k, v in quality.items() if k == "silhouette"}
        return membership.astype(np.float64), metrics

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
    rng = generator(derive_seed(0, "sketch"))
    return torch.randint(SKETCH_SIZE, (num_values,), generator=rng), torch.randint(
        2, (num_values,), generator=rng, dtype=torch.int8
    )


def update_direction(update: Tensor) -> Tensor:
    """Returns an update of unit length, or a sketch of it for a large model.

    A sketch consists of sums of the update's values with random signs. It preserves cosines with an error of about
    1 / sqrt(SKETCH_SIZE).
    """
    unit = F.normalize(update, dim=0)
    if len(unit) <= SKETCH_SIZE:
        return unit
    buckets, signs = _buckets(len(unit))
    return torch.zeros(SKETCH_SIZE).index_add_(0, buckets, unit * (2.0 * signs - 1))


@dataclass(frozen=True)
class FormOverlappingClusters(ServerUpdate):
    """Clusters clients by the directions of their updates, before the models of the clusters are averaged.

    Each client is represented by the last update that it sent. A cluster without members in the cohort gets the mean
    of the models that its members had.
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
            return state  # aggregation detects that training diverged
        directions = {c: {"direction": update_direction(x)} for c, x in updates.items()}
        reported = ClientTable.load(state, self.slot).updated_with(ClientTable.from_rows(directions))
        state = replace(state, memory={**state.memory, self.slot: reported.to_tree()})
        is_due = self.rule.every_rounds > 0 and state.round % self.rule.every_rounds == 0
        if is_due or any(c not in state.membership for c in reported.clients):
            state = self._with_clusters(state, reported, reports, seed)
        return state

    @property
    def representation_bounds(self) -> tuple[float, float]:
        return UNBOUNDED

    def representation_width(self, state: ServerState) -> int | None:
        directions = self._mean_directions(state)
        return None if directions is None else int(directions.shape[1])

    def cluster_weights(self, state: ServerState, representation: Floats) -> Floats:
        directions = self._mean_directions(state)
        assert directions is not None, "representation_width must be checked before cluster_weights"
        return nearest_direction(directions, representation)

    def _mean_directions(self, state: ServerState) -> Tensor | None:
        """Returns the direction of each cluster [clusters, values], the sum of its members' directions."""
        reported = ClientTable.load(state, self.slot)
        members = [c for c in reported.clients if c in state.membership]
        if not members:
            return None
        weights = torch.stack([state.membership[c] for c in members]).double()  # [clients, clusters]
        rows = reported["direction"].double()[[reported.clients.index(c) for c in members]]
        return weights.T @ rows

    def _with_clusters(
        self, state: ServerState, reported: ClientTable, reports: Mapping[ClientId, Report], seed: int
    ) -> ServerState:
        is_member, metrics = self.rule(reported["direction"].numpy(), seed)
        is_in_cohort = np.array([c in reports for c in reported.clients])
        models = [
            next(iter(state.models.values()))
            if is_member[is_in_cohort, k].any()
            else _carried_over_model(state, reported, is_member[:, k])
            for k in range(is_member.shape[1])
        ]
        membership = dict(zip(reported.clients, torch.from_numpy(is_member).float(), strict=True))
        new_metrics = {f"{self.slot}.{k}": v for k, v in metrics.items()}
        return replace(
            state,
            models=named_experts(models),
            membership=membership,
            round_metrics={**state.round_metrics, **new_metrics},
        )


def _client_update(train: TrainAndAggregate, state: ServerState, client: ClientId, report: Report) -> Tensor:
    sent, trained = train.models_for(state, client), report.tensors["model"]
    received = sent[sorted(sent)[int(report.tensors["choice"]["place"])]]
    return flatten_params({k: received[k] - trained[k] for k in train.trainable})


def _carried_over_model(state: ServerState, reported: ClientTable, is_member: Floats) -> Params:
    """Returns the mean of the models that the members of a cluster had."""
    members = [c for c, belongs in zip(reported.clients, is_member.tolist(), strict=True) if belongs]
    rows = [state.membership[c] for c in members if c in state.membership]
    weights = torch.stack([row / row.sum() for row in rows]).sum(0) if rows else torch.ones(len(state.models))
    weighted_models = [
        (state.models[k], w) for k, w in zip(sorted(state.models), weights.tolist(), strict=True) if w > 0
    ]
    return (
        weighted_models[0][0]
        if len(weighted_models) == 1
        else tree.weighted_mean([m for m, _ in weighted_models], [w for _, w in weighted_models])
    )


def experts_for(state: ServerState, client: ClientId | None) -> Mapping[str, Params]:
    """Returns the models of the clusters of a client, or all models for a client without a cluster."""
    names = sorted(state.models)
    if client is not None and client in state.membership:
        names = [k for k, weight in zip(names, state.membership[client].tolist(), strict=True) if weight > 0]
    return named_experts([state.models[k] for k in names])
