from itertools import combinations
from math import log

import numpy as np
import pytest
from sklearn.exceptions import NotFittedError
from sklearn.metrics import adjusted_rand_score

from shoal.clusterers import repulsive
from shoal.clusterers.repulsive import RepulsiveClusters, objectives
from shoal.clusterers.similar import SimilarClusters
from shoal.clusterers.symmetric_kl import FLOOR, symmetric_kl
from shoal.errors import UserError

ONE_HOT = np.eye(4)[[0, 1, 2, 3, 0, 1, 2, 3]]


def drawn(rows, classes=5, seed=0, alpha=0.3):
    return np.random.default_rng(seed).dirichlet([alpha] * classes, rows)


def divergence(p, q):
    """The definition, entry by entry."""
    p, q = (np.maximum(x, FLOOR) for x in (p, q))
    return 0.5 * sum(a * log(a / b) + b * log(b / a) for a, b in zip(p, q, strict=True))


def naive_objectives(rows, labels):
    """Eq. (3) with its sums written out: ordered pairs within, g < g' between."""
    groups = [rows[labels == g] for g in np.unique(labels)]
    within = [
        sum(divergence(p, q) for p in x for q in x) / (len(x) * (len(x) - 1)) if len(x) > 1 else 0.0 for x in groups
    ]
    between = sum(divergence(p.mean(0), q.mean(0)) for p, q in combinations(groups, 2))
    return np.mean(within), between / max(len(groups) * (len(groups) - 1), 1)


def groups_of_values(rows, labels):
    """The partition without regard to numbers of groups and to which of two equal rows is where."""
    return sorted(sorted(map(tuple, rows[labels == g].tolist())) for g in np.unique(labels))


class TestDivergence:
    def test_by_hand(self):
        # ½ [(3/4 ln 3 + 1/4 ln 1/3) + (1/4 ln 1/3 + 3/4 ln 3)] = ½ ln 3 for (3/4, 1/4) and (1/4, 3/4);
        # against (1/2, 1/2): ½ [1/4 ln(3/2) - 1/4 ln(1/2)] = ln(3)/8
        p = np.array([[0.75, 0.25]])
        found = symmetric_kl(p, np.array([[0.25, 0.75], [0.5, 0.5], [0.75, 0.25]]))
        assert found[0].tolist() == pytest.approx([log(3) / 2, log(3) / 8, 0.0])

    def test_floor_is_not_normalised_away(self):
        # one-hot rows: two entries differ, each adds ½ (1 - 1e-6) ln 1e6
        found = symmetric_kl(np.array([[1.0, 0.0]]), np.array([[0.0, 1.0]]))
        assert found.item() == pytest.approx((1 - 1e-6) * log(1e6), rel=1e-12)

    def test_entries_below_the_floor_count_as_the_floor(self):
        assert symmetric_kl(np.array([[1.0, 1e-9]]), np.array([[1.0, 0.0]])).item() == 0

    def test_is_the_definition(self):
        p, q = drawn(6), drawn(4, seed=1)
        expected = [[divergence(a, b) for b in q] for a in p]
        np.testing.assert_allclose(symmetric_kl(p, q), expected, atol=1e-12)

    @pytest.mark.parametrize("rows", [drawn(40), ONE_HOT, np.zeros((3, 4)), np.full((3, 7), 1 / 7)])
    def test_zero_to_itself_symmetric_never_negative(self, rows):
        d = symmetric_kl(rows, rows)
        assert (np.diag(d) == 0).all()
        assert (d >= 0).all()
        np.testing.assert_allclose(d, d.T, atol=1e-12)


BOTH = pytest.mark.parametrize(
    "make",
    [
        lambda n=3, seed=0: SimilarClusters(n, random_state=seed),
        lambda n=3, seed=0: SimilarClusters(n, random_state=seed, centre="jeffreys"),
        lambda n=3, seed=0: RepulsiveClusters(n, random_state=seed),
        lambda n=3, seed=0: RepulsiveClusters(n, random_state=seed, swaps="all"),
    ],
    ids=["similar", "jeffreys", "repulsive", "repulsive-all"],
)


