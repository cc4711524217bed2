"""Reports are checked between the fleet and the stages."""

import json
import logging
from dataclasses import dataclass, replace
from fractions import Fraction

import pytest
import torch
from federations import tiny_federation
from recorded import digits_job

from shoal import engine
from shoal.client.heads import SendHead
from shoal.client.secure_aggregation import KEYS, UNRESPONSIVE, RevealMasks, as_tensor
from shoal.client.train import LocalTraining
from shoal.engine import Result
from shoal.errors import UserError
from shoal.experiment.assemble import assemble, make_fleet
from shoal.experiment.job import Job
from shoal.experiment.run import run_job
from shoal.fleet.faulty import Fault, FaultyFleet
from shoal.fleet.plain import PlainFleet
from shoal.methods import Setting, build
from shoal.models import load_model
from shoal.report_validation import (
    MAX_SAMPLES,
    ReportSpec,
    expected_report,
    has_only_finite_values,
    rejection_reason,
    rejection_reasons,
)
from shoal.store.run_directory import round_record_from_json
from shoal.types import Plan, Report, Task

SPEC = ReportSpec({"model/w": ((2,), torch.float32)}, frozenset({"loss", "accuracy"}))
GOOD = Report({"model": {"w": torch.ones(2)}}, {"loss": (-1.0, 4.0), "accuracy": (3.0, 4)}, {"train": 4}, flops=7)


def setting(**kw):
    return Setting(**{"model": load_model("mlp", (6,), 4), "rounds": 3, "cohort_size": 6, "batch_size": 8} | kw)


def run_with(faults, name="fedavg", **kw) -> Result:
    federation = tiny_federation(6)
    return engine.run(build(name, setting(**kw)), FaultyFleet(PlainFleet(federation), faults), rounds=3, seed=0)


def test_a_nan_report_is_rejected_and_the_round_goes_on(caplog):
    result = run_with({"c3": "nan"})
    assert [r.rejected for r in result.rounds] == [{"c3": "tensor 'model/fc1.bias' has values that are not finite"}] * 3
    assert all(torch.isfinite(x).all() for x in result.state.models["global"].values())
    entry = result.ledger.entries[0]
    assert dict(zip(entry.clients, entry.bytes_up.tolist(), strict=True))["c3"] > 0, "the client did send it"
    warnings = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert len(warnings) == 3
    assert warnings[1] == (
        "Round 2: the report of client c3 in stage 'train' is rejected: "
        "tensor 'model/fc1.bias' has values that are not finite."
    )


def test_a_round_records_its_rejected_reports_and_is_read_back():
    first, second, _ = run_with([Fault("c1", "name", rounds={1})]).rounds
    line = json.loads(json.dumps(first.to_json()))
    assert line["rejected_reports"] == {"c1": "tensor 'model/fc1.bias' is missing"}
    assert round_record_from_json(line, first.evaluation).rejected == first.rejected
    assert "rejected_reports" not in second.to_json()
    assert round_record_from_json(second.to_json(), None).rejected == {}


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, None),
        ({"tensors": {"model": {"w": torch.full((2,), 3e38)}}}, None),
        ({"tensors": {}}, "tensor 'model/w' is missing"),
        ({"tensors": {"model": {"w": torch.ones(2), "v": torch.ones(2)}}}, "tensor 'model/v' is not expected"),
        ({"tensors": {"model": {"w": torch.ones(2, 1)}}}, "tensor 'model/w' has shape 2x1 instead of 2"),
        ({"tensors": {"model": {"w": torch.ones(2).double()}}}, "has type torch.float64 instead of torch.float32"),
        (
            {"tensors": {"model": {"w": torch.tensor([1, torch.inf])}}},
            "tensor 'model/w' has values that are not finite",
        ),
        ({"tensors": {"model": {"w": "text"}}}, "the report cannot be read (AttributeError)"),
        ({"tensors": None}, "the report cannot be read (AttributeError)"),
        ({"metrics": {"loss": (1.0, 1.0)}}, "metric 'accuracy' is missing"),
        ({"metrics": {**GOOD.metrics, "x": (1.0, 1.0)}}, "metric 'x' is not expected"),
        ({"metrics": {**GOOD.metrics, "loss": (float("nan"), 1)}}, "metric 'loss' has values that are not finite"),
        ({"metrics": {**GOOD.metrics, "loss": (1.0, -1)}}, "metric 'loss' has the count -1, which is below 0"),
        ({"metrics": {**GOOD.metrics, "loss": 1.0}}, "metric 'loss' is not a sum and a count"),
        ({"metrics": {**GOOD.metrics, "loss": (10**400, 1)}}, "the report cannot be read (OverflowError)"),
        ({"metrics": {**GOOD.metrics, "accuracy": (5, 4)}}, "the sum 5, which is not between 0 and its count 4"),
        ({"counts": {"a/b": MAX_SAMPLES, "": 0}}, None),
        ({"counts": {"train": MAX_SAMPLES + 1}}, "the number of samples of 'train' is 1000000001"),
        ({"counts": {"train": -1}}, "the number of samples of 'train' is -1"),
        ({"counts": {"train": Fraction(1, 2)}}, "the number of samples of 'train' is 1/2"),
        ({"flops": -1}, "the number of operations is -1"),
        ({"flops": None}, "the number of operations is None"),
    ],
)
def test_one_reason_for_each_report(changes, reason):
    found = rejection_reason(SPEC, replace(GOOD, **changes))
    assert found is None if reason is None else reason in found


