"""Splits rows in two where the same classes have different features: p(x|y) differs, whatever p(y) is.

For either half of its samples and for each class, a row (a client) has their number and the sum of their features.
Means are compared within a class only, between the rows that have it, in units of how much features vary within the
classes of a row. Therefore it makes no difference which classes a row has, and how often. Two means split rows of any
kind. Whether a split is meaningful is tested on the samples that had no part in it: it is found in one half and
measured in the other. Without a difference the measured effect is 0 in the mean, however many splits were tried.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from shoal.clusterers.validation import Floats, Labels, check_whole_number, limit_blas_threads
from shoal.errors import UserError

MIN_AGREEMENT = 0.5  # smallest cosine between the differences in either half: 0 by chance, 1 where samples are many
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
        Told
            The counts and means of these rows.
        """
        return ClassMeans(self.count[rows], self.mean[rows])

    def centres(self, labels: Labels, num_clusters: int) -> Floats:
        """Return the means of groups of rows.

        A mean is drawn, as if by one sample, towards the mean of all rows, which is all that is known of a class that a
        group does not have.

        Parameters
        ----------
        labels : ndarray of shape (n_rows,)
            Group of each row.
        groups : int
            Number of groups.

        Returns
        -------
        ndarray of shape (n_groups, n_classes, n_features)
            The centres.
        """
        total = self.count[..., None] * self.mean
        common = total.sum(0) / np.maximum(self.count.sum(0), TINY)[:, None]
        held = [(self.count[labels == g].sum(0)[:, None], total[labels == g].sum(0)) for g in range(num_clusters)]
        return np.stack([(inside + common) / (count + 1) for count, inside in held])

    def distances(self, centres: Floats) -> Floats:
        """Return the squared distances between rows and centres, each class weighted with its number of samples.

        Parameters
        ----------
        centres : ndarray of shape (n_groups, n_classes, n_features)
            Centres of groups.

        Returns
        -------
        ndarray of shape (n_rows, n_groups)
            The distances.
        """
        weighted, flat = (
            (self.count[..., None] * self.mean).reshape(len(self.count), -1),
            centres.reshape(len(centres), -1),
        )
        own = (self.count * (self.mean**2).sum(-1)).sum(-1, keepdims=True)
        return own - 2 * weighted @ flat.T + self.count @ (centres**2).sum(-1).T


