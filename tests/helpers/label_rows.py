"""Label distributions for tests of clusterers."""

from math import log

import numpy as np

from shoal.clusterers.symmetric_kl import FLOOR

ONE_HOT = np.eye(4)[[0, 1, 2, 3, 0, 1, 2, 3]]


def draw_label_distributions(rows, classes=5, seed=0, alpha=0.3):
    return np.random.default_rng(seed).dirichlet([alpha] * classes, rows)


def reference_symmetric_kl(p, q):
    """The definition, entry by entry."""
    p, q = (np.maximum(x, FLOOR) for x in (p, q))
    return 0.5 * sum(a * log(a / b) + b * log(b / a) for a, b in zip(p, q, strict=True))


def clusters_as_values(rows, labels):
    """The partition without regard to numbers of groups and to which of two equal rows is where."""
    return sorted(sorted(map(tuple, rows[labels == g].tolist())) for g in np.unique(labels))
