"""EDC: rows with similar angles to the main directions of all rows belong to one cluster.

Duan, Liu, Ji, Liu, Liang, Chen, Tan, "FedGroup: efficient federated learning via decomposed similarity-based
clustering", ISPA 2021 (arXiv:2010.06870).

| paper | here |
|---|---|
| Δw_i, update of client i | a row of `X` |
| V, the first m left singular vectors of ΔWᵀ | never computed: only their cosines with the rows are |
| m, one direction for each cluster | `n_clusters` |
| K(Δw_i, v), cosine | `vectors_` |
| EDC(i, j) | the Euclidean distance of rows i and j of `vectors_`; the factor 1/m is left out and changes no cluster |
| k-means++ | scikit-learn's, the best of `n_init` |

With X = U Σ Vᵀ the cosine of row i and direction j is U_ij Σ_j / |x_i|, and X Xᵀ = U Σ² Uᵀ. Only the products of rows
are needed, for any number of columns.
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
    check_whole_number,
    number_by_first_appearance,
    order_by_value,
    seed_from,
)
from shoal.rng import derive_seed


class DecomposedClusters(ClusterMixin, BaseEstimator):
    """k-means of the cosines between rows and their main directions, for a few rows with many columns.

    A row of zeros has no direction: its cosines are 0.

    Parameters
    ----------
    n_clusters : int, default=8
        Number of clusters and of directions. There are never more clusters than distinct rows of cosines.
    random_state : int, RandomState or None, default=0
        Seed of k-means.
    n_init : int, default=10
        Number of starts of k-means. The best result is used.

    Attributes
    ----------
    labels_ : ndarray of shape (n_rows,)
        Cluster of each row, numbered by first appearance.
    vectors_ : ndarray of shape (n_rows, n_directions)
        Cosines of each row with the main directions, in at most `n_clusters` columns.
    n_features_in_ : int
        Number of columns of `X`.

    References
    ----------
    Duan et al., "FedGroup: efficient federated learning via decomposed similarity-based clustering", 2021.

    Examples
    --------
    >>> from shoal.clusterers import DecomposedClusters
    >>> DecomposedClusters(n_clusters=2).fit_predict([[3, 0, 0], [0, 2, 0], [1, 0, 0], [0, 7, 0]]).tolist()
    [0, 1, 0, 1]
    """

    labels_: Labels
    vectors_: Floats

    def __init__(self, n_clusters: int = 8, *, random_state: RandomState = 0, n_init: int = 10) -> None:
        self.n_clusters = n_clusters
        self.random_state = random_state
        self.n_init = n_init

    def fit(self, X: ArrayLike, y: object = None) -> Self:
        """Find the main directions and cluster the rows by their cosines with them.

        Parameters
        ----------
        X : array-like of shape (n_rows, n_columns)
            Any finite numbers.
        y : None
            Ignored; present for compatibility with scikit-learn.

        Returns
        -------
        self : DecomposedClusters
            The fitted estimator.

        Raises
        ------
        UserError
            If a parameter or `X` is not as described.
        """
        check_whole_number("n_clusters", self.n_clusters, 1)
        check_whole_number("n_init", self.n_init, 1)
        seed = seed_from(self.random_state)
        rows = check_fit_rows(self, X)
        order = order_by_value(rows)
        inverse = np.argsort(order)
        vectors = decomposed_cosines(rows[order], self.n_clusters)
        self.vectors_ = vectors[inverse]
        self.labels_, _ = number_by_first_appearance(self._k_means(vectors, seed)[inverse])
        return self

    def _k_means(self, vectors: Floats, seed: int) -> Labels:
        from sklearn.cluster import KMeans

        distinct = len(np.unique(vectors.round(9), axis=0))
        if distinct < 2:
            return np.zeros(len(vectors), dtype=np.int64)
        random_state = derive_seed(seed, "decomposed") % 2**32
        k_means = KMeans(min(self.n_clusters, distinct), n_init=self.n_init, random_state=random_state).fit(vectors)
        return np.asarray(k_means.labels_, dtype=np.int64)


def decomposed_cosines(rows: Floats, n_directions: int) -> Floats:
    """Return the cosines of rows with their first singular directions.

    Parameters
    ----------
    rows : ndarray of shape (n_rows, n_columns)
        Any finite numbers.
    n_directions : int
        Number of directions. Directions with singular value 0 are left out.

    Returns
    -------
    ndarray of shape (n_rows, n_directions)
        The cosines. The sign of a direction is arbitrary; here the cosine farthest from 0 is positive.

    References
    ----------
    Duan et al., "FedGroup: efficient federated learning via decomposed similarity-based clustering", 2021.
    """
    products = rows @ rows.T
    values, left = np.linalg.eigh(products)
    used = np.flatnonzero(values > len(rows) * np.finfo(np.float64).eps * values.max(initial=0.0))[::-1][:n_directions]
    lengths = np.sqrt(np.diag(products))
    cosines = left[:, used] * np.sqrt(values[used]) / np.where(lengths > 0, lengths, 1.0)[:, None]
    farthest = np.abs(cosines).argmax(axis=0) if len(used) else np.empty(0, dtype=np.int64)
    signed: Floats = cosines * np.where(cosines[farthest, np.arange(len(used))] < 0, -1.0, 1.0)
    return signed
