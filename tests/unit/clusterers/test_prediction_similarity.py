"""Clusters of clients whose models make similar predictions (FLIS)."""

import numpy as np
import pytest
from selector_inputs import read_only

from shoal.clusterers.prediction_similarity import inference_similarity, similarity_clusters
from shoal.errors import UserError


class TestInferenceSimilarity:
    PREDICTIONS = read_only([[0, 1, 2, 3], [0, 1, 2, 2], [3, 3, 3, 3], [0, 1, 2, 3]], int)
    SIMILARITY = np.array([[4, 3, 1, 4], [3, 4, 0, 3], [1, 0, 4, 1], [4, 3, 1, 4]]) / 4

    def test_by_hand(self):
        assert inference_similarity(self.PREDICTIONS) == pytest.approx(self.SIMILARITY)
        assert inference_similarity(np.eye(4)[self.PREDICTIONS]) == pytest.approx(self.SIMILARITY)
        assert inference_similarity(self.PREDICTIONS - 7) == pytest.approx(self.SIMILARITY)

    def test_probabilities_and_zeros(self):
        # (1, 0) and (.5, .5): cosine 1 / sqrt(2); a row of zeros is similar to itself only
        similarity = inference_similarity([[[1, 0]], [[0.5, 0.5]], [[0, 0]]])
        assert similarity == pytest.approx(np.array([[1, 0.5**0.5, 0], [0.5**0.5, 1, 0], [0, 0, 1]]))

    def test_clusters_by_threshold(self):
        assert similarity_clusters(read_only(self.SIMILARITY), threshold=1.0).tolist() == [0, 1, 2, 0]
        assert similarity_clusters(self.SIMILARITY, threshold=0.75).tolist() == [0, 0, 1, 0]
        # 2 agrees with 0 on a quarter but with 1 on nothing: all pairs of a cluster must be similar
        assert similarity_clusters(self.SIMILARITY, threshold=0.25).tolist() == [0, 0, 1, 0]
        assert similarity_clusters(self.SIMILARITY, threshold=0.0).tolist() == [0, 0, 0, 0]

    def test_labels_are_numbered_by_first_appearance(self):
        for seed in range(20):
            similarity = inference_similarity(np.random.default_rng(seed).integers(0, 3, (12, 9)))
            for labels in (
                similarity_clusters(similarity, threshold=0.4),
                similarity_clusters(similarity, n_clusters=5),
            ):
                numbers, first = np.unique(labels, return_index=True)
                assert numbers.tolist() == list(range(len(numbers)))
                assert (np.diff(first) > 0).all()

    def test_clusters_by_number(self):
        for n, labels in (
            (1, [0, 0, 0, 0]),
            (2, [0, 0, 1, 0]),
            (3, [0, 1, 2, 0]),
            (4, [0, 1, 2, 3]),
            (9, [0, 1, 2, 3]),
        ):
            assert similarity_clusters(self.SIMILARITY, n_clusters=n).tolist() == labels

    def test_labels_follow_a_permutation(self):
        order = np.array([2, 3, 1, 0])
        labels = similarity_clusters(inference_similarity(self.PREDICTIONS[order]), n_clusters=2)
        assert labels.tolist() == [0, 1, 1, 1]

    def test_equal_rows_one_row_and_no_row(self):
        assert similarity_clusters(np.ones((3, 3)), threshold=0.9).tolist() == [0, 0, 0]
        assert similarity_clusters([[1.0]], threshold=0.9).tolist() == [0]
        assert similarity_clusters(np.zeros((0, 0)), n_clusters=2).tolist() == []

    def test_bad_input(self):
        for bad in (np.zeros((2, 3)), np.zeros((2, 0), dtype=int), np.zeros(3, dtype=int)):
            with pytest.raises(UserError, match="predictions"):
                inference_similarity(bad)
        with pytest.raises(UserError, match="exactly one"):
            similarity_clusters(self.SIMILARITY)
        with pytest.raises(UserError, match="exactly one"):
            similarity_clusters(self.SIMILARITY, threshold=0.5, n_clusters=2)
        with pytest.raises(UserError, match="n_clusters is 0"):
            similarity_clusters(self.SIMILARITY, n_clusters=0)
        with pytest.raises(UserError, match="symmetric"):
            similarity_clusters(np.triu(np.ones((3, 3))), threshold=0.5)
