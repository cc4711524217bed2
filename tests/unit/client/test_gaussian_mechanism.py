"""Noise on label distributions, and the guarantees of the Gaussian mechanism."""

from __future__ import annotations

import math

import pytest
import torch
from dp_accounting.pld import privacy_loss_distribution
from federations import tiny_federation
from scipy.stats import norm
from torch.func import vmap

from shoal.client.gaussian_mechanism import (
    as_distribution,
    epsilon,
    label_noise_std,
    label_privacy_guarantee,
    local_sensitivity,
    noisy_distribution,
    record_sensitivity,
)
from shoal.client.histogram import LabelHistogram
from shoal.errors import UserError
from shoal.experiment.assemble import assemble
from shoal.experiment.job import Job
from shoal.experiment.result import privacy_guarantees
from shoal.fleet.plain import PlainFleet
from shoal.types import Plan, Samples, Task


def test_label_noise_is_the_noise_scale_over_the_number_of_classes():
    assert label_noise_std(1.0, 10) == pytest.approx(0.1)
    assert label_noise_std(0.0, 10) == 0
    for noise_scale, num_classes in ((-1.0, 10), (math.nan, 10), (1.0, 0)):
        with pytest.raises(UserError, match="noise_scale is" if num_classes else "num_classes is"):
            label_noise_std(noise_scale, num_classes)


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
        (math.sqrt(2) / 490 / 0.1, 0.088),  # a record of 490, noise scale 1, 10 classes
        (math.sqrt(2) / 24 / 0.1, 2.396),
        (math.sqrt(2) / 0.1, 159.4),  # any distribution replaced by any other
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
    guarantees = label_privacy_guarantee(1.0, 10, [490, 24, 1426])
    assert guarantees["sigma"] == pytest.approx(0.1)
    assert guarantees["delta"] == 1e-5
    assert guarantees["smallest_client"] == 24
    assert guarantees["record_epsilon"] == pytest.approx(2.396, abs=1e-3)
    assert guarantees["local_epsilon"] == pytest.approx(159.44, abs=0.01)
    assert label_privacy_guarantee(0.0, 10, [490])["record_epsilon"] == math.inf
    with pytest.raises(UserError, match="client_sizes is empty"):
        label_privacy_guarantee(1.0, 10, [])


def test_several_releases_are_one_release_with_a_larger_sensitivity():
    # four releases of deviation 0.1, each moved by sqrt(2) / 24: in L2 all of them move by 2 sqrt(2) / 24
    four, one = label_privacy_guarantee(1.0, 10, [24], num_releases=4), label_privacy_guarantee(1.0, 10, [24])
    assert four["releases"] == 4
    assert four["record_epsilon"] == pytest.approx(epsilon(0.1, 2 * math.sqrt(2) / 24))
    assert four["local_epsilon"] == pytest.approx(epsilon(0.1, 2 * math.sqrt(2)))
    assert four["record_epsilon_of_one_release"] == one["record_epsilon"]
    assert four["local_epsilon_of_one_release"] == one["local_epsilon"]
    assert one["releases"] == 1
    assert "record_epsilon_of_one_release" not in one
    five = label_privacy_guarantee(1.0, 10, [490], num_releases=5)
    assert five["record_epsilon"] == pytest.approx(0.21, abs=0.005), "docs/privacy.md"
    with pytest.raises(UserError, match="num_releases is 0"):
        label_privacy_guarantee(1.0, 10, [24], num_releases=0)


@pytest.mark.parametrize(("mu", "releases"), [(0.3, 5), (1.0, 3)])
def test_releases_compose_as_in_dp_accounting(mu, releases):
    mechanism = privacy_loss_distribution.from_gaussian_mechanism(
        1.0, sensitivity=mu, value_discretization_interval=1e-4
    )
    composed = mechanism.self_compose(releases).get_epsilon_for_delta(1e-5)
    assert epsilon(1.0, mu * math.sqrt(releases)) == pytest.approx(composed, rel=1e-3)


def test_each_task_may_lead_to_a_release_unless_the_first_release_is_kept():
    once, repeated = LabelHistogram(10, noise_scale=1.0), LabelHistogram(10, noise_scale=1.0, rerelease_threshold=0.25)
    assert once.privacy_guarantee([24], num_tasks=5) == label_privacy_guarantee(1.0, 10, [24])
    assert repeated.privacy_guarantee([24], num_tasks=5) == label_privacy_guarantee(1.0, 10, [24], num_releases=5)
    assert repeated.privacy_guarantee([24], num_tasks=0) == repeated.privacy_guarantee([24])
    assert LabelHistogram(10, rerelease_threshold=0.25).privacy_guarantee([24], num_tasks=5) == {}


@pytest.mark.parametrize(
    ("method", "options", "rounds", "releases"),
    [
        ("shoal", {}, 20, 1),
        ("shoal", {}, 21, 2),  # labels are reported in round 1 and every 20 rounds after it
        ("shoal", {}, 100, 5),
        ("shoal", {"every_rounds": 0}, 100, 1),
        ("shoal", {"rerelease_threshold": 1.0}, 100, 1),
        ("simclust", {"every_rounds": 10, "rerelease_threshold": 0.5}, 100, 10),
        ("simclust", {}, 100, 1),
    ],
)
def test_a_run_states_as_many_releases_as_its_schedule_allows(method, options, rounds, releases):
    represent = {"noise_scale": 1.0, **options}
    job = Job(method=method, model="mlp", rounds=rounds, cohort=2, set={"represent": represent})
    guarantees = privacy_guarantees(assemble(job, method, tiny_federation(5, (6,))))
    assert guarantees["releases"] == releases
    assert guarantees["record_epsilon"] == pytest.approx(
        label_privacy_guarantee(1.0, 4, [9], num_releases=releases)["record_epsilon"]
    )


def test_a_release_is_kept_until_enough_labels_have_changed():
    """A counted release has new noise, in the round in which enough labels have changed."""
    program = LabelHistogram(2, noise_scale=0.5, rerelease_threshold=0.25)
    fleet = PlainFleet({"a": {"train": samples_of([0] * 8)}})

    def reported(labels, seed):
        fleet.data = {"a": {"train": samples_of(labels)}}
        return fleet.execute(Plan(program, {"a": Task(seed=seed)}))["a"].tensors["labels"]["p"]

    first = reported([0] * 8, 1)
    assert torch.equal(reported([0] * 6 + [1] * 2, 2), first)  # 2 of 8 have changed: no more than a quarter
    assert not torch.equal(reported([0] * 5 + [1] * 3, 3), first)


def samples_of(labels):
    return Samples(torch.zeros(len(labels), 1), torch.tensor(labels))
