"""Clients in groups, by what they told about themselves."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from shoal.client_table import Table
from shoal.clusterers.jensen_shannon import modified_js, paired_modified_js
from shoal.clusterers.validation import by_first_appearance
from shoal.errors import UserError
from shoal.stages.base import ServerOnly
from shoal.types import FIXED, ClientId, Report, ServerState

if TYPE_CHECKING:
    from shoal.clusterers import AdaptiveDensityClusters

Floats = NDArray[np.float64]
Labels = NDArray[np.int64]
GROUPS = "cluster"  # the stage in which clients are grouped


@dataclass(frozen=True)
class Similar:
    """Clients with similar label distributions together."""

    cohort: int = field(metadata=FIXED)
    groups: int = 0  # 0: as many as clients take part in a round
    centre: Literal["mean", "jeffreys"] = "mean"
    restarts: int = 10

    def __post_init__(self) -> None:
        _at_least("cluster.groups", self.groups, 0)
        _at_least("cluster.restarts", self.restarts, 1)

    def __call__(self, rows: Floats, seed: int) -> Labels:
        from shoal.clusterers import SimilarClusters

        rule = SimilarClusters(self.groups or self.cohort, random_state=seed, n_init=self.restarts, centre=self.centre)
        return rule.fit(rows).labels_


@dataclass(frozen=True)
class Repulsive:
    """Groups of one size, each as mixed as can be and all alike."""

    cohort: int = field(metadata=FIXED)
    groups: int = 0  # 0: as many as it takes that two of them make a round
    swaps: Literal["closest", "all"] = "closest"
    top: int = 0  # how many groups a search looks at; 0: all

    def __post_init__(self) -> None:
        _at_least("cluster.groups", self.groups, 0)
        if self.top < 0 or self.top == 1:
            raise UserError(f"cluster.top is {self.top}; it must be 0 (all groups) or 2 or more")

    def __call__(self, rows: Floats, seed: int) -> Labels:
        from shoal.clusterers import RepulsiveClusters

        groups = self.groups or max(1, round(2 * len(rows) / self.cohort))
        return RepulsiveClusters(groups, random_state=seed, swaps=self.swaps, top=self.top or None).fit(rows).labels_


@dataclass(frozen=True)
class Adaptive:
    """Clients whose sparsity vectors are alike, in as many groups as there are (AIDC, paper 000).

    A row holds four vectors: that of the client's adapted model, by which it is grouped, and those of the model that
    all received, over all of its examples and over either half of them, which tell difference from chance.
    """

    merge: float = 0.35
    split: float = 0.42
    guard: float = 2.2  # how much clients must differ beyond chance, or they are one group; 0: no such test
    drift: float = 4.0  # how much a client must differ from itself beyond chance, or it has not changed
    smallest: int = 2
    scale: Literal["mean", "median", "none"] = "mean"  # what thresholds are in units of
    references: int = 0  # clients that all are compared with; 0: everybody with everybody
    literal: bool = False

    def __post_init__(self) -> None:
        for key in ("merge", "split", "guard", "drift"):
            if not 0 <= getattr(self, key) < np.inf:
                raise UserError(f"cluster.{key} is {getattr(self, key)}; it must be a finite number, 0 or more")
        if self.merge > self.split and not self.literal:
            raise UserError(
                f"cluster.merge is {self.merge} and cluster.split is {self.split}; merge must not be larger, or what "
                "is merged is split again for ever (cluster.literal=true tries all the same)"
            )
        _at_least("cluster.smallest", self.smallest, 1)
        _at_least("cluster.references", self.references, 0)

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
        return rows, by_first_appearance(clusters.update(now[moved, :adapted], moved).labels_)[0]

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
        return self.guard > 0 and self._clusters(seed).fit(received, halves=(halves[0], halves[1])).guarded_

    def _clusters(self, seed: int) -> AdaptiveDensityClusters:
        from shoal.clusterers import AdaptiveDensityClusters

        return AdaptiveDensityClusters(
            merge=self.merge,
            split=self.split,
            guard=self.guard,
            min_cluster_size=self.smallest,
            scale=self.scale,
            n_references=self.references or None,
            literal=self.literal,
            random_state=seed,
        )


@dataclass(frozen=True)
class Dense:
    """Clients with alike label distributions, in as many groups as there are (HACCS): OPTICS on Hellinger distances,
    cut at `reach`. Two are enough for a group; who is within reach of nobody is one alone."""

    reach: float = 0.25

    def __post_init__(self) -> None:
        if not 0 < self.reach <= 1:
            raise UserError(f"cluster.reach is {self.reach}; it must be above 0 and at most 1")

    def __call__(self, rows: Floats, seed: int) -> Labels:
        from scipy.spatial.distance import pdist, squareform
        from sklearn.cluster import OPTICS

        if len(rows) < 2:
            return np.zeros(len(rows), dtype=np.int64)
        distances = squareform(pdist(np.sqrt(rows))) / np.sqrt(2)
        optics = OPTICS(min_samples=2, metric="precomputed", cluster_method="dbscan", eps=self.reach)
        labels = optics.fit(distances).labels_.astype(np.int64)
        alone = labels < 0
        labels[alone] = labels.max() + 1 + np.arange(alone.sum())
        return by_first_appearance(labels)[0]


def _refuse_above_1(rows: Floats) -> None:
    for row, column in np.argwhere(rows > 1)[:1]:
        channel = column % (rows.shape[1] // 4)
        raise UserError(f"a sparsity vector has {rows[row, column]} in channel {channel}; sparsities must be 1 or less")


def _at_least(field: str, value: int, least: int) -> None:
    if value < least:
        raise UserError(f"{field} is {value}; it must be {least} or more")


@dataclass(frozen=True)
class Group(ServerOnly):
    """Groups once, and again only when a client has become known that was not there before, or clients were asked
    again; or in every round."""

    rule: Callable[[Floats, int], Labels]  # (a row per client, seed) -> group of each
    column: str = field(metadata=FIXED)
    source: str = field(default="represent", metadata=FIXED)  # the stage that asked
    once: bool = field(default=True, metadata=FIXED)
    name: str = GROUPS

    def fold(self, state: ServerState, reports: Mapping[ClientId, Report], seed: int) -> ServerState:
        known, grouped = Table.load(state, self.source), Table.load(state, self.name)
        if not len(known) or (self.once and known.clients == grouped.clients and not _told_since(known, grouped)):
            return state
        groups = self.rule(known[self.column].double().numpy(), seed)
        columns = {
            "group": torch.from_numpy(np.asarray(groups, dtype=np.int64)),
            "round": torch.full((len(known),), state.round),  # in which they were formed
        }
        table = Table(known.clients, columns)
        return replace(state, memory={**state.memory, self.name: table.tree()})


def _told_since(known: Table, grouped: Table) -> bool:
    return "told" in known.columns and int(known["told"].max()) > int(grouped["round"].min())
