"""RepClust: clusters of equal size, each as diverse as possible and all similar to each other.

Pereira, Famá, Kalalas, Dini, "Energy-efficient federated learning for AIoT using clustering methods" (2025),
Sec. III-B, Eq. (3) and Algorithm 1.

| paper | here |
|---|---|
| L clients, p_j | the rows of `X` |
| d, symmetrised KL | `symmetric_kl.symmetric_kl` |
| G, S | `n_clusters`, `top` (None: all clusters; the paper has no value of S) |
| C_g, p^(g) | the rows with `labels_ == g`, their mean |
| first and second objective of (3) | `within_`, `between_` |
| "diversity (3)" | J = first - second objective, in `history_` |
| i_g, j_g | the closest pair in C_g; i_g, which is swapped, is the first row of the pair in the shuffled order |

Rows are sorted by value and shuffled, so that neither randomness nor ties depend on the order of the rows. Without the
shuffle, ties would select the same kind of client in every cluster, and swapping equal clients has no effect.

Two rows are swapped if J rises. The second objective is summed over g < g' and divided by G(G-1), as printed, which is
half the mean. d consists of products, so its sum over all pairs of a set follows from three sums over the elements:
Σ_{a<b} d(a, b) = ½ (n Σ a·ln a - (Σ a)·(Σ ln a)). The cost of a swap is therefore O(M) for any size of the clusters.

Deviations from the paper
-------------------------
- After a swap the closest pairs of both clusters are found again at once, not only in the next sweep.
- If G does not divide L, sizes differ by one. A cluster of one row adds 0 to the first objective.
- `swaps="all"` tries every pair of rows of different clusters. Algorithm 1 works well for clusters that are not larger
  than the number of kinds of clients. In a larger cluster the closest pair may correctly be of one kind.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal, Self

import numpy as np
from numpy.typing import ArrayLike
from sklearn.base import BaseEstimator, ClusterMixin

from shoal.clusterers.symmetric_kl import FLOOR, symmetric_kl
from shoal.clusterers.validation import (
    Floats,
    Labels,
    RandomState,
    check_choice,
    check_fit_rows,
    check_table,
    check_whole_number,
    number_by_first_appearance,
    seed_from,
)
from shoal.errors import UserError
from shoal.rng import derive_seed

_MIN_RELATIVE_GAIN = 1e-12  # a smaller relative gain of J may be a rounding error
_WINDOW = 256  # partners whose gains are computed at once; only the first with a gain is used
_BLOCK = 256  # rows of a large cluster whose distances are computed at once


class RepulsiveClusters(ClusterMixin, BaseEstimator):
    """Clusters of equal size and mixed rows: rows are swapped between random clusters while diversity rises.

    Parameters
    ----------
    n_clusters : int, default=8
        Number of clusters. With more clusters than rows, each row is a cluster.
    random_state : int, RandomState or None, default=0
        Seed of the random clusters.
    swaps : {"closest", "all"}, default="closest"
        Which rows are swapped. "closest" is the paper's rule: one row of the closest pair of each cluster. "all" swaps
        each row in turn with its best partner until no swap of two rows raises diversity, with n_rows² / 2 candidates
        in a sweep.
    top : int, optional
        "closest" uses only this many clusters with the closest pairs, 2 or more. By default all.
    max_iter : int, default=1000
        Largest number of sweeps. About ten are needed.

    Attributes
    ----------
    labels_ : ndarray of shape (n_rows,)
        Cluster of each row, numbered by first appearance.
    within_ : float
        Mean divergence within clusters, the first objective.
    between_ : float
        Half the mean divergence between the clusters' means, the second objective.
    history_ : ndarray of shape (n_swaps + 1,)
        First minus second objective, at the start and after each swap.
    n_iter_ : int
        Number of sweeps.
    n_features_in_ : int
        Number of columns of `X`.

    References
    ----------
    Pereira, Famá, Kalalas, Dini, "Energy-efficient federated learning for AIoT using clustering methods",
    2025, Sec. III-B.

    Examples
    --------
    >>> from shoal.clusterers import RepulsiveClusters
    >>> RepulsiveClusters(n_clusters=2).fit_predict([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0], [0.0, 1.0]]).tolist()
    [0, 1, 1, 0]
    """

    labels_: Labels
    within_: float
    between_: float
    history_: Floats
    n_iter_: int

    def __init__(
        self,
        n_clusters: int = 8,
        *,
        random_state: RandomState = 0,
        swaps: Literal["closest", "all"] = "closest",
        top: int | None = None,
        max_iter: int = 1000,
    ) -> None:
        self.n_clusters = n_clusters
        self.random_state = random_state
        self.swaps = swaps
        self.top = top
        self.max_iter = max_iter

    def fit(self, X: ArrayLike, y: object = None) -> Self:
        """Find clusters by swapping rows until no swap raises diversity.

        Parameters
        ----------
        X : array-like of shape (n_rows, n_columns)
            Non-negative numbers, such as label distributions. They are not normalised. Entries below 1e-6 count as
            1e-6.
        y : None
            Ignored; present for compatibility with scikit-learn.

        Returns
        -------
        self : RepulsiveClusters
            The fitted estimator.

        Raises
        ------
        UserError
            If a parameter or `X` is not as described.
        """
        check_whole_number("n_clusters", self.n_clusters, 1)
        check_whole_number("max_iter", self.max_iter, 1)
        check_choice("swaps", self.swaps, ("closest", "all"))
        if self.top is not None:
            check_whole_number("top", self.top, 2)
        seed = seed_from(self.random_state)
        rows = check_fit_rows(self, X, non_negative=True)
        order = _shuffled_order(rows, seed)
        search = _Search(_ClusterSums(rows[order], np.arange(len(rows)) % self.n_clusters), self.top)  # line 1
        sweep = search.swap_closest if self.swaps == "closest" else search.swap_all
        self.n_iter_ = 1
        while sweep() and self.n_iter_ < self.max_iter:  # line 2
            self.n_iter_ += 1
        labels = np.empty(len(rows), np.int64)
        labels[order] = search.clusters.labels
        self.labels_, _ = number_by_first_appearance(labels)
        self.within_, self.between_ = search.clusters.within(), search.clusters.between()
        self.history_ = np.array(search.history)
        return self

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.positive_only = True
        return tags


def _shuffled_order(rows: Floats, seed: int) -> Labels:
    by_value = np.lexsort(rows.T[::-1])
    shuffled: Labels = np.random.default_rng(derive_seed(seed, "repulsive")).permutation(by_value)
    return shuffled


def objectives(X: ArrayLike, labels: ArrayLike) -> tuple[float, float]:
    """Return both objectives of Eq. (3) for a partition.

    Parameters
    ----------
    X : array-like of shape (n_rows, n_columns)
        Non-negative numbers, such as label distributions.
    labels : array-like of shape (n_rows,)
        Cluster of each row.

    Returns
    -------
    within : float
        Mean divergence within clusters.
    between : float
        Half the mean divergence between the clusters' means.

    Raises
    ------
    UserError
        If `X` or `labels` is not as described.

    References
    ----------
    Pereira, Famá, Kalalas, Dini, "Energy-efficient federated learning for AIoT using clustering methods", 2025,
    Eq. (3).
    """
    rows, row_labels = check_table(X, non_negative=True), np.asarray(labels)
    if row_labels.shape != (len(rows),):
        raise UserError(f"labels has shape {row_labels.shape}; it must be ({len(rows)},), one label for each row of X")
    clusters = _ClusterSums(rows, np.unique(row_labels, return_inverse=True)[1])
    return clusters.within(), clusters.between()


class _ClusterSums:
    """Clusters of rows, with the sums that determine Eq. (3) and its change in a swap."""

    def __init__(self, rows: Floats, labels: Labels) -> None:
        self.rows, self.labels = rows, labels
        self.floored = np.maximum(rows, FLOOR)
        self.logs = np.log(self.floored)
        self.self_products = _dot(self.floored, self.logs)
        self.sizes = np.bincount(labels)
        self.num_clusters = len(self.sizes)
        self.members = (
            np.split(np.argsort(labels, kind="stable"), np.cumsum(self.sizes)[:-1]) if self.num_clusters else []
        )
        num_pairs = self.sizes * (self.sizes - 1) / 2
        self.pair_weight = np.where(num_pairs > 0, 1 / np.maximum(num_pairs, 1), 0.0)  # in the mean of a cluster
        shape = (self.num_clusters, rows.shape[1])
        self.sums, self.log_sums, self.self_product_sums = np.empty(shape), np.empty(shape), np.empty(self.num_clusters)
        self.means, self.mean_logs = np.empty(shape), np.empty(shape)
        self._sum_up(range(self.num_clusters))

    def _sum_up(self, clusters: Iterable[int]) -> None:
        for g in clusters:
            inside = self.members[g]
            self.sums[g], self.log_sums[g] = self.floored[inside].sum(0), self.logs[inside].sum(0)
            self.self_product_sums[g], self.means[g] = self.self_products[inside].sum(), self.rows[inside].mean(0)
            self.mean_logs[g] = np.log(np.maximum(self.means[g], FLOOR))
        self.sum_of_means, self.sum_of_logs = np.maximum(self.means, FLOOR).sum(0), self.mean_logs.sum(0)

    def within(self) -> float:
        """Returns the first objective of Eq. (3)."""
        sums = np.maximum(0.5 * (self.sizes * self.self_product_sums - _dot(self.sums, self.log_sums)), 0.0)
        return float(self.pair_weight @ sums) / max(self.num_clusters, 1)

    def between(self) -> float:
        """Returns the second objective of Eq. (3)."""
        own = _dot(np.maximum(self.means, FLOOR), self.mean_logs).sum()
        over_pairs = 0.5 * (self.num_clusters * own - self.sum_of_means @ self.sum_of_logs)
        return max(float(over_pairs), 0.0) / max(self.num_clusters * (self.num_clusters - 1), 1)

    def gains(self, i: int, others: Labels) -> Floats:
        """Returns the gain of J if row i is swapped with each of some rows of other clusters."""
        return self._within_changes(i, others) - self._between_changes(i, others)

    def _within_changes(self, i: int, others: Labels) -> Floats:
        """Returns the change of the first objective for each swap."""
        k, other_clusters = self.labels[i], self.labels[others]
        p, log, own = (values[others] - values[i] for values in (self.floored, self.logs, self.self_products))
        both = _dot(p, log)
        in_own = self.sizes[k] * own - log @ self.sums[k] - p @ self.log_sums[k] - both
        in_other = -self.sizes[other_clusters] * own + _dot(log, self.sums[other_clusters])
        in_other = in_other + _dot(p, self.log_sums[other_clusters]) - both
        weighted = self.pair_weight[k] * in_own + self.pair_weight[other_clusters] * in_other
        change: Floats = 0.5 * weighted / self.num_clusters
        return change

    def _between_changes(self, i: int, others: Labels) -> Floats:
        """Returns the change of the second objective for each swap."""
        k, other_clusters = self.labels[i], self.labels[others]
        difference = self.rows[others] - self.rows[i]
        in_own = self._mean_changes(self.labels[[i]], difference / self.sizes[k])
        in_other = self._mean_changes(other_clusters, -difference / self.sizes[other_clusters][:, None])
        own, mean, log = (a + b for a, b in zip(in_own, in_other, strict=True))
        over_pairs = self.num_clusters * own - mean @ self.sum_of_logs - log @ self.sum_of_means - _dot(mean, log)
        change: Floats = 0.5 * over_pairs / (self.num_clusters * (self.num_clusters - 1))
        return change

    def _mean_changes(self, clusters: Labels, change: Floats) -> tuple[Floats, Floats, Floats]:
        """Returns the changes of p·ln p, p and ln p for the means p of the clusters."""
        before, log_before = np.maximum(self.means[clusters], FLOOR), self.mean_logs[clusters]
        after = np.maximum(self.means[clusters] + change, FLOOR)
        log_after = np.log(after)
        return _dot(after, log_after) - _dot(before, log_before), after - before, log_after - log_before

    def swap(self, i: int, j: int) -> None:
        """Swaps rows i and j, which are in different clusters."""
        p, q = self.labels[[i, j]]
        self.members[p] = np.sort(np.where(self.members[p] == i, j, self.members[p]))
        self.members[q] = np.sort(np.where(self.members[q] == j, i, self.members[q]))
        self.labels[[i, j]] = q, p
        self._sum_up((p, q))

    def closest_pair(self, g: int) -> tuple[int, float]:
        """Returns i_g and its distance to j_g (line 5). A cluster of one row has no pair and is swapped last."""
        inside = self.members[g]
        rows = self.rows[inside]
        first, smallest = inside[0], np.inf
        for start in range(0, len(inside), _BLOCK):
            block = symmetric_kl(rows[start : start + _BLOCK], rows)
            block[np.tri(len(block), len(rows), start, dtype=bool)] = np.inf  # each pair once
            if block.min() < smallest:
                first, smallest = inside[start + block.argmin() // len(inside)], block.min()
        return int(first), float(smallest)


class _Search:
    """Hill climbing on J by swaps."""

    def __init__(self, clusters: _ClusterSums, top: int | None) -> None:
        self.clusters, self.top = clusters, top
        self.history = [clusters.within() - clusters.between()]

    def swap_closest(self) -> bool:
        """Does lines 3 to 16 of Algorithm 1 and returns True if rows were swapped."""
        previous_length = len(self.history)
        pairs = [self.clusters.closest_pair(g) for g in range(self.clusters.num_clusters)]
        candidates = np.array([i for i, _ in pairs], np.int64)
        order = np.argsort([distance for _, distance in pairs], kind="stable")[: self.top]  # line 8
        for position, k in enumerate(order):
            start = position + 1
            while start < len(order):
                partners = order[start : start + _WINDOW]
                gains = self.clusters.gains(candidates[k], candidates[partners])
                first = int((gains > self._min_gain()).argmax())
                if not self._swap_if_better(candidates[k], candidates[partners[first]], gains[first]):
                    start += _WINDOW
                    continue
                for g in (k, partners[first]):
                    candidates[g], _ = self.clusters.closest_pair(g)
                start += first + 1
        return len(self.history) > previous_length

    def swap_all(self) -> bool:
        """Swaps each row in turn with its best partner and returns True if rows were swapped."""
        previous_length = len(self.history)
        for i in range(len(self.clusters.labels) - 1):
            others = i + 1 + np.flatnonzero(self.clusters.labels[i + 1 :] != self.clusters.labels[i])
            if len(others):
                gains = self.clusters.gains(i, others)
                best = gains.argmax()
                self._swap_if_better(i, others[best], gains[best])
        return len(self.history) > previous_length

    def _min_gain(self) -> float:
        return _MIN_RELATIVE_GAIN * max(1.0, abs(self.history[-1]))

    def _swap_if_better(self, i: int, j: int, gain: float) -> bool:
        """Swaps two rows if J rises (lines 12 and 13 of Algorithm 1), and returns True in this case."""
        if gain <= self._min_gain():
            return False
        self.clusters.swap(i, j)
        self.history.append(self.history[-1] + float(gain))
        return True


def _dot(a: Floats, b: Floats) -> Floats:
    """Returns the products of the rows of two tables, row by row."""
    products: Floats = np.einsum("nm,nm->n", a, b)
    return products
