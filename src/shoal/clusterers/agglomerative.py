"""FLACC: repeatedly merges the two most similar clusters while all pairs of their rows are similar.

Mehta, Shao, "A greedy agglomerative framework for clustered federated learning", IEEE Transactions on Industrial
Informatics 19(12), 2023. The text of the paper was not available. The rules are those of its abstract and of
MetaClusterFL (github.com/ICT-CUbiCS/MetaClusterFL), which contains FLACC for comparison.

| MetaClusterFL | here |
|---|---|
| cosine of the updates of clients i and j, if it was measured | an entry of `X`; NaN if it is not known |
| similarity of two clusters: the smallest known one between their clients | complete linkage |
| the pair with the greatest similarity is merged if that is above 0 | `threshold` |

With the smallest similarity, one pair of clients with opposite updates keeps two clusters apart. A mean of cosines
would be above 0 as soon as a few of them are large. Equal similarities are merged in the order of the rows. Apart from
that the partition does not depend on the order.

Deviations from the paper
-------------------------
- MetaClusterFL merges once a round. Here all possible merges are done at once, because cosines of IID clients are above
  0 only early in training.
- MetaClusterFL merges two clusters of several clients only if some pair across is more similar than the least similar
  pair within. This condition is left out, because it prevented correct merges more often than wrong ones.
"""

from __future__ import annotations

from typing import Any, Self

import numpy as np
from numpy.typing import ArrayLike
from sklearn.base import BaseEstimator, ClusterMixin

from shoal.clusterers.validation import (
    Floats,
    Labels,
    check_features,
    check_number,
    check_shape,
    number_by_first_appearance,
    to_floats,
)
from shoal.errors import UserError


class GreedyClusters(ClusterMixin, BaseEstimator):
    """Complete-linkage clustering of similarities, some of which may be unknown.

    Two clusters between which no similarity is known are not merged.

    Parameters
    ----------
    threshold : float, default=0.0
        Two clusters are merged if the smallest known similarity between their rows is above this value.

    Attributes
    ----------
    labels_ : ndarray of shape (n_rows,)
        Cluster of each row, numbered by first appearance.
    merges_ : ndarray of shape (n_merges,)
        Similarity of each pair that was merged, in the order of merging.
    n_features_in_ : int
        Number of columns of `X`, which is the number of rows.

    References
    ----------
    Mehta, Shao, "A greedy agglomerative framework for clustered federated learning", 2023.

    Examples
    --------
    >>> from shoal.clusterers import GreedyClusters
    >>> GreedyClusters().fit_predict([[1.0, 0.9, -0.2], [0.9, 1.0, 0.4], [-0.2, 0.4, 1.0]]).tolist()
    [0, 0, 1]
    """

    labels_: Labels
    merges_: Floats

    def __init__(self, threshold: float = 0.0) -> None:
        self.threshold = threshold

    def fit(self, X: ArrayLike, y: object = None, *, start: ArrayLike | None = None) -> Self:
        """Merge clusters while a pair is similar enough.

        Parameters
        ----------
        X : array-like of shape (n_rows, n_rows)
            Symmetric similarities, NaN for an unknown one. One of the two entries of a pair may be NaN.
        y : None
            Ignored; present for compatibility with scikit-learn.
        start : array-like of shape (n_rows,), optional
            Labels of the clusters to continue from. By default every row is a separate cluster.

        Returns
        -------
        self : GreedyClusters
            The fitted estimator.

        Raises
        ------
        UserError
            If a parameter, `X` or `start` is not as described.
        """
        check_number("threshold", self.threshold, -np.inf)
        similarities = _check_similarities(X)
        check_features(self, X, reset=True)
        start_labels = np.arange(len(similarities)) if start is None else np.asarray(start)
        if start_labels.shape != (len(similarities),):
            raise UserError(
                f"start has shape {start_labels.shape}; it must be ({len(similarities)},), a label for each row of X"
            )
        labels, _ = number_by_first_appearance(start_labels)
        linkage, merges = _smallest_similarities(similarities, labels), []
        while (highest := np.max(linkage, initial=-np.inf, where=np.isfinite(linkage))) > self.threshold:
            p, q = np.argwhere(linkage == highest)[0]
            labels[labels == q] = p
            linkage[p] = linkage[:, p] = np.minimum(linkage[p], linkage[q])
            linkage[q] = linkage[:, q] = linkage[p, p] = np.inf
            merges.append(highest)
        self.labels_, _ = number_by_first_appearance(labels)
        self.merges_ = np.array(merges, dtype=np.float64)
        return self

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.pairwise = True
        tags.input_tags.allow_nan = True
        return tags


def _check_similarities(X: ArrayLike) -> Floats:
    similarities = to_floats(X)
    check_shape(similarities.shape, "X", min_rows=1)
    rows, columns = similarities.shape
    if rows == columns:
        similarities = np.where(np.isnan(similarities), similarities.T, similarities)
    if rows != columns or not np.allclose(similarities, similarities.T, equal_nan=True):
        raise UserError(f"X has shape {similarities.shape}; it must be square and symmetric")
    if np.isinf(similarities).any():
        raise UserError("X has an infinite entry; entries must be finite, or NaN if a similarity is not known")
    return similarities


def _smallest_similarities(similarities: Floats, labels: Labels) -> Floats:
    """Returns the smallest known similarity between the rows of each two clusters: [clusters, clusters].

    It is infinite where none is known, and between a cluster and itself.
    """
    count = int(labels.max(initial=-1)) + 1
    rows, linkage = np.full((count, len(similarities)), np.inf), np.full((count, count), np.inf)
    np.fmin.at(rows, labels, similarities)
    np.fmin.at(linkage, labels, rows.T)
    np.fill_diagonal(linkage, np.inf)
    return linkage
