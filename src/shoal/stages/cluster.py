"""Clients in groups, by what they told about themselves."""

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
from shoal.stages.base import CLUSTERING, ServerOnly
from shoal.types import ClientId, HasOptions, Report, ServerState, option

if TYPE_CHECKING:
    from shoal.clusterers import AdaptiveDensityClusters

Floats = NDArray[np.float64]
Labels = NDArray[np.int64]
GROUPS = "cluster"  # the stage in which clients are grouped


class Clustering(NamedTuple):
    """The cluster of every client."""

    labels: Labels  # from 0, without gaps
    noise: int = 0  # how many clients were in no cluster before they joined the nearest one


@dataclass(frozen=True)
class Similar(HasOptions):
    """Clients with similar label distributions together."""

    group: ClassVar[str] = GROUPS
    groups: int = option(
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

        rule = SimilarClusters(self.groups or cohort_size, random_state=seed, n_init=self.restarts, centre=self.centre)
        return rule.fit(rows).labels_


@dataclass(frozen=True)
class Repulsive(HasOptions):
    """Groups of one size, each as mixed as can be and all alike."""

    group: ClassVar[str] = GROUPS
    groups: int = option(
        0, "Form this many clusters of equal size with mixed labels. 0 forms so many that two make a cohort.", ge=0
    )
    swaps: Literal["closest", "all"] = option(
        "closest",
        "Improve the clusters by swaps of one client of the most similar pair in each cluster (closest, Algorithm 1 of "
        "the paper) or of any two clients (all).",
    )
    top: int = option(
        0,
        "Search for swaps only in this many clusters, the ones with the most similar pairs. 0 searches all clusters, "
        "and 1 is refused because a swap needs two.",
        ge=0,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.top == 1:
            raise UserError("cluster.top is 1; it must be 0 (all clusters) or 2 or more")

    def __call__(self, rows: Floats, seed: int, cohort_size: int) -> Labels:
        from shoal.clusterers import RepulsiveClusters

        groups = self.groups or max(1, round(2 * len(rows) / cohort_size))
        return RepulsiveClusters(groups, random_state=seed, swaps=self.swaps, top=self.top or None).fit(rows).labels_


@dataclass(frozen=True)
class Adaptive(HasOptions):
    """Clients whose sparsity vectors are alike, in as many groups as there are (AIDC, paper 000).

    A row holds four vectors: that of the client's adapted model, by which it is grouped, and those of the model that
    all received, over all of its examples and over either half of them, which tell difference from chance.
    """

    group: ClassVar[str] = GROUPS
    merge: float = option(
        0.35, "Merge two clusters if the mean distance between their clients is below this value (Eq. 7).", ge=0
    )
    split: float = option(
        0.42,
        "Split a cluster if the mean distance within it is above this value (Eq. 8), at least cluster.merge.",
        ge=0,
    )
    guard: float = option(
        2.2,
        "Keep all clients in one cluster if their mean distance is less than this multiple of the distance that random "
        "sampling explains. 0 turns the test off.",
        ge=0,
    )
    drift: float = option(
        4.0,
        "The data of a client count as changed if its sparsity vector has moved by more than this multiple of the "
        "distance that random sampling explains.",
        ge=0,
    )
    smallest: int = option(
        2, "Clients of a cluster with fewer clients than this join the nearest larger cluster.", ge=1
    )
    scale: Literal["mean", "median", "none"] = option(
        "mean", "Divide all distances by their mean or median before they meet the thresholds, or by nothing (none)."
    )
    references: int = option(
        0,
        "Form clusters from only this many randomly drawn clients, to which all others are assigned. 0 uses all "
        "clients.",
        ge=0,
    )
    literal: bool = option(
        False,
        "Form clusters with the equations and in the order exactly as the paper prints them, without corrections.",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.merge > self.split and not self.literal:
            raise UserError(
                f"cluster.merge is {self.merge} and cluster.split is {self.split}; merge must not be larger, or what "
                "is merged is split again for ever (cluster.literal=true tries all the same)"
            )

    def __call__(self, rows: Floats, seed: int) -> Labels:
        _refuse_above_1(rows)
        if self._alike(rows, seed):
            return np.zeros(len(rows), dtype=np.int64)
        return self._clusters(seed).fit(rows[:, : rows.shape[1] // 4]).labels_

    def join(self, rows: Floats, labels: Labels, newcomers: Floats) -> Labels:
        """The group with the least mean distance to its members."""
        known, new = np.split(rows, 4, axis=1)[0], np.split(newcomers, 4, axis=1)[0]
        distances = modified_js(new, known)
        means = np.stack([distances[:, labels == k].mean(axis=1) for k in np.unique(labels)], axis=1)
        return np.unique(labels)[means.argmin(axis=1)]

    def like(self, rows: Floats, labels: Labels, received: Floats) -> int:
        """The group of a client of whom only the vector of the received model is known, for that needs no labels."""
        distances = modified_js(received[None], np.split(rows, 4, axis=1)[1])[0]
        return int(np.argmin([distances[labels == k].mean() for k in range(labels.max() + 1)]))

    def again(self, rows: Floats, labels: Labels, now: Floats, seed: int) -> tuple[Floats, Labels]:
        """Only who has changed leaves its group; groups are split and merged from where they were."""
        moved = np.flatnonzero(self.drifted(rows, now))
        rows, before = rows.copy(), rows
        rows[moved] = now[moved]
        if not len(moved):
            return rows, labels
        _refuse_above_1(rows)
        if self.literal or self.references:  # neither can be taken up from where it was
            return rows, self(rows, seed)
        if self._alike(rows, seed):
            return rows, np.zeros(len(rows), dtype=np.int64)
        if not labels.any():
            return rows, self(rows, seed)
        adapted = before.shape[1] // 4
        clusters = self._clusters(seed).resume(before[:, :adapted], labels)
        return rows, number_by_first_appearance(clusters.update(now[moved, :adapted], moved).labels_)[0]

    def drifted(self, rows: Floats, now: Floats) -> NDArray[np.bool_]:
        """Whose data follow another law than before, by what the same model gives on them: two draws of one law differ
        by half of what the halves of a draw do."""
        _, old, *was = np.split(rows, 4, axis=1)
        _, new, *has = np.split(now, 4, axis=1)
        chance = (paired_modified_js(was[0], was[1]) + paired_modified_js(has[0], has[1])) / 4
        found: NDArray[np.bool_] = paired_modified_js(old, new) > self.drift * chance
        return found

    def _alike(self, rows: Floats, seed: int) -> bool:
        _, received, *halves = np.split(rows, 4, axis=1)
        return self.guard > 0 and self._clusters(seed).fit(received, halves=(halves[0], halves[1])).is_guarded_

    def _clusters(self, seed: int) -> AdaptiveDensityClusters:
        from shoal.clusterers import AdaptiveDensityClusters

        return AdaptiveDensityClusters(
            merge=self.merge,
            split=self.split,
            noise_guard_ratio=self.guard,
            min_cluster_size=self.smallest,
            scale=self.scale,
            n_references=self.references or None,
            as_published=self.literal,
            random_state=seed,
        )


@dataclass(frozen=True)
class Dense(HasOptions):
    """Clients with alike label distributions, in as many groups as there are (HACCS): OPTICS on Hellinger distances,
    cut at `reach`. Two are enough for a group; who is within reach of nobody is one alone."""

    group: ClassVar[str] = GROUPS
    reach: float = option(
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
        optics = OPTICS(min_samples=2, metric="precomputed", cluster_method="dbscan", eps=self.reach)
        labels = optics.fit(distances).labels_.astype(np.int64)
        alone = labels < 0
        labels[alone] = labels.max() + 1 + np.arange(alone.sum())
        return number_by_first_appearance(labels)[0]


def _refuse_above_1(rows: Floats) -> None:
    for row, column in np.argwhere(rows > 1)[:1]:
        channel = column % (rows.shape[1] // 4)
        raise UserError(f"a sparsity vector has {rows[row, column]} in channel {channel}; sparsities must be 1 or less")


@dataclass(frozen=True)
class Group(ServerOnly):
    """Groups once, and again only when a client has become known that was not there before, or clients were asked
    again; or in every round."""

    imports_later: ClassVar[tuple[str, ...]] = CLUSTERING

    rule: Callable[[Floats, int, int], ArrayLike]  # (a row per client, seed, cohort size) -> group of each
    column: str
    source: str = "represent"  # the stage that asked
    once: bool = True
    name: str = GROUPS

    def fold(self, state: ServerState, reports: Mapping[ClientId, Report], seed: int) -> ServerState:
        known, grouped = ClientTable.load(state, self.source), ClientTable.load(state, self.name)
        if not len(known) or (self.once and known.clients == grouped.clients and not _told_since(known, grouped)):
            return state
        groups = self.rule(known[self.column].double().numpy(), seed, state.cohort_size)
        columns = {
            "group": torch.from_numpy(np.asarray(groups, dtype=np.int64)),
            "round": torch.full((len(known),), state.round),  # in which they were formed
        }
        table = ClientTable(known.clients, columns)
        return replace(state, memory={**state.memory, self.name: table.to_tree()})


def _told_since(known: ClientTable, grouped: ClientTable) -> bool:
    return "told" in known.columns and int(known["told"].max()) > int(grouped["round"].min())
