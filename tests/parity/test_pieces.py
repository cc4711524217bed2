"""The same pieces give the same bytes: with any number of workers, on any number of cores, after any stop."""

from __future__ import annotations

import json

import pytest
from federations import tiny_federation
from quick import quick_options
from recorded import digits_job, file_contents

from shoal import engine
from shoal.codec import pack
from shoal.cost.ledger import Ledger
from shoal.errors import UserError
from shoal.experiment import evaluate
from shoal.experiment.assemble import assemble, fleet_session, make_fleet
from shoal.experiment.job import Job, make_job
from shoal.experiment.run import check_same_job, job_from_config, resume_run, run_job

METHODS = ("fedavg", "scmoe", "ditto", "shoal")
CONFIG = "config.json"


def everything(method, federation, **keys):
    """Weights, private state, metrics and ledger of a run, as bytes and lines."""
    settings = {"rounds": 3, "cohort": 6, "epochs": 2, "batch_size": 8, "lr": 0.05, "momentum": 0.5, "seed": 4}
    experiment = assemble(
        Job(method=method, model="mlp", set=quick_options(method), **settings | keys), method, federation
    )
    private, ledger = {}, Ledger(experiment.costs)
    fleet = make_fleet(experiment, private)
    with fleet_session(experiment, fleet):
        result = engine.run(
            experiment.method, fleet, rounds=3, seed=4, central_samples=federation.central, eval_every=1, ledger=ledger
        )
    return {
        "weights": pack({"models": result.state.models, "memory": result.state.memory}),
        "private": pack(private),
        "metrics": [record.to_json() for record in result.rounds],
        "clients": [record.evaluation.clients for record in result.rounds],
        "ledger": [entry.to_json() for entry in ledger.entries],
    }


@pytest.mark.parametrize("method", METHODS)
def test_any_number_of_workers_gives_the_same_bytes(method):
    federation = tiny_federation(9)
    expected = everything(method, federation, fleet="pool", workers=1, pieces=3)
    assert len(expected["metrics"]) == 3
    for workers in (2, 3, 5):
        assert everything(method, federation, fleet="pool", workers=workers, pieces=3) == expected
    assert everything(method, federation, fleet="vector", pieces=3) == expected


def set_cores(monkeypatch, number):
    for module in ("shoal.experiment.assemble", "shoal.fleet.pool"):
        monkeypatch.setattr(f"{module}.count_cores", lambda: number)


class Stop(Exception):
    pass


def stop_after_two(record):
    if record.round == 2:
        raise Stop


def run_until_stopped(job, folder):
    with pytest.raises(Stop):
        run_job(job, folder, on_round=stop_after_two)


def config(folder):
    return json.loads((folder / CONFIG).read_text())


def without_config(folder):
    return {name: content for name, content in file_contents(folder).items() if name != CONFIG}


@pytest.mark.parametrize("method", METHODS)
def test_a_run_begun_on_two_cores_goes_on_with_three_workers_on_five(method, tmp_path, monkeypatch):
    job = digits_job(method, cohort=6)
    set_cores(monkeypatch, 2)
    run_job(job, tmp_path / "straight")
    run_until_stopped(job, tmp_path / "stopped")
    assert {k: config(tmp_path / "stopped")[k] for k in ("fleet", "pieces", "workers")} == {
        "fleet": "pool",
        "pieces": 2,
        "workers": None,
    }
    set_cores(monkeypatch, 5)
    resume_run(tmp_path / "stopped", workers=3)
    assert file_contents(tmp_path / "stopped") == file_contents(tmp_path / "straight")


def test_the_workers_of_config_json_can_be_replaced_on_resume(tmp_path):
    job = digits_job("ditto", fleet="pool", cohort=6, pieces=4)
    run_job(job.model_copy(update={"workers": 2}), tmp_path / "straight")
    run_until_stopped(job.model_copy(update={"workers": 2}), tmp_path / "stopped")
    resume_run(tmp_path / "stopped", workers=3)
    assert config(tmp_path / "stopped")["workers"] == 2
    assert file_contents(tmp_path / "stopped") == file_contents(tmp_path / "straight")
    evaluations = [evaluate.evaluate_clients(tmp_path / name)["clients"] for name in ("straight", "stopped")]
    assert evaluations[0] == evaluations[1]


def test_fresh_runs_with_given_pieces_agree_on_one_core_and_on_three(tmp_path, monkeypatch):
    for number in (1, 3):
        set_cores(monkeypatch, number)
        run_job(digits_job("shoal", cohort=6, pieces=2), tmp_path / str(number))
    assert [config(tmp_path / name)["fleet"] for name in "13"] == ["vector", "pool"]
    assert without_config(tmp_path / "1") == without_config(tmp_path / "3")


def test_workers_do_not_decide_the_fleet(monkeypatch):
    set_cores(monkeypatch, 4)
    for workers in (None, 1, 9):
        job = assemble(Job(workers=workers, clients=9, cohort=3), "fedavg", tiny_federation(9)).job
        assert (job.fleet, job.pieces, job.workers) == ("pool", 4, workers)


def test_fleets_that_do_not_cut_by_themselves_record_no_pieces():
    for fleet in ("plain", "vector"):
        assert assemble(Job(fleet=fleet, clients=9, cohort=3), "fedavg", tiny_federation(9)).job.pieces is None


def test_a_recipe_goes_on_with_the_pieces_of_the_run(tmp_path):
    run_job(digits_job("local", fleet="pool", workers=2, pieces=3), tmp_path / "run")
    check_same_job(tmp_path / "run", digits_job("local"))
    check_same_job(tmp_path / "run", digits_job("local", pieces=3, workers=5))
    with pytest.raises(UserError, match=r"was run with pieces 3, not 2\. Choose another --out"):
        check_same_job(tmp_path / "run", digits_job("local", pieces=2))


def test_pieces_are_those_of_the_config():
    assert job_from_config({"fleet": "pool", "workers": 3, "pieces": 2}).pieces == 2
    assert job_from_config({"fleet": "vector", "workers": 3}).pieces is None


@pytest.mark.parametrize("pieces", [0, -2, 1.5, "many"])
def test_pieces_are_a_positive_whole_number(pieces):
    with pytest.raises(UserError, match=f"^pieces is {pieces!r}: it must be "):
        make_job({"pieces": pieces})
