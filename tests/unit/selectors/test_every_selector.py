import numpy as np
import pytest

from shoal.clusterers.prediction_similarity import inference_similarity, similarity_clusters
from shoal.errors import UserError
from shoal.selectors import diversity, fastest, groups, loss_correlation, sampling, urns
from shoal.selectors.loss_correlation import LossCorrelation

L = 12


def frozen(values, dtype=float):
    """An array that raises if anybody writes to it: inputs are never modified."""
    array = np.array(values, dtype=dtype)
    array.flags.writeable = False
    return array


RNG = np.random.default_rng(5)
SIZES = frozen(RNG.integers(1, 50, L))
LABELS = frozen([0, 0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 3], int)
GRADIENTS = frozen(RNG.normal(size=(L, 4)))
FACTOR = RNG.normal(size=(L, 3))
SIGMA = frozen(FACTOR @ FACTOR.T + 0.1 * np.eye(L))
SHARE = frozen(SIZES / SIZES.sum())
DELTA = frozen(diversity.probabilities(GRADIENTS, SIZES, 1.0, 1.0))
ONES = frozen(np.ones(L))
LOSSES = frozen(np.where(np.arange(L) % 3, RNG.uniform(size=L), np.nan))


def filled_urns(k):
    return frozen(urns.distributions(SIZES, GRADIENTS, max(k, 1)))


SELECTORS = {
    "uniform": sampling.uniform,
    "by_size": lambda available, k, seed: sampling.by_size(SIZES, available, k, seed),
    "largest": lambda available, k, seed: sampling.largest(SIZES, available, k),
    "one_of_each": lambda available, k, seed: groups.one_of_each(LABELS, available, k, seed),
    "whole_groups": lambda available, k, seed: groups.whole_groups(LABELS, available, k, seed),
    "fedcor": lambda available, k, seed: loss_correlation.pick(SIGMA, SHARE, available, k, ONES),
    "delta": lambda available, k, seed: diversity.draw(DELTA, available, k, seed),
    "clustered": lambda available, k, seed: urns.draw(filled_urns(k), available, seed),
    "fastest": lambda available, k, seed: fastest.fastest_of_groups(LABELS, SIZES, LOSSES, available, k, seed),
}
every_selector = pytest.mark.parametrize("select", SELECTORS.values(), ids=SELECTORS)
CERTAIN = ("largest", "fedcor", "fastest")  # chance decides little or nothing
by_chance = pytest.mark.parametrize("select", [f for name, f in SELECTORS.items() if name not in CERTAIN])


def frequencies(select, runs, clients=L):
    often = np.zeros(clients)
    for seed in range(runs):
        often[select(seed)] += 1
    return often / runs


class TestEverySelector:
    @every_selector
    def test_exactly_k_distinct_ascending_and_available(self, select):
        available = frozen([1, 3, 4, 6, 7, 9, 11], int)
        for seed in range(20):
            for k in (1, 2, 5, 7):
                chosen = select(available, k, seed)
                assert len(chosen) == k
                assert (np.diff(chosen) > 0).all()
                assert set(chosen) <= set(available)
                assert chosen.dtype == np.int64

    @every_selector
    def test_a_mask_and_indices_in_any_order_say_the_same(self, select):
        mask = frozen([i in (1, 3, 4, 6, 9) for i in range(L)], bool)
        for seed in range(10):
            chosen = select(mask, 3, seed).tolist()
            assert chosen == select(frozen([9, 1, 6, 4, 3], int), 3, seed).tolist()
            assert chosen == select([1, 1, 3, 9, 4, 6, 9], 3, seed).tolist()

    @every_selector
    def test_nobody_and_a_single_client(self, select):
        assert select(np.zeros(L, dtype=bool), 4, 0).tolist() == []
        assert select([], 4, 0).tolist() == []
        assert select([7], 4, 0).tolist() == [7]
        assert select([7], 1, 0).tolist() == [7]

    @every_selector
    def test_fewer_available_than_asked_for(self, select):
        assert select([2, 8, 5], 10, 0).tolist() == [2, 5, 8]
        assert select(np.ones(L, dtype=bool), 100, 0).tolist() == list(range(L))

    @every_selector
    def test_same_seed_same_clients(self, select):
        for seed in range(10):
            assert select(np.ones(L, dtype=bool), 4, seed).tolist() == select(np.ones(L, dtype=bool), 4, seed).tolist()

    @by_chance
    def test_seeds_differ(self, select):
        assert len({tuple(select(np.ones(L, dtype=bool), 4, seed)) for seed in range(20)}) > 5

    @every_selector
    def test_bad_availability_is_refused(self, select):
        for bad in ([0.5, 1.0], [-1, 2], [[0, 1]]):
            with pytest.raises(UserError, match="available"):
                select(bad, 2, 0)

    @pytest.mark.parametrize("name", [name for name in SELECTORS if name != "uniform"])
    def test_unknown_clients_are_refused(self, name):
        with pytest.raises(UserError, match="client 12"):
            SELECTORS[name]([3, L], 2, 0)
        with pytest.raises(UserError, match="mask over 5"):
            SELECTORS[name](np.ones(5, dtype=bool), 2, 0)

    @pytest.mark.parametrize("name", [name for name in SELECTORS if name != "clustered"])
    def test_a_negative_number_is_refused(self, name):
        with pytest.raises(UserError, match="k is -1"):
            SELECTORS[name](np.ones(L, dtype=bool), -1, 0)

    @pytest.mark.parametrize(
        "select",
        [
            lambda seed: sampling.uniform(np.ones(L, dtype=bool), 3, seed),
            lambda seed: sampling.by_size(ONES, np.ones(L, dtype=bool), 3, seed),
            lambda seed: sampling.by_size(0 * ONES, np.ones(L, dtype=bool), 3, seed),
            lambda seed: groups.one_of_each(np.arange(L) % 4, np.ones(L, dtype=bool), 3, seed),
            lambda seed: groups.whole_groups(np.arange(L) % 4, np.ones(L, dtype=bool), 3, seed),
            lambda seed: groups.whole_groups(np.zeros(L), np.ones(L, dtype=bool), 3, seed),
            lambda seed: fastest.fastest_of_groups(np.zeros(L), ONES, ONES, np.ones(L, dtype=bool), 3, seed),
            lambda seed: fastest.fastest_of_groups(np.arange(L) % 4, ONES, ONES, np.ones(L, dtype=bool), 3, seed),
            lambda seed: diversity.draw(ONES / L, np.ones(L, dtype=bool), 3, seed),
            lambda seed: urns.draw(np.full((3, L), 1 / L), np.ones(L, dtype=bool), seed),
        ],
    )
    def test_equal_clients_are_chosen_equally_often(self, select):
        # 3 of 12, 1500 times: a share of 1/4 each, standard deviation sqrt(.25 * .75 / 1500) = .011
        assert np.abs(frequencies(select, 1500) - 0.25).max() < 0.05


