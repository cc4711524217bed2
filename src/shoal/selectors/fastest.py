"""HACCS: clusters of similar clients are drawn by loss and speed, and the fastest clients represent each cluster.

Wolfrath, Sreekumar, Kumar, Wang, Chandra, "HACCS: Heterogeneity-Aware Clustered Client Selection for Accelerated
Federated Learning", IPDPS 2022; details from the authors' published scheduler (github.com/NS-PhD-Research/HACCS).

| original | here |
|----------|------|
| theta_c = rho (1 - latency_c / max latency) + (1 - rho) loss_c / sum loss | `cluster_weights` |
| latency_c, loss_c | means over a cluster's clients of their time and of their squared loss |
| floor(k theta_c / sum theta) certain places, the others drawn by theta | `fastest_of_clusters` |

Deviations from the paper
-------------------------
- A loss may be unknown (NaN), because the losses of all clients are not measured in every round. The loss of a cluster
  is the mean of its known losses. A cluster without any known loss gets the largest one, so that it is selected soon.
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
    """Returns the probability of drawing each cluster, in the order of the sorted labels."""
    _, cluster = np.unique(np.asarray(labels), return_inverse=True)
    time, loss = validated_amounts("times", times, len(cluster)), validated_vector("losses", losses, len(cluster))
    if not 0 <= rho <= 1:
        raise UserError(f"rho is {rho}; it must be from 0 (loss only) to 1 (speed only)")
    members = np.bincount(cluster)
    latency = np.bincount(cluster, time) / members
    speed = 1 - latency / latency.max() if latency.any() else np.zeros(len(members))
    squared_loss = _known_means(cluster, loss**2)
    loss_fraction = squared_loss / squared_loss.sum() if squared_loss.any() else np.full(len(members), 1 / len(members))
    theta = rho * speed + (1 - rho) * loss_fraction
    return np.asarray(theta / theta.sum() if theta.any() else np.full(len(theta), 1 / len(theta)))


def _known_means(cluster: Indices, values: Floats) -> Floats:
    is_known = np.isfinite(values)
    count = np.bincount(cluster, is_known)
    total = np.bincount(cluster, np.where(is_known, values, 0.0))
    means = np.divide(total, count, out=np.full(len(count), np.nan), where=count > 0)
    return np.where(count > 0, means, np.nanmax(means) if is_known.any() else 1.0)


def fastest_of_clusters(
    labels: ArrayLike,
    times: ArrayLike,
    losses: ArrayLike,
    available: ArrayLike,
    k: int,
    seed: int,
    rho: float = 0.5,
) -> Indices:
    """Returns k clients, the fastest of each cluster.

    Each cluster has the integer part of its share of k for certain, and the remaining places are drawn by weight. Ties
    in speed are broken at random. If a cluster has too few clients, other clusters fill its places.
    """
    label = np.asarray(labels)
    time, loss = validated_amounts("times", times, len(label)), validated_vector("losses", losses, len(label))
    present = available_indices(available, len(label))
    if not num_selected(k, present):
        return np.empty(0, dtype=np.int64)
    rng = np.random.default_rng(derive_seed(seed, "fastest"))
    weights = cluster_weights(label[present], time[present], loss[present], rho)
    _, cluster = np.unique(label[present], return_inverse=True)
    num_by_cluster = _num_clients_by_cluster(weights, np.bincount(cluster), num_selected(k, present), rng)
    order = np.lexsort((rng.random(len(present)), time[present], cluster))
    turn = np.arange(len(present)) - np.searchsorted(cluster[order], cluster[order])  # 0 is the fastest of its cluster
    return np.sort(present[order[turn < num_by_cluster[cluster[order]]]])


def _num_clients_by_cluster(probabilities: Floats, members: Indices, k: int, rng: np.random.Generator) -> Indices:
    counts = np.minimum(np.floor(probabilities * k + 1e-9).astype(np.int64), members)
    while counts.sum() < k:
        has_room = counts < members
        weight = probabilities * has_room if (probabilities * has_room).any() else has_room.astype(np.float64)
        counts[rng.choice(len(counts), p=weight / weight.sum())] += 1
    return counts
