"""How much the clients' data differ, in a few figures."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from shoal.rng import derive_seed

_MAX_COMPARED_CLIENTS = 2000  # clients that are compared with each other: two million pairs


def heterogeneity_metrics(label_counts: Tensor, seed: int = 0) -> dict[str, float]:
    """`counts` is [clients, classes]. Above 2,000 clients the distance is that of a seeded sample."""
    table = label_counts.cpu().numpy().astype(np.float64)
    sizes = table.sum(axis=1)
    shares = table[sizes > 0] / sizes[sizes > 0, None]
    return {
        "clients": float(len(sizes)),
        "rows": float(sizes.sum()),
        "min_size": float(sizes.min()),
        "median_size": float(np.median(sizes)),
        "max_size": float(sizes.max()),
        "js_distance": _js_distance(shares, seed),
        "class_imbalance": _class_imbalance(shares),
        "size_gini": _gini(sizes),
    }


def _js_distance(shares: NDArray[np.float64], seed: int) -> float:
    """Mean over all pairs; the root of the Jensen-Shannon divergence in bits: 0 the same, 1 disjoint."""
    if len(shares) > _MAX_COMPARED_CLIENTS:
        rng = np.random.default_rng(derive_seed(seed, "heterogeneity"))
        shares = shares[rng.choice(len(shares), _MAX_COMPARED_CLIENTS, replace=False)]
    if len(shares) < 2:
        return 0.0
    from scipy.spatial.distance import pdist  # slow to import: not before it is needed

    return float(pdist(shares, "jensenshannon").mean() / np.sqrt(np.log(2)))


def _class_imbalance(shares: NDArray[np.float64]) -> float:
    """0 where every client has all classes equally often, 1 where each has one class only."""
    if shares.size == 0 or shares.shape[1] < 2:
        return 0.0
    from scipy.special import entr

    return float((1 - entr(shares).sum(axis=1) / np.log(shares.shape[1])).mean())


def _gini(sizes: NDArray[np.float64]) -> float:
    """0 where all clients have equally many rows, near 1 where one has nearly all."""
    if sizes.sum() == 0:
        return 0.0
    n = len(sizes)
    rank = np.arange(1, n + 1)
    return float(((2 * rank - n - 1) * np.sort(sizes)).sum() / (n * sizes.sum()))
