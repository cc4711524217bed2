"""Silhouettes, overlap and purity of clusters that may share rows."""

import warnings

import numpy as np
import pytest
from sklearn.metrics import silhouette_score

from shoal.clusterers import OverlappingClusters
from shoal.clusterers.quality import compare_partitions, hard_quality, overlap_quality
from shoal.errors import UserError

SHARED = np.array([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])
IN_BOTH = np.array([[True, False], [False, True], [True, True]])
Q = 1 - np.sqrt(0.5)  # distance of (1, 1) from either axis


def random_rows(rows=30, seed=0):
    return np.random.default_rng(seed).normal(size=(rows, 4))


class TestOverlap:
    def test_by_hand(self):
        quality = overlap_quality(SHARED, IN_BOTH, truth=["a", "b", "b"])
        assert quality["overlap"] == pytest.approx(4 / 3)
        # centres (1, ½) and (½, 1) are equally near to (1, 1): it counts in the first, labels 0 1 0. Row 0 has a = q
        # and b = 1, row 1 is alone, row 2 has a = b = q
        assert quality["silhouette"] == pytest.approx((1 - Q) / 3)
        # row 0 in the first: a = q, b = (1 + q) / 2, and row 1 alike; row 2 is in all: two zeros of four memberships
        b = (1 + Q) / 2
        assert quality["silhouette_each"] == pytest.approx(2 * (b - Q) / b / 4)
        # two rows in two clusters
        assert quality["silhouette_core"] == 0
        # labels a b in the first cluster, b b in the second
        assert quality["purity"] == pytest.approx(3 / 4)

    def test_of_three_clusters_by_hand(self):
        # e1 e1 | e2 e2 | e3 e3, and (1, 1, 0) in the first two: q from their rows, 1 from the third's.
        # e1 (two of them, and e2 alike): a = (0 + q) / 2, b = (1 + 1 + q) / 3 of the second, less than 1 of the third
        rows = np.eye(3)[[0, 0, 1, 1, 2, 2]]
        rows = np.vstack([rows, [1.0, 1.0, 0.0]])
        member = np.array([[1, 0, 0]] * 2 + [[0, 1, 0]] * 2 + [[0, 0, 1]] * 2 + [[1, 1, 0]], dtype=bool)
        quality = overlap_quality(rows, member, truth=[0, 0, 1, 1, 2, 2, 0])
        b = (2 + Q) / 3
        axes = (b - Q / 2) / b
        # third cluster: a = 0, so 1 each. The shared row, twice: a = q, b = 1
        assert quality["silhouette_each"] == pytest.approx((4 * axes + 2 * 1 + 2 * (1 - Q)) / 8)
        assert quality["silhouette_core"] == pytest.approx(1)
        assert quality["overlap"] == pytest.approx(8 / 7)
        assert quality["purity"] == pytest.approx((3 + 2 + 2) / 8)

    def test_core_leaves_shared_rows_out(self):
        member = np.array([[1, 0], [1, 0], [0, 1], [0, 1], [1, 1]], dtype=bool)
        rows = [[1, 0], [2, 0], [0, 1], [0, 3], [1, 1]]
        quality = overlap_quality(rows, member)
        assert quality["silhouette_core"] == pytest.approx(1)
        assert quality["silhouette"] < 1
        assert "purity" not in quality

    def test_rows_in_every_cluster_have_no_silhouette(self):
        quality = overlap_quality(random_rows(6), np.ones((6, 3), dtype=bool), truth=[0, 0, 0, 0, 1, 1])
        assert quality == {
            "overlap": 3.0,
            "silhouette": 0.0,
            "silhouette_each": 0.0,
            "silhouette_core": 0.0,
            "purity": pytest.approx(4 / 6),
        }

    def test_a_cluster_without_members_is_left_out(self):
        empty = np.column_stack([IN_BOTH, np.zeros(3, dtype=bool)])
        assert overlap_quality(SHARED, empty) == overlap_quality(SHARED, IN_BOTH)

    def test_order_of_rows_and_lengths_do_not_matter(self):
        rows = random_rows()
        member = OverlappingClusters(validate=False).fit(rows).membership_
        quality, order = overlap_quality(rows, member, np.arange(30) % 3), np.random.default_rng(1).permutation(30)
        assert quality["overlap"] > 1
        assert overlap_quality(rows[order], member[order], (np.arange(30) % 3)[order]) == pytest.approx(quality)
        assert overlap_quality(1e-9 * rows, member, np.arange(30) % 3) == pytest.approx(quality)

    def test_input_unmodified(self):
        rows, member = SHARED.copy(), IN_BOTH.copy()
        overlap_quality(rows, member)
        assert (rows == SHARED).all()
        assert (member == IN_BOTH).all()

    @pytest.mark.parametrize(
        ("rows", "member", "truth", "sentence"),
        [
            (SHARED, IN_BOTH[:2], None, r"^membership has 2 rows; it must have 3, as many as X$"),
            (SHARED, IN_BOTH * 0.5, None, r"^membership is float64 \(3, 2\); it must be a bool for each row and clus"),
            (SHARED, [True] * 3, None, r"^membership is bool \(3,\)"),
            (SHARED, IN_BOTH & [[1], [0], [1]], None, r"^membership is int64"),
            (SHARED, IN_BOTH & [[True], [False], [True]], None, r"^membership has row 1 in no cluster"),
            (SHARED, IN_BOTH, [0, 1], r"^truth has shape \(2,\); it must be \(3,\), a label for each row of X$"),
            (
                np.empty((0, 2)),
                IN_BOTH[:0],
                None,
                r"^X has 0 sample\(s\) \(shape=\(0, 2\)\) while a minimum of 1",
            ),
            ([[np.nan]], [[True]], None, r"^X has nan in row 0, column 0"),
        ],
    )
    def test_bad_input(self, rows, member, truth, sentence):
        with pytest.raises(UserError, match=sentence):
            overlap_quality(rows, member, truth)


