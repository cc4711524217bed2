from itertools import combinations
from math import e, inf, nan, sqrt

import numpy as np
import pytest

from shoal.errors import UserError
from shoal.selectors import bandit
from shoal.selectors.bandit import SetBandit

RNG = np.random.default_rng(3)
N = 9


def frozen(values, dtype=float):
    """An array that raises if anybody writes to it: inputs are never modified."""
    array = np.array(values, dtype=dtype)
    array.flags.writeable = False
    return array


CONTEXTS = frozen(RNG.normal(size=(N, 5)))
COSTS = frozen(RNG.uniform(1, 5, N))
EVERYBODY = frozen(np.ones(N), bool)


def experienced(rounds=5, seed=0, scale=1.0, shift=0.0, **options):
    """A bandit that has seen sets of one to three clients."""
    made, rng = SetBandit(**options), np.random.default_rng(seed)
    for _ in range(rounds):
        made.learn(frozen(rng.normal(size=(rng.integers(1, 4), 5))), shift + scale * rng.normal())
    return made


class TestContexts:
    def test_mean_0_and_variance_1(self):
        # 1, 3, 5 are 2 apart: variance 8/3, so 2 is 1.2247 of a standard deviation
        found = bandit.standardised_contexts(frozen([[1, 7], [3, 7], [5, 7]]))
        assert found[:, 0] == pytest.approx([-sqrt(1.5), 0, sqrt(1.5)])
        assert (found[:, 1] == 0).all()

    def test_a_client_without_history_is_0_and_does_not_count(self):
        raw = frozen([[1, 2.0], [3, nan], [999, 6.0]])
        known = frozen([[1, 1], [1, 0], [0, 1]], bool)
        assert bandit.standardised_contexts(raw, known).tolist() == [[-1, -1], [1, 0], [0, 1]]
        assert bandit.standardised_contexts(frozen([[1, 2.0], [3, nan], [nan, 6.0]])).tolist() == [
            [-1, -1],
            [1, 0],
            [0, 1],
        ]

    def test_no_known_values_one_client_no_client(self):
        assert bandit.standardised_contexts([[nan, 1.0], [nan, 2.0]])[:, 0].tolist() == [0, 0]
        assert bandit.standardised_contexts([[4.0, -2.0]]).tolist() == [[0, 0]]
        assert bandit.standardised_contexts(np.zeros((0, 5))).shape == (0, 5)

    def test_a_constant_that_is_not_a_binary_fraction_is_0(self):
        assert (bandit.standardised_contexts(np.full((7, 1), 0.1)) == 0).all()  # the mean of seven 0.1 is not 0.1

    def test_bad_input_is_refused(self):
        with pytest.raises(UserError, match="is_known has shape"):
            bandit.standardised_contexts(np.zeros((3, 2)), [True, True, True])
        with pytest.raises(UserError, match="raw has nan where it is known"):
            bandit.standardised_contexts([[nan, 1.0]], [[True, True]])


class TestBudget:
    def test_a_share_but_at_least_the_median(self):
        assert bandit.time_budget(frozen([1, 2, 3, 4, 10])) == pytest.approx(3.2)  # 16% of 20, the median is 3
        assert bandit.time_budget([1, 1, 4]) == 1  # 16% of 6 is 0.96
        assert bandit.time_budget([1, 1, 4], fraction=0.5) == 3
        assert bandit.time_budget([1, 1, 4, inf]) == 1
        assert bandit.time_budget([1, 1, 4, inf], quantile=1.0) == 4

    def test_no_clients_and_clients_without_cost(self):
        assert bandit.time_budget([]) == 0
        assert bandit.time_budget([inf]) == 0
        assert bandit.time_budget([0, 0]) == 0

    def test_bad_input_is_refused(self):
        with pytest.raises(UserError, match="costs has -1"):
            bandit.time_budget([1, -1])
        with pytest.raises(UserError, match="costs has nan"):
            bandit.time_budget([1, nan])
        for bad in (0, 1.5, nan):
            with pytest.raises(UserError, match="fraction is"):
                bandit.time_budget([1], bad)
            with pytest.raises(UserError, match="quantile is"):
                bandit.time_budget([1], 0.16, bad)


def named(sets):
    return {tuple(np.flatnonzero(s).tolist()) for s in sets}


