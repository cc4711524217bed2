"""CICS: a bandit that selects the set of a cluster's clients that trains in a round, within a time budget.

Tang et al., "FedEPC: An Efficient and Privacy-Enhancing Clustering Federated Learning Method for Sensing-Computing
Fusion Scenarios", CMC 2025, doi 10.32604/cmc.2025.066241, Sec. 3.4. The reward of a set is a sample of a Gaussian
process over the contexts of its members. The set with the highest upper confidence bound trains.

| symbol       | here                                                                                              |
|--------------|---------------------------------------------------------------------------------------------------|
| x_i(t)       | a row of `contexts`: clock rate, memory, samples, past norms of gradients, past drops of the loss |
| |D_i| / f_i  | `costs`                                                                                           |
| T_max        | `time_budget`                                                                                     |
| Omega_t      | `candidate_sets`                                                                                  |
| d(A, A')     | the mean of all distances between a member of A and one of A'                                     |
| rho, sigma   | length and standard deviation of the kernel, `matern`                                             |
| r_t          | `reward` of `learn`, for example the relative decrease of the cluster's loss                      |
| mu_t,sigma_t | `belief`, computed by `posterior`                                                                 |
| beta_t       | `beta`, times `beta_scale`                                                                        |

Deviations from the paper
-------------------------
- The kernel is applied to the energy distance between sets. Under Eq. (10) a set of several clients is not equal to
  itself, k(A, A) < sigma^2, and the Gram matrix can have negative eigenvalues.
- The posterior is exact. The variance of Alg. 3, line 8, depends on the last set alone.
- `noise` is a parameter of its own. The printed sigma^2 is the variance of both the kernel and the noise.
- Rewards are standardised over the last `window_rounds` rounds.
- The exploration bonus is a fifth of beta_t.
- Sets whose members have waited long are preferred, by `waiting_bonus` times the standardised sum of their waiting.
- Eq. (12), a second model of the reward, is left out.
- T_max limits the sum of costs. In Alg. 3 it also limits the number of rounds.

`SetBandit(as_published=True, beta_scale=1.0, noise=1.0, window_rounds=sys.maxsize)` uses the printed equations of the
kernel, the posterior and the bonus.

Effect of the deviations
------------------------
The table has the accuracy after 40 rounds minus that of random sets within the budget, in percentage points with
standard errors. It comes from the simulation in `benchmarks/bandit.py`, which has fifty clients with Dirichlet(0.1)
labels and softmax regression, on 12 fleets that were not used to choose the defaults.

| clusters                                | 4            | 10           | 15           |
|-----------------------------------------|--------------|--------------|--------------|
| as printed                              | -3.70 ± 0.72 | -1.99 ± 0.21 | -0.96 ± 0.22 |
| energy distance, exact posterior        | -0.69 ± 0.22 | +0.02 ± 0.09 | -0.06 ± 0.05 |
| and standardised rewards                | -0.51 ± 0.17 | +0.20 ± 0.09 | +0.04 ± 0.08 |
| and 0.2 beta_t                          | -0.10 ± 0.17 | +0.21 ± 0.14 | -0.01 ± 0.10 |
| and a window of 8 rounds                | +0.28 ± 0.13 | +0.58 ± 0.10 | +0.25 ± 0.07 |
| and waiting: the default                | +0.44 ± 0.10 | +0.61 ± 0.10 | +0.28 ± 0.08 |
| longest waiting alone, no bandit        | +0.12 ± 0.11 | +0.21 ± 0.06 | +0.10 ± 0.06 |
| best candidate in hindsight, each round | +1.02 ± 0.11 | +0.69 ± 0.09 | +0.29 ± 0.08 |
| random, and all clients fit the budget  | +0.74 ± 0.14 | +2.80 ± 0.31 | +3.17 ± 0.26 |
| default, and all clients fit the budget | +1.11 ± 0.21 | +3.24 ± 0.33 | +3.53 ± 0.28 |

- The possible gain is small. With 10 or more clusters the median cluster has two candidate sets, mostly of one client
  each, and even the best set in hindsight gains less than a point.
- As printed, the bandit selects as if all rewards were 0, because rewards per second are tiny compared to sigma = 1.
  Because its variance depends on the last set alone, it alternates between two sets that are far apart.
- A bandit must forget old rewards, because a set that has just trained has less left to contribute.
- These changes do not help: 200 instead of 48 candidates, the decrease per round instead of per second, and the
  waiting time as a further feature. Rewards relative to their recent mean lose 1.5 to 3.3 points without
  `waiting_bonus`, because one set is selected again and again.
- The reward must compare losses of the same clients before and after. If only the clients that trained measure their
  losses, the gain is that of waiting alone. If the training loss of a set is compared to that of another set, clients
  that the model already fits are rewarded. This loses 0.2, 0.7 and 0.9 points, and 2.2 to 6.2 without `waiting_bonus`.
- The median in `time_budget` costs more than any selection gains. With 10 or more clusters it excludes a third of the
  clients for the whole run. `quantile=1` includes them and needs 1.3 to 1.7 times as many seconds. At equal time,
  random sets still gain 0.0, 0.9 and 1.6 points by it. The default is then 0.9, 1.7 and 2.2 points better than random
  sets under the median.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import inf, log, sqrt

import numpy as np
from numpy.typing import ArrayLike, NDArray

from shoal.errors import UserError
from shoal.rng import derive_seed
from shoal.selectors.sampling import (
    Floats,
    Indices,
    available_indices,
    validated_amounts,
    validated_matrix,
    validated_vector,
)

ClientSets = NDArray[np.bool_]  # sets by clients

BUDGET_TOLERANCE = 1e-9  # relative tolerance of sums, so that 0.1 + 0.2 fits a budget of 0.3
DISTANCE_TOLERANCE = 1e-12  # relative to the mean distance: sets below it are equal
JITTER = 1e-8  # relative to the variance, so that equal sets can be observed twice


def standardised_contexts(raw: ArrayLike, is_known: ArrayLike | None = None) -> Floats:
    """Returns the contexts of Eq. (9), each feature with mean 0 and variance 1 over the clients with a known value.

    Unknown values and features without differences become 0. Without `is_known`, finite values are known.
    """
    features = validated_matrix("raw", raw, "clients by features")
    has_value = np.isfinite(features) if is_known is None else np.asarray(is_known, dtype=bool)
    if has_value.shape != features.shape:
        raise UserError(f"is_known has shape {has_value.shape}; it must be that of raw, {features.shape}")
    if not np.isfinite(features[has_value]).all():
        raise UserError(
            f"raw has {features[has_value & ~np.isfinite(features)][0]} where it is known; it must be finite"
        )
    values = np.where(has_value, features, 0.0)
    num_known = np.maximum(has_value.sum(axis=0), 1)
    deviations = np.where(has_value, values - values.sum(axis=0) / num_known, 0.0)
    spread = np.sqrt((deviations**2).sum(axis=0) / num_known)
    lowest = np.where(has_value, features, inf).min(axis=0, initial=inf)
    highest = np.where(has_value, features, -inf).max(axis=0, initial=-inf)
    standard: Floats = np.divide(
        deviations, spread, out=np.zeros_like(deviations), where=(lowest < highest) & (spread > 0)
    )
    return standard


def time_budget(costs: ArrayLike, fraction: float = 0.16, quantile: float = 0.5) -> float:
    """Returns T_max of a cluster: a fraction of the summed costs, but at least the cost at a quantile of the clients.

    Without the quantile (0.5 is the median client, 1 the slowest) small clusters would never train. Clients of infinite
    cost do not count.
    """
    for name, value in (("fraction", fraction), ("quantile", quantile)):
        if not 0 < value <= 1:
            raise UserError(f"{name} is {value}; it must be above 0 and at most 1")
    cost = _validated_costs(costs)
    cost = cost[np.isfinite(cost)]
    return max(fraction * float(cost.sum()), float(np.quantile(cost, quantile))) if len(cost) else 0.0


def candidate_sets(costs: ArrayLike, available: ArrayLike, budget: float, seed: int, num_sets: int = 48) -> ClientSets:
    """Returns a sample of Omega_t of Alg. 3: distinct sets within the budget to which no client can be added.

    Each of the `num_sets` sets adds the clients in a random order as long as they fit. Equal sets are returned once.
    There is no set if no client fits the budget.
    """
    cost = _validated_costs(costs)
    fitting = available_indices(available, len(cost))
    if not budget >= 0:
        raise UserError(f"budget is {budget}; it must be 0 or more")
    if num_sets < 1:
        raise UserError(f"num_sets is {num_sets}; it must be 1 or more")
    limit = budget * (1 + BUDGET_TOLERANCE)
    fitting = fitting[np.isfinite(cost[fitting]) & (cost[fitting] <= limit)]
    if not len(fitting):
        return np.zeros((0, len(cost)), dtype=bool)
    sets = np.zeros((num_sets, len(cost)), dtype=bool)
    rows, set_costs = np.arange(num_sets), np.zeros(num_sets)
    rng = np.random.default_rng(derive_seed(seed, "candidates"))
    for client in rng.permuted(np.tile(fitting, (num_sets, 1)), axis=1).T:
        sums = set_costs + cost[client]
        fits = sums <= limit
        sets[rows[fits], client[fits]] = True
        set_costs = np.where(fits, sums, set_costs)
    _, first = np.unique(np.packbits(sets[:, fitting], axis=1), axis=0, return_index=True)
    return sets[np.sort(first)]  # in the random order of the draws, so that ties favour no client


def beta(t: int, delta: float = 0.1) -> float:
    """Returns beta_t of Eq. (11)."""
    if t < 1 or not 0 < delta <= 1:
        raise UserError(f"t is {t} and delta is {delta}; they must be 1 or more, and above 0 and at most 1")
    return sqrt(2 * log(t**2 / delta))


def matern(distance: Floats, rho: float, sigma: float = 1.0) -> Floats:
    """Returns the kernel of Eq. (10) at a distance."""
    scaled = sqrt(3) * distance / rho
    covariance: Floats = sigma**2 * (1 + scaled) * np.exp(-scaled)
    return covariance


def energy_distance(between: Floats, own: Floats, others: Floats) -> Floats:
    """Returns sqrt(2 d(A, B) - d(A, A) - d(B, B)), a distance in a Hilbert space that is 0 between equal sets."""
    square = 2 * between - own[:, None] - others
    return np.sqrt(np.where(square > DISTANCE_TOLERANCE * between, square, 0.0))


def gram(sets: Sequence[ArrayLike], rho: float, sigma: float = 1.0, as_published: bool = False) -> Floats:
    """Returns the covariance of sets, which are given as the contexts of their members.

    With `as_published` it is Eq. (10) as printed.
    """
    from scipy.spatial.distance import cdist

    if not len(sets):
        return np.zeros((0, 0))
    members = [_validated_members(s) for s in sets]
    sizes = np.array([len(z) for z in members])
    averaging = np.repeat(np.eye(len(sets)), sizes, axis=1) / sizes[:, None]
    all_members = np.concatenate(members)
    d = averaging @ cdist(all_members, all_members) @ averaging.T
    return matern(d if as_published else energy_distance(d, np.diag(d), np.diag(d)), rho, sigma)


def posterior(
    cross: Floats, own: Floats, observed: Floats, rewards: Floats, noise: float, as_published: bool = False
) -> tuple[Floats, Floats]:
    """Returns the mean and standard deviation of sets, given the rewards of observed sets.

    `cross` has the covariances between the sets and the observed sets, which are ordered from the oldest to the newest.
    `own` has the variances of the sets, and `observed` the covariances of the observed sets. With `as_published` the
    recursion of Alg. 3, line 8, replaces the exact posterior.
    """
    from scipy.linalg import cholesky, solve_triangular

    if not len(rewards):
        return np.zeros(len(own)), np.sqrt(own)
    noisy = observed + noise**2 * np.eye(len(rewards))
    if as_published:
        # Alg. 3, line 8, unrolled: each step adds k(A, A_t) times a weight that depends only on earlier weights
        mean = cross @ solve_triangular(noisy, rewards, lower=True)
        variance_reduction = cross[:, -1] ** 2 / noisy[-1, -1]
    else:
        factor = cholesky(noisy + JITTER * np.diag(np.diag(observed)), lower=True)
        half = solve_triangular(factor, cross.T, lower=True)
        mean = half.T @ solve_triangular(factor, rewards, lower=True)
        variance_reduction = (half**2).sum(axis=0)
    return mean, np.sqrt(np.maximum(own - variance_reduction, 0.0))


@dataclass(eq=False)
class SetBandit:
    """The bandit of one cluster. `state` returns all that it has learned as plain arrays, and `load` restores it.

    Parameters
    ----------
    rho : float, optional
        Length of the kernel. By default it is the median distance between the candidate sets.
    sigma : float
        Standard deviation of the kernel.
    noise : float
        Standard deviation of the noise of rewards.
    beta_scale : float
        Factor of the exploration bonus beta_t.
    delta : float
        Probability of Eq. (11), which determines beta_t.
    waiting_bonus : float
        Factor of the standardised waiting times, which are added to the score of a set.
    num_candidate_sets : int
        Number of random sets from which one is selected.
    window_rounds : int
        Number of the latest rewards that the bandit remembers.
    as_published : bool
        Use the kernel of Eq. (10), the recursion of Alg. 3, rewards without standardisation and no waiting times. For
        the printed method also set `beta_scale` to 1, `noise` to `sigma` and `window_rounds` to a very large number.

    Attributes
    ----------
    members_ : array of shape (sets, members, features)
        Contexts of the observed sets, padded with NaN.
    distances_ : array of shape (sets, sets)
        Mean distances between the members of the observed sets.
    rewards_ : array of shape (sets,)
        Rewards of the observed sets.
    rounds_ : int
        Number of all rewards that were learned.
    """

    rho: float | None = None
    sigma: float = 1.0
    noise: float = 0.5
    beta_scale: float = 0.2
    delta: float = 0.1
    waiting_bonus: float = 0.5
    num_candidate_sets: int = 48
    window_rounds: int = 8
    as_published: bool = False
    members_: Floats = field(init=False, repr=False, default_factory=lambda: np.zeros((0, 0, 0)))
    distances_: Floats = field(init=False, repr=False, default_factory=lambda: np.zeros((0, 0)))
    rewards_: Floats = field(init=False, repr=False, default_factory=lambda: np.zeros(0))
    rounds_: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        for name, value in (("rho", self.rho), ("sigma", self.sigma), ("noise", self.noise)):
            if value is not None and not 0 < value < inf:
                raise UserError(f"{name} is {value}; it must be above 0 and finite")
        for name, value in (("beta_scale", self.beta_scale), ("waiting_bonus", self.waiting_bonus)):
            if not 0 <= value < inf:
                raise UserError(f"{name} is {value}; it must be 0 or more and finite")
        for name, value in (("num_candidate_sets", self.num_candidate_sets), ("window_rounds", self.window_rounds)):
            if value < 1:
                raise UserError(f"{name} is {value}; it must be 1 or more")
        beta(1, self.delta)

    def choose(
        self,
        contexts: ArrayLike,
        costs: ArrayLike,
        available: ArrayLike,
        budget: float,
        seed: int,
        waited_rounds: ArrayLike | None = None,
    ) -> Indices:
        """Returns the clients that train, in ascending order, or none if no client fits the budget.

        `waited_rounds` is the number of rounds since each client trained last.
        """
        x = _finite_matrix("contexts", contexts)
        sets = candidate_sets(costs, available, budget, seed, self.num_candidate_sets)
        if sets.shape[1] != len(x):
            raise UserError(f"costs has {sets.shape[1]} numbers; it must have one for each of {len(x)} clients")
        if not len(sets):
            return np.zeros(0, dtype=np.int64)
        mean, deviation = self.belief(x, sets)
        score = mean + self.beta_scale * beta(self.rounds_ + 1, self.delta) * deviation  # Eq. (11)
        if waited_rounds is not None and not self.as_published:
            score += (
                self.waiting_bonus
                * self.sigma
                * _standardised(sets @ validated_amounts("waited_rounds", waited_rounds, len(x)))
            )
        return np.flatnonzero(sets[np.argmax(score)])

    def belief(self, contexts: ArrayLike, sets: ClientSets) -> tuple[Floats, Floats]:
        """Returns the expected mean and standard deviation of the `targets` of sets."""
        from scipy.spatial.distance import cdist

        is_used = sets.any(axis=0)
        x = self._with_same_features(_finite_matrix("contexts", contexts))[is_used]
        averaging = sets[:, is_used] / sets.sum(axis=1, keepdims=True)
        near = averaging @ cdist(x, x) @ averaging.T
        far = np.zeros((len(sets), len(self.rewards_)))
        for column, z in zip(far.T, self._observed_sets(), strict=True):
            column[:] = averaging @ _mean_distances(x, z)
        past = self.distances_
        if not self.as_published:
            within, before = np.diag(near), np.diag(past)
            near, far = energy_distance(near, within, within), energy_distance(far, within, before)
            past = energy_distance(past, before, before)
        rho = self.rho or _positive_median(near[np.triu_indices(len(near), 1)])
        cross, own, observed = (matern(d, rho, self.sigma) for d in (far, np.diag(near), past))
        return posterior(cross, own, observed, self.targets(), self.noise, self.as_published)

    def targets(self) -> Floats:
        """Returns the rewards of the window, standardised to 0 and sigma because their scale is not known."""
        return self.rewards_ if self.as_published else self.sigma * _standardised(self.rewards_)

    def learn(self, members: ArrayLike, reward: float) -> None:
        """Adds the reward of a set that trained, which is given as the contexts of its members when it was selected."""
        z = self._with_same_features(_validated_members(members))
        if not np.isfinite(reward):
            raise UserError(f"reward is {reward}; it must be finite")
        sets = [*self._observed_sets(), z]
        new = np.array([_mean_distances(z, other).mean() for other in sets])
        all_distances = np.block([[self.distances_, new[:-1, None]], [new[None]]])
        window = slice(-self.window_rounds, None)
        self.members_ = _pad_with_nan(sets[window])
        self.distances_ = all_distances[window, window]
        self.rewards_ = np.append(self.rewards_, reward)[window]
        self.rounds_ += 1

    def state(self) -> dict[str, Floats]:
        """Returns all that the bandit has learned."""
        return {
            "members": self.members_,  # [sets, members, features], padded with NaN
            "distances": self.distances_,
            "rewards": self.rewards_,
            "rounds": np.array(self.rounds_, dtype=np.float64),
        }

    def load(self, state: Mapping[str, ArrayLike]) -> SetBandit:
        """Restores what `state` returned, and returns the bandit."""
        members, distances, rewards = (
            np.array(state[k], dtype=np.float64) for k in ("members", "distances", "rewards")
        )
        if members.ndim != 3 or distances.shape != (len(rewards), len(rewards)) or len(members) != len(rewards):
            raise UserError(
                f"state has members {members.shape}, distances {distances.shape} and rewards {rewards.shape}; "
                "it must be what state() of a bandit returned"
            )
        self.members_, self.distances_, self.rewards_ = members, distances, rewards
        self.rounds_ = int(np.asarray(state["rounds"]))
        return self

    def _observed_sets(self) -> list[Floats]:
        return [z[np.isfinite(z).all(axis=1)] for z in self.members_]

    def _with_same_features(self, x: Floats) -> Floats:
        if len(self.members_) and x.shape[1] != self.members_.shape[2]:
            raise UserError(f"contexts have {x.shape[1]} features; they must have {self.members_.shape[2]} as before")
        return x


def _validated_costs(costs: ArrayLike) -> Floats:
    cost = validated_vector("costs", costs)
    if not (cost >= 0).all():
        raise UserError(
            f"costs has {cost[~(cost >= 0)][0]}; it must be 0 or more, or infinite for a client that cannot train"
        )
    return cost


def _finite_matrix(name: str, values: ArrayLike) -> Floats:
    matrix = validated_matrix(name, values, "clients by features")
    if not np.isfinite(matrix).all():
        raise UserError(
            f"{name} has {matrix[~np.isfinite(matrix)][0]}; it must be finite, and 0 where a value is not known"
        )
    return matrix


def _validated_members(values: ArrayLike) -> Floats:
    matrix = _finite_matrix("members", values)
    if not matrix.size:
        raise UserError(f"members has shape {matrix.shape}; a set must have 1 client and 1 feature or more")
    return matrix


def _pad_with_nan(sets: Sequence[Floats]) -> Floats:
    padded = np.full((len(sets), max(map(len, sets)), sets[0].shape[1]), np.nan)
    for row, z in zip(padded, sets, strict=True):
        row[: len(z)] = z
    return padded


def _mean_distances(x: Floats, members: Floats) -> Floats:
    """Returns the mean distance from each row of x to the members of a set."""
    from scipy.spatial.distance import cdist

    mean: Floats = cdist(x, members).mean(axis=1)
    return mean


def _positive_median(distances: Floats) -> float:
    """Returns the median of the distances above 0, or 1 if there are none."""
    positive = distances[distances > 0]
    return float(np.median(positive)) if len(positive) else 1.0


def _standardised(values: Floats) -> Floats:
    if not len(values) or np.ptp(values) == 0:
        return np.zeros(len(values))
    shifted = values - values.mean()
    standard: Floats = shifted / np.sqrt((shifted**2).mean())
    return standard
