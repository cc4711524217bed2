"""Multi-centre threshold clustering: seeds far apart, every other row wherever its cosine reaches the threshold."""

from itertools import combinations

import numpy as np
import pytest
from sklearn.exceptions import NotFittedError
from sklearn.metrics.pairwise import cosine_similarity

from shoal.clusterers import OverlappingClusters
from shoal.clusterers.overlapping import choose_seeds
from shoal.errors import UserError

TRIANGLE = np.repeat([[1.0, 0.0], [-0.5, np.sqrt(0.75)], [-0.5, -np.sqrt(0.75)]], 4, axis=0)


def plain(**options):
    """Returns the clusterer as printed, without validation."""
    return OverlappingClusters(**{"distinct_seeds": False, "validate": False, **options})


def angles(*degrees):
    return np.array([[np.cos(np.radians(d)), np.sin(np.radians(d))] for d in degrees])


def noisy_groups(seed=0, noise=0.03):
    rng = np.random.default_rng(seed)
    return np.repeat(np.eye(5)[:3], 6, axis=0) + noise * rng.normal(size=(18, 5))


def clusters_of(fitted):
    return {frozenset(np.flatnonzero(column).tolist()) for column in fitted.membership_.T}


def walk(similarities, count, threshold):
    """Returns the seeds by going through all pairs in ascending order, as in Alg. 1."""
    seeds = []
    for i, j in sorted(combinations(range(len(similarities)), 2), key=lambda pair: similarities[pair]):
        for row in (i, j):
            if len(seeds) < count and row not in seeds and (similarities[row, seeds] < threshold).all():
                seeds.append(row)
    return seeds


def algorithm_1(rows, count, threshold):
    """Alg. 1 as printed, with centres computed again for every row."""
    first = walk(cosine_similarity(rows).round(12), count, np.inf)
    clusters = [[row] for row in first]
    for row in range(len(rows)):
        if row in first:
            continue
        centres = np.array([rows[inside].mean(0) for inside in clusters])
        similarities = cosine_similarity(rows[[row]], centres)[0]
        for k in (
            np.flatnonzero(similarities >= threshold) if (similarities >= threshold).any() else [similarities.argmax()]
        ):
            clusters[k].append(row)
    return [sorted(inside) for inside in clusters]


class TestSeeds:
    def test_by_hand(self):
        # ascending: 1-3 (-0.9), 0-3 (-0.5), 0-2 (0.1), 2-3 (0.15), 0-1 (0.3), 1-2 (0.8)
        similarities = np.array([[1, 0.3, 0.1, -0.5], [0.3, 1, 0.8, -0.9], [0.1, 0.8, 1, 0.15], [-0.5, -0.9, 0.15, 1]])
        assert [choose_seeds(similarities, count).tolist() for count in (1, 2, 3, 4)] == [
            [1],
            [1, 3],
            [1, 3, 0],
            [1, 3, 0, 2],
        ]
        # the similarity with 1 is 0.3 for 0 and 0.8 for 2
        assert choose_seeds(similarities, 4, 0.31).tolist() == [1, 3, 0]
        assert choose_seeds(similarities, 4, 0.3).tolist() == [1, 3]
        assert choose_seeds(similarities, 4, -1).tolist() == [1]

    @pytest.mark.parametrize("threshold", [0.0, 0.3, 0.9, np.inf])
    @pytest.mark.parametrize("digits", [0, 1, 12])
    def test_agrees_with_the_walk_over_pairs(self, threshold, digits):
        for seed in range(20):
            similarities = cosine_similarity(np.random.default_rng(seed).normal(size=(11, 3))).round(digits)
            for count in (1, 2, 5, 11):
                assert choose_seeds(similarities, count, threshold).tolist() == walk(similarities, count, threshold)

    def test_without_distinct_seeds_two_seeds_may_share_a_group(self):
        # all pairs across groups have cosine 0: (0, 2) comes first, then (0, 3), whose 3 is in the group of 2
        rows = np.eye(3)[[0, 0, 1, 1, 2, 2]]
        assert choose_seeds(rows @ rows.T, 3).tolist() == [0, 2, 3]
        assert choose_seeds(rows @ rows.T, 3, 0.2).tolist() == [0, 2, 4]
        # 4 and 5 reach no centre and join the first; with distinct seeds every group has its cluster
        assert clusters_of(plain(n_clusters=3).fit(rows)) == {frozenset({0, 1, 4, 5}), frozenset({2}), frozenset({3})}
        distinct = OverlappingClusters(3, validate=False).fit(rows)
        assert clusters_of(distinct) == {frozenset({0, 1}), frozenset({2, 3}), frozenset({4, 5})}

    def test_a_row_of_zeros_is_a_seed_only_without_distinct_seeds(self):
        rows = np.array([[0.0, 0.0], [1.0, 0.0], [0.6, 0.8]])
        assert plain(n_clusters=2).fit(rows).membership_[0].sum() == 1
        assert choose_seeds(np.array([[0, 0, 0], [0, 1, 0.6], [0, 0.6, 1]]), 2).tolist() == [0, 1]
        assert choose_seeds(np.array([[0, 0, 0], [0, 1, 0.6], [0, 0.6, 1]]), 2, 0.7).tolist() == [1, 2]
        assert choose_seeds(np.zeros((3, 3)), 2, 0.2).tolist() == [0]


