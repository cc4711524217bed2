"""MCTC: a row is in every cluster whose centre it points alike enough (multi-centre threshold clustering).

| paper | here |
|---|---|
| z_i, N of them | a row of `z` |
| K | `clusters`, of which `n_clusters_` are left |
| threshold of the cosine, 0.2 at first, 0.6 at most | `threshold`, `threshold_`, `LARGEST` in steps of `STEP` |
| initial centres, Alg. 1: ends of the least similar pairs | `seeds` |
| centre of a cluster, Eq. (4) | a row of `centres_`: the mean of its members |
| cos_avg, Eq. (3), accepted up to 0.3 | `separation_`, `limit` |

A row's first place in the ascending list of pairs is the pair of it and the row least like it, so the walk over the
N (N − 1) / 2 pairs is a sort of N rows. A row that the guard passes over there is passed over at its later places too:
seeds only become more. And seeds for K − 1 are the first K − 1 of those for K.

The members depend on the order of the rows by design: centres move with each row that is assigned. Where groups are
separated they do not.

Deviation: the two ends of one pair may be far from each other and yet each be in a group that has its seed already;
then two clusters share a group. `guarded` passes over such a row: one whose cosine with a seed reaches the threshold,
so that it would be a member of the seed's cluster. It passes over rows of zeros too, which point nowhere. There may be
fewer clusters than asked then. `guarded=False` is Alg. 1 as printed.
"""

from __future__ import annotations

from typing import Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from shoal.clusterers.validation import Floats, Labels, table, whole
from shoal.errors import UserError

Members = NDArray[np.bool_]

LARGEST = 0.6  # threshold up to which it is raised
STEP = 0.1
DIGITS = 12  # of a cosine; what follows is rounding, by which neither ties nor thresholds may be decided
NOTHING = 1e-12  # length, relative to the largest entry of all rows, up to which a vector is one of zeros


class OverlappingClusters:
    """Clusters that share rows: seeds far apart, and every other row wherever its cosine reaches a threshold.

    A row that reaches none is in the cluster with the nearest centre; a seed is in its own cluster only. A row of zeros
    has cosine 0 with everything. `validate`: while centres point alike (Eq. 3 above `limit`), the threshold is raised;
    where it can be raised no more, there is one cluster less, and the threshold is as asked again. A single cluster is
    always accepted.

    Found: `membership_` [N, K], `centres_` [K, m], `labels_` [N] (of the clusters that a row is in, the one whose
    centre is nearest), `n_clusters_`, `threshold_` that was used last, `separation_`: the mean cosine between centres,
    0 for a single cluster, which has none to be compared with. Clusters are in the order of their seeds.
    """

    membership_: Members
    centres_: Floats
    labels_: Labels
    n_clusters_: int
    threshold_: float
    separation_: float

    def __init__(
        self,
        clusters: int = 4,
        threshold: float = 0.2,
        guarded: bool = True,
        validate: bool = True,
        limit: float = 0.3,
    ) -> None:
        self.clusters = clusters
        self.threshold = threshold
        self.guarded = guarded
        self.validate = validate
        self.limit = limit

    def fit(self, z: ArrayLike) -> Self:
        whole("clusters", self.clusters, 1)
        for name in ("threshold", "limit"):
            if not -1 <= getattr(self, name) < np.inf:
                raise UserError(f"{name} is {getattr(self, name)}; it must be a finite number, -1 or more")
        given = table(z, "z", -np.inf, "component")
        if len(given) == 0:
            raise UserError(f"z has shape {given.shape}; it must have one row at least")
        rows, self._unit = rescaled(given)
        self.membership_, self.threshold_ = self._accepted(rows)
        self.n_clusters_ = self.membership_.shape[1]
        self.separation_ = separation(means(rows, self.membership_))
        self.labels_ = nearest_own(rows, self.membership_)
        self.centres_ = means(given, self.membership_)
        return self

    def predict(self, z: ArrayLike) -> Members:
        """Membership of newcomers, by the same rule, with centres and threshold as they were found."""
        if not hasattr(self, "membership_"):
            raise UserError("OverlappingClusters has no clusters yet; fit(z) must come before predict(z)")
        rows = table(z, "z", -np.inf, "component")
        if rows.shape[1] != self.centres_.shape[1]:
            raise UserError(f"z has {rows.shape[1]} columns; it must have {self.centres_.shape[1]}, as in fit")
        return within(rows / self._unit, self.centres_ / self._unit, self.threshold_)

    def _accepted(self, rows: Floats) -> tuple[Members, float]:
        """The first partition that Eq. (3) accepts, and its threshold."""
        alike, most = cosines(rows, rows), min(self.clusters, len(rows))
        thresholds = self._thresholds()
        found = {threshold: seeds(alike, most, threshold if self.guarded else np.inf) for threshold in thresholds}
        for count in range(most, 0, -1):
            for threshold in thresholds:
                if len(found[threshold]) <= count < most:
                    continue  # the same seeds were refused with a larger count
                member = assigned(rows, found[threshold][:count], threshold)
                one = member.shape[1] == 1
                if one or not self.validate or separation(means(rows, member)) <= self.limit:  # Eq. (3)
                    return member, threshold
        raise AssertionError("a single cluster is always accepted")

    def _thresholds(self) -> list[float]:
        steps = int(round(max(LARGEST - self.threshold, 0.0) / STEP, DIGITS))
        return [round(float(self.threshold) + STEP * step, DIGITS) for step in range(steps + 1)]


