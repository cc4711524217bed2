"""AIDC: clusters of rows with similar sparsity vectors, whose number follows from two thresholds.

Tang et al., "FedEPC: An efficient and privacy-enhancing clustering federated learning method for sensing-computing
fusion scenarios", Computers, Materials & Continua, 2025 (doi:10.32604/cmc.2025.066241), Sec. 3.3, Eq. (3)-(8), Alg. 2.

| paper | here |
|---|---|
| s^(i), N devices | a row of `X`, its rows |
| MJS, γ | `jensen_shannon`, `gamma`; distances in units of `distances_scale_` |
| ε_i, Eq. (5) | `local_density`; as printed: `printed_radius` |
| MinPts_i, η, Eq. (6) | `local_density`, `eta`; as printed: `printed_min_neighbours` |
| N_k, C_k of Eq. (5) and (6) | row i and its `n_neighbors` nearest, k = ⌈√N⌉; as printed: all rows |
| b(C_p, C_q), left side of Eq. (7) | mean distance between two clusters, off the diagonal of a matrix of means |
| w(C_k), left side of Eq. (8) | mean distance within a cluster, including each row to itself: on that diagonal |
| θ_merge, θ_split | `merge`, `split` |
| reference client (Sec. 3.5) | `n_references` |

The algorithm finds density clusters (noise becomes clusters of one row), then splits clusters while Eq. (8) holds, then
merges clusters while Eq. (7) holds.

The algorithm ends, and then neither equation holds. A split raises the number of clusters and a merge lowers it, so
there are fewer than N splits and fewer than N merges. And w(p ∪ q) = (n_p² w_p + n_q² w_q + 2 n_p n_q b) / (n_p + n_q)²
is a mean of w_p, w_q ≤ θ_split and b < θ_merge, so with θ_merge ≤ θ_split no merged cluster would be split by Eq. (8).

Merging the closest pair while its b < θ_merge is average linkage that starts from clusters instead of single rows and
ends at θ_merge. b of a union is a mean of the b of its parts, hence b(p ∪ q, r) ≥ min(b(p, r), b(q, r)). Therefore a
cluster without a neighbour nearer than θ_merge never gets one, and two clusters that are nearest to each other stay so
after any other merge. They may be merged at once, in any order (a chain of nearest neighbours), and the result is the
same up to ties. SciPy's average linkage gives the same result from single rows. It can start neither from clusters nor
in single precision, and it needs two copies of all distances.

Deviations from the paper
-------------------------
- Distances are divided by their median, because MJS grows with the number of channels. The thresholds 0.30 and 0.36 are
  in units of the median. The unit is relative, so a fleet without clusters would be split as well, which `halves`
  prevents. The median must be a distance between clusters, which fails if one cluster has most of the rows;
  `scale="mean"` works in this case too.
- Eq. (5) as printed is in units of sparsity, not of distance. Here it is (μ + σ) / √log10(k + 1) of the k nearest
  distances. With many rows and channels these radii may be so small that all rows are noise. The algorithm is then
  average linkage.
- Eq. (6) as printed gives all rows as soon as there are many channels. Here the entropy is a mean over C_i of the
  normalised vectors, in units of its largest value.
- With a radius for each row, row i may reach row j although j does not reach i, and Alg. 2 depends on the order of the
  rows. Here two core rows are in one cluster if each reaches the other. Otherwise a row far from all others, which has
  a large radius, would connect everything that it reaches. Any other row is in the cluster of the nearest core row such
  that each reaches the other.
- Alg. 2 merges, then splits. Here splits come first, and therefore the algorithm ends. `as_published=True` follows
  Eq. (5), Eq. (6) and the order of Alg. 2, repeated until nothing changes or `max_iter` is reached.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import ceil, exp, sqrt
from typing import Any, Literal, Self

import numpy as np
from numpy.typing import ArrayLike
from sklearn.base import BaseEstimator, ClusterMixin
from sklearn.utils.validation import check_is_fitted

from shoal.clusterers.jensen_shannon import (
    Matrix,
    modified_js,
    normalise_rows,
    paired_modified_js,
    pairwise_modified_js,
)
from shoal.clusterers.validation import (
    Floats,
    Labels,
    RandomState,
    check_choice,
    check_features,
    check_fit_rows,
    check_new_rows,
    check_number,
    check_shape,
    check_table,
    check_whole_number,
    match_labels,
    number_by_first_appearance,
    seed_from,
    to_floats,
)
from shoal.errors import UserError
from shoal.rng import derive_seed

Clusters = list[Labels]  # the rows of each cluster, ascending

_BLOCK = 256  # rows of a large matrix that are processed at once
_MAX_DOUBLE_ROWS = 4096  # with more rows, distances are in single precision
_MAX_REPRESENTATIVES = 64  # members of a cluster with which new rows are compared


class AdaptiveDensityClusters(ClusterMixin, BaseEstimator):
    """Density clusters, split and merged until no cluster is too wide and no two clusters are too close.

    The paper's setting is `as_published=True, merge=0.15, split=0.18, scale="none"`. The method `fedepc` uses
    `merge=0.35, split=0.42, scale="mean"`, which also finds clusters of unequal size.

    Parameters
    ----------
    merge : float, default=0.30
        Two clusters are merged if the mean distance between them is below this value, Eq. (7).
    split : float, default=0.36
        A cluster is split if the mean distance within it is above this value, Eq. (8). Not below `merge`.
    gamma : float, default=1.0
        Weight of the part of the divergence that is not normalised, Eq. (3).
    eta : float, default=1.0
        How strongly entropy raises the number of neighbours of a core row, Eq. (6).
    n_neighbors : int, optional
        Number of nearest rows that determine the radius of a row. By default the square root of the number of rows.
    scale : {"median", "mean", "none"}, default="median"
        Unit of the thresholds: the median or the mean of all distances, or 1.
    metric : {"mjs", "precomputed"}, default="mjs"
        Whether `X` has vectors, compared by the modified Jensen-Shannon divergence, or distances.
    n_references : int, optional
        Number of rows, drawn at random, that are clustered. Each other row joins the cluster whose references have the
        smallest mean distance to it. This takes n_rows * n_references distances instead of n_rows² / 2. By default all
        rows.
    as_published : bool, default=False
        Whether to follow the paper as printed.
    noise_guard_ratio : float, default=2.2
        With `halves`, the smallest `noise_ratio_` for which there is more than one cluster. Without `halves` nothing is
        tested, and rows that differ only randomly are split too.
    min_cluster_size : int, default=2
        A smaller cluster joins the nearest cluster that is large enough, even if Eq. (8) then holds. If no cluster is
        large enough, all stay.
    random_state : int, RandomState or None, default=0
        Seed of the random references.
    max_iter : int, default=100
        Largest number of sweeps with `as_published=True`.

    Attributes
    ----------
    labels_ : ndarray of shape (n_rows,)
        Cluster of each row, numbered by first appearance.
    labels_before_joining_ : ndarray of shape (n_rows,)
        The clusters before small ones joined others; -1 for a row that is no reference.
    references_ : ndarray of shape (n_references,)
        Indices of the rows that were clustered.
    representatives_ : ndarray of shape (n_representatives,)
        Indices of the rows that `predict` compares with.
    distances_scale_ : float
        Unit of distances, by which they were divided.
    noise_ratio_ : float
        Difference between rows in units of the random difference; NaN without `halves`.
    is_guarded_ : bool
        Whether there is one cluster because `noise_ratio_` is below `noise_guard_ratio`.
    n_splits_, n_merges_ : int
        Number of splits and merges of the last `fit` or `update`.
    n_iter_ : int
        Number of sweeps: 1 unless `as_published` is True, and 0 if there was nothing to split or merge.
    converged_ : bool
        False if `max_iter` ended the sweeps, which happens with `as_published=True` only.
    n_features_in_ : int
        Number of columns of `X`.

    References
    ----------
    Tang et al., "FedEPC: An efficient and privacy-enhancing clustering federated learning method for sensing-computing
    fusion scenarios", 2025, Sec. 3.3.

    Examples
    --------
    >>> from shoal.clusterers import AdaptiveDensityClusters
    >>> rows = [[0.80, 0.10], [0.81, 0.10], [0.80, 0.11], [0.10, 0.80], [0.11, 0.80]]
    >>> AdaptiveDensityClusters().fit_predict(rows).tolist()
    [0, 0, 0, 1, 1]
    """

    labels_: Labels
    labels_before_joining_: Labels
    references_: Labels
    representatives_: Labels
    distances_scale_: float
    noise_ratio_: float
    is_guarded_: bool
    n_splits_: int
    n_merges_: int
    n_iter_: int
    converged_: bool

    def __init__(
        self,
        merge: float = 0.30,
        split: float = 0.36,
        *,
        gamma: float = 1.0,
        eta: float = 1.0,
        n_neighbors: int | None = None,
        scale: Literal["median", "mean", "none"] = "median",
        metric: Literal["mjs", "precomputed"] = "mjs",
        n_references: int | None = None,
        as_published: bool = False,
        noise_guard_ratio: float = 2.2,
        min_cluster_size: int = 2,
        random_state: RandomState = 0,
        max_iter: int = 100,
    ) -> None:
        self.merge = merge
        self.split = split
        self.gamma = gamma
        self.eta = eta
        self.n_neighbors = n_neighbors
        self.scale = scale
        self.metric = metric
        self.n_references = n_references
        self.as_published = as_published
        self.noise_guard_ratio = noise_guard_ratio
        self.min_cluster_size = min_cluster_size
        self.random_state = random_state
        self.max_iter = max_iter

    def fit(self, X: ArrayLike, y: object = None, *, halves: tuple[ArrayLike, ArrayLike] | None = None) -> Self:
        """Find the clusters.

        Parameters
        ----------
        X : array-like of shape (n_rows, n_columns) or (n_rows, n_rows)
            Non-negative numbers. The paper has fractions from 0 to 1, which `as_published=True` requires. With
            `metric="precomputed"` symmetric distances, which may be in single precision.
        y : None
            Ignored; present for compatibility with scikit-learn.
        halves : tuple of two array-likes of shape (n_rows, n_columns), optional
            If a row is a mean over samples, the means over each half of the samples.

        Returns
        -------
        self : AdaptiveDensityClusters
            The fitted estimator.

        Raises
        ------
        UserError
            If a parameter, `X` or `halves` is not as described.

        Notes
        -----
        Differences between the halves of a row are random. MJS is quadratic in small differences, and the mean of half
        the samples has twice the variance. Between two rows of the same distribution MJS is therefore about half of the
        MJS between the halves of one row. `noise_ratio_` is the mean MJS between rows over half the mean MJS between
        halves. It is 1 for rows of the same distribution and 1 + (variance between rows) / (random variance) in
        general, so it grows with the number of samples. If it is less than `noise_guard_ratio`, there is one cluster.
        Means are used, because medians would miss a cluster of a quarter of the rows.

        The default of `noise_guard_ratio` is from fleets of 50 and 100 clients with 64 channels and 100 to 500 samples
        of ten classes, which account for 5, 15 or 36 % of the variance of a channel. The ratios are 0.9 to 1.2 for
        equal distributions, 1.0 to 2.1 for Dirichlet(10), 1.6 to 11 for Dirichlet(1), 2.1 to 19 for Dirichlet(0.5), and
        for two planted groups 1.9 to 2.8, 4 to 7 and 9 to 15.
        """
        self._check()
        seed = seed_from(self.random_state)
        rows = self._check_rows(X)
        drawn = self._draw_references(rows, seed)
        distances = self._distance_matrix(rows, drawn)
        mean = float(distances.sum(dtype=np.float64)) / max(len(drawn) * (len(drawn) - 1), 1)
        self.noise_ratio_ = np.nan if halves is None else self._noise_ratio(mean, halves, rows.shape)
        self.is_guarded_ = bool(self.noise_ratio_ < self.noise_guard_ratio)
        self.distances_scale_ = self._distance_unit(distances, mean)
        distances /= self.distances_scale_
        self.n_splits_, self.n_merges_, self.n_iter_, self.converged_ = 0, 0, 0, True
        if self.is_guarded_ or len(drawn) < 2:
            clusters = _clusters_from_labels(np.zeros(len(drawn), np.int64))
            self._cluster_distances = _mean_distances(distances, clusters)
        elif self.as_published:
            clusters = self._sweep(distances, self._density_clusters(distances, rows, drawn))
        else:
            clusters = self._split_and_merge(distances, self._density_clusters(distances, rows, drawn))
        self._clusters = [np.sort(drawn[inside]) for inside in clusters]
        self._rows = rows if self.metric == "mjs" else np.empty((0, len(rows)))
        self._assign_labels(rows)
        return self

    def predict(self, X: ArrayLike) -> Labels:
        """Return, for each new row, the cluster with the smallest mean distance to its representatives.

        Parameters
        ----------
        X : array-like of shape (n_rows, n_columns) or (n_rows, n_fitted_rows)
            Rows as in `fit`. With `metric="precomputed"` distances from each new row to each row of `fit`.

        Returns
        -------
        ndarray of shape (n_rows,)
            The labels.
        """
        return self._nearest_labels(check_new_rows(self, X, non_negative=True))

    def resume(self, X: ArrayLike, labels: ArrayLike) -> Self:
        """Continue from earlier clusters, for example of another process, so that they can be updated.

        Parameters
        ----------
        X : array-like of shape (n_rows, n_columns)
            The present rows, which determine the unit of distances.
        labels : array-like of shape (n_rows,)
            Cluster of each row, whole numbers from 0.

        Returns
        -------
        self : AdaptiveDensityClusters
            The fitted estimator.

        Raises
        ------
        UserError
            If a parameter, `X` or `labels` is not as described.
        """
        self._check()
        rows, given = check_fit_rows(self, X, non_negative=True), np.asarray(labels)
        if given.shape != (len(rows),) or not np.issubdtype(given.dtype, np.integer) or (given < 0).any():
            raise UserError(f"labels are {given.tolist()}; they must be {len(rows)} whole numbers from 0, one per row")
        distances = self._pairwise(rows)
        mean = float(distances.sum(dtype=np.float64)) / max(len(rows) * (len(rows) - 1), 1)
        self.distances_scale_ = self._distance_unit(distances, mean)
        distances /= self.distances_scale_
        self.noise_ratio_, self.is_guarded_ = np.nan, False
        self.n_splits_, self.n_merges_, self.n_iter_, self.converged_ = 0, 0, 0, True
        self._clusters, self._rows = _clusters_from_labels(number_by_first_appearance(given)[0]), rows
        self._cluster_distances = _mean_distances(distances, self._clusters)
        self._assign_labels(rows)
        return self

    def update(self, X: ArrayLike, indices: ArrayLike) -> Self:
        """Change some rows and update the clusters.

        A changed row leaves its cluster and becomes a cluster of one row, like noise. The clusters that lost a row are
        split while Eq. (8) holds. Only clusters that are new or smaller are then merged with others while Eq. (7)
        holds. `distances_scale_` does not change, and a single cluster that follows from the guard stays single.
        Clusters keep their numbers by the rows that they share with the earlier clusters, where unchanged rows count
        most. A number may no longer be used, and a new cluster has a new number.

        Parameters
        ----------
        X : array-like of shape (n_changed, n_columns)
            The changed rows.
        indices : array-like of shape (n_changed,)
            Their indices among the rows of `fit`.

        Returns
        -------
        self : AdaptiveDensityClusters
            The estimator, updated.

        Raises
        ------
        UserError
            If `X` or `indices` is not as described, or with `metric="precomputed"` or `as_published=True`.
        """
        changed, rows = self._check_changes(X, indices)
        previous_rows, previous_labels, self._rows = self._rows, self.labels_, self._rows.copy()
        self._rows[changed] = rows
        changed = changed[(previous_rows[changed] != self._rows[changed]).any(1)]
        self.n_splits_, self.n_merges_ = 0, 0
        moved_rows = changed[self.labels_before_joining_[changed] >= 0]
        if len(moved_rows) and not self.is_guarded_:
            self._recluster(previous_rows, moved_rows)
        self._assign_labels(self._rows)
        self.labels_ = match_labels(
            self.labels_,
            previous_labels,
            np.where(np.isin(np.arange(len(previous_labels)), changed), 1, len(previous_labels)),
        )
        return self

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.positive_only = True
        tags.input_tags.pairwise = self.metric == "precomputed"
        return tags

    def _check(self) -> None:
        for name in ("merge", "split", "gamma", "eta", "noise_guard_ratio"):
            check_number(name, getattr(self, name), 0)
        for name in ("min_cluster_size", "max_iter"):
            check_whole_number(name, getattr(self, name), 1)
        for name in ("n_neighbors", "n_references"):
            if getattr(self, name) is not None:
                check_whole_number(name, getattr(self, name), 1)
        check_choice("scale", self.scale, ("median", "mean", "none"))
        check_choice("metric", self.metric, ("mjs", "precomputed"))
        if self.as_published and self.metric == "precomputed":
            raise UserError("as_published is True; it must be False with precomputed distances: Eq. (5) needs vectors")
        if self.merge > self.split and not self.as_published:
            raise UserError(
                f"merge is {self.merge} and split is {self.split}; merge must not be larger, because merged clusters "
                "would be split again for ever (as_published=True tries all the same)"
            )

    def _check_rows(self, X: ArrayLike) -> Matrix:
        if self.metric == "precomputed":
            distances = _check_distances(X)
            check_features(self, distances, reset=True)
            return distances
        rows = check_fit_rows(self, X, non_negative=True)
        if self.as_published:
            for row, column in np.argwhere(rows > 1)[:1]:
                raise UserError(
                    f"X has {rows[row, column]} in row {row}, column {column}; entries must be 1 or less if "
                    "as_published is True, because Eq. (6) needs fractions"
                )
        return rows

    def _draw_references(self, rows: Matrix, seed: int) -> Labels:
        """Returns the indices of the rows to be clustered.

        Vectors are sorted by their values, so that neither randomness nor ties depend on the order of the rows.
        """
        order = np.arange(len(rows)) if self.metric == "precomputed" else np.lexsort(rows.T[::-1])
        if self.n_references is not None and self.n_references < len(rows):
            rng = np.random.default_rng(derive_seed(seed, "references"))
            order = order[np.sort(rng.choice(len(rows), self.n_references, replace=False))]
        return order

    def _distance_matrix(self, rows: Matrix, drawn: Labels) -> Matrix:
        if self.metric == "precomputed":
            return rows if len(drawn) == len(rows) else rows[np.ix_(drawn, drawn)]
        return self._pairwise(rows[drawn])

    def _pairwise(self, rows: Matrix) -> Matrix:
        return pairwise_modified_js(rows, self.gamma, np.float64 if len(rows) <= _MAX_DOUBLE_ROWS else np.float32)

    def _distance_unit(self, distances: Matrix, mean: float) -> float:
        if self.scale == "none":
            return 1.0
        return (mean if self.scale == "mean" else _median(distances)) or 1.0

    def _noise_ratio(self, mean: float, halves: tuple[ArrayLike, ArrayLike], shape: tuple[int, ...]) -> float:
        if self.metric == "precomputed":
            raise UserError("halves are given with precomputed distances; they can only be used with vectors in X")
        one, other = (check_table(half, "halves", non_negative=True) for half in halves)
        if one.shape != shape or other.shape != shape:
            raise UserError(f"halves have shapes {one.shape} and {other.shape}; both must have {shape}, as X has")
        noise = float(paired_modified_js(one, other, self.gamma).sum()) / max(len(one), 1) / 2
        if noise == 0:
            return np.inf if mean > 0 else 1.0
        return mean / noise

    def _density_clusters(self, distances: Matrix, rows: Matrix, drawn: Labels) -> Clusters:
        """Returns the clusters of lines 1 to 12 of Alg. 2, with noise as clusters of one row."""
        if self.as_published:
            radius = np.full(len(drawn), printed_radius(rows[drawn]))
            min_neighbours = np.full(len(drawn), printed_min_neighbours(rows[drawn], self.eta))
        else:
            entropies = np.ones(len(drawn)) if self.metric == "precomputed" else relative_entropy(rows[drawn])
            radius, min_neighbours = local_density(distances, entropies, self.n_neighbors, self.eta)
        labels = dense_clusters(distances, radius, min_neighbours)
        noise = labels < 0
        labels[noise] = labels.max(initial=-1) + 1 + np.arange(noise.sum())
        return _clusters_from_labels(labels)

    def _split_and_merge(self, distances: Matrix, clusters: Clusters) -> Clusters:
        parts = split_clusters(distances, clusters, self.split)
        merged, self._cluster_distances = merge_clusters(_mean_distances(distances, parts), _sizes(parts), self.merge)
        self.n_splits_, self.n_merges_, self.n_iter_ = len(parts) - len(clusters), len(parts) - len(merged), 1
        return _unite(parts, merged)

    def _sweep(self, distances: Matrix, clusters: Clusters) -> Clusters:
        """Returns the clusters after lines 13 and 14 of Alg. 2 are repeated until line 14 changes nothing."""
        while self.n_iter_ < self.max_iter:
            self.n_iter_ += 1
            merged, self._cluster_distances = merge_clusters(
                _mean_distances(distances, clusters).copy(), _sizes(clusters), self.merge
            )
            united = _unite(clusters, merged)
            parts = split_clusters(distances, united, self.split)
            self.n_merges_ += len(clusters) - len(united)
            self.n_splits_ += len(parts) - len(united)
            if len(parts) == len(united):
                return united
            clusters = parts
        self.converged_, self._cluster_distances = False, _mean_distances(distances, clusters).copy()
        return clusters

    def _assign_labels(self, rows: Matrix) -> None:
        """Sets the labels: small clusters join others, and rows that are no references join the nearest cluster."""
        self.references_ = np.sort(np.concatenate([*self._clusters, np.empty(0, np.int64)]))
        self.labels_before_joining_, self.labels_ = np.full(len(rows), -1), np.full(len(rows), -1)
        for k, target in enumerate(self._final_clusters()):
            self.labels_before_joining_[self._clusters[k]], self.labels_[self._clusters[k]] = k, target
        for labels in (self.labels_before_joining_, self.labels_):
            labels[self.references_], _ = number_by_first_appearance(labels[self.references_])
        self.representatives_ = self._draw_representatives()
        rest = np.flatnonzero(self.labels_before_joining_ < 0)
        self.labels_[rest] = self._nearest_labels(rows[rest])
        self.labels_, _ = number_by_first_appearance(self.labels_)

    def _final_clusters(self) -> Labels:
        """Returns, for each cluster, the cluster that it joins, which is itself if it is large enough."""
        is_small = _sizes(self._clusters) < self.min_cluster_size
        targets = np.arange(len(is_small))
        if is_small.any() and not is_small.all():
            targets[is_small] = targets[~is_small][self._cluster_distances[np.ix_(is_small, ~is_small)].argmin(1)]
        return targets

    def _draw_representatives(self) -> Labels:
        clusters = [self.references_[inside] for inside in _clusters_from_labels(self.labels_[self.references_])]
        return np.sort(np.concatenate([*map(self._sample_members, clusters), np.empty(0, np.int64)]))

    def _sample_members(self, inside: Labels) -> Labels:
        """Returns at most `_MAX_REPRESENTATIVES` members, at equal intervals in the order of their values."""
        if len(inside) <= _MAX_REPRESENTATIVES:
            return inside
        order = inside if self.metric == "precomputed" else inside[np.lexsort(self._rows[inside].T[::-1])]
        return order[np.linspace(0, len(order) - 1, _MAX_REPRESENTATIVES).astype(np.int64)]

    def _nearest_labels(self, rows: Matrix) -> Labels:
        """Returns, for each row, the label whose representatives have the smallest mean distance to it."""
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

    def _check_changes(self, X: ArrayLike, indices: ArrayLike) -> tuple[Labels, Floats]:
        check_is_fitted(self)
        if self.metric == "precomputed" or self.as_published:
            raise UserError("update needs vectors and as_published=False; call fit(X) again instead")
        rows, changed = check_new_rows(self, X, non_negative=True), np.asarray(indices)
        if changed.size == 0:
            changed = changed.astype(np.int64)
        if len(rows) != len(changed):
            raise UserError(f"X has {len(rows)} rows; it must have {len(changed)}, one for each index")
        is_known = np.issubdtype(changed.dtype, np.integer) and ((changed >= 0) & (changed < len(self._rows))).all()
        if not is_known or len(np.unique(changed)) < len(changed):
            raise UserError(
                f"indices are {changed.tolist()}; they must be different row numbers below {len(self._rows)}"
            )
        return changed, rows

    def _recluster(self, previous_rows: Matrix, moved_rows: Labels) -> None:
        shrunk_clusters = np.unique(_labels_from_clusters(self._clusters, len(previous_rows))[moved_rows])
        self._remove_rows(previous_rows, moved_rows, shrunk_clusters)
        old_sizes = _sizes(self._clusters)[shrunk_clusters]
        for k in shrunk_clusters:
            self._clusters[k] = np.setdiff1d(self._clusters[k], moved_rows)
        new_sizes = _sizes(self._clusters)[shrunk_clusters]
        is_mostly_lost = 2 * new_sizes < old_sizes  # the rest of such a sum would be mostly rounding errors
        clusters_to_split = shrunk_clusters[
            (new_sizes > 0) & (is_mostly_lost | (np.diag(self._cluster_distances)[shrunk_clusters] > self.split))
        ]
        parts = [part for k in clusters_to_split for part in self._split_rows(self._clusters[k])]
        kept_clusters = np.setdiff1d(np.flatnonzero(_sizes(self._clusters)), clusters_to_split)
        clusters = [*(self._clusters[k] for k in kept_clusters), *parts, *moved_rows[:, None]]
        shrunk_indices = np.flatnonzero(np.isin(kept_clusters, shrunk_clusters))
        changed_clusters = [*shrunk_indices, *range(len(kept_clusters), len(clusters))]
        between = self._extend_distances(kept_clusters, clusters)
        merged, self._cluster_distances = merge_clusters(between, _sizes(clusters), self.merge, changed_clusters)
        self._clusters = _unite(clusters, merged)
        self.n_splits_, self.n_merges_ = len(parts) - len(clusters_to_split), len(clusters) - len(merged)

    def _split_rows(self, inside: Labels) -> Clusters:
        distances = self._pairwise(self._rows[inside])
        distances /= self.distances_scale_
        return [inside[part] for part in split_clusters(distances, [np.arange(len(inside))], self.split)]

    def _remove_rows(self, previous_rows: Matrix, moved_rows: Labels, shrunk_clusters: Labels) -> None:
        """Updates the mean distances of clusters that lost rows by subtracting the rows' distances from the sums."""
        labels, sizes = _labels_from_clusters(self._clusters, len(previous_rows)), _sizes(self._clusters)
        was_member = (labels[moved_rows, None] == shrunk_clusters).astype(np.float64)
        removed = was_member.T @ self._distance_sums(previous_rows, moved_rows, labels, len(sizes))
        among_moved = modified_js(previous_rows[moved_rows], previous_rows[moved_rows], self.gamma)
        among = was_member.T @ (among_moved / self.distances_scale_) @ was_member
        sums = self._cluster_distances[shrunk_clusters] * np.outer(sizes[shrunk_clusters], sizes) - removed
        sums[:, shrunk_clusters] += among - removed[:, shrunk_clusters].T
        new_sizes = sizes.astype(np.float64)
        new_sizes[shrunk_clusters] = np.maximum(new_sizes[shrunk_clusters] - was_member.sum(0), 1)
        means = np.maximum(sums, 0.0) / np.outer(new_sizes[shrunk_clusters], new_sizes)
        self._cluster_distances[shrunk_clusters] = means
        self._cluster_distances[:, shrunk_clusters] = means.T

    def _extend_distances(self, kept_clusters: Labels, clusters: Clusters) -> Matrix:
        """Returns the mean distances between clusters, the first of which are kept clusters with known distances."""
        num_kept, sizes = len(kept_clusters), _sizes(clusters)
        new = np.concatenate(clusters[num_kept:])
        sums = self._distance_sums(self._rows, new, _labels_from_clusters(clusters, len(self._rows)), len(clusters))
        starts = np.cumsum(sizes[num_kept:]) - sizes[num_kept:]
        means = np.add.reduceat(sums, starts) / sizes[num_kept:, None] / sizes
        distances = np.empty((len(clusters), len(clusters)), self._cluster_distances.dtype)
        for row, k in enumerate(kept_clusters):
            distances[row, :num_kept] = self._cluster_distances[k, kept_clusters]
        for k, row in enumerate(means, num_kept):
            distances[k] = distances[:, k] = row
        return distances

    def _distance_sums(self, rows: Matrix, some: Labels, labels: Labels, num_clusters: int) -> Floats:
        """Returns the sums of the distances between some rows and all rows with label 0, 1, ...: [some, clusters]."""
        used = np.flatnonzero(labels >= 0)
        sums = np.empty((len(some), num_clusters))
        for block in _blocks(len(some)):
            distances = modified_js(rows[some[block]], rows[used], self.gamma) / self.distances_scale_
            sums[block] = [np.bincount(labels[used], row, num_clusters) for row in distances]
        return sums