def test_without_a_specification_values_are_checked():
    assert rejection_reason(None, Report({"any": {"x": torch.ones(1)}})) is None
    assert rejection_reason(None, Report({"any": {"x": torch.tensor(torch.nan)}})) is not None
    assert not has_only_finite_values(Report({"any": None}))


def test_values_whose_sum_overflows_are_finite():
    assert has_only_finite_values(Report({"m": {"w": torch.full((4,), 3e38)}}))


def test_tasks_of_the_same_shapes_share_one_evaluation_and_draw_nothing():
    calls = []

    @dataclass(frozen=True)
    class Counting(LocalTraining):
        def begin(self, task, private):
            calls.append(task)
            torch.rand(1)
            return super().begin(task, private)

    program = Counting(load_model("mlp", (6,), 4), keeps_model=False)
    models = [program.model.init(k) for k in range(2)]
    tasks = {f"c{i}": Task({"g": models[i % 2]}, {"lr": 0.1}, seed=i) for i in range(6)}
    reports = PlainFleet(tiny_federation(6)).execute(Plan(program, tasks))
    calls.clear()
    before = torch.random.get_rng_state()
    assert rejection_reasons(Plan(program, tasks), reports) == {}
    assert len(calls) == 1
    assert torch.equal(before, torch.random.get_rng_state())
    assert rejection_reasons(Plan(program, {}), {"c9": reports["c1"]}) == {"c9": "the client has no task"}


def test_a_program_that_needs_private_state_has_no_specification():
    @dataclass(frozen=True)
    class Needy:
        name: str = "needy"
        batchable: bool = True
        phases: tuple = ()

        def begin(self, task, private):
            return private["there"]

    assert expected_report(Needy(), Task()) is None


def test_heads_are_optional_and_have_the_shape_of_the_model():
    model = load_model("mlp", (6,), 4)
    spec = expected_report(SendHead(model), Task())
    _, head = model.split_base_and_head(model.init(3))
    assert rejection_reason(spec, Report({"head": head})) is None
    assert rejection_reason(spec, Report()) is None
    assert "has shape" in rejection_reason(spec, Report({"head": {k: x[None] for k, x in head.items()}}))


def test_masks_are_revealed_for_the_clients_of_the_task_only():
    seed = as_tensor(bytes(32))
    spec = expected_report(RevealMasks(), Task({KEYS: {"a": seed, "b": seed}, UNRESPONSIVE: {"b": seed}}))
    assert rejection_reason(spec, Report({"own": {"seed": seed}, "seeds": {"b": seed}})) is None
    assert rejection_reason(spec, Report({"own": {"seed": seed}, "seeds": {"a": seed}})) is not None


@pytest.mark.parametrize("kind", [None, "shape", "name"])
def test_secure_sums_go_on_without_a_spoiled_report(kind):
    federation = tiny_federation(6)
    job = Job(method="aggregate=secure", fleet="plain", model="mlp", rounds=2, cohort=6, epochs=1, seed=4)
    experiment = assemble(job, job.method, federation)
    faults = [] if kind is None else [Fault("c2", kind, {2}, {"train"})]
    result = engine.run(experiment.method, FaultyFleet(make_fleet(experiment, {}), faults), rounds=2, seed=4)
    assert [sorted(r.rejected) for r in result.rounds] == [[], ["c2"] if kind else []]
    assert all(torch.isfinite(x).all() for x in result.state.models["global"].values())


def test_if_all_training_diverges_the_run_ends():
    with pytest.raises(UserError, match=r"reports of all clients in stage 'train' of round 2 .* a smaller --lr"):
        run_with([Fault(f"c{i}", "nan", {2}) for i in range(6)])
    run = run_with([Fault(f"c{i}", "nan") for i in range(6)], cohort_size=1)
    assert all(r.rejected for r in run.rounds), "one client of several may have a fault of its own"


def test_a_finite_value_of_any_size_is_accepted():
    result = run_with([Fault("c3", "scale", rounds={3})])
    assert not any(r.rejected for r in result.rounds)
    assert max(float(x.abs().max()) for x in result.state.models["global"].values()) > 100


def test_an_unknown_kind_of_fault_is_refused():
    with pytest.raises(UserError, match="kind is 'late'; it must be one of drop, nan, scale, shape, name"):
        Fault("c1", "late")


def test_a_report_without_tensors_is_spoiled_too():
    for kind in ("nan", "shape", "name"):
        assert rejection_reason(ReportSpec(), Fault("c1", kind).spoil(Report())) is not None
    assert Fault("c1", "scale").spoil(Report()) == Report()


def test_the_result_counts_rejected_reports(tmp_path):
    run_job(digits_job("local", rounds=1), tmp_path / "run")
    assert json.loads((tmp_path / "run/result.json").read_text())["num_rejected_reports"] == 0
    assert b"rejected" not in (tmp_path / "run/rounds.jsonl").read_bytes()
