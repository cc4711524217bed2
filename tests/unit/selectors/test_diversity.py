"""Clients selected by the diversity of their gradients (DELTA)."""

import numpy as np
import pytest
from selector_inputs import GRADIENTS, NUM_CLIENTS, SAMPLE_FRACTIONS, SIZES, frequencies, read_only

from shoal.errors import UserError
from shoal.selectors import diversity


class TestDiversity:
    def test_probabilities_by_hand(self):
        # mean 0, zeta^2 = 9, 9, 0: roots of 9 + 0, 9 + 7 and 0 + 4
        gradients = read_only([[3, 0], [-3, 0], [0, 0]])
        found = diversity.probabilities(gradients, read_only([0, 7, 4]), 1.0, 1.0)
        assert found == pytest.approx([3 / 9, 4 / 9, 2 / 9])
        # only the first term: 3, 3, 0; only the second, times any factor: 0, sqrt(7), 2
        assert diversity.probabilities(gradients, [0, 7, 4], 2.0, 0.0) == pytest.approx([0.5, 0.5, 0])
        assert diversity.probabilities(gradients, [0, 9, 4], 0.0, 3.0) == pytest.approx([0, 0.6, 0.4])

    def test_the_mean_is_weighted(self):
        # 0 and 3 with the weights 2 and 1: mean 1, distances 1 and 2
        assert diversity.probabilities([[0.0], [3.0]], [0, 0], 1.0, 0.0, [2, 1]) == pytest.approx([1 / 3, 2 / 3])
        assert diversity.probabilities([[0.0], [3.0]], [0, 0], 1.0, 0.0, [0, 0]) == pytest.approx([1 / 2, 1 / 2])

    def test_unknown_gradients_get_the_mean(self):
        # known: 1 and -1 around 0 and 0 itself: 1, 1, 0, mean 2/3; in total 2 + 2 * 2/3 = 10/3
        gradients = [[1.0], [np.nan], [-1.0], [0.0], [5.0]]
        found = diversity.probabilities(gradients, [0, 0, 0, 0, np.nan], 1.0, 1.0)
        assert found == pytest.approx([0.3, 0.2, 0.3, 0, 0.2])
        assert diversity.probabilities(np.full((4, 2), np.nan), np.zeros(4), 1.0, 1.0) == pytest.approx([0.25] * 4)

    @pytest.mark.parametrize("gradients", [np.zeros((4, 3)), np.full((4, 3), 2.5)])
    def test_no_diversity_is_uniform(self, gradients):
        assert diversity.probabilities(gradients, np.zeros(4), 1.0, 1.0) == pytest.approx([0.25] * 4)
        assert diversity.probabilities(gradients, np.zeros(4), 0.0, 0.0) == pytest.approx([0.25] * 4)

    def test_follow_a_relabelling(self):
        order = np.random.default_rng(1).permutation(NUM_CLIENTS)
        found = diversity.probabilities(GRADIENTS[order], SIZES[order], 1.0, 0.5, SAMPLE_FRACTIONS[order])
        assert found == pytest.approx(diversity.probabilities(GRADIENTS, SIZES, 1.0, 0.5, SAMPLE_FRACTIONS)[order])

    def test_draw_follows_the_probabilities_of_those_available(self):
        found = frequencies(lambda seed: diversity.draw([0.1, 0.4, 0.3, 0.2], [0, 2], 1, seed), 2000, 4)
        assert found == pytest.approx([0.25, 0, 0.75, 0], abs=0.05)

    def test_importance_by_hand(self):
        # w / (2 p) = .5 / (2/3) = 3/4 and .25 / (8/9) = 9/32; over their sum 33/32: 8/11 and 3/11
        p, w = read_only([3 / 9, 4 / 9, 2 / 9]), read_only([0.5, 0.25, 0.25])
        assert diversity.importance_weights(p, w, [0, 1], is_normalised=False) == pytest.approx([3 / 4, 9 / 32])
        assert diversity.importance_weights(p, w, [1, 0]) == pytest.approx([8 / 11, 3 / 11])

    def test_importance_is_unbiased_for_independent_draws(self):
        p, w, x = np.array([0.5, 0.3, 0.2]), np.array([0.2, 0.2, 0.6]), np.array([1.0, 5.0, -2.0])
        expected = sum(p[i] * diversity.importance_weights(p, w, [i], is_normalised=False)[0] * x[i] for i in range(3))
        assert expected == pytest.approx(w @ x)

    def test_importance_at_the_edges(self):
        assert diversity.importance_weights([0.5, 0.5], [1, 1], []).tolist() == []
        assert diversity.importance_weights([0.5, 0.5], [3, 1], [1]).tolist() == [1.0]
        # client 1 was selected because no other was left
        assert diversity.importance_weights([1, 0], [3, 1], [0, 1]) == pytest.approx([0.75, 0.25])
        assert diversity.importance_weights([0.5, 0.5], [0, 0], [0, 1]) == pytest.approx([0.5, 0.5])

    def test_bad_input(self):
        with pytest.raises(UserError, match="alpha1 is -1"):
            diversity.probabilities([[0.0]], [0], -1.0, 1.0)
        with pytest.raises(UserError, match="variances has -2"):
            diversity.probabilities([[0.0], [1.0]], [1, -2], 1.0, 1.0)
        with pytest.raises(UserError, match="variances has shape"):
            diversity.probabilities([[0.0], [1.0]], [1], 1.0, 1.0)
        with pytest.raises(UserError, match="gradients has shape"):
            diversity.probabilities([0.0, 1.0], [1, 1], 1.0, 1.0)