def printed_radius(X: ArrayLike) -> float:
    """Return the radius of Eq. (5) as printed, for one cluster of all rows.

    Parameters
    ----------
    X : array-like of shape (n_rows, n_columns)
        Fractions from 0 to 1.

    Returns
    -------
    float
        The radius; infinite for a single row.

    References
    ----------
    Tang et al., "FedEPC", 2025, Eq. (5).
    """
    rows = check_table(X, non_negative=True)
    with np.errstate(divide="ignore"):
        return float((rows.mean() + rows.std()) / np.sqrt(np.log(len(rows))))


def printed_min_neighbours(X: ArrayLike, eta: float = 1.0) -> int:
    """Return the number of neighbours of Eq. (6) as printed, for one cluster of all rows.

    Parameters
    ----------
    X : array-like of shape (n_rows, n_columns)
        Fractions from 0 to 1.
    eta : float, default=1.0
        Weight of the entropy, which is summed over rows and entries.

    Returns
    -------
    int
        The number.

    References
    ----------
    Tang et al., "FedEPC", 2025, Eq. (6).
    """
    from scipy.special import entr

    rows = check_table(X, non_negative=True)
    return ceil(len(rows) / (1 + exp(-eta * float(entr(rows).sum()))))


def relative_entropy(rows: Matrix) -> Floats:
    """Return the entropy of each normalised row in units of the largest possible one.

    Parameters
    ----------
    rows : ndarray of shape (n_rows, n_columns)
        Non-negative numbers.

    Returns
    -------
    ndarray of shape (n_rows,)
        Entropies from 0 to 1.
    """
    from scipy.special import entr

    entropies: Floats = entr(normalise_rows(rows)).sum(1) / np.log(max(rows.shape[1], 2))
    return entropies


