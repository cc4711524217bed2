"""ClustLowVar: one client from each of K urns that hold similar clients.

Fraboni et al., "Clustered Sampling: Low-Variance and Improved Representativity for Clients Selection in Federated
Learning", ICML 2021, arXiv 2105.05883, Algorithm 2. Client i brings K n_i, an urn holds M. Groups of similar clients
are cut from a tree so that each fits an urn, the K largest start the urns, and the others fill them up: a client may
be split over urns. Each client drawn counts 1/K in the aggregate, which then has the expectation of the whole fleet's.

| symbol | here                                                                    |
|--------|-------------------------------------------------------------------------|
| n_i, M | `sizes`, whole numbers, and their sum                                   |
| K      | `k`, number of urns                                                     |
| r_k,i  | `distributions(...)[k, i]`: chance that urn k gives client i            |

(a) sum_i r_k,i = 1
(b) sum_k r_k,i = K n_i / M

Deviation: a client with K n_i >= M gets as many urns alone as it fills, and only its remainder is clustered; the
published code puts all of it into one urn, which breaks (b). Which of the smaller groups fills which urn is free under
(a) and (b): here the largest go first, into the urns with most room, without chance.
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
    sample_by_size,
    validated_amounts,
    validated_matrix,
)


def urn_distributions(sizes: ArrayLike, gradients: ArrayLike, k: int) -> Floats:
    """The urns r [k, clients]. Sizes that are all 0 count as equal; a gradient of 0 or NaN counts as unknown."""
    size = validated_amounts("sizes", sizes)
    if (size != np.rint(size)).any():
        raise UserError(f"sizes has {size[size != np.rint(size)][0]}; it must hold whole numbers of rows")
    g = validated_matrix("gradients", gradients, "clients by parameters")
    if len(g) != len(size):
        raise UserError(f"gradients has {len(g)} rows; it must have one for each of {len(size)} clients")
    if k < 1 or not len(size):
        raise UserError(f"k is {k} for {len(size)} clients; urns need 1 or more of both")
    mass = k * (size.astype(np.int64) if size.any() else np.ones(len(size), dtype=np.int64))
    full = int(mass.sum()) // k
    alone, rest = np.divmod(mass, full)
    urns = np.zeros((k, len(size)), dtype=np.int64)
    single = np.repeat(np.arange(len(size)), alone)
    urns[np.arange(len(single)), single] = full
    shared = np.flatnonzero(rest)
    if len(shared):
        groups = [shared[members] for members in _clusters_up_to_mass(gradient_angles(g[shared]), rest[shared], full)]
        _fill_urns(urns[len(single) :], rest, groups, full)
    return urns / full


def gradient_angles(gradients: ArrayLike) -> Floats:
    """arccos of the cosine of each pair; 0 to everybody for an unknown gradient, so that the unknown are alike."""
    g = validated_matrix("gradients", gradients, "clients by parameters")
    known = np.isfinite(g).all(axis=1, keepdims=True)
    g = g if known.all() else np.where(known, g, 0.0)
    products = g @ g.T
    length = np.sqrt(np.diag(products))
    both = np.outer(length, length)
    cosine = np.divide(products, both, out=np.ones_like(both), where=both > 0)
    angle: Floats = np.arccos(np.clip(cosine, -1.0, 1.0))
    np.fill_diagonal(angle, 0.0)
    return angle


def _clusters_up_to_mass(features: Floats, mass: Indices, max_mass: int) -> list[Indices]:
    """Ward's tree over the rows of `features`, cut into the largest groups of at most `most`; the heaviest first."""
    from scipy.cluster.hierarchy import fcluster, linkage
    from scipy.spatial.distance import pdist

    if len(features) == 1:
        return [np.zeros(1, dtype=np.int64)]
    tree = linkage(pdist(features), method="ward")
    weights = mass.tolist()
    for left, right in tree[:, :2].astype(int):
        weights.append(weights[left] + weights[right])
    labels = fcluster(tree, t=max_mass, criterion="monocrit", monocrit=np.array(weights[len(mass) :], dtype=np.float64))
    groups = [np.flatnonzero(labels == label) for label in np.unique(labels)]
    return sorted(groups, key=lambda members: (-int(mass[members].sum()), int(members[0])))


def _fill_urns(urns: Indices, mass: Indices, clusters: list[Indices], capacity: int) -> None:
    """Pours the groups into the empty rows of `urns`, in place."""
    for urn, members in zip(urns, clusters, strict=False):
        urn[members] = mass[members]
    room = capacity - urns.sum(axis=1)
    urn = len(urns) - 1
    for client in (c for members in clusters[len(urns) :] for c in sorted(members, key=lambda c: (-mass[c], c))):
        left = int(mass[client])
        while left:
            poured = min(left, int(room[urn]))
            urns[urn, client] += poured
            room[urn] -= poured
            left -= poured
            urn -= int(room[urn] == 0)


def draw(r: ArrayLike, available: ArrayLike, seed: int) -> Indices:
    """One client from each urn, distinct, min(urns, available) of them.

    An urn draws among those who are available and not yet drawn by an urn before it: the same as drawing again until
    the client is new. An urn without such a client is made up for by the others, in proportion to their expected
    number of draws (b). Both bend (b); urns of many clients, of which all are available, hardly feel it.
    """
    chance = validated_matrix("r", r, "urns by clients")
    there = available_indices(available, chance.shape[1])
    rng = np.random.default_rng(derive_seed(seed, "urns"))
    free = np.zeros(chance.shape[1], dtype=bool)
    free[there] = True
    for urn in chance:
        left = urn * free
        if left.any():
            free[rng.choice(len(left), p=left / left.sum())] = False
    drawn = np.setdiff1d(there, np.flatnonzero(free))
    more = sample_by_size(
        chance.sum(axis=0), free, num_selected(len(chance), there) - len(drawn), derive_seed(seed, "made up")
    )
    return np.sort(np.concatenate([drawn, more]))
