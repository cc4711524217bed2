"""Clients selected from clusters."""

import numpy as np
import pytest
from selector_inputs import LABELS, NUM_CLIENTS, frequencies, read_only

from shoal.errors import UserError
from shoal.selectors import clusters


class TestClusters:
    FIVE = read_only(np.arange(100) // 20, int)

    def test_two_of_each_of_five(self):
        for seed in range(100):
            chosen = clusters.one_of_each(self.FIVE, np.ones(100, dtype=bool), 10, seed)
            assert np.bincount(self.FIVE[chosen]).tolist() == [2] * 5

    def test_as_many_clusters_as_clients_to_select(self):
        for seed in range(50):
            chosen = clusters.one_of_each(self.FIVE, np.ones(100, dtype=bool), 3, seed)
            assert len(set(self.FIVE[chosen])) == 3

    def test_the_remainder_goes_to_random_clusters(self):
        counts = np.array(
            [np.bincount(self.FIVE[clusters.one_of_each(self.FIVE, range(100), 12, seed)]) for seed in range(500)]
        )
        assert set(counts.ravel()) == {2, 3}
        # three of a cluster with probability 2/5, standard deviation sqrt(.4 * .6 / 500) = .022
        assert (counts == 3).mean(axis=0) == pytest.approx([0.4] * 5, abs=0.1)

    def test_other_clusters_replace_clients_of_small_ones(self):
        # places for 3 + 3 + 3, but the first cluster has one client: 1 + 4 + 4
        labels = np.repeat([7, 8, 9], [1, 9, 10])
        for seed in range(30):
            chosen = clusters.one_of_each(labels, range(20), 9, seed)
            assert np.bincount(labels[chosen])[7:].tolist() == [1, 4, 4]

    def test_every_cluster_is_equally_likely_whatever_its_size(self):
        # one place, clusters of 1 and 3: 1/2 for the one, 1/6 for each of the three
        found = frequencies(lambda seed: clusters.one_of_each([0, 1, 1, 1], range(4), 1, seed), 2000, 4)
        assert found == pytest.approx([1 / 2, 1 / 6, 1 / 6, 1 / 6], abs=0.05)

    def test_only_clusters_with_available_clients_count(self):
        for seed in range(30):
            chosen = clusters.one_of_each(self.FIVE, [0, 1, 2, 45, 46], 2, seed)
            assert sorted(self.FIVE[chosen]) == [0, 2]

    def test_whole_clusters(self):
        for seed in range(50):
            chosen = clusters.whole_clusters(np.arange(100) % 20, np.ones(100, dtype=bool), 10, seed)
            counts = np.bincount(chosen % 20)
            assert sorted(counts[counts > 0]) == [5, 5]

    def test_a_part_of_the_last_cluster_is_selected(self):
        # 25 clusters of 4 and 10 places: two whole ones and a random half of a third
        halves = set()
        for seed in range(200):
            chosen = clusters.whole_clusters(np.arange(100) % 25, np.ones(100, dtype=bool), 10, seed)
            counts = np.bincount(chosen % 25)
            assert sorted(counts[counts > 0]) == [2, 4, 4]
            halves.add(tuple(chosen[chosen % 25 == np.flatnonzero(counts == 2)[0]] // 25))
        assert halves == {(0, 1), (0, 2), (0, 3), (1, 2), (1, 3), (2, 3)}

    def test_whole_clusters_of_available_clients(self):
        for seed in range(30):
            chosen = clusters.whole_clusters([0, 0, 0, 1, 1, 1], [0, 1, 3, 4], 2, seed).tolist()
            assert chosen in ([0, 1], [3, 4])

    @pytest.mark.parametrize("rule", [clusters.one_of_each, clusters.whole_clusters])
    def test_the_labels_of_clusters_do_not_matter(self, rule):
        names = np.array(["a", "b", "c", "d"])
        for seed in range(10):
            assert (
                rule(LABELS, range(NUM_CLIENTS), 5, seed).tolist()
                == rule(names[LABELS], range(NUM_CLIENTS), 5, seed).tolist()
            )

    def test_labels_must_be_one_per_client(self):
        with pytest.raises(UserError, match="one label per client"):
            clusters.one_of_each([[0, 1]], [0], 1, 0)
