from itertools import combinations
from math import e, exp, log, log10, sqrt

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.cluster.hierarchy import fcluster, linkage
from scipy.spatial.distance import squareform
from sklearn.cluster import DBSCAN
from sklearn.exceptions import NotFittedError
from sklearn.metrics import adjusted_rand_score

from shoal.clusterers import AdaptiveDensityClusters, density
from shoal.clusterers.density import (
    dense_clusters,
    local_density,
    merge_clusters,
    printed_min_neighbours,
    printed_radius,
    relative_entropy,
    split_clusters,
)
from shoal.clusterers.jensen_shannon import modified_js, paired_modified_js, pairwise_modified_js
from shoal.errors import UserError


def random_rows(rows, channels=6, seed=0):
    return np.random.default_rng(seed).random((rows, channels))


def planted_rows(rows=30, groups=3, channels=8, noise=0.02, seed=0):
    """Returns rows in planted groups far apart, with row i in group i % groups, and the groups."""
    rng = np.random.default_rng(seed)
    centres = rng.random((groups, channels)) * 0.9
    planted = np.arange(rows) % groups
    return np.clip(centres[planted] + rng.normal(0, noise, (rows, channels)), 0, 1), planted


def definition(s, t, gamma):
    """Eq. (3), term by term."""

    def js(p, q):
        pairs = zip(p, q, strict=True)
        return 0.5 * sum(x * log(2 * x / (a + b)) for a, b in pairs for x in (a, b) if x > 0)

    sums = [sum(row) or 1 for row in (s, t)]
    return js([x / sums[0] for x in s], [x / sums[1] for x in t]) + gamma * js(s, t)


