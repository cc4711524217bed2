"""Clusters of clients with conditional shift: the same classes have different features, p(x|y), for any p(y).

A row (a client) has the number of samples and the sum of their features for each class and each half of its samples.
Means are compared within a class only, between the rows that have the class, in units of the spread of features within
the classes of a row. Therefore the label distribution of a row has no effect. Two-means would split any rows, so each
split is tested on held-out samples: it is found in one half of the samples and measured in the other. Without a
difference the measured effect is 0 in the mean, for any number of candidate splits. The client side is
`client/shift_probe`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from shoal.clusterers.validation import Floats, Labels, check_whole_number, limit_blas_threads
from shoal.errors import UserError

MIN_AGREEMENT = 0.5  # cosine between the differences in both halves: about 0 without a shift, 1 with many samples
NUM_AXES, NUM_STARTS, MAX_ITERATIONS = 3, 10, 30
TINY = 1e-12


@dataclass(frozen=True)
class ClassMeans:
    """Means of the features of each class, in units of the spread within classes.

    Attributes
    ----------
    count : ndarray of shape (n_rows, n_classes)
        Number of samples.
    mean : ndarray of shape (n_rows, n_classes, n_features)
        Means; 0 for a class that a row does not have.
    """

    count: Floats
    mean: Floats

    def select_rows(self, rows: NDArray[np.bool_] | Labels) -> ClassMeans:
        """Return the means of some rows.

        Parameters
        ----------
        rows : ndarray
            Indices, or a bool for each row.

        Returns
        -------
        ClassMeans
            The counts and means of these rows.
        """
        return ClassMeans(self.count[rows], self.mean[rows])

    def centres(self, labels: Labels, num_clusters: int) -> Floats:
        """Return the class means of clusters of rows.

        The mean of all rows counts as one additional sample of each class. For a class without samples in a cluster it
        is the only one.

        Parameters
        ----------
        labels : ndarray of shape (n_rows,)
            Cluster of each row.
        num_clusters : int
            Number of clusters.

        Returns
        -------
        ndarray of shape (n_clusters, n_classes, n_features)
            The centres.
        """
        total = self.count[..., None] * self.mean
        common = total.sum(0) / np.maximum(self.count.sum(0), TINY)[:, None]
        sums = [(self.count[labels == k].sum(0)[:, None], total[labels == k].sum(0)) for k in range(num_clusters)]
        return np.stack([(inside + common) / (count + 1) for count, inside in sums])

    def distances(self, centres: Floats) -> Floats:
        """Return the squared distances between rows and centres, each class weighted with its number of samples.

        Parameters
        ----------
        centres : ndarray of shape (n_clusters, n_classes, n_features)
            Centres of clusters.

        Returns
        -------
        ndarray of shape (n_rows, n_clusters)
            The distances.
        """
        weighted = (self.count[..., None] * self.mean).reshape(len(self.count), -1)
        flat = centres.reshape(len(centres), -1)
        own = (self.count * (self.mean**2).sum(-1)).sum(-1, keepdims=True)
        return own - 2 * weighted @ flat.T + self.count @ (centres**2).sum(-1).T


def class_means(count: ArrayLike, total: ArrayLike, square: ArrayLike) -> tuple[ClassMeans, ClassMeans, ClassMeans]:
    """Return the means of classes over all samples and over each half of them.

    Parameters
    ----------
    count : array-like of shape (n_rows, 2, n_classes)
        Number of samples in each half.
    total : array-like of shape (n_rows, 2, n_classes, n_features)
        Sums of their features.
    square : array-like of shape (n_rows, n_features)
        Sums of the squared features over all samples.

    Returns
    -------
    every, one, other : ClassMeans
        The means over all samples, over the first half and over the second half. Features that do not vary within
        classes are left out.

    Raises
    ------
    UserError
        If the shapes do not fit.
    """
    n, s, q = (np.asarray(x, dtype=np.float64) for x in (count, total, square))
    if n.ndim != 3 or n.shape[1] != 2 or s.shape[:3] != n.shape or q.shape != (len(s), s.shape[-1]):
        raise UserError(
            f"count, total and square have shapes {n.shape}, {s.shape} and {q.shape}; they must be (rows, 2, classes), "
            "(rows, 2, classes, features) and (rows, features)"
        )
    both, sums = n.sum(1), s.sum(1)
    within = q.sum(0) - (sums**2 / np.maximum(both, TINY)[..., None]).sum((0, 1))
    spread = np.sqrt(np.maximum(within, 0) / max(1.0, np.maximum(both - 1, 0).sum()))
    varies = spread > 1e-6 * max(spread.max(initial=0), TINY)

    def means(k: Floats, x: Floats) -> ClassMeans:
        return ClassMeans(k, x[..., varies] / np.maximum(k, TINY)[..., None] / spread[varies] * (k > 0)[..., None])

    return means(both, sums), means(n[:, 0], s[:, 0]), means(n[:, 1], s[:, 1])


class ShiftClusters(NamedTuple):
    """Clusters of rows, and the effect of the first candidate split, accepted or not.

    Attributes
    ----------
    labels : ndarray of shape (n_rows,)
        Cluster of each row.
    effect : float
        How far apart both sides of the first split are, in variances within a class; 0 in the mean without a shift.
    agreement : float
        Cosine between the differences of both sides in the two halves of the samples.
    parents : dict of int to int
        For each new cluster, the cluster from which it was split.
    """

    labels: Labels
    effect: float
    agreement: float
    parents: dict[int, int]


class TwoWaySplit(NamedTuple):
    """A split of rows in two.

    Attributes
    ----------
    effect : float
        How far apart both sides are, in variances within a class; 0 in the mean without a shift.
    agreement : float
        Cosine between the differences of both sides in the two halves of the samples.
    is_second_side : ndarray of shape (n_rows,)
        True for the rows that are not on the side of the first row. Empty if no split was found.
    """

    effect: float
    agreement: float
    is_second_side: NDArray[np.bool_]

    def is_clear(self, min_effect: float, min_agreement: float) -> bool:
        """Return whether effect and agreement are above the given values.

        Parameters
        ----------
        min_effect : float
            The effect must be above this value.
        min_agreement : float
            The agreement must be above this value.

        Returns
        -------
        bool
            True if both are above, and a split was found.
        """
        return bool(self.is_second_side.any()) and self.effect > min_effect and self.agreement > min_agreement


NO_SPLIT = TwoWaySplit(0.0, 0.0, np.zeros(0, dtype=bool))


def split_clusters_by_shift(
    rows: tuple[ClassMeans, ClassMeans, ClassMeans],
    labels: Labels,
    min_effect: float,
    min_cluster_size: int,
    max_clusters: int,
    seed: int,
    num_clusters: int = 1,
    min_agreement: float = MIN_AGREEMENT,
) -> ShiftClusters:
    """Split clusters in two while a split is clear, the clearest first.

    The part of a cluster with its first row keeps the number, and the other part gets the next number. After each
    split, the rows of the original cluster are assigned to the nearest of its parts. No other row is reassigned.

    Parameters
    ----------
    rows : tuple of three ClassMeans
        The means over all samples and over each half of them.
    labels : ndarray of shape (n_rows,)
        Cluster of each row.
    min_effect : float
        A split is clear if its effect is above this value.
    min_cluster_size : int
        Smallest number of rows of a part.
    max_clusters : int
        Largest number of clusters.
    seed : int
        Seed of the random starts of two-means.
    num_clusters : int, default=1
        Number of existing clusters; some may have no rows here.
    min_agreement : float, default=0.5
        A split is clear if its agreement is above this value.

    Returns
    -------
    ShiftClusters
        The clusters.

    Raises
    ------
    UserError
        If `min_cluster_size` or `max_clusters` is not 1 or more.
    """
    min_size = check_whole_number("min_cluster_size", min_cluster_size, 1)
    max_count = check_whole_number("max_clusters", max_clusters, 1)
    original_labels, labels, first, parents = labels, labels.copy(), NO_SPLIT, dict[int, int]()
    for new in range(max(num_clusters, int(labels.max(initial=0)) + 1), max_count):
        members = [np.flatnonzero(labels == k) for k in range(new)]
        splits = [
            split_in_two((rows[0].select_rows(own), rows[1].select_rows(own), rows[2].select_rows(own)), min_size, seed)
            for own in members
        ]
        clearest = max(range(new), key=lambda k: (splits[k].is_second_side.any(), splits[k].effect))
        split, rows_of_cluster = splits[clearest], members[clearest]
        first = split if first is NO_SPLIT else first
        if not split.is_clear(min_effect, min_agreement):
            break
        labels[rows_of_cluster[split.is_second_side]] = new
        parents[new] = clearest
        same_origin = original_labels == original_labels[rows_of_cluster[0]]
        parts, part_labels = np.unique(labels[same_origin], return_inverse=True)
        assigned, _ = _assign_until_stable(rows[0].select_rows(same_origin), part_labels, len(parts))
        labels[same_origin] = parts[assigned]
    return ShiftClusters(labels, first.effect, first.agreement, parents)


def split_in_two(rows: tuple[ClassMeans, ClassMeans, ClassMeans], min_side_size: int, seed: int) -> TwoWaySplit:
    """Split rows in two by all samples, and measure the splits that one half of the samples gives in the other half.

    Parameters
    ----------
    rows : tuple of three ClassMeans
        The means over all samples and over each half of them.
    min_side_size : int
        Smallest number of rows of a side.
    seed : int
        Seed of the random starts of two-means.

    Returns
    -------
    TwoWaySplit
        The split. If a side would be too small, `is_second_side` is empty.
    """
    every, one, other = rows
    if len(every.count) < max(3, 2 * min_side_size):
        return NO_SPLIT
    with limit_blas_threads():
        is_second_side = two_means(every, seed) == 1
        if min(is_second_side.sum(), (~is_second_side).sum()) < min_side_size:
            return NO_SPLIT
        measured = [held_out_effect(a, b, two_means(a, seed)) for a, b in ((one, other), (other, one))]
    effect, agreement = (float(np.mean(values)) for values in zip(*measured, strict=True))
    return TwoWaySplit(effect, agreement, is_second_side)


def two_means(rows: ClassMeans, seed: int) -> Labels:
    """Split rows in two by k-means, with the best of several starts.

    Starts are the two sides of the directions in which rows vary most, with equal weights of all rows, and random
    sides.

    Parameters
    ----------
    rows : ClassMeans
        Means of classes.
    seed : int
        Seed of the starts.

    Returns
    -------
    ndarray of shape (n_rows,)
        The side of each row, 0 or 1. The first row is on side 0.
    """
    common = rows.centres(np.zeros(len(rows.count), dtype=np.int64), 1)[0]
    directions = (np.sqrt(rows.count)[..., None] * (rows.mean - common)).reshape(len(rows.count), -1)
    directions /= np.maximum(np.linalg.norm(directions, axis=1, keepdims=True), TINY)
    if not directions.any():
        return np.zeros(len(rows.count), dtype=np.int64)
    rng = np.random.default_rng(seed)
    axes = rng.normal(size=(directions.shape[1], NUM_AXES))
    for _ in range(MAX_ITERATIONS):
        axes = np.linalg.qr(directions.T @ (directions @ axes))[0]
    starts = [*((directions @ axes).T > 0), *(rng.random((NUM_STARTS, len(directions))) < 0.5)]
    results = [_assign_until_stable(rows, start.astype(np.int64)) for start in starts]
    labels = min(results, key=lambda result: result[1])[0]
    return labels if labels[0] == 0 else 1 - labels


def _assign_until_stable(rows: ClassMeans, labels: Labels, num_clusters: int = 2) -> tuple[Labels, float]:
    """Assigns each row to the nearest cluster until nothing changes. An empty cluster stays empty."""
    for _ in range(MAX_ITERATIONS):
        distances = rows.distances(rows.centres(labels, num_clusters))
        distances[:, np.bincount(labels, minlength=num_clusters) == 0] = np.inf
        before, labels = labels, distances.argmin(1)
        if np.array_equal(before, labels):
            break
    return labels, float(distances.min(1).sum())


def held_out_effect(fit_half: ClassMeans, test_half: ClassMeans, labels: Labels) -> tuple[float, float]:
    """Return how far apart two clusters are, as the product of their differences in both halves of the samples.

    Only classes count that both clusters have in both halves.

    Parameters
    ----------
    fit_half : ClassMeans
        Means over the half in which the clusters were found.
    test_half : ClassMeans
        Means over the other half.
    labels : ndarray of shape (n_rows,)
        Cluster of each row, 0 or 1.

    Returns
    -------
    effect : float
        The product, in variances within a class. Without a difference it is 0 in the mean.
    agreement : float
        The cosine of the two differences. Without a difference it is 0 in the mean.
    """
    (a, support_a), (b, support_b) = _mean_difference(fit_half, labels), _mean_difference(test_half, labels)
    weight = np.sqrt(support_a * support_b)  # [classes]
    product, lengths = weight @ (a * b).sum(-1), (weight @ (a**2).sum(-1)) * (weight @ (b**2).sum(-1))
    return float(product / max(weight.sum() * a.shape[-1], TINY)), float(product / max(np.sqrt(lengths), TINY))


def _mean_difference(rows: ClassMeans, labels: Labels) -> tuple[Floats, Floats]:
    """Returns, for each class, the difference between the means of two clusters, and how many samples support it."""
    n = np.stack([rows.count[labels == k].sum(0) for k in (0, 1)])
    total = [(rows.count[..., None] * rows.mean)[labels == k].sum(0) for k in (0, 1)]
    one, other = (x / np.maximum(k, TINY)[:, None] for x, k in zip(total, n, strict=True))
    return one - other, n.prod(0) / np.maximum(n.sum(0), TINY)


def assign_nearest(rows: ClassMeans, centres: Floats, previous_labels: Labels, switch_margin: float) -> Labels:
    """Return the nearest cluster of each row, where a row does not leave its cluster for a small advantage.

    Parameters
    ----------
    rows : ClassMeans
        Means of classes.
    centres : ndarray of shape (n_clusters, n_classes, n_features)
        Centres of the clusters.
    previous_labels : ndarray of shape (n_rows,)
        Cluster of each row so far, -1 for none.
    switch_margin : float
        A row switches only if it is nearer to another cluster by more than this fraction of the distance between both
        centres: at 0 it switches halfway, at 1 in the centre of the other cluster.

    Returns
    -------
    ndarray of shape (n_rows,)
        The clusters.
    """
    distances, indices = rows.distances(centres), np.arange(len(previous_labels))
    nearest, own = distances.argmin(1), np.maximum(previous_labels, 0)
    between = (rows.count * ((centres[own] - centres[nearest]) ** 2).sum(-1)).sum(-1)
    advantage = distances[indices, own] - distances[indices, nearest]
    return np.where((previous_labels < 0) | (advantage > switch_margin * between), nearest, previous_labels)
