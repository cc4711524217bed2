"""HACCS: groups of alike clients are drawn by loss and speed; the fastest of a group stand in for the rest of it.

Wolfrath, Sreekumar, Kumar, Wang, Chandra, "HACCS: Heterogeneity-Aware Clustered Client Selection for Accelerated
Federated Learning", IPDPS 2022; details from the authors' published scheduler (github.com/NS-PhD-Research/HACCS).

| original | here |
|----------|------|
| theta_c = rho (1 - latency_c / max latency) + (1 - rho) loss_c / sum loss | `group_weights` |
| latency_c, loss_c | means over a group's clients of their time and of their squared loss |
| k theta_c / sum theta places for certain, the others drawn by theta | `fastest_of_groups` |

Deviation: there everybody's loss is measured in every round. Here a loss may be unknown (NaN): a group's is the mean of
those known, and a group of which nothing is known counts as the worst, so that it is heard soon.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from shoal.errors import UserError
from shoal.rng import derive_seed
from shoal.selectors.sampling import (
    Floats,
    Indices,
    available_indices,
    num_selected,
    validated_amounts,
    validated_vector,
)


def cluster_weights(labels: ArrayLike, times: ArrayLike, losses: ArrayLike, rho: float = 0.5) -> Floats:
    """How likely each group is drawn, in the order of their sorted labels; the sum is 1."""
    _, group = np.unique(np.asarray(labels), return_inverse=True)
    time, loss = validated_amounts("times", times, len(group)), validated_vector("losses", losses, len(group))
    if not 0 <= rho <= 1:
        raise UserError(f"rho is {rho}; it must be from 0 (loss only) to 1 (speed only)")
    members = np.bincount(group)
    latency = np.bincount(group, time) / members
    speed = 1 - latency / latency.max() if latency.any() else np.zeros(len(members))
    square = _known_means(group, loss**2)
    need = square / square.sum() if square.any() else np.full(len(members), 1 / len(members))
    theta = rho * speed + (1 - rho) * need
    return np.asarray(theta / theta.sum() if theta.any() else np.full(len(theta), 1 / len(theta)))


def _known_means(cluster: Indices, values: Floats) -> Floats:
    known = np.isfinite(values)
    count = np.bincount(cluster, known)
    total = np.bincount(cluster, np.where(known, values, 0.0))
    means = np.divide(total, count, out=np.full(len(count), np.nan), where=count > 0)
    return np.where(count > 0, means, np.nanmax(means) if known.any() else 1.0)


def fastest_of_clusters(
    labels: ArrayLike,
    times: ArrayLike,
    losses: ArrayLike,
    available: ArrayLike,
    k: int,
    seed: int,
    rho: float = 0.5,
) -> Indices:
    """k clients: a group gets the whole part of its share of k for certain, the others are drawn by weight, and each
    gives its fastest (chance decides between equals). A group that runs out is made up for by the rest."""
    label = np.asarray(labels)
    time, loss = validated_amounts("times", times, len(label)), validated_vector("losses", losses, len(label))
    there = available_indices(available, len(label))
    if not num_selected(k, there):
        return np.empty(0, dtype=np.int64)
    rng = np.random.default_rng(derive_seed(seed, "fastest"))
    chance = cluster_weights(label[there], time[there], loss[there], rho)
    _, group = np.unique(label[there], return_inverse=True)
    places = _num_clients_by_cluster(chance, np.bincount(group), num_selected(k, there), rng)
    order = np.lexsort((rng.random(len(there)), time[there], group))
    turn = np.arange(len(there)) - np.searchsorted(group[order], group[order])  # 0 is the fastest of its group
    return np.sort(there[order[turn < places[group[order]]]])


def _num_clients_by_cluster(probabilities: Floats, members: Indices, k: int, rng: np.random.Generator) -> Indices:
    places = np.minimum(np.floor(probabilities * k + 1e-9).astype(np.int64), members)
    while places.sum() < k:
        left = places < members
        weight = probabilities * left if (probabilities * left).any() else left.astype(np.float64)
        places[rng.choice(len(places), p=weight / weight.sum())] += 1
    return places
