"""The fastest clients of each cluster."""

import numpy as np
import pytest
from selector_inputs import frequencies, read_only

from shoal.errors import UserError
from shoal.selectors import fastest


class TestFastest:
    # Clusters x = {0, 1}, y = {2}, z = {3}. Mean times 2, 4, 1: 1 - 2/4, 1 - 4/4, 1 - 1/4. Mean squared losses
    # (1 + 9) / 2 = 5, 4, 1: shares 1/2, 2/5, 1/10. With rho = 1/2 theta is (1/2, 1/5, 17/40), in all 9/8.
    LABELS, TIMES, LOSSES = list("xxyz"), read_only([3, 1, 4, 1]), read_only([1, 3, 2, 1])

    def test_weights_by_hand(self):
        found = fastest.cluster_weights(self.LABELS, self.TIMES, self.LOSSES)
        assert found == pytest.approx([20 / 45, 8 / 45, 17 / 45])

    def test_loss_only_and_speed_only(self):
        assert fastest.cluster_weights(self.LABELS, self.TIMES, self.LOSSES, 0) == pytest.approx([0.5, 0.4, 0.1])
        assert fastest.cluster_weights(self.LABELS, self.TIMES, self.LOSSES, 1) == pytest.approx([0.4, 0, 0.6])

    def test_unknown_losses(self):
        # x: only 3 is known, square 9; y: unknown, as bad as the worst, 9; z: 1
        found = fastest.cluster_weights(self.LABELS, self.TIMES, [np.nan, 3, np.nan, 1], 0)
        assert found == pytest.approx([9 / 19, 9 / 19, 1 / 19])
        assert fastest.cluster_weights(self.LABELS, self.TIMES, [np.nan] * 4, 0) == pytest.approx([1 / 3] * 3)

    def test_equal_clusters_have_equal_weights(self):
        for times, losses, rho in (([0] * 4, [1] * 4, 1), ([2] * 4, [1] * 4, 1), ([2] * 4, [0] * 4, 0)):
            assert fastest.cluster_weights(self.LABELS, times, losses, rho) == pytest.approx([1 / 3] * 3)

    def test_the_fastest_stand_in(self):
        # one cluster: always the k of least time, and ties equally often
        times = [5, 1, 3, 3, 9]
        for k, chosen in ((1, [1]), (3, [1, 2, 3]), (4, [0, 1, 2, 3])):
            assert all(
                fastest.fastest_of_clusters([0] * 5, times, [1] * 5, range(5), k, seed).tolist() == chosen
                for seed in range(10)
            )
        found = frequencies(
            lambda seed: fastest.fastest_of_clusters([0] * 5, times, [1] * 5, range(5), 2, seed), 1000, 5
        )
        assert found == pytest.approx([0, 1, 0.5, 0.5, 0], abs=0.07)

    def test_the_next_client_replaces_an_absent_one(self):
        assert fastest.fastest_of_clusters([0] * 3, [1, 2, 3], [1] * 3, [1, 2], 1, 0).tolist() == [1]

    def test_whole_shares_are_certain_and_the_rest_is_drawn(self):
        # by loss alone the shares of 2 places are 1, 0.8 and 0.2: one of x for certain (client 1 is faster), then
        # x, y or z by weight; of x then 0 is left
        found = frequencies(
            lambda seed: fastest.fastest_of_clusters(self.LABELS, self.TIMES, self.LOSSES, range(4), 2, seed, 0),
            2000,
            4,
        )
        assert found == pytest.approx([0.5, 1, 0.4, 0.1], abs=0.05)

    def test_a_cluster_without_weight_comes_last(self):
        # by speed alone y has none
        for seed in range(30):
            chosen = fastest.fastest_of_clusters(self.LABELS, self.TIMES, self.LOSSES, range(4), 3, seed, 1)
            assert chosen.tolist() == [0, 1, 3]

    def test_follows_a_relabelling(self):
        """Nothing is random: integer shares and no ties."""
        labels, times, losses = np.array([0, 0, 1, 1]), np.array([4.0, 1, 2, 3]), np.ones(4)
        order = np.array([2, 0, 3, 1])
        again = fastest.fastest_of_clusters(labels[order], times[order], losses, range(4), 2, 5)
        assert (
            sorted(order[again])
            == fastest.fastest_of_clusters(labels, times, losses, range(4), 2, 0).tolist()
            == [1, 2]
        )

    @pytest.mark.parametrize(
        ("bad", "message"),
        [
            (([0], [-1.0], [1.0]), "times has -1.0 for client 0"),
            (([0], [1.0], [1.0, 2.0]), "losses has shape"),
            (([0], [1.0], [1.0], 1.5), r"rho is 1\.5"),
        ],
    )
    def test_bad_input(self, bad, message):
        with pytest.raises(UserError, match=message):
            fastest.cluster_weights(*bad)