def class_means(count: ArrayLike, total: ArrayLike, square: ArrayLike) -> tuple[ClassMeans, ClassMeans, ClassMeans]:
    """Return the means of classes over all samples and over either half of them.

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
    every, one, other : Told
        The means over all samples, over the first half and over the second. A feature that does not vary within classes
        is left out.

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
    live = spread > 1e-6 * max(spread.max(initial=0), TINY)

    def means(k: Floats, x: Floats) -> ClassMeans:
        return ClassMeans(k, x[..., live] / np.maximum(k, TINY)[..., None] / spread[live] * (k > 0)[..., None])

    return means(both, sums), means(n[:, 0], s[:, 0]), means(n[:, 1], s[:, 1])


class ShiftClusters(NamedTuple):
    """Groups of rows, and the effect of the first split, made or not.

    Attributes
    ----------
    labels : ndarray of shape (n_rows,)
        Group of each row.
    effect : float
        How far apart both sides of the first split are, in variances within a class; 0 by chance.
    agreement : float
        Cosine between the differences of both sides in either half of the samples.
    parents : dict of int to int
        For each new group, the group that it was split off.
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
        How far apart both sides are, in variances within a class; 0 by chance.
    agreement : float
        Cosine between the differences of both sides in either half of the samples.
    aside : ndarray of shape (n_rows,)
        True for the rows that are not on the side of the first row. Empty if no split was found.
    """

    effect: float
    agreement: float
    is_second_side: NDArray[np.bool_]

    def is_clear(self, min_effect: float, min_agreement: float) -> bool:
        """Return whether effect and agreement are above the given values.

        Parameters
        ----------
        threshold : float
            The effect must be above this value.
        agreement : float
            The agreement must be above this value.

        Returns
        -------
        bool
            True if both are, and a split was found.
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
    """Split groups in two while a split is clear, the clearest first.

    The part of a group with its first row keeps the number, the other part has the next one. After each split, the rows
    that were in the same group before go to the nearest of its parts. No other row moves.

    Parameters
    ----------
    rows : tuple of three Told
        The means over all samples and over either half of them.
    labels : ndarray of shape (n_rows,)
        Group of each row.
    threshold : float
        A split is clear if its effect is above this value.
    smallest : int
        Smallest number of rows of a part.
    most : int
        Largest number of groups.
    seed : int
        Seed of the random starts of two means.
    groups : int, default=1
        Number of groups that there are; some may have no rows here.
    agreement : float, default=0.5
        A split is clear if its agreement is above this value.

    Returns
    -------
    Division
        The groups.

    Raises
    ------
    UserError
        If `smallest` or `most` is not 1 or more.
    """
    min_size, count = check_whole_number("smallest", min_cluster_size, 1), check_whole_number("most", max_clusters, 1)
    before, labels, first, parents = labels, labels.copy(), NO_SPLIT, dict[int, int]()
    for new in range(max(num_clusters, int(labels.max(initial=0)) + 1), count):
        members = [np.flatnonzero(labels == g) for g in range(new)]
        cuts = [
            split_in_two(tuple(part.select_rows(rows_of_cluster) for part in rows), min_size, seed)
            for rows_of_cluster in members
        ]  # type: ignore[arg-type]
        clearest = max(range(new), key=lambda g: (cuts[g].is_second_side.any(), cuts[g].effect))
        cut, rows_of_cluster = cuts[clearest], members[clearest]
        first = cut if first is NO_SPLIT else first
        if not cut.is_clear(min_effect, min_agreement):
            break
        labels[rows_of_cluster[cut.is_second_side]] = new
        parents[new] = clearest
        same_origin = before == before[rows_of_cluster[0]]
        inside, now = np.unique(labels[same_origin], return_inverse=True)
        labels[same_origin] = inside[_assign_until_stable(rows[0].select_rows(same_origin), now, len(inside))[0]]
    return ShiftClusters(labels, first.effect, first.agreement, parents)


def split_in_two(rows: tuple[ClassMeans, ClassMeans, ClassMeans], min_side_size: int, seed: int) -> TwoWaySplit:
    """Split rows in two by all samples, and measure splits that are found in one half of the samples in the other.

    Parameters
    ----------
    rows : tuple of three Told
        The means over all samples and over either half of them.
    smallest : int
        Smallest number of rows of a side.
    seed : int
        Seed of the random starts of two means.

    Returns
    -------
    Cut
        The split; without rows aside if there is none with sides large enough.
    """
    every, one, other = rows
    if len(every.count) < max(3, 2 * min_side_size):
        return NO_SPLIT
    with limit_blas_threads():
        aside = two_means(every, seed) == 1
        if min(aside.sum(), (~aside).sum()) < min_side_size:
            return NO_SPLIT
        found = [held_out_effect(a, b, two_means(a, seed)) for a, b in ((one, other), (other, one))]
    return TwoWaySplit(float(np.mean([e for e, _ in found])), float(np.mean([c for _, c in found])), aside)


def two_means(rows: ClassMeans, seed: int) -> Labels:
    """Split rows in two by k-means, the best of several starts.

    Starts are the two sides of the directions in which rows vary most, where all rows count the same, and random ones.

    Parameters
    ----------
    rows : Told
        Means of classes.
    seed : int
        Seed of the starts.

    Returns
    -------
    ndarray of shape (n_rows,)
        The side of each row, 0 or 1. The first row is on side 0.
    """
    common = rows.centres(np.zeros(len(rows.count), dtype=np.int64), 1)[0]
    away = (np.sqrt(rows.count)[..., None] * (rows.mean - common)).reshape(len(rows.count), -1)
    away /= np.maximum(np.linalg.norm(away, axis=1, keepdims=True), TINY)
    if not away.any():
        return np.zeros(len(rows.count), dtype=np.int64)
    rng = np.random.default_rng(seed)
    axes = rng.normal(size=(away.shape[1], NUM_AXES))
    for _ in range(MAX_ITERATIONS):
        axes = np.linalg.qr(away.T @ (away @ axes))[0]
    starts = [*((away @ axes).T > 0), *(rng.random((NUM_STARTS, len(away))) < 0.5)]
    found = [_assign_until_stable(rows, start.astype(np.int64)) for start in starts]
    labels = min(found, key=lambda f: f[1])[0]
    return labels if labels[0] == 0 else 1 - labels


