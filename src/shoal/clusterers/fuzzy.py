"""Soft clusters: every row belongs to every cluster, more to the near ones (fuzzy c-means).

Bezdek, Pattern recognition with fuzzy objective function algorithms, 1981.

| symbol | here |
|---|---|
| x_i, c_k | a row of `X`, a row of `centres_` |
| m > 1 | `fuzziness`: towards 1 memberships become all or nothing, with larger m they become equal |
| u_ik = 1 / Σ_j (‖x_i − c_k‖ / ‖x_i − c_j‖)^(2 / (m − 1)) | `memberships_` |
| c_k = Σ_i u_ik^m x_i / Σ_i u_ik^m | `centres_` |
"""

from __future__ import annotations

from typing import Self

import numpy as np
from numpy.typing import ArrayLike

from shoal.clusterers.validation import Floats, Labels, table, whole
from shoal.errors import UserError

CLOSE = 1e-9  # a step of the centres, relative to the spread of the rows, after which nothing more is to be gained


class FuzzyClusters:
    """Fuzzy c-means from the centres of k-means.

    There are never more clusters than distinct rows. Found: `memberships_` [L, clusters], whose rows sum to 1, and
    `centres_` [clusters, M]. Clusters have no order of their own: that of the centres k-means found.
    """

    memberships_: Floats
    centres_: Floats

    def __init__(self, clusters: int, seed: int = 0, fuzziness: float = 2.0, most_iterations: int = 300) -> None:
        self.clusters = clusters
        self.seed = seed
        self.fuzziness = fuzziness
        self.most_iterations = most_iterations

    def fit(self, X: ArrayLike) -> Self:
        for name in ("clusters", "most_iterations"):
            whole(name, getattr(self, name), 1)
        if not (np.isfinite(self.fuzziness) and self.fuzziness > 1):
            raise UserError(f"fuzziness is {self.fuzziness}; it must be a number above 1")
        given = table(X)
        rows, place, weights = np.unique(given, axis=0, return_inverse=True, return_counts=True)
        if len(rows) == 0:
            self.memberships_, self.centres_ = np.empty((0, 0)), given
            return self
        self.centres_ = self._settled(rows, weights, self._first(rows, weights))
        self.memberships_ = memberships(rows, self.centres_, self.fuzziness)[place.reshape(-1)]
        return self

    def _first(self, rows: Floats, weights: Labels) -> Floats:
        from sklearn.cluster import KMeans

        count = min(self.clusters, len(rows))
        found = KMeans(count, n_init=10, random_state=self.seed % 2**32).fit(rows, sample_weight=weights)
        return np.asarray(found.cluster_centers_)

    def _settled(self, rows: Floats, weights: Labels, centres: Floats) -> Floats:
        spread = np.ptp(rows, axis=0).max()
        for _ in range(self.most_iterations):
            before = centres
            pull = weights[:, None] * memberships(rows, centres, self.fuzziness) ** self.fuzziness
            centres = pull.T @ rows / pull.sum(axis=0)[:, None]
            if np.abs(centres - before).max() <= CLOSE * spread:
                break
        return centres


def memberships(rows: Floats, centres: Floats, fuzziness: float) -> Floats:
    """u [rows, centres]. A row that lies on centres belongs to these alone, in equal parts."""
    squares = ((rows[:, None] - centres[None]) ** 2).sum(axis=-1)
    nearest = squares.min(axis=1, keepdims=True)
    share = np.divide(nearest, squares, out=np.ones_like(squares), where=squares > 0) ** (1 / (fuzziness - 1))
    return np.asarray(share / share.sum(axis=1, keepdims=True))
