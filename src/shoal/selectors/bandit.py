"""CICS: which set of a cluster's clients trains this round, by a bandit over the sets that fit a time budget.

Tang et al., "FedEPC: An Efficient and Privacy-Enhancing Clustering Federated Learning Method for Sensing-Computing
Fusion Scenarios", CMC 2025, doi 10.32604/cmc.2025.066241, Sec. 3.4. The reward of a set is a draw of a Gaussian process
over its members' contexts; the set with the highest upper confidence bound trains.

| symbol       | here                                                                                           |
|--------------|------------------------------------------------------------------------------------------------|
| x_i(t)       | a row of `contexts`: clock rate, memory, rows, past norms of gradients, past drops of the loss |
| |D_i| / f_i  | `costs`                                                                                        |
| T_max        | `budget`                                                                                       |
| Omega_t      | `candidates`                                                                                   |
| d(A, A')     | the mean of all distances between a member of A and one of A'                                  |
| rho, sigma   | length and standard deviation of the kernel, `matern`                                          |
| r_t          | `reward` of `learn`, e.g. by how much the cluster's loss fell, relative to what it was         |
| mu_t,sigma_t | `belief`, by `posterior`                                                                       |
| beta_t       | `beta`, times `beta_scale`                                                                     |

Deviation: under Eq. (10) a set of several clients is not equal to itself, k(A, A) < sigma^2, and the Gram matrix can
have negative eigenvalues; here the same function is taken of the energy distance. The variance of Alg. 3, line 8, knows
the last set only; here the posterior is exact. The printed sigma^2 is both the kernel's variance and the noise's; here
`noise` is its own. The printed equations remain as `literal`. Eq. (12), a second model of the reward beside the
Gaussian process, is left out. T_max bounds the sum of costs, not the number of rounds as it also does in Alg. 3.

Deviation: rewards are standardised over a `window` of the last rounds, the bonus is a fifth of beta_t, and sets whose
members have `waited` long are preferred, by `patience` times the standardised sum of their waiting.

What that is worth, in a simulation (`benchmarks/bandit.py`: fifty clients with Dirichlet(0.1) labels, softmax
regression, 12 fleets that no default was chosen by): accuracy after 40 rounds less that of random feasible sets, in
points, with standard errors.

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
| random, and the budget fits everybody   | +0.74 ± 0.14 | +2.80 ± 0.31 | +3.17 ± 0.26 |
| default, and the budget fits everybody  | +1.11 ± 0.21 | +3.24 ± 0.33 | +3.53 ± 0.28 |

There is little to gain: with 10 or more clusters the median cluster has two feasible sets, mostly of one client each,
and hindsight itself gains less than a point. As printed the bandit chooses as if all rewards were 0, since per second
they are tiny beside sigma = 1; and as its variance knows the last set only, it goes back and forth between two sets
that are far apart. A bandit must also forget: a set that has just trained has less left to give. Of no use are 200
candidates for 48 (hardly any new sets), the drop per round for that per second, waiting as one more feature. Rewards
relative to their recent mean do harm without `patience`, -1.5 to -3.3 points: one set is chosen again and again.

The reward decides: it must compare the same clients' losses before and after. If only those who trained measure them,
the gain shrinks to that of waiting alone. If what a set tells in training is compared to what another set told before,
whoever fits the model already is rewarded: -0.2, -0.7 and -0.9 points, and -2.2 to -6.2 without `patience`.

The median in `budget` costs more than any choice gains: with 10 or more clusters it shuts a third of the clients out
for ever. `quantile=1` takes them in, for 1.3 to 1.7 times the seconds; at equal seconds random sets still gain 0.0, 0.9
and 1.6 points by it, and the default is 0.9, 1.7 and 2.2 points ahead of random sets under the median.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import inf, log, sqrt

import numpy as np
from numpy.typing import ArrayLike, NDArray

from shoal.errors import UserError
from shoal.rng import derive_seed
from shoal.selectors.sampling import Floats, Indices, validated_amounts, validated_matrix, validated_vector
from shoal.selectors.sampling import available_indices as among

ClientSets = NDArray[np.bool_]  # sets by clients

BUDGET_TOLERANCE = 1e-9  # sums are compared to the budget with this relative tolerance: 0.1 + 0.2 fits 0.3
DISTANCE_TOLERANCE = 1e-12  # of a mean distance: below it, sets are equal
JITTER = 1e-8  # of the variance, so that equal sets can be observed twice


def standardised_contexts(raw: ArrayLike, is_known: ArrayLike | None = None) -> Floats:
    """Eq. (9), each feature with mean 0 and variance 1 over those of whom it is known; 0 for the others.

    A feature in which nobody differs is 0. Without `known`, what is finite is known.
    """
    found = validated_matrix("raw", raw, "clients by features")
    seen = np.isfinite(found) if is_known is None else np.asarray(is_known, dtype=bool)
    if seen.shape != found.shape:
        raise UserError(f"known has shape {seen.shape}; it must be that of raw, {found.shape}")
    if not np.isfinite(found[seen]).all():
        raise UserError(f"raw has {found[seen & ~np.isfinite(found)][0]} where it is known; it must be finite")
    value = np.where(seen, found, 0.0)
    num_known = np.maximum(seen.sum(axis=0), 1)
    rest = np.where(seen, value - value.sum(axis=0) / num_known, 0.0)
    spread = np.sqrt((rest**2).sum(axis=0) / num_known)
    lowest = np.where(seen, found, inf).min(axis=0, initial=inf)
    highest = np.where(seen, found, -inf).max(axis=0, initial=-inf)
    standard: Floats = np.divide(rest, spread, out=np.zeros_like(rest), where=(lowest < highest) & (spread > 0))
    return standard


def time_budget(costs: ArrayLike, fraction: float = 0.16, quantile: float = 0.5) -> float:
    """T_max of a cluster: a share of what all its clients cost, but at least its median client (or another quantile; 1
    is the slowest), or small clusters would never train. Clients of infinite cost do not count."""
    for name, value in (("share", fraction), ("quantile", quantile)):
        if not 0 < value <= 1:
            raise UserError(f"{name} is {value}; it must be above 0 and at most 1")
    cost = _validated_costs(costs)
    cost = cost[np.isfinite(cost)]
    return max(fraction * float(cost.sum()), float(np.quantile(cost, quantile))) if len(cost) else 0.0


def candidate_sets(costs: ArrayLike, available: ArrayLike, budget: float, seed: int, num_sets: int = 48) -> ClientSets:
    """Omega_t of Alg. 3, sampled: distinct sets whose summed cost fits the budget and to which nobody can be added.

    `count` random orders, in which everybody is added who still fits. No set at all if nobody fits.
    """
    cost = _validated_costs(costs)
    there = among(available, len(cost))
    if not budget >= 0:
        raise UserError(f"budget is {budget}; it must be 0 or more")
    if num_sets < 1:
        raise UserError(f"count is {num_sets}; it must be 1 or more")
    most = budget * (1 + BUDGET_TOLERANCE)
    there = there[np.isfinite(cost[there]) & (cost[there] <= most)]
    if not len(there):
        return np.zeros((0, len(cost)), dtype=bool)
    sets = np.zeros((num_sets, len(cost)), dtype=bool)
    rows, spent = np.arange(num_sets), np.zeros(num_sets)
    rng = np.random.default_rng(derive_seed(seed, "candidates"))
    for client in rng.permuted(np.tile(there, (num_sets, 1)), axis=1).T:
        more = spent + cost[client]
        fits = more <= most
        sets[rows[fits], client[fits]] = True
        spent = np.where(fits, more, spent)
    _, first = np.unique(np.packbits(sets[:, there], axis=1), axis=0, return_index=True)
    return sets[np.sort(first)]  # in the order of chance: a tie has no favourite


def beta(t: int, delta: float = 0.1) -> float:
    """beta_t of Eq. (11)."""
    if t < 1 or not 0 < delta <= 1:
        raise UserError(f"t is {t} and delta is {delta}; they must be 1 or more, and above 0 and at most 1")
    return sqrt(2 * log(t**2 / delta))


def matern(distance: Floats, rho: float, sigma: float = 1.0) -> Floats:
    """Eq. (10) of a distance."""
    scaled = sqrt(3) * distance / rho
    covariance: Floats = sigma**2 * (1 + scaled) * np.exp(-scaled)
    return covariance


def energy_distance(between: Floats, own: Floats, others: Floats) -> Floats:
    """sqrt(2 d(A, B) - d(A, A) - d(B, B)): 0 between equal sets, and a distance in a Hilbert space."""
    square = 2 * between - own[:, None] - others
    return np.sqrt(np.where(square > DISTANCE_TOLERANCE * between, square, 0.0))


def gram(sets: Sequence[ArrayLike], rho: float, sigma: float = 1.0, as_published: bool = False) -> Floats:
    """The covariance of sets, each given as its members' contexts; `literal` is Eq. (10) as printed."""
    from scipy.spatial.distance import cdist

    if not len(sets):
        return np.zeros((0, 0))
    members = [_validated_members(s) for s in sets]
    sizes = np.array([len(z) for z in members])
    share = np.repeat(np.eye(len(sets)), sizes, axis=1) / sizes[:, None]
    everybody = np.concatenate(members)
    d = share @ cdist(everybody, everybody) @ share.T
    return matern(d if as_published else energy_distance(d, np.diag(d), np.diag(d)), rho, sigma)


