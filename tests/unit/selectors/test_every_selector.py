"""Properties of all selectors."""

import numpy as np
import pytest
from selector_inputs import (
    GRADIENTS,
    LABELS,
    LOSSES,
    NUM_CLIENTS,
    ONES,
    SAMPLE_FRACTIONS,
    SIGMA,
    SIZES,
    frequencies,
    read_only,
)

from shoal.errors import UserError
from shoal.selectors import clusters, diversity, fastest, loss_correlation, sampling, urns

DELTA = read_only(diversity.probabilities(GRADIENTS, SIZES, 1.0, 1.0))


def filled_urns(k):
    return read_only(urns.urn_distributions(SIZES, GRADIENTS, max(k, 1)))


SELECTORS = {
    "uniform": sampling.sample_uniformly,
    "by_size": lambda available, k, seed: sampling.sample_by_size(SIZES, available, k, seed),
    "largest": lambda available, k, seed: sampling.select_largest(SIZES, available, k),
    "one_of_each": lambda available, k, seed: clusters.one_of_each(LABELS, available, k, seed),
    "whole_groups": lambda available, k, seed: clusters.whole_clusters(LABELS, available, k, seed),
    "fedcor": lambda available, k, seed: loss_correlation.pick(SIGMA, SAMPLE_FRACTIONS, available, k, ONES),
    "delta": lambda available, k, seed: diversity.draw(DELTA, available, k, seed),
    "clustered": lambda available, k, seed: urns.draw(filled_urns(k), available, seed),
    "fastest": lambda available, k, seed: fastest.fastest_of_clusters(LABELS, SIZES, LOSSES, available, k, seed),
}


every_selector = pytest.mark.parametrize("select", SELECTORS.values(), ids=SELECTORS)


CERTAIN = ("largest", "fedcor", "fastest")  # the result is hardly random


by_chance = pytest.mark.parametrize("select", [f for name, f in SELECTORS.items() if name not in CERTAIN])


class TestEverySelector:
    @every_selector
    def test_exactly_k_distinct_ascending_and_available(self, select):
        available = read_only([1, 3, 4, 6, 7, 9, 11], int)
        for seed in range(20):
            for k in (1, 2, 5, 7):
                chosen = select(available, k, seed)
                assert len(chosen) == k
                assert (np.diff(chosen) > 0).all()
                assert set(chosen) <= set(available)
                assert chosen.dtype == np.int64

    @every_selector
    def test_a_mask_and_indices_in_any_order_are_equivalent(self, select):
        mask = read_only([i in (1, 3, 4, 6, 9) for i in range(NUM_CLIENTS)], bool)
        for seed in range(10):
            chosen = select(mask, 3, seed).tolist()
            assert chosen == select(read_only([9, 1, 6, 4, 3], int), 3, seed).tolist()
            assert chosen == select([1, 1, 3, 9, 4, 6, 9], 3, seed).tolist()

    @every_selector
    def test_no_client_and_a_single_client(self, select):
        assert select(np.zeros(NUM_CLIENTS, dtype=bool), 4, 0).tolist() == []
        assert select([], 4, 0).tolist() == []
        assert select([7], 4, 0).tolist() == [7]
        assert select([7], 1, 0).tolist() == [7]

    @every_selector
    def test_fewer_available_clients_than_requested(self, select):
        assert select([2, 8, 5], 10, 0).tolist() == [2, 5, 8]
        assert select(np.ones(NUM_CLIENTS, dtype=bool), 100, 0).tolist() == list(range(NUM_CLIENTS))

    @every_selector
    def test_same_seed_same_clients(self, select):
        for seed in range(10):
            assert (
                select(np.ones(NUM_CLIENTS, dtype=bool), 4, seed).tolist()
                == select(np.ones(NUM_CLIENTS, dtype=bool), 4, seed).tolist()
            )

    @by_chance
    def test_seeds_differ(self, select):
        assert len({tuple(select(np.ones(NUM_CLIENTS, dtype=bool), 4, seed)) for seed in range(20)}) > 5

    @every_selector
    def test_bad_availability_is_refused(self, select):
        for bad in ([0.5, 1.0], [-1, 2], [[0, 1]]):
            with pytest.raises(UserError, match="available"):
                select(bad, 2, 0)

    @pytest.mark.parametrize("name", [name for name in SELECTORS if name != "uniform"])
    def test_unknown_clients_are_refused(self, name):
        with pytest.raises(UserError, match="client 12"):
            SELECTORS[name]([3, NUM_CLIENTS], 2, 0)
        with pytest.raises(UserError, match="mask over 5"):
            SELECTORS[name](np.ones(5, dtype=bool), 2, 0)

    @pytest.mark.parametrize("name", [name for name in SELECTORS if name != "clustered"])
    def test_a_negative_number_is_refused(self, name):
        with pytest.raises(UserError, match="k is -1"):
            SELECTORS[name](np.ones(NUM_CLIENTS, dtype=bool), -1, 0)

    @pytest.mark.parametrize(
        "select",
        [
            lambda seed: sampling.sample_uniformly(np.ones(NUM_CLIENTS, dtype=bool), 3, seed),
            lambda seed: sampling.sample_by_size(ONES, np.ones(NUM_CLIENTS, dtype=bool), 3, seed),
            lambda seed: sampling.sample_by_size(0 * ONES, np.ones(NUM_CLIENTS, dtype=bool), 3, seed),
            lambda seed: clusters.one_of_each(np.arange(NUM_CLIENTS) % 4, np.ones(NUM_CLIENTS, dtype=bool), 3, seed),
            lambda seed: clusters.whole_clusters(np.arange(NUM_CLIENTS) % 4, np.ones(NUM_CLIENTS, dtype=bool), 3, seed),
            lambda seed: clusters.whole_clusters(np.zeros(NUM_CLIENTS), np.ones(NUM_CLIENTS, dtype=bool), 3, seed),
            lambda seed: fastest.fastest_of_clusters(
                np.zeros(NUM_CLIENTS), ONES, ONES, np.ones(NUM_CLIENTS, dtype=bool), 3, seed
            ),
            lambda seed: fastest.fastest_of_clusters(
                np.arange(NUM_CLIENTS) % 4, ONES, ONES, np.ones(NUM_CLIENTS, dtype=bool), 3, seed
            ),
            lambda seed: diversity.draw(ONES / NUM_CLIENTS, np.ones(NUM_CLIENTS, dtype=bool), 3, seed),
            lambda seed: urns.draw(np.full((3, NUM_CLIENTS), 1 / NUM_CLIENTS), np.ones(NUM_CLIENTS, dtype=bool), seed),
        ],
    )
    def test_equal_clients_are_chosen_equally_often(self, select):
        # 3 of 12, 1500 times: a share of 1/4 each, standard deviation sqrt(.25 * .75 / 1500) = .011
        assert np.abs(frequencies(select, 1500) - 0.25).max() < 0.05
