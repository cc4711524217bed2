"""DBSCAN with a radius that follows from the rows, and without noise (FedClusterEnsemble, Freitas et al. 2025).

Ester, Kriegel, Sander, Xu, "A density-based algorithm for discovering clusters in large spatial databases with noise",
KDD 1996. scikit-learn's implementation, on Euclidean distances.

| DBSCAN | here |
|---|---|
| eps | `eps_factor` times the 90 % quantile of all pairwise distances |
| min_samples, with the row itself | `min_samples` |
| noise | joins the cluster with the smallest mean distance to its rows; without clusters, all rows become one |
"""

from __future__ import annotations

from typing import Self

import numpy as np
from numpy.typing import ArrayLike, NDArray
from sklearn.base import BaseEstimator, ClusterMixin

from shoal.clusterers.validation import (
    Floats,
    Labels,
    check_fit_rows,
    check_new_rows,
    check_number,
    check_whole_number,
    number_by_first_appearance,
    order_by_value,
)

DISTANCE_QUANTILE = 0.9  # of the distances of all pairs


class NeighbourClusters(ClusterMixin, BaseEstimator):
    """DBSCAN with a radius that follows from the rows, in which noise joins the nearest cluster.

    Parameters
    ----------
    eps_factor : float, default=0.5
        The radius of DBSCAN as a multiple of the 90 % quantile of all pairwise distances.
    min_samples : int, default=2
        Number of rows within the radius of a core row, itself included.

    Attributes
    ----------
    labels_ : ndarray of shape (n_rows,)
        Cluster of each row, numbered by first appearance. Noise of DBSCAN is in the cluster with the smallest mean
        distance to its rows. If all rows are noise, they are one cluster.
    noise_ : ndarray of shape (n_rows,)
        True for the rows that are noise for DBSCAN.
    eps_ : float
        The radius that was used.
    n_features_in_ : int
        Number of columns of `X`.

    References
    ----------
    Ester, Kriegel, Sander, Xu, "A density-based algorithm for discovering clusters in large spatial databases with
    noise", 1996.

    Examples
    --------
    >>> from shoal.clusterers import NeighbourClusters
    >>> clusterer = NeighbourClusters(eps_factor=0.3).fit([[0.0], [1.0], [10.0], [11.0], [18.0]])
    >>> clusterer.labels_.tolist(), clusterer.noise_.tolist()
    ([0, 0, 1, 1, 1], [False, False, False, False, True])
    """

    labels_: Labels
    noise_: NDArray[np.bool_]
    eps_: float

    def __init__(self, eps_factor: float = 0.5, *, min_samples: int = 2) -> None:
        self.eps_factor = eps_factor
        self.min_samples = min_samples

    def fit(self, X: ArrayLike, y: object = None) -> Self:
        """Find dense clusters and assign noise to them.

        Parameters
        ----------
        X : array-like of shape (n_rows, n_columns)
            Any finite numbers.
        y : None
            Ignored; present for compatibility with scikit-learn.

        Returns
        -------
        self : NeighbourClusters
            The fitted estimator.

        Raises
        ------
        UserError
            If a parameter or `X` is not as described.
        """
        check_whole_number("min_samples", self.min_samples, 1)
        check_number("eps_factor", self.eps_factor, 0, is_exclusive=True)
        rows = check_fit_rows(self, X)
        order = order_by_value(rows)
        ordered, inverse = rows[order], np.argsort(order)
        # A row between two clusters joins the first of them. Sorted rows make this independent of the order of X.
        labels = self._dbscan_labels(ordered)
        noise = labels < 0
        if noise.any():
            labels[noise] = nearest_clusters(ordered[~noise], labels[~noise], ordered[noise]) if not noise.all() else 0
        self.noise_, self.labels_ = noise[inverse], number_by_first_appearance(labels[inverse])[0]
        self._rows = rows
        return self

    def predict(self, X: ArrayLike) -> Labels:
        """Return the cluster with the smallest mean distance to its rows.

        Parameters
        ----------
        X : array-like of shape (n_rows, n_columns)
            Rows as in `fit`.

        Returns
        -------
        ndarray of shape (n_rows,)
            The labels.
        """
        rows = check_new_rows(self, X)
        return nearest_clusters(self._rows, self.labels_, rows)

    def _dbscan_labels(self, rows: Floats) -> Labels:
        """Returns the labels of DBSCAN, -1 for noise."""
        from scipy.spatial.distance import pdist, squareform
        from sklearn.cluster import DBSCAN

        distances = pdist(rows) if len(rows) > 1 else np.empty(0)
        # The median would be a distance within a cluster as soon as one cluster has most of the pairs.
        self.eps_ = self.eps_factor * float(np.quantile(distances, DISTANCE_QUANTILE)) if len(distances) else 0.0
        if len(rows) < 2:
            return np.zeros(len(rows), dtype=np.int64)
        min_eps = np.finfo(np.float64).tiny  # the quantile is 0 if most rows are equal, which must be neighbours
        dbscan = DBSCAN(eps=max(self.eps_, min_eps), min_samples=self.min_samples, metric="precomputed")
        return np.asarray(dbscan.fit(squareform(distances)).labels_, dtype=np.int64)


def nearest_clusters(rows: Floats, labels: Labels, queries: Floats) -> Labels:
    """Return, for each new row, the cluster with the smallest mean distance to its rows.

    Parameters
    ----------
    rows : ndarray of shape (n_rows, n_columns)
        Rows that have been clustered.
    labels : ndarray of shape (n_rows,)
        Cluster of each clustered row.
    queries : ndarray of shape (n_queries, n_columns)
        The new rows.

    Returns
    -------
    ndarray of shape (n_queries,)
        The labels. Of clusters at the same distance the first is used.

    Examples
    --------
    >>> nearest_clusters(np.array([[0.0], [1.0], [9.0]]), np.array([0, 0, 1]), np.array([[4.0]])).tolist()
    [0]
    """
    from scipy.spatial.distance import cdist

    distances, clusters = cdist(queries, rows), np.unique(labels)
    means = np.stack([distances[:, labels == k].mean(axis=1) for k in clusters], axis=1)
    return np.asarray(clusters[means.argmin(axis=1)], dtype=np.int64)