@BOTH
class TestEveryClusterer:
    @pytest.mark.parametrize("rows", [drawn(23), ONE_HOT, drawn(12).round(1)], ids=["drawn", "one-hot", "ties"])
    def test_partition_does_not_depend_on_the_order(self, make, rows):
        partition = groups_of_values(rows, make().fit(rows).labels_)
        for seed in range(5):
            shuffled = np.random.default_rng(seed).permutation(rows)
            assert groups_of_values(shuffled, make().fit(shuffled).labels_) == partition

    def test_distinct_rows_are_permuted_with_their_labels(self, make):
        rows, order = drawn(23), np.random.default_rng(5).permutation(23)
        there = make().fit(rows[order]).labels_
        assert adjusted_rand_score(make().fit(rows).labels_[order], there) == 1

    def test_labels_are_numbered_by_first_appearance(self, make):
        labels = make(4).fit(drawn(30)).labels_
        _, first = np.unique(labels, return_index=True)
        assert labels[np.sort(first)].tolist() == [0, 1, 2, 3]

    def test_single_row(self, make):
        assert make().fit(drawn(1)).labels_.tolist() == [0]

    def test_more_clusters_than_rows(self, make):
        assert make(9).fit(drawn(4)).labels_.tolist() == [0, 1, 2, 3]

    @pytest.mark.parametrize(
        "rows", [np.zeros((6, 4)), ONE_HOT, np.ones((6, 1))], ids=["zeros", "one-hot", "one class"]
    )
    def test_degenerate_rows(self, make, rows):
        labels = make(2).fit(rows).labels_
        assert labels.shape == (len(rows),)
        assert set(labels) <= {0, 1}

    def test_input_unmodified_and_any_sequence(self, make):
        rows = drawn(12).round(1)
        kept = rows.copy()
        labels = make().fit(rows).labels_
        assert (rows == kept).all()
        assert make().fit(rows.tolist()).labels_.tolist() == labels.tolist()

    def test_same_seed_same_result(self, make):
        rows = drawn(40)
        assert make().fit(rows).labels_.tolist() == make().fit(rows).labels_.tolist()
        assert make(seed=np.int64(3)).fit(rows).labels_.tolist() == make(seed=3).fit(rows).labels_.tolist()

    @pytest.mark.parametrize("count", [0, -1, 2.5, True])
    def test_bad_count(self, make, count):
        with pytest.raises(UserError, match=rf"^n_clusters is {count}; it must be a whole number, 1 or more$"):
            make(count).fit(drawn(5))

    @pytest.mark.parametrize(
        ("rows", "sentence"),
        [
            ([[0.5, np.nan]], r"X has nan in row 0, column 1; entries must be finite, not NaN or infinite"),
            ([[0.5, 0.5], [np.inf, 0]], r"X has inf in row 1, column 0; entries must be finite, not NaN or infinite"),
            ([[1.5, -0.5]], r"X has -0.5 in row 0, column 1; entries must be 0 or more"),
            ([0.5, 0.5], r"X has shape \(2,\); it must have two axes, rows and columns"),
            (np.zeros((3, 0)), r"X has 0 feature\(s\) \(shape=\(3, 0\)\) while a minimum of 1 is required"),
            (np.zeros((0, 3)), r"X has 0 sample\(s\) \(shape=\(0, 3\)\) while a minimum of 1 is required"),
            ([["a", "b"]], r"X holds something that is not a number"),
            ([[0.5, 0.5], [1.0]], r"X holds something that is not a number"),
            ([[0.5, 1j]], r"X holds complex numbers; they must be real"),
        ],
    )
    def test_bad_rows(self, make, rows, sentence):
        with pytest.raises(UserError, match=sentence):
            make().fit(rows)

    @pytest.mark.parametrize("seed", [-1, 0.5, "x"])
    def test_bad_seed(self, make, seed):
        with pytest.raises(UserError, match=f"^random_state is {seed!r}; it must be a whole number, 0 or more$"):
            make(seed=seed).fit(drawn(5))

    def test_a_generator_is_a_seed_too(self, make):
        first, again = (make(seed=np.random.RandomState(3)).fit(drawn(40)) for _ in range(2))
        assert first.labels_.tolist() == again.labels_.tolist()
        assert make(seed=None).fit(drawn(40)).labels_.shape == (40,)


