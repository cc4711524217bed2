"""Clusters of updates that are merged while they point alike (FLACC)."""

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
        # 0 and 1 first (0.9). {0, 1} and 2 are then 0.5 alike, 2 and 3 are 0.7: these are next.
        # The least between the two pairs is -0.2: not above 0
        found = GreedyClusters().fit(CHAIN)
        assert found.labels_.tolist() == [0, 0, 1, 1]
        assert found.merges_.tolist() == [0.9, 0.7]

    def test_threshold(self):
        assert GreedyClusters(-0.3).fit(CHAIN).merges_.tolist() == [0.9, 0.7, -0.2]
        assert GreedyClusters(-0.2).fit(CHAIN).merges_.tolist() == [0.9, 0.7]
        assert GreedyClusters(0.7).fit(CHAIN).labels_.tolist() == [0, 0, 1, 2]

    def test_what_is_not_known_is_no_objection(self):
        # without the one pair that objects, 0 and 3 speak for it with 0.1
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

    def test_nor_a_reason(self):
        assert GreedyClusters(-1).fit(np.full((3, 3), np.nan)).labels_.tolist() == [0, 1, 2]

    def test_goes_on_from_a_start(self):
        # {1, 2} is given: 0 is 0.5 like it, 3 is -0.2; 0 joins, and 3 then stays alone
        found = GreedyClusters().fit(CHAIN, start=[4, 7, 7, 1])
        assert found.labels_.tolist() == [0, 0, 0, 1]
        assert found.merges_.tolist() == [0.5]

    def test_is_complete_linkage_where_all_is_known(self):
        from scipy.cluster.hierarchy import fcluster, linkage
        from scipy.spatial.distance import squareform

        for seed in range(5):
            rows = np.random.default_rng(seed).normal(size=(25, 6))
            alike = cosine_similarity(rows)
            tree = linkage(squareform(1 - alike, checks=False), "complete")
            expected = fcluster(tree, 1 - 1e-12, "distance")
            assert adjusted_rand_score(expected, GreedyClusters().fit(alike).labels_) == 1

    def test_partition_does_not_depend_on_the_order_of_rows(self):
        alike = cosine_similarity(np.random.default_rng(3).normal(size=(25, 6)))
        alike[4, 9] = alike[9, 4] = np.nan
        labels = GreedyClusters().fit(alike).labels_
        for seed in range(5):
            order = np.random.default_rng(seed).permutation(25)
            there = GreedyClusters().fit(alike[np.ix_(order, order)]).labels_
            assert adjusted_rand_score(labels[order], there) == 1

    @pytest.mark.parametrize(
        ("alike", "labels"),
        [
            (np.ones((1, 1)), [0]),
            (np.ones((4, 4)), [0, 0, 0, 0]),
            (np.zeros((3, 3)), [0, 1, 2]),
        ],
        ids=["single", "equal", "nothing in common"],
    )
    def test_degenerate(self, alike, labels):
        assert GreedyClusters().fit(alike).labels_.tolist() == labels

    def test_input_unmodified(self):
        alike, start = CHAIN.copy(), np.array([3, 1, 1, 0])
        GreedyClusters().fit(alike, start=start)
        assert (alike == CHAIN).all()
        assert start.tolist() == [3, 1, 1, 0]

    @pytest.mark.parametrize(
        ("alike", "start", "sentence"),
        [
            (np.ones((2, 3)), None, r"X has shape \(2, 3\); it must be square and symmetric"),
            ([[1, 0.5], [0.4, 1]], None, r"must be square and symmetric"),
            ([[1, np.inf], [np.inf, 1]], None, r"X has an infinite entry"),
            (CHAIN, [0, 1], r"start has shape \(2,\); it must be \(4,\), a label for each row of X"),
            (np.empty((0, 0)), None, r"X has 0 feature\(s\)"),
        ],
    )
    def test_bad_input(self, alike, start, sentence):
        with pytest.raises(UserError, match=sentence):
            GreedyClusters().fit(alike, start=start)
