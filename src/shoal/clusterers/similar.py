"""SimClust: clusters of rows with similar label distributions.

Pereira, Famá, Kalalas, Dini, "Energy-efficient federated learning for AIoT using clustering methods" (2025),
Sec. III-A.

| paper | here |
|---|---|
| p_j, label distribution of client j | a row of `X`, floored as in `symmetric_kl` |
| d(p_j, p_k), symmetrised KL | `symmetric_kl.symmetric_kl` |
| G | `n_clusters` |
| C_g | the rows with `labels_ == g` |
| - | a, g: arithmetic and geometric mean of a cluster's rows; W: Lambert's function |

The paper says only "k-means" with the metric d. Here these are Lloyd's iterations from k-means++ seeds, drawn by d
(which behaves like a squared distance). Of `n_init` starts the one with the lowest inertia is used. The arithmetic mean
of k-means is not the point with the smallest sum of d. That point is `centre="jeffreys"`, with lower inertia. The mean
is the default, because k-means has it and because a mean of label distributions is a label distribution.
"""

from __future__ import annotations

from typing import Any, Literal, Self

import numpy as np
from numpy.typing import ArrayLike
from sklearn.base import BaseEstimator, ClusterMixin

from shoal.clusterers.symmetric_kl import FLOOR, symmetric_kl
from shoal.clusterers.validation import (
    Floats,
    Labels,
    RandomState,
    check_choice,
    check_fit_rows,
    check_new_rows,
    check_whole_number,
    number_by_first_appearance,
    seed_from,
)
from shoal.rng import derive_seed


class SimilarClusters(ClusterMixin, BaseEstimator):
    """k-means under the symmetrised Kullback-Leibler divergence, for label distributions.

    Parameters
    ----------
    n_clusters : int, default=8
        Number of clusters. There are never more clusters than distinct rows.
    random_state : int, RandomState or None, default=0
        Seed of the initial centres.
    n_init : int, default=10
        Number of starts. The start with the lowest inertia is used.
    max_iter : int, default=100
        Largest number of Lloyd's iterations in one start.
    centre : {"mean", "jeffreys"}, default="mean"
        Centre of a cluster: the mean of its rows, or the point with the smallest sum of divergences from them.

    Attributes
    ----------
    labels_ : ndarray of shape (n_rows,)
        Cluster of each row, numbered by first appearance.
    cluster_centers_ : ndarray of shape (n_clusters, n_columns)
        Centres of the clusters.
    inertia_ : float
        Sum of the divergences between rows and their centres.
    n_iter_ : int
        Number of iterations of the start that is used.
    n_features_in_ : int
        Number of columns of `X`.

    References
    ----------
    Pereira, Famá, Kalalas, Dini, "Energy-efficient federated learning for AIoT using clustering methods",
    2025, Sec. III-A.

    Examples
    --------
    >>> from shoal.clusterers import SimilarClusters
    >>> SimilarClusters(n_clusters=2).fit_predict([[0.8, 0.2], [0.2, 0.8], [0.6, 0.4], [0.4, 0.6]]).tolist()
    [0, 1, 0, 1]
    """

    labels_: Labels
    cluster_centers_: Floats
    inertia_: float
    n_iter_: int

    def __init__(
        self,
        n_clusters: int = 8,
        *,
        random_state: RandomState = 0,
        n_init: int = 10,
        max_iter: int = 100,
        centre: Literal["mean", "jeffreys"] = "mean",
    ) -> None:
        self.n_clusters = n_clusters
        self.random_state = random_state
        self.n_init = n_init
        self.max_iter = max_iter
        self.centre = centre

    def fit(self, X: ArrayLike, y: object = None) -> Self:
        """Find centres and labels.

        Parameters
        ----------
        X : array-like of shape (n_rows, n_columns)
            Non-negative numbers, such as label distributions. They are not normalised. Entries below 1e-6 count as
            1e-6.
        y : None
            Ignored; present for compatibility with scikit-learn.

        Returns
        -------
        self : SimilarClusters
            The fitted estimator.

        Raises
        ------
        UserError
            If a parameter or `X` is not as described.
        """
        for name in ("n_clusters", "n_init", "max_iter"):
            check_whole_number(name, getattr(self, name), 1)
        check_choice("centre", self.centre, ("mean", "jeffreys"))
        seed = seed_from(self.random_state)
        floored = np.maximum(check_fit_rows(self, X, non_negative=True), FLOOR)
        rows, inverse, weights = np.unique(floored, axis=0, return_inverse=True, return_counts=True)
        starts = [self._lloyd(rows, weights, derive_seed(seed, "similar", start)) for start in range(self.n_init)]
        self.inertia_, centres, labels, self.n_iter_ = min(starts, key=lambda result: result[0])
        self.labels_, used = number_by_first_appearance(labels[inverse.reshape(-1)])
        self.cluster_centers_ = centres[used]
        return self

    def predict(self, X: ArrayLike) -> Labels:
        """Return the cluster with the nearest centre for each new row.

        Parameters
        ----------
        X : array-like of shape (n_rows, n_columns)
            Rows as in `fit`.

        Returns
        -------
        ndarray of shape (n_rows,)
            The labels.
        """
        rows = check_new_rows(self, X, non_negative=True)
        labels: Labels = symmetric_kl(rows, self.cluster_centers_).argmin(1)
        return labels

    def _lloyd(self, rows: Floats, weights: Labels, seed: int) -> tuple[float, Floats, Labels, int]:
        """Returns inertia, centres, labels and the number of iterations of one start."""
        centres = _seeds(rows, weights, self.n_clusters, np.random.default_rng(seed))
        labels, iterations = np.full(len(rows), -1), 0
        for _ in range(self.max_iter):
            iterations += 1
            previous, labels = labels, _assign_rows(rows, centres)
            if np.array_equal(previous, labels):
                break
            centres = _centres(rows, weights, labels, self.centre)
        distance = symmetric_kl(rows, centres)
        return float(weights @ distance.min(1)), centres, distance.argmin(1), iterations

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.positive_only = True
        return tags