class TestChoice:
    def test_by_size_inclusion(self):
        # sizes 1, 2, 3; 2 of 3. Client 0 is in if it is first (1/6), or second after 1 (1/3 * (1/6)/(2/3) = 1/12)
        # or second after 2 (1/2 * (1/6)/(1/2) = 1/6): 5/12. Client 1: 1/3 + 1/15 + 1/3 = 11/15. Client 2: 2 less both.
        found = frequencies(lambda seed: sampling.by_size([1, 2, 3], [0, 1, 2], 2, seed), 3000, 3)
        assert found == pytest.approx([5 / 12, 11 / 15, 17 / 20], abs=0.04)  # 4.4 standard deviations

    def test_by_size_counts_only_those_available(self):
        found = frequencies(lambda seed: sampling.by_size([1, 1000, 3], [0, 2], 1, seed), 3000, 3)
        assert found == pytest.approx([0.25, 0, 0.75], abs=0.04)

    def test_size_zero_only_when_nobody_else_is_left(self):
        sizes = [0, 5, 0, 1, 0]
        for seed in range(50):
            assert sampling.by_size(sizes, range(5), 2, seed).tolist() == [1, 3]
        found = frequencies(lambda seed: sampling.by_size(sizes, range(5), 3, seed), 1500, 5)
        assert found == pytest.approx([1 / 3, 1, 1 / 3, 1, 1 / 3], abs=0.06)

    @pytest.mark.parametrize("bad", [np.nan, np.inf, -1.0])
    def test_bad_sizes_are_refused(self, bad):
        with pytest.raises(UserError, match=f"sizes has {bad} for client 1"):
            sampling.by_size([1, bad, 2], [0], 1, 0)

    def test_largest_ties_and_silence(self):
        scores = frozen([2.0, np.nan, 3.0, 2.0, -np.inf, np.nan])
        everybody = range(6)
        assert sampling.largest(scores, everybody, 2).tolist() == [0, 2]
        assert sampling.largest(scores, [5, 4, 3, 2, 1, 0], 2).tolist() == [0, 2]
        assert sampling.largest(scores, everybody, 4).tolist() == [0, 2, 3, 4]  # even the worst score beats none
        assert sampling.largest(scores, everybody, 5).tolist() == [0, 1, 2, 3, 4]
        assert sampling.largest(scores, [1, 5], 1).tolist() == [1]
        assert sampling.largest(np.full(4, np.nan), range(4), 2).tolist() == [0, 1]

    def test_largest_follows_a_relabelling(self):
        order = np.random.default_rng(0).permutation(L)
        scores = np.linspace(-1, 1, L)
        again = sampling.largest(scores[order], range(L), 5)
        assert sorted(order[again]) == sampling.largest(scores, range(L), 5).tolist()

    def test_scores_must_be_one_per_client(self):
        with pytest.raises(UserError, match=r"scores has shape \(2, 2\)"):
            sampling.largest(np.zeros((2, 2)), [0], 1)


