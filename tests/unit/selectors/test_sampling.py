"""Random clients, and the clients of the largest losses."""

import numpy as np
import pytest
from selector_inputs import NUM_CLIENTS, frequencies, read_only

from shoal.errors import UserError
from shoal.selectors import sampling


class TestChoice:
    def test_by_size_inclusion(self):
        # sizes 1, 2, 3; 2 of 3. Client 0 is in if it is first (1/6), or second after 1 (1/3 * (1/6)/(2/3) = 1/12)
        # or second after 2 (1/2 * (1/6)/(1/2) = 1/6): 5/12. Client 1: 1/3 + 1/15 + 1/3 = 11/15. Client 2: 2 less both.
        found = frequencies(lambda seed: sampling.sample_by_size([1, 2, 3], [0, 1, 2], 2, seed), 3000, 3)
        assert found == pytest.approx([5 / 12, 11 / 15, 17 / 20], abs=0.04)  # 4.4 standard deviations

    def test_by_size_counts_only_those_available(self):
        found = frequencies(lambda seed: sampling.sample_by_size([1, 1000, 3], [0, 2], 1, seed), 3000, 3)
        assert found == pytest.approx([0.25, 0, 0.75], abs=0.04)

    def test_size_zero_only_when_no_other_client_is_left(self):
        sizes = [0, 5, 0, 1, 0]
        for seed in range(50):
            assert sampling.sample_by_size(sizes, range(5), 2, seed).tolist() == [1, 3]
        found = frequencies(lambda seed: sampling.sample_by_size(sizes, range(5), 3, seed), 1500, 5)
        assert found == pytest.approx([1 / 3, 1, 1 / 3, 1, 1 / 3], abs=0.06)

    @pytest.mark.parametrize("bad", [np.nan, np.inf, -1.0])
    def test_bad_sizes_are_refused(self, bad):
        with pytest.raises(UserError, match=f"sizes has {bad} for client 1"):
            sampling.sample_by_size([1, bad, 2], [0], 1, 0)

    def test_largest_ties_and_missing_scores(self):
        scores = read_only([2.0, np.nan, 3.0, 2.0, -np.inf, np.nan])
        everybody = range(6)
        assert sampling.select_largest(scores, everybody, 2).tolist() == [0, 2]
        assert sampling.select_largest(scores, [5, 4, 3, 2, 1, 0], 2).tolist() == [0, 2]
        assert sampling.select_largest(scores, everybody, 4).tolist() == [0, 2, 3, 4]  # even the worst score beats none
        assert sampling.select_largest(scores, everybody, 5).tolist() == [0, 1, 2, 3, 4]
        assert sampling.select_largest(scores, [1, 5], 1).tolist() == [1]
        assert sampling.select_largest(np.full(4, np.nan), range(4), 2).tolist() == [0, 1]

    def test_largest_follows_a_relabelling(self):
        order = np.random.default_rng(0).permutation(NUM_CLIENTS)
        scores = np.linspace(-1, 1, NUM_CLIENTS)
        again = sampling.select_largest(scores[order], range(NUM_CLIENTS), 5)
        assert sorted(order[again]) == sampling.select_largest(scores, range(NUM_CLIENTS), 5).tolist()

    def test_scores_must_be_one_per_client(self):
        with pytest.raises(UserError, match=r"scores has shape \(2, 2\)"):
            sampling.select_largest(np.zeros((2, 2)), [0], 1)
