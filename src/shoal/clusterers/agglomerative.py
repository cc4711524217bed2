"""FLACC: the two most similar clusters become one, again and again, while all of their clients pull in one direction.

Mehta, Shao, A greedy agglomerative framework for clustered federated learning, IEEE Transactions on Industrial
Informatics 19(12), 2023. Its text could not be had. The rules are those of its abstract and of MetaClusterFL
(github.com/ICT-CUbiCS/MetaClusterFL), which compares with it.

| there | here |
|---|---|
| cosine of the updates of clients i and j, if it was measured | an entry of `S`; NaN where it is not known |
| similarity of two clusters: the least that is known between their clients | complete linkage |
| the pair with the greatest similarity is merged if that is above 0 | `threshold` |

The least similarity lets one pair of clients that pull against each other keep two clusters apart; a mean of cosines
is above 0 as soon as a few are large.

Deviation: MetaClusterFL merges once a round, and two clusters of several clients only if some pair across is closer
than the least close pair within. Here all merges are made that can be: cosines of IID clients are above 0 only early in
training, and with one merge a round 20 of them ended in two clusters. The second condition, on digits, held back right
merges more often than wrong ones, and is left out.

Equal similarities are merged in the order of the rows; other than that the partition does not depend on it.
"""

from __future__ import annotations

from typing import Self

import numpy as np
from numpy.typing import ArrayLike

from shoal.clusterers.validation import Floats, Labels, by_first_appearance
from shoal.errors import UserError


class GreedyClusters:
    """Agglomeration by a similarity of which some entries may be unknown.

    `fit(S, start)` goes on from the clusters `start` (a label for each row; none: every row for itself). Clusters
    between which nothing is known are not merged. Found: `labels_` [n], `merges_`: the similarity of each pair that was
    merged, in the order of merging.
    """

    labels_: Labels
    merges_: Floats

    def __init__(self, threshold: float = 0.0) -> None:
        self.threshold = threshold

    def fit(self, S: ArrayLike, start: ArrayLike | None = None) -> Self:
        similar = _symmetric(S)
        given = np.arange(len(similar)) if start is None else np.asarray(start)
        if given.shape != (len(similar),):
            raise UserError(f"start has shape {given.shape}; it must be ({len(similar)},), a label for each row of S")
        labels, _ = by_first_appearance(given)
        least, merges = _least(similar, labels), []
        while (closest := np.max(least, initial=-np.inf, where=np.isfinite(least))) > self.threshold:
            p, q = np.argwhere(least == closest)[0]
            labels[labels == q] = p
            least[p] = least[:, p] = np.minimum(least[p], least[q])
            least[q] = least[:, q] = least[p, p] = np.inf
            merges.append(closest)
        self.labels_, _ = by_first_appearance(labels)
        self.merges_ = np.array(merges, dtype=np.float64)
        return self


def _symmetric(S: ArrayLike) -> Floats:
    found = np.asarray(S, dtype=np.float64)
    if found.ndim != 2 or found.shape[0] != found.shape[1] or not np.allclose(found, found.T, equal_nan=True):
        raise UserError(f"S has shape {found.shape}; it must be square and symmetric, clients by clients")
    if np.isinf(found).any():
        raise UserError("S has an infinite entry; entries must be finite, or NaN where a similarity is not known")
    return found


def _least(similar: Floats, labels: Labels) -> Floats:
    """[clusters, clusters]: the least similarity that is known between their rows; infinite where none is, and of a
    cluster to itself."""
    count = int(labels.max(initial=-1)) + 1
    rows, least = np.full((count, len(similar)), np.inf), np.full((count, count), np.inf)
    np.fmin.at(rows, labels, similar)
    np.fmin.at(least, labels, rows.T)
    np.fill_diagonal(least, np.inf)
    return least
