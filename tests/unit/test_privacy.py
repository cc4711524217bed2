"""Noise on label distributions, and the guarantees of the Gaussian mechanism."""

from __future__ import annotations

import math

import pytest
import torch
from scipy.stats import norm
from torch.func import vmap

from shoal.client.gaussian_mechanism import (
    as_distribution,
    epsilon,
    guarantee,
    label_noise,
    local_sensitivity,
    noisy_distribution,
    record_sensitivity,
)
from shoal.errors import UserError


def test_noise_is_gamma_over_the_classes():
    assert label_noise(1.0, 10) == pytest.approx(0.1)
    assert label_noise(0.0, 10) == 0
    for gamma, classes in ((-1.0, 10), (math.nan, 10), (1.0, 0)):
        with pytest.raises(UserError, match="gamma is" if classes else "classes is"):
            label_noise(gamma, classes)


def test_cut_and_scaled_by_hand():
    # (0.5, -0.2, 0.3) -> (0.5, 0, 0.3) / 0.8; where nothing is left, uniform
    p = torch.tensor([[0.5, -0.2, 0.3], [-1.0, -2.0, 0.0]])
    expected = torch.tensor([[0.625, 0.0, 0.375], [1 / 3, 1 / 3, 1 / 3]])
    assert torch.allclose(as_distribution(p), expected)
    assert torch.equal(vmap(as_distribution)(p), as_distribution(p))
    assert p[0, 1] == pytest.approx(-0.2)  # the input stays


def test_noise_has_the_deviation_it_should_have():
    # far from 0 nothing is cut, and the sum of 10,000 entries hardly moves: what is added has deviation sigma
    p = torch.full((10_000,), 1.0, dtype=torch.float64)
    out = noisy_distribution(p, 0.1, seed=5) * 10_000
    assert float(out.sum()) == pytest.approx(10_000)
    assert float((out - p).std()) == pytest.approx(0.1, rel=0.03)  # s.e. 0.1 / sqrt(20,000) = 0.7 %


def test_noise_follows_the_seed_and_leaves_a_distribution():
    p = torch.tensor([[0.5, 0.5, 0.0, 0.0], [0.0, 0.0, 0.0, 1.0]])
    once, again = noisy_distribution(p, 0.25, seed=1), noisy_distribution(p, 0.25, seed=1)
    assert torch.equal(once, again)
    assert not torch.equal(once, noisy_distribution(p, 0.25, seed=2))
    assert once.dtype == p.dtype
    assert float(once.min()) >= 0
    assert torch.allclose(once.sum(1), torch.ones(2))
    assert torch.equal(noisy_distribution(p, 0.0, seed=1), p)


def test_sensitivities_by_hand():
    # one of 490 records changes class: one entry falls and one rises by 1/490, sqrt(2) / 490 in all
    a, b = torch.tensor([300.0, 190.0]) / 490, torch.tensor([299.0, 191.0]) / 490
    assert float((a - b).norm()) == pytest.approx(record_sensitivity(490), rel=1e-4)
    assert local_sensitivity() == pytest.approx(math.sqrt(2))
    with pytest.raises(UserError, match="0 records"):
        record_sensitivity(0)


@pytest.mark.parametrize(
    ("mu", "expected"),
    [
        (1.0, 4.377),
        (math.sqrt(2) / 490 / 0.1, 0.088),  # a record of 490, gamma 1, 10 classes
        (math.sqrt(2) / 24 / 0.1, 2.396),
        (math.sqrt(2) / 0.1, 159.4),  # any distribution for any other
        (math.sqrt(2) / 0.01, 10602.2),
    ],
)
def test_epsilon(mu, expected):
    assert epsilon(1.0, mu) == pytest.approx(expected, rel=5e-3 if expected < 0.1 else 3e-4)
    assert epsilon(0.5, mu / 2) == pytest.approx(epsilon(1.0, mu))  # only the ratio counts


@pytest.mark.parametrize(("mu", "delta"), [(0.3, 1e-5), (1.0, 1e-5), (3.0, 1e-8), (14.142, 1e-5), (1.0, 0.1)])
def test_epsilon_lies_on_the_curve_of_balle_and_wang(mu, delta):
    # delta(eps) = Phi(mu/2 - eps/mu) - e^eps Phi(-mu/2 - eps/mu)
    eps = epsilon(1.0, mu, delta)
    on_curve = norm.cdf(mu / 2 - eps / mu) - math.exp(eps + norm.logcdf(-mu / 2 - eps / mu))
    assert on_curve == pytest.approx(delta, rel=1e-5)


def test_epsilon_at_the_ends():
    assert epsilon(0.0, 1.0) == math.inf
    assert epsilon(1.0, 0.0) == 0
    # Phi(mu/2) - Phi(-mu/2) is about mu / sqrt(2 pi) = 4e-7 at mu = 1e-6, below delta: no epsilon is needed
    assert epsilon(1.0, 1e-6) == pytest.approx(0, abs=1e-9)
    for delta in (0.0, 1.0, -1.0):
        with pytest.raises(UserError, match="delta is"):
            epsilon(1.0, 1.0, delta)
    with pytest.raises(UserError, match="sigma is -1"):
        epsilon(-1.0, 1.0)


def test_guarantee_is_that_of_the_smallest_client():
    found = guarantee(1.0, 10, [490, 24, 1426])
    assert found["sigma"] == pytest.approx(0.1)
    assert found["delta"] == 1e-5
    assert found["smallest_client"] == 24
    assert found["record_epsilon"] == pytest.approx(2.396, abs=1e-3)
    assert found["local_epsilon"] == pytest.approx(159.44, abs=0.01)
    assert guarantee(0.0, 10, [490])["record_epsilon"] == math.inf
    with pytest.raises(UserError, match="sizes is empty"):
        guarantee(1.0, 10, [])