class TestCandidates:
    def test_exactly_the_maximal_sets(self):
        # 0.1 + 0.2 fills 0.3 up, though it is more than 0.3 in binary fractions; 0.3 alone does too
        found = bandit.candidate_sets(frozen([0.1, 0.2, 0.3, 0.4]), frozen([0, 1, 2, 3], int), 0.3, 0)
        assert named(found) == {(0, 1), (2,)}
        assert len(found) == 2

    def test_they_are_all_found_when_they_are_few(self):
        costs, fits = np.array([1, 2, 3, 4, 5]), 6
        subsets = [s for n in range(1, 6) for s in combinations(range(5), n) if costs[list(s)].sum() <= fits]
        maximal = {s for s in subsets if not any(set(s) < set(other) for other in subsets)}
        assert named(bandit.candidate_sets(costs, range(5), fits, 1, num_sets=300)) == maximal

    def test_a_mask_and_indices_in_any_order_are_equivalent(self):
        mask = frozen([i in (1, 3, 4, 6, 8) for i in range(N)], bool)
        for seed in range(5):
            found = bandit.candidate_sets(COSTS, mask, 6.0, seed)
            assert not found[:, ~mask].any()
            assert np.array_equal(found, bandit.candidate_sets(COSTS, [8, 3, 1, 6, 4, 4], 6.0, seed))

    def test_same_seed_same_sets_and_seeds_differ(self):
        first = [tuple(np.flatnonzero(bandit.candidate_sets(COSTS, EVERYBODY, 6.0, seed)[0])) for seed in range(20)]
        assert first == [tuple(np.flatnonzero(bandit.candidate_sets(COSTS, EVERYBODY, 6.0, s)[0])) for s in range(20)]
        assert len(set(first)) > 5

    def test_the_first_set_favours_no_client(self):
        # equal clients, two of six: in the first set a third of the time, standard deviation sqrt(2/9 / 600) = .019
        often = sum(bandit.candidate_sets(np.ones(6), range(6), 2.0, seed)[0].astype(float) for seed in range(600))
        assert np.abs(often / 600 - 1 / 3).max() < 0.08

    def test_degenerate_costs(self):
        assert named(bandit.candidate_sets(np.zeros(3), range(3), 0.0, 0)) == {(0, 1, 2)}
        assert named(bandit.candidate_sets([inf, 1, 0], range(3), 1.0, 0)) == {(1, 2)}
        assert named(bandit.candidate_sets([inf, 1, 5], range(3), inf, 0)) == {(1, 2)}
        assert bandit.candidate_sets([inf, inf], range(2), inf, 0).shape == (0, 2)
        assert bandit.candidate_sets([2, 3], range(2), 1.0, 0).shape == (0, 2)
        assert bandit.candidate_sets([2, 3], [], 9.0, 0).shape == (0, 2)
        assert bandit.candidate_sets([], [], 9.0, 0).shape == (0, 0)

    def test_bad_input_is_refused(self):
        for costs, available, budget, count, match in (
            ([1, -2], [0], 1.0, 5, "costs has -2"),
            ([1, 2], [0, 2], 1.0, 5, "client 2"),
            ([1, 2], [0], -1.0, 5, "budget is -1"),
            ([1, 2], [0], nan, 5, "budget is nan"),
            ([1, 2], [0], 1.0, 0, "num_sets is 0"),
        ):
            with pytest.raises(UserError, match=match):
                bandit.candidate_sets(costs, available, budget, 0, count)