def local_density(
    distances: Matrix, entropies: Floats, n_neighbors: int | None = None, eta: float = 1.0
) -> tuple[Floats, Labels]:
    """Return the radius and the number of neighbours of each row, from itself and its nearest rows.

    Parameters
    ----------
    distances : ndarray of shape (n_rows, n_rows)
        Distances of all pairs.
    entropies : ndarray of shape (n_rows,)
        Relative entropy of each row.
    n_neighbors : int, optional
        Number of nearest rows. By default the square root of the number of rows, rounded up.
    eta : float, default=1.0
        How strongly entropy raises the number of neighbours.

    Returns
    -------
    radius : ndarray of shape (n_rows,)
        ε_i of Eq. (5).
    min_neighbours : ndarray of shape (n_rows,)
        MinPts_i of Eq. (6), at least 2.

    References
    ----------
    Tang et al., "FedEPC", 2025, Eq. (5) and (6), with the deviations that the module describes.
    """
    n = len(distances)
    k = min(n_neighbors or ceil(sqrt(n)), n - 1)
    radius, min_neighbours = np.zeros(n), np.full(n, 2)
    if k < 1:
        return radius, min_neighbours
    for block in _blocks(n):
        rows = distances[block].astype(np.float64)
        rows[np.arange(len(rows)), np.arange(n)[block]] = np.inf
        nearest = np.argpartition(rows, k - 1, axis=1)[:, :k]
        near = np.sort(np.take_along_axis(rows, nearest, 1), axis=1)
        radius[block] = (near.mean(1) + near.std(1)) / np.sqrt(np.log10(k + 1))  # Eq. (5)
        entropy = (entropies[nearest].sum(1) + entropies[block]) / (k + 1)
        min_neighbours[block] = np.maximum(2, np.rint((k + 1) / (1 + np.exp(-eta * entropy))))  # Eq. (6)
    return radius, min_neighbours


