"""Directions cut in two for as long as the halves are clearly apart; not at all where they are not.

Two means divide rows of any kind. Whether the division means something is asked of its silhouette (`quality`: cosine
distances), which is near 0 where rows are alike or differ in too many ways to speak of groups. What is
known of the rows already, and should make no groups, is taken away first: `unexplained`.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from shoal.clusterers.directions import principal_directions
from shoal.clusterers.inputs import Floats, Labels, by_first_appearance, one_thread, table, whole
from shoal.clusterers.quality import hard_quality


class Cut(NamedTuple):
    labels: Labels
    silhouette: float  # of the first division, whether it was made or not


def bisected(rows: ArrayLike, threshold: float, smallest: int, most: int, seed: int) -> Cut:
    """Labels of at most `most` groups. A group is divided where the halves' silhouette is above `threshold` and both
    have `smallest` rows or more; what is clearest apart is divided first."""
    least, count = whole("smallest", smallest, 1), whole("most", most, 1)
    z = principal_directions(rows, share=1.0)
    groups = [np.arange(len(z))]
    first = halves = _halved(z, groups[0], least, seed)
    found = [(halves, 0)]
    while len(groups) < count:
        (silhouette, inside), place = max(found, key=lambda f: f[0][0])
        if silhouette <= threshold:
            break
        parts = [groups[place][inside], groups[place][~inside]]
        groups = [*groups[:place], *groups[place + 1 :], *parts]
        found = [(_halved(z, group, least, seed), k) for k, group in enumerate(groups)]
    labels = np.zeros(len(z), dtype=np.int64)
    for k, group in enumerate(groups):
        labels[group] = k
    return Cut(by_first_appearance(labels)[0], first[0])


def _halved(z: Floats, group: Labels, smallest: int, seed: int) -> tuple[float, np.ndarray]:
    """The silhouette of two means, and who is in the first of them; -1 where a half would be too small."""
    from sklearn.cluster import KMeans

    nobody = np.zeros(len(group), dtype=bool)
    if len(group) < max(3, 2 * smallest) or len(np.unique(z[group].round(9), axis=0)) < 2:
        return -1.0, nobody
    with one_thread():
        inside = KMeans(2, n_init=10, random_state=seed % 2**32).fit(z[group]).labels_ == 0
    if min(inside.sum(), (~inside).sum()) < smallest:
        return -1.0, nobody
    return hard_quality(z[group], inside.astype(np.int64))["silhouette"], inside


def unexplained(rows: ArrayLike, known: ArrayLike) -> Floats:
    """What is left of rows of unit length when the part that follows linearly from what is `known` of them, such as
    label distributions, is taken away. A row that is all of it is left as zeros."""
    x, told = table(rows, "rows", -np.inf, "number"), table(known, "known")
    lengths = np.linalg.norm(x, axis=1, keepdims=True)
    x = np.divide(x, lengths, out=np.zeros_like(x), where=lengths > 0)
    with one_thread():
        left = x - told @ (np.linalg.pinv(told) @ x)
    return np.where(np.linalg.norm(left, axis=1, keepdims=True) > 1e-9, left, 0.0)
