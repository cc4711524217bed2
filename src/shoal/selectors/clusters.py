"""Selection from clusters: SimClust selects clients of all clusters, RepClust selects whole clusters.

Pereira et al., "Energy-Efficient Federated Learning for AIoT using Clustering Methods", Sec. III. Clusters of similar
clients are strata, and a round selects from as many of them as possible (Sec. III-A). Clusters of different clients
each represent all clients, and a round selects one whole cluster (Sec. III-B).

| symbol | here                                      |
|--------|-------------------------------------------|
| C_g    | the clients whose label is g              |
| G      | number of clusters with available clients |
| K      | `k`                                       |

Deviations from the paper
-------------------------
- RepClust selects exactly K clients instead of one whole cluster, because methods are compared at K clients. Clusters
  follow in random order until there are K clients, and a random part of the last one is selected.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from shoal.errors import UserError
from shoal.rng import derive_seed
from shoal.selectors.sampling import Indices, available_indices, num_selected


def one_of_each(labels: ArrayLike, available: ArrayLike, k: int, seed: int) -> Indices:
    """Returns one client of each of k random clusters, or several clients of each if there are fewer clusters than k.

    Clusters take turns in a random order, and each turn selects a random member. If a cluster has no members left, the
    others have more turns. With G clusters that are large enough, each has floor(k / G) clients or one more.
    """
    clients, cluster, turn = _in_random_cluster_order(labels, available, derive_seed(seed, "one_of_each"))
    members = np.bincount(cluster)
    by_cluster = np.argsort(cluster, kind="stable")
    lap = np.empty(len(cluster), dtype=np.int64)
    lap[by_cluster] = np.arange(len(cluster)) - np.repeat(np.cumsum(members) - members, members)
    return np.sort(clients[np.lexsort((turn, lap))[: num_selected(k, clients)]])


def whole_clusters(labels: ArrayLike, available: ArrayLike, k: int, seed: int) -> Indices:
    """Returns all available clients of one random cluster, then of the next, and a random part of the last, until k."""
    clients, _, turn = _in_random_cluster_order(labels, available, derive_seed(seed, "whole_groups"))
    return np.sort(clients[np.argsort(turn, kind="stable")[: num_selected(k, clients)]])


def _in_random_cluster_order(labels: ArrayLike, available: ArrayLike, seed: int) -> tuple[Indices, Indices, Indices]:
    """Returns the available clients in random order, the index of each one's cluster, and the turn of that cluster."""
    label = np.asarray(labels)
    if label.ndim != 1:
        raise UserError(f"labels has shape {label.shape}; it must hold one label per client")
    rng = np.random.default_rng(seed)
    clients = rng.permutation(available_indices(available, len(label)))
    present, cluster = np.unique(label[clients], return_inverse=True)
    return clients, cluster, rng.permutation(len(present))[cluster]