def dense_clusters(distances: Matrix, radius: Floats, min_neighbours: Labels) -> Labels:
    """Cluster by DBSCAN with a radius and a number of neighbours for each row.

    Parameters
    ----------
    distances : ndarray of shape (n_rows, n_rows)
        Distances of all pairs.
    radius : ndarray of shape (n_rows,)
        Radius of each row.
    min_neighbours : ndarray of shape (n_rows,)
        A row with this many rows within its radius, itself included, is a core row.

    Returns
    -------
    ndarray of shape (n_rows,)
        The labels, -1 for noise.
    """
    n = len(distances)
    within = np.array([np.count_nonzero(row < own) for row, own in zip(distances, radius, strict=True)], np.int64)
    is_core = within + (radius <= 0) >= min_neighbours  # with radius 0 a row is not within its own radius
    labels, cluster = np.full(n, -1), -1
    for first in np.flatnonzero(is_core):
        if labels[first] >= 0:
            continue
        cluster += 1
        labels[first], reached = cluster, [first]
        while reached:
            i = reached.pop()
            new = np.flatnonzero(is_core & (labels < 0) & (distances[i] < np.minimum(radius, radius[i])))
            labels[new] = cluster
            reached.extend(new)
    core = np.flatnonzero(is_core)
    for i in np.flatnonzero(~is_core):
        reachable = core[distances[i, core] < np.minimum(radius[core], radius[i])]
        if len(reachable):
            labels[i] = labels[reachable[distances[i, reachable].argmin()]]
    return labels


