"""MCTC: a row is in every cluster whose centre has a similar direction (multi-centre threshold clustering).

Li, Jia, Liu, Zhang, Wang, "SCMoE-PFL: a soft-clustering mixture-of-experts framework for personalized federated
learning", Information Fusion 2026.

| paper | here |
|---|---|
| z_i, i = 1 … N | a row of `X` |
| K | `n_clusters`; `n_clusters_` is the number that is found |
| threshold of the cosine, from 0.2 to 0.6 | `threshold`, `threshold_`, up to `MAX_THRESHOLD` by `THRESHOLD_STEP` |
| initial centres, Alg. 1: rows of the least similar pairs | `choose_seeds` |
| centre of a cluster, Eq. (4) | a row of `cluster_centers_`: the mean of its members |
| cos_avg, Eq. (3), accepted up to 0.3 | `centre_similarity_`, `max_centre_similarity` |

In the ascending list of pairs, the first pair of a row is the pair with its least similar row. Alg. 1 goes through all
N (N − 1) / 2 pairs, and it is therefore enough to sort N rows. A row that is skipped at its first pair is skipped at
later pairs too, because seeds are only added. And the seeds for K − 1 clusters are the first K − 1 of those for K.

The members depend on the order of the rows by design, because a centre moves with each row that is assigned. They do
not depend on it where clusters are separated.

Deviations from the paper
-------------------------
- With `distinct_seeds` a row is no seed if its cosine with an earlier seed reaches the threshold, because two clusters
  would then share one planted group.
- With `distinct_seeds` a row of zeros, which has no direction, is no seed either.
- With `distinct_seeds` there may be fewer clusters than `n_clusters`. `distinct_seeds=False` is Alg. 1 as printed.
"""

from __future__ import annotations

from typing import Self

import numpy as np
from numpy.typing import ArrayLike, NDArray
from sklearn.base import BaseEstimator, ClusterMixin

from shoal.clusterers.validation import Floats, Labels, check_fit_rows, check_new_rows, check_number, check_whole_number

MembershipMatrix = NDArray[np.bool_]

MAX_THRESHOLD = 0.6  # validation raises the threshold up to this value
THRESHOLD_STEP = 0.1
COSINE_DIGITS = 12  # cosines are rounded, because rounding errors must decide neither ties nor thresholds
ZERO_LENGTH = 1e-12  # a vector up to this length, relative to the largest entry of all rows, counts as zeros


