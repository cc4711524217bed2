"""Choice from groups that were formed beforehand: SimClust takes some of each, RepClust takes groups whole.

Pereira et al., "Energy-Efficient Federated Learning for AIoT using Clustering Methods", Sec. III: groups of similar
clients are strata, and a round takes from as many of them as it can (Sec. III-A); groups of unlike clients stand for
everybody, and a round takes one of them whole (Sec. III-B).

| symbol | here                                      |
|--------|-------------------------------------------|
| C_g    | the clients whose label is g              |
| G      | number of groups with somebody available  |
| K      | `k`                                       |

Deviation: RepClust's round is one whole group, yet every comparison is at exactly K clients. Here whole groups follow
in random order until K, and the last one is cut at random.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from shoal.errors import UserError
from shoal.rng import derive_seed
from shoal.selectors.sampling import Indices, available_indices, num_selected


def one_of_each(labels: ArrayLike, available: ArrayLike, k: int, seed: int) -> Indices:
    """One client of k random groups if G >= k; otherwise floor(k / G) of each group and the rest from random groups.

    Groups take turns in a random order, each giving a random member, until k are found: a group that runs out is made
    up for by the others.
    """
    clients, group, turn = _in_random_cluster_order(labels, available, derive_seed(seed, "one_of_each"))
    members = np.bincount(group)
    by_group = np.argsort(group, kind="stable")
    lap = np.empty(len(group), dtype=np.int64)
    lap[by_group] = np.arange(len(group)) - np.repeat(np.cumsum(members) - members, members)
    return np.sort(clients[np.lexsort((turn, lap))[: num_selected(k, clients)]])


def whole_clusters(labels: ArrayLike, available: ArrayLike, k: int, seed: int) -> Indices:
    """All that are available of one random group, then of the next, until k; the last group is cut at random."""
    clients, _, turn = _in_random_cluster_order(labels, available, derive_seed(seed, "whole_groups"))
    return np.sort(clients[np.argsort(turn, kind="stable")[: num_selected(k, clients)]])


def _in_random_cluster_order(labels: ArrayLike, available: ArrayLike, seed: int) -> tuple[Indices, Indices, Indices]:
    """The available clients shuffled; the number of each one's group; the turn of that group."""
    label = np.asarray(labels)
    if label.ndim != 1:
        raise UserError(f"labels has shape {label.shape}; it must hold one label per client")
    rng = np.random.default_rng(seed)
    clients = rng.permutation(available_indices(available, len(label)))
    present, group = np.unique(label[clients], return_inverse=True)
    return clients, group, rng.permutation(len(present))[group]