def split_clusters(distances: Matrix, clusters: Clusters, threshold: float) -> Clusters:
    """Split clusters until Eq. (8) holds for none.

    A cluster is split by its farthest pair: each row is assigned to the nearer row of the pair, with ties to the first.
    Nothing is computed twice. The sum over the cluster is known, so only the sums within the smaller part and between
    both parts are computed. The row farthest from another row is the same as long as both are in one part.

    Parameters
    ----------
    distances : ndarray of shape (n_rows, n_rows)
        Distances of all pairs.
    clusters : list of ndarray
        Indices of the rows of each cluster, ascending.
    threshold : float
        A cluster is split if the mean distance within it is above this value.

    Returns
    -------
    list of ndarray
        The parts, in the order of their first rows.

    References
    ----------
    Tang et al., "FedEPC", 2025, Eq. (8) and Alg. 2.
    """
    parts: Clusters = []
    farthest_row = np.full(len(distances), -1)
    waiting = [(inside, _sum_distances(distances, inside, inside)) for inside in clusters]
    while waiting:
        inside, total = waiting.pop()
        is_wide = total > threshold * len(inside) ** 2  # Eq. (8)
        pair = _farthest_pair(distances, inside, farthest_row) if is_wide else None
        if pair is None or distances[pair] == 0:  # at distance 0 all rows are equal, and the sum is rounding errors
            parts.append(inside)
            continue
        a, b = pair
        is_nearer_to_b = distances[b, inside] < distances[a, inside]
        small, large = sorted((inside[~is_nearer_to_b], inside[is_nearer_to_b]), key=len)
        own, across = _sum_distances(distances, small, small), _sum_distances(distances, small, large)
        waiting += [(small, own), (large, total - own - 2 * across)]
    return sorted(parts, key=lambda inside: int(inside[0]))


