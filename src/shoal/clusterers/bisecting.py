"""Directions cut in two for as long as the halves are clearly apart; not at all where they are not.

Two means divide rows of any kind. Whether the division means something is asked of its silhouette (`quality`: cosine
distances), which is near 0 where rows are alike or differ in too many ways to speak of groups. Whether it means more
than what is known of the rows already is asked of that: `explained`.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from shoal.clusterers.directions import principal_directions
from shoal.clusterers.inputs import Floats, Labels, by_first_appearance, one_thread, table, whole
from shoal.clusterers.quality import hard_quality
from shoal.rng import derive_seed


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


def explained(labels: ArrayLike, known: ArrayLike, seed: int, turns: int = 999) -> float:
    """The chance that groups drawn by lot, as large as these, are as far apart in what is `known` of the rows (label
    distributions, by Hellinger distance): small where groups follow from it. 1 for a single group."""
    group, rows = np.asarray(labels, dtype=np.int64), np.sqrt(table(known, "known"))
    apart = np.sqrt(np.clip(1 - rows @ rows.T, 0, None))
    np.fill_diagonal(apart, 0.0)
    if len(np.unique(group)) < 2:
        return 1.0
    rng, here = np.random.default_rng(derive_seed(seed, "explained")), _separation(apart, group)
    as_far = sum(_separation(apart, rng.permutation(group)) >= here - 1e-12 for _ in range(turns))
    return (1 + as_far) / (1 + turns)


def _separation(apart: Floats, group: Labels) -> float:
    """Mean distance between groups less that within them."""
    together = group[:, None] == group
    pairs = ~np.eye(len(group), dtype=bool)
    within = together & pairs
    return float(apart[~together].mean() - (apart[within].mean() if within.any() else 0.0))