class TestKernel:
    def test_matern(self):
        # distance rho / sqrt(3): (1 + 1) / e
        assert bandit.matern(np.array([0, 2 / sqrt(3)]), 2.0, 3.0) == pytest.approx([9, 18 / e])

    def test_hand_worked_sets(self):
        # on a line: A = {0}, B = {1}, C = {0, 1}: d(A, B) = 1, d(A, C) = d(B, C) = d(C, C) = 1/2, and 0 to themselves.
        # With rho = sqrt(3) the kernel of d is (1 + d) exp(-d).
        sets = [[[0.0]], [[1.0]], [[0.0], [1.0]]]
        near, half = 2 / e, 1.5 / sqrt(e)
        as_published = bandit.gram(sets, sqrt(3), as_published=True)
        assert as_published == pytest.approx(np.array([[1, near, half], [near, 1, half], [half, half, half]]))
        # energy distances: A, B: sqrt(2 - 0 - 0); A, C and B, C: sqrt(1 - 0 - 1/2)
        ab, ac = ((1 + sqrt(d)) * np.exp(-sqrt(d)) for d in (2, 0.5))
        assert bandit.gram(sets, sqrt(3)) == pytest.approx(np.array([[1, ab, ac], [ab, 1, ac], [ac, ac, 1]]))

    @pytest.mark.parametrize("as_published", [False, True])
    def test_members_have_no_order(self, as_published):
        sets = [RNG.normal(size=(n, 5)) for n in (1, 3, 4)]
        shuffled = [RNG.permutation(s) for s in sets]
        assert bandit.gram(shuffled, 2.0, 1.0, as_published) == pytest.approx(bandit.gram(sets, 2.0, 1.0, as_published))

    @pytest.mark.parametrize("as_published", [False, True])
    def test_equal_contexts_are_one(self, as_published):
        found = bandit.gram([np.full((n, 5), 0.3) for n in (1, 2, 5)], 2.0, 1.5, as_published)
        assert found == pytest.approx(np.full((3, 3), 2.25))

    def test_rounding_makes_no_distance(self):
        # a set in any order, or every member twice, is the same set, though the sums differ in the last digit
        raw = []
        for seed in range(20):
            z = np.random.default_rng(seed).normal(size=(3, 5))
            sets = [z, z[::-1], z[[1, 2, 0]], np.repeat(z, 2, axis=0), np.tile(z, (3, 1))]
            d = np.array([[np.linalg.norm(a[:, None] - b, axis=2).mean() for b in sets] for a in sets])
            raw.append((2 * d - np.diag(d)[:, None] - np.diag(d)).max())
            assert (bandit.energy_distance(d, np.diag(d), np.diag(d)) == 0).all()
        assert max(raw) > 0

    def test_a_small_distance_is_one(self):
        # singletons 1e-6 apart: d(A, B) = 1e-6, so the energy distance is sqrt(2e-6); C = {0, 1} and D = {0, 1.00001}:
        # d(C, C) = .5, d(D, D) = .500005, d(C, D) = (0 + 1.00001 + 1 + .00001) / 4 = .500005: sqrt(.000005)
        between, own, others = np.array([[1e-6]]), np.zeros(1), np.zeros(1)
        assert bandit.energy_distance(between, own, others) == pytest.approx(np.sqrt(2e-6))
        between, own, others = np.array([[0.500005]]), np.array([0.5]), np.array([0.500005])
        assert bandit.energy_distance(between, own, others) == pytest.approx(np.sqrt(5e-6))

    def test_no_sets_and_empty_sets(self):
        assert bandit.gram([], 2.0).shape == (0, 0)
        with pytest.raises(UserError, match="members has shape"):
            bandit.gram([np.zeros((0, 5))], 2.0)


class TestPosterior:
    GRAM = frozen([[1, 0.5], [0.5, 1]])
    CROSS = frozen([[0.5, 0.25]])

    def test_nothing_observed_is_the_prior(self):
        mean, sd = bandit.posterior(np.zeros((2, 0)), np.array([1, 4.0]), np.zeros((0, 0)), np.zeros(0), 0.5)
        assert mean.tolist() == [0, 0]
        assert sd.tolist() == [1, 2]

    def test_exact(self):
        # K + noise^2 I = [[1.25, .5], [.5, 1.25]], determinant 1.3125, inverse [[1.25, -.5], [-.5, 1.25]] / 1.3125.
        # weights (1.25 - 1, -.5 + 2.5) / 1.3125; mean (.5 * .25 + .25 * 2) / 1.3125 = .625 / 1.3125;
        # gained: .5 (.5 * 1.25 - .25 * .5) + .25 (-.5 * .5 + .25 * 1.25) = .25 + .015625, over 1.3125
        mean, sd = bandit.posterior(self.CROSS, np.ones(1), self.GRAM, frozen([1, 2]), 0.5)
        assert mean == pytest.approx([0.625 / 1.3125], abs=1e-7)
        assert sd**2 == pytest.approx([1 - 0.265625 / 1.3125], abs=1e-7)

    def test_printed_recursion(self):
        # first weight 1 / 1.25 = .8, which promises .5 * .8 = .4 of the second set; its weight (2 - .4) / 1.25 = 1.28.
        # mean .5 * .8 + .25 * 1.28 = .72; the variance knows the last set only: 1 - .0625 / 1.25
        mean, sd = bandit.posterior(self.CROSS, np.ones(1), self.GRAM, frozen([1, 2]), 0.5, as_published=True)
        assert mean == pytest.approx([0.72])
        assert sd**2 == pytest.approx([0.95])

    def test_what_was_seen_often_is_known(self):
        # ten times the same set: mean 10 / (10 + noise^2) of the reward, variance noise^2 / (10 + noise^2)
        mean, sd = bandit.posterior(np.ones((1, 10)), np.ones(1), np.ones((10, 10)), np.full(10, 3.0), 0.5)
        assert mean == pytest.approx([30 / 10.25], abs=1e-6)
        assert sd**2 == pytest.approx([0.25 / 10.25], abs=1e-6)

    def test_repetition_without_noise_is_no_obstacle(self):
        mean, sd = bandit.posterior(np.ones((1, 3)), np.ones(1), np.ones((3, 3)), np.full(3, 3.0), 1e-9)
        assert mean == pytest.approx([3], abs=1e-6)
        assert sd == pytest.approx([0], abs=1e-3)