def _assign_until_stable(rows: ClassMeans, labels: Labels, num_clusters: int = 2) -> tuple[Labels, float]:
    """Assigns each row to the nearest group until nothing changes. An empty group stays empty."""
    for _ in range(MAX_ITERATIONS):
        distances = rows.distances(rows.centres(labels, num_clusters))
        distances[:, np.bincount(labels, minlength=num_clusters) == 0] = np.inf
        before, labels = labels, distances.argmin(1)
        if np.array_equal(before, labels):
            break
    return labels, float(distances.min(1).sum())


def held_out_effect(fit_half: ClassMeans, test_half: ClassMeans, labels: Labels) -> tuple[float, float]:
    """Return how far apart two groups are, by the product of their differences in both halves of the samples.

    Only classes count that both groups have in both halves.

    Parameters
    ----------
    found : Told
        Means over the half in which the groups were found.
    asked : Told
        Means over the other half.
    labels : ndarray of shape (n_rows,)
        Group of each row, 0 or 1.

    Returns
    -------
    effect : float
        The product, in variances within a class. Without a difference it is 0 in the mean.
    agreement : float
        The cosine of the two differences. Without a difference it is 0 in the mean.
    """
    (a, held_a), (b, held_b) = _mean_difference(fit_half, labels), _mean_difference(test_half, labels)
    weight = np.sqrt(held_a * held_b)  # [classes]
    product, lengths = weight @ (a * b).sum(-1), (weight @ (a**2).sum(-1)) * (weight @ (b**2).sum(-1))
    return float(product / max(weight.sum() * a.shape[-1], TINY)), float(product / max(np.sqrt(lengths), TINY))


def _mean_difference(rows: ClassMeans, labels: Labels) -> tuple[Floats, Floats]:
    """Returns, for each class, the difference between the means of two groups, and how many samples support it."""
    n = np.stack([rows.count[labels == g].sum(0) for g in (0, 1)])
    total = [(rows.count[..., None] * rows.mean)[labels == g].sum(0) for g in (0, 1)]
    one, other = (x / np.maximum(k, TINY)[:, None] for x, k in zip(total, n, strict=True))
    return one - other, n.prod(0) / np.maximum(n.sum(0), TINY)


def assign_nearest(rows: ClassMeans, centres: Floats, previous_labels: Labels, switch_margin: float) -> Labels:
    """Return the nearest group of each row, where a row does not leave its group for a small advantage.

    Parameters
    ----------
    rows : Told
        Means of classes.
    centres : ndarray of shape (n_groups, n_classes, n_features)
        Centres of the groups.
    was : ndarray of shape (n_rows,)
        Group of each row so far, -1 for none.
    stay : float
        A row leaves its group only if it is nearer to another by more than this share of the distance between both: 0
        is halfway, 1 the centre of the other.

    Returns
    -------
    ndarray of shape (n_rows,)
        The groups.
    """
    distances, each = rows.distances(centres), np.arange(len(previous_labels))
    nearest, own = distances.argmin(1), np.maximum(previous_labels, 0)
    between = (rows.count * ((centres[own] - centres[nearest]) ** 2).sum(-1)).sum(-1)
    nearer = distances[each, own] - distances[each, nearest]
    return np.where((previous_labels < 0) | (nearer > switch_margin * between), nearest, previous_labels)
