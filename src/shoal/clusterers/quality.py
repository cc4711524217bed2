"""The quality of overlapping clusters and of partitions, so that they can be compared on the same rows.

The distance of two rows is 1 − cosine. A row of zeros is at distance 1 from every other. The silhouette of a row is
(b − a) / max(a, b), where a is its mean distance to the others of its cluster and b the smallest mean distance to
another cluster. It is 0 for a row alone in its cluster and where a = b = 0. Nothing is ever NaN: what is not defined
is 0.
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
        True where a row is in a cluster. Every row is in one cluster at least.
    truth : array-like of shape (n_rows,), optional
        Labels that clusters are compared with.

    Returns
    -------
    dict of str to float
        The three silhouettes are the same for a partition.

        - `overlap`: the mean number of clusters that a row is in.
        - `silhouette`: the mean over rows, each counted only in that of its clusters whose centre is nearest. Centres
          are means of all members. 0 for a single cluster and for as many clusters as rows.
        - `silhouette_each`: the mean over memberships, with a from the other members of that cluster and b from the
          clusters that the row is not in. 0 for a row that is in all clusters.
        - `silhouette_core`: the mean over the rows that are in exactly one cluster; all others are left out.
        - `purity`, with `truth`: the share of memberships whose row has the most frequent label of the cluster.

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
    return (
        quality if truth is None else {**quality, "purity": _purity(member, _check_labels(truth, len(rows), "truth"))}
    )


def hard_quality(X: ArrayLike, labels: ArrayLike, truth: ArrayLike | None = None) -> dict[str, float]:
    """Return the quality of a partition.

    Parameters
    ----------
    X : array-like of shape (n_rows, n_columns)
        Any finite numbers.
    labels : array-like of shape (n_rows,)
        Cluster of each row.
    truth : array-like of shape (n_rows,), optional
        Labels that clusters are compared with.

    Returns
    -------
    dict of str to float
        As of `overlap_quality`.

    Raises
    ------
    UserError
        If an argument is not as described.
    """
    rows = _check_rows(X)
    given = _check_labels(labels, len(rows), "labels")
    return overlap_quality(rows, given[:, None] == np.unique(given), truth)


def compare_partitions(
    X: ArrayLike, n_clusters: int, random_state: RandomState = 0, truth: ArrayLike | None = None
) -> dict[str, dict[str, float]]:
    """Return the quality of usual partitions of the same rows into as many clusters.

    Parameters
    ----------
    X : array-like of shape (n_rows, n_columns)
        Any finite numbers.
    n_clusters : int
        Number of clusters.
    random_state : int, RandomState or None, default=0
        Seed of k-means.
    truth : array-like of shape (n_rows,), optional
        Labels that clusters are compared with.

    Returns
    -------
    dict of str to dict
        For each of the `partitions`, its name and its quality as of `overlap_quality`.

    Raises
    ------
    UserError
        If an argument is not as described.
    """
    found = partitions(X, n_clusters, random_state)
    return {name: hard_quality(X, labels, truth) for name, labels in found.items()}


def partitions(X: ArrayLike, n_clusters: int, random_state: RandomState = 0) -> dict[str, Labels]:
    """Return the labels of usual partitions.

    Parameters
    ----------
    X : array-like of shape (n_rows, n_columns)
        Any finite numbers.
    n_clusters : int
        Number of clusters. There are no more clusters than distinct rows.
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
        Rows on the scale of `overlapping.rescaled`.

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
    points = np.divide(b - a, larger, out=np.zeros_like(a), where=larger > 0)
    return float(points.sum() / member.sum())


def _purity(member: MembershipMatrix, truth: NDArray[np.generic]) -> float:
    counts = member.T.astype(np.int64) @ (truth[:, None] == np.unique(truth))
    return float(counts.max(1).sum() / member.sum())


def _check_rows(X: ArrayLike) -> Floats:
    return rescale(check_table(X, min_rows=1))[0]


def _check_membership(membership: ArrayLike) -> MembershipMatrix:
    """Returns the membership without clusters that have no member."""
    found = np.asarray(membership)
    if found.ndim != 2 or found.dtype != np.bool_:
        raise UserError(f"membership is {found.dtype} {found.shape}; it must be a bool for each row and cluster")
    for row in np.flatnonzero(~found.any(1))[:1]:
        raise UserError(f"membership has row {row} in no cluster; every row must be in one at least")
    return found[:, found.any(0)]


def _check_labels(labels: ArrayLike, num_rows: int, name: str) -> NDArray[np.generic]:
    found = np.asarray(labels)
    if found.shape != (num_rows,):
        raise UserError(f"{name} has shape {found.shape}; it must be ({num_rows},), a label for each row of X")
    return found