class TestBelief:
    @pytest.mark.parametrize("as_published", [False, True])
    def test_is_the_posterior_over_the_gram_of_all_sets(self, as_published):
        made = experienced(6, rho=2.0, sigma=1.5, noise=0.7, as_published=as_published)
        sets = bandit.candidate_sets(COSTS, EVERYBODY, 7.0, 0, num_sets=5)
        past = [z[np.isfinite(z[:, 0])] for z in made.state()["members"]]
        both = bandit.gram([*past, *(CONTEXTS[s] for s in sets)], 2.0, 1.5, as_published)
        expected = bandit.posterior(both[6:, :6], np.diag(both)[6:], both[:6, :6], made.targets(), 0.7, as_published)
        np.testing.assert_allclose(made.belief(CONTEXTS, sets), expected, atol=1e-7)

    def test_renaming_clients_renames_the_belief(self):
        made, order = experienced(), RNG.permutation(N)
        sets = bandit.candidate_sets(COSTS, EVERYBODY, 7.0, 0)
        np.testing.assert_allclose(made.belief(CONTEXTS, sets), made.belief(CONTEXTS[order], sets[:, order]), atol=1e-9)

    def test_equal_contexts_are_believed_equal(self):
        sets = bandit.candidate_sets(COSTS, EVERYBODY, 7.0, 0)
        mean, sd = experienced().belief(np.ones((N, 5)), sets)
        assert np.ptp(mean) == pytest.approx(0, abs=1e-9)
        assert np.ptp(sd) == pytest.approx(0, abs=1e-9)

    def test_length_is_the_median_distance(self):
        # singletons at 0, 1, 3: energy distances sqrt(2), sqrt(4), sqrt(6), of which 2 is the median
        x, sets = [[0.0], [1.0], [3.0]], np.eye(3, dtype=bool)
        free, fixed = SetBandit(), SetBandit(rho=2.0)
        for made in (free, fixed):
            made.learn([[0.5]], 1.0)
            made.learn([[2.0]], 2.0)
        np.testing.assert_allclose(free.belief(x, sets), fixed.belief(x, sets))
        assert not np.allclose(free.belief(x, sets), SetBandit(rho=1.0).load(free.state()).belief(x, sets))


