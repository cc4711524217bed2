"""ClustLowVar: one client is drawn from each of K urns of similar clients.

Fraboni et al., "Clustered Sampling: Low-Variance and Improved Representativity for Clients Selection in Federated
Learning", ICML 2021, arXiv 2105.05883, Algorithm 2. Client i has the mass K n_i, and an urn has the capacity M.
Clusters of similar clients are cut from a tree so that each fits into an urn. The K largest start the urns, and the
others fill them, so that a client may be split over several urns. Each drawn client has the weight 1/K in the
aggregate, whose expectation is then that of all clients.

| symbol | here                                                                    |
|--------|-------------------------------------------------------------------------|
| n_i, M | `sizes`, whole numbers, and their sum                                   |
| K      | `k`, number of urns                                                     |
| r_k,i  | `urn_distributions(...)[k, i]`: probability that urn k draws client i   |

(a) sum_i r_k,i = 1
(b) sum_k r_k,i = K n_i / M

Deviations from the paper
-------------------------
- A client with K n_i >= M gets as many urns of its own as it fills, and only its remainder is clustered. The published
  code puts all of it into one urn, which violates (b).
- The smaller clusters fill the urns in a fixed order: the largest cluster first, into the urn with the most room. (a)
  and (b) allow any order.
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
    """Returns the distributions r [k, clients] of the urns.

    Sizes that are all 0 count as equal. A gradient of 0 or NaN counts as unknown.
    """
    size = validated_amounts("sizes", sizes)
    if (size != np.rint(size)).any():
        raise UserError(f"sizes has {size[size != np.rint(size)][0]}; it must hold whole numbers of samples")
    gradient = validated_matrix("gradients", gradients, "clients by parameters")
    if len(gradient) != len(size):
        raise UserError(f"gradients has {len(gradient)} rows; it must have one for each of {len(size)} clients")
    if k < 1 or not len(size):
        raise UserError(f"k is {k} for {len(size)} clients; urns need 1 or more of both")
    mass = k * (size.astype(np.int64) if size.any() else np.ones(len(size), dtype=np.int64))
    full = int(mass.sum()) // k
    num_own_urns, rest = np.divmod(mass, full)
    urns = np.zeros((k, len(size)), dtype=np.int64)
    owners = np.repeat(np.arange(len(size)), num_own_urns)
    urns[np.arange(len(owners)), owners] = full
    with_remainder = np.flatnonzero(rest)
    if len(with_remainder):
        clusters = [
            with_remainder[members]
            for members in _clusters_up_to_mass(gradient_angles(gradient[with_remainder]), rest[with_remainder], full)
        ]
        _fill_urns(urns[len(owners) :], rest, clusters, full)
    return urns / full


def gradient_angles(gradients: ArrayLike) -> Floats:
    """Returns the angle between each pair of gradients. An unknown gradient has the angle 0 to all others."""
    gradient = validated_matrix("gradients", gradients, "clients by parameters")
    is_known = np.isfinite(gradient).all(axis=1, keepdims=True)
    gradient = gradient if is_known.all() else np.where(is_known, gradient, 0.0)
    products = gradient @ gradient.T
    norms = np.sqrt(np.diag(products))
    norm_products = np.outer(norms, norms)
    cosine = np.divide(products, norm_products, out=np.ones_like(norm_products), where=norm_products > 0)
    angle: Floats = np.arccos(np.clip(cosine, -1.0, 1.0))
    np.fill_diagonal(angle, 0.0)
    return angle


def _clusters_up_to_mass(features: Floats, mass: Indices, max_mass: int) -> list[Indices]:
    """Returns the largest clusters of Ward's tree that have at most the mass `max_mass`, the heaviest first."""
    from scipy.cluster.hierarchy import fcluster, linkage
    from scipy.spatial.distance import pdist

    if len(features) == 1:
        return [np.zeros(1, dtype=np.int64)]
    tree = linkage(pdist(features), method="ward")
    weights = mass.tolist()
    for left, right in tree[:, :2].astype(int):
        weights.append(weights[left] + weights[right])
    labels = fcluster(tree, t=max_mass, criterion="monocrit", monocrit=np.array(weights[len(mass) :], dtype=np.float64))
    clusters = [np.flatnonzero(labels == label) for label in np.unique(labels)]
    return sorted(clusters, key=lambda members: (-int(mass[members].sum()), int(members[0])))


def _fill_urns(urns: Indices, mass: Indices, clusters: list[Indices], capacity: int) -> None:
    """Fills the empty rows of `urns` with the clusters, in place."""
    for urn, members in zip(urns, clusters, strict=False):
        urn[members] = mass[members]
    room = capacity - urns.sum(axis=1)
    urn = len(urns) - 1
    for client in (c for members in clusters[len(urns) :] for c in sorted(members, key=lambda c: (-mass[c], c))):
        remaining = int(mass[client])
        while remaining:
            added = min(remaining, int(room[urn]))
            urns[urn, client] += added
            room[urn] -= added
            remaining -= added
            urn -= int(room[urn] == 0)


def draw(r: ArrayLike, available: ArrayLike, seed: int) -> Indices:
    """Returns distinct clients, one from each urn, min(urns, available clients) of them.

    An urn draws among the available clients that no earlier urn has drawn. This equals repeated draws until the client
    is new. If an urn has no such client, another one is drawn in proportion to the expected numbers of draws (b). Both
    rules violate (b) slightly, and hardly at all for urns of many clients that are all available.
    """
    distributions = validated_matrix("r", r, "urns by clients")
    present = available_indices(available, distributions.shape[1])
    rng = np.random.default_rng(derive_seed(seed, "urns"))
    is_free = np.zeros(distributions.shape[1], dtype=bool)
    is_free[present] = True
    for urn in distributions:
        weights = urn * is_free
        if weights.any():
            is_free[rng.choice(len(weights), p=weights / weights.sum())] = False
    drawn = np.setdiff1d(present, np.flatnonzero(is_free))
    replacements = sample_by_size(
        distributions.sum(axis=0),
        is_free,
        num_selected(len(distributions), present) - len(drawn),
        derive_seed(seed, "made up"),
    )
    return np.sort(np.concatenate([drawn, replacements]))
