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

from shoal.clusterers.validation import Floats, Labels, one_thread, whole
from shoal.errors import UserError

REPEATS = 0.5  # smallest cosine between the differences in either half: 0 by chance, 1 where samples are many
AXES, STARTS, PASSES = 3, 10, 30
TINY = 1e-12


@dataclass(frozen=True)
class Told:
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

    def of(self, rows: NDArray[np.bool_] | Labels) -> Told:
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
        return Told(self.count[rows], self.mean[rows])

    def centres(self, labels: Labels, groups: int) -> Floats:
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
        held = [(self.count[labels == g].sum(0)[:, None], total[labels == g].sum(0)) for g in range(groups)]
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


def told(count: ArrayLike, total: ArrayLike, square: ArrayLike) -> tuple[Told, Told, Told]:
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

    def means(k: Floats, x: Floats) -> Told:
        return Told(k, x[..., live] / np.maximum(k, TINY)[..., None] / spread[live] * (k > 0)[..., None])

    return means(both, sums), means(n[:, 0], s[:, 0]), means(n[:, 1], s[:, 1])


class Division(NamedTuple):
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


class Cut(NamedTuple):
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
    aside: NDArray[np.bool_]

    def clear(self, threshold: float, agreement: float) -> bool:
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
        return bool(self.aside.any()) and self.effect > threshold and self.agreement > agreement


NO_CUT = Cut(0.0, 0.0, np.zeros(0, dtype=bool))


def divided(
    rows: tuple[Told, Told, Told],
    labels: Labels,
    threshold: float,
    smallest: int,
    most: int,
    seed: int,
    groups: int = 1,
    agreement: float = REPEATS,
) -> Division:
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
    least, count = whole("smallest", smallest, 1), whole("most", most, 1)
    before, labels, first, parents = labels, labels.copy(), NO_CUT, dict[int, int]()
    for new in range(max(groups, int(labels.max(initial=0)) + 1), count):
        places = [np.flatnonzero(labels == g) for g in range(new)]
        cuts = [halved(tuple(part.of(place) for part in rows), least, seed) for place in places]  # type: ignore[arg-type]
        clearest = max(range(new), key=lambda g: (cuts[g].aside.any(), cuts[g].effect))
        cut, place = cuts[clearest], places[clearest]
        first = cut if first is NO_CUT else first
        if not cut.clear(threshold, agreement):
            break
        labels[place[cut.aside]] = new
        parents[new] = clearest
        kin = before == before[place[0]]
        inside, now = np.unique(labels[kin], return_inverse=True)
        labels[kin] = inside[_settled(rows[0].of(kin), now, len(inside))[0]]
    return Division(labels, first.effect, first.agreement, parents)


def halved(rows: tuple[Told, Told, Told], smallest: int, seed: int) -> Cut:
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
    if len(every.count) < max(3, 2 * smallest):
        return NO_CUT
    with one_thread():
        aside = two_means(every, seed) == 1
        if min(aside.sum(), (~aside).sum()) < smallest:
            return NO_CUT
        found = [held_out(a, b, two_means(a, seed)) for a, b in ((one, other), (other, one))]
    return Cut(float(np.mean([e for e, _ in found])), float(np.mean([c for _, c in found])), aside)


def two_means(rows: Told, seed: int) -> Labels:
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
    axes = rng.normal(size=(away.shape[1], AXES))
    for _ in range(PASSES):
        axes = np.linalg.qr(away.T @ (away @ axes))[0]
    starts = [*((away @ axes).T > 0), *(rng.random((STARTS, len(away))) < 0.5)]
    found = [_settled(rows, start.astype(np.int64)) for start in starts]
    labels = min(found, key=lambda f: f[1])[0]
    return labels if labels[0] == 0 else 1 - labels


def _settled(rows: Told, labels: Labels, groups: int = 2) -> tuple[Labels, float]:
    """Assigns each row to the nearest group until nothing changes. An empty group stays empty."""
    for _ in range(PASSES):
        distances = rows.distances(rows.centres(labels, groups))
        distances[:, np.bincount(labels, minlength=groups) == 0] = np.inf
        before, labels = labels, distances.argmin(1)
        if np.array_equal(before, labels):
            break
    return labels, float(distances.min(1).sum())


def held_out(found: Told, asked: Told, labels: Labels) -> tuple[float, float]:
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
    (a, held_a), (b, held_b) = _apart(found, labels), _apart(asked, labels)
    weight = np.sqrt(held_a * held_b)  # [classes]
    product, lengths = weight @ (a * b).sum(-1), (weight @ (a**2).sum(-1)) * (weight @ (b**2).sum(-1))
    return float(product / max(weight.sum() * a.shape[-1], TINY)), float(product / max(np.sqrt(lengths), TINY))


def _apart(rows: Told, labels: Labels) -> tuple[Floats, Floats]:
    """Returns, for each class, the difference between the means of two groups, and how many samples support it."""
    n = np.stack([rows.count[labels == g].sum(0) for g in (0, 1)])
    total = [(rows.count[..., None] * rows.mean)[labels == g].sum(0) for g in (0, 1)]
    one, other = (x / np.maximum(k, TINY)[:, None] for x, k in zip(total, n, strict=True))
    return one - other, n.prod(0) / np.maximum(n.sum(0), TINY)


def placed(rows: Told, centres: Floats, was: Labels, stay: float) -> Labels:
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
    distances, each = rows.distances(centres), np.arange(len(was))
    nearest, own = distances.argmin(1), np.maximum(was, 0)
    between = (rows.count * ((centres[own] - centres[nearest]) ** 2).sum(-1)).sum(-1)
    nearer = distances[each, own] - distances[each, nearest]
    return np.where((was < 0) | (nearer > stay * between), nearest, was)