class TestChoose:
    def choose(self, made, seed=0, contexts=CONTEXTS, costs=COSTS, available=EVERYBODY, budget=6.0, waited=None):
        return made.choose(contexts, costs, available, budget, seed, waited)

    def test_without_experience_it_is_random(self):
        for seed in range(10):
            first = np.flatnonzero(bandit.candidate_sets(COSTS, EVERYBODY, 6.0, seed)[0])
            assert self.choose(SetBandit(), seed).tolist() == first.tolist()

    @pytest.mark.parametrize("as_published", [False, True])
    def test_one_of_the_candidates_ascending_and_repeatable(self, as_published):
        made = experienced(as_published=as_published)
        for seed in range(10):
            chosen = self.choose(made, seed)
            assert tuple(chosen.tolist()) in named(bandit.candidate_sets(COSTS, EVERYBODY, 6.0, seed))
            assert chosen.dtype == np.int64
            assert chosen.tolist() == self.choose(made, seed).tolist()

    def test_it_selects_what_was_rewarded(self):
        made, x = SetBandit(beta_scale=0.0), frozen(np.eye(4))
        for client in (0, 1, 2, 3, 0, 1, 2, 3):
            made.learn(x[[client]], 5.0 if client == 2 else 1.0)
        for seed in range(5):
            assert self.choose(made, seed, x, np.ones(4), range(4), 1.0).tolist() == [2]
            assert self.choose(made, seed, x, np.ones(4), [0, 1, 3], 1.0).tolist() != [2]

    def test_it_explores_what_it_does_not_know(self):
        made, x = SetBandit(beta_scale=10.0), frozen(3 * np.eye(4))
        for client in (0, 1, 3, 0, 1, 3):
            made.learn(x[[client]], 1.0 + 0.01 * client)
        assert self.choose(made, 0, x, np.ones(4), range(4), 1.0).tolist() == [2]

    def test_the_bonus_is_beta_of_the_round(self):
        # two clients far from each other: client 0 was seen in six rounds, with a mean reward m above the unseen one's.
        # beta_7 = sqrt(2 ln 490) = 3.5198: at scale m / (3.52 (1 - sd)) both are equal.
        x, sets = frozen([[0.0], [1e6]]), np.eye(2, dtype=bool)
        made = SetBandit(rho=1.0)
        for reward in (1, 2, 3):
            made.learn(x[[0]], reward + 1)
            made.learn([[5e5]], -reward)
        mean, sd = made.belief(x, sets)
        assert mean[1] == pytest.approx(0, abs=1e-9)
        assert sd[1] == pytest.approx(1)
        even = (mean[0] - mean[1]) / (3.5198 * (sd[1] - sd[0]))
        for scale, expected in ((0.99 * even, [0]), (1.01 * even, [1])):
            bold = SetBandit(rho=1.0, beta_scale=scale).load(made.state())
            assert self.choose(bold, 0, x, np.ones(2), range(2), 1.0).tolist() == expected

    @pytest.mark.parametrize(("scale", "shift"), [(1e-4, 0.0), (1e3, -7.0)])
    def test_scale_and_level_of_the_rewards_do_not_matter(self, scale, shift):
        plain, other = experienced(), experienced(scale=scale, shift=shift)
        for seed in range(20):
            assert self.choose(plain, seed).tolist() == self.choose(other, seed).tolist()

    def test_the_longest_waiting_come_first(self):
        waited = frozen([1, 1, 9, 1])
        for seed in range(10):
            free = (np.zeros((4, 2)), np.ones(4), range(4), 2.0)
            assert 2 in self.choose(SetBandit(), seed, *free, waited)
        heedless = {tuple(self.choose(SetBandit(waiting_bonus=0.0), seed, *free, waited)) for seed in range(60)}
        printed = {tuple(self.choose(SetBandit(as_published=True), seed, *free, waited)) for seed in range(60)}
        assert len(heedless) == len(printed) == 6  # any pair

    def test_the_bonus_of_waiting_is_in_standard_deviations(self):
        # two sets, waited 10 and 30: 1 below and 1 above their mean. Rewards 0 and 1 stand at -1 and 1 too, shrunk by
        # 1 / (1 + noise^2) = .8 since the sets are far apart: .8 + patience * -1 against -.8 + patience, even at .8
        x = frozen([[0.0], [1e6]])
        for patience, expected in ((0.79, [1]), (0.81, [0])):
            made = SetBandit(rho=1.0, beta_scale=0.0, waiting_bonus=patience)
            made.learn(x[[0]], 0.0)
            made.learn(x[[1]], 1.0)
            assert self.choose(made, 0, x, np.ones(2), range(2), 1.0, frozen([30, 10])).tolist() == expected

    def test_no_client_a_single_client_and_degenerate_costs(self):
        made = experienced()
        assert self.choose(made, available=[]).tolist() == []
        assert self.choose(made, available=[4]).tolist() == [4]
        assert self.choose(made, budget=0.5).tolist() == []
        assert self.choose(made, costs=np.full(N, inf)).tolist() == []
        assert self.choose(made, costs=np.zeros(N), budget=0.0).tolist() == list(range(N))
        assert self.choose(made, contexts=np.zeros((0, 5)), costs=[], available=[]).tolist() == []
        assert self.choose(made, available=[]).dtype == np.int64

    def test_ties_of_equal_contexts_are_random(self):
        made = SetBandit(as_published=False)
        made.learn(np.ones((2, 5)), 1.0)
        made.learn(np.ones((1, 5)), 2.0)
        found = {tuple(self.choose(made, seed, np.ones((4, 5)), np.ones(4), range(4), 2.0)) for seed in range(60)}
        assert len(found) == 6

    def test_it_learns_where_rewards_follow_contexts(self):
        # ten rounds to learn, then twenty; single clients, reward = first feature + noise; random sets earn 0
        gained = []
        for seed in range(5):
            rng, made = np.random.default_rng(seed), SetBandit()
            x = bandit.standardised_contexts(rng.normal(size=(20, 2)))
            for t in range(30):
                chosen = made.choose(x, np.ones(20), range(20), 1.0, 100 * seed + t)
                reward = float(x[chosen, 0].mean())
                made.learn(x[chosen], reward + 0.1 * rng.normal())
                gained.append(reward if t >= 10 else 0.0)
        assert np.sum(gained) / 100 > 0.5


