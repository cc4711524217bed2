"""Recipes with named variants."""

from __future__ import annotations

import pytest

from shoal.errors import UserError
from shoal.experiment.job import Job
from shoal.experiment.recipe import load_recipe, merge_layers
from shoal.experiment.run import run_job
from shoal.store.reader import read_run, runs_by_job

RECIPE = """
epochs = 1
[grid]
seed = [0, 1]
[variants."FedAvg"]
[variants."Prox, slowly"]
method = "fedprox"
epochs = 3
lr = 0.01
set.train.mu = 0.5
"""


@pytest.fixture
def recipe(tmp_path):
    path = tmp_path / "r.toml"

    def write(text=RECIPE):
        path.write_text(text)
        return path

    return write


def test_every_variant_is_a_point_of_the_grid(recipe):
    jobs = load_recipe(recipe(), {}).jobs
    assert list(jobs) == ["0-FedAvg", "0-Prox, slowly", "1-FedAvg", "1-Prox, slowly"]
    slow = jobs["1-Prox, slowly"]
    assert (slow.variant, slow.method, slow.epochs, slow.lr) == ("Prox, slowly", "fedprox", 3, 0.01)
    assert slow.set == {"train": {"mu": 0.5}}
    assert (jobs["0-FedAvg"].method, jobs["0-FedAvg"].epochs) == ("fedavg", 1)


def test_a_flag_wins_and_the_title_says_so(recipe):
    found = load_recipe(recipe(), {"lr": 0.2})
    assert {job.lr for job in found.jobs.values()} == {0.2}
    assert found.title.endswith("(changed: lr)")


def test_a_grid_chooses_among_variants(recipe):
    path = recipe(RECIPE.replace("seed = [0, 1]", 'variant = ["FedAvg"]'))
    assert list(load_recipe(path, {}).jobs) == ["FedAvg"]
    with pytest.raises(UserError, match=r"grid.variant has 'FedAvgg', for which there is no .*did you mean FedAvg"):
        load_recipe(recipe(RECIPE.replace("seed = [0, 1]", 'variant = ["FedAvgg"]')), {})
    with pytest.raises(UserError, match=r"\[variants\] is 3; it must be tables"):
        load_recipe(recipe("variants = 3"), {})


def test_tables_call_runs_by_their_variants(tmp_path):
    for name in (None, "Mine", "Mine too"):
        job = Job(variant=name, clients=4, max_train_samples=200, rounds=1, cohort=2, epochs=1)
        run_job(job, tmp_path / str(name))
    runs = [read_run(tmp_path / str(name)) for name in (None, "Mine", "Mine too")]
    assert [label for label, _ in runs_by_job(runs)] == ["fedavg", "Mine", "Mine too"]
    assert "variant" not in runs[0].config  # a run without a variant does not have the key


def test_layers_win_option_by_option():
    job = merge_layers(
        {"lr": 0.5, "set": {"train": {"mu": 1, "clip": 2}}}, {"set": {"train": {"mu": 3}}}, {"epochs": 4}
    )
    assert (job.lr, job.epochs, job.set) == (0.5, 4, {"train": {"mu": 3, "clip": 2}})
