"""Label distributions for tests of clusterers."""

from math import log

import numpy as np

from shoal.clusterers.symmetric_kl import FLOOR

ONE_HOT = np.eye(4)[[0, 1, 2, 3, 0, 1, 2, 3]]


def draw_label_distributions(num_clients, classes=5, seed=0, alpha=0.3):
    return np.random.default_rng(seed).dirichlet([alpha] * classes, num_clients)


def reference_symmetric_kl(p, q):
    """Computes the definition entry by entry."""
    p, q = (np.maximum(x, FLOOR) for x in (p, q))
    return 0.5 * sum(a * log(a / b) + b * log(b / a) for a, b in zip(p, q, strict=True))


def clusters_as_values(rows, labels):
    """Returns the rows of each cluster, sorted: cluster numbers and the order of equal rows do not count."""
    return sorted(sorted(map(tuple, rows[labels == g].tolist())) for g in np.unique(labels))
