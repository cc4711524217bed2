"""Groups of rows that are dense, by DBSCAN with a radius that follows from the rows (FedClusterEnsemble, paper 004).

Ester, Kriegel, Sander, Xu, A density-based algorithm for discovering clusters in large spatial databases with noise,
KDD 1996; scikit-learn's, on Euclidean distances.

| DBSCAN | here |
|---|---|
| eps | `reach` times the distance that nine tenths of all pairs are within |
| min_samples, with the row itself | `smallest` |
| noise | joins the cluster to whose rows its mean distance is least; where there is no cluster, all rows are one |
"""

from __future__ import annotations

from typing import Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from shoal.clusterers.validation import Floats, Labels, by_first_appearance, table, whole
from shoal.errors import UserError

MOST = 0.9  # of all pairs


class NeighbourClusters:
    """Found: `labels_` [L], `noise_` [L], who was in no dense group, and `radius_`."""

    labels_: Labels
    noise_: NDArray[np.bool_]
    radius_: float

    def __init__(self, reach: float = 0.5, smallest: int = 2) -> None:
        self.reach = reach
        self.smallest = smallest

    def fit(self, X: ArrayLike) -> Self:
        whole("smallest", self.smallest, 1)
        if not 0 < self.reach < np.inf:
            raise UserError(f"reach is {self.reach}; it must be above 0")
        rows = table(X, least=-np.inf, column="parameter")
        order = np.array(sorted(range(len(rows)), key=lambda i: rows[i].tobytes()), dtype=np.int64)
        ordered, back = rows[order], np.argsort(order)
        labels = self._dense(ordered)  # a row between two groups goes to the first: sorted, that is always the same one
        noise = labels < 0
        if noise.any():
            labels[noise] = nearest(ordered[~noise], labels[~noise], ordered[noise]) if not noise.all() else 0
        self.noise_, self.labels_ = noise[back], by_first_appearance(labels[back])[0]
        return self

    def _dense(self, rows: Floats) -> Labels:
        """-1 for noise."""
        from scipy.spatial.distance import pdist, squareform
        from sklearn.cluster import DBSCAN

        distances = pdist(rows) if len(rows) > 1 else np.empty(0)
        # a median would be a distance within a group as soon as one group has most of the pairs
        self.radius_ = self.reach * float(np.quantile(distances, MOST)) if len(distances) else 0.0
        if len(rows) < 2:
            return np.zeros(len(rows), dtype=np.int64)
        least = np.finfo(np.float64).tiny  # most rows may be equal: then these are neighbours
        found = DBSCAN(eps=max(self.radius_, least), min_samples=self.smallest, metric="precomputed")
        return np.asarray(found.fit(squareform(distances)).labels_, dtype=np.int64)


def nearest(rows: Floats, labels: Labels, newcomers: Floats) -> Labels:
    """For each newcomer the cluster to whose rows its mean distance is least; of equals the first."""
    from scipy.spatial.distance import cdist

    distances, known = cdist(newcomers, rows), np.unique(labels)
    means = np.stack([distances[:, labels == k].mean(axis=1) for k in known], axis=1)
    return np.asarray(known[means.argmin(axis=1)], dtype=np.int64)
