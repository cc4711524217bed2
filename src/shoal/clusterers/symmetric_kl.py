"""The symmetrised Kullback-Leibler divergence of label distributions.

| symbol | here |
|---|---|
| p, q | rows of `P` and `Q`; entries up to 1e-6 count as 1e-6, and rows are not normalised again |
| d(p, q) = ½ Σ (p ln p/q + q ln q/p) | `symmetric_kl` |
"""

from __future__ import annotations

import numpy as np

from shoal.clusterers.validation import Floats

FLOOR = 1e-6
_ROUNDING = 1e-12  # smaller divergences may be rounding errors of the products below


def symmetric_kl(P: Floats, Q: Floats) -> Floats:
    """Return the symmetrised Kullback-Leibler divergence of all pairs of rows of two tables.

    Parameters
    ----------
    P : ndarray of shape (n_p, n_columns)
        Non-negative numbers, such as label distributions.
    Q : ndarray of shape (n_q, n_columns)
        The same.

    Returns
    -------
    ndarray of shape (n_p, n_q)
        The divergences. They take four matrix products, since d = ½ (p·ln p + q·ln q - p·ln q - q·ln p).

    References
    ----------
    Pereira, Famá, Kalalas, Dini, "Energy-efficient federated learning for AIoT using clustering methods", 2025,
    Sec. III-A.

    Examples
    --------
    >>> symmetric_kl(np.array([[0.75, 0.25]]), np.array([[0.25, 0.75], [0.75, 0.25]])).round(4).tolist()
    [[0.5493, 0.0]]
    """
    p, q = np.maximum(P, FLOOR), np.maximum(Q, FLOOR)
    log_p, log_q = np.log(p), np.log(q)
    own = (p * log_p).sum(1)[:, None] + (q * log_q).sum(1)
    distance: Floats = 0.5 * (own - p @ log_q.T - log_p @ q.T)
    return np.where(distance > _ROUNDING, distance, 0.0)
