"""SimClust: clients with similar label distributions in one cluster.

Pereira, Famá, Kalalas, Dini, Energy-efficient federated learning for AIoT using clustering methods
(paper 002), Sec. III-A.

| paper | here |
|---|---|
| p_j, label distribution of client j | a row of `X`, floored as in `divergence` |
| d(p_j, p_k), symmetrised KL | `divergence.symmetric_kl` |
| G | `clusters` |
| C_g | the rows with `labels_ == g` |
| - | a, g: arithmetic and geometric mean of a cluster's rows; W: Lambert's function |

The paper says k-means with d for the metric and no more. Here: Lloyd's iterations, k-means++ seeds drawn by d (which
behaves like a squared distance), the best of `restarts` by inertia.

Deviation: the arithmetic mean of k-means is not the point with the least sum of d. That point is `centre="jeffreys"`,
with lower inertia; the mean is the default because it is what "k-means" says and its rows stay label distributions.
"""

from __future__ import annotations

from typing import Literal, Self

import numpy as np
from numpy.typing import ArrayLike

from shoal.clusterers.symmetric_kl import FLOOR, symmetric_kl
from shoal.clusterers.validation import Floats, Labels, by_first_appearance, one_of, table, whole
from shoal.errors import UserError
from shoal.rng import derive_seed


class SimilarClusters:
    """k-means under the symmetrised KL divergence.

    There are never more clusters than distinct rows: fewer rows than `clusters`, or equal ones, give fewer clusters.
    Found: `labels_` [L], `centres_` [clusters, M], `inertia_` (the sum of d between rows and their centres).
    """

    labels_: Labels
    centres_: Floats
    inertia_: float

    def __init__(
        self,
        clusters: int,
        seed: int = 0,
        restarts: int = 10,
        most_iterations: int = 100,
        centre: Literal["mean", "jeffreys"] = "mean",
    ) -> None:
        self.clusters = clusters
        self.seed = seed
        self.restarts = restarts
        self.most_iterations = most_iterations
        self.centre = centre

    def fit(self, X: ArrayLike) -> Self:
        for name in ("clusters", "restarts", "most_iterations"):
            whole(name, getattr(self, name), 1)
        whole("seed", self.seed, 0)
        one_of("centre", self.centre, ("mean", "jeffreys"))
        given = np.maximum(table(X), FLOOR)
        rows, place, weights = np.unique(given, axis=0, return_inverse=True, return_counts=True)
        if len(rows) == 0:
            self.labels_, self.centres_, self.inertia_ = np.empty(0, np.int64), given, 0.0
            return self
        tries = [self._lloyd(rows, weights, restart) for restart in range(self.restarts)]
        self.inertia_, centres, labels = min(tries, key=lambda found: found[0])
        self.labels_, used = by_first_appearance(labels[place.reshape(-1)])
        self.centres_ = centres[used]
        return self

    def predict(self, P: ArrayLike) -> Labels:
        """The nearest centre of each row."""
        if not hasattr(self, "centres_"):
            raise UserError("SimilarClusters has no centres yet; fit(X) must come before predict(P)")
        rows = table(P, "P")
        if rows.shape[1] != self.centres_.shape[1]:
            raise UserError(f"P has {rows.shape[1]} columns; it must have {self.centres_.shape[1]}, as X had")
        if len(rows) and not len(self.centres_):
            raise UserError("SimilarClusters was fitted on no rows; fit(X) must see at least 1 row before predict(P)")
        labels: Labels = symmetric_kl(rows, self.centres_).argmin(1) if len(rows) else np.empty(0, np.int64)
        return labels

    def _lloyd(self, rows: Floats, weights: Labels, restart: int) -> tuple[float, Floats, Labels]:
        rng = np.random.default_rng(derive_seed(int(self.seed), "similar", restart))
        centres = _seeds(rows, weights, self.clusters, rng)
        labels = np.full(len(rows), -1)
        for _ in range(self.most_iterations):
            before, labels = labels, _assigned(rows, centres)
            if np.array_equal(before, labels):
                break
            centres = _centres(rows, weights, labels, self.centre)
        distance = symmetric_kl(rows, centres)
        return float(weights @ distance.min(1)), centres, distance.argmin(1)


def _seeds(rows: Floats, weights: Labels, clusters: int, rng: np.random.Generator) -> Floats:
    """k-means++: the next seed is a row drawn in proportion to its divergence from the nearest seed so far."""
    chosen = [int(rng.choice(len(rows), p=weights / weights.sum()))]
    nearest = symmetric_kl(rows, rows[chosen])[:, 0]
    while len(chosen) < clusters and nearest.any():
        chance = weights * nearest
        chosen.append(int(rng.choice(len(rows), p=chance / chance.sum())))
        nearest = np.minimum(nearest, symmetric_kl(rows, rows[chosen[-1:]])[:, 0])
    return rows[chosen]


def _assigned(rows: Floats, centres: Floats) -> Labels:
    """The nearest centre of each row; a centre without rows gets the row that is farthest from its own."""
    distance = symmetric_kl(rows, centres)
    labels: Labels = distance.argmin(1)
    nearest = distance.min(1)
    for empty in np.setdiff1d(np.arange(len(centres)), labels):
        shared = np.bincount(labels)[labels] > 1
        farthest = np.where(shared, nearest, -1.0).argmax()
        labels[farthest], nearest[farthest] = empty, 0.0
    return labels


def _centres(rows: Floats, weights: Labels, labels: Labels, centre: str) -> Floats:
    """Of each cluster the mean, or what has the least sum of d to its rows: in each class a / W(e a / g)."""
    arithmetic = _means(rows, weights, labels)
    if centre == "mean":
        return arithmetic
    from scipy.special import lambertw

    geometric = np.exp(_means(np.log(rows), weights, labels))
    least: Floats = arithmetic / lambertw(np.e * arithmetic / geometric).real
    return least


def _means(values: Floats, weights: Labels, labels: Labels) -> Floats:
    sums = [np.bincount(labels, weights * column) for column in values.T]
    return np.stack(sums, axis=1) / np.bincount(labels, weights)[:, None]
