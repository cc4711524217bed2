"""Facts about AIDC and its divergence, on vectors that are drawn like sparsities.

A vector has 64 entries. Each is the fraction of a client's samples with a zero activation, whose probability depends on
the class.
"""

from __future__ import annotations

from functools import cache
from itertools import combinations
from math import inf, log

import numpy as np
import pytest
from sklearn.metrics import adjusted_rand_score

from shoal.clusterers import AdaptiveDensityClusters
from shoal.clusterers.density import dense_clusters, printed_min_neighbours, printed_radius, split_clusters
from shoal.clusterers.jensen_shannon import modified_js, pairwise_modified_js

SEEDS = range(5)
CLASSES, CHANNELS = 10, 64


@cache
def fleet(law, seed, clients=100, spread=1.0, num_samples=(100, 500)):
    """Returns vectors, vectors of both halves, and planted groups; `law` is Dirichlet's α or the group sizes."""
    rng = np.random.default_rng(seed)
    probabilities = 1 / (1 + np.exp(-rng.normal(0.3, 1, CHANNELS) - spread * rng.normal(size=(CLASSES, CHANNELS))))
    planted = np.zeros(clients, int)
    if isinstance(law, tuple):
        planted = np.repeat(np.arange(len(law)), np.array(law) * clients // sum(law))
        own = np.array_split(np.arange(CLASSES), len(law))
        distributions = np.stack([np.isin(np.arange(CLASSES), own[g]) / len(own[g]) for g in planted])
    else:
        distributions = (
            np.full((clients, CLASSES), 1 / CLASSES) if law == inf else rng.dirichlet([law] * CLASSES, clients)
        )
    half = rng.integers(num_samples[0] // 2, num_samples[1] // 2 + 1, len(distributions))
    halves = []
    for _ in range(2):
        counts = rng.multinomial(half, distributions)
        halves.append(sum(rng.binomial(counts[:, [y]], probabilities[y]) for y in range(CLASSES)) / half[:, None])
    return (halves[0] + halves[1]) / 2, tuple(halves), planted


GROUPS = [(1, 1), (1, 1, 1, 1), (1, 1, 1, 1, 1)]


def eq_4(s, t):
    """The part of Eq. (3) that γ weighs."""
    s, t = np.atleast_2d(s), np.atleast_2d(t)
    return (modified_js(s, t, 1.0) - modified_js(s, t, 0.0)).item()


def eq_3_normalised(s, t):
    return modified_js(np.atleast_2d(s), np.atleast_2d(t), 0.0).item()


class TestDivergence:
    def test_eq_4_by_hand_with_0_ln_0(self):
        # (.2, .8, 0) and (.6, .4, 0), middle (.4, .6, 0):
        # ½ (.2 ln ½ + .6 ln 3/2 + .8 ln 4/3 + .4 ln 2/3 + 0) = .0863
        by_hand = 0.5 * (0.2 * log(0.5) + 0.6 * log(1.5) + 0.8 * log(4 / 3) + 0.4 * log(2 / 3))
        assert by_hand == pytest.approx(0.0863, abs=5e-5)
        assert eq_4([0.2, 0.8, 0.0], [0.6, 0.4, 0.0]) == pytest.approx(by_hand)

    @pytest.mark.parametrize("gamma", [0.5, 1.0, 2.0])
    def test_both_parts_are_one_for_rows_that_sum_to_1(self, gamma):
        p = np.random.default_rng(0).dirichlet([0.5] * 6, 8)
        np.testing.assert_allclose(modified_js(p, p, gamma), (1 + gamma) * modified_js(p, p, 0.0), atol=1e-12)

    def test_disjoint_unit_vectors_are_ln_2_apart(self):
        assert eq_4([1, 0], [0, 1]) == pytest.approx(log(2))
        assert eq_3_normalised([1, 0], [0, 1]) == pytest.approx(log(2))
        assert modified_js(np.eye(2)[:1], np.eye(2)[1:], 3.0).item() == pytest.approx(4 * log(2))

    @pytest.mark.parametrize("seed", SEEDS)
    def test_symmetric_not_negative_zero_on_the_diagonal(self, seed):
        d = pairwise_modified_js(np.random.default_rng(seed).random((30, 8)).round(1))
        assert (d == d.T).all() and (d >= 0).all() and (np.diag(d) == 0).all()

    @pytest.mark.parametrize("seed", SEEDS)
    def test_normalised_part_is_bounded_and_scale_free_and_eq_4_homogeneous(self, seed):
        s, t = np.random.default_rng(seed).random((2, 8))
        assert eq_3_normalised(s, t) <= log(2)
        assert eq_3_normalised(s, 0.01 * t) == pytest.approx(eq_3_normalised(s, t))
        assert eq_4(0.01 * s, 0.01 * t) == pytest.approx(0.01 * eq_4(s, t))

    @pytest.mark.parametrize("law", [0.1, 1.0, (1, 1, 1, 1, 1)], ids=str)
    def test_the_normalised_part_of_sparsities_is_a_few_percent(self, law):
        rows, _, _ = fleet(law, 0)
        fraction = pairwise_modified_js(rows, 0.0).sum() / pairwise_modified_js(rows).sum()
        assert 0.01 < fraction < 0.08


class TestPrintedEquations:
    def test_eq_5_is_infinite_for_one_client_and_in_units_of_sparsity(self):
        assert printed_radius(np.full((1, 4), 0.3)) == inf
        # 50 clients: (μ + σ) / √ln 50, whatever the distances are
        rows, _, _ = fleet(0.1, 0, clients=50)
        assert printed_radius(rows) == pytest.approx((rows.mean() + rows.std()) / 1.978, rel=1e-3)
        assert 0.25 < printed_radius(rows) < 0.5

    def test_eq_6_lies_between_half_and_all(self):
        assert printed_min_neighbours(np.zeros((50, 64))) == printed_min_neighbours(np.ones((50, 64))) == 25
        assert printed_min_neighbours(np.random.default_rng(0).random((50, 64))) == 50
        for seed in SEEDS:
            assert 25 <= printed_min_neighbours(np.random.default_rng(seed).random((50, 1)) * 0.01) <= 50

    @pytest.mark.parametrize("spread", [0.1, 1.0])
    @pytest.mark.parametrize("law", [(1, 1), (1, 1, 1, 1, 1), 0.1, 0.5, 1.0], ids=str)
    def test_dense_clusters_as_printed_are_one_or_none(self, law, spread):
        rows, _, _ = fleet(law, 0, clients=50, spread=spread)
        radius, min_neighbours = np.full(50, printed_radius(rows)), np.full(50, printed_min_neighbours(rows))
        labels = dense_clusters(pairwise_modified_js(rows), radius, min_neighbours)
        assert set(labels) in ({0}, {-1})

    def test_half_of_all_is_too_many_for_three_groups(self):
        at = np.repeat([0.0, 10, 20], 20) + np.random.default_rng(0).random(60)
        d = abs(at[:, None] - at)
        assert set(dense_clusters(d, np.full(60, 1.5), np.full(60, 30))) == {-1}
        labels = dense_clusters(d, np.full(60, 1.5), np.full(60, 5))
        assert labels.tolist() == np.repeat([0, 1, 2], 20).tolist()


class TestSplitsAndMerges:
    @pytest.mark.parametrize("seed", SEEDS)
    def test_a_split_separates_the_farthest_pair(self, seed):
        rows, _, _ = fleet(1.0, seed, clients=30)
        d = pairwise_modified_js(rows)
        far = np.unravel_index(d.argmax(), d.shape)
        # a threshold just below the mean of all distances: there are one or more splits
        parts = split_clusters(d, [np.arange(30)], d.mean() * 0.999)
        assert len(parts) > 1 and all(len(part) for part in parts)
        assert not any(set(far) <= set(part) for part in parts)

    def test_w_of_a_union_is_a_mean_over_its_parts(self):
        d = pairwise_modified_js(fleet(0.5, 0, clients=30)[0])
        p, q = np.arange(12), np.arange(12, 30)
        parts = (12**2 * d[:12, :12].mean() + 18**2 * d[12:, 12:].mean() + 2 * 12 * 18 * d[:12, 12:].mean()) / 30**2
        assert d[np.ix_(np.r_[p, q], np.r_[p, q])].mean() == pytest.approx(parts)

    @pytest.mark.parametrize("law", [0.1, 1.0, inf, (1, 1, 1, 1, 1), (9, 1)], ids=str)
    @pytest.mark.parametrize("scale", ["median", "mean"])
    def test_ends_with_fewer_splits_and_merges_than_clients_at_a_joint_fixed_point(self, law, scale):
        rows, _, _ = fleet(law, 1)
        result = AdaptiveDensityClusters(scale=scale).fit(rows)
        assert result.converged_
        assert result.n_splits_ < 100 and result.n_merges_ < 100
        d = pairwise_modified_js(rows) / result.distances_scale_
        clusters = [
            np.flatnonzero(result.labels_before_joining_ == k) for k in range(result.labels_before_joining_.max() + 1)
        ]
        assert all(d[np.ix_(c, c)].mean() <= 0.36 for c in clusters)
        assert all(d[np.ix_(*pair)].mean() >= 0.30 for pair in combinations(clusters, 2))

    @pytest.mark.parametrize(
        ("merge", "split", "clients", "distance"), [(0.15, 0.12, 10, 0.14), (0.20, 0.18, 20, 0.195)]
    )
    def test_two_settings_of_table_2_may_never_end(self, merge, split, clients, distance):
        # clients pairwise d apart: b = d < merge, and w = d (n - 1) / n = 0.126 > 0.12 or 0.185 > 0.18
        unit = 2 * log(2) / distance  # unit vectors are 2 ln 2 apart with γ = 1
        result = AdaptiveDensityClusters(merge * unit, split * unit, scale="none", as_published=True).fit(
            np.eye(clients)
        )
        assert not result.converged_
        assert result.n_iter_ == result.max_iter


def fitted(rows, halves, planted):
    return AdaptiveDensityClusters().fit(rows, halves=halves)


class TestFleets:
    @pytest.mark.parametrize("seed", SEEDS)
    @pytest.mark.parametrize("law", GROUPS, ids=str)
    def test_planted_groups_are_found(self, law, seed):
        rows, halves, planted = fleet(law, seed)
        result = AdaptiveDensityClusters().fit(rows, halves=halves)
        assert not result.is_guarded_
        assert result.labels_.tolist() == planted.tolist()
        assert result.predict(fleet(law, seed)[1][0]).tolist() == planted.tolist()

    @pytest.mark.parametrize("seed", SEEDS)
    @pytest.mark.parametrize("law", [10.0, inf], ids=str)
    def test_fleets_near_iid_are_one_cluster_only_with_the_guard(self, law, seed):
        rows, halves, _ = fleet(law, seed)
        assert set(AdaptiveDensityClusters().fit(rows, halves=halves).labels_) == {0}
        assert AdaptiveDensityClusters().fit(rows).labels_.max() >= 5

    @pytest.mark.parametrize("seed", SEEDS)
    @pytest.mark.parametrize("law", [0.1, 0.5], ids=str)
    def test_skewed_fleets_pass_the_guard(self, law, seed):
        rows, halves, _ = fleet(law, seed)
        result = AdaptiveDensityClusters().fit(rows, halves=halves)
        assert result.noise_ratio_ > 2 * result.noise_guard_ratio
        assert result.labels_.max() > 5

    @pytest.mark.parametrize("num_samples", [(100, 100), (100, 500), (500, 500)])
    def test_the_ratio_is_1_for_equal_laws_and_grows_with_skew(self, num_samples):
        ratios = [
            np.mean([fitted(*fleet(law, s, 50, 1.0, num_samples)).noise_ratio_ for s in range(3)])
            for law in (inf, 10.0, 1.0, 0.5, 0.1)
        ]
        assert ratios[0] == pytest.approx(1, abs=0.05)
        assert ratios == sorted(ratios)

    @pytest.mark.parametrize("spread", [0.5, 2.0])
    @pytest.mark.parametrize("seed", SEEDS)
    def test_the_guard_is_right_where_classes_differ_less_or_more(self, seed, spread):
        guarded = [
            fitted(*fleet(law, seed, spread=spread)).is_guarded_ for law in (inf, 10.0, 0.5, 0.1, (1, 1, 1, 1, 1))
        ]
        assert guarded == [True, True, False, False, False]

    @pytest.mark.parametrize("seed", SEEDS)
    @pytest.mark.parametrize("law", [(6, 4), (7, 3)], ids=str)
    def test_unequal_groups_need_the_mean(self, law, seed):
        """More than half of all pairs are within a group, and so is the median distance."""
        rows, halves, planted = fleet(law, seed, spread=2.0)
        median, mean = (AdaptiveDensityClusters(scale=scale).fit(rows, halves=halves) for scale in ("median", "mean"))
        assert not mean.is_guarded_
        assert adjusted_rand_score(planted, mean.labels_) == 1
        assert adjusted_rand_score(planted, median.labels_) < 0.9

    def test_references_find_planted_groups_and_agree_less_where_there_are_none(self):
        rows, _, planted = fleet((1, 1, 1, 1, 1), 0, clients=400)
        assert AdaptiveDensityClusters(n_references=50).fit(rows).labels_.tolist() == planted.tolist()
        rows, _, _ = fleet(0.1, 0, clients=400)
        full, some = AdaptiveDensityClusters().fit(rows), AdaptiveDensityClusters(n_references=100).fit(rows)
        assert 0.4 < adjusted_rand_score(full.labels_, some.labels_) < 0.95
