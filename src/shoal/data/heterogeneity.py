"""Numbers that describe how much the data of clients differ."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from shoal.rng import derive_seed

_MAX_COMPARED_CLIENTS = 2000  # two million pairs


def heterogeneity_metrics(label_counts: Tensor, seed: int = 0) -> dict[str, float]:
    """Returns sizes and distances of the clients' data.

    Parameters
    ----------
    label_counts : Tensor
        Samples per client and class, [clients, classes].
    seed : int
        Seed of the draw of 2,000 clients whose distance is computed, if there are more.

    Returns
    -------
    dict[str, float]
        The number of clients and samples, the samples of the smallest, median and largest client, the mean
        Jensen-Shannon distance of label distributions, the class imbalance, and the Gini coefficient of sizes.
    """
    table = label_counts.cpu().numpy().astype(np.float64)
    sizes = table.sum(axis=1)
    shares = table[sizes > 0] / sizes[sizes > 0, None]
    return {
        "num_clients": float(len(sizes)),
        "num_samples": float(sizes.sum()),
        "min_samples": float(sizes.min()),
        "median_samples": float(np.median(sizes)),
        "max_samples": float(sizes.max()),
        "js_distance": _js_distance(shares, seed),
        "class_imbalance": _class_imbalance(shares),
        "size_gini": _gini(sizes),
    }


def _js_distance(shares: NDArray[np.float64], seed: int) -> float:
    """Returns the mean over all pairs of the root of the Jensen-Shannon divergence in bits: 0 equal, 1 disjoint."""
    if len(shares) > _MAX_COMPARED_CLIENTS:
        rng = np.random.default_rng(derive_seed(seed, "heterogeneity"))
        shares = shares[rng.choice(len(shares), _MAX_COMPARED_CLIENTS, replace=False)]
    if len(shares) < 2:
        return 0.0
    from scipy.spatial.distance import pdist  # slow to import

    return float(pdist(shares, "jensenshannon").mean() / np.sqrt(np.log(2)))


def _class_imbalance(shares: NDArray[np.float64]) -> float:
    """Returns 0 if every client has all classes equally often, and 1 if each client has one class only."""
    if shares.size == 0 or shares.shape[1] < 2:
        return 0.0
    from scipy.special import entr

    return float((1 - entr(shares).sum(axis=1) / np.log(shares.shape[1])).mean())


def _gini(sizes: NDArray[np.float64]) -> float:
    """Returns 0 if all clients have equally many samples, and nearly 1 if one client has nearly all."""
    if sizes.sum() == 0:
        return 0.0
    n = len(sizes)
    rank = np.arange(1, n + 1)
    return float(((2 * rank - n - 1) * np.sort(sizes)).sum() / (n * sizes.sum()))