class TestAssignment:
    def test_order_matters_by_hand(self):
        # seeds at 0° and 120°; the threshold is 45.6°. 70° reaches none and joins the nearer, 120°, whose centre moves
        # to 95°: 50° is 45° from it and joins too. The other way round 50° moves the centre of 0° to 25°, and 70° is
        # 45° from that
        first = plain(n_clusters=2, threshold=0.7).fit(angles(0, 120, 70, 50))
        assert first.membership_.tolist() == [[True, False], [False, True], [False, True], [False, True]]
        second = plain(n_clusters=2, threshold=0.7).fit(angles(0, 120, 50, 70))
        assert second.membership_.tolist() == [[True, False], [False, True], [True, False], [True, False]]

    def test_overlap_by_hand(self):
        # the threshold is 53.1°: 70° is with 120°, whose centre moves to 95°; 50° is 50° from 0° and 45° from 95°.
        # Centres in the end: 25°, and 79.3° with (cos 120° + cos 70° + cos 50°, sin ...) = (0.485, 2.572), so that 50°
        # is nearer to the first
        rows = angles(0, 120, 70, 50)
        fitted = plain(n_clusters=2, threshold=0.6).fit(rows)
        assert fitted.membership_.tolist() == [[True, False], [False, True], [False, True], [True, True]]
        assert fitted.labels_.tolist() == [0, 1, 1, 0]
        np.testing.assert_allclose(fitted.cluster_centers_, [rows[[0, 3]].mean(0), rows[[1, 2, 3]].mean(0)])
        assert fitted.centre_similarity_ == pytest.approx(np.cos(np.radians(79.32 - 25)), abs=1e-4)
        # new rows: 25° is 54.3° from the second, 110° is 85° from the first; 200° reaches none, the second is nearer
        assert fitted.predict_membership(angles(25, 110, 200)).tolist() == [[True, False], [False, True], [False, True]]
        assert fitted.predict_membership(angles(52)).tolist() == [[True, True]]
        # 52° is 27° from 25° and 27.3° from 79.3°: the label is that of the nearer centre
        assert fitted.predict(angles(25, 110, 200, 52, 53)).tolist() == [0, 1, 1, 0, 1]

    @pytest.mark.parametrize("threshold", [-0.3, 0.2, 0.7])
    @pytest.mark.parametrize("seed", range(5))
    def test_agrees_with_algorithm_1(self, threshold, seed):
        rows = np.random.default_rng(seed).normal(size=(30, 3))
        fitted = plain(n_clusters=4, threshold=threshold).fit(rows)
        assert [np.flatnonzero(column).tolist() for column in fitted.membership_.T] == algorithm_1(rows, 4, threshold)

    def test_the_lowest_threshold_puts_all_rows_but_seeds_in_all_clusters(self):
        rows = np.random.default_rng(0).normal(size=(20, 3))
        counts = plain(n_clusters=4, threshold=-1).fit(rows).membership_.sum(1)
        assert sorted(counts) == [1] * 4 + [4] * 16

    def test_a_threshold_above_1_is_never_reached(self):
        rows = np.random.default_rng(0).normal(size=(20, 3))
        fitted = plain(n_clusters=4, threshold=1.1).fit(rows)
        assert (fitted.membership_.sum(1) == 1).all()
        assert (fitted.membership_.argmax(1) == fitted.labels_).all()

    def test_a_threshold_of_1_is_reached_by_the_same_direction(self):
        rows = np.outer([1.0, 3.0, 0.7], [0.1, 0.2, 0.3])
        assert plain(n_clusters=2, threshold=1.0).fit(rows).membership_.tolist() == [[1, 0], [0, 1], [1, 1]]

    @pytest.mark.parametrize(
        "options", [{}, {"distinct_seeds": False}, {"validate": False}, {"n_clusters": 9, "max_centre_similarity": 1}]
    )
    @pytest.mark.parametrize("seed", range(5))
    def test_no_row_and_no_cluster_is_empty(self, options, seed):
        rows = np.random.default_rng(seed).normal(size=(25, 4))
        fitted = OverlappingClusters(**options).fit(rows)
        assert fitted.membership_.any(0).all()
        assert fitted.membership_.any(1).all()
        assert fitted.membership_[np.arange(25), fitted.labels_].all()
        assert fitted.membership_.shape == (25, fitted.n_clusters_)
        assert fitted.cluster_centers_.shape == (fitted.n_clusters_, 4)