def merge_clusters(
    between: Matrix, sizes: Labels, threshold: float, changed_clusters: Iterable[int] | None = None
) -> tuple[list[list[int]], Matrix]:
    """Merge clusters until Eq. (7) holds for no pair.

    Parameters
    ----------
    between : ndarray of shape (n_clusters, n_clusters)
        Mean distances between clusters, and within them on the diagonal. It is overwritten.
    sizes : ndarray of shape (n_clusters,)
        Number of rows of each cluster.
    threshold : float
        Two clusters are merged if the mean distance between them is below this value.
    changed_clusters : iterable of int, optional
        A pair is merged only if one cluster of it is among these or was merged with one of these. By default all.

    Returns
    -------
    merged_clusters : list of list of int
        For each new cluster, the clusters that were merged into it.
    between : ndarray of shape (n_new_clusters, n_new_clusters)
        Mean distances between the new clusters.

    References
    ----------
    Tang et al., "FedEPC", 2025, Eq. (7) and Alg. 2.
    """
    within, sizes = np.diag(between).astype(np.float64), sizes.astype(np.float64)
    np.fill_diagonal(between, np.inf)
    merged_clusters: dict[int, list[int]] = {k: [k] for k in range(len(between))}
    waiting = list(range(len(between)) if changed_clusters is None else changed_clusters)[::-1]
    while waiting:
        p = waiting[-1]
        q = int(between[p].argmin()) if p in merged_clusters else p
        if not between[p, q] < threshold:  # Eq. (7): p is final, or was merged into another cluster
            waiting.pop()
        elif between[q].min() < between[p, q]:
            waiting.append(q)
        else:
            n, m = sizes[p], sizes[q]
            within[p] = (n**2 * within[p] + m**2 * within[q] + 2 * n * m * between[p, q]) / (n + m) ** 2
            between[p] = between[:, p] = (n * between[p] + m * between[q]) / (n + m)
            between[p, p] = between[:, q] = np.inf
            sizes[p] += m
            merged_clusters[p] += merged_clusters.pop(q)
    remaining = np.sort(list(merged_clusters)).astype(np.int64)
    for row, k in enumerate(remaining):
        between[row, : len(remaining)] = between[k, remaining]  # in place (row <= k), because the matrix may be large
    means = between[: len(remaining), : len(remaining)]
    np.fill_diagonal(means, within[remaining])
    return [merged_clusters[k] for k in remaining], means if 2 * len(remaining) > len(between) else means.copy()