def random_matrix(n, seed=0, levels=None):
    """Returns symmetric distances that are no metric; with levels there are many ties."""
    rng = np.random.default_rng(seed)
    values = rng.random(n * (n - 1) // 2) if levels is None else rng.integers(0, levels, n * (n - 1) // 2) / levels
    return squareform(values)


def w(distances, inside):
    return distances[np.ix_(inside, inside)].mean()


def b(distances, one, other):
    return distances[np.ix_(one, other)].mean()


def means_between(distances, clusters):
    means = np.array([[b(distances, one, other) for other in clusters] for one in clusters])
    return (means + means.T) / 2


def naive_split(distances, inside, threshold):
    if w(distances, inside) <= threshold:
        return [inside]
    first, second = max(combinations(inside, 2), key=lambda pair: distances[pair])
    near = [i for i in inside if distances[i, first] <= distances[i, second]]
    far = [i for i in inside if i not in near]
    return naive_split(distances, near, threshold) + naive_split(distances, far, threshold)


def naive_merge(distances, clusters, threshold):
    clusters = [list(c) for c in clusters]
    while len(clusters) > 1:
        one, other = min(combinations(clusters, 2), key=lambda pair: b(distances, *pair))
        if b(distances, one, other) >= threshold:
            break
        clusters = [c for c in clusters if c not in (one, other)] + [one + other]
    return clusters


def partition(clusters):
    return sorted(sorted(int(i) for i in c) for c in clusters)


def partition_of(labels):
    return partition(np.flatnonzero(labels == k) for k in np.unique(labels))


def clusters_as_values(rows, labels):
    return sorted(sorted(map(tuple, rows[labels == g].tolist())) for g in np.unique(labels))


def is_fixed_point(distances, labels, merge, split):
    clusters = partition_of(labels)
    tight = all(w(distances, c) <= split + 1e-9 for c in clusters)
    return tight and all(b(distances, *pair) >= merge - 1e-9 for pair in combinations(clusters, 2))


class TestModifiedJensenShannon:
    def test_by_hand(self):
        # (1, 0) and (½, ½): both parts are ½ (ln 4/3 + ½ ln 2/3 + ½ ln 2) = ½ ln(4/3 · √(4/3)) = ¾ ln 4/3
        divergences = modified_js(np.array([[1.0, 0.0]]), np.array([[0.5, 0.5], [1.0, 0.0]]), gamma=2.0)
        assert divergences[0].tolist() == pytest.approx([3 * 0.75 * log(4 / 3), 0.0])

    @pytest.mark.parametrize("gamma", [0.0, 1.0, 3.5])
    @pytest.mark.parametrize(
        "rows",
        [random_rows(7), random_rows(7).round(), np.eye(4), np.zeros((3, 2))],
        ids=["drawn", "bits", "unit", "zeros"],
    )
    def test_agrees_with_the_definition(self, rows, gamma):
        expected = [[definition(s, t, gamma) for t in rows] for s in rows]
        np.testing.assert_allclose(modified_js(rows, rows, gamma), expected, atol=1e-12)
        np.testing.assert_allclose(pairwise_modified_js(rows, gamma), expected, atol=1e-12)
        np.testing.assert_allclose(paired_modified_js(rows, rows[::-1], gamma), np.diag(expected[::-1]), atol=1e-12)

    def test_the_normalised_part_between_zeros_and_any_other_row_is_half_of_ln_2(self):
        # ½ Σ q ln 2q/q = ½ ln 2
        divergences = modified_js(np.zeros((1, 3)), np.array([[0.1, 0.2, 0.3], [0, 0, 0]]), gamma=0.0)
        assert divergences[0].tolist() == pytest.approx([log(2) / 2, 0])

    @pytest.mark.parametrize("dtype", [np.float32, np.float64])
    def test_distances_of_equal_rows_are_exactly_0_and_others_are_symmetric(self, dtype):
        rows = np.repeat(random_rows(30), 2, axis=0)
        d = pairwise_modified_js(rows, 1.0, dtype)
        assert d.dtype == dtype
        assert (d[::2, 1::2].diagonal() == 0).all() and (d.diagonal() == 0).all()
        assert (d == d.T).all() and (d >= 0).all()

    def test_single_precision_is_enough_for_similar_rows(self):
        rows = np.clip(random_rows(1, 64) + np.random.default_rng(1).normal(0, 0.01, (40, 64)), 0, 1)
        double, single = (pairwise_modified_js(rows, 1.0, t) for t in (np.float64, np.float32))
        off = ~np.eye(40, dtype=bool)
        assert np.median(double[off]) < 0.02
        assert (np.abs(double - single)[off] / double[off]).max() < 1e-3

    def test_tiles_change_nothing(self, monkeypatch):
        rows = random_rows(23)
        pairwise, across = pairwise_modified_js(rows), modified_js(rows[:9], rows[9:])
        monkeypatch.setattr("shoal.clusterers.jensen_shannon._TILE", 4)
        assert (pairwise_modified_js(rows) == pairwise).all()
        assert (modified_js(rows[:9], rows[9:]) == across).all()


class TestLocalDensity:
    def test_by_hand(self):
        # distances 1 and 3 from the first client: k = 2, ε = (2 + 1) / √log10 3; 3 clients, MinPts = 3/(1 + 1/e) = 2.19
        d = np.array([[0, 1, 3], [1, 0, 2], [3, 2, 0.0]])
        radius, least = local_density(d, np.ones(3))
        assert radius[0] == pytest.approx(3 / sqrt(log10(3)))
        assert radius[1] == pytest.approx((1.5 + 0.5) / sqrt(log10(3)))
        assert least.tolist() == [2, 2, 2]
        assert 3 / (1 + exp(-1)) == pytest.approx(2.19, abs=5e-3)

    def test_a_single_neighbour(self):
        # k = 1: ε = distance / √log10 2, at least 2 are needed
        d = np.array([[0, 1, 3], [1, 0, 2], [3, 2, 0.0]])
        radius, least = local_density(d, np.ones(3), n_neighbors=1)
        assert radius.tolist() == pytest.approx([x / sqrt(log10(2)) for x in (1, 1, 2)])
        assert least.tolist() == [2, 2, 2]

    def test_the_number_of_neighbours_follows_the_entropy_of_the_neighbourhood(self):
        # 100 clients, k = 10: 11/(1 + 1) = 5.5, to the even 6, without entropy; 11/(1 + 1/e) = 8.04 at the largest
        d = random_matrix(100)
        assert set(local_density(d, np.zeros(100))[1]) == {6}
        assert set(local_density(d, np.ones(100))[1]) == {8}
        assert set(local_density(d, np.ones(100), eta=50.0)[1]) == {11}

    def test_the_neighbourhood_includes_the_row_itself(self):
        # the mean over 11 clients is 1/11 if one of them has entropy 1: 11/(1 + exp(-50/11)) = 10.9, else 5.5
        alone = np.zeros(100)
        alone[0] = 1
        _, least = local_density(random_matrix(100), alone, eta=50.0)
        assert least[0] == 11
        assert set(least) == {6, 11}

    def test_entropy_is_relative(self):
        rows = np.array([[0.3, 0.3, 0.3], [0.2, 0, 0], [0, 0, 0], [0.4, 0.4, 0]])
        assert relative_entropy(rows).tolist() == pytest.approx([1, 0, 0, log(2) / log(3)])
        assert relative_entropy(np.array([[0.4]])).tolist() == [0]

    def test_blocks_change_nothing(self, monkeypatch):
        d, entropies = random_matrix(40), random_rows(40, 1)[:, 0]
        expected = local_density(d, entropies)
        monkeypatch.setattr(density, "_BLOCK", 7)
        for one, other in zip(expected, local_density(d, entropies), strict=True):
            assert one.tolist() == other.tolist()


class TestDenseClusters:
    @pytest.mark.parametrize("least", [2, 4, 8])
    @pytest.mark.parametrize("radius", [0.02, 0.1, 0.4])
    def test_agrees_with_dbscan_where_all_rows_have_one_radius(self, radius, least):
        d = pairwise_modified_js(random_rows(60, 2))
        labels = dense_clusters(d, np.full(60, radius), np.full(60, least))
        peer = DBSCAN(eps=radius, min_samples=least, metric="precomputed").fit(d)
        core = peer.core_sample_indices_
        assert (labels < 0).tolist() == (peer.labels_ < 0).tolist()
        assert partition_of(labels[core]) == partition_of(peer.labels_[core])

    def test_two_core_rows_are_in_one_cluster_if_each_reaches_the_other(self):
        # on a line at 0, 1, 4, 5: 1 and 4 are cores; 1 reaches 4 with radius 3.5, 4 reaches only 5 with 1.5
        at = np.array([0.0, 1, 4, 5])
        d = abs(at[:, None] - at)
        radius, least = np.array([1.5, 3.5, 1.5, 1.5]), np.array([3, 3, 2, 3])
        assert dense_clusters(d, radius, least).tolist() == [0, 0, 1, 1]
        assert dense_clusters(d[::-1, ::-1], radius[::-1], least[::-1]).tolist() == [0, 0, 1, 1]
        radius[2] = 3.5
        assert dense_clusters(d, radius, least).tolist() == [0, 0, 0, 0]

    def test_a_row_far_from_all_others_does_not_connect_them(self):
        # 50 has the largest radius and reaches all rows, but no row reaches it
        at = np.array([0.0, 1, 2, 20, 21, 22, 50])
        labels = dense_clusters(abs(at[:, None] - at), np.array([3.0] * 6 + [60]), np.full(7, 3))
        assert labels.tolist() == [0, 0, 0, 1, 1, 1, 2]

    def test_other_rows_join_the_nearest_core_row_if_each_reaches_the_other(self):
        # 0 and 10 are core rows, all others need more neighbours than there are; 4 is nearer to 0. 20 reaches 10, but
        # 10 does not reach 20.
        at = np.array([10.0, 11, 9, 4, 0, 1, -1, 20])
        radius, least = np.array([7.0] * 7 + [30]), np.array([4, 9, 9, 9, 4, 9, 9, 9])
        labels = dense_clusters(abs(at[:, None] - at), radius, least)
        assert labels.tolist() == [0, 0, 0, 1, 1, 1, 1, -1]

    def test_with_a_radius_of_0_only_the_row_itself_counts(self):
        d = np.zeros((3, 3))
        assert dense_clusters(d, np.zeros(3), np.full(3, 2)).tolist() == [-1, -1, -1]
        assert sorted(dense_clusters(d, np.zeros(3), np.full(3, 1)).tolist()) == [0, 1, 2]


class TestSplit:
    @pytest.mark.parametrize("threshold", [0.0, 0.1, 0.3, 0.45])
    @pytest.mark.parametrize("seed", range(4))
    def test_agrees_with_the_naive_algorithm(self, seed, threshold):
        for d in (random_matrix(16, seed), random_matrix(16, seed, levels=4)):
            expected = naive_split(d, list(range(16)), threshold)
            assert partition(split_clusters(d, [np.arange(16)], threshold)) == partition(expected)

    def test_ties_go_to_the_first(self):
        # all rows are 1 apart: 3 of 4 stay with the first, w = 2/3, then 2 of 3, w = 1/2
        d = 1 - np.eye(4)
        assert partition(split_clusters(d, [np.arange(4)], 0.7)) == [[0, 2, 3], [1]]
        assert partition(split_clusters(d, [np.arange(4)], 0.6)) == [[0, 3], [1], [2]]

    def test_equal_rows_are_never_separated(self):
        d = pairwise_modified_js(np.repeat(random_rows(5), 3, axis=0))
        parts = split_clusters(d, [np.arange(15)], 0.0)
        assert partition(parts) == [[3 * k, 3 * k + 1, 3 * k + 2] for k in range(5)]

    def test_blocks_change_nothing(self, monkeypatch):
        d = random_matrix(40)
        expected = partition(split_clusters(d, [np.arange(40)], 0.3))
        monkeypatch.setattr(density, "_BLOCK", 3)
        assert partition(split_clusters(d, [np.arange(40)], 0.3)) == expected


class TestMerge:
    @staticmethod
    def merged(d, clusters, threshold):
        means = means_between(d, clusters)
        groups, between = merge_clusters(means, np.array([len(c) for c in clusters]), threshold)
        return [np.concatenate([clusters[k] for k in group]) for group in groups], between

    @pytest.mark.parametrize("threshold", [0.1, 0.3, 0.45, 2.0])
    @pytest.mark.parametrize("seed", range(4))
    def test_clusters_and_means_agree_with_the_naive_algorithm(self, seed, threshold):
        d = random_matrix(20, seed)
        start = [[0, 1, 2, 3], [4, 5], [6, 7, 8], *([i] for i in range(9, 20))]
        clusters, between = self.merged(d, start, threshold)
        assert partition(clusters) == partition(naive_merge(d, start, threshold))
        np.testing.assert_allclose(between, means_between(d, clusters), atol=1e-12)

    @pytest.mark.parametrize("seed", range(4))
    def test_agrees_with_average_linkage_cut_below_the_threshold(self, seed):
        d = pairwise_modified_js(random_rows(50, seed=seed))
        for threshold in (0.05, 0.1, 0.2):
            peer = fcluster(linkage(squareform(d), "average"), np.nextafter(threshold, 0), "distance")
            assert partition(self.merged(d, [[i] for i in range(50)], threshold)[0]) == partition_of(peer)

    def test_initial_clusters_count_as_rows_at_distance_0(self):
        """Average linkage of all rows, at distance 0 within a cluster and b between clusters, gives the same."""
        d = pairwise_modified_js(random_rows(30))
        start = [list(range(k, 30, 11)) for k in range(11)]
        cluster_of_row = np.empty(30, int)
        for k, inside in enumerate(start):
            cluster_of_row[inside] = k
        means = means_between(d, start) * (1 - np.eye(11))
        threshold = np.median(squareform(means))
        row_means = squareform(means[np.ix_(cluster_of_row, cluster_of_row)])
        peer = fcluster(linkage(row_means, "average"), threshold, "distance")
        assert partition(self.merged(d, start, threshold)[0]) == partition_of(peer)
        assert 1 < peer.max() < 11

    def test_the_threshold_is_exclusive(self):
        d = 1 - np.eye(3)
        assert len(self.merged(d, [[0], [1], [2]], 1.0)[0]) == 3
        assert len(self.merged(d, [[0], [1], [2]], np.nextafter(1, 2))[0]) == 1

    def test_only_changed_clusters_are_merged(self):
        # pairs {0, 1} and {2, 3} both are near; started from 3, the first pair is not looked at
        at = np.array([0.0, 1, 10, 11])
        groups, between = merge_clusters(abs(at[:, None] - at), np.ones(4, int), 2.0, changed_clusters=[3])
        assert partition(groups) == [[0], [1], [2, 3]]
        assert sorted(between[between > 0].tolist()) == [0.5, 1, 1, 9.5, 9.5, 10.5, 10.5]


ROWS = {"drawn": random_rows(23), "groups": planted_rows()[0], "ties": random_rows(12).round()}
VARIANTS = {
    "default": {},
    "mean": {"scale": "mean"},
    "unscaled": {"scale": "none", "merge": 0.05, "split": 0.06},
    "no small": {"min_cluster_size": 4},
    "references": {"n_references": 9},
    "as published": {"as_published": True, "scale": "none", "merge": 0.05, "split": 0.06},
}


@pytest.mark.parametrize("options", VARIANTS.values(), ids=VARIANTS)
class TestEveryVariant:
    @pytest.mark.parametrize("rows", ROWS.values(), ids=ROWS)
    def test_partition_does_not_depend_on_the_order(self, options, rows):
        expected = clusters_as_values(rows, AdaptiveDensityClusters(**options).fit(rows).labels_)
        for seed in range(3):
            shuffled = np.random.default_rng(seed).permutation(rows)
            labels = AdaptiveDensityClusters(**options).fit(shuffled).labels_
            assert clusters_as_values(shuffled, labels) == expected

    def test_labels_are_numbered_by_first_appearance_and_reproducible(self, options):
        labels = AdaptiveDensityClusters(**options).fit(random_rows(40)).labels_
        _, first = np.unique(labels, return_index=True)
        assert labels[np.sort(first)].tolist() == list(range(labels.max() + 1))
        assert AdaptiveDensityClusters(**options).fit(random_rows(40)).labels_.tolist() == labels.tolist()

    def test_single(self, options):
        fitted = AdaptiveDensityClusters(**options).fit(random_rows(1))
        assert fitted.labels_.tolist() == [0]
        assert fitted.predict(random_rows(3)).tolist() == [0, 0, 0]

    @pytest.mark.parametrize("row", [np.zeros(4), np.ones(4), np.array([0.3]), np.array([0.0, 0, 1])])
    def test_equal_rows_are_one_cluster(self, options, row):
        assert set(AdaptiveDensityClusters(**options).fit(np.tile(row, (12, 1))).labels_) == {0}

    @pytest.mark.parametrize("rows", [np.repeat([[0.0] * 5, [1.0] * 5], 10, axis=0), np.eye(5)[np.arange(30) % 3]])
    def test_zeros_and_ones(self, options, rows):
        labels = AdaptiveDensityClusters(**options).fit(rows).labels_
        expected = np.unique(rows, axis=0, return_inverse=True)[1]
        assert clusters_as_values(rows, labels) == clusters_as_values(rows, expected)

    def test_input_unmodified_and_any_sequence(self, options):
        rows = random_rows(20)
        original = rows.copy()
        labels = AdaptiveDensityClusters(**options).fit(rows).labels_
        assert (rows == original).all()
        assert AdaptiveDensityClusters(**options).fit(rows.tolist()).labels_.tolist() == labels.tolist()

    def test_groups_far_apart_are_found_and_new_rows_join_them(self, options):
        rows, planted = planted_rows(60)
        fitted = AdaptiveDensityClusters(**options).fit(rows)
        assert fitted.labels_.tolist() == planted.tolist()
        assert fitted.predict(rows).tolist() == planted.tolist()
        assert fitted.converged_

    def test_one_row_more_than_a_block(self, options, monkeypatch):
        rows = planted_rows(61)[0]
        expected = AdaptiveDensityClusters(**options).fit(rows)
        monkeypatch.setattr(density, "_BLOCK", 20)
        fitted = AdaptiveDensityClusters(**options).fit(rows)
        assert fitted.labels_.tolist() == expected.labels_.tolist()
        assert fitted.predict(rows).tolist() == expected.predict(rows).tolist()


class TestFit:
    @pytest.mark.parametrize("seed", range(5))
    def test_agrees_with_the_naive_algorithm(self, seed):
        rows = random_rows(30, 3, seed)
        fitted = AdaptiveDensityClusters(min_cluster_size=1).fit(rows)
        d = pairwise_modified_js(rows)
        d /= np.median(squareform(d))
        assert fitted.distances_scale_ == pytest.approx(np.median(squareform(pairwise_modified_js(rows))))
        labels = dense_clusters(d, *local_density(d, relative_entropy(rows)))
        start = [*partition_of(labels[labels >= 0])] if (labels >= 0).any() else []
        start = [list(np.flatnonzero(labels >= 0)[c]) for c in start] + [[i] for i in np.flatnonzero(labels < 0)]
        parts = [part for c in start for part in naive_split(d, c, 0.36)]
        expected = naive_merge(d, parts, 0.30)
        assert partition_of(fitted.labels_) == partition(expected)
        assert (fitted.n_splits_, fitted.n_merges_) == (len(parts) - len(start), len(parts) - len(expected))
        assert is_fixed_point(d, fitted.labels_, 0.30, 0.36)

    def test_some_of_these_fits_have_both_splits_and_merges(self):
        fits = [AdaptiveDensityClusters(min_cluster_size=1).fit(random_rows(30, 3, seed)) for seed in range(5)]
        assert any(f.n_splits_ and f.n_merges_ for f in fits)

    @settings(max_examples=60, deadline=None)
    @given(
        st.integers(2, 14),
        st.integers(0, 10**6),
        st.sampled_from([None, 2, 3, 10]),
        st.tuples(st.sampled_from([0.0, 0.2, 0.5, 0.9]), st.sampled_from([0.0, 0.2, 0.5, 0.9])),
        st.sampled_from(["none", "mean", "median"]),
    )
    def test_ends_at_a_fixed_point_for_any_distances(self, n, seed, levels, thresholds, scale):
        d = random_matrix(n, seed, levels)
        merge, split = sorted(thresholds)
        fitted = AdaptiveDensityClusters(merge, split, scale=scale, metric="precomputed", min_cluster_size=1).fit(d)
        assert fitted.n_splits_ < n and fitted.n_merges_ < n
        assert is_fixed_point(d / fitted.distances_scale_, fitted.labels_before_joining_, merge, split)

    def test_precomputed_is_scale_free_unmodified_and_keeps_single_precision(self):
        rows, planted = planted_rows(60)
        d = pairwise_modified_js(rows)
        original = d.copy()
        for given_d in (d, 7.3 * d, d.astype(np.float32), d.tolist()):
            fitted = AdaptiveDensityClusters(metric="precomputed").fit(given_d)
            assert fitted.labels_.tolist() == planted.tolist()
        assert (d == original).all()
        assert fitted.predict(d[::3]).tolist() == planted[::3].tolist()
        fitted = AdaptiveDensityClusters(metric="precomputed", n_references=20).fit(d)
        assert fitted.labels_.tolist() == planted.tolist()

    def test_random_distances_are_scale_free(self):
        d = random_matrix(30)
        for scale in ("median", "mean"):
            fits = [AdaptiveDensityClusters(scale=scale, metric="precomputed").fit(x * d) for x in (1, 1024)]
            assert fits[0].labels_.tolist() == fits[1].labels_.tolist()
            assert fits[1].distances_scale_ == 1024 * fits[0].distances_scale_

    def test_a_median_of_0_is_replaced_by_the_median_of_positive_distances(self):
        # nine equal rows and another one: 36 of 45 distances are 0
        rows = np.array([[0.2, 0.8]] * 9 + [[0.8, 0.2]])
        fitted = AdaptiveDensityClusters(min_cluster_size=1).fit(rows)
        assert fitted.distances_scale_ == pytest.approx(definition(*rows[-2:], 1.0))
        assert fitted.labels_.tolist() == [0] * 9 + [1]

    def test_small_clusters_join_the_nearest_cluster_that_is_large_enough(self):
        # on a line in units of MJS: {0, .1, .2}, {5, 5.1}, {7} alone and nearer to the pair
        at = np.array([0.0, 0.1, 0.2, 5, 5.1, 7])
        d = abs(at[:, None] - at)

        def fitted(size):
            clusterer = AdaptiveDensityClusters(0.5, 0.5, scale="none", metric="precomputed", min_cluster_size=size)
            return clusterer.fit(d)

        assert fitted(1).labels_.tolist() == [0, 0, 0, 1, 1, 2]
        assert fitted(2).labels_.tolist() == [0, 0, 0, 1, 1, 1]
        assert fitted(3).labels_.tolist() == [0, 0, 0, 0, 0, 0]
        assert fitted(4).labels_.tolist() == [0, 0, 0, 1, 1, 2]
        assert fitted(3).labels_before_joining_.tolist() == [0, 0, 0, 1, 1, 2]

    def test_single_precision_finds_the_same(self, monkeypatch):
        rows = planted_rows(60, 5, noise=0.05)[0]
        expected = AdaptiveDensityClusters().fit(rows)
        monkeypatch.setattr(density, "_MAX_DOUBLE_ROWS", 0)
        fitted = AdaptiveDensityClusters().fit(rows)
        assert fitted._cluster_distances.dtype == np.float32
        assert fitted.labels_.tolist() == expected.labels_.tolist()

    def test_more_neighbours_than_rows(self):
        labels = [AdaptiveDensityClusters(n_neighbors=k).fit(random_rows(8)).labels_.tolist() for k in (7, 99)]
        assert labels[0] == labels[1]

    @pytest.mark.parametrize(
        ("bad", "sentence"),
        [
            ({"merge": 0.4}, "merge is 0.4 and split is 0.36; merge must not be larger"),
            ({"merge": -1}, "merge is -1; it must be a finite number, 0 or more"),
            ({"split": "x"}, "split is 'x'; it must be a finite number, 0 or more"),
            ({"gamma": float("nan")}, "gamma is nan; it must be a finite number, 0 or more"),
            ({"eta": True}, "eta is True; it must be a finite number, 0 or more"),
            ({"noise_guard_ratio": None}, "noise_guard_ratio is None; it must be a finite number, 0 or more"),
            ({"n_neighbors": 0}, "n_neighbors is 0; it must be a whole number, 1 or more"),
            ({"n_references": 2.5}, "n_references is 2.5; it must be a whole number, 1 or more"),
            ({"min_cluster_size": 0}, "min_cluster_size is 0; it must be a whole number, 1 or more"),
            ({"max_iter": 0}, "max_iter is 0; it must be a whole number, 1 or more"),
            ({"random_state": -1}, "random_state is -1; it must be a whole number, 0 or more"),
            ({"scale": "max"}, "scale is 'max'; it must be one of median, mean, none"),
            ({"metric": "euclid"}, "metric is 'euclid'; it must be one of mjs, precomputed"),
            (
                {"as_published": True, "metric": "precomputed"},
                "as_published is True; it must be False with precomputed",
            ),
        ],
    )
    def test_bad_parameters(self, bad, sentence):
        with pytest.raises(UserError, match=f"^{sentence}"):
            AdaptiveDensityClusters(**bad).fit(random_rows(5))

    @pytest.mark.parametrize(
        ("rows", "sentence"),
        [
            ([[0.5, -0.5]], r"X has -0.5 in row 0, column 1; entries must be 0 or more"),
            ([0.5, 0.5], r"X has shape \(2,\); it must have two axes, rows and columns"),
            (np.empty((0, 4)), r"X has 0 sample\(s\) \(shape=\(0, 4\)\) while a minimum of 1 is required"),
        ],
    )
    def test_bad_rows(self, rows, sentence):
        with pytest.raises(UserError, match=sentence):
            AdaptiveDensityClusters().fit(rows)

    @pytest.mark.parametrize(
        ("distances", "sentence"),
        [
            (np.zeros((2, 3)), r"X has shape \(2, 3\); precomputed distances must be a square"),
            ([[0, 1], [2, 0]], "X is not symmetric with zeros on the diagonal"),
            ([[1, 1], [1, 0]], "X is not symmetric with zeros on the diagonal"),
            ([[0, -1], [-1, 0]], "X has -1.0 in row 0, column 1"),
        ],
    )
    def test_bad_distances(self, distances, sentence):
        with pytest.raises(UserError, match=sentence):
            AdaptiveDensityClusters(metric="precomputed").fit(distances)


class TestAsPublished:
    def test_entries_must_be_fractions(self):
        assert AdaptiveDensityClusters().fit([[0.5, 1.5], [0.5, 3.0]]).labels_.shape == (2,)
        sentence = r"^X has 1.5 in row 0, column 1; entries must be 1 or less if as_published is True"
        with pytest.raises(UserError, match=sentence):
            AdaptiveDensityClusters(as_published=True).fit([[0.5, 1.5], [0.5, 3.0]])

    def test_printed_radius_and_least_number_by_hand(self):
        # rows (0, 1) and (0, 1): μ = σ = ½, so ε = 1 / √ln 2; zero entropy: 2 / (1 + 1) = 1
        rows = np.array([[0.0, 1], [0, 1]])
        assert printed_radius(rows) == pytest.approx(1 / sqrt(log(2)))
        assert printed_min_neighbours(rows) == 1
        # three rows of 1/e: entropy 3/e, 3 / (1 + exp(-3/e)) = 2.25, rounded up
        assert printed_min_neighbours(np.full((3, 1), 1 / e)) == 3
        assert 3 / (1 + exp(-3 / e)) == pytest.approx(2.25, abs=5e-3)

    def test_merged_clusters_may_be_split_for_ever(self):
        # ten unit vectors are 2 ln 2 = d apart; merged for b = d < 0.15/0.14 d, split for w = 0.9 d > 0.12/0.14 d
        d = 2 * log(2)
        loops = AdaptiveDensityClusters(0.15 / 0.14 * d, 0.12 / 0.14 * d, scale="none", as_published=True, max_iter=7)
        loops.fit(np.eye(10))
        assert (loops.converged_, loops.n_iter_) == (False, 7)
        assert loops.n_merges_ > 9
        assert loops.n_splits_ > 7
        ends = AdaptiveDensityClusters(0.15 / 0.14 * d, 0.18 / 0.14 * d, scale="none", as_published=True).fit(
            np.eye(10)
        )
        assert (ends.converged_, ends.n_iter_, ends.n_merges_, ends.n_splits_) == (True, 1, 9, 0)

    def test_ends_where_neither_equation_holds(self):
        rows = planted_rows(40, 4, noise=0.1)[0]
        fitted = AdaptiveDensityClusters(0.05, 0.06, scale="none", as_published=True, min_cluster_size=1).fit(rows)
        assert fitted.converged_
        assert is_fixed_point(pairwise_modified_js(rows), fitted.labels_, 0.05, 0.06)


class TestGuard:
    def test_ratio_by_hand(self):
        # one channel, gamma 1: MJS(x, y) is Eq. (4) alone
        rows, one, other = ([[0.2], [0.4], [0.8]], [[0.1], [0.4], [0.8]], [[0.3], [0.4], [0.8]])
        between = np.mean([definition(s, t, 1.0) for s, t in combinations(rows, 2)])
        halves = definition([0.1], [0.3], 1.0) / 3
        fitted = AdaptiveDensityClusters(noise_guard_ratio=0).fit(rows, halves=(one, other))
        assert fitted.noise_ratio_ == pytest.approx(between / (halves / 2))
        assert not fitted.is_guarded_

    def test_below_the_guard_ratio_there_is_one_cluster(self):
        rows, _ = planted_rows(60)
        halves = rows * 0.9, np.minimum(rows * 1.1, 1)
        ratio = AdaptiveDensityClusters().fit(rows, halves=halves).noise_ratio_
        fitted = AdaptiveDensityClusters(noise_guard_ratio=ratio + 1e-9).fit(rows, halves=halves)
        assert fitted.is_guarded_
        assert set(fitted.labels_) == set(fitted.labels_before_joining_) == {0}
        assert fitted.predict(random_rows(4, 8)).tolist() == [0] * 4
        assert fitted.update(random_rows(4, 8), range(4)).labels_.tolist() == [0] * 60
        assert AdaptiveDensityClusters(noise_guard_ratio=ratio).fit(rows, halves=halves).labels_.max() == 2

    def test_without_halves_there_is_no_guard(self):
        fitted = AdaptiveDensityClusters(noise_guard_ratio=1e9).fit(planted_rows()[0])
        assert np.isnan(fitted.noise_ratio_)
        assert not fitted.is_guarded_
        assert fitted.labels_.max() == 2

    def test_halves_that_do_not_differ(self):
        rows, _ = planted_rows()
        assert AdaptiveDensityClusters().fit(rows, halves=(rows, rows)).noise_ratio_ == np.inf
        same = np.tile(rows[0], (30, 1))
        assert AdaptiveDensityClusters().fit(same, halves=(same, same)).is_guarded_

    def test_bad_halves(self):
        rows = random_rows(5)
        with pytest.raises(UserError, match=r"halves have shapes \(4, 6\) and \(5, 6\); both must have \(5, 6\)"):
            AdaptiveDensityClusters().fit(rows, halves=(rows[1:], rows))
        with pytest.raises(UserError, match="halves are given with precomputed distances"):
            AdaptiveDensityClusters(metric="precomputed").fit(random_matrix(5), halves=(rows, rows))


class TestReferences:
    def test_references_are_clustered_and_other_rows_join_the_nearest(self):
        rows = random_rows(60)
        fitted = AdaptiveDensityClusters(n_references=20).fit(rows)
        assert len(np.unique(fitted.references_)) == 20
        assert ((fitted.labels_before_joining_ >= 0) == np.isin(np.arange(60), fitted.references_)).all()
        alone = AdaptiveDensityClusters().fit(rows[fitted.references_])
        assert partition_of(alone.labels_) == partition_of(fitted.labels_[fitted.references_])
        assert fitted.distances_scale_ == alone.distances_scale_
        d = modified_js(rows, rows[fitted.references_])
        of_references = fitted.labels_[fitted.references_]
        means = np.stack([d[:, of_references == k].mean(1) for k in range(of_references.max() + 1)], axis=1)
        rest = fitted.labels_before_joining_ < 0
        assert fitted.labels_[rest].tolist() == means.argmin(1)[rest].tolist()

    def test_as_many_references_as_rows_are_all_rows(self):
        rows = random_rows(30)
        without_references = AdaptiveDensityClusters().fit(rows)
        for references in (30, 99):
            fitted = AdaptiveDensityClusters(n_references=references).fit(rows)
            assert fitted.labels_.tolist() == without_references.labels_.tolist()

    def test_seeds_draw_different_references(self):
        references = [
            AdaptiveDensityClusters(n_references=9, random_state=s).fit(random_rows(40)).references_.tolist()
            for s in (1, 1, 2)
        ]
        assert references[0] == references[1] != references[2]


class TestPredict:
    def test_the_smallest_mean_distance_to_members(self):
        rows, new = random_rows(40), random_rows(15, seed=1)
        fitted = AdaptiveDensityClusters().fit(rows)
        d = modified_js(new, rows)
        clusters = range(fitted.labels_.max() + 1)
        means = np.stack([d[:, fitted.labels_ == k].mean(1) for k in clusters], axis=1)
        assert fitted.predict(new).tolist() == means.argmin(1).tolist()
        assert len(set(fitted.predict(new))) > 1

    def test_some_members_represent_a_large_cluster(self):
        rows, planted = planted_rows(300)
        fitted = AdaptiveDensityClusters().fit(rows)
        assert np.bincount(fitted.labels_[fitted.representatives_]).tolist() == [64, 64, 64]
        assert fitted.predict(rows).tolist() == planted.tolist()
        shuffled = np.random.default_rng(0).permutation(300)
        again = AdaptiveDensityClusters().fit(rows[shuffled])
        assert sorted(shuffled[again.representatives_]) == fitted.representatives_.tolist()

    def test_no_rows_and_bad_rows(self):
        with pytest.raises(NotFittedError, match="AdaptiveDensityClusters instance is not fitted yet"):
            AdaptiveDensityClusters().predict(random_rows(3))
        fitted = AdaptiveDensityClusters().fit(random_rows(9))
        assert fitted.predict(np.empty((0, 6))).shape == (0,)
        with pytest.raises(UserError, match="X has 2 features, but AdaptiveDensityClusters is expecting 6 features"):
            fitted.predict(random_rows(3, 2))


def naive_update(fitted, rows, new, moved):
    """Returns the updated clusters with every mean computed again: changed rows leave, their clusters are split, new
    clusters are merged."""
    changed = rows.copy()
    changed[moved] = new
    d = pairwise_modified_js(changed) / fitted.distances_scale_
    clusters, touched = [], []
    for inside in partition_of(fitted.labels_before_joining_):
        rest = [i for i in inside if i not in moved]
        if len(rest) == len(inside):
            clusters.append(inside)
        elif rest:
            touched += naive_split(d, rest, fitted.split)
    touched += [[i] for i in moved]
    while touched:
        pairs = [(one, other) for one in touched for other in touched + clusters if one is not other]
        one, other = min(pairs, key=lambda pair: b(d, *pair), default=([], []))
        if not one or b(d, one, other) >= fitted.merge:
            break
        clusters = [c for c in clusters if c is not other]
        touched = [c for c in touched if c is not one and c is not other] + [one + other]
    return d, partition(clusters + touched)


class TestUpdate:
    def test_a_row_changes_its_cluster_by_hand(self):
        # one channel: js(.1, .9) = ½ (.1 ln .1 + .9 ln .9) - .5 ln .5 = 0.184 in units of MJS
        rows = np.array([[0.1], [0.1], [0.1], [0.9], [0.9]])
        fitted = AdaptiveDensityClusters(0.05, 0.06, scale="none").fit(rows)
        assert fitted.labels_.tolist() == [0, 0, 0, 1, 1]
        assert fitted.update([[0.9]], [0]).labels_.tolist() == [1, 0, 0, 1, 1]
        assert (fitted.n_splits_, fitted.n_merges_) == (0, 1)
        assert fitted.predict([[0.1], [0.8]]).tolist() == [0, 1]
        assert rows[0].tolist() == [0.1]

    def test_a_cluster_that_loses_its_middle_is_split_by_hand(self):
        # js(.2, .35) = .0104, js(.35, .5) = .0067, js(.2, .5) = .0332: with four in the middle the mean between .2 and
        # the others is (4 · .0104 + .0332)/5 = .0149 < .016; without them w = .0332/2 = .0166 > .016
        rows = np.array([[0.2], [0.35], [0.35], [0.35], [0.35], [0.5]])
        fitted = AdaptiveDensityClusters(0.016, 0.016, scale="none", min_cluster_size=1).fit(rows)
        assert definition([0.2], [0.5], 1.0) / 2 == pytest.approx(0.0166, abs=5e-5)
        assert fitted.labels_.tolist() == [0] * 6
        fitted.update([[0.9]] * 4, [1, 2, 3, 4])
        assert fitted.labels_.tolist() == [0, 1, 1, 1, 1, 2]
        assert (fitted.n_splits_, fitted.n_merges_) == (1, 3)

    def test_clusters_without_changed_rows_stay(self):
        rows, planted = planted_rows(40, 4)
        fitted = AdaptiveDensityClusters().fit(rows)
        fitted.update(rows[[1]], [0])
        assert adjusted_rand_score(fitted.labels_[1:], planted[1:]) == 1
        assert fitted.labels_[0] == fitted.labels_[1]

    def test_clusters_keep_their_numbers(self):
        rows = np.array([[0.1], [0.1], [0.5], [0.5], [0.9], [0.9]])
        fitted = AdaptiveDensityClusters(0.01, 0.012, scale="none").fit(rows)
        assert fitted.labels_.tolist() == [0, 0, 1, 1, 2, 2]
        fitted.update([[0.9], [0.9]], [0, 1])  # no row is left in 0
        assert fitted.labels_.tolist() == [2, 2, 1, 1, 2, 2]
        assert fitted.predict([[0.9], [0.5]]).tolist() == [2, 1]
        fitted.update([[0.1], [0.1]], [0, 5])  # a new cluster has a new number
        assert fitted.labels_.tolist() == [3, 2, 1, 1, 2, 3]
        assert fitted.predict([[0.1], [0.9]]).tolist() == [3, 2]

    def test_resume_continues_from_labels(self):
        """A clusterer that resumes from labels alone updates as the original one does."""
        rows, _ = planted_rows(40, 4)
        original = AdaptiveDensityClusters(min_cluster_size=1).fit(rows)
        resumed = AdaptiveDensityClusters(min_cluster_size=1).resume(rows, original.labels_ + 3)
        assert resumed.labels_.tolist() == original.labels_.tolist()
        moved = rows[[20, 21, 5]]
        assert resumed.update(moved, [0, 1, 2]).labels_.tolist() == original.update(moved, [0, 1, 2]).labels_.tolist()
        assert (resumed.n_splits_, resumed.n_merges_) == (original.n_splits_, original.n_merges_)

    @pytest.mark.parametrize("labels", [[0], [0, -1], [0.0, 1.0]])
    def test_bad_labels_to_resume_from(self, labels):
        with pytest.raises(UserError, match="labels"):
            AdaptiveDensityClusters().resume([[0.1], [0.2]], labels)

    def test_the_same_vectors_change_nothing(self):
        rows = random_rows(40)
        fitted = AdaptiveDensityClusters().fit(rows)
        before = fitted.labels_.tolist(), fitted.labels_before_joining_.tolist()
        fitted.update(rows[5:9], [5, 6, 7, 8]).update(np.empty((0, 6)), [])
        assert (fitted.labels_.tolist(), fitted.labels_before_joining_.tolist()) == before
        assert (fitted.n_splits_, fitted.n_merges_) == (0, 0)

    @pytest.mark.parametrize("double", [0, 4096])
    @pytest.mark.parametrize("channels", [1, 2, 6])
    @pytest.mark.parametrize("seed", range(6))
    def test_agrees_with_the_naive_update_and_is_a_fixed_point(self, seed, channels, double, monkeypatch):
        monkeypatch.setattr(density, "_MAX_DOUBLE_ROWS", double)
        rows, rng = random_rows(30, channels, seed), np.random.default_rng(seed + 100)
        fitted = AdaptiveDensityClusters().fit(rows)
        for _ in range(3):
            moved = rng.choice(30, 1 + seed * 2, replace=False)
            new = rng.random((len(moved), channels))
            d, expected = naive_update(fitted, rows, new, moved.tolist())
            fitted.update(new, moved)
            rows[moved] = new
            assert partition_of(fitted.labels_before_joining_) == expected
            assert is_fixed_point(d, fitted.labels_before_joining_, 0.30 - 1e-5, 0.36 + 1e-5)
            clusters = [
                np.flatnonzero(fitted.labels_before_joining_ == k)
                for k in range(fitted.labels_before_joining_.max() + 1)
            ]
            order = fitted.labels_before_joining_[[c[0] for c in fitted._clusters]]
            np.testing.assert_allclose(
                fitted._cluster_distances, means_between(d, clusters)[np.ix_(order, order)], atol=1e-5
            )

    def test_some_of_these_updates_split_a_cluster(self):
        rng = np.random.default_rng(4)
        fitted = AdaptiveDensityClusters().fit(random_rows(30, 2, 4))
        moved = rng.choice(30, 9, replace=False)
        assert fitted.update(rng.random((9, 2)), moved).n_splits_ == 1

    def test_a_small_rest_of_a_large_cluster_has_no_rounding_error(self, monkeypatch):
        monkeypatch.setattr(density, "_MAX_DOUBLE_ROWS", 0)
        rows, planted = planted_rows(200, 2, noise=0.01)
        moved = np.flatnonzero(planted == 0)[2:]
        fitted = AdaptiveDensityClusters().fit(rows).update(rows[moved - 1], moved)
        first = np.flatnonzero([0 in inside for inside in fitted._clusters]).item()
        assert fitted._clusters[first].tolist() == [0, 2]
        expected = modified_js(rows[[0]], rows[[2]]).item() / fitted.distances_scale_ / 2
        assert fitted._cluster_distances[first, first] == pytest.approx(expected, rel=1e-6)

    def test_all_rows_may_change(self):
        rows, planted = planted_rows(40, 4)
        fitted = AdaptiveDensityClusters().fit(rows)
        assert fitted.update(rows[::-1], range(40)).labels_.tolist() == [0, 1, 2, 3] * 10
        assert planted[:4].tolist() == [0, 1, 2, 3]

    def test_with_references(self):
        rows, planted = planted_rows(60)
        fitted = AdaptiveDensityClusters(n_references=15).fit(rows)
        labels_before = fitted.labels_before_joining_.tolist()
        other, reference = int(np.flatnonzero(fitted.labels_before_joining_ < 0)[0]), int(fitted.references_[0])
        for row in (other, reference):
            goal = int(np.flatnonzero(planted == (planted[row] + 1) % 3)[-1])
            fitted.update(rows[[goal]], [row])
            assert fitted.labels_[row] == fitted.labels_[goal] == fitted.predict(rows[[goal]])[0]
            assert (fitted.labels_before_joining_.tolist() == labels_before) == (row == other)
        rest = np.setdiff1d(np.arange(60), [other, reference])
        assert adjusted_rand_score(fitted.labels_[rest], planted[rest]) == 1

    @pytest.mark.parametrize(
        ("rows", "indices", "sentence"),
        [
            (random_rows(2), [0, 0], r"indices are \[0, 0\]; they must be different row numbers below 9"),
            (random_rows(1), [9], r"indices are \[9\]; they must be different row numbers below 9"),
            (random_rows(1), [-1], r"indices are \[-1\]; they must be different row numbers below 9"),
            (random_rows(1), [0.5], r"indices are \[0.5\]; they must be different row numbers below 9"),
            (random_rows(2), [1], "X has 2 rows; it must have 1, one for each index"),
            (random_rows(1, 2), [1], "X has 2 features, but AdaptiveDensityClusters is expecting 6 features"),
            (random_rows(1) - 1, [1], "Negative values in data"),
        ],
    )
    def test_bad_changes(self, rows, indices, sentence):
        with pytest.raises(UserError, match=sentence):
            AdaptiveDensityClusters().fit(random_rows(9)).update(rows, indices)

    def test_update_needs_fit_and_vectors(self):
        with pytest.raises(NotFittedError, match="AdaptiveDensityClusters instance is not fitted yet"):
            AdaptiveDensityClusters().update(random_rows(1), [0])
        with pytest.raises(UserError, match="update needs vectors and as_published=False"):
            AdaptiveDensityClusters(metric="precomputed").fit(random_matrix(5)).update(random_rows(1), [0])