class TestValidation:
    @pytest.mark.parametrize("count", [3, 4, 5, 12, 40])
    def test_three_groups(self, count):
        fitted = OverlappingClusters(count).fit(TRIANGLE)
        assert fitted.labels_.tolist() == [0] * 4 + [1] * 4 + [2] * 4
        assert (fitted.membership_.sum(1) == 1).all()
        assert fitted.centre_similarity_ == -0.5
        assert (fitted.n_clusters_, fitted.threshold_) == (3, 0.2)

    def test_the_threshold_is_raised_by_hand(self):
        # seeds at 0° and 90°, others at 15° and 75°. At 0.2 and 0.3 both end in both clusters or 75° does (0.259 at
        # first; 67.5° = 0.383 from 7.5° at 0.3), so that centres are near; at 0.4 they are 7.5° and 82.5°: cos 75°
        rows = angles(0, 90, 15, 75)
        fitted = OverlappingClusters(2).fit(rows)
        assert fitted.threshold_ == 0.4
        assert clusters_of(fitted) == {frozenset({0, 2}), frozenset({1, 3})}
        assert fitted.centre_similarity_ == pytest.approx(np.cos(np.radians(75)))
        assert OverlappingClusters(2, threshold=0.3, validate=False).fit(rows).centre_similarity_ > 0.3
        assert OverlappingClusters(2, max_centre_similarity=1.0).fit(rows).threshold_ == 0.2

    @pytest.mark.parametrize("threshold", [0.45, 0.7])
    def test_the_number_of_clusters_is_reduced_by_hand(self, threshold):
        # three seeds: (cos 95° + cos 30° + cos 65°) / 3 = 0.40 whatever the threshold. Two: 30° is with 0°, not with
        # 95°, and cos(95° - 15°) = 0.17; the threshold is the given one again
        fitted = OverlappingClusters(3, threshold=threshold, distinct_seeds=False).fit(angles(0, 95, 30))
        assert (fitted.n_clusters_, fitted.threshold_) == (2, threshold)
        assert fitted.centre_similarity_ == pytest.approx(np.cos(np.radians(80)))
        assert plain(n_clusters=3, threshold=threshold).fit(angles(0, 95, 30)).centre_similarity_ == pytest.approx(
            0.4004, abs=1e-4
        )

    @pytest.mark.parametrize("distinct_seeds", [True, False])
    def test_rows_that_are_nearly_parallel_are_one_cluster(self, distinct_seeds):
        rows = np.ones((10, 6)) + 0.05 * np.random.default_rng(0).normal(size=(10, 6))
        fitted = OverlappingClusters(4, distinct_seeds=distinct_seeds).fit(rows)
        assert fitted.membership_.tolist() == [[True]] * 10
        assert (fitted.n_clusters_, fitted.centre_similarity_, fitted.threshold_) == (1, 0.0, 0.2)
        np.testing.assert_allclose(fitted.cluster_centers_[0], rows.mean(0))

    def test_a_single_cluster_is_accepted_by_any_limit(self):
        assert OverlappingClusters(4, max_centre_similarity=-1).fit(np.eye(4)).n_clusters_ == 1


