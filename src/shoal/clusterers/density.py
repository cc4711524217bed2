"""AIDC: clients with similar sparsity vectors in one cluster, as many clusters as two thresholds ask for.

Tang et al., FedEPC: An efficient and privacy-enhancing clustering federated learning method for sensing-computing
fusion scenarios, Computers, Materials & Continua, 2025 (doi:10.32604/cmc.2025.066241), Sec. 3.3, Eq. (3)-(8), Alg. 2.

| paper | here |
|---|---|
| s^(i), N devices | a row of `S`, its rows |
| MJS, γ | `jensen`, `gamma`; D in units of `distances_scale_` |
| ε_i, Eq. (5) | `local_density`; as printed: `printed_radius` |
| MinPts_i, η, Eq. (6) | `local_density`, `eta`; as printed: `printed_least` |
| N_k, C_k of Eq. (5) and (6) | client i and its `neighbours` nearest, k = ⌈√N⌉; as printed: all clients |
| b(C_p, C_q), left side of Eq. (7) | mean distance between two clusters, off the diagonal of a matrix of means |
| w(C_k), left side of Eq. (8) | mean distance within a cluster, each client to itself included: on that diagonal |
| θ_merge, θ_split | `merge`, `split` |
| reference client (Sec. 3.5) | `references` |

Density clusters (noise: clusters of one), then splits while Eq. (8) holds, then merges while Eq. (7) holds.

It ends, and where neither equation holds any more: a split raises the number of clusters, a merge lowers it, so there
are fewer than N of either. And w(p ∪ q) = (n_p² w_p + n_q² w_q + 2 n_p n_q b) / (n_p + n_q)² is a mean of w_p, w_q ≤
θ_split and b < θ_merge: with θ_merge ≤ θ_split no merge makes a cluster that Eq. (8) would split.

Merging the closest pair while its b < θ_merge is average linkage, started from clusters instead of single clients and
cut at θ_merge. b of a union is a mean of its parts' b, hence b(p ∪ q, r) ≥ min(b(p, r), b(q, r)): a cluster without a
neighbour nearer than θ_merge never gets one, and two clusters that are nearest to each other stay so whatever else is
merged before. So they may be merged at once, in any order (a chain of nearest neighbours): the result is the same, up
to ties. SciPy's average linkage is the same from single clients; it knows neither clusters to start from nor single
precision, and holds two copies of all distances.

Deviation: distances are divided by their median: thresholds mean nothing otherwise, for MJS grows with the number of
channels. θ = 0.30 and 0.36 are in medians. Two limits: it is relative, so that a fleet without groups is cut up all the
same, which is what `halves` are for; and the median has to lie between groups, which it does not where one has most of
the clients (60 of 100 in one of two are enough to lose both). `scale="mean"` bears that.
Deviation: Eq. (5) as printed is in units of sparsity, not of distance; here it is (μ + σ) / √log10(k + 1) of the k
nearest distances. Eq. (6) as printed is all clients as soon as there are many channels; here the entropy is a mean over
C_i of the normalised vectors, in units of its largest value. ε_i falls behind the nearest distances as k grows, and
with many channels these are all alike: from some hundred clients on all may be noise, and the rest is average linkage.
Deviation: with a radius for each client, who reaches whom is not mutual and Alg. 2 depends on the order of the
clients. Here two core clients are together if each reaches the other: one far from all has a large radius and would
tie together what it reaches. Any other client is with the nearest core client such that each reaches the other.
Deviation: Alg. 2 merges, then splits; here the other way round, which is what makes it end. `literal=True` follows
Eq. (5), (6) and the order of Alg. 2, again and again until nothing changes or `most_sweeps` are over.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import ceil, exp, sqrt
from typing import Literal, Self

import numpy as np
from numpy.typing import ArrayLike

from shoal.clusterers.jensen_shannon import Matrix, modified_js, normalised, paired_modified_js, pairwise_modified_js
from shoal.clusterers.validation import Floats, Labels, as_before, by_first_appearance, one_of, table, whole
from shoal.errors import UserError
from shoal.rng import derive_seed

Clusters = list[Labels]  # the rows of each cluster, ascending

_BLOCK = 256  # rows of a large matrix looked at together
_DOUBLE = 4096  # clients up to which distances are held in double precision
_REPRESENTATIVES = 64  # members of a cluster to which newcomers are compared


class AdaptiveDensityClusters:
    """Density clusters, split and merged to a joint fixed point of Eq. (7) and (8).

    `scale`: thresholds are in units of the median or the mean distance, or of MJS itself. `metric="precomputed"`: S
    holds distances [n, n]. `references=q`: only q clients, drawn by `seed`, are clustered, and each of the others joins
    the cluster whose references are nearest to it in the mean: n q distances instead of n²/2. `guard` needs `halves`
    (see `fit`): without them nothing is tested, and rows that differ by chance alone are cut up all the same. Clusters
    with less than `smallest` clients join the nearest that has as many; that may break Eq. (8), and where none has as
    many they stay. `literal=True` with `merge=0.15, split=0.18, scale="none"` is the paper's own setting; the method
    `fedepc` has `merge=0.35, split=0.42, scale="mean"`, which bears groups of unequal size.

    Found: `labels_` [n]; `settled_` [n], the fixed point before small clusters joined others (-1: no reference);
    `distances_scale_`, what distances were divided by; `splits_`, `merges_` of the last `fit` or `update`; `sweeps_`;
    `converged_`: False if `most_sweeps` ended it, which happens to `literal` only; `references_`, the rows clustered;
    `representatives_`, the rows that `predict` compares with; `noise_ratio_` (nan without halves) and `guarded_`.
    """

    labels_: Labels
    settled_: Labels
    references_: Labels
    representatives_: Labels
    distances_scale_: float
    noise_ratio_: float
    guarded_: bool
    splits_: int
    merges_: int
    sweeps_: int
    converged_: bool

    def __init__(
        self,
        merge: float = 0.30,
        split: float = 0.36,
        gamma: float = 1.0,
        eta: float = 1.0,
        neighbours: int | None = None,
        scale: Literal["median", "mean", "none"] = "median",
        metric: Literal["mjs", "precomputed"] = "mjs",
        references: int | None = None,
        literal: bool = False,
        guard: float = 2.2,
        smallest: int = 2,
        seed: int = 0,
        most_sweeps: int = 100,
    ) -> None:
        self.merge = merge
        self.split = split
        self.gamma = gamma
        self.eta = eta
        self.neighbours = neighbours
        self.scale = scale
        self.metric = metric
        self.references = references
        self.literal = literal
        self.guard = guard
        self.smallest = smallest
        self.seed = seed
        self.most_sweeps = most_sweeps

    def fit(self, S: ArrayLike, halves: tuple[ArrayLike, ArrayLike] | None = None) -> Self:
        """`halves`: the vectors of each client on one and on the other half of its examples.

        What differs between them is chance. MJS is quadratic in small differences, and the mean of half the examples
        has twice the variance: between two clients with the same law, MJS is about half of that between the halves of
        one. `noise_ratio_` is the mean MJS between clients over half the mean MJS between halves: 1 for clients with
        the same law, 1 + (variance between clients) / (variance by chance) in general, so it grows with the number of
        examples. If it is less than `guard`, the fleet is one cluster. (Means: medians miss a group of a quarter.)

        The default is from fleets of 50 and 100 clients with 64 channels and 100 to 500 examples of ten classes, which
        account for 5, 15 or 36% of the variance of a channel: 0.9 to 1.2 for equal laws, 1.0 to 2.1 for Dirichlet(10),
        1.6 to 11 for Dirichlet(1), 2.1 to 19 for Dirichlet(0.5); for two planted groups 1.9 to 2.8, 4 to 7 and 9 to 15.
        """
        self._check()
        rows = _distances(S) if self.metric == "precomputed" else _sparsities(S, "S")
        drawn = self._drawn(rows)
        distances = self._matrix(rows, drawn)
        mean = float(distances.sum(dtype=np.float64)) / max(len(drawn) * (len(drawn) - 1), 1)
        self.noise_ratio_ = np.nan if halves is None else self._noise_ratio(mean, halves, rows.shape)
        self.guarded_ = bool(self.noise_ratio_ < self.guard)
        self.distances_scale_ = self._unit(distances, mean)
        distances /= self.distances_scale_
        self.splits_, self.merges_, self.sweeps_, self.converged_ = 0, 0, 0, True
        if self.guarded_ or len(drawn) < 2:
            clusters = _clusters(np.zeros(len(drawn), np.int64))
            self._between = _means(distances, clusters)
        elif self.literal:
            clusters = self._swept(distances, self._dense(distances, rows, drawn))
        else:
            clusters = self._split_and_merged(distances, self._dense(distances, rows, drawn))
        self._clusters = [np.sort(drawn[inside]) for inside in clusters]
        self._rows = rows if self.metric == "mjs" else np.empty((0, len(rows)))
        self._label(rows)
        return self

    def predict(self, S: ArrayLike) -> Labels:
        """For clients that join later: the cluster with the least mean distance to its representatives.

        With precomputed distances S is [m, n]: from each newcomer to each client of `fit`.
        """
        if not hasattr(self, "labels_"):
            raise UserError("AdaptiveDensityClusters has no clusters yet; fit(S) must come before predict(S)")
        rows = table(S, "S") if self.metric == "precomputed" else _sparsities(S, "S")
        if rows.shape[1] != self._rows.shape[1]:
            raise UserError(f"S has {rows.shape[1]} columns; it must have {self._rows.shape[1]}, as in fit")
        if len(rows) and not len(self.labels_):
            raise UserError("AdaptiveDensityClusters was fitted on no rows; fit(S) must see 1 before predict(S)")
        return self._nearest(rows)

    def resume(self, S: ArrayLike, labels: ArrayLike) -> Self:
        """Takes up clusters that were found before, by another process perhaps, so that they can be updated. Distances
        are in units of those of S as it is now."""
        self._check()
        rows, found = _sparsities(S, "S"), np.asarray(labels)
        if found.shape != (len(rows),) or not np.issubdtype(found.dtype, np.integer) or (found < 0).any():
            raise UserError(f"labels are {found.tolist()}; they must be {len(rows)} whole numbers from 0, one per row")
        distances = self._pairwise(rows)
        mean = float(distances.sum(dtype=np.float64)) / max(len(rows) * (len(rows) - 1), 1)
        self.distances_scale_ = self._unit(distances, mean)
        distances /= self.distances_scale_
        self.noise_ratio_, self.guarded_ = np.nan, False
        self.splits_, self.merges_, self.sweeps_, self.converged_ = 0, 0, 0, True
        self._clusters, self._rows = _clusters(by_first_appearance(found)[0]), rows
        self._between = _means(distances, self._clusters)
        self._label(rows)
        return self

    def update(self, S_changed: ArrayLike, indices: ArrayLike) -> Self:
        """The vectors of the clients `indices` are now `S_changed`; back to a joint fixed point from where it was.

        A changed client leaves its cluster and starts alone, as noise does. The clusters that lost one are split while
        Eq. (8) holds; clients and clusters that are new or smaller, and no others, are merged while Eq. (7) holds.
        `distances_scale_` stays as `fit` found it, and a fleet found to be one cluster by the guard stays one.
        Clusters keep their numbers, by the clients that they share with those before, first of all those that did not
        change: a number may come to be missing, and what is new has a new one.
        """
        at, rows = self._changed(S_changed, indices)
        before, was, self._rows = self._rows, self.labels_, self._rows.copy()
        self._rows[at] = rows
        at = at[(before[at] != self._rows[at]).any(1)]
        self.splits_, self.merges_ = 0, 0
        moved = at[self.settled_[at] >= 0]
        if len(moved) and not self.guarded_:
            self._resettle(before, moved)
        self._label(self._rows)
        self.labels_ = as_before(self.labels_, was, np.where(np.isin(np.arange(len(was)), at), 1, len(was)))
        return self

    def _check(self) -> None:
        for name in ("merge", "split", "gamma", "eta", "guard"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float | np.number) or not 0 <= value < np.inf:
                raise UserError(f"{name} is {value!r}; it must be a number, 0 or more")
        for name, least in (("smallest", 1), ("seed", 0), ("most_sweeps", 1)):
            whole(name, getattr(self, name), least)
        for name in ("neighbours", "references"):
            if getattr(self, name) is not None:
                whole(name, getattr(self, name), 1)
        one_of("scale", self.scale, ("median", "mean", "none"))
        one_of("metric", self.metric, ("mjs", "precomputed"))
        if self.literal and self.metric == "precomputed":
            raise UserError("literal is True; it must be False with precomputed distances, Eq. (5) needs vectors")
        if self.merge > self.split and not self.literal:
            raise UserError(
                f"merge is {self.merge} and split {self.split}; merge must not be larger, or what is merged is split "
                f"again for ever (literal=True tries all the same)"
            )

    def _drawn(self, rows: Matrix) -> Labels:
        """The rows to be clustered, vectors in an order of their values: neither chance nor ties depend on another."""
        order = np.arange(len(rows)) if self.metric == "precomputed" else np.lexsort(rows.T[::-1])
        if self.references is not None and self.references < len(rows):
            rng = np.random.default_rng(derive_seed(int(self.seed), "references"))
            order = order[np.sort(rng.choice(len(rows), self.references, replace=False))]
        return order

    def _matrix(self, rows: Matrix, drawn: Labels) -> Matrix:
        if self.metric == "precomputed":
            return rows if len(drawn) == len(rows) else rows[np.ix_(drawn, drawn)]
        return self._pairwise(rows[drawn])

    def _pairwise(self, rows: Matrix) -> Matrix:
        return pairwise_modified_js(rows, self.gamma, np.float64 if len(rows) <= _DOUBLE else np.float32)

    def _unit(self, distances: Matrix, mean: float) -> float:
        if self.scale == "none":
            return 1.0
        return (mean if self.scale == "mean" else _median(distances)) or 1.0

    def _noise_ratio(self, mean: float, halves: tuple[ArrayLike, ArrayLike], shape: tuple[int, ...]) -> float:
        if self.metric == "precomputed":
            raise UserError("halves are given with precomputed distances; they must be vectors, as S must be then")
        one, other = (_sparsities(half, "halves") for half in halves)
        if one.shape != shape or other.shape != shape:
            raise UserError(f"halves have shapes {one.shape} and {other.shape}; both must have {shape}, as S has")
        noise = float(paired_modified_js(one, other, self.gamma).sum()) / max(len(one), 1) / 2
        if noise == 0:
            return np.inf if mean > 0 else 1.0
        return mean / noise

    def _dense(self, distances: Matrix, rows: Matrix, drawn: Labels) -> Clusters:
        """Lines 1 to 12 of Alg. 2, noise as clusters of one."""
        if self.literal:
            radius = np.full(len(drawn), printed_radius(rows[drawn]))
            least = np.full(len(drawn), printed_least(rows[drawn], self.eta))
        else:
            entropies = np.ones(len(drawn)) if self.metric == "precomputed" else relative_entropy(rows[drawn])
            radius, least = local_density(distances, entropies, self.neighbours, self.eta)
        labels = dense_clusters(distances, radius, least)
        noise = labels < 0
        labels[noise] = labels.max(initial=-1) + 1 + np.arange(noise.sum())
        return _clusters(labels)

    def _split_and_merged(self, distances: Matrix, clusters: Clusters) -> Clusters:
        parts = split_clusters(distances, clusters, self.split)
        groups, self._between = merge_clusters(_means(distances, parts), _sizes(parts), self.merge)
        self.splits_, self.merges_, self.sweeps_ = len(parts) - len(clusters), len(parts) - len(groups), 1
        return _united(parts, groups)

    def _swept(self, distances: Matrix, clusters: Clusters) -> Clusters:
        """Lines 13 and 14 of Alg. 2 until line 14 changes nothing."""
        while self.sweeps_ < self.most_sweeps:
            self.sweeps_ += 1
            groups, self._between = merge_clusters(_means(distances, clusters).copy(), _sizes(clusters), self.merge)
            united = _united(clusters, groups)
            parts = split_clusters(distances, united, self.split)
            self.merges_ += len(clusters) - len(united)
            self.splits_ += len(parts) - len(united)
            if len(parts) == len(united):
                return united
            clusters = parts
        self.converged_, self._between = False, _means(distances, clusters).copy()
        return clusters

    def _label(self, rows: Matrix) -> None:
        """Small clusters join others, and clients that are no references the nearest."""
        self.references_ = np.sort(np.concatenate([*self._clusters, np.empty(0, np.int64)]))
        self.settled_, self.labels_ = np.full(len(rows), -1), np.full(len(rows), -1)
        for k, home in enumerate(self._homes()):
            self.settled_[self._clusters[k]], self.labels_[self._clusters[k]] = k, home
        for labels in (self.settled_, self.labels_):
            labels[self.references_], _ = by_first_appearance(labels[self.references_])
        self.representatives_ = self._represent()
        rest = np.flatnonzero(self.settled_ < 0)
        self.labels_[rest] = self._nearest(rows[rest])
        self.labels_, _ = by_first_appearance(self.labels_)

    def _homes(self) -> Labels:
        """For each settled cluster the one that it ends in."""
        small = _sizes(self._clusters) < self.smallest
        homes = np.arange(len(small))
        if small.any() and not small.all():
            homes[small] = homes[~small][self._between[np.ix_(small, ~small)].argmin(1)]
        return homes

    def _represent(self) -> Labels:
        clusters = [self.references_[inside] for inside in _clusters(self.labels_[self.references_])]
        return np.sort(np.concatenate([*map(self._some, clusters), np.empty(0, np.int64)]))

    def _some(self, inside: Labels) -> Labels:
        """Not more than are needed for a mean, at equal intervals in the order of their values."""
        if len(inside) <= _REPRESENTATIVES:
            return inside
        order = inside if self.metric == "precomputed" else inside[np.lexsort(self._rows[inside].T[::-1])]
        return order[np.linspace(0, len(order) - 1, _REPRESENTATIVES).astype(np.int64)]

    def _nearest(self, rows: Matrix) -> Labels:
        """The label with the least mean distance between each row and its representatives."""
        by_label = self.representatives_[np.argsort(self.labels_[self.representatives_], kind="stable")]
        numbers, starts, counts = np.unique(self.labels_[by_label], return_index=True, return_counts=True)
        labels = np.empty(len(rows), np.int64)
        for block in _blocks(len(rows)):
            if self.metric == "precomputed":
                distance = rows[block][:, by_label]
            else:
                distance = modified_js(rows[block], self._rows[by_label], self.gamma)
            labels[block] = numbers[(np.add.reduceat(distance, starts, axis=1) / counts).argmin(1)]
        return labels

    def _changed(self, S_changed: ArrayLike, indices: ArrayLike) -> tuple[Labels, Floats]:
        if not hasattr(self, "labels_"):
            raise UserError("AdaptiveDensityClusters has no clusters yet; fit(S) must come before update")
        if self.metric == "precomputed" or self.literal:
            raise UserError("update needs vectors and literal=False; fit(S) must be called again instead")
        rows, at = _sparsities(S_changed, "S_changed"), np.asarray(indices)
        if at.size == 0:
            at = at.astype(np.int64)
        if rows.shape != (len(at), self._rows.shape[1]):
            raise UserError(f"S_changed has shape {rows.shape}; it must be {(len(at), self._rows.shape[1])}")
        known = np.issubdtype(at.dtype, np.integer) and ((at >= 0) & (at < len(self._rows))).all()
        if not known or len(np.unique(at)) < len(at):
            raise UserError(f"indices are {at.tolist()}; they must be different row numbers below {len(self._rows)}")
        return at, rows

    def _resettle(self, before: Matrix, moved: Labels) -> None:
        lost = np.unique(_labels(self._clusters, len(before))[moved])
        self._forget(before, moved, lost)
        had = _sizes(self._clusters)[lost]
        for k in lost:
            self._clusters[k] = np.setdiff1d(self._clusters[k], moved)
        has = _sizes(self._clusters)[lost]
        afresh = 2 * has < had  # a small rest of a large sum is mostly rounding
        again = lost[(has > 0) & (afresh | (np.diag(self._between)[lost] > self.split))]
        parts = [part for k in again for part in self._parts(self._clusters[k])]
        stay = np.setdiff1d(np.flatnonzero(_sizes(self._clusters)), again)
        clusters = [*(self._clusters[k] for k in stay), *parts, *moved[:, None]]
        touched = [*np.flatnonzero(np.isin(stay, lost)), *range(len(stay), len(clusters))]
        between = self._extended(stay, clusters)
        groups, self._between = merge_clusters(between, _sizes(clusters), self.merge, touched)
        self._clusters = _united(clusters, groups)
        self.splits_, self.merges_ = len(parts) - len(again), len(clusters) - len(groups)

    def _parts(self, inside: Labels) -> Clusters:
        distances = self._pairwise(self._rows[inside])
        distances /= self.distances_scale_
        return [inside[part] for part in split_clusters(distances, [np.arange(len(inside))], self.split)]

    def _forget(self, before: Matrix, moved: Labels, lost: Labels) -> None:
        """The means of the clusters that lost clients: from each sum that is taken which these were part of."""
        labels, sizes = _labels(self._clusters, len(before)), _sizes(self._clusters)
        home = (labels[moved, None] == lost).astype(np.float64)
        taken = home.T @ self._sums(before, moved, labels, len(sizes))
        among = home.T @ (modified_js(before[moved], before[moved], self.gamma) / self.distances_scale_) @ home
        sums = self._between[lost] * np.outer(sizes[lost], sizes) - taken
        sums[:, lost] += among - taken[:, lost].T
        left = sizes.astype(np.float64)
        left[lost] = np.maximum(left[lost] - home.sum(0), 1)
        means = np.maximum(sums, 0.0) / np.outer(left[lost], left)
        self._between[lost] = means
        self._between[:, lost] = means.T

    def _extended(self, stay: Labels, clusters: Clusters) -> Matrix:
        """The means between clusters, of which the first are those that stay."""
        known, sizes = len(stay), _sizes(clusters)
        new = np.concatenate(clusters[known:])
        sums = self._sums(self._rows, new, _labels(clusters, len(self._rows)), len(clusters))
        starts = np.cumsum(sizes[known:]) - sizes[known:]
        means = np.add.reduceat(sums, starts) / sizes[known:, None] / sizes
        found = np.empty((len(clusters), len(clusters)), self._between.dtype)
        for row, k in enumerate(stay):
            found[row, :known] = self._between[k, stay]
        for k, row in enumerate(means, known):
            found[k] = found[:, k] = row
        return found

    def _sums(self, rows: Matrix, some: Labels, labels: Labels, count: int) -> Floats:
        """The sums of the distances between some rows and all those with label 0, with label 1, ...: [some, count]."""
        used = np.flatnonzero(labels >= 0)
        found = np.empty((len(some), count))
        for block in _blocks(len(some)):
            distances = modified_js(rows[some[block]], rows[used], self.gamma) / self.distances_scale_
            found[block] = [np.bincount(labels[used], row, count) for row in distances]
        return found


def printed_radius(S: ArrayLike) -> float:
    """Eq. (5) as printed, for one cluster of all rows: infinite for a single one."""
    rows = table(S, "S")
    with np.errstate(divide="ignore"):
        return float((rows.mean() + rows.std()) / np.sqrt(np.log(len(rows))))


def printed_least(S: ArrayLike, eta: float = 1.0) -> int:
    """Eq. (6) as printed, for one cluster of all rows: the entropy is summed over rows and entries."""
    from scipy.special import entr

    rows = table(S, "S")
    return ceil(len(rows) / (1 + exp(-eta * float(entr(rows).sum()))))


def relative_entropy(rows: Matrix) -> Floats:
    """The entropy of each row, normalised, in units of its largest value: in [0, 1]."""
    from scipy.special import entr

    entropies: Floats = entr(normalised(rows)).sum(1) / np.log(max(rows.shape[1], 2))
    return entropies


def local_density(
    distances: Matrix, entropies: Floats, neighbours: int | None = None, eta: float = 1.0
) -> tuple[Floats, Labels]:
    """ε_i and MinPts_i of each client, from itself and its nearest clients."""
    n = len(distances)
    k = min(neighbours or ceil(sqrt(n)), n - 1)
    radius, least = np.zeros(n), np.full(n, 2)
    if k < 1:
        return radius, least
    for block in _blocks(n):
        rows = distances[block].astype(np.float64)
        rows[np.arange(len(rows)), np.arange(n)[block]] = np.inf
        nearest = np.argpartition(rows, k - 1, axis=1)[:, :k]
        near = np.sort(np.take_along_axis(rows, nearest, 1), axis=1)
        radius[block] = (near.mean(1) + near.std(1)) / np.sqrt(np.log10(k + 1))  # Eq. (5)
        entropy = (entropies[nearest].sum(1) + entropies[block]) / (k + 1)
        least[block] = np.maximum(2, np.rint((k + 1) / (1 + np.exp(-eta * entropy))))  # Eq. (6)
    return radius, least


def dense_clusters(distances: Matrix, radius: Floats, least: Labels) -> Labels:
    """DBSCAN with a radius and a least number of neighbours, itself among them, for each client; -1 is noise."""
    n = len(distances)
    within = np.array([np.count_nonzero(row < reach) for row, reach in zip(distances, radius, strict=True)], np.int64)
    core = within + (radius <= 0) >= least  # nobody is nearer than 0, not even a client to itself
    labels, found = np.full(n, -1), -1
    for first in np.flatnonzero(core):
        if labels[first] >= 0:
            continue
        found += 1
        labels[first], reached = found, [first]
        while reached:
            i = reached.pop()
            new = np.flatnonzero(core & (labels < 0) & (distances[i] < np.minimum(radius, radius[i])))
            labels[new] = found
            reached.extend(new)
    inside = np.flatnonzero(core)
    for i in np.flatnonzero(~core):
        reach = inside[distances[i, inside] < np.minimum(radius[inside], radius[i])]
        if len(reach):
            labels[i] = labels[reach[distances[i, reach].argmin()]]
    return labels


def split_clusters(distances: Matrix, clusters: Clusters, threshold: float) -> Clusters:
    """Splits until Eq. (8) holds for none: by the farthest pair, the others to the nearer, ties to the first.

    Nothing is found twice: the sum over a cluster is known, so of its parts only the smaller is summed up, and what
    lies between them; and who is farthest from a client stays so as long as both are in one part.
    """
    parts: Clusters = []
    fellows = np.full(len(distances), -1)
    waiting = [(inside, _sum(distances, inside, inside)) for inside in clusters]
    while waiting:
        inside, total = waiting.pop()
        pair = _farthest(distances, inside, fellows) if total > threshold * len(inside) ** 2 else None  # Eq. (8)
        if pair is None or distances[pair] == 0:  # all equal: what is left of the sum is rounding
            parts.append(inside)
            continue
        a, b = pair
        second = distances[b, inside] < distances[a, inside]
        small, large = sorted((inside[~second], inside[second]), key=len)
        own, across = _sum(distances, small, small), _sum(distances, small, large)
        waiting += [(small, own), (large, total - own - 2 * across)]
    return sorted(parts, key=lambda inside: int(inside[0]))


def merge_clusters(
    between: Matrix, sizes: Labels, threshold: float, start: Iterable[int] | None = None
) -> tuple[list[list[int]], Matrix]:
    """Merges until Eq. (7) holds for no pair with a cluster of `start` (None: all); what is merged counts as such.

    The groups of clusters that are merged, and the means between these. `between` is used up.
    """
    within, sizes = np.diag(between).astype(np.float64), sizes.astype(np.float64)
    np.fill_diagonal(between, np.inf)
    groups: dict[int, list[int]] = {k: [k] for k in range(len(between))}
    waiting = list(range(len(between)) if start is None else start)[::-1]
    while waiting:
        p = waiting[-1]
        q = int(between[p].argmin()) if p in groups else p
        if not between[p, q] < threshold:  # Eq. (7): p is final, or was merged into another
            waiting.pop()
        elif between[q].min() < between[p, q]:
            waiting.append(q)
        else:
            n, m = sizes[p], sizes[q]
            within[p] = (n**2 * within[p] + m**2 * within[q] + 2 * n * m * between[p, q]) / (n + m) ** 2
            between[p] = between[:, p] = (n * between[p] + m * between[q]) / (n + m)
            between[p, p] = between[:, q] = np.inf
            sizes[p] += m
            groups[p] += groups.pop(q)
    left = np.sort(list(groups)).astype(np.int64)
    for row, k in enumerate(left):
        between[row, : len(left)] = between[k, left]  # in place, row <= k: a large matrix is not held twice
    means = between[: len(left), : len(left)]
    np.fill_diagonal(means, within[left])
    return [groups[k] for k in left], means if 2 * len(left) > len(between) else means.copy()


def _sparsities(S: ArrayLike, name: str) -> Floats:
    rows = table(S, name)
    if (rows > 1).any():
        row, column = np.argwhere(rows > 1)[0]
        raise UserError(f"{name} has {rows[row, column]} in row {row}, column {column}; sparsities must be 1 or less")
    return rows


def _distances(S: ArrayLike) -> Matrix:
    """A copy, in single precision if S is."""
    given = S if isinstance(S, np.ndarray) else table(S, "S")
    if given.ndim != 2 or given.shape[0] != given.shape[1]:
        raise UserError(f"S has shape {given.shape}; precomputed distances must be a square")
    found: Matrix = np.empty(given.shape, np.float32 if given.dtype == np.float32 else np.float64)
    for block in _blocks(len(given)):
        rows = table(given[block], "S")
        if not np.allclose(rows, given[:, block].T.astype(np.float64), rtol=1e-5) or np.diag(rows, block.start).any():
            raise UserError("S is not symmetric with zeros on the diagonal; precomputed distances must be")
        found[block] = rows
    return found


def _median(distances: Matrix) -> float:
    """Of the distances between two clients; of those that are not 0 if most are."""
    if len(distances) < 2:
        return 0.0
    pairs = np.concatenate([row[i + 1 :] for i, row in enumerate(distances)])
    median = float(np.median(pairs, overwrite_input=True))
    if median == 0 and pairs.any():
        return float(np.median(pairs[pairs > 0]))
    return median


def _means(distances: Matrix, clusters: Clusters) -> Matrix:
    """The left sides of Eq. (7), and of Eq. (8) on the diagonal. For clusters of one they are `distances` itself."""
    if len(clusters) == len(distances):
        return distances
    labels, sizes = _labels(clusters, len(distances)), _sizes(clusters)
    found = np.empty((len(clusters), len(clusters)), distances.dtype)
    for k, inside in enumerate(clusters):
        sums = sum((distances[inside[block]].sum(0, dtype=np.float64) for block in _blocks(len(inside))), np.zeros(1))
        means = np.bincount(labels, sums) / sizes / len(inside)
        found[k, k:] = found[k:, k] = means[k:]
    return found


def _sum(distances: Matrix, some: Labels, others: Labels) -> float:
    blocks = (distances[np.ix_(some[block], others)] for block in _blocks(len(some)))
    return sum(float(block.sum(dtype=np.float64)) for block in blocks)


def _farthest(distances: Matrix, inside: Labels, fellows: Labels) -> tuple[int, int]:
    """The farthest pair of a cluster; `fellows`, the farthest of each client, is put right where it is no member."""
    member = np.zeros(len(distances), bool)
    member[inside] = True
    stale = inside[(fellows[inside] < 0) | ~member[fellows[inside]]]
    for block in _blocks(len(stale)):
        fellows[stale[block]] = inside[distances[np.ix_(stale[block], inside)].argmax(1)]
    a = int(inside[distances[inside, fellows[inside]].argmax()])
    return a, int(fellows[a])


def _blocks(n: int) -> list[slice]:
    return [slice(start, min(start + _BLOCK, n)) for start in range(0, n, _BLOCK)]


def _clusters(labels: Labels) -> Clusters:
    """In order of their first rows."""
    numbered, old = by_first_appearance(labels)
    ends = np.cumsum(np.bincount(numbered, minlength=len(old)))[:-1]
    return np.split(np.argsort(numbered, kind="stable"), ends) if len(old) else []


def _labels(clusters: Clusters, n: int) -> Labels:
    labels = np.full(n, -1)
    for k, inside in enumerate(clusters):
        labels[inside] = k
    return labels


def _sizes(clusters: Clusters) -> Labels:
    return np.array([len(inside) for inside in clusters], np.int64)


def _united(clusters: Clusters, groups: list[list[int]]) -> Clusters:
    return [np.sort(np.concatenate([clusters[k] for k in group])) for group in groups]
