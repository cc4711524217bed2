"""Gaussian noise on a client's label distribution before it is sent, and the privacy guarantee that follows.

Pereira, Famá, Kalalas, Dini, Energy-efficient federated learning for AIoT using clustering methods, 2025,
App. C. The exact curve of the Gaussian mechanism is from Balle and Wang, ICML 2018, as implemented in dp-accounting.

| symbol | meaning | here |
|---|---|---|
| p_j | label distribution of client j | `p` |
| γ | scale of the noise | `noise_scale` |
| M | number of classes | `num_classes` |
| σ = γ/(ML) Σ_j ‖p_j‖₁ = γ/M, because every ‖p_j‖₁ is 1 | standard deviation of the noise | `label_noise_std` |
| p̃ = p + N(0, σ²) (Eq. 4) | what is sent | `noisy_distribution` |

Deviations from the paper
-------------------------
- Eq. 4 gives entries below 0 and sums other than 1. Here the client sets negative entries to 0 and scales the rest to a
  sum of 1. Processing a noisy release cannot weaken its guarantee.
- The paper names no δ, no neighbouring data sets and no ε. Here two values of ε are computed: for one record of a
  client replaced by another (the number of records is taken to be public), and for one distribution replaced by any
  other, which is local privacy.
- Several releases are possible. Each has new noise with the same standard deviation, so all releases together are one
  release of all their numbers. A record changes them √(number of releases) times as much in L2 as it changes one
  release, and the same curve gives the joint guarantee. It covers the numbers, not the rounds of the releases.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from shoal.errors import UserError

DELTA = 1e-5


def label_noise_std(noise_scale: float, num_classes: int) -> float:
    """Returns the standard deviation of the noise on each entry of a label distribution."""
    if not (math.isfinite(noise_scale) and noise_scale >= 0):
        raise UserError(f"noise_scale is {noise_scale}; it must be a finite number, 0 (no noise) or more")
    if num_classes < 1:
        raise UserError(f"num_classes is {num_classes}; it must be 1 or more")
    return noise_scale / num_classes


def noisy_distribution(p: Tensor, sigma: float, seed: int) -> Tensor:
    """Returns the label distribution `p`, or one in each row of `p`, with Gaussian noise of standard deviation `sigma`.

    The seed makes a simulation repeatable. With the seed the noise could be removed again, so a real client that must
    be protected from its server has to draw a secret seed.
    """
    noise = torch.randn(p.shape, generator=torch.Generator().manual_seed(seed), dtype=p.dtype)
    return as_distribution(p + sigma * noise.to(p.device))  # Eq. 4


def as_distribution(p: Tensor) -> Tensor:
    """Returns `p` cut at 0 and scaled to a sum of 1 along the last axis; uniform where no entry is above 0."""
    positive = p.clamp(min=0)
    total = positive.sum(dim=-1, keepdim=True)
    return torch.where(total > 0, positive / total, 1 / p.shape[-1])


def record_sensitivity(num_records: int) -> float:
    """Returns the largest L2 change of a label distribution when one of its records is replaced."""
    if num_records < 1:
        raise UserError(f"a client has {num_records} records; it must have 1 or more for a label distribution")
    return local_sensitivity() / num_records


def local_sensitivity() -> float:
    """Returns the largest L2 distance of two distributions, which is reached if each consists of one class."""
    return math.sqrt(2)


def epsilon(sigma: float, sensitivity: float, delta: float = DELTA) -> float:
    """Returns the smallest ε for which one release is (ε, δ)-private; infinite without noise."""
    if not 0 < delta < 1:
        raise UserError(f"delta is {delta}; it must lie between 0 and 1")
    if sigma < 0 or sensitivity < 0:
        raise UserError(f"sigma is {sigma} and sensitivity {sensitivity}; neither may be below 0")
    if sensitivity == 0:
        return 0.0
    if sigma == 0:
        return math.inf
    from dp_accounting.pld import common, privacy_loss_mechanism  # slow to import

    mu = sensitivity / sigma
    mechanism = privacy_loss_mechanism.GaussianPrivacyLoss(sigma, sensitivity=sensitivity)
    upper_bound = mu**2 / 2 + mu * math.sqrt(2 * math.log(1 / delta))  # from concentrated differential privacy
    search = common.BinarySearchParameters(0, upper_bound, tolerance=upper_bound * 1e-9)
    return float(common.inverse_monotone_function(mechanism.get_delta_for_epsilon, delta, search))


def label_privacy_guarantee(
    noise_scale: float, num_classes: int, client_sizes: Sequence[int], delta: float = DELTA, num_releases: int = 1
) -> dict[str, float]:
    """Returns the guarantees of noisy label distributions: for a record of the smallest client and for a client."""
    if not client_sizes:
        raise UserError("client_sizes is empty; it must have the number of records of 1 client or more")
    sigma = label_noise_std(noise_scale, num_classes)
    return gaussian_privacy_guarantee(
        sigma, min(client_sizes), record_sensitivity(min(client_sizes)), local_sensitivity(), delta, num_releases
    )


def gaussian_privacy_guarantee(
    sigma: float,
    min_client_size: int,
    record_l2_sensitivity: float,
    local_l2_sensitivity: float,
    delta: float = DELTA,
    num_releases: int = 1,
) -> dict[str, float]:
    """Returns the guarantees of several releases with Gaussian noise of standard deviation `sigma`.

    `record_l2_sensitivity` is the largest change when one sample of the smallest client is replaced, and
    `local_l2_sensitivity` the largest change when all its samples are replaced.
    """
    if num_releases < 1:
        raise UserError(f"num_releases is {num_releases}; it must be 1 or more for a guarantee")
    sqrt_releases = math.sqrt(num_releases)
    guarantees = {
        "sigma": sigma,
        "delta": delta,
        "smallest_client": min_client_size,
        "releases": num_releases,
        "record_epsilon": epsilon(sigma, sqrt_releases * record_l2_sensitivity, delta),
        "local_epsilon": epsilon(sigma, sqrt_releases * local_l2_sensitivity, delta),
    }
    if num_releases == 1:
        return guarantees
    one = {"record": epsilon(sigma, record_l2_sensitivity, delta), "local": epsilon(sigma, local_l2_sensitivity, delta)}
    return guarantees | {f"{scope}_epsilon_of_one_release": x for scope, x in one.items()}
