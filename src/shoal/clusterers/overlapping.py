"""MCTC: a row belongs to every cluster whose centre points in a similar direction (multi-centre threshold clustering).

Li, Jia, Liu, Zhang, Wang, "SCMoE-PFL: a soft-clustering mixture-of-experts framework for personalized federated
learning", Information Fusion 2026 (paper 001).

| paper | here |
|---|---|
| z_i, N of them | a row of `X` |
| K | `n_clusters`, of which `n_clusters_` are left |
| threshold of the cosine, 0.2 at first, 0.6 at most | `threshold`, `threshold_`, `LARGEST` in steps of `STEP` |
| initial centres, Alg. 1: ends of the least similar pairs | `seeds` |
| centre of a cluster, Eq. (4) | a row of `cluster_centers_`: the mean of its members |
| cos_avg, Eq. (3), accepted up to 0.3 | `centre_similarity_`, `max_centre_similarity` |

The first place of a row in the ascending list of pairs is its pair with the row least similar to it. The walk over the
N (N − 1) / 2 pairs is therefore a sort of N rows. A row that is passed over at its first place is passed over at its
later places too, because seeds are only added. And the seeds for K − 1 clusters are the first K − 1 of those for K.

The members depend on the order of the rows by design: a centre moves with each row that is assigned. Where clusters are
separated they do not depend on it.

Deviation: the two ends of one pair may be far from each other and yet each be in a group that has its seed already.
Then two clusters share a group. With `distinct_seeds` such a row is passed over: a row whose cosine with a seed reaches
the threshold, so that it would be a member of the seed's cluster. A row of zeros, which has no direction, is passed
over too. There may then be fewer clusters than asked for. `distinct_seeds=False` is Alg. 1 as printed.
"""

from __future__ import annotations

from typing import Self

import numpy as np
from numpy.typing import ArrayLike, NDArray
from sklearn.base import BaseEstimator, ClusterMixin

from shoal.clusterers.validation import Floats, Labels, check_fit_rows, check_new_rows, check_number, check_whole_number

MembershipMatrix = NDArray[np.bool_]

MAX_THRESHOLD = 0.6  # threshold up to which it is raised
THRESHOLD_STEP = 0.1
COSINE_DIGITS = 12  # of a cosine; the digits that follow are rounding and must decide neither ties nor thresholds
ZERO_LENGTH = 1e-12  # length, relative to the largest entry of all rows, up to which a vector counts as zeros


