"""Clients drawn from urns."""

import numpy as np
import pytest
from selector_inputs import frequencies, read_only

from shoal.errors import UserError
from shoal.selectors import urns


class TestUrns:
    def test_a_large_client_has_an_urn_alone(self):
        # M = 6, K n = 2, 4, 6: client 2 fills one urn, the others fill the second
        gradients = read_only([[1, 0], [0, 1], [-1, 0]])
        found = urns.urn_distributions(read_only([1, 2, 3], int), gradients, 2)
        assert found == pytest.approx(np.array([[0, 0, 1], [1 / 3, 2 / 3, 0]]))
        # M = 12, K n = 2, 4, 18: client 2 fills one urn and half of the second
        found = urns.urn_distributions([1, 2, 9], gradients, 2)
        assert found == pytest.approx(np.array([[0, 0, 1], [1 / 6, 1 / 3, 1 / 2]]))

    def test_similar_clients_share_an_urn(self):
        # M = 4, K n = 2 each: two pairs of equal directions, however long, fill an urn each
        found = urns.urn_distributions([1, 1, 1, 1], [[1, 0], [0, 1], [5, 0], [0, 3]], 2)
        assert found == pytest.approx(np.array([[0.5, 0, 0.5, 0], [0, 0.5, 0, 0.5]]))

    def test_a_client_is_split(self):
        # M = 8, K n = 6, 6, 4: no two fit into one urn; 0 and 1 start the urns and 2 fills 2 of 8 in each
        found = urns.urn_distributions([3, 3, 2], np.eye(3), 2)
        assert found == pytest.approx(np.array([[0.75, 0, 0.25], [0, 0.75, 0.25]]))

    def test_a_cluster_starts_an_urn_and_a_single_client_fills_it(self):
        # M = 14, K n = 10, 8, 6, 4; only 2 and 3 are similar: 0 (10) and 2 + 3 (10) start the urns, 1 fills 4 in each
        found = urns.urn_distributions([5, 4, 3, 2], [[1, 0, 0], [0, 1, 0], [0, 0, 1], [0, 0.01, 1]], 2)
        assert found == pytest.approx(np.array([[10, 4, 0, 0], [0, 4, 6, 4]]) / 14)

    def test_the_largest_of_the_rest_goes_where_most_room_is(self):
        # M = 50, K n = 36, 33, 30, 27, 24: no two fit together. Room 14, 17, 20 beside the first three: 27 = 20 + 7
        # from the last urn on, then 24 = 10 + 14.
        found = urns.urn_distributions([12, 11, 10, 9, 8], np.eye(5), 3)
        assert found * 50 == pytest.approx(np.array([[36, 0, 0, 0, 14], [0, 33, 0, 7, 10], [0, 0, 30, 20, 0]]))

    def test_clusters_are_compact_not_chains(self):
        # directions at 0, 20, 41, 63, 86 and 110 degrees, each a little further from the one before: Ward pairs them up
        degrees = np.deg2rad([0, 20, 41, 63, 86, 110])
        found = urns.urn_distributions([1] * 6, np.stack([np.cos(degrees), np.sin(degrees)], axis=1), 3)
        assert found == pytest.approx(np.kron(np.eye(3), [[0.5, 0.5]]))

    @pytest.mark.parametrize("k", [1, 2, 5, 10, 40])
    def test_unbiased(self, k):
        for seed in range(20):
            rng = np.random.default_rng(seed)
            sizes = rng.integers(0, 200, 30) ** rng.integers(1, 3)
            found = urns.urn_distributions(sizes, rng.normal(size=(30, 5)), k)
            assert found.shape == (k, 30)
            assert found.sum(axis=1) == pytest.approx(np.ones(k))  # (a)
            assert found.sum(axis=0) == pytest.approx(k * sizes / sizes.sum())  # (b)
            assert found.min() >= 0

    def test_follows_a_relabelling(self):
        sizes = np.array([3, 14, 15, 9, 26, 5, 35, 8, 97, 93])
        gradients = np.random.default_rng(7).normal(size=(10, 3))
        order = np.random.default_rng(1).permutation(10)
        found = urns.urn_distributions(sizes, gradients, 4)
        again = urns.urn_distributions(sizes[order], gradients[order], 4)
        assert sorted(map(tuple, again.round(9))) == sorted(map(tuple, found[:, order].round(9)))

    @pytest.mark.parametrize("gradients", [np.zeros((6, 2)), np.ones((6, 2)), np.full((6, 2), np.nan)])
    def test_gradients_without_information(self, gradients):
        found = urns.urn_distributions([2] * 6, gradients, 3)
        assert found.sum(axis=1) == pytest.approx(np.ones(3))
        assert found.sum(axis=0) == pytest.approx(np.full(6, 0.5))

    def test_no_sizes_count_as_equal_and_a_single_client(self):
        assert urns.urn_distributions([0, 0], [[1.0], [-1.0]], 2) == pytest.approx(np.eye(2))
        assert urns.urn_distributions([7], [[1.0]], 3) == pytest.approx(np.ones((3, 1)))

    def test_angles(self):
        found = urns.gradient_angles(read_only([[1, 0], [0, 2], [-3, 0], [1, 1], [0, 0], [np.nan, 1]]))
        right = np.pi / 2
        assert found[:4, :4] == pytest.approx(
            np.array(
                [
                    [0, right, 2 * right, right / 2],
                    [right, 0, right, right / 2],
                    [2 * right, right, 0, 1.5 * right],
                    [right / 2, right / 2, 1.5 * right, 0],
                ]
            )
        )
        assert (found[4:] == 0).all()
        assert (found[:, 4:] == 0).all()

    def test_draw_takes_one_of_each_urn(self):
        r = read_only([[0.25, 0.75, 0, 0], [0, 0, 0.5, 0.5]])
        found = frequencies(lambda seed: urns.draw(r, range(4), seed), 2000, 4)
        assert found == pytest.approx([0.25, 0.75, 0.5, 0.5], abs=0.05)

    def test_drawn_clients_are_distinct(self):
        r = read_only([[0, 0, 1], [1 / 6, 1 / 3, 1 / 2]])
        found = frequencies(lambda seed: urns.draw(r, range(3), seed), 2000, 3)
        assert found == pytest.approx([1 / 3, 2 / 3, 1], abs=0.05)
        for seed in range(20):
            assert urns.draw([[0, 1], [0, 1]], [0, 1], seed).tolist() == [0, 1]  # the second urn has no client left

    def test_absent_clients_are_replaced_from_their_own_urn(self):
        for seed in range(30):
            chosen = urns.draw([[0.9, 0.1, 0, 0], [0, 0, 0.5, 0.5]], [1, 2, 3], seed).tolist()
            assert chosen in ([1, 2], [1, 3])

    def test_other_urns_replace_an_urn_of_absent_clients(self):
        r = [[1, 0, 0, 0], [0, 0.5, 0.25, 0.25]]
        found = frequencies(lambda seed: urns.draw(r, [1, 2, 3], seed), 2000, 4)
        # 1 with probability 1/2 at once, else (after 2 or 3) with .5 / .75; 2 and 3 share the rest equally
        assert found == pytest.approx([0, 5 / 6, 7 / 12, 7 / 12], abs=0.05)

    def test_bad_input(self):
        with pytest.raises(UserError, match=r"sizes has 1\.5"):
            urns.urn_distributions([1, 1.5], np.eye(2), 1)
        with pytest.raises(UserError, match="gradients has 3 rows"):
            urns.urn_distributions([1, 1], np.eye(3), 1)
        with pytest.raises(UserError, match="k is 0"):
            urns.urn_distributions([1, 1], np.eye(2), 0)
