"""Fuzzy c-means: every row is a member of every cluster, with larger weights for near clusters.

Bezdek, "Pattern recognition with fuzzy objective function algorithms", 1981.

| symbol | here |
|---|---|
| x_i, c_k | a row of `X`, a row of `cluster_centers_` |
| m > 1 | `fuzziness`: near 1 memberships become 0 or 1, with larger values they become equal |
| u_ik = 1 / Σ_j (‖x_i − c_k‖ / ‖x_i − c_j‖)^(2 / (m − 1)) | `membership_` |
| c_k = Σ_i u_ik^m x_i / Σ_i u_ik^m | `cluster_centers_` |
"""

from __future__ import annotations

from typing import Self

import numpy as np
from numpy.typing import ArrayLike
from sklearn.base import BaseEstimator, ClusterMixin

from shoal.clusterers.validation import (
    Floats,
    Labels,
    RandomState,
    check_fit_rows,
    check_new_rows,
    check_number,
    check_whole_number,
    seed_from,
)

TOLERANCE = 1e-9  # iterations end when centres move less than this fraction of the spread of the rows


class FuzzyClusters(ClusterMixin, BaseEstimator):
    """Fuzzy c-means, started from the centres of k-means.

    Clusters are in the order in which k-means finds their centres.

    Parameters
    ----------
    n_clusters : int, default=8
        Number of clusters. There are never more clusters than distinct rows.
    random_state : int, RandomState or None, default=0
        Seed of k-means.
    fuzziness : float, default=2.0
        Exponent of the memberships, above 1. Near 1 memberships become 0 or 1, with larger values they become equal.
    max_iter : int, default=300
        Largest number of iterations.

    Attributes
    ----------
    membership_ : ndarray of shape (n_rows, n_clusters)
        Membership of each row in each cluster. Every row sums to 1.
    labels_ : ndarray of shape (n_rows,)
        The cluster with the largest membership of each row.
    cluster_centers_ : ndarray of shape (n_clusters, n_columns)
        Centres of the clusters.
    n_iter_ : int
        Number of iterations.
    n_features_in_ : int
        Number of columns of `X`.

    References
    ----------
    Bezdek, "Pattern recognition with fuzzy objective function algorithms", 1981.

    Examples
    --------
    >>> from shoal.clusterers import FuzzyClusters
    >>> FuzzyClusters(n_clusters=2).fit([[0.0], [5.0], [10.0]]).membership_[1].round(3).tolist()
    [0.5, 0.5]
    """

    membership_: Floats
    labels_: Labels
    cluster_centers_: Floats
    n_iter_: int

    def __init__(
        self, n_clusters: int = 8, *, random_state: RandomState = 0, fuzziness: float = 2.0, max_iter: int = 300
    ) -> None:
        self.n_clusters = n_clusters
        self.random_state = random_state
        self.fuzziness = fuzziness
        self.max_iter = max_iter

    def fit(self, X: ArrayLike, y: object = None) -> Self:
        """Find centres and memberships.

        Parameters
        ----------
        X : array-like of shape (n_rows, n_columns)
            Any finite numbers.
        y : None
            Ignored; present for compatibility with scikit-learn.

        Returns
        -------
        self : FuzzyClusters
            The fitted estimator.

        Raises
        ------
        UserError
            If a parameter or `X` is not as described.
        """
        check_whole_number("n_clusters", self.n_clusters, 1)
        check_whole_number("max_iter", self.max_iter, 1)
        check_number("fuzziness", self.fuzziness, 1, is_exclusive=True)
        seed = seed_from(self.random_state)
        rows, inverse, weights = np.unique(check_fit_rows(self, X), axis=0, return_inverse=True, return_counts=True)
        self._iterate(rows, weights, self._first_centres(rows, weights, seed))
        self.membership_ = memberships(rows, self.cluster_centers_, self.fuzziness)[inverse.reshape(-1)]
        self.labels_ = self.membership_.argmax(axis=1)
        return self

    def predict_membership(self, X: ArrayLike) -> Floats:
        """Return the memberships of new rows in all clusters.

        Parameters
        ----------
        X : array-like of shape (n_rows, n_columns)
            Rows as in `fit`.

        Returns
        -------
        ndarray of shape (n_rows, n_clusters)
            The memberships. Every row sums to 1.
        """
        return memberships(check_new_rows(self, X), self.cluster_centers_, self.fuzziness)

    def predict(self, X: ArrayLike) -> Labels:
        """Return the cluster with the largest membership of each new row.

        Parameters
        ----------
        X : array-like of shape (n_rows, n_columns)
            Rows as in `fit`.

        Returns
        -------
        ndarray of shape (n_rows,)
            The labels.
        """
        return self.predict_membership(X).argmax(axis=1)

    def _first_centres(self, rows: Floats, weights: Labels, seed: int) -> Floats:
        from sklearn.cluster import KMeans

        k_means = KMeans(min(self.n_clusters, len(rows)), n_init=10, random_state=seed % 2**32)
        return np.asarray(k_means.fit(rows, sample_weight=weights).cluster_centers_)

    def _iterate(self, rows: Floats, weights: Labels, centres: Floats) -> None:
        spread = np.ptp(rows, axis=0).max()
        self.n_iter_ = 0
        for _ in range(self.max_iter):
            self.n_iter_ += 1
            previous = centres
            pull = weights[:, None] * memberships(rows, centres, self.fuzziness) ** self.fuzziness
            centres = pull.T @ rows / pull.sum(axis=0)[:, None]
            if np.abs(centres - previous).max() <= TOLERANCE * spread:
                break
        self.cluster_centers_ = centres


def memberships(rows: Floats, centres: Floats, fuzziness: float) -> Floats:
    """Return the memberships of rows in clusters with the given centres.

    Parameters
    ----------
    rows : ndarray of shape (n_rows, n_columns)
        Any finite numbers.
    centres : ndarray of shape (n_clusters, n_columns)
        Centres of the clusters.
    fuzziness : float
        Exponent of the memberships, above 1.

    Returns
    -------
    ndarray of shape (n_rows, n_clusters)
        The memberships. A row that equals one or more centres is a member of these alone, in equal parts.

    Examples
    --------
    >>> memberships(np.array([[1.0]]), np.array([[0.0], [4.0]]), fuzziness=2.0).round(6).tolist()
    [[0.9, 0.1]]
    """
    squares = ((rows[:, None] - centres[None]) ** 2).sum(axis=-1)
    nearest = squares.min(axis=1, keepdims=True)
    weights = np.divide(nearest, squares, out=np.ones_like(squares), where=squares > 0) ** (1 / (fuzziness - 1))
    return np.asarray(weights / weights.sum(axis=1, keepdims=True))
