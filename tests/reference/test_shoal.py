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
    """What the probe says in the first round, with a model that has learned nothing; no gates are trained."""
    fleet = shoal.partition(fashion(), "dirichlet:0.1" + shift, clients=50, seed=seed)
    keys = {"rounds": 1, "cohort": 10, "epochs": 1, "lr": 0.05, "seed": seed, "model": "mlp", "fleet": "vector"}
    result = shoal.run("shoal", fleet, **keys, set={"probe": {"at": 0}, "gate": {"epochs": 0}})
    return result.rounds[-1].metrics, result.clusters, fleet.planted_groups


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_without_shift_there_is_no_split(seed):
    figures, groups, _ = probed("", seed)
    assert figures["probe.groups"] == 1 and not groups
    assert abs(figures["probe.effect"]) < 0.01


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("shift", ["+rotate:0,90", "+invert:0.5", "+permute:0.5"])
def test_every_shift_is_found_and_so_are_the_planted_halves(shift, seed):
    figures, groups, truth = probed(shift, seed)
    assert figures["probe.effect"] > 0.3 and figures["probe.groups"] == 2
    assert len({(groups[c][0], truth[c]) for c in truth}) == 2


def test_four_ways_to_hold_a_camera_are_four_groups():
    """As a number: who is in which is not always found (docs/results.md)."""
    assert probed("+rotate:0,90,180,270", 1)[0]["probe.groups"] == 4


def test_a_prior_is_worth_more_than_anything_else_under_skew():
    """The same models, round by round: only what is served differs."""
    (plain, _), (ours, _) = (
        run("shoal", "dirichlet:0.1", 10, experts=False, prior_correction=p) for p in (False, True)
    )
    assert ours.accuracy["central"] == plain.accuracy["central"]
    assert ours.accuracy["mean"] > plain.accuracy["mean"] + 0.1


def test_balanced_cohorts_are_flatter_than_chance():
    result, fleet = run("shoal", "dirichlet:0.1", 10, experts=False)
    counts = np.stack([np.bincount(fleet[c]["train"].y.numpy(), minlength=10) for c in fleet])
    rng = np.random.default_rng(0)
    chance = np.mean([concentration(counts[rng.choice(50, 10, replace=False)].sum(0)) for _ in range(200)])
    ours = np.mean([r.metrics["select.concentration"] for r in result.rounds])
    assert ours - 0.1 < 0.25 * (chance - 0.1)