class OverlappingClusters(ClusterMixin, BaseEstimator):
    """Clusters that share rows: seeds far apart, every other row wherever its cosine reaches a threshold.

    A row that reaches no centre is in the cluster with the nearest one. A seed is in its own cluster only. A row of
    zeros has cosine 0 with everything. Clusters are in the order of their seeds.

    Parameters
    ----------
    n_clusters : int, default=4
        Largest number of clusters.
    threshold : float, default=0.2
        Cosine between a row and a centre from which on the row is a member of the cluster.
    distinct_seeds : bool, default=True
        Whether a row that would be a member of an earlier seed's cluster is passed over as a seed. There may then be
        fewer clusters than asked for.
    validate : bool, default=True
        Whether clusters with similar centres are refused. The threshold is then raised up to 0.6, and if that does not
        help there is one cluster less, with the threshold as it was given. A single cluster is always accepted.
    max_centre_similarity : float, default=0.3
        Mean cosine between centres up to which `validate` accepts clusters.

    Attributes
    ----------
    membership_ : ndarray of shape (n_rows, n_clusters_)
        True where a row is in a cluster.
    labels_ : ndarray of shape (n_rows,)
        Of the clusters that a row is in, the one with the nearest centre.
    cluster_centers_ : ndarray of shape (n_clusters_, n_columns)
        Means of the members of each cluster.
    n_clusters_ : int
        Number of clusters.
    threshold_ : float
        The threshold that was used last.
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
    >>> rule = OverlappingClusters(n_clusters=2, threshold=0.6, validate=False)
    >>> rule.fit([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]]).membership_.tolist()
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
            Ignored; it is there by convention.

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
        given = check_fit_rows(self, X)
        rows, self._unit = rescale(given)
        self.membership_, self.threshold_ = self._find_accepted_clusters(rows)
        self.n_clusters_ = self.membership_.shape[1]
        self.centre_similarity_ = centre_similarity(cluster_means(rows, self.membership_))
        self.labels_ = nearest_member_cluster(rows, self.membership_)
        self.cluster_centers_ = cluster_means(given, self.membership_)
        return self

    def predict_membership(self, X: ArrayLike) -> MembershipMatrix:
        """Return the clusters of new rows, by the same rule, with the centres and the threshold of the end of `fit`.

        For a row of `fit` there may be more clusters than in `membership_`: centres moved after it was assigned.

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
        similarities, most = cosines(rows, rows), min(self.n_clusters, len(rows))
        thresholds = self._thresholds()
        first = {t: choose_seeds(similarities, most, t if self.distinct_seeds else np.inf) for t in thresholds}
        for count in range(most, 0, -1):
            for threshold in thresholds:
                if len(first[threshold]) <= count < most:
                    continue  # the same seeds were refused with a larger count
                member = assign_rows(rows, first[threshold][:count], threshold)
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
    """Return the rows that start clusters, from pairs in ascending order of their cosines, ties by index.

    Parameters
    ----------
    similarities : ndarray of shape (n_rows, n_rows)
        Cosines of all rows.
    count : int
        Largest number of seeds.
    threshold : float, default=inf
        A row whose cosine with an earlier seed is this or more is passed over. If it is finite, a row of zeros is
        passed over too.

    Returns
    -------
    ndarray of shape (n_seeds,)
        Indices of the seeds, `count` at most. If all rows are passed over, the first row of the first pair.

    References
    ----------
    Li, Jia, Liu, Zhang, Wang, "SCMoE-PFL: a soft-clustering mixture-of-experts framework for personalized federated
    learning", 2026, Alg. 1.
    """
    own, apart = np.arange(len(similarities)), similarities.copy()
    np.fill_diagonal(apart, np.inf)
    partner = apart.argmin(1)
    order = np.lexsort((own, np.maximum(own, partner), np.minimum(own, partner), apart[own, partner]))
    free = np.isinf(threshold) | (np.diag(similarities) > 0)
    chosen: list[int] = []
    for row in order:
        if len(chosen) < max_seeds and free[row]:
            chosen.append(int(row))
            free = free & (similarities[row] < threshold)
    return np.array(chosen or order[:1], dtype=np.int64)


def assign_rows(rows: Floats, seed_rows: Labels, threshold: float) -> MembershipMatrix:
    """Assign rows one after another to the clusters that are near enough, from given seeds.

    Parameters
    ----------
    rows : ndarray of shape (n_rows, n_columns)
        Rows on the scale of `rescaled`.
    first : ndarray of shape (n_clusters,)
        Index of the row that starts each cluster.
    threshold : float
        Cosine from which on a row is a member of a cluster.

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
    """Return the clusters of rows: those whose centre is near enough, or else the nearest.

    Parameters
    ----------
    rows : ndarray of shape (n_rows, n_columns)
        Rows on the scale of `rescaled`.
    centres : ndarray of shape (n_clusters, n_columns)
        Centres on the same scale.
    threshold : float
        Cosine from which on a centre is near enough.

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
        Centres on the scale of `rescaled`.

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
    """Return, of the clusters that each row is in, the one whose centre has the largest cosine with it.

    Parameters
    ----------
    rows : ndarray of shape (n_rows, n_columns)
        Rows on the scale of `rescaled`.
    member : ndarray of shape (n_rows, n_clusters)
        True where a row is in a cluster.

    Returns
    -------
    ndarray of shape (n_rows,)
        The labels; of equals the first.
    """
    return np.where(member, cosines(rows, cluster_means(rows, member)), -np.inf).argmax(1)


def cosines(rows: Floats, others: Floats) -> Floats:
    """Return the cosines of all pairs of rows of two tables.

    Parameters
    ----------
    rows : ndarray of shape (n_rows, n_columns)
        Rows on the scale of `rescaled`.
    others : ndarray of shape (n_others, n_columns)
        Rows on the same scale.

    Returns
    -------
    ndarray of shape (n_rows, n_others)
        The cosines, rounded to `DIGITS`; 0 where a row is not longer than `NOTHING`.
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
