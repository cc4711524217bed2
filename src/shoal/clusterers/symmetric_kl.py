"""How far apart two label distributions are: the Kullback-Leibler divergence, symmetrised.

| symbol | here |
|---|---|
| p, q | rows of `P` and `Q`; entries up to 1e-6 count as 1e-6, and rows are not normalised again |
| d(p, q) = ½ Σ (p ln p/q + q ln q/p) | `symmetric_kl` |
"""

from __future__ import annotations

import numpy as np

from shoal.clusterers.validation import Floats

FLOOR = 1e-6
_NOISE = 1e-12  # distributions nearer than this differ by the rounding of the products below, if at all


def symmetric_kl(P: Floats, Q: Floats) -> Floats:
    """[n, M] and [m, M] to [n, m]: four products, since d = ½ (p·ln p + q·ln q - p·ln q - q·ln p)."""
    p, q = np.maximum(P, FLOOR), np.maximum(Q, FLOOR)
    log_p, log_q = np.log(p), np.log(q)
    own = (p * log_p).sum(1)[:, None] + (q * log_q).sum(1)
    distance: Floats = 0.5 * (own - p @ log_q.T - log_p @ q.T)
    return np.where(distance > _NOISE, distance, 0.0)
