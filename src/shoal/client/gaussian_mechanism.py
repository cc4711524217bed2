"""Noise on a client's label distribution before it is sent, and what it protects.

Pereira, Famá, Kalalas, Dini, Energy-efficient federated learning for AIoT using clustering methods, 2025,
App. C. The exact curve of the Gaussian mechanism is that of Balle and Wang, ICML 2018, as dp-accounting has it.

| symbol | meaning | here |
|---|---|---|
| p_j | label distribution of client j | `p` |
| γ | amount of noise | `gamma` |
| M | classes | `classes` |
| σ = γ/(ML) Σ_j ‖p_j‖₁ = γ/M, for every ‖p_j‖₁ is 1 | standard deviation of the noise | `label_noise` |
| p̃ = p + N(0, σ²) (Eq. 4) | what is sent | `noisy_distribution` |

Deviation: Eq. 4 leaves entries below 0, and a sum other than 1; here they are cut at 0 and the rest is scaled to
1, on the client. What is done to a noisy release cannot weaken its guarantee.

Deviation: the paper names no δ, no neighbours and no ε. Two are computed here: one record of the client replaced by
another (the client's size is taken to be public), and one distribution replaced by any other, which is local privacy.
The first is cheap, the second is not: γ = 1 gives 490 records ε = 0.09 each, and the distribution itself, which App. C
means to hide, ε = 159.

Several releases, each with new noise of the same deviation, are one release of all their numbers: in L2 a record moves
them √(releases) times as far as one of them, so the same curve gives what they protect together. This covers the
numbers, not the rounds in which a client decides to release again.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from shoal.errors import UserError

DELTA = 1e-5


def label_noise_std(noise_scale: float, num_classes: int) -> float:
    if not (math.isfinite(noise_scale) and noise_scale >= 0):
        raise UserError(f"gamma is {noise_scale}; it must be a number, 0 (no noise) or more")
    if num_classes < 1:
        raise UserError(f"classes is {num_classes}; it must be 1 or more")
    return noise_scale / num_classes


def noisy_distribution(p: Tensor, sigma: float, seed: int) -> Tensor:
    """`p` is one distribution, or one in each row.

    The seed makes a simulation repeatable. Who knows it can take the noise off again: a real client that is to be
    protected from its server draws a seed of its own.
    """
    noise = torch.randn(p.shape, generator=torch.Generator().manual_seed(seed), dtype=p.dtype)
    return as_distribution(p + sigma * noise.to(p.device))  # Eq. 4


def as_distribution(p: Tensor) -> Tensor:
    """Cut at 0 and scaled to a sum of 1 along the last axis; uniform where nothing is left."""
    positive = p.clamp(min=0)
    total = positive.sum(dim=-1, keepdim=True)
    return torch.where(total > 0, positive / total, 1 / p.shape[-1])


def record_sensitivity(num_records: int) -> float:
    """How far (L2) the distribution of `n` records moves at most when one of them is replaced."""
    if num_records < 1:
        raise UserError(f"a client has {num_records} records; a label distribution needs 1 or more")
    return local_sensitivity() / num_records


def local_sensitivity() -> float:
    """How far (L2) two distributions are apart at most: each sure of another class."""
    return math.sqrt(2)


def epsilon(sigma: float, sensitivity: float, delta: float = DELTA) -> float:
    """The least ε with which one release is (ε, δ)-private; infinite without noise."""
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
    enough = mu**2 / 2 + mu * math.sqrt(2 * math.log(1 / delta))  # of concentrated privacy: never too small
    search = common.BinarySearchParameters(0, enough, tolerance=enough * 1e-9)
    return float(common.inverse_monotone_function(mechanism.get_delta_for_epsilon, delta, search))


def label_privacy_guarantee(
    noise_scale: float, num_classes: int, client_sizes: Sequence[int], delta: float = DELTA, num_releases: int = 1
) -> dict[str, float]:
    """What the noisy releases of every client give: for a record of the smallest client, and for a whole client."""
    if not client_sizes:
        raise UserError("sizes is empty; a guarantee needs the records of 1 client or more")
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
    """What Gaussian noise of deviation `sigma` gives to what moves so far (L2) when one of the rows of a client with
    the `smallest` number of them is replaced, and when all are; in so many releases together."""
    if num_releases < 1:
        raise UserError(f"releases is {num_releases}; a guarantee needs 1 release or more")
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
    return guarantees | {f"{of}_epsilon_of_one_release": x for of, x in one.items()}
