"""EDC: clients whose updates make like angles with the main directions of all updates, in one cluster.

Duan, Liu, Ji, Liu, Liang, Chen, Tan, FedGroup: efficient federated learning via decomposed similarity-based clustering,
ISPA 2021 (arXiv:2010.06870).

| paper | here |
|---|---|
| Δw_i, update of client i | a row of `X` |
| V, the first m left singular vectors of ΔWᵀ | never formed: only their cosines with the rows are |
| m, one direction for each cluster | `clusters` |
| K(Δw_i, v), cosine | `vectors_` |
| EDC(i, j) | the Euclidean distance of rows i and j of `vectors_`, but for a factor 1/m that changes no cluster |
| k-means++ | scikit-learn's, the best of `restarts` |

With X = U Σ Vᵀ the cosine of row i and direction j is U_ij Σ_j / |x_i|, and X Xᵀ = U Σ² Uᵀ: the products of rows are
all that is needed, however many parameters a row has.
"""

from __future__ import annotations

from typing import Self

import numpy as np
from numpy.typing import ArrayLike

from shoal.clusterers.validation import Floats, Labels, by_first_appearance, table, whole
from shoal.rng import derive_seed


class DecomposedClusters:
    """k-means on the cosines between rows and their main directions.

    There are never more clusters than distinct rows of cosines. A row of zeros has no direction: its cosines are 0.
    Found: `labels_` [L], `vectors_` [L, at most `clusters`].
    """

    labels_: Labels
    vectors_: Floats

    def __init__(self, clusters: int, seed: int = 0, restarts: int = 10) -> None:
        self.clusters = clusters
        self.seed = seed
        self.restarts = restarts

    def fit(self, X: ArrayLike) -> Self:
        whole("clusters", self.clusters, 1)
        whole("restarts", self.restarts, 1)
        whole("seed", self.seed, 0)
        rows = table(X, least=-np.inf, column="parameter")
        order = np.array(sorted(range(len(rows)), key=lambda i: rows[i].tobytes()), dtype=np.int64)
        back = np.argsort(order)
        vectors = decomposed_cosines(rows[order], self.clusters)
        self.vectors_ = vectors[back]
        self.labels_, _ = by_first_appearance(self._grouped(vectors)[back])
        return self

    def _grouped(self, vectors: Floats) -> Labels:
        from sklearn.cluster import KMeans

        distinct = len(np.unique(vectors.round(9), axis=0))
        if distinct < 2:
            return np.zeros(len(vectors), dtype=np.int64)
        chance = derive_seed(int(self.seed), "decomposed") % 2**32
        found = KMeans(min(self.clusters, distinct), n_init=self.restarts, random_state=chance).fit(vectors)
        return np.asarray(found.labels_, dtype=np.int64)


def decomposed_cosines(rows: Floats, directions: int) -> Floats:
    """Cosines of the rows [n, P] with the first singular directions: [n, at most min(directions, n, P)].

    A direction has no sign; it is turned so that the cosine that is farthest from 0 is positive. Directions along which
    nothing lies are left out.
    """
    products = rows @ rows.T
    values, left = np.linalg.eigh(products)
    used = np.flatnonzero(values > len(rows) * np.finfo(np.float64).eps * values.max(initial=0.0))[::-1][:directions]
    lengths = np.sqrt(np.diag(products))
    cosines = left[:, used] * np.sqrt(values[used]) / np.where(lengths > 0, lengths, 1.0)[:, None]
    farthest = np.abs(cosines).argmax(axis=0) if len(used) else np.empty(0, dtype=np.int64)
    turned: Floats = cosines * np.where(cosines[farthest, np.arange(len(used))] < 0, -1.0, 1.0)
    return turned