class OverlappingClusters(ClusterMixin, BaseEstimator):
    """Clusters that share rows: a row is in every cluster whose centre has a large enough cosine with the row.

    Clusters start from seeds that are far apart. A row that reaches no centre is in the cluster with the nearest
    centre. A seed is in its own cluster only. A row of zeros has cosine 0 with every row. Clusters are in the order of
    their seeds.

    Parameters
    ----------
    n_clusters : int, default=4
        Largest number of clusters.
    threshold : float, default=0.2
        Smallest cosine between a row and a centre for which the row is a member of the cluster.
    distinct_seeds : bool, default=True
        Whether a row that would be a member of an earlier seed's cluster is skipped as a seed. There may then be fewer
        clusters than `n_clusters`.
    validate : bool, default=True
        Whether clusters with similar centres are rejected. The threshold is then raised up to 0.6. If clusters are
        still rejected, there is one cluster less, with the given threshold. A single cluster is always accepted.
    max_centre_similarity : float, default=0.3
        Largest mean cosine between centres that `validate` accepts.

    Attributes
    ----------
    membership_ : ndarray of shape (n_rows, n_clusters_)
        True where a row is in a cluster.
    labels_ : ndarray of shape (n_rows,)
        For each row the cluster with the nearest centre among the clusters of the row.
    cluster_centers_ : ndarray of shape (n_clusters_, n_columns)
        Means of the members of each cluster.
    n_clusters_ : int
        Number of clusters.
    threshold_ : float
        The threshold of the accepted clusters.
    centre_similarity_ : float
        Mean cosine between centres; 0 for a single cluster.
    n_features_in_ : int
        Number of columns of `X`.

    References
    ----------
    Li, Jia, Liu, Zhang, Wang, "SCMoE-PFL: a soft-clustering mixture-of-experts framework for personalized federated
    learning", 2026, Alg. 1, Eq. (3) and (4).

    Examples
    --------
    >>> from shoal.clusterers import OverlappingClusters
    >>> clusterer = OverlappingClusters(n_clusters=2, threshold=0.6, validate=False)
    >>> clusterer.fit([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]]).membership_.tolist()
    [[True, False], [False, True], [True, True]]
    """

    membership_: MembershipMatrix
    labels_: Labels
    cluster_centers_: Floats
    n_clusters_: int
    threshold_: float
    centre_similarity_: float

    def __init__(
        self,
        n_clusters: int = 4,
        *,
        threshold: float = 0.2,
        distinct_seeds: bool = True,
        validate: bool = True,
        max_centre_similarity: float = 0.3,
    ) -> None:
        self.n_clusters = n_clusters
        self.threshold = threshold
        self.distinct_seeds = distinct_seeds
        self.validate = validate
        self.max_centre_similarity = max_centre_similarity

    def fit(self, X: ArrayLike, y: object = None) -> Self:
        """Find seeds, assign the other rows in their order, and check that the clusters are different.

        Parameters
        ----------
        X : array-like of shape (n_rows, n_columns)
            Any finite numbers.
        y : None
            Ignored; present for compatibility with scikit-learn.

        Returns
        -------
        self : OverlappingClusters
            The fitted estimator.

        Raises
        ------
        UserError
            If a parameter or `X` is not as described.
        """
        check_whole_number("n_clusters", self.n_clusters, 1)
        for name in ("threshold", "max_centre_similarity"):
            check_number(name, getattr(self, name), -1)
        original_rows = check_fit_rows(self, X)
        rows, self._unit = rescale(original_rows)
        self.membership_, self.threshold_ = self._find_accepted_clusters(rows)
        self.n_clusters_ = self.membership_.shape[1]
        self.centre_similarity_ = centre_similarity(cluster_means(rows, self.membership_))
        self.labels_ = nearest_member_cluster(rows, self.membership_)
        self.cluster_centers_ = cluster_means(original_rows, self.membership_)
        return self

    def predict_membership(self, X: ArrayLike) -> MembershipMatrix:
        """Return the clusters of new rows, by the centres and the threshold at the end of `fit`.

        A row of `fit` may have other clusters than in `membership_`, because centres moved after it was assigned.

        Parameters
        ----------
        X : array-like of shape (n_rows, n_columns)
            Rows as in `fit`.

        Returns
        -------
        ndarray of shape (n_rows, n_clusters_)
            True where a row is in a cluster.
        """
        rows = check_new_rows(self, X)
        return near_clusters(rows / self._unit, self.cluster_centers_ / self._unit, self.threshold_)

    def predict(self, X: ArrayLike) -> Labels:
        """Return the cluster with the nearest centre for each new row.

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
        return cosines(rows / self._unit, self.cluster_centers_ / self._unit).argmax(1)

    def _find_accepted_clusters(self, rows: Floats) -> tuple[MembershipMatrix, float]:
        """Returns the first clusters that Eq. (3) accepts, and their threshold."""
        similarities, max_count = cosines(rows, rows), min(self.n_clusters, len(rows))
        thresholds = self._thresholds()
        seeds = {t: choose_seeds(similarities, max_count, t if self.distinct_seeds else np.inf) for t in thresholds}
        for count in range(max_count, 0, -1):
            for threshold in thresholds:
                if len(seeds[threshold]) <= count < max_count:
                    continue  # the same seeds were rejected with a larger count
                member = assign_rows(rows, seeds[threshold][:count], threshold)
                is_single = member.shape[1] == 1
                if is_single or not self.validate or self._are_different(cluster_means(rows, member)):
                    return member, threshold
        raise AssertionError("a single cluster is always accepted")

    def _are_different(self, centres: Floats) -> bool:
        return centre_similarity(centres) <= self.max_centre_similarity  # Eq. (3)

    def _thresholds(self) -> list[float]:
        steps = int(round(max(MAX_THRESHOLD - self.threshold, 0.0) / THRESHOLD_STEP, COSINE_DIGITS))
        return [round(float(self.threshold) + THRESHOLD_STEP * step, COSINE_DIGITS) for step in range(steps + 1)]


def choose_seeds(similarities: Floats, max_seeds: int, threshold: float = np.inf) -> Labels:
    """Return the rows that start clusters, from pairs in ascending order of their cosines, with ties by index.

    Parameters
    ----------
    similarities : ndarray of shape (n_rows, n_rows)
        Cosines of all rows.
    max_seeds : int
        Largest number of seeds.
    threshold : float, default=inf
        A row whose cosine with an earlier seed is this or more is skipped. If it is finite, a row of zeros is skipped
        too.

    Returns
    -------
    ndarray of shape (n_seeds,)
        Indices of at most `max_seeds` seeds. If all rows are skipped, the first row of the first pair.

    References
    ----------
    Li, Jia, Liu, Zhang, Wang, "SCMoE-PFL: a soft-clustering mixture-of-experts framework for personalized federated
    learning", 2026, Alg. 1.
    """
    own, to_others = np.arange(len(similarities)), similarities.copy()
    np.fill_diagonal(to_others, np.inf)
    partner = to_others.argmin(1)
    order = np.lexsort((own, np.maximum(own, partner), np.minimum(own, partner), to_others[own, partner]))
    is_free = np.isinf(threshold) | (np.diag(similarities) > 0)
    chosen: list[int] = []
    for row in order:
        if len(chosen) < max_seeds and is_free[row]:
            chosen.append(int(row))
            is_free = is_free & (similarities[row] < threshold)
    return np.array(chosen or order[:1], dtype=np.int64)


def assign_rows(rows: Floats, seed_rows: Labels, threshold: float) -> MembershipMatrix:
    """Assign rows one after another to all near clusters, which start from given seeds.

    Parameters
    ----------
    rows : ndarray of shape (n_rows, n_columns)
        Rows on the scale of `rescale`.
    seed_rows : ndarray of shape (n_clusters,)
        Index of the row that starts each cluster.
    threshold : float
        Smallest cosine between a row and a centre for which the row is a member of the cluster.

    Returns
    -------
    ndarray of shape (n_rows, n_clusters)
        True where a row is in a cluster.
    """
    member = np.zeros((len(rows), len(seed_rows)), dtype=bool)
    member[seed_rows, np.arange(len(seed_rows))] = True
    sums, sizes = rows[seed_rows], np.ones((len(seed_rows), 1))
    for row in np.setdiff1d(np.arange(len(rows)), seed_rows):
        joins = near_clusters(rows[[row]], sums / sizes, threshold)[0]
        member[row] = joins
        sums[joins] += rows[row]  # Eq. (4)
        sizes[joins] += 1
    return member


def near_clusters(rows: Floats, centres: Floats, threshold: float) -> MembershipMatrix:
    """Return the clusters of rows: all clusters with a near centre, or else the cluster with the nearest centre.

    Parameters
    ----------
    rows : ndarray of shape (n_rows, n_columns)
        Rows on the scale of `rescale`.
    centres : ndarray of shape (n_clusters, n_columns)
        Centres on the same scale.
    threshold : float
        Smallest cosine between a row and a near centre.

    Returns
    -------
    ndarray of shape (n_rows, n_clusters)
        True where a row is in a cluster.
    """
    similarities = cosines(rows, centres)
    reached = similarities >= threshold
    nearest = np.arange(len(centres)) == similarities.argmax(1)[:, None]
    return np.where(reached.any(1, keepdims=True), reached, nearest)


def centre_similarity(centres: Floats) -> float:
    """Return the mean cosine over pairs of centres, Eq. (3).

    Parameters
    ----------
    centres : ndarray of shape (n_clusters, n_columns)
        Centres on the scale of `rescale`.

    Returns
    -------
    float
        The mean; 0 for a single centre.
    """
    pairs = cosines(centres, centres)[np.triu_indices(len(centres), 1)]
    return round(float(pairs.mean()), COSINE_DIGITS) if len(pairs) else 0.0


def cluster_means(rows: Floats, member: MembershipMatrix) -> Floats:
    """Return the centres of clusters, Eq. (4).

    Parameters
    ----------
    rows : ndarray of shape (n_rows, n_columns)
        Any finite numbers.
    member : ndarray of shape (n_rows, n_clusters)
        True where a row is in a cluster; no cluster is empty.

    Returns
    -------
    ndarray of shape (n_clusters, n_columns)
        Means of the members.
    """
    centres: Floats = member.T.astype(np.float64) @ rows / member.sum(0)[:, None]
    return centres


def nearest_member_cluster(rows: Floats, member: MembershipMatrix) -> Labels:
    """Return, for each row, the cluster whose centre has the largest cosine with the row, among the row's clusters.

    Parameters
    ----------
    rows : ndarray of shape (n_rows, n_columns)
        Rows on the scale of `rescale`.
    member : ndarray of shape (n_rows, n_clusters)
        True where a row is in a cluster.

    Returns
    -------
    ndarray of shape (n_rows,)
        The labels. Of equal cosines the first counts.
    """
    return np.where(member, cosines(rows, cluster_means(rows, member)), -np.inf).argmax(1)


def cosines(rows: Floats, others: Floats) -> Floats:
    """Return the cosines of all pairs of rows of two tables.

    Parameters
    ----------
    rows : ndarray of shape (n_rows, n_columns)
        Rows on the scale of `rescale`.
    others : ndarray of shape (n_others, n_columns)
        Rows on the same scale.

    Returns
    -------
    ndarray of shape (n_rows, n_others)
        The cosines, rounded to `COSINE_DIGITS` digits; 0 where a row is not longer than `ZERO_LENGTH`.
    """
    return np.round(_unit_rows(rows) @ _unit_rows(others).T, COSINE_DIGITS) + 0.0


def rescale(rows: Floats) -> tuple[Floats, float]:
    """Return rows in units of their largest entry.

    Parameters
    ----------
    rows : ndarray of shape (n_rows, n_columns)
        Any finite numbers.

    Returns
    -------
    rows : ndarray of shape (n_rows, n_columns)
        The rows divided by the unit.
    unit : float
        The largest absolute value; 1 if all entries are 0.
    """
    unit = float(np.abs(rows).max(initial=0.0)) or 1.0
    return rows / unit, unit


def _unit_rows(rows: Floats) -> Floats:
    lengths = np.linalg.norm(rows, axis=1, keepdims=True)
    return np.divide(rows, lengths, out=np.zeros_like(rows), where=lengths > ZERO_LENGTH)