def _seeds(rows: Floats, weights: Labels, n_clusters: int, rng: np.random.Generator) -> Floats:
    """Returns k-means++ seeds, drawn with probabilities proportional to the divergence from the nearest seed."""
    chosen = [int(rng.choice(len(rows), p=weights / weights.sum()))]
    nearest = symmetric_kl(rows, rows[chosen])[:, 0]
    while len(chosen) < n_clusters and nearest.any():
        probability = weights * nearest
        chosen.append(int(rng.choice(len(rows), p=probability / probability.sum())))
        nearest = np.minimum(nearest, symmetric_kl(rows, rows[chosen[-1:]])[:, 0])
    return rows[chosen]


def _assign_rows(rows: Floats, centres: Floats) -> Labels:
    """Returns the nearest centre of each row. A centre without rows gets the row that is farthest from its centre."""
    distance = symmetric_kl(rows, centres)
    labels: Labels = distance.argmin(1)
    nearest = distance.min(1)
    for empty in np.setdiff1d(np.arange(len(centres)), labels):
        is_shared = np.bincount(labels)[labels] > 1
        farthest = np.where(is_shared, nearest, -1.0).argmax()
        labels[farthest], nearest[farthest] = empty, 0.0
    return labels


def _centres(rows: Floats, weights: Labels, labels: Labels, centre: str) -> Floats:
    """Returns the centre of each cluster: the mean, or the point with the smallest sum of d, a / W(e a / g)."""
    arithmetic = _means(rows, weights, labels)
    if centre == "mean":
        return arithmetic
    from scipy.special import lambertw

    geometric = np.exp(_means(np.log(rows), weights, labels))
    jeffreys: Floats = arithmetic / lambertw(np.e * arithmetic / geometric).real
    return jeffreys


def _means(values: Floats, weights: Labels, labels: Labels) -> Floats:
    sums = [np.bincount(labels, weights * column) for column in values.T]
    return np.stack(sums, axis=1) / np.bincount(labels, weights)[:, None]
