"""DELTA: clients whose gradients differ from the others' or vary much within are drawn more often.

Wang et al., "DELTA: Diverse Client Sampling for Fasting Federated Learning", NeurIPS 2023, arXiv 2205.13925.

| symbol          | here                                                                                     |
|-----------------|------------------------------------------------------------------------------------------|
| g_i             | `gradients`, one row per client, the newest known one; NaN where none is known           |
| zeta_i          | distance of g_i from the (weighted) mean of the known gradients                          |
| sigma_i^2       | `variances`: the variance of a client's stochastic gradient around g_i                   |
| alpha_1,alpha_2 | `alpha1`, `alpha2`                                                                       |
| w_i             | `weights`: the client's share in the objective                                           |
| p_i             | `probabilities`                                                                          |

(a) p_i proportional to sqrt(alpha_1 zeta_i^2 + alpha_2 sigma_i^2)
(b) weight of a chosen client = w_i / (K p_i)

Deviation: the authors' experiments mix the lengths of g_i and of g_i - mean instead of (a); here it is the formula. A
client without a known gradient gets the mean of the others' (a): neither favoured nor forgotten.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from shoal.errors import UserError
from shoal.selectors.sampling import (
    Floats,
    Indices,
    available_indices,
    sample_by_size,
    validated_amounts,
    validated_matrix,
    validated_vector,
)


def probabilities(
    gradients: ArrayLike, variances: ArrayLike, alpha1: float, alpha2: float, weights: ArrayLike | None = None
) -> Floats:
    """(a) for every known client; all equal if there is no diversity at all."""
    g = validated_matrix("gradients", gradients, "clients by parameters")
    variance = validated_vector("variances", variances, len(g))
    for name, value in (("alpha1", alpha1), ("alpha2", alpha2)):
        if not 0 <= value < np.inf:
            raise UserError(f"{name} is {value}; it must be finite and 0 or more")
    if (variance < 0).any():
        raise UserError(f"variances has {np.nanmin(variance)}; it must be 0 or more")
    share = np.ones(len(g)) if weights is None else validated_amounts("weights", weights, len(g))
    known = np.isfinite(g).all(axis=1) & np.isfinite(variance)
    score: Floats = np.ones(len(g))
    if known.any():
        w = share[known] if share[known].any() else None
        zeta = np.linalg.norm(g[known] - np.average(g[known], axis=0, weights=w), axis=1)
        score[known] = np.sqrt(alpha1 * zeta**2 + alpha2 * variance[known])  # (a)
        score[~known] = score[known].mean()
    if not score.any():
        score += 1.0
    found: Floats = score / score.sum()
    return found


def draw(probabilities: ArrayLike, available: ArrayLike, k: int, seed: int) -> Indices:
    """Without replacement, in proportion to the probabilities of those available."""
    return sample_by_size(validated_amounts("probabilities", probabilities), available, k, seed)


def importance_weights(
    probabilities: ArrayLike, weights: ArrayLike, selected: ArrayLike, is_normalised: bool = True
) -> Floats:
    """How much each chosen client counts in the aggregate, in the order of its index.

    Not normalised, (b): the weighted sum has the expectation of the whole fleet's if the K were drawn independently.
    Normalised, (b) over its sum: it sums to 1, as a mean of models must; a ratio of two unbiased estimates, whose bias
    vanishes as K grows. A client of probability 0 is chosen only when everybody else was: then `weights` alone count.
    """
    p = validated_amounts("probabilities", probabilities)
    share = validated_amounts("weights", weights, len(p))
    selected_clients = available_indices(selected, len(p))
    if not len(selected_clients):
        return np.zeros(0)
    raw = (
        share[selected_clients]
        if (p[selected_clients] == 0).any()
        else share[selected_clients] / (len(selected_clients) * p[selected_clients])
    )  # (b)
    if not is_normalised:
        return raw
    return raw / raw.sum() if raw.any() else np.full(len(selected_clients), 1 / len(selected_clients))