class TestSimilarClusters:
    def test_by_hand(self):
        # (.8 .2) and (.6 .4) lie together with centre (.7 .3), the other two mirror them; each of the four adds
        # ½ (.1 ln(8/7) - .1 ln(2/3)) = .05 ln(12/7) or ½ (-.1 ln(6/7) + .1 ln(4/3)) = .05 ln(14/9)
        rows = np.array([[0.8, 0.2], [0.2, 0.8], [0.6, 0.4], [0.4, 0.6]])
        found = SimilarClusters(2).fit(rows)
        assert found.labels_.tolist() == [0, 1, 0, 1]
        np.testing.assert_allclose(found.cluster_centers_, [[0.7, 0.3], [0.3, 0.7]])
        assert found.inertia_ == pytest.approx(2 * 0.05 * (log(12 / 7) + log(14 / 9)))

    def test_equal_rows_weigh_as_many(self):
        rows = np.array([[0.8, 0.2], [0.8, 0.2], [0.8, 0.2], [0.4, 0.6]])
        assert SimilarClusters(1).fit(rows).cluster_centers_[0].tolist() == pytest.approx([0.7, 0.3])

    def test_jeffreys_centre_has_the_least_sum_of_divergences(self):
        rows = drawn(20, alpha=2.0)
        found = SimilarClusters(1, centre="jeffreys").fit(rows)
        assert found.inertia_ == pytest.approx(symmetric_kl(rows, found.cluster_centers_).sum())
        assert found.inertia_ < 0.99 * SimilarClusters(1).fit(rows).inertia_
        for entry in range(5):
            for factor in (0.99, 1.01):
                other = found.cluster_centers_.copy()
                other[0, entry] *= factor
                assert symmetric_kl(rows, other).sum() > found.inertia_

    def test_inertia_and_labels_belong_to_the_centres(self):
        rows = drawn(60)
        found = SimilarClusters(4).fit(rows)
        assert found.predict(rows).tolist() == found.labels_.tolist()
        assert found.inertia_ == pytest.approx(symmetric_kl(rows, found.cluster_centers_).min(1).sum())
        np.testing.assert_allclose(found.cluster_centers_[2], np.maximum(rows[found.labels_ == 2], FLOOR).mean(0))

    def test_no_restart_is_better(self):
        rows = drawn(60)
        single = [SimilarClusters(6, random_state=seed, n_init=1).fit(rows).inertia_ for seed in range(10)]
        assert SimilarClusters(6, n_init=30).fit(rows).inertia_ <= min(single) + 1e-9
        assert max(single) > min(single) + 1e-3

    def test_fewer_distinct_rows_than_clusters(self):
        found = SimilarClusters(4).fit(np.eye(3)[[0, 2, 0, 1, 2]])
        assert found.labels_.tolist() == [0, 1, 0, 2, 1]
        assert found.inertia_ == 0
        assert len(SimilarClusters(4).fit(np.full((5, 3), 1 / 3)).cluster_centers_) == 1

    def test_as_many_clusters_as_distinct_rows(self):
        found = SimilarClusters(12, n_init=1).fit(drawn(12))
        assert sorted(found.labels_) == list(range(12))
        assert found.inertia_ == pytest.approx(0)

    def test_a_centre_without_rows_gets_the_farthest_row(self):
        from shoal.clusterers.similar import _assigned

        rows = np.array([[0.9, 0.1], [0.8, 0.2], [0.3, 0.7]])
        unused = np.array([[0.9, 0.1], [0.01, 0.99], [1e-6, 1.0]])
        # nearest centres 0, 0 and 1; the third row is farther from its centre than the second, but alone there
        assert _assigned(rows, unused).tolist() == [0, 2, 1]

    def test_predict(self):
        found = SimilarClusters(2).fit(ONE_HOT[[0, 1]])
        assert found.predict([[0.1, 0.9, 0, 0], [0.9, 0.1, 0, 0]]).tolist() == [1, 0]
        assert found.predict(np.empty((0, 4))).shape == (0,)

    def test_bad_predictions(self):
        with pytest.raises(NotFittedError, match="SimilarClusters instance is not fitted yet"):
            SimilarClusters(2).predict(ONE_HOT)
        with pytest.raises(UserError, match="X has 2 features, but SimilarClusters is expecting 4 features as input"):
            SimilarClusters(2).fit(ONE_HOT).predict([[0.5, 0.5]])

    def test_iterations_are_counted_and_limited(self):
        rows = drawn(60)
        whole = SimilarClusters(6, n_init=1).fit(rows)
        assert whole.n_iter_ > 2
        assert SimilarClusters(6, n_init=1, max_iter=2).fit(rows).n_iter_ == 2

    @pytest.mark.parametrize("bad", [{"n_init": 0}, {"max_iter": 0}, {"centre": "median"}])
    def test_bad_parameters(self, bad):
        (name,) = bad
        with pytest.raises(UserError, match=f"^{name} is "):
            SimilarClusters(2, **bad).fit(ONE_HOT)


