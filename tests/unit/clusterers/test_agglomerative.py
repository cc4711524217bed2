"""Clusters of updates that are merged while their directions are similar (FLACC)."""

import numpy as np
import pytest
from sklearn.metrics import adjusted_rand_score
from sklearn.metrics.pairwise import cosine_similarity

from shoal.clusterers import GreedyClusters
from shoal.errors import UserError

CHAIN = np.array(
    [
        [1.0, 0.9, 0.5, 0.1],
        [0.9, 1.0, 0.6, -0.2],
        [0.5, 0.6, 1.0, 0.7],
        [0.1, -0.2, 0.7, 1.0],
    ]
)


class TestGreedyClusters:
    def test_order_of_merging_by_hand(self):
        # 0 and 1 are merged first (0.9). The similarity of {0, 1} and 2 is then 0.5, that of 2 and 3 is 0.7: these are
        # next. The smallest similarity between the two pairs is -0.2, which is not above 0.
        found = GreedyClusters().fit(CHAIN)
        assert found.labels_.tolist() == [0, 0, 1, 1]
        assert found.merges_.tolist() == [0.9, 0.7]

    def test_threshold(self):
        assert GreedyClusters(-0.3).fit(CHAIN).merges_.tolist() == [0.9, 0.7, -0.2]
        assert GreedyClusters(-0.2).fit(CHAIN).merges_.tolist() == [0.9, 0.7]
        assert GreedyClusters(0.7).fit(CHAIN).labels_.tolist() == [0, 0, 1, 2]

    def test_an_unknown_similarity_does_not_prevent_a_merge(self):
        # without the pair at -0.2, the smallest known similarity is the 0.1 of 0 and 3
        unknown = CHAIN.copy()
        unknown[1, 3] = unknown[3, 1] = np.nan
        found = GreedyClusters().fit(unknown)
        assert found.labels_.tolist() == [0, 0, 0, 0]
        assert found.merges_.tolist() == [0.9, 0.7, 0.1]

    def test_one_of_two_entries_is_enough(self):
        half = CHAIN.copy()
        half[1, 3] = half[2, 0] = np.nan
        found = GreedyClusters().fit(half)
        assert found.labels_.tolist() == [0, 0, 1, 1]
        assert found.merges_.tolist() == [0.9, 0.7]

    def test_bad_threshold(self):
        with pytest.raises(UserError, match=r"^threshold is nan; it must be a finite number$"):
            GreedyClusters(np.nan).fit(CHAIN)

    def test_clusters_without_a_known_similarity_are_not_merged(self):
        assert GreedyClusters(-1).fit(np.full((3, 3), np.nan)).labels_.tolist() == [0, 1, 2]

    def test_continues_from_given_clusters(self):
        # {1, 2} is given: its similarity with 0 is 0.5 and with 3 is -0.2, so 0 joins and 3 stays alone
        found = GreedyClusters().fit(CHAIN, start=[4, 7, 7, 1])
        assert found.labels_.tolist() == [0, 0, 0, 1]
        assert found.merges_.tolist() == [0.5]

    def test_is_complete_linkage_where_all_is_known(self):
        from scipy.cluster.hierarchy import fcluster, linkage
        from scipy.spatial.distance import squareform

        for seed in range(5):
            rows = np.random.default_rng(seed).normal(size=(25, 6))
            similarities = cosine_similarity(rows)
            tree = linkage(squareform(1 - similarities, checks=False), "complete")
            expected = fcluster(tree, 1 - 1e-12, "distance")
            assert adjusted_rand_score(expected, GreedyClusters().fit(similarities).labels_) == 1

    def test_partition_does_not_depend_on_the_order_of_rows(self):
        similarities = cosine_similarity(np.random.default_rng(3).normal(size=(25, 6)))
        similarities[4, 9] = similarities[9, 4] = np.nan
        labels = GreedyClusters().fit(similarities).labels_
        for seed in range(5):
            order = np.random.default_rng(seed).permutation(25)
            reordered = GreedyClusters().fit(similarities[np.ix_(order, order)]).labels_
            assert adjusted_rand_score(labels[order], reordered) == 1

    @pytest.mark.parametrize(
        ("similarities", "labels"),
        [
            (np.ones((1, 1)), [0]),
            (np.ones((4, 4)), [0, 0, 0, 0]),
            (np.zeros((3, 3)), [0, 1, 2]),
        ],
        ids=["single", "equal", "nothing in common"],
    )
    def test_degenerate(self, similarities, labels):
        assert GreedyClusters().fit(similarities).labels_.tolist() == labels

    def test_input_unmodified(self):
        similarities, start = CHAIN.copy(), np.array([3, 1, 1, 0])
        GreedyClusters().fit(similarities, start=start)
        assert (similarities == CHAIN).all()
        assert start.tolist() == [3, 1, 1, 0]

    @pytest.mark.parametrize(
        ("similarities", "start", "sentence"),
        [
            (np.ones((2, 3)), None, r"X has shape \(2, 3\); it must be square and symmetric"),
            ([[1, 0.5], [0.4, 1]], None, r"must be square and symmetric"),
            ([[1, np.inf], [np.inf, 1]], None, r"X has an infinite entry"),
            (CHAIN, [0, 1], r"start has shape \(2,\); it must be \(4,\), a label for each row of X"),
            (np.empty((0, 0)), None, r"X has 0 feature\(s\)"),
        ],
    )
    def test_bad_input(self, similarities, start, sentence):
        with pytest.raises(UserError, match=sentence):
            GreedyClusters().fit(similarities, start=start)