class TestGroups:
    FIVE = frozen(np.arange(100) // 20, int)

    def test_two_of_each_of_five(self):
        for seed in range(100):
            chosen = groups.one_of_each(self.FIVE, np.ones(100, dtype=bool), 10, seed)
            assert np.bincount(self.FIVE[chosen]).tolist() == [2] * 5

    def test_as_many_groups_as_there_are_places(self):
        for seed in range(50):
            chosen = groups.one_of_each(self.FIVE, np.ones(100, dtype=bool), 3, seed)
            assert len(set(self.FIVE[chosen])) == 3

    def test_the_remainder_goes_to_random_groups(self):
        counts = np.array(
            [np.bincount(self.FIVE[groups.one_of_each(self.FIVE, range(100), 12, seed)]) for seed in range(500)]
        )
        assert set(counts.ravel()) == {2, 3}
        # three of a group with chance 2/5, standard deviation sqrt(.4 * .6 / 500) = .022
        assert (counts == 3).mean(axis=0) == pytest.approx([0.4] * 5, abs=0.1)

    def test_small_groups_are_topped_up_from_the_others(self):
        # places for 3 + 3 + 3, but the first group has one client: 1 + 4 + 4
        labels = np.repeat([7, 8, 9], [1, 9, 10])
        for seed in range(30):
            chosen = groups.one_of_each(labels, range(20), 9, seed)
            assert np.bincount(labels[chosen])[7:].tolist() == [1, 4, 4]

    def test_a_group_counts_whatever_its_size(self):
        # one place, groups of 1 and 3: 1/2 for the one, 1/6 for each of the three
        found = frequencies(lambda seed: groups.one_of_each([0, 1, 1, 1], range(4), 1, seed), 2000, 4)
        assert found == pytest.approx([1 / 2, 1 / 6, 1 / 6, 1 / 6], abs=0.05)

    def test_only_groups_with_somebody_available_count(self):
        for seed in range(30):
            chosen = groups.one_of_each(self.FIVE, [0, 1, 2, 45, 46], 2, seed)
            assert sorted(self.FIVE[chosen]) == [0, 2]

    def test_whole_groups(self):
        for seed in range(50):
            chosen = groups.whole_groups(np.arange(100) % 20, np.ones(100, dtype=bool), 10, seed)
            counts = np.bincount(chosen % 20)
            assert sorted(counts[counts > 0]) == [5, 5]

    def test_the_last_group_is_cut(self):
        # 25 groups of 4 and 10 places: two whole ones and half of a third, any half
        halves = set()
        for seed in range(200):
            chosen = groups.whole_groups(np.arange(100) % 25, np.ones(100, dtype=bool), 10, seed)
            counts = np.bincount(chosen % 25)
            assert sorted(counts[counts > 0]) == [2, 4, 4]
            halves.add(tuple(chosen[chosen % 25 == np.flatnonzero(counts == 2)[0]] // 25))
        assert halves == {(0, 1), (0, 2), (0, 3), (1, 2), (1, 3), (2, 3)}

    def test_whole_groups_of_those_available(self):
        for seed in range(30):
            chosen = groups.whole_groups([0, 0, 0, 1, 1, 1], [0, 1, 3, 4], 2, seed).tolist()
            assert chosen in ([0, 1], [3, 4])

    @pytest.mark.parametrize("rule", [groups.one_of_each, groups.whole_groups])
    def test_the_names_of_groups_do_not_matter(self, rule):
        names = np.array(["a", "b", "c", "d"])
        for seed in range(10):
            assert rule(LABELS, range(L), 5, seed).tolist() == rule(names[LABELS], range(L), 5, seed).tolist()

    def test_labels_must_be_one_per_client(self):
        with pytest.raises(UserError, match="one label per client"):
            groups.one_of_each([[0, 1]], [0], 1, 0)


class TestFastest:
    # Groups x = {0, 1}, y = {2}, z = {3}. Mean times 2, 4, 1: 1 - 2/4, 1 - 4/4, 1 - 1/4. Mean squared losses
    # (1 + 9) / 2 = 5, 4, 1: shares 1/2, 2/5, 1/10. With rho = 1/2 theta is (1/2, 1/5, 17/40), in all 9/8.
    LABELS, TIMES, LOSSES = list("xxyz"), frozen([3, 1, 4, 1]), frozen([1, 3, 2, 1])

    def test_weights_by_hand(self):
        found = fastest.group_weights(self.LABELS, self.TIMES, self.LOSSES)
        assert found == pytest.approx([20 / 45, 8 / 45, 17 / 45])

    def test_loss_only_and_speed_only(self):
        assert fastest.group_weights(self.LABELS, self.TIMES, self.LOSSES, 0) == pytest.approx([0.5, 0.4, 0.1])
        assert fastest.group_weights(self.LABELS, self.TIMES, self.LOSSES, 1) == pytest.approx([0.4, 0, 0.6])

    def test_unknown_losses(self):
        # x: only 3 is known, square 9; y: unknown, as bad as the worst, 9; z: 1
        found = fastest.group_weights(self.LABELS, self.TIMES, [np.nan, 3, np.nan, 1], 0)
        assert found == pytest.approx([9 / 19, 9 / 19, 1 / 19])
        assert fastest.group_weights(self.LABELS, self.TIMES, [np.nan] * 4, 0) == pytest.approx([1 / 3] * 3)

    def test_nothing_tells_groups_apart(self):
        for times, losses, rho in (([0] * 4, [1] * 4, 1), ([2] * 4, [1] * 4, 1), ([2] * 4, [0] * 4, 0)):
            assert fastest.group_weights(self.LABELS, times, losses, rho) == pytest.approx([1 / 3] * 3)

    def test_the_fastest_stand_in(self):
        # one group: always the k of least time, and of equals each as often
        times = [5, 1, 3, 3, 9]
        for k, chosen in ((1, [1]), (3, [1, 2, 3]), (4, [0, 1, 2, 3])):
            assert all(
                fastest.fastest_of_groups([0] * 5, times, [1] * 5, range(5), k, seed).tolist() == chosen
                for seed in range(10)
            )
        found = frequencies(lambda seed: fastest.fastest_of_groups([0] * 5, times, [1] * 5, range(5), 2, seed), 1000, 5)
        assert found == pytest.approx([0, 1, 0.5, 0.5, 0], abs=0.07)

    def test_the_next_stands_in_for_who_is_away(self):
        assert fastest.fastest_of_groups([0] * 3, [1, 2, 3], [1] * 3, [1, 2], 1, 0).tolist() == [1]

    def test_whole_shares_are_certain_and_the_rest_is_drawn(self):
        # by loss alone the shares of 2 places are 1, 0.8 and 0.2: one of x for certain (client 1 is faster), then
        # x, y or z by weight; of x then 0 is left
        found = frequencies(
            lambda seed: fastest.fastest_of_groups(self.LABELS, self.TIMES, self.LOSSES, range(4), 2, seed, 0), 2000, 4
        )
        assert found == pytest.approx([0.5, 1, 0.4, 0.1], abs=0.05)

    def test_a_group_without_weight_comes_last(self):
        # by speed alone y has none
        for seed in range(30):
            chosen = fastest.fastest_of_groups(self.LABELS, self.TIMES, self.LOSSES, range(4), 3, seed, 1)
            assert chosen.tolist() == [0, 1, 3]

    def test_follows_a_relabelling(self):
        """Without chance: whole shares, no equals."""
        labels, times, losses = np.array([0, 0, 1, 1]), np.array([4.0, 1, 2, 3]), np.ones(4)
        order = np.array([2, 0, 3, 1])
        again = fastest.fastest_of_groups(labels[order], times[order], losses, range(4), 2, 5)
        assert (
            sorted(order[again]) == fastest.fastest_of_groups(labels, times, losses, range(4), 2, 0).tolist() == [1, 2]
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
            fastest.group_weights(*bad)


class TestPick:
    # p = 1/3. First scores: (4 + 3) / 2 / 3 = 1.17 for 0 and for 1, 2.25 / 1.5 / 3 = .5 for 2. Given 0, the variance of
    # 1 is 4 - 9/4 = 1.75 and its score sqrt(1.75) / 3 = .44: less than .5, so 2 is next.
    SIGMA = frozen([[4, 3, 0], [3, 4, 0], [0, 0, 2.25]])
    SHARE = frozen([1 / 3, 1 / 3, 1 / 3])

    def test_by_hand(self):
        for k, chosen in ((1, [0]), (2, [0, 2]), (3, [0, 1, 2])):
            assert loss_correlation.pick(self.SIGMA, self.SHARE, range(3), k, np.ones(3)).tolist() == chosen

    def test_discount(self):
        # .9 * 1.17 = 1.05 for 0: now 1 is first
        assert loss_correlation.pick(self.SIGMA, self.SHARE, range(3), 1, [0.9, 1, 1]).tolist() == [1]
        assert loss_correlation.pick(self.SIGMA, self.SHARE, range(3), 2, [0.9, 1, 1]).tolist() == [1, 2]
        assert loss_correlation.pick(self.SIGMA, self.SHARE, range(3), 1, [0.4, 0.4, 1]).tolist() == [2]

    def test_weights(self):
        assert loss_correlation.pick(self.SIGMA, [0, 0, 1], range(3), 1, np.ones(3)).tolist() == [2]

    def test_the_absent_count_in_the_objective(self):
        # 1 lowers its own loss and that of 0, who is absent: (3 + 4) / 2 = 3.5 beats 9 / 3 = 3, which beats 4 / 2 = 2
        sigma = [[4, 3, 0], [3, 4, 0], [0, 0, 9]]
        assert loss_correlation.pick(sigma, np.ones(3), [1, 2], 1, np.ones(3)).tolist() == [1]
        assert loss_correlation.pick(sigma, [0, 1, 1], [1, 2], 1, np.ones(3)).tolist() == [2]

    def test_follows_a_relabelling(self):
        order = np.random.default_rng(1).permutation(L)
        found = loss_correlation.pick(SIGMA, SHARE, range(L), 5, ONES)
        again = loss_correlation.pick(SIGMA[np.ix_(order, order)], SHARE[order], range(L), 5, ONES)
        assert sorted(order[again]) == found.tolist()

    def test_perfect_copies_and_no_variance(self):
        # 0, 1 and 2 are one client three times; after one of them only 3 has anything to say
        copies = np.zeros((5, 5))
        copies[:3, :3] = 1.0
        copies[3, 3] = 0.01
        assert loss_correlation.pick(copies, np.ones(5), range(5), 2, np.ones(5)).tolist() == [0, 3]
        assert loss_correlation.pick(copies, np.ones(5), range(5), 5, np.ones(5)).tolist() == [0, 1, 2, 3, 4]
        assert loss_correlation.pick(np.zeros((4, 4)), np.ones(4), range(4), 2, np.ones(4)).tolist() == [0, 1]

    def test_bad_input(self):
        with pytest.raises(UserError, match="square"):
            loss_correlation.pick(np.ones((2, 3)), np.ones(2), [0], 1, np.ones(2))
        with pytest.raises(UserError, match="discount"):
            loss_correlation.pick(np.eye(2), np.ones(2), [0], 1, np.ones(3))
        with pytest.raises(UserError, match="weights has nan"):
            loss_correlation.pick(np.eye(2), [1, np.nan], [0], 1, np.ones(2))


def log_likelihood(changes, weights, model):
    from scipy.stats import multivariate_normal

    total = 0.0
    for row, w in zip(changes, weights, strict=True):
        heard = np.isfinite(row)
        sigma = model.covariance_[np.ix_(heard, heard)]
        total += w * multivariate_normal.logpdf(row[heard], model.mean_[heard], sigma)
    return total


class TestLossCorrelation:
    CHANGES = frozen(np.random.default_rng(2).normal(size=(9, 2)) @ np.random.default_rng(3).normal(size=(2, 6)))

    def test_two_clients_by_hand(self):
        # mean square [[1, 1], [1, 1]] has the eigenvalue 2 along (1, 1) / sqrt(2); with noise^2 = .01,
        # X X' = (2 - .01) / 2 everywhere, so Sigma is .995 + .01 on the diagonal and .995 off it
        model = LossCorrelation(dimension=1, noise=0.1).fit(frozen([[1, 1], [-1, -1]]))
        assert model.mean_ == pytest.approx([0, 0])
        assert model.covariance_ == pytest.approx(np.array([[1.005, 0.995], [0.995, 1.005]]))
        assert np.abs(model.embedding_[:, 0]) == pytest.approx([0.995**0.5, 0.995**0.5])

    def test_weights_by_hand(self):
        # mean (3 * 2 + 0) / 4 = 1.5, variance (3 * .25 + 2.25) / 4 = .75
        model = LossCorrelation(noise=0.1).fit([[2.0], [0.0]], weights=frozen([3, 1]))
        assert model.mean_ == pytest.approx([1.5])
        assert model.covariance_ == pytest.approx(np.array([[0.75]]))

    def test_silence_by_hand(self):
        # Client 1 misses the last two of six rounds, all means are 0. Its slope on client 0 is (1 + 1) / 4 = 1/2 over
        # the rounds that both report, with the residuals .5, -.5, -.5, .5: variance 1/4. Client 0 has the variance
        # 22/6 over all six. Hence cov = 1/2 * 22/6 = 11/6 and var = 1/4 * 22/6 + 1/4 = 7/6.
        changes = frozen([[1, 1], [-1, -1], [1, 0], [-1, 0], [3, np.nan], [-3, np.nan]])
        model = LossCorrelation(dimension=2, noise=0.01, steps=200).fit(changes)
        assert model.covariance_ == pytest.approx(np.array([[22, 11], [11, 7]]) / 6, abs=1e-3)

    def test_nothing_nearby_is_more_likely(self):
        weights = 0.8 ** np.arange(9)[::-1]
        model = LossCorrelation(dimension=2, noise=0.3).fit(self.CHANGES, weights)
        best = log_likelihood(self.CHANGES, weights, model)
        rng = np.random.default_rng(0)
        for _ in range(30):
            x = model.embedding_ + 0.05 * rng.normal(size=model.embedding_.shape)
            other = LossCorrelation(dimension=2, noise=0.3)
            other.mean_, other.covariance_ = model.mean_, x @ x.T + 0.09 * np.eye(6)
            assert log_likelihood(self.CHANGES, weights, other) < best

    def test_with_silence_every_step_is_more_likely(self):
        changes = np.where(np.random.default_rng(4).random((9, 6)) < 0.3, np.nan, self.CHANGES)
        found = [
            log_likelihood(changes, np.ones(9), LossCorrelation(2, 0.3, steps).fit(changes)) for steps in (1, 2, 5, 50)
        ]
        assert (np.diff(found) > 0).all()

    def test_follows_a_relabelling(self):
        changes = np.array(self.CHANGES)
        changes[2, 3] = changes[5, 0] = np.nan
        order = np.random.default_rng(1).permutation(6)
        found = LossCorrelation(3, 0.1).fit(changes).covariance_
        again = LossCorrelation(3, 0.1).fit(changes[:, order]).covariance_
        assert again == pytest.approx(found[np.ix_(order, order)])

    def test_never_heard_and_never_changing(self):
        changes = np.array(self.CHANGES)
        changes[:, 2] = np.nan
        changes[:, 4] = 0.7
        model = LossCorrelation(3, 0.1).fit(changes)
        assert model.mean_[[2, 4]].tolist() == [0.0, pytest.approx(0.7)]
        for quiet in (2, 4):
            assert model.covariance_[quiet] == pytest.approx(0.01 * np.eye(6)[quiet], abs=1e-9)
            assert quiet not in loss_correlation.pick(model.covariance_, np.ones(6), range(6), 2, np.ones(6))

    def test_a_warm_start_remembers_the_silent(self):
        first = LossCorrelation(3, 0.1).fit(self.CHANGES)
        later = np.array(self.CHANGES)
        later[:, 2] = np.nan
        cold = LossCorrelation(3, 0.1).fit(later)
        warm = LossCorrelation(3, 0.1).fit(later, embedding=frozen(first.embedding_))
        assert np.abs(cold.covariance_[2, [0, 1, 3, 4, 5]]).max() < 1e-9
        assert warm.covariance_ == pytest.approx(first.covariance_, abs=0.02)

    def test_without_silence_the_start_does_not_matter(self):
        cold = LossCorrelation(3, 0.1).fit(self.CHANGES)
        warm = LossCorrelation(3, 0.1).fit(self.CHANGES, embedding=np.ones((6, 3)))
        assert warm.covariance_ == pytest.approx(cold.covariance_)

    def test_one_round_or_silence_teaches_nothing(self):
        for changes in (self.CHANGES[:1], np.full((3, 6), np.nan), np.zeros((4, 6))):
            model = LossCorrelation(3, 0.1).fit(changes)
            assert model.covariance_ == pytest.approx(0.01 * np.eye(6))

    def test_more_dimensions_than_clients(self):
        model = LossCorrelation(15, 0.01).fit(self.CHANGES)
        assert model.embedding_.shape == (6, 15)
        deviations = self.CHANGES - self.CHANGES.mean(axis=0)
        assert model.covariance_ == pytest.approx(deviations.T @ deviations / 9, abs=1e-3)

    def test_a_hundred_clients_in_two_camps_are_told_apart(self):
        # losses move by camp; one pick of each camp leaves little to learn
        rng = np.random.default_rng(6)
        camp = np.arange(100) % 2
        changes = rng.normal(size=(30, 2))[:, camp] + 0.05 * rng.normal(size=(30, 100))
        changes[rng.random(changes.shape) < 0.2] = np.nan
        model = LossCorrelation().fit(changes, 0.95 ** np.arange(30)[::-1])
        chosen = loss_correlation.pick(model.covariance_, np.full(100, 0.01), range(100), 2, np.ones(100))
        assert sorted(camp[chosen]) == [0, 1]
        assert (model.covariance_ == LossCorrelation().fit(changes, 0.95 ** np.arange(30)[::-1]).covariance_).all()

    def test_bad_input(self):
        for kw in ({"dimension": 0}, {"noise": 0.0}, {"noise": np.nan}, {"steps": 0}):
            with pytest.raises(UserError, match=next(iter(kw))):
                LossCorrelation(**kw)
        for weights in (np.zeros(9), np.ones(8), -np.ones(9), np.full(9, np.nan)):
            with pytest.raises(UserError, match="weights"):
                LossCorrelation().fit(self.CHANGES, weights)
        with pytest.raises(UserError, match="weights"):
            LossCorrelation().fit(np.zeros((0, 6)))
        with pytest.raises(UserError, match="embedding"):
            LossCorrelation().fit(self.CHANGES, embedding=np.zeros((6, 3)))
        with pytest.raises(UserError, match="changes"):
            LossCorrelation().fit(np.zeros(6))


class TestDiversity:
    def test_probabilities_by_hand(self):
        # mean 0, zeta^2 = 9, 9, 0: roots of 9 + 0, 9 + 7 and 0 + 4
        gradients = frozen([[3, 0], [-3, 0], [0, 0]])
        found = diversity.probabilities(gradients, frozen([0, 7, 4]), 1.0, 1.0)
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
        order = np.random.default_rng(1).permutation(L)
        found = diversity.probabilities(GRADIENTS[order], SIZES[order], 1.0, 0.5, SHARE[order])
        assert found == pytest.approx(diversity.probabilities(GRADIENTS, SIZES, 1.0, 0.5, SHARE)[order])

    def test_draw_follows_the_probabilities_of_those_available(self):
        found = frequencies(lambda seed: diversity.draw([0.1, 0.4, 0.3, 0.2], [0, 2], 1, seed), 2000, 4)
        assert found == pytest.approx([0.25, 0, 0.75, 0], abs=0.05)

    def test_importance_by_hand(self):
        # w / (2 p) = .5 / (2/3) = 3/4 and .25 / (8/9) = 9/32; over their sum 33/32: 8/11 and 3/11
        p, w = frozen([3 / 9, 4 / 9, 2 / 9]), frozen([0.5, 0.25, 0.25])
        assert diversity.importance(p, w, [0, 1], normalised=False) == pytest.approx([3 / 4, 9 / 32])
        assert diversity.importance(p, w, [1, 0]) == pytest.approx([8 / 11, 3 / 11])

    def test_importance_is_unbiased_for_independent_draws(self):
        p, w, x = np.array([0.5, 0.3, 0.2]), np.array([0.2, 0.2, 0.6]), np.array([1.0, 5.0, -2.0])
        expected = sum(p[i] * diversity.importance(p, w, [i], normalised=False)[0] * x[i] for i in range(3))
        assert expected == pytest.approx(w @ x)

    def test_importance_at_the_edges(self):
        assert diversity.importance([0.5, 0.5], [1, 1], []).tolist() == []
        assert diversity.importance([0.5, 0.5], [3, 1], [1]).tolist() == [1.0]
        # client 1 was taken because nobody else was left
        assert diversity.importance([1, 0], [3, 1], [0, 1]) == pytest.approx([0.75, 0.25])
        assert diversity.importance([0.5, 0.5], [0, 0], [0, 1]) == pytest.approx([0.5, 0.5])

    def test_bad_input(self):
        with pytest.raises(UserError, match="alpha1 is -1"):
            diversity.probabilities([[0.0]], [0], -1.0, 1.0)
        with pytest.raises(UserError, match="variances has -2"):
            diversity.probabilities([[0.0], [1.0]], [1, -2], 1.0, 1.0)
        with pytest.raises(UserError, match="variances has shape"):
            diversity.probabilities([[0.0], [1.0]], [1], 1.0, 1.0)
        with pytest.raises(UserError, match="gradients has shape"):
            diversity.probabilities([0.0, 1.0], [1, 1], 1.0, 1.0)


class TestUrns:
    def test_a_large_client_has_an_urn_alone(self):
        # M = 6, K n = 2, 4, 6: client 2 fills one urn, the others fill the second
        gradients = frozen([[1, 0], [0, 1], [-1, 0]])
        found = urns.distributions(frozen([1, 2, 3], int), gradients, 2)
        assert found == pytest.approx(np.array([[0, 0, 1], [1 / 3, 2 / 3, 0]]))
        # M = 12, K n = 2, 4, 18: client 2 fills one urn and half of the second
        found = urns.distributions([1, 2, 9], gradients, 2)
        assert found == pytest.approx(np.array([[0, 0, 1], [1 / 6, 1 / 3, 1 / 2]]))

    def test_similar_clients_share_an_urn(self):
        # M = 4, K n = 2 each: two pairs of equal directions, however long, fill an urn each
        found = urns.distributions([1, 1, 1, 1], [[1, 0], [0, 1], [5, 0], [0, 3]], 2)
        assert found == pytest.approx(np.array([[0.5, 0, 0.5, 0], [0, 0.5, 0, 0.5]]))

    def test_a_client_is_split(self):
        # M = 8, K n = 6, 6, 4: no two fit into one urn; 0 and 1 start the urns and 2 fills 2 of 8 in each
        found = urns.distributions([3, 3, 2], np.eye(3), 2)
        assert found == pytest.approx(np.array([[0.75, 0, 0.25], [0, 0.75, 0.25]]))

    def test_a_group_starts_an_urn_and_a_single_client_fills_up(self):
        # M = 14, K n = 10, 8, 6, 4; only 2 and 3 are alike: 0 (10) and 2 + 3 (10) start the urns, 1 fills 4 in each
        found = urns.distributions([5, 4, 3, 2], [[1, 0, 0], [0, 1, 0], [0, 0, 1], [0, 0.01, 1]], 2)
        assert found == pytest.approx(np.array([[10, 4, 0, 0], [0, 4, 6, 4]]) / 14)

    def test_the_largest_of_the_rest_goes_where_most_room_is(self):
        # M = 50, K n = 36, 33, 30, 27, 24: no two fit together. Room 14, 17, 20 beside the first three: 27 = 20 + 7
        # from the last urn on, then 24 = 10 + 14.
        found = urns.distributions([12, 11, 10, 9, 8], np.eye(5), 3)
        assert found * 50 == pytest.approx(np.array([[36, 0, 0, 0, 14], [0, 33, 0, 7, 10], [0, 0, 30, 20, 0]]))

    def test_groups_are_compact_not_chains(self):
        # directions at 0, 20, 41, 63, 86 and 110 degrees, each a little further from the one before: Ward pairs them up
        degrees = np.deg2rad([0, 20, 41, 63, 86, 110])
        found = urns.distributions([1] * 6, np.stack([np.cos(degrees), np.sin(degrees)], axis=1), 3)
        assert found == pytest.approx(np.kron(np.eye(3), [[0.5, 0.5]]))

    @pytest.mark.parametrize("k", [1, 2, 5, 10, 40])
    def test_unbiased(self, k):
        for seed in range(20):
            rng = np.random.default_rng(seed)
            sizes = rng.integers(0, 200, 30) ** rng.integers(1, 3)
            found = urns.distributions(sizes, rng.normal(size=(30, 5)), k)
            assert found.shape == (k, 30)
            assert found.sum(axis=1) == pytest.approx(np.ones(k))  # (a)
            assert found.sum(axis=0) == pytest.approx(k * sizes / sizes.sum())  # (b)
            assert found.min() >= 0

    def test_follows_a_relabelling(self):
        sizes = np.array([3, 14, 15, 9, 26, 5, 35, 8, 97, 93])
        gradients = np.random.default_rng(7).normal(size=(10, 3))
        order = np.random.default_rng(1).permutation(10)
        found = urns.distributions(sizes, gradients, 4)
        again = urns.distributions(sizes[order], gradients[order], 4)
        assert sorted(map(tuple, again.round(9))) == sorted(map(tuple, found[:, order].round(9)))

    @pytest.mark.parametrize("gradients", [np.zeros((6, 2)), np.ones((6, 2)), np.full((6, 2), np.nan)])
    def test_gradients_that_tell_nothing(self, gradients):
        found = urns.distributions([2] * 6, gradients, 3)
        assert found.sum(axis=1) == pytest.approx(np.ones(3))
        assert found.sum(axis=0) == pytest.approx(np.full(6, 0.5))

    def test_no_sizes_count_as_equal_and_a_single_client(self):
        assert urns.distributions([0, 0], [[1.0], [-1.0]], 2) == pytest.approx(np.eye(2))
        assert urns.distributions([7], [[1.0]], 3) == pytest.approx(np.ones((3, 1)))

    def test_angles(self):
        found = urns.angles(frozen([[1, 0], [0, 2], [-3, 0], [1, 1], [0, 0], [np.nan, 1]]))
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
        r = frozen([[0.25, 0.75, 0, 0], [0, 0, 0.5, 0.5]])
        found = frequencies(lambda seed: urns.draw(r, range(4), seed), 2000, 4)
        assert found == pytest.approx([0.25, 0.75, 0.5, 0.5], abs=0.05)

    def test_drawn_clients_are_distinct(self):
        r = frozen([[0, 0, 1], [1 / 6, 1 / 3, 1 / 2]])
        found = frequencies(lambda seed: urns.draw(r, range(3), seed), 2000, 3)
        assert found == pytest.approx([1 / 3, 2 / 3, 1], abs=0.05)
        for seed in range(20):
            assert urns.draw([[0, 1], [0, 1]], [0, 1], seed).tolist() == [0, 1]  # the second urn has nobody left

    def test_the_absent_are_replaced_from_their_own_urn(self):
        for seed in range(30):
            chosen = urns.draw([[0.9, 0.1, 0, 0], [0, 0, 0.5, 0.5]], [1, 2, 3], seed).tolist()
            assert chosen in ([1, 2], [1, 3])

    def test_an_urn_whose_clients_are_absent_is_made_up_for(self):
        r = [[1, 0, 0, 0], [0, 0.5, 0.25, 0.25]]
        found = frequencies(lambda seed: urns.draw(r, [1, 2, 3], seed), 2000, 4)
        # 1 with chance 1/2 at once, else (after 2 or 3) with .5 / .75; 2 and 3 share the rest alike
        assert found == pytest.approx([0, 5 / 6, 7 / 12, 7 / 12], abs=0.05)

    def test_bad_input(self):
        with pytest.raises(UserError, match=r"sizes has 1\.5"):
            urns.distributions([1, 1.5], np.eye(2), 1)
        with pytest.raises(UserError, match="gradients has 3 rows"):
            urns.distributions([1, 1], np.eye(3), 1)
        with pytest.raises(UserError, match="k is 0"):
            urns.distributions([1, 1], np.eye(2), 0)


class TestInferenceSimilarity:
    PREDICTIONS = frozen([[0, 1, 2, 3], [0, 1, 2, 2], [3, 3, 3, 3], [0, 1, 2, 3]], int)
    SIMILARITY = np.array([[4, 3, 1, 4], [3, 4, 0, 3], [1, 0, 4, 1], [4, 3, 1, 4]]) / 4

    def test_by_hand(self):
        assert inference_similarity(self.PREDICTIONS) == pytest.approx(self.SIMILARITY)
        assert inference_similarity(np.eye(4)[self.PREDICTIONS]) == pytest.approx(self.SIMILARITY)
        assert inference_similarity(self.PREDICTIONS - 7) == pytest.approx(self.SIMILARITY)

    def test_probabilities_and_nothing(self):
        # (1, 0) and (.5, .5): cosine 1 / sqrt(2); a row of zeros is like nobody but itself
        found = inference_similarity([[[1, 0]], [[0.5, 0.5]], [[0, 0]]])
        assert found == pytest.approx(np.array([[1, 0.5**0.5, 0], [0.5**0.5, 1, 0], [0, 0, 1]]))

    def test_clusters_by_threshold(self):
        assert similarity_clusters(frozen(self.SIMILARITY), threshold=1.0).tolist() == [0, 1, 2, 0]
        assert similarity_clusters(self.SIMILARITY, threshold=0.75).tolist() == [0, 0, 1, 0]
        # 2 agrees with 0 on a quarter but with 1 on nothing: all pairs of a cluster must be alike
        assert similarity_clusters(self.SIMILARITY, threshold=0.25).tolist() == [0, 0, 1, 0]
        assert similarity_clusters(self.SIMILARITY, threshold=0.0).tolist() == [0, 0, 0, 0]

    def test_labels_are_numbered_by_first_appearance(self):
        for seed in range(20):
            alike = inference_similarity(np.random.default_rng(seed).integers(0, 3, (12, 9)))
            for labels in (
                similarity_clusters(alike, threshold=0.4),
                similarity_clusters(alike, clusters=5),
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
            assert similarity_clusters(self.SIMILARITY, clusters=n).tolist() == labels

    def test_follow_a_relabelling(self):
        order = np.array([2, 3, 1, 0])
        found = similarity_clusters(inference_similarity(self.PREDICTIONS[order]), clusters=2)
        assert found.tolist() == [0, 1, 1, 1]

    def test_everybody_alike_one_client_and_none(self):
        assert similarity_clusters(np.ones((3, 3)), threshold=0.9).tolist() == [0, 0, 0]
        assert similarity_clusters([[1.0]], threshold=0.9).tolist() == [0]
        assert similarity_clusters(np.zeros((0, 0)), clusters=2).tolist() == []

    def test_bad_input(self):
        for bad in (np.zeros((2, 3)), np.zeros((2, 0), dtype=int), np.zeros(3, dtype=int)):
            with pytest.raises(UserError, match="predictions"):
                inference_similarity(bad)
        with pytest.raises(UserError, match="exactly one"):
            similarity_clusters(self.SIMILARITY)
        with pytest.raises(UserError, match="exactly one"):
            similarity_clusters(self.SIMILARITY, threshold=0.5, clusters=2)
        with pytest.raises(UserError, match="clusters is 0"):
            similarity_clusters(self.SIMILARITY, clusters=0)
        with pytest.raises(UserError, match="symmetric"):
            similarity_clusters(np.triu(np.ones((3, 3))), threshold=0.5)
