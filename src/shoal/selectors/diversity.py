"""DELTA: clients with unusual or noisy gradients are selected more often.

Wang et al., "DELTA: Diverse Client Sampling for Fasting Federated Learning", NeurIPS 2023, arXiv 2205.13925.

| symbol          | here                                                                                     |
|-----------------|------------------------------------------------------------------------------------------|
| g_i             | `gradients`, one row per client, its newest gradient; NaN if none is known               |
| zeta_i          | distance of g_i from the (weighted) mean of the known gradients                          |
| sigma_i^2       | `variances`: the variance of a client's stochastic gradient around g_i                   |
| alpha_1,alpha_2 | `alpha1`, `alpha2`                                                                       |
| w_i             | `weights`: the weight of the client in the objective                                     |
| p_i             | `probabilities`                                                                          |

(a) p_i proportional to sqrt(alpha_1 zeta_i^2 + alpha_2 sigma_i^2)
(b) weight of a selected client = w_i / (K p_i)

Deviations from the paper
-------------------------
- The formula (a) is used. The authors' experiments combine the norms of g_i and of g_i - mean instead.
- A client without a known gradient gets the mean of (a) over the other clients, so that its probability is average.
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
    """Returns the probability (a) of every client, or equal probabilities if all gradients are equal and constant."""
    gradient = validated_matrix("gradients", gradients, "clients by parameters")
    variance = validated_vector("variances", variances, len(gradient))
    for name, value in (("alpha1", alpha1), ("alpha2", alpha2)):
        if not 0 <= value < np.inf:
            raise UserError(f"{name} is {value}; it must be finite and 0 or more")
    if (variance < 0).any():
        raise UserError(f"variances has {np.nanmin(variance)}; it must be 0 or more")
    objective_weights = (
        np.ones(len(gradient)) if weights is None else validated_amounts("weights", weights, len(gradient))
    )
    is_known = np.isfinite(gradient).all(axis=1) & np.isfinite(variance)
    score: Floats = np.ones(len(gradient))
    if is_known.any():
        known_weights = objective_weights[is_known] if objective_weights[is_known].any() else None
        zeta = np.linalg.norm(
            gradient[is_known] - np.average(gradient[is_known], axis=0, weights=known_weights), axis=1
        )
        score[is_known] = np.sqrt(alpha1 * zeta**2 + alpha2 * variance[is_known])  # (a)
        score[~is_known] = score[is_known].mean()
    if not score.any():
        score += 1.0
    normalised: Floats = score / score.sum()
    return normalised


def draw(probabilities: ArrayLike, available: ArrayLike, k: int, seed: int) -> Indices:
    """Returns k available clients, drawn without replacement in proportion to their probabilities."""
    return sample_by_size(validated_amounts("probabilities", probabilities), available, k, seed)


def importance_weights(
    probabilities: ArrayLike, weights: ArrayLike, selected: ArrayLike, is_normalised: bool = True
) -> Floats:
    """Returns the aggregation weight of each selected client, in the order of the indices.

    Without normalisation these are the weights (b). Their weighted sum is unbiased if the K clients are drawn
    independently. Normalised weights sum to 1, as a mean of models requires. They are a ratio of two unbiased
    estimates, whose bias vanishes for large K. If a client of probability 0 is selected, only `weights` count, because
    this happens only when all other clients are selected too.
    """
    p = validated_amounts("probabilities", probabilities)
    objective_weights = validated_amounts("weights", weights, len(p))
    selected_clients = available_indices(selected, len(p))
    if not len(selected_clients):
        return np.zeros(0)
    unnormalised = (
        objective_weights[selected_clients]
        if (p[selected_clients] == 0).any()
        else objective_weights[selected_clients] / (len(selected_clients) * p[selected_clients])
    )  # (b)
    if not is_normalised:
        return unnormalised
    return (
        unnormalised / unnormalised.sum()
        if unnormalised.any()
        else np.full(len(selected_clients), 1 / len(selected_clients))
    )