def _check_distances(X: ArrayLike) -> Matrix:
    """Returns a copy of the distances, in single precision if `X` is in single precision."""
    given = X if isinstance(X, np.ndarray) else to_floats(X)
    check_shape(given.shape, "X", min_rows=1)
    if given.shape[0] != given.shape[1]:
        check_table(given, non_negative=True)  # reports a bad entry first, as for other input
        raise UserError(f"X has shape {given.shape}; precomputed distances must be a square")
    distances: Matrix = np.empty(given.shape, np.float32 if given.dtype == np.float32 else np.float64)
    for block in _blocks(len(given)):
        rows = check_table(given[block], non_negative=True)
        others = given[:, block].T.astype(np.float64)
        if not np.allclose(rows, others, rtol=1e-5) or np.diag(rows, block.start).any():
            raise UserError("X is not symmetric with zeros on the diagonal; precomputed distances must be so")
        distances[block] = rows
    return distances


def _median(distances: Matrix) -> float:
    """Returns the median of all pairwise distances, or of the positive distances if it is 0."""
    if len(distances) < 2:
        return 0.0
    pairs = np.concatenate([row[i + 1 :] for i, row in enumerate(distances)])
    median = float(np.median(pairs, overwrite_input=True))
    if median == 0 and pairs.any():
        return float(np.median(pairs[pairs > 0]))
    return median


