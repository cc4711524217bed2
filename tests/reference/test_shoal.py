"""What shoal's own method does on real images."""

from functools import cache

import numpy as np
import pytest

import shoal
from shoal.selectors.balanced import concentration

pytestmark = pytest.mark.data


@cache
def fashion():
    return shoal.load("fashion-mnist", max_train_samples=20_000)


def run(method, partition, rounds, seed=0, **components):
    fleet = shoal.partition(fashion(), partition, clients=50, seed=seed)
    keys = {"rounds": rounds, "cohort": 10, "epochs": 1, "lr": 0.05, "seed": seed, "model": "mlp", "fleet": "vector"}
    options = {"components": components} if components else {}
    return shoal.run(method, fleet, **keys, eval_every=rounds, set=options), fleet


@cache
def probed(shift, seed):
    """Returns the probe's metrics in the first round, with an untrained model and without gate training."""
    fleet = shoal.partition(fashion(), "dirichlet:0.1" + shift, clients=50, seed=seed)
    keys = {"rounds": 1, "cohort": 10, "epochs": 1, "lr": 0.05, "seed": seed, "model": "mlp", "fleet": "vector"}
    result = shoal.run("shoal", fleet, **keys, set={"probe": {"first_round": 0}, "gate": {"epochs": 0}})
    return result.rounds[-1].metrics, result.clusters, fleet.planted_groups


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_without_shift_there_is_no_split(seed):
    metrics, clusters, _ = probed("", seed)
    assert metrics["probe.num_clusters"] == 1 and not clusters
    assert abs(metrics["probe.effect"]) < 0.01


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("shift", ["+rotate:0,90", "+invert:0.5", "+permute:0.5"])
def test_every_shift_and_its_planted_groups_are_found(shift, seed):
    metrics, clusters, truth = probed(shift, seed)
    assert metrics["probe.effect"] > 0.3 and metrics["probe.num_clusters"] == 2
    assert len({(clusters[c][0], truth[c]) for c in truth}) == 2


def test_four_rotations_are_four_clusters():
    """Only the number is tested: the members are not always found (docs/results.md)."""
    assert probed("+rotate:0,90,180,270", 1)[0]["probe.num_clusters"] == 4


def test_prior_correction_raises_local_accuracy_under_skew():
    """The models are the same in every round, and only predictions differ."""
    (plain, _), (ours, _) = (
        run("shoal", "dirichlet:0.1", 10, experts=False, prior_correction=p) for p in (False, True)
    )
    assert ours.accuracy["central"] == plain.accuracy["central"]
    assert ours.accuracy["local"] > plain.accuracy["local"] + 0.1


def test_balanced_cohorts_are_more_balanced_than_random_ones():
    result, fleet = run("shoal", "dirichlet:0.1", 10, experts=False)
    counts = np.stack([np.bincount(fleet[c]["train"].y.numpy(), minlength=10) for c in fleet])
    rng = np.random.default_rng(0)
    random_mean = np.mean([concentration(counts[rng.choice(50, 10, replace=False)].sum(0)) for _ in range(200)])
    ours = np.mean([r.metrics["select.concentration"] for r in result.rounds])
    assert ours - 0.1 < 0.25 * (random_mean - 0.1)