class TestObjectives:
    def test_by_hand(self):
        # groups {e0, e1} and {e0, e0}: within (13.8155 + 0)/2 with one-hot distance D = (1 - 1e-6) ln 1e6;
        # means (½, ½) and (1, 0 -> 1e-6), so d = ½ [½ ln ½ - ln ½ + (½ - 1e-6) ln 5e5], divided by G(G-1) = 2
        within, between = objectives(np.eye(2)[[0, 1, 0, 0]], [7, 7, 3, 3])
        assert within == pytest.approx((1 - 1e-6) * log(1e6) / 2)
        assert between == pytest.approx(0.5 * (0.5 * log(2) + (0.5 - 1e-6) * log(5e5)) / 2)

    @pytest.mark.parametrize("labels", [[0, 0, 1, 1, 2, 2], [0, 1, 1, 1, 1, 2], [0] * 6, [0, 1, 2, 3, 4, 5]])
    @pytest.mark.parametrize("rows", [drawn(6), drawn(6).round(1), np.zeros((6, 3))], ids=["drawn", "rounded", "zeros"])
    def test_are_the_double_sums(self, rows, labels):
        assert objectives(rows, labels) == pytest.approx(naive_objectives(rows, np.array(labels)), abs=1e-12)

    def test_empty(self):
        assert objectives(np.empty((0, 3)), []) == (0, 0)

    def test_a_label_for_each_row(self):
        with pytest.raises(UserError, match=r"labels has shape \(2,\); it must be \(6,\)"):
            objectives(drawn(6), [0, 1])


def j(rows, labels):
    within, between = naive_objectives(rows, labels)
    return within - between


def algorithm_1(rows, labels):
    """Word for word, J computed afresh for every swap that is tried."""
    labels, count = labels.copy(), labels.max() + 1

    def closest(g):
        pairs = combinations(np.flatnonzero(labels == g), 2)
        return min((divergence(rows[a], rows[b]), a) for a, b in pairs)

    improved = True
    while improved:
        improved = False
        order = sorted(range(count), key=closest)
        for k, other in combinations(order, 2):
            pair = [closest(k)[1], closest(other)[1]]
            swapped = labels.copy()
            swapped[pair] = labels[pair[::-1]]
            if j(rows, swapped) > j(rows, labels) + 1e-11:
                labels, improved = swapped, True
    return labels


