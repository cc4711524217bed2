"""Rows told class by class, cut in two where the same classes look different: p(x|y) differs, whatever p(y) is.

Each row (a client) tells, for either half of its examples and for each class, how many there are and the sum of their
features. Means are compared within a class only, by whoever holds it, in units of how much features vary within the
classes of a row: which classes are held, and how often, makes no difference. Two means divide rows of any kind. Whether
a cut means something is asked of the examples that had no part in it: found in one half, it is measured in the other,
where without a difference it is 0 in the mean, however many cuts were tried.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from shoal.clusterers.validation import Floats, Labels, one_thread, whole
from shoal.errors import UserError

REPEATS = 0.5  # the least cosine of what either half says: 0 by chance, 1 where rows are many
AXES, STARTS, PASSES = 3, 10, 30
TINY = 1e-12


@dataclass(frozen=True)
class Told:
    """Means of classes, in units of the spread within them."""

    count: Floats  # [rows, classes]
    mean: Floats  # [rows, classes, features]; 0 where nothing is held

    def of(self, rows: NDArray[np.bool_] | Labels) -> Told:
        return Told(self.count[rows], self.mean[rows])

    def centres(self, labels: Labels, groups: int) -> Floats:
        """[groups, classes, features]: drawn by one example towards what all have in common, which is all that is known
        of a class that a group does not hold."""
        total = self.count[..., None] * self.mean
        common = total.sum(0) / np.maximum(self.count.sum(0), TINY)[:, None]
        held = [(self.count[labels == g].sum(0)[:, None], total[labels == g].sum(0)) for g in range(groups)]
        return np.stack([(inside + common) / (count + 1) for count, inside in held])

    def distances(self, centres: Floats) -> Floats:
        """[rows, groups]: squared, each class by its examples."""
        weighted, flat = (
            (self.count[..., None] * self.mean).reshape(len(self.count), -1),
            centres.reshape(len(centres), -1),
        )
        own = (self.count * (self.mean**2).sum(-1)).sum(-1, keepdims=True)
        return own - 2 * weighted @ flat.T + self.count @ (centres**2).sum(-1).T


def told(count: ArrayLike, total: ArrayLike, square: ArrayLike) -> tuple[Told, Told, Told]:
    """All and both halves, from counts [rows, 2, classes], sums of features [rows, 2, classes, features], and sums of
    their squares over all examples [rows, features]. What does not vary within classes is left out."""
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
    """Effect and agreement are those of the first cut, made or not."""

    labels: Labels
    effect: float  # how far apart its sides are, in variances within a class; 0 by chance
    agreement: float  # of both halves about it, a cosine
    parents: dict[int, int]  # of each group that is new, which one it was cut off


class Cut(NamedTuple):
    effect: float
    agreement: float
    aside: NDArray[np.bool_]  # who is not with the first row

    def clear(self, threshold: float, agreement: float) -> bool:
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
    """Groups cut in two for as long as a cut is clear, the clearest first, up to `most`. The part of a group that holds
    its first row keeps the number, the other has the next: `groups` says how many there are, some of which may have no
    rows here. After each cut all whose group was the same before go where it is nearest, and nobody else."""
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
    """Two groups of all examples, and what cuts found in either half are worth in the other."""
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
    """Of several starts that which explains most; the first row is in group 0. Starts are sides of the directions in
    which rows vary most, all rows counting alike, and chance."""
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
    """Everybody in the nearest group, again and again; nobody in one that is empty."""
    for _ in range(PASSES):
        distances = rows.distances(rows.centres(labels, groups))
        distances[:, np.bincount(labels, minlength=groups) == 0] = np.inf
        before, labels = labels, distances.argmin(1)
        if np.array_equal(before, labels):
            break
    return labels, float(distances.min(1).sum())


def held_out(found: Told, asked: Told, labels: Labels) -> tuple[float, float]:
    """How far apart the two groups are, by the product of what each half says of it, over classes that both groups hold
    in both halves; and the cosine of the two. Without a difference both are 0 in the mean."""
    (a, held_a), (b, held_b) = _apart(found, labels), _apart(asked, labels)
    weight = np.sqrt(held_a * held_b)  # [classes]
    product, lengths = weight @ (a * b).sum(-1), (weight @ (a**2).sum(-1)) * (weight @ (b**2).sum(-1))
    return float(product / max(weight.sum() * a.shape[-1], TINY)), float(product / max(np.sqrt(lengths), TINY))


def _apart(rows: Told, labels: Labels) -> tuple[Floats, Floats]:
    """By class the difference of both groups' means, and by how many examples it is known."""
    n = np.stack([rows.count[labels == g].sum(0) for g in (0, 1)])
    total = [(rows.count[..., None] * rows.mean)[labels == g].sum(0) for g in (0, 1)]
    one, other = (x / np.maximum(k, TINY)[:, None] for x, k in zip(total, n, strict=True))
    return one - other, n.prod(0) / np.maximum(n.sum(0), TINY)


def placed(rows: Told, centres: Floats, was: Labels, stay: float) -> Labels:
    """The nearest group of each row. Who was in one (`was`, -1: in none) leaves it only if it is nearer to the other by
    more than a share `stay` of how far both are apart: 0 is halfway, 1 the middle of the other."""
    distances, each = rows.distances(centres), np.arange(len(was))
    nearest, own = distances.argmin(1), np.maximum(was, 0)
    between = (rows.count * ((centres[own] - centres[nearest]) ** 2).sum(-1)).sum(-1)
    nearer = distances[each, own] - distances[each, nearest]
    return np.where((was < 0) | (nearer > stay * between), nearest, was)
