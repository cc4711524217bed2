"""Every method gives the same weights, private state, metrics and bytes on every fleet."""

from __future__ import annotations

import json

import pytest
from federations import tiny_federation
from quick import quick_options
from recorded import digits_job, file_contents

from shoal import engine, model_cache, tree
from shoal.experiment.assemble import assemble, make_fleet
from shoal.experiment.job import Job
from shoal.experiment.run import resume_run, run_job
from shoal.methods import METHODS
from shoal.store.run_directory import RunStore

MODELS = {"mlp-dropout": (6,), "networks:SmallConvolution": (1, 6, 6), "networks:SmallBatchNorm": (1, 6, 6)}
# Stacked clients meet every kind of layer; pool and flower carry whole programs, whatever is in them.
PAIRS = [("vector", model) for model in MODELS] + [("pool", "mlp-dropout"), ("flower", "networks:SmallBatchNorm")]
WITHIN = 1e-5


def job_for(method, model, **kw):
    settings = {"rounds": 3, "cohort": 3, "epochs": 2, "batch_size": 8, "lr": 0.05, "momentum": 0.5, "seed": 4}
    return Job(method=method, model=model, set=quick_options(method), **settings | kw)


def run_method(method, model, fleet, federation):
    pieces = 2 if fleet == "pool" else None  # a vector fleet stacks all clients, as it does by itself
    experiment = assemble(job_for(method, model, fleet=fleet, workers=2, pieces=pieces), method, federation)
    private = {}
    running = make_fleet(experiment, private)
    result = engine.run(experiment.method, running, rounds=3, seed=4, central_samples=federation.central, eval_every=2)
    return result, private


def numbers(value):
    """All numbers of a nested structure, in one order."""
    if isinstance(value, dict):
        return [x for k in sorted(value) for x in numbers(value[k])]
    if isinstance(value, list | tuple):
        return [x for v in value for x in numbers(v)]
    return [value] if isinstance(value, int | float) else []


def remembered(state):
    """Returns the memory without digests of models, which differ in the last bits. The ledger has what follows from
    them.
    """
    return {k: v for k, v in state.memory.items() if k != model_cache.MEMORY_SLOT}


@pytest.fixture(scope="module")
def reference():
    """Returns plain runs, one per method and model."""
    runs = {}

    def get(method, model):
        if (method, model) not in runs:
            federation = tiny_federation(5, MODELS[model])
            runs[method, model] = (federation, *run_method(method, model, "plain", federation))
        return runs[method, model]

    return get


@pytest.mark.parametrize(("fleet", "model"), PAIRS)
@pytest.mark.parametrize("method", METHODS)
def test_fleets_agree(method, fleet, model, reference):
    federation, expected, private = reference(method, model)
    actual, actual_private = run_method(method, model, fleet, federation)
    assert tree.max_abs_difference(expected.state.models, actual.state.models) < WITHIN
    assert tree.max_abs_difference(remembered(expected.state), remembered(actual.state)) < WITHIN
    assert tree.max_abs_difference(expected.state.membership, actual.state.membership) < WITHIN
    assert tree.max_abs_difference(private, actual_private) < WITHIN
    assert expected.ledger == actual.ledger
    for a, b in zip(expected.rounds, actual.rounds, strict=True):
        assert numbers(b.to_json()) == pytest.approx(numbers(a.to_json()), abs=WITHIN)
        if a.evaluation:
            assert a.evaluation.clients.keys() == b.evaluation.clients.keys()


ALL = [("fedavg-ft", "plain"), ("fedavg-ft", "vector"), ("fedavg-ft", "flower")]  # one that keeps private state


@pytest.mark.parametrize(("method", "fleet"), [*((m, "pool") for m in METHODS), *ALL])
def test_the_same_seed_gives_the_same_bytes_and_a_stop_changes_nothing(method, fleet, tmp_path):
    job = digits_job(method, fleet=fleet)
    run_job(job, tmp_path / "one")
    straight = file_contents(tmp_path / "one")
    assert any("checkpoints" in name for name in straight)

    class Stop(Exception):
        pass

    def stop_after_two(record):
        if record.round == 2:
            raise Stop

    with pytest.raises(Stop):
        run_job(job, tmp_path / "two", on_round=stop_after_two)
    assert not (tmp_path / "two/result.json").exists()
    resume_run(tmp_path / "two")
    assert file_contents(tmp_path / "two") == straight
    one, two = (json.loads((tmp_path / x / "result.json").read_text()) for x in ("one", "two"))
    assert one["num_rejected_reports"] == 0
    differ = {k for k in one if one[k] != two[k]}
    assert differ <= {
        "wall_s",
        "predict_ms",
        "run_dir",
        "joules",
        "server_joules",
    }  # the server's seconds are measured


def test_another_seed_gives_other_bytes(tmp_path):
    run_job(digits_job("fedavg"), tmp_path / "one")
    run_job(digits_job("fedavg", seed=1), tmp_path / "two")
    name = "checkpoints/round-000003/state.safetensors"
    assert file_contents(tmp_path / "one")[name] != file_contents(tmp_path / "two")[name]


def test_a_finished_run_resumes_to_itself(tmp_path):
    run_job(digits_job("fedavg-ft"), tmp_path / "one")
    before = file_contents(tmp_path / "one")
    resume_run(tmp_path / "one")
    assert file_contents(tmp_path / "one") == before


def test_runs_are_kept_by_one_process(tmp_path):
    run_job(digits_job("local"), tmp_path / "one")
    with RunStore.open(tmp_path / "one"), pytest.raises(Exception, match="another process"):
        resume_run(tmp_path / "one")