class TestMemory:
    def test_only_the_window_is_remembered(self):
        made, short = experienced(12, window_rounds=4), SetBandit(window_rounds=4)
        sets = made.state()["members"]
        assert [len(v) for v in (sets, made.rewards_, made.distances_, made.distances_.T)] == [4] * 4
        assert made.rounds_ == 12
        for z, reward in zip(sets, made.rewards_, strict=True):
            short.learn(z[np.isfinite(z[:, 0])], reward)
        np.testing.assert_allclose(short.distances_, made.distances_)
        np.testing.assert_array_equal(short.members_, made.members_)

    def test_a_restored_bandit_continues_as_before(self):
        made = experienced(7)
        copy = SetBandit().load({name: frozen(values) for name, values in made.state().items()})
        for seed in range(10):
            chosen = made.choose(CONTEXTS, COSTS, EVERYBODY, 6.0, seed)
            assert chosen.tolist() == copy.choose(CONTEXTS, COSTS, EVERYBODY, 6.0, seed).tolist()
            made.learn(CONTEXTS[chosen], 0.1 * seed)
            copy.learn(CONTEXTS[chosen], 0.1 * seed)
        for name, values in made.state().items():
            assert values.dtype == np.float64
            np.testing.assert_array_equal(values, copy.state()[name])

    def test_a_fresh_one_can_be_stored_too(self):
        assert SetBandit().load(SetBandit().state()).choose(CONTEXTS, COSTS, [4], 6.0, 0).tolist() == [4]

    def test_later_learning_does_not_change_a_state(self):
        made = experienced(3)
        before = {name: values.copy() for name, values in made.state().items()}
        held = made.state()
        made.learn(np.ones((2, 5)), 1.0)
        for name, values in before.items():
            np.testing.assert_array_equal(held[name], values)

    def test_members_have_no_order(self):
        a, b, members = experienced(2), experienced(2), RNG.normal(size=(3, 5))
        a.learn(frozen(members), 1.0)
        b.learn(members[::-1], 1.0)
        np.testing.assert_allclose(a.distances_, b.distances_)

    def test_bad_input_is_refused(self):
        made = experienced()
        for members, reward, match in (
            (np.zeros((0, 5)), 1.0, "members has shape"),
            (np.full((2, 5), nan), 1.0, "members has nan"),
            (np.zeros((2, 4)), 1.0, "4 features; they must have 5"),
            (np.zeros((2, 5)), nan, "reward is nan"),
        ):
            with pytest.raises(UserError, match=match):
                made.learn(members, reward)
        assert made.rounds_ == 5
        with pytest.raises(UserError, match="state has members"):
            SetBandit().load({**made.state(), "rewards": np.zeros(2)})
        with pytest.raises(UserError, match="costs has 3 numbers"):
            made.choose(CONTEXTS, [1, 2, 3], [0], 6.0, 0)
        with pytest.raises(UserError, match="contexts has inf"):
            made.choose(np.full((N, 5), inf), COSTS, EVERYBODY, 6.0, 0)
        with pytest.raises(UserError, match="waited_rounds has -1"):
            made.choose(CONTEXTS, COSTS, EVERYBODY, 6.0, 0, np.full(N, -1.0))

    @pytest.mark.parametrize(
        ("name", "value"),
        [
            *(("rho", v) for v in (0.0, -1.0, nan, inf)),
            *(("sigma", v) for v in (0.0, nan)),
            ("noise", 0.0),
            ("beta_scale", -1.0),
            ("waiting_bonus", -0.1),
            ("delta", 0.0),
            ("num_candidate_sets", 0),
            ("window_rounds", 0),
        ],
    )
    def test_bad_options_are_refused(self, name, value):
        with pytest.raises(UserError, match=f"{name} is {value}"):
            SetBandit(**{name: value})
