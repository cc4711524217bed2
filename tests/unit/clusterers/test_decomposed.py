"""Clusters of updates by their main directions (FedGroup)."""

import numpy as np
import pytest
from sklearn.metrics import adjusted_rand_score
from sklearn.metrics.pairwise import cosine_similarity

from shoal.clusterers import DecomposedClusters
from shoal.clusterers.decomposed import decomposed_cosines
from shoal.errors import UserError


def planted(per=5, groups=3, width=40, noise=0.3, seed=0):
    """Returns updates of random lengths around one direction for each planted group, and the group of each."""
    rng = np.random.default_rng(seed)
    centres = np.linalg.qr(rng.normal(size=(width, groups)))[0].T
    rows = np.repeat(centres, per, axis=0) + noise * rng.normal(size=(per * groups, width)) / np.sqrt(width)
    return rows * rng.uniform(0.5, 5, (len(rows), 1)), np.repeat(np.arange(groups), per)


class TestDecomposedCosines:
    def test_by_hand(self):
        # XᵀX = [[5, 4], [4, 5]]: directions (1, 1)/√2 with value 9 and (1, -1)/√2 with value 1;
        # (2, 1) makes cosines 3/√10 and 1/√10 with them, (1, 2) makes 3/√10 and -1/√10
        found = decomposed_cosines(np.array([[2.0, 1.0], [1.0, 2.0]]), 2) * np.sqrt(10)
        np.testing.assert_allclose(np.abs(found), [[3, 1], [3, 1]])
        assert found[0, 0] == pytest.approx(found[1, 0])
        assert found[0, 1] == pytest.approx(-found[1, 1])

    def test_the_distance_of_cosines_by_hand(self):
        # the same rows: EDC without its factor is |1/√10 - (-1/√10)|; with one direction they are the same
        rows = np.array([[2.0, 1.0], [1.0, 2.0]])
        a, b = decomposed_cosines(rows, 2)
        assert np.linalg.norm(a - b) == pytest.approx(2 / np.sqrt(10))
        a, b = decomposed_cosines(rows, 1)
        assert np.linalg.norm(a - b) == pytest.approx(0)

    def test_length_does_not_matter_but_sign_does(self):
        # all along e1: one direction, and the row that points the other way is at distance 2
        found = decomposed_cosines(np.array([[3.0, 0, 0], [1.0, 0, 0], [-2.0, 0, 0]]), 3)
        assert np.abs(found[:, 0] - [1, 1, -1]).max() == pytest.approx(0)
        assert found.shape == (3, 1)

    def test_equals_cosines_with_singular_vectors(self):
        rows, _ = planted()
        vectors = np.linalg.svd(rows, full_matrices=False)[2][:4]
        np.testing.assert_allclose(np.abs(decomposed_cosines(rows, 4)), np.abs(cosine_similarity(rows, vectors)))

    def test_a_row_of_zeros_has_no_direction(self):
        found = decomposed_cosines(np.array([[0.0, 0.0], [1.0, 0.0]]), 2)
        assert found.tolist() == [[0.0], [1.0]]


class TestDecomposedClusters:
    def test_by_hand(self):
        found = DecomposedClusters(2).fit([[3, 0, 0], [0, 2, 0], [1, 0, 0], [0, 7, 0]])
        assert found.labels_.tolist() == [0, 1, 0, 1]

    @pytest.mark.parametrize("seed", range(3))
    def test_planted_directions_are_found(self, seed):
        rows, truth = planted(groups=4, seed=seed)
        assert adjusted_rand_score(truth, DecomposedClusters(4, random_state=seed).fit(rows).labels_) == 1

    def test_partition_does_not_depend_on_the_order_of_rows(self):
        rows = np.random.default_rng(1).normal(size=(30, 8))  # no structure: k-means has many local optima
        labels = DecomposedClusters(5, n_init=1).fit(rows).labels_
        for seed in range(5):
            order = np.random.default_rng(seed).permutation(30)
            assert adjusted_rand_score(labels[order], DecomposedClusters(5, n_init=1).fit(rows[order]).labels_) == 1

    @pytest.mark.parametrize("seed_of_rows", [4, 32, 50])
    def test_rounding_errors_do_not_change_the_clusters(self, seed_of_rows):
        # Without clear clusters, k-means depends on the order in which it is given the rows.
        rows = np.random.default_rng(seed_of_rows).normal(size=(5, 40))
        labels = DecomposedClusters(3).fit(rows).labels_
        for seed in range(20):
            noise = np.random.default_rng(seed).uniform(-1e-9, 1e-9, size=rows.shape)
            assert DecomposedClusters(3).fit(rows + noise).labels_.tolist() == labels.tolist()

    def test_partition_does_not_depend_on_lengths_or_on_the_order_of_columns(self):
        rows, truth = planted()
        permuted = rows[:, np.random.default_rng(0).permutation(rows.shape[1])] * 7.0
        assert adjusted_rand_score(truth, DecomposedClusters(3).fit(permuted).labels_) == 1

    def test_labels_are_numbered_by_first_appearance(self):
        rows, _ = planted()
        labels = DecomposedClusters(3).fit(rows[::-1]).labels_
        assert labels[[0, 5, 10]].tolist() == [0, 1, 2]

    @pytest.mark.parametrize(
        ("rows", "labels"),
        [
            (np.ones((1, 4)), [0]),
            (np.zeros((3, 4)), [0, 0, 0]),
            (np.ones((3, 4)), [0, 0, 0]),
            (np.eye(2), [0, 1]),
        ],
        ids=["single", "zeros", "equal", "fewer than clusters"],
    )
    def test_degenerate(self, rows, labels):
        assert DecomposedClusters(3).fit(rows).labels_.tolist() == labels

    def test_input_unmodified_and_same_seed_same_result(self):
        rows, _ = planted(noise=2.0)
        original = rows.copy()
        first = DecomposedClusters(3, random_state=5).fit(rows)
        assert (rows == original).all()
        assert (DecomposedClusters(3, random_state=5).fit(rows.tolist()).labels_ == first.labels_).all()

    @pytest.mark.parametrize(
        ("clusters", "rows", "sentence"),
        [
            (0, [[1.0]], r"n_clusters is 0; it must be a whole number, 1 or more"),
            (2, [[1.0, np.nan]], r"X has nan in row 0, column 1; entries must be finite, not NaN or infinite$"),
            (2, [1.0, 2.0], r"X has shape \(2,\); it must have two axes, rows and columns"),
        ],
    )
    def test_bad_input(self, clusters, rows, sentence):
        with pytest.raises(UserError, match=sentence):
            DecomposedClusters(clusters).fit(rows)