def posterior(
    cross: Floats, own: Floats, observed: Floats, rewards: Floats, noise: float, as_published: bool = False
) -> tuple[Floats, Floats]:
    """Mean and standard deviation at sets, given rewards: the exact ones, or by the recursion of Alg. 3, line 8.

    `cross` are the covariances of the sets with the observed ones, oldest first, `own` the variances of the sets,
    `observed` the covariances of the observed ones.
    """
    from scipy.linalg import cholesky, solve_triangular

    if not len(rewards):
        return np.zeros(len(own)), np.sqrt(own)
    noisy = observed + noise**2 * np.eye(len(rewards))
    if (
        as_published
    ):  # Alg. 3, line 8, unrolled: each step adds k(A, A_t) times a weight that only earlier weights enter
        mean = cross @ solve_triangular(noisy, rewards, lower=True)
        gained = cross[:, -1] ** 2 / noisy[-1, -1]
    else:
        factor = cholesky(noisy + JITTER * np.diag(np.diag(observed)), lower=True)
        half = solve_triangular(factor, cross.T, lower=True)
        mean = half.T @ solve_triangular(factor, rewards, lower=True)
        gained = (half**2).sum(axis=0)
    return mean, np.sqrt(np.maximum(own - gained, 0.0))


@dataclass(eq=False)
class SetBandit:
    """One cluster's bandit. `state` is all that it has learned, as plain arrays; `load` takes it up again.

    `literal` is the printed method: the kernel of Eq. (10), the recursion of Alg. 3, rewards as they come and no regard
    for waiting; its `beta_scale` is 1, its `noise` equals its `sigma` and its `window` does not end.
    """

    rho: float | None = None  # None: the median distance of the candidates
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
        for name, value in (("beta_scale", self.beta_scale), ("patience", self.waiting_bonus)):
            if not 0 <= value < inf:
                raise UserError(f"{name} is {value}; it must be 0 or more and finite")
        for name, value in (("count", self.num_candidate_sets), ("window", self.window_rounds)):
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
        """The clients that train, in ascending order; nobody if nobody fits the budget.

        `waited`: for how many rounds each client has not taken part.
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
                * _standardised(sets @ validated_amounts("waited", waited_rounds, len(x)))
            )
        return np.flatnonzero(sets[np.argmax(score)])

    def belief(self, contexts: ArrayLike, sets: ClientSets) -> tuple[Floats, Floats]:
        """What is known of the sets before they train: mean and standard deviation of their `targets`."""
        from scipy.spatial.distance import cdist

        used = sets.any(axis=0)
        x = self._with_same_features(_finite_matrix("contexts", contexts))[used]
        share = sets[:, used] / sets.sum(axis=1, keepdims=True)
        near = share @ cdist(x, x) @ share.T
        far = np.zeros((len(sets), len(self.rewards_)))
        for column, z in zip(far.T, self._observed_sets(), strict=True):
            column[:] = share @ _mean_distances(x, z)
        past = self.distances_
        if not self.as_published:
            within, before = np.diag(near), np.diag(past)
            near, far = energy_distance(near, within, within), energy_distance(far, within, before)
            past = energy_distance(past, before, before)
        rho = self.rho or _positive_median(near[np.triu_indices(len(near), 1)])
        cross, own, observed = (matern(d, rho, self.sigma) for d in (far, np.diag(near), past))
        return posterior(cross, own, observed, self.targets(), self.noise, self.as_published)

    def targets(self) -> Floats:
        """The rewards in the window in units of sigma around 0, since their scale is anybody's guess."""
        return self.rewards_ if self.as_published else self.sigma * _standardised(self.rewards_)

    def learn(self, members: ArrayLike, reward: float) -> None:
        """The reward of the set that trained, given as its members' contexts when it was chosen."""
        z = self._with_same_features(_validated_members(members))
        if not np.isfinite(reward):
            raise UserError(f"reward is {reward}; it must be finite")
        sets = [*self._observed_sets(), z]
        new = np.array([_mean_distances(z, other).mean() for other in sets])
        grown = np.block([[self.distances_, new[:-1, None]], [new[None]]])
        kept = slice(-self.window_rounds, None)
        self.members_ = _pad_with_nan(sets[kept])
        self.distances_ = grown[kept, kept]
        self.rewards_ = np.append(self.rewards_, reward)[kept]
        self.rounds_ += 1

    def state(self) -> dict[str, Floats]:
        return {
            "members": self.members_,  # sets by members by features, filled up with NaN
            "distances": self.distances_,
            "rewards": self.rewards_,
            "rounds": np.array(self.rounds_, dtype=np.float64),
        }

    def load(self, state: Mapping[str, ArrayLike]) -> SetBandit:
        members, distances, rewards = (
            np.array(state[k], dtype=np.float64) for k in ("members", "distances", "rewards")
        )
        if members.ndim != 3 or distances.shape != (len(rewards), len(rewards)) or len(members) != len(rewards):
            raise UserError(
                f"state has members {members.shape}, distances {distances.shape} and rewards {rewards.shape}; "
                "it must be what state() of a bandit gave"
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
        raise UserError(f"costs has {cost[~(cost >= 0)][0]}; it must be 0 or more, infinite for who cannot take part")
    return cost


def _finite_matrix(name: str, values: ArrayLike) -> Floats:
    found = validated_matrix(name, values, "clients by features")
    if not np.isfinite(found).all():
        raise UserError(f"{name} has {found[~np.isfinite(found)][0]}; it must be finite, 0 for what is not known")
    return found


def _validated_members(values: ArrayLike) -> Floats:
    found = _finite_matrix("members", values)
    if not found.size:
        raise UserError(f"members has shape {found.shape}; a set must have 1 client and 1 feature or more")
    return found


def _pad_with_nan(sets: Sequence[Floats]) -> Floats:
    padded = np.full((len(sets), max(map(len, sets)), sets[0].shape[1]), np.nan)
    for row, z in zip(padded, sets, strict=True):
        row[: len(z)] = z
    return padded


def _mean_distances(x: Floats, members: Floats) -> Floats:
    """From each row of x to a set: the mean of its distances to the members."""
    from scipy.spatial.distance import cdist

    mean: Floats = cdist(x, members).mean(axis=1)
    return mean


def _positive_median(distances: Floats) -> float:
    """Of those that are not 0; 1 if all are."""
    apart = distances[distances > 0]
    return float(np.median(apart)) if len(apart) else 1.0


def _standardised(values: Floats) -> Floats:
    if not len(values) or np.ptp(values) == 0:
        return np.zeros(len(values))
    shifted = values - values.mean()
    standard: Floats = shifted / np.sqrt((shifted**2).mean())
    return standard
