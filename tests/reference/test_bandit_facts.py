"""Facts about FedEPC's selector that follow from its equations, on sets of fifty clients with five features."""

from __future__ import annotations

import numpy as np
import pytest

from shoal.selectors.bandit import SetBandit, beta, candidate_sets, gram, posterior, standardised_contexts, time_budget

SEEDS = range(5)


def contexts_of_fifty(seed):
    return standardised_contexts(np.random.default_rng(seed).normal(size=(50, 5)))


def sets_of(x, sizes, seed):
    rng = np.random.default_rng(seed)
    return [x[rng.choice(len(x), size, replace=False)] for size in sizes]


def sets_of_all_sizes(seed, count=60):
    return sets_of(contexts_of_fifty(seed), 1 + np.arange(count) % 8, seed)


@pytest.mark.parametrize("seed", SEEDS)
def test_the_printed_kernel_is_sigma_squared_only_for_sets_of_one_client(seed):
    x = contexts_of_fifty(seed)
    own = np.diag(gram(sets_of(x, [1] * 10, seed), 2.0, sigma=1.5, as_published=True))
    np.testing.assert_allclose(own, 2.25)
    np.testing.assert_allclose(gram([np.repeat(x[:1], 4, axis=0)], 2.0, as_published=True), 1.0)
    larger = np.diag(gram(sets_of(x, [5, 6, 7, 8] * 5, seed), 2.0, as_published=True))
    assert (larger < 0.65).all()
    assert 0.20 < larger.mean() < 0.57


@pytest.mark.parametrize("seed", SEEDS)
def test_with_the_printed_kernel_other_sets_are_closer_to_a_set_than_itself(seed):
    def fraction_closer(size):
        k = gram(sets_of(contexts_of_fifty(seed), [size] * 100, seed), 2.0, as_published=True)
        return (k.max(axis=1) > np.diag(k)).mean()

    assert 0.05 < fraction_closer(5) < fraction_closer(8)
    assert fraction_closer(8) > 0.5


@pytest.mark.parametrize("seed", SEEDS)
def test_the_printed_kernel_is_no_covariance_and_the_energy_kernel_is(seed):
    sets = sets_of_all_sizes(seed)
    assert np.linalg.eigvalsh(gram(sets, 5.0, as_published=True))[0] < -1e-3
    for rho in (0.5, 2.0, 5.0):
        energy = gram(sets, rho, sigma=1.5)
        np.testing.assert_allclose(np.diag(energy), 2.25)
        assert np.linalg.eigvalsh(energy)[0] > -1e-9
        assert (energy <= 2.25 * (1 + 1e-12)).all()


@pytest.mark.parametrize("uses_published_kernel", [False, True])
def test_the_printed_recursion_is_exact_after_one_observation_and_not_after_three(uses_published_kernel):
    sets, rewards = sets_of_all_sizes(0, 40), np.array([1.0, -0.5, 2.0])
    k = gram(sets, 2.0, as_published=uses_published_kernel)

    def after(count, as_published):
        rows = k[3:, :count]
        return posterior(rows, np.diag(k)[3:], k[:count, :count], rewards[:count], 1.0, as_published)

    np.testing.assert_allclose(after(1, True), after(1, False), atol=1e-7)
    for exact, recursive in zip(after(3, False), after(3, True), strict=True):
        assert np.abs(exact - recursive).max() > 0.05


def test_the_exact_posterior_predicts_a_smooth_reward_better_than_the_recursion():
    def error(as_published):
        errors = []
        for seed in SEEDS:
            sets = sets_of_all_sizes(seed, 100)
            truth = np.array([np.sin(s.mean(axis=0) @ [1, -1, 0.5, 0, 0]) + s[:, 0].mean() for s in sets])
            observed = truth[:40] + 0.1 * np.random.default_rng(seed).normal(size=40)
            k = gram(sets, 2.0)
            mean, _ = posterior(k[40:, :40], np.diag(k)[40:], k[:40, :40], observed, 0.5, as_published)
            errors.append(np.sqrt(np.mean((mean - truth[40:]) ** 2)))
        return np.mean(errors)

    assert error(False) < 0.75 * error(True)


def test_beta_of_the_first_rounds():
    assert beta(1, 0.1) == pytest.approx(2.146, abs=5e-4)  # sqrt(2 ln 10)
    assert beta(10, 0.1) == pytest.approx(3.717, abs=5e-4)  # sqrt(2 ln 1000)


@pytest.mark.parametrize("seed", range(20))
def test_the_printed_bandit_begins_with_a_single_client_if_one_is_a_candidate(seed):
    """k(A, A) is largest for singletons; client 0 fills the budget alone and is in Omega_1."""
    costs = np.append(10.0, np.full(9, 2.0))
    x = contexts_of_fifty(seed)[:10]
    assert any(s.sum() == 1 for s in candidate_sets(costs, range(10), 10.0, seed))
    printed = SetBandit(rho=2.0, noise=1.0, beta_scale=1.0, as_published=True)
    assert printed.choose(x, costs, range(10), 10.0, seed).tolist() == [0]


@pytest.mark.parametrize("seed", SEEDS)
def test_the_printed_bandit_alternates_between_two_clients_for_any_reward(seed):
    """Rewards per second are tiny beside sigma = 1, and the variance depends on the last set only."""

    def chosen(reward_scale, **options):
        bandit, x, rng, choices = (
            SetBandit(num_candidate_sets=300, **options),
            contexts_of_fifty(seed)[:12],
            np.random.default_rng(seed),
            [],
        )
        for t in range(30):
            choices.append(bandit.choose(x, np.ones(12), range(12), 1.0, 1000 * seed + t).item())
            bandit.learn(x[choices[-1:]], reward_scale * rng.random())
        return choices

    printed = {"rho": 2.0, "noise": 1.0, "beta_scale": 1.0, "as_published": True, "window_rounds": 200}
    assert chosen(1e-4, **printed) == chosen(0.0, **printed)
    assert len(set(chosen(1e-4, **printed)[10:])) == 2
    assert len(set(chosen(1e-4)[10:])) > 2


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("fraction", [0.05, 0.16, 0.5])
def test_candidates_fit_the_budget_are_maximal_and_distinct(seed, fraction):
    costs = np.random.default_rng(seed).lognormal(0, 1, 50)
    budget = time_budget(costs, fraction)
    available = np.random.default_rng(seed).random(50) < 0.8
    sets = candidate_sets(costs, available, budget, seed)
    assert 1 < len(sets) <= 48
    assert len(np.unique(sets, axis=0)) == len(sets)
    for s in sets:
        assert costs[s].sum() <= budget * (1 + 1e-9)
        assert (costs[s].sum() + costs[available & ~s] > budget).all()
        assert not s[~available].any()


def test_a_cluster_above_the_budget_has_no_candidate_and_is_skipped():
    costs = [4.0, 5.0, 6.0]
    assert len(candidate_sets(costs, range(3), 3.9, 0)) == 0
    assert SetBandit().choose(np.zeros((3, 5)), costs, range(3), 3.9, 0).tolist() == []


def test_the_budget_of_a_small_cluster_covers_its_median_client():
    for n in range(1, 8):
        costs = np.random.default_rng(n).lognormal(0, 1, n)
        assert len(candidate_sets(costs, range(n), time_budget(costs), 0)) > 0
    assert time_budget(np.ones(50)) == pytest.approx(8)
