"""Forms clusters of clients from their reports: the rules, and the stage that applies them.

`experts` gives every cluster a model of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from shoal.client_table import ClientTable
from shoal.clusterers.jensen_shannon import modified_js, paired_modified_js
from shoal.clusterers.validation import number_by_first_appearance
from shoal.errors import UserError
from shoal.stages.base import CLUSTERING_LIBRARIES, ServerOnly
from shoal.types import ClientId, HasOptions, Report, ServerState, option

if TYPE_CHECKING:
    from shoal.clusterers import AdaptiveDensityClusters

Floats = NDArray[np.float64]
Labels = NDArray[np.int64]
CLUSTER_STAGE = "cluster"  # the stage that forms clusters


class Clustering(NamedTuple):
    """The cluster of every client."""

    labels: Labels  # from 0, without gaps
    num_noise_clients: int = 0  # how many clients were in no cluster before they joined the nearest one


@dataclass(frozen=True)
class SimilarLabels(HasOptions):
    """Puts clients with similar label distributions into one cluster."""

    group: ClassVar[str] = CLUSTER_STAGE
    num_clusters: int = option(
        0,
        "Form this many clusters of clients with similar label distributions. 0 forms as many as the cohort has "
        "clients.",
        ge=0,
    )
    centre: Literal["mean", "jeffreys"] = option(
        "mean",
        "Represent a cluster by the mean of its label distributions (mean, as in k-means) or by the exact centre of "
        "the symmetric KL divergence (jeffreys).",
    )
    restarts: int = option(
        10, "Cluster the label distributions this many times from random starts and keep the best result.", ge=1
    )

    def __call__(self, rows: Floats, seed: int, cohort_size: int) -> Labels:
        from shoal.clusterers import SimilarClusters

        rule = SimilarClusters(
            self.num_clusters or cohort_size, random_state=seed, n_init=self.restarts, centre=self.centre
        )
        return rule.fit(rows).labels_


@dataclass(frozen=True)
class DiverseLabels(HasOptions):
    """Forms clusters of equal size, each with label distributions that are as different as possible."""

    group: ClassVar[str] = CLUSTER_STAGE
    num_clusters: int = option(
        0, "Form this many clusters of equal size with mixed labels. 0 forms so many that two make a cohort.", ge=0
    )
    swaps: Literal["closest", "all"] = option(
        "closest",
        "Improve the clusters by swaps of one client of the most similar pair in each cluster (closest, Algorithm 1 of "
        "the paper) or of any two clients (all).",
    )
    num_searched: int = option(
        0,
        "Search for swaps only in this many clusters, the ones with the most similar pairs. 0 searches all clusters, "
        "and 1 is refused because a swap needs two.",
        ge=0,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_searched == 1:
            raise UserError(
                "cluster.num_searched is 1. It must be 0 (search all clusters) or at least 2, because a swap needs two "
                "clusters."
            )

    def __call__(self, rows: Floats, seed: int, cohort_size: int) -> Labels:
        from shoal.clusterers import RepulsiveClusters

        num_clusters = self.num_clusters or max(1, round(2 * len(rows) / cohort_size))
        return (
            RepulsiveClusters(num_clusters, random_state=seed, swaps=self.swaps, top=self.num_searched or None)
            .fit(rows)
            .labels_
        )


@dataclass(frozen=True)
class SparsityClusters(HasOptions):
    """Puts clients with similar sparsity vectors into one cluster and finds their number (AIDC, Tang et al. 2025).

    A row has four vectors. The first is measured with the client's adapted model, and clusters are formed from it. The
    others are measured with the model that all clients received, on all samples of the client and on each half of
    them. The halves show how much of a difference random sampling explains.
    """

    group: ClassVar[str] = CLUSTER_STAGE
    merge: float = option(
        0.35, "Merge two clusters if the mean distance between their clients is below this value (Eq. 7).", ge=0
    )
    split: float = option(
        0.42,
        "Split a cluster if the mean distance within it is above this value (Eq. 8), at least cluster.merge.",
        ge=0,
    )
    noise_guard_ratio: float = option(
        2.2,
        "Keep all clients in one cluster if their mean distance is less than this multiple of the distance that random "
        "sampling explains. 0 turns the test off.",
        ge=0,
    )
    drift_ratio: float = option(
        4.0,
        "The data of a client count as changed if its sparsity vector has moved by more than this multiple of the "
        "distance that random sampling explains.",
        ge=0,
    )
    min_size: int = option(
        2, "Clients of a cluster with fewer clients than this join the nearest larger cluster.", ge=1
    )
    scale: Literal["mean", "median", "none"] = option(
        "mean", "Divide all distances by their mean or median before they meet the thresholds, or by nothing (none)."
    )
    num_references: int = option(
        0,
        "Form clusters from only this many randomly drawn clients, to which all others are assigned. 0 uses all "
        "clients.",
        ge=0,
    )
    as_published: bool = option(
        False,
        "Form clusters with the equations and in the order exactly as the paper prints them, without corrections.",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.merge > self.split and not self.as_published:
            raise UserError(
                f"cluster.merge is {self.merge} and cluster.split is {self.split}. cluster.merge must not be larger, "
                "because merged clusters would be split again without end. cluster.as_published=true allows it."
            )

    def __call__(self, rows: Floats, seed: int) -> Labels:
        _refuse_sparsity_above_1(rows)
        if self._is_one_cluster(rows, seed):
            return np.zeros(len(rows), dtype=np.int64)
        return self._estimator(seed).fit(rows[:, : rows.shape[1] // 4]).labels_

    def join(self, rows: Floats, labels: Labels, late_rows: Floats) -> Labels:
        """Returns the cluster with the smallest mean distance to its members for each late-joining client."""
        old_vectors, late_vectors = np.split(rows, 4, axis=1)[0], np.split(late_rows, 4, axis=1)[0]
        distances = modified_js(late_vectors, old_vectors)
        means = np.stack([distances[:, labels == k].mean(axis=1) for k in np.unique(labels)], axis=1)
        return np.unique(labels)[means.argmin(axis=1)]

    def nearest_cluster(self, rows: Floats, labels: Labels, received: Floats) -> int:
        """Returns the cluster of a client by the vector of the received model alone, which needs no labels."""
        distances = modified_js(received[None], np.split(rows, 4, axis=1)[1])[0]
        return int(np.argmin([distances[labels == k].mean() for k in range(labels.max() + 1)]))

    def recluster(self, rows: Floats, labels: Labels, new_rows: Floats, seed: int) -> tuple[Floats, Labels]:
        """Returns the rows to remember and the new clusters.

        Only clients whose data have changed are reassigned. Clusters are split and merged from their earlier state.
        """
        drifted = np.flatnonzero(self.has_drifted(rows, new_rows))
        rows, before = rows.copy(), rows
        rows[drifted] = new_rows[drifted]
        if not len(drifted):
            return rows, labels
        _refuse_sparsity_above_1(rows)
        if self.as_published or self.num_references:  # neither can continue from earlier clusters
            return rows, self(rows, seed)
        if self._is_one_cluster(rows, seed):
            return rows, np.zeros(len(rows), dtype=np.int64)
        if not labels.any():
            return rows, self(rows, seed)
        adapted = before.shape[1] // 4
        clusters = self._estimator(seed).resume(before[:, :adapted], labels)
        return rows, number_by_first_appearance(clusters.update(new_rows[drifted, :adapted], drifted).labels_)[0]

    def has_drifted(self, rows: Floats, new_rows: Floats) -> NDArray[np.bool_]:
        """Returns which clients have data of another distribution than before.

        The comparison uses the vectors of the same received model. Two samples of one distribution are expected to
        differ by half of the distance between the halves of one sample.
        """
        _, old, *old_halves = np.split(rows, 4, axis=1)
        _, new, *new_halves = np.split(new_rows, 4, axis=1)
        random_distance = (
            paired_modified_js(old_halves[0], old_halves[1]) + paired_modified_js(new_halves[0], new_halves[1])
        ) / 4
        has_changed: NDArray[np.bool_] = paired_modified_js(old, new) > self.drift_ratio * random_distance
        return has_changed

    def _is_one_cluster(self, rows: Floats, seed: int) -> bool:
        _, received, *halves = np.split(rows, 4, axis=1)
        return (
            self.noise_guard_ratio > 0
            and self._estimator(seed).fit(received, halves=(halves[0], halves[1])).is_guarded_
        )

    def _estimator(self, seed: int) -> AdaptiveDensityClusters:
        from shoal.clusterers import AdaptiveDensityClusters

        return AdaptiveDensityClusters(
            merge=self.merge,
            split=self.split,
            noise_guard_ratio=self.noise_guard_ratio,
            min_cluster_size=self.min_size,
            scale=self.scale,
            n_references=self.num_references or None,
            as_published=self.as_published,
            random_state=seed,
        )


@dataclass(frozen=True)
class HellingerOptics(HasOptions):
    """Puts clients with similar label distributions into one cluster by OPTICS on Hellinger distances (HACCS).

    The reachability is cut at `radius`, which determines the number of clusters. Two clients are enough for a cluster,
    and a client without a neighbour within `radius` is a cluster of its own.
    """

    group: ClassVar[str] = CLUSTER_STAGE
    radius: float = option(
        0.25,
        "Put clients into one cluster if a chain of label distributions with at most this Hellinger distance (0 to 1) "
        "connects them.",
        gt=0,
        le=1,
    )

    def __call__(self, rows: Floats, seed: int, cohort_size: int = 0) -> Labels:
        from scipy.spatial.distance import pdist, squareform
        from sklearn.cluster import OPTICS

        if len(rows) < 2:
            return np.zeros(len(rows), dtype=np.int64)
        distances = squareform(pdist(np.sqrt(rows))) / np.sqrt(2)
        optics = OPTICS(min_samples=2, metric="precomputed", cluster_method="dbscan", eps=self.radius)
        labels = optics.fit(distances).labels_.astype(np.int64)
        is_alone = labels < 0
        labels[is_alone] = labels.max() + 1 + np.arange(is_alone.sum())
        return number_by_first_appearance(labels)[0]


def _refuse_sparsity_above_1(rows: Floats) -> None:
    for row, column in np.argwhere(rows > 1)[:1]:
        channel = column % (rows.shape[1] // 4)
        raise UserError(
            f"A sparsity vector has the value {rows[row, column]} in channel {channel}. Sparsities must be 1 or less."
        )


@dataclass(frozen=True)
class FormClusters(ServerOnly):
    """Forms clusters when the first reports arrive, and again when new clients or newer reports arrive.

    With `runs_once` false clusters are formed in every round.
    """

    imports_later: ClassVar[tuple[str, ...]] = CLUSTERING_LIBRARIES

    rule: Callable[[Floats, int, int], ArrayLike]  # (a row per client, seed, cohort size) -> cluster of each client
    column: str
    source: str = "represent"  # the stage that collected the rows
    runs_once: bool = True
    name: str = CLUSTER_STAGE

    def fold(self, state: ServerState, reports: Mapping[ClientId, Report], seed: int) -> ServerState:
        reported, clusters = ClientTable.load(state, self.source), ClientTable.load(state, self.name)
        if not len(reported) or (
            self.runs_once and reported.clients == clusters.clients and not _has_newer_reports(reported, clusters)
        ):
            return state
        labels = self.rule(reported[self.column].double().numpy(), seed, state.cohort_size)
        columns = {
            "group": torch.from_numpy(np.asarray(labels, dtype=np.int64)),
            "round": torch.full((len(reported),), state.round),  # the round in which clusters were formed
        }
        table = ClientTable(reported.clients, columns)
        return replace(state, memory={**state.memory, self.name: table.to_tree()})


def _has_newer_reports(reported: ClientTable, clusters: ClientTable) -> bool:
    return "told" in reported.columns and int(reported["told"].max()) > int(clusters["round"].min())
