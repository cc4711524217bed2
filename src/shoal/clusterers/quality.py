"""How good clusters are, overlapping ones and partitions, so that they can be compared on the same rows.

The distance of two rows is 1 − cosine; a row of zeros is at distance 1 from every other. The silhouette of a row is
(b − a) / max(a, b): a its mean distance to the others of its cluster, b the least mean distance to another cluster. It
is 0 for a row alone in its cluster and where a = b = 0. Nothing is ever NaN: what is not defined is 0.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from shoal.clusterers.overlapping import Members, cosines, nearest_own, rescaled
from shoal.clusterers.validation import Floats, Labels, one_thread, table, whole
from shoal.errors import UserError


def overlap_quality(z: ArrayLike, membership: ArrayLike, truth: ArrayLike | None = None) -> dict[str, float]:
    """Of clusters that may share rows: membership [N, K], true where a row is in a cluster.

    - `overlap`: the mean number of clusters that a row is in.
    - `silhouette`: each row counted only in that of its clusters whose centre is nearest, centres being means of all
      members; mean over rows. 0 for a single cluster and for as many as rows.
    - `silhouette_each`: mean over memberships, a taken from that cluster's other members and b from the clusters that
      the row is not in. 0 for a row that is in all.
    - `silhouette_core`: mean over the rows that are in exactly one cluster, all others left out.
    - `purity`, with labels `truth`: share of memberships whose row has the label most frequent in the cluster.

    For a partition the three silhouettes are one.
    """
    rows, member = _rows(z), _members(membership)
    if len(rows) != len(member):
        raise UserError(f"membership has {len(member)} rows; it must have {len(rows)}, as many as z")
    distances, labels = cosine_distances(rows), nearest_own(rows, member)
    core = np.flatnonzero(member.sum(1) == 1)
    found = {
        "overlap": float(member.sum(1).mean()),
        "silhouette": _silhouette(distances, labels),
        "silhouette_each": _silhouette_each(distances, member),
        "silhouette_core": _silhouette(distances[np.ix_(core, core)], labels[core]),
    }
    return found if truth is None else {**found, "purity": _purity(member, _one_each(truth, len(rows), "truth"))}


def hard_quality(z: ArrayLike, labels: ArrayLike, truth: ArrayLike | None = None) -> dict[str, float]:
    """The same of a partition: each row is in the cluster of its label and no other."""
    rows = _rows(z)
    given = _one_each(labels, len(rows), "labels")
    return overlap_quality(rows, given[:, None] == np.unique(given), truth)


def compared(z: ArrayLike, clusters: int, seed: int, truth: ArrayLike | None = None) -> dict[str, dict[str, float]]:
    """What `partitions` of the same rows into as many clusters are worth."""
    return {name: hard_quality(z, labels, truth) for name, labels in partitions(z, clusters, seed).items()}


def partitions(z: ArrayLike, clusters: int, seed: int) -> dict[str, Labels]:
    """Labels by `kmeans` (Euclidean, the best of ten starts) and `hierarchical` (average linkage of cosine distances).
    There are no more clusters than distinct rows."""
    from sklearn.cluster import AgglomerativeClustering, KMeans

    rows = _rows(z)
    count = min(whole("clusters", clusters, 1), len(np.unique(rows.round(9), axis=0)))
    chance = whole("seed", seed, 0) % 2**32
    if count == 1:
        return dict.fromkeys(("kmeans", "hierarchical"), np.zeros(len(rows), dtype=np.int64))
    with one_thread():
        means = KMeans(count, n_init=10, random_state=chance).fit(rows).labels_
    tree = AgglomerativeClustering(count, metric="precomputed", linkage="average").fit(cosine_distances(rows)).labels_
    return {"kmeans": means.astype(np.int64), "hierarchical": tree.astype(np.int64)}


def cosine_distances(rows: Floats) -> Floats:
    """For rows on the scale of `rescaled`."""
    distances = 1 - cosines(rows, rows)
    np.fill_diagonal(distances, 0.0)
    return distances


def _silhouette(distances: Floats, labels: Labels) -> float:
    from sklearn.metrics import silhouette_score

    if not 1 < len(np.unique(labels)) < len(labels):
        return 0.0
    return float(silhouette_score(distances, labels, metric="precomputed"))


def _silhouette_each(distances: Floats, member: Members) -> float:
    sums, sizes = distances @ member, member.sum(0)
    others = np.where(member, np.inf, sums / sizes).min(1)
    row, cluster = np.nonzero(member & (sizes > 1) & ~member.all(1, keepdims=True))
    a, b = sums[row, cluster] / (sizes[cluster] - 1), others[row]
    larger = np.maximum(a, b)
    points = np.divide(b - a, larger, out=np.zeros_like(a), where=larger > 0)
    return float(points.sum() / member.sum())


def _purity(member: Members, truth: NDArray[np.generic]) -> float:
    counts = member.T.astype(np.int64) @ (truth[:, None] == np.unique(truth))
    return float(counts.max(1).sum() / member.sum())


def _rows(z: ArrayLike) -> Floats:
    rows = table(z, "z", -np.inf, "component")
    if len(rows) == 0:
        raise UserError(f"z has shape {rows.shape}; it must have one row at least")
    return rescaled(rows)[0]


def _members(membership: ArrayLike) -> Members:
    """Without clusters that have no member."""
    found = np.asarray(membership)
    if found.ndim != 2 or found.dtype != np.bool_:
        raise UserError(f"membership is {found.dtype} {found.shape}; it must be a bool for each row and cluster")
    for row in np.flatnonzero(~found.any(1))[:1]:
        raise UserError(f"membership has row {row} in no cluster; every row must be in one at least")
    return found[:, found.any(0)]


def _one_each(labels: ArrayLike, count: int, name: str) -> NDArray[np.generic]:
    found = np.asarray(labels)
    if found.shape != (count,):
        raise UserError(f"{name} has shape {found.shape}; it must be ({count},), a label for each row of z")
    return found
