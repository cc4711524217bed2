"""Quality of overlapping clusters and of partitions, which makes them comparable on the same rows.

The distance of two rows is 1 − cosine. A row of zeros has distance 1 to every other row. The silhouette of a row is
(b − a) / max(a, b), where a is its mean distance to the other rows of its cluster and b the smallest mean distance to
another cluster. It is 0 for a row alone in its cluster and where a = b = 0. Undefined values are 0, never NaN.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from shoal.clusterers.overlapping import MembershipMatrix, cosines, nearest_member_cluster, rescale
from shoal.clusterers.validation import (
    Floats,
    Labels,
    RandomState,
    check_table,
    check_whole_number,
    limit_blas_threads,
    seed_from,
)
from shoal.errors import UserError


def overlap_quality(X: ArrayLike, membership: ArrayLike, truth: ArrayLike | None = None) -> dict[str, float]:
    """Return the quality of clusters that may share rows.

    Parameters
    ----------
    X : array-like of shape (n_rows, n_columns)
        Any finite numbers.
    membership : array-like of bool of shape (n_rows, n_clusters)
        True where a row is in a cluster. Every row is in at least one cluster.
    truth : array-like of shape (n_rows,), optional
        True labels with which clusters are compared.

    Returns
    -------
    dict of str to float
        The three silhouettes are equal for a partition.

        - `overlap`: the mean number of clusters of a row.
        - `silhouette`: the mean over rows, where a row counts only in its cluster with the nearest centre. Centres are
          means of all members. It is 0 for a single cluster and for as many clusters as rows.
        - `silhouette_each`: the mean over memberships, with a from the other members of the cluster and b from the
          clusters that do not contain the row. It is 0 for a row that is in all clusters.
        - `silhouette_core`: the mean over the rows that are in exactly one cluster. All other rows are left out.
        - `purity`, with `truth`: the fraction of memberships whose row has the most frequent label of the cluster.

    Raises
    ------
    UserError
        If an argument is not as described.
    """
    rows, member = _check_rows(X), _check_membership(membership)
    if len(rows) != len(member):
        raise UserError(f"membership has {len(member)} rows; it must have {len(rows)}, as many as X")
    distances, labels = cosine_distances(rows), nearest_member_cluster(rows, member)
    core = np.flatnonzero(member.sum(1) == 1)
    quality = {
        "overlap": float(member.sum(1).mean()),
        "silhouette": _silhouette(distances, labels),
        "silhouette_each": _silhouette_each(distances, member),
        "silhouette_core": _silhouette(distances[np.ix_(core, core)], labels[core]),
    }
    if truth is None:
        return quality
    return {**quality, "purity": _purity(member, _check_labels(truth, len(rows), "truth"))}


def hard_quality(X: ArrayLike, labels: ArrayLike, truth: ArrayLike | None = None) -> dict[str, float]:
    """Return the quality of a partition.

    Parameters
    ----------
    X : array-like of shape (n_rows, n_columns)
        Any finite numbers.
    labels : array-like of shape (n_rows,)
        Cluster of each row.
    truth : array-like of shape (n_rows,), optional
        True labels with which clusters are compared.

    Returns
    -------
    dict of str to float
        The keys and values of `overlap_quality`.

    Raises
    ------
    UserError
        If an argument is not as described.
    """
    rows = _check_rows(X)
    checked = _check_labels(labels, len(rows), "labels")
    return overlap_quality(rows, checked[:, None] == np.unique(checked), truth)


def compare_partitions(
    X: ArrayLike, n_clusters: int, random_state: RandomState = 0, truth: ArrayLike | None = None
) -> dict[str, dict[str, float]]:
    """Return the quality of common partitions of the same rows into the same number of clusters.

    Parameters
    ----------
    X : array-like of shape (n_rows, n_columns)
        Any finite numbers.
    n_clusters : int
        Number of clusters.
    random_state : int, RandomState or None, default=0
        Seed of k-means.
    truth : array-like of shape (n_rows,), optional
        True labels with which clusters are compared.

    Returns
    -------
    dict of str to dict
        For each name of `partitions` the keys and values of `overlap_quality`.

    Raises
    ------
    UserError
        If an argument is not as described.
    """
    labels_by_name = partitions(X, n_clusters, random_state)
    return {name: hard_quality(X, labels, truth) for name, labels in labels_by_name.items()}


def partitions(X: ArrayLike, n_clusters: int, random_state: RandomState = 0) -> dict[str, Labels]:
    """Return the labels of common partitions.

    Parameters
    ----------
    X : array-like of shape (n_rows, n_columns)
        Any finite numbers.
    n_clusters : int
        Number of clusters. There are never more clusters than distinct rows.
    random_state : int, RandomState or None, default=0
        Seed of k-means.

    Returns
    -------
    dict of str to ndarray of shape (n_rows,)
        Labels by `kmeans` (Euclidean, the best of ten starts) and by `hierarchical` (average linkage of cosine
        distances).

    Raises
    ------
    UserError
        If an argument is not as described.
    """
    from sklearn.cluster import AgglomerativeClustering, KMeans

    rows = _check_rows(X)
    count = min(check_whole_number("n_clusters", n_clusters, 1), len(np.unique(rows.round(9), axis=0)))
    seed = seed_from(random_state) % 2**32
    if count == 1:
        return dict.fromkeys(("kmeans", "hierarchical"), np.zeros(len(rows), dtype=np.int64))
    with limit_blas_threads():
        means = KMeans(count, n_init=10, random_state=seed).fit(rows).labels_
    tree = AgglomerativeClustering(count, metric="precomputed", linkage="average").fit(cosine_distances(rows)).labels_
    return {"kmeans": means.astype(np.int64), "hierarchical": tree.astype(np.int64)}


def cosine_distances(rows: Floats) -> Floats:
    """Return the distances 1 - cosine of all pairs of rows.

    Parameters
    ----------
    rows : ndarray of shape (n_rows, n_columns)
        Rows on the scale of `overlapping.rescale`.

    Returns
    -------
    ndarray of shape (n_rows, n_rows)
        The distances, with zeros on the diagonal.
    """
    distances = 1 - cosines(rows, rows)
    np.fill_diagonal(distances, 0.0)
    return distances


def _silhouette(distances: Floats, labels: Labels) -> float:
    from sklearn.metrics import silhouette_score

    if not 1 < len(np.unique(labels)) < len(labels):
        return 0.0
    return float(silhouette_score(distances, labels, metric="precomputed"))


def _silhouette_each(distances: Floats, member: MembershipMatrix) -> float:
    sums, sizes = distances @ member, member.sum(0)
    others = np.where(member, np.inf, sums / sizes).min(1)
    row, cluster = np.nonzero(member & (sizes > 1) & ~member.all(1, keepdims=True))
    a, b = sums[row, cluster] / (sizes[cluster] - 1), others[row]
    larger = np.maximum(a, b)
    silhouettes = np.divide(b - a, larger, out=np.zeros_like(a), where=larger > 0)
    return float(silhouettes.sum() / member.sum())


def _purity(member: MembershipMatrix, truth: NDArray[np.generic]) -> float:
    counts = member.T.astype(np.int64) @ (truth[:, None] == np.unique(truth))
    return float(counts.max(1).sum() / member.sum())


def _check_rows(X: ArrayLike) -> Floats:
    return rescale(check_table(X, min_rows=1))[0]


def _check_membership(membership: ArrayLike) -> MembershipMatrix:
    """Returns the membership without clusters that have no member."""
    member = np.asarray(membership)
    if member.ndim != 2 or member.dtype != np.bool_:
        raise UserError(f"membership is {member.dtype} {member.shape}; it must be a bool for each row and cluster")
    for row in np.flatnonzero(~member.any(1))[:1]:
        raise UserError(f"membership has row {row} in no cluster; every row must be in at least one cluster")
    return member[:, member.any(0)]


def _check_labels(labels: ArrayLike, num_rows: int, name: str) -> NDArray[np.generic]:
    checked = np.asarray(labels)
    if checked.shape != (num_rows,):
        raise UserError(f"{name} has shape {checked.shape}; it must be ({num_rows},), a label for each row of X")
    return checked