class TestPartition:
    def test_all_silhouettes_agree_with_scikit_learn(self):
        labels = np.random.default_rng(1).integers(0, 4, 30)
        labels[0] = 7  # alone
        quality = hard_quality(random_rows(), labels)
        expected = silhouette_score(random_rows(), labels, metric="cosine")
        assert quality["overlap"] == 1
        for name in ("silhouette", "silhouette_each", "silhouette_core"):
            assert quality[name] == pytest.approx(expected)

    def test_rows_of_zeros_are_at_distance_1(self):
        # e1 twice: a = 0, b = 1; zeros twice: a = 1, b = 1
        quality = hard_quality([[1, 0], [1, 0], [0, 0], [0, 0]], ["x", "x", "y", "y"], [0, 1, 1, 1])
        assert quality["silhouette"] == quality["silhouette_each"] == 0.5
        assert quality["purity"] == 3 / 4

    @pytest.mark.parametrize("labels", [[0, 0, 0], [0, 1, 2]], ids=["one", "as many as rows"])
    def test_undefined_is_zero(self, labels):
        assert set(hard_quality(SHARED, labels).values()) == {0.0, 1.0}  # 1 is the overlap

    def test_equal_rows_have_no_silhouette(self):
        assert hard_quality(np.full((4, 3), 0.1), [0, 0, 1, 1])["silhouette"] == 0

    def test_bad_labels(self):
        with pytest.raises(UserError, match=r"labels has shape \(2,\); it must be \(3,\)"):
            hard_quality(SHARED, [0, 1])


class TestComparePartitions:
    def test_by_hand(self):
        quality = compare_partitions(np.eye(3)[[0, 1, 2, 0, 1, 2]], 3, random_state=0, truth=[0, 1, 2, 0, 1, 2])
        perfect = dict.fromkeys(("overlap", "silhouette", "silhouette_each", "silhouette_core", "purity"), 1.0)
        assert quality == {"kmeans": perfect, "hierarchical": perfect}

    def test_kmeans_goes_by_length_and_hierarchical_by_direction(self):
        # three rows point along e1 and one along e2, which cosines separate. k-means separates long from short rows
        rows = np.array([[10.0, 0.0], [10.0, 0.1], [0.1, 0.0], [0.0, 0.1]])
        quality = compare_partitions(rows, 2, 0, truth=[0, 0, 0, 1])
        assert quality["hierarchical"]["purity"] == 1
        assert quality["kmeans"]["purity"] == 3 / 4

    def test_same_seed_same_result(self):
        assert compare_partitions(random_rows(), 5, 3) == compare_partitions(random_rows(), 5, 3)

    @pytest.mark.parametrize(
        "rows",
        [np.ones((1, 2)), np.ones((4, 2)), np.zeros((4, 2)), np.eye(2), np.vstack([np.eye(2), np.zeros((2, 2))])],
    )
    def test_degenerate(self, rows):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for one in compare_partitions(rows, 3, 0).values():
                assert np.isfinite(list(one.values())).all()

    def test_bad_input(self):
        with pytest.raises(UserError, match="n_clusters is 0"):
            compare_partitions(SHARED, 0, 0)
        with pytest.raises(UserError, match="random_state is -1"):
            compare_partitions(SHARED, 2, -1)
