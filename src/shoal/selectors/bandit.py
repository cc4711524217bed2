"""CICS: which set of a cluster's clients trains this round, by a bandit over sets that fit a time budget.

DOCSTRING
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import log, sqrt

import numpy as np
from numpy.typing import ArrayLike, NDArray

from shoal.errors import UserError
from shoal.rng import derive_seed
from shoal.selectors.choice import Floats, Indices, matrix, vector
from shoal.selectors.choice import candidates as among

Sets = NDArray[np.bool_]  # sets by clients

ROOM = 1e-9  # sums are compared to the budget with this relative tolerance: 0.1 + 0.2 fits 0.3
JITTER = 1e-8


def contexts(raw: ArrayLike, known: ArrayLike | None = None) -> Floats:
    """Eq. (9), each feature with mean 0 and variance 1 over those of whom it is known; 0 for the others.

    A feature in which nobody differs is 0. Without `known`, what is finite is known.
    """
    found = matrix("raw", raw, "clients by features")
    seen = np.isfinite(found) if known is None else np.asarray(known, dtype=bool)
    if seen.shape != found.shape:
        raise UserError(f"known has shape {seen.shape}; it must be that of raw, {found.shape}")
    if not np.isfinite(found[seen]).all():
        raise UserError(f"raw has {found[seen & ~np.isfinite(found)][0]} where it is known; it must be finite")
    value = np.where(seen, found, 0.0)
    those = np.maximum(seen.sum(axis=0), 1)
    rest = np.where(seen, value - value.sum(axis=0) / those, 0.0)
    spread = np.sqrt((rest**2).sum(axis=0) / those)
    differ = np.where(seen, found, np.inf).min(axis=0, initial=np.inf) < np.where(seen, found, -np.inf).max(
        axis=0, initial=-np.inf
    )
    return np.divide(rest, spread, out=np.zeros_like(rest), where=differ & (spread > 0))


def budget(costs: ArrayLike, share: float = 0.16) -> float:
    """T_max of a cluster: a share of what all its clients cost, but at least its median client, or small clusters
    would never train. Clients of infinite cost do not count."""
    if not 0 < share <= 1:
        raise UserError(f"share is {share}; it must be above 0 and at most 1")
    cost = _costs(costs)
    cost = cost[np.isfinite(cost)]
    return max(share * float(cost.sum()), float(np.median(cost))) if len(cost) else 0.0


def candidates(costs: ArrayLike, available: ArrayLike, budget: float, seed: int, count: int = 48) -> Sets:
    """Omega_t of Alg. 3, sampled: distinct sets whose summed cost fits the budget and to which nobody can be added.

    `count` random orders, in which everybody is added who still fits. No set at all if nobody fits.
    """
    cost = _costs(costs)
    there = among(available, len(cost))
    if not budget >= 0:
        raise UserError(f"budget is {budget}; it must be 0 or more")
    if count < 1:
        raise UserError(f"count is {count}; it must be 1 or more")
    most = budget * (1 + ROOM)
    there = there[np.isfinite(cost[there]) & (cost[there] <= most)]
    if not len(there):
        return np.zeros((0, len(cost)), dtype=bool)
    sets = np.zeros((count, len(cost)), dtype=bool)
    rows, spent = np.arange(count), np.zeros(count)
    rng = np.random.default_rng(derive_seed(seed, "candidates"))
    for client in rng.permuted(np.tile(there, (count, 1)), axis=1).T:
        more = spent + cost[client]
        fits = more <= most
        sets[rows[fits], client[fits]] = True
        spent = np.where(fits, more, spent)
    _, first = np.unique(sets, axis=0, return_index=True)
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
    return np.sqrt(np.maximum(2 * between - own[:, None] - others, 0.0))


def gram(sets: Sequence[ArrayLike], rho: float, sigma: float = 1.0, literal: bool = False) -> Floats:
    """The covariance of sets, each given as its members' contexts; `literal` is Eq. (10) as printed."""
    members = [_members(s) for s in sets]
    d = np.array([[_mean_distances(a, b).mean() for b in members] for a in members]).reshape(len(sets), len(sets))
    return matern(d if literal else energy_distance(d, np.diag(d), np.diag(d)), rho, sigma)


def posterior(
    cross: Floats, own: Floats, observed: Floats, rewards: Floats, noise: float, literal: bool = False
) -> tuple[Floats, Floats]:
    """Mean and standard deviation at sets, given rewards: the exact ones, or by the recursion of Alg. 3, line 8.

    `cross` are the covariances of the sets with the observed ones, oldest first, `own` the variances of the sets,
    `observed` the covariances of the observed ones.
    """
    from scipy.linalg import cholesky, solve_triangular

    if not len(rewards):
        return np.zeros(len(own)), np.sqrt(own)
    noisy = observed + noise**2 * np.eye(len(rewards))
    if literal:  # Alg. 3, line 8, unrolled: each step adds k(A, A_t) times a weight that only earlier weights enter
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
    pass


def _costs(costs: ArrayLike) -> Floats:
    cost = vector("costs", costs)
    if not (cost >= 0).all():
        raise UserError(f"costs has {cost[~(cost >= 0)][0]}; it must be 0 or more, infinite for who cannot take part")
    return cost