def seeds(alike: Floats, count: int, threshold: float = np.inf) -> Labels:
    """Up to `count` rows, from pairs in ascending order of their cosines `alike` [N, N], ties by index.

    Passed over: a row whose cosine with an earlier seed is `threshold` or more, and, where there is a threshold, a row
    of zeros. If nothing is left, the first row of all.
    """
    own, apart = np.arange(len(alike)), alike.copy()
    np.fill_diagonal(apart, np.inf)
    partner = apart.argmin(1)
    order = np.lexsort((own, np.maximum(own, partner), np.minimum(own, partner), apart[own, partner]))
    free = np.isinf(threshold) | (np.diag(alike) > 0)
    found: list[int] = []
    for row in order:
        if len(found) < count and free[row]:
            found.append(int(row))
            free = free & (alike[row] < threshold)
    return np.array(found or order[:1], dtype=np.int64)


def assigned(rows: Floats, first: Labels, threshold: float) -> Members:
    """Membership [N, K] if row `first[k]` starts cluster k and the others follow in order."""
    member = np.zeros((len(rows), len(first)), dtype=bool)
    member[first, np.arange(len(first))] = True
    sums, sizes = rows[first], np.ones((len(first), 1))
    for row in np.setdiff1d(np.arange(len(rows)), first):
        joins = within(rows[[row]], sums / sizes, threshold)[0]
        member[row] = joins
        sums[joins] += rows[row]  # Eq. (4)
        sizes[joins] += 1
    return member


def within(rows: Floats, centres: Floats, threshold: float) -> Members:
    """In which clusters rows are [rows, centres]: where the cosine reaches the threshold, else the nearest."""
    alike = cosines(rows, centres)
    reached = alike >= threshold
    nearest = np.arange(len(centres)) == alike.argmax(1)[:, None]
    return np.where(reached.any(1, keepdims=True), reached, nearest)


def separation(centres: Floats) -> float:
    """Eq. (3): the mean cosine over pairs of centres; 0 for a single one."""
    pairs = cosines(centres, centres)[np.triu_indices(len(centres), 1)]
    return round(float(pairs.mean()), DIGITS) if len(pairs) else 0.0


def means(rows: Floats, member: Members) -> Floats:
    """Eq. (4)."""
    found: Floats = member.T.astype(np.float64) @ rows / member.sum(0)[:, None]
    return found


def nearest_own(rows: Floats, member: Members) -> Labels:
    """Of the clusters that each row is in, the one whose centre has the largest cosine, the first of equals."""
    return np.where(member, cosines(rows, means(rows, member)), -np.inf).argmax(1)


def cosines(rows: Floats, others: Floats) -> Floats:
    """[rows, others], for vectors on the scale of `rescaled`; 0 where one of them is NOTHING."""
    return np.round(_unit(rows) @ _unit(others).T, DIGITS) + 0.0


def rescaled(rows: Floats) -> tuple[Floats, float]:
    """The rows in units of the largest entry, and that unit; 1 if there is none."""
    unit = float(np.abs(rows).max(initial=0.0)) or 1.0
    return rows / unit, unit


def _unit(rows: Floats) -> Floats:
    lengths = np.linalg.norm(rows, axis=1, keepdims=True)
    return np.divide(rows, lengths, out=np.zeros_like(rows), where=lengths > NOTHING)