class TestRepulsiveClusters:
    @pytest.mark.parametrize("seed", range(3))
    def test_is_algorithm_1(self, seed):
        x = drawn(16, seed=seed)
        found = RepulsiveClusters(4, random_state=seed)
        order = repulsive._shuffled(x, seed)
        expected = algorithm_1(x[order], np.arange(16) % 4)
        assert len(found.fit(x).history_) > 2
        assert groups_of_values(x[order], expected) == groups_of_values(x, found.labels_)

    @pytest.mark.parametrize("swaps", ["closest", "all"])
    @pytest.mark.parametrize(("rows", "groups"), [(6, 3), (20, 4), (23, 5), (7, 4), (9, 1)])
    def test_sizes_history_and_objectives(self, swaps, rows, groups):
        x = drawn(rows).round(2)
        found = RepulsiveClusters(groups, swaps=swaps).fit(x)
        sizes = np.bincount(found.labels_)
        assert len(sizes) == groups
        assert sizes.max() - sizes.min() <= (rows % groups > 0)
        assert (np.diff(found.history_) > 0).all()
        assert found.history_[-1] == pytest.approx(j(x, found.labels_), abs=1e-10)
        assert (found.within_, found.between_) == pytest.approx(naive_objectives(x, found.labels_), abs=1e-10)

    def test_swaps_of_all_pairs_end_where_no_swap_helps(self):
        for seed in range(5):
            x = drawn(9, seed=seed).round(2)
            labels = RepulsiveClusters(3, random_state=seed, swaps="all").fit(x).labels_
            best = j(x, labels)
            for a, b in combinations(range(9), 2):
                other = labels.copy()
                other[[a, b]] = labels[[b, a]]
                assert j(x, other) <= best + 1e-9

    def test_swaps_of_all_pairs_reach_the_best_of_15_groupings(self):
        # six clients in three pairs: the partner of 0 in 5 ways, the partner of the next free one in 3
        x = drawn(6)
        best = max(
            j(x, np.array(labels))
            for labels in {(0, *rest) for rest in np.ndindex(3, 3, 3, 3, 3)}
            if sorted(labels) == [0, 0, 1, 1, 2, 2]
        )
        found = [RepulsiveClusters(3, random_state=seed, swaps="all").fit(x).history_[-1] for seed in range(4)]
        assert max(found) == pytest.approx(best)

    def test_two_kinds_are_parted_by_hand(self):
        # four groups of two of four e0 and four e1: the best has both kinds in every group, J = (1 - 1e-6) ln 1e6
        for seed in range(10):
            found = RepulsiveClusters(4, random_state=seed).fit(np.eye(2)[[0, 0, 0, 0, 1, 1, 1, 1]])
            assert sorted(found.labels_[:4]) == sorted(found.labels_[4:]) == [0, 1, 2, 3]
            assert found.history_[-1] == pytest.approx((1 - 1e-6) * log(1e6))

    def test_a_swap_needs_a_rise_above_rounding(self):
        found = RepulsiveClusters(4).fit(np.full((20, 7), 1 / 7))
        assert found.history_.tolist() == pytest.approx([0.0], abs=1e-12)
        assert found.n_iter_ == 1

    def test_sweeps_are_limited(self):
        x = drawn(40)
        assert RepulsiveClusters(10).fit(x).n_iter_ > 1
        assert RepulsiveClusters(10, max_iter=1).fit(x).n_iter_ == 1

    def test_only_the_top_groups_swap(self):
        x = drawn(40)
        all_groups, few = RepulsiveClusters(10).fit(x), RepulsiveClusters(10, top=2).fit(x)
        assert all_groups.history_[0] == few.history_[0]
        assert len(few.history_) < len(all_groups.history_)
        assert RepulsiveClusters(10, top=99).fit(x).labels_.tolist() == all_groups.labels_.tolist()

    def test_seeds_start_elsewhere(self):
        x = drawn(40)
        assert (
            RepulsiveClusters(10, random_state=1).fit(x).history_[0]
            != RepulsiveClusters(10, random_state=2).fit(x).history_[0]
        )

    def test_windows_and_blocks_change_nothing(self, monkeypatch):
        x = drawn(60)
        whole = [RepulsiveClusters(groups).fit(x).labels_.tolist() for groups in (3, 20)]
        monkeypatch.setattr(repulsive, "_WINDOW", 3)
        monkeypatch.setattr(repulsive, "_BLOCK", 4)
        assert [RepulsiveClusters(groups).fit(x).labels_.tolist() for groups in (3, 20)] == whole

    @pytest.mark.parametrize("bad", [{"swaps": "some"}, {"top": 1}, {"top": 2.5}, {"max_iter": 0}])
    def test_bad_parameters(self, bad):
        (name,) = bad
        with pytest.raises(UserError, match=f"^{name} is "):
            RepulsiveClusters(2, **bad).fit(ONE_HOT)