def _mean_distances(distances: Matrix, clusters: Clusters) -> Matrix:
    """Returns the left sides of Eq. (7), and of Eq. (8) on the diagonal.

    For clusters of one row this is `distances` itself, not a copy.
    """
    if len(clusters) == len(distances):
        return distances
    labels, sizes = _labels_from_clusters(clusters, len(distances)), _sizes(clusters)
    means_between = np.empty((len(clusters), len(clusters)), distances.dtype)
    for k, inside in enumerate(clusters):
        sums = sum((distances[inside[block]].sum(0, dtype=np.float64) for block in _blocks(len(inside))), np.zeros(1))
        means = np.bincount(labels, sums) / sizes / len(inside)
        means_between[k, k:] = means_between[k:, k] = means[k:]
    return means_between


def _sum_distances(distances: Matrix, some: Labels, others: Labels) -> float:
    blocks = (distances[np.ix_(some[block], others)] for block in _blocks(len(some)))
    return sum(float(block.sum(dtype=np.float64)) for block in blocks)


def _farthest_pair(distances: Matrix, inside: Labels, farthest_row: Labels) -> tuple[int, int]:
    """Returns the farthest pair of a cluster.

    `farthest_row`, the farthest row of each row, is updated where it is unknown or no longer a member of the cluster.
    """
    is_member = np.zeros(len(distances), bool)
    is_member[inside] = True
    stale = inside[(farthest_row[inside] < 0) | ~is_member[farthest_row[inside]]]
    for block in _blocks(len(stale)):
        farthest_row[stale[block]] = inside[distances[np.ix_(stale[block], inside)].argmax(1)]
    a = int(inside[distances[inside, farthest_row[inside]].argmax()])
    return a, int(farthest_row[a])


def _blocks(n: int) -> list[slice]:
    return [slice(start, min(start + _BLOCK, n)) for start in range(0, n, _BLOCK)]


def _clusters_from_labels(labels: Labels) -> Clusters:
    """Returns the rows of each cluster, in the order of their first rows."""
    numbered, old = number_by_first_appearance(labels)
    ends = np.cumsum(np.bincount(numbered, minlength=len(old)))[:-1]
    return np.split(np.argsort(numbered, kind="stable"), ends) if len(old) else []


def _labels_from_clusters(clusters: Clusters, n: int) -> Labels:
    labels = np.full(n, -1)
    for k, inside in enumerate(clusters):
        labels[inside] = k
    return labels


def _sizes(clusters: Clusters) -> Labels:
    return np.array([len(inside) for inside in clusters], np.int64)


def _unite(clusters: Clusters, merged_clusters: list[list[int]]) -> Clusters:
    return [np.sort(np.concatenate([clusters[k] for k in parts])) for parts in merged_clusters]