class TestInvariance:
    @pytest.mark.parametrize("seed", range(5))
    def test_separated_groups_do_not_depend_on_the_order(self, seed):
        rows, order = noisy_groups(), np.random.default_rng(seed).permutation(18)
        expected = {frozenset(range(6)), frozenset(range(6, 12)), frozenset(range(12, 18))}
        fitted = clusters_of(OverlappingClusters(4).fit(rows[order]))
        assert {frozenset(order[list(inside)].tolist()) for inside in fitted} == expected

    @pytest.mark.parametrize("factor", [0.01, 3.0, 1e-160, 1e200])
    def test_one_factor_for_all_rows_changes_nothing_but_centres(self, factor):
        rows = np.random.default_rng(2).normal(size=(30, 3))
        one, other = OverlappingClusters().fit(rows), OverlappingClusters().fit(factor * rows)
        assert (one.membership_ == other.membership_).all()
        assert (one.labels_ == other.labels_).all()
        np.testing.assert_allclose(other.cluster_centers_, factor * one.cluster_centers_)
        assert other.centre_similarity_ == pytest.approx(one.centre_similarity_)
        assert (one.predict_membership(rows) == other.predict_membership(factor * rows)).all()

    def test_input_unmodified_and_any_sequence(self):
        rows = noisy_groups()
        fitted = OverlappingClusters().fit(rows)
        assert (rows == noisy_groups()).all()
        assert (OverlappingClusters().fit(rows.tolist()).membership_ == fitted.membership_).all()
        fitted.predict_membership(rows)
        assert (rows == noisy_groups()).all()

    def test_new_rows_join_clusters_of_similar_rows(self):
        fitted = OverlappingClusters().fit(noisy_groups())
        assert (fitted.predict_membership(noisy_groups(1)) == fitted.membership_).all()
        assert fitted.predict_membership(np.empty((0, 5))).shape == (0, 3)


class TestDegenerate:
    @pytest.mark.parametrize("distinct_seeds", [True, False])
    @pytest.mark.parametrize("row", [[0.0, 0.0], [0.3, -0.7]], ids=["zeros", "row"])
    def test_single(self, distinct_seeds, row):
        fitted = OverlappingClusters(distinct_seeds=distinct_seeds).fit([row])
        assert fitted.membership_.tolist() == [[True]]
        assert fitted.labels_.tolist() == [0]
        assert fitted.cluster_centers_.tolist() == [row]
        assert fitted.centre_similarity_ == 0

    @pytest.mark.parametrize("distinct_seeds", [True, False])
    def test_all_equal(self, distinct_seeds):
        fitted = OverlappingClusters(distinct_seeds=distinct_seeds).fit(np.full((5, 3), 0.1))
        assert fitted.membership_.tolist() == [[True]] * 5

    def test_zeros_are_one_cluster(self):
        assert OverlappingClusters().fit(np.zeros((5, 3))).membership_.tolist() == [[True]] * 5

    def test_a_row_of_rounding_errors_has_no_direction(self):
        # A row of 1e-17 beside rows of length 1 is what a subtraction leaves: its cosine is 0 with both centres, which
        # reaches the threshold 0.
        rows = np.array([[1.0, 0.0], [0.0, 1.0], [-1e-17, 1e-17]])
        assert plain(n_clusters=2, threshold=0.0).fit(rows).membership_[2].tolist() == [True, True]

    def test_as_many_clusters_as_rows(self):
        assert plain(n_clusters=9).fit(np.eye(3)).membership_.sum() == 3

    @pytest.mark.parametrize(
        ("options", "rows", "sentence"),
        [
            ({}, np.empty((0, 3)), r"^X has 0 sample\(s\) \(shape=\(0, 3\)\) while a minimum of 1 is required\.$"),
            ({}, [[1.0, np.nan]], r"^X has nan in row 0, column 1; entries must be finite, not NaN or infinite$"),
            ({}, [1.0, 2.0], r"^X has shape \(2,\); it must have two axes, rows and columns"),
            ({"n_clusters": 0}, np.eye(2), r"^n_clusters is 0; it must be a whole number, 1 or more$"),
            ({"threshold": np.nan}, np.eye(2), r"^threshold is nan; it must be a finite number, -1 or more$"),
            ({"threshold": -1.5}, np.eye(2), r"^threshold is -1.5; it must be a finite number, -1 or more$"),
            (
                {"max_centre_similarity": np.inf},
                np.eye(2),
                r"^max_centre_similarity is inf; it must be a finite number, -1 or more$",
            ),
        ],
    )
    def test_bad_input(self, options, rows, sentence):
        with pytest.raises(UserError, match=sentence):
            OverlappingClusters(**options).fit(rows)

    def test_bad_new_rows(self):
        for method in ("predict", "predict_membership"):
            with pytest.raises(NotFittedError, match="OverlappingClusters instance is not fitted yet"):
                getattr(OverlappingClusters(), method)(np.eye(2))
            fitted = OverlappingClusters().fit(np.eye(2))
            with pytest.raises(UserError, match="X has 3 features, but OverlappingClusters is expecting 2 features"):
                getattr(fitted, method)(np.eye(3))
