"""A recorded step gives the same bits as the step itself, whenever recording begins."""

import pytest
import torch
from recorded import num_recordings
from torch import nn

from shoal import tree
from shoal.client.evaluate import Evaluate
from shoal.client.train import LocalTraining
from shoal.fleet.plain import PlainFleet
from shoal.fleet.tracing import Recorder
from shoal.fleet.vector import VectorFleet
from shoal.models import load_model
from shoal.types import Plan, Task


class OwnDropout(nn.Module):
    def __init__(self, input_shape, classes):
        super().__init__()
        self.inside, self.drop, self.out = nn.Linear(input_shape[0], 8), nn.Dropout(0.5), nn.Linear(8, classes)

    def forward(self, x):
        return self.out(self.drop(self.inside(x).relu()))


class Branching(nn.Module):
    """Control flow that depends on data: it cannot be recorded."""

    def __init__(self, input_shape, classes):
        super().__init__()
        self.out = nn.Linear(input_shape[0], classes)

    def forward(self, x):
        return self.out(x) if float(x.detach().sum()) > 0 else -self.out(x)


def run_twice(tiny, fleet_type, model, record_after_calls):
    fleet = fleet_type(tiny)
    fleet.recorder = Recorder(record_after_calls)
    program = LocalTraining(model, epochs=3, batch_size=4, momentum=0.9, clip=1.0, weight_decay=0.01, mu=0.1)
    plan = Plan(program, {c: Task({"g": model.init(0)}, {"lr": 0.1}, seed=i) for i, c in enumerate(tiny)})
    first = {c: r.tensors["model"] for c, r in fleet.execute(plan).items()}
    again = {c: r.tensors["model"] for c, r in fleet.execute(plan).items()}
    assert tree.max_abs_difference(first, again) == 0
    return first, fleet.recorder


@pytest.mark.parametrize("fleet", [PlainFleet, VectorFleet])
@pytest.mark.parametrize("after", [1, 2, 17])
@pytest.mark.parametrize("name", ["mlp", "mlp-dropout", f"{__name__}:OwnDropout"])
def test_the_moment_of_recording_does_not_matter(tiny, fleet, name, after):
    model = load_model(name, (6,), 4)
    expected, none = run_twice(tiny, fleet, model, 10**9)
    found, some = run_twice(tiny, fleet, model, after)
    assert not num_recordings(none)
    assert num_recordings(some)
    assert tree.max_abs_difference(expected, found) == 0


def test_a_step_that_cannot_be_recorded_runs_as_it_is(tiny):
    model = load_model(f"{__name__}:Branching", (6,), 4)
    expected, _ = run_twice(tiny, PlainFleet, model, 10**9)
    found, recorder = run_twice(tiny, PlainFleet, model, 1)
    assert not num_recordings(recorder)
    assert tree.max_abs_difference(expected, found) == 0


def test_batch_norm_and_convolutions_are_recorded_too():
    from federations import tiny_federation

    federation = tiny_federation(3, (1, 6, 6))
    for name in ("networks:SmallBatchNorm", "networks:SmallConvolution"):
        model = load_model(name, (1, 6, 6), 4)
        expected, _ = run_twice(federation, PlainFleet, model, 10**9)
        found, recorder = run_twice(federation, PlainFleet, model, 2)
        assert num_recordings(recorder)
        assert tree.max_abs_difference(expected, found) == 0


def test_models_of_other_names_are_not_confused(tiny):
    """Clients of two clusters get models of one shape under different names, in turn."""

    def logits(models, private, x):
        (name,) = models
        return models[name]["w"].expand(len(x), 4) * (1 if name == "a" else -1)

    program = Evaluate(logits, 4)
    for fleet_type in (PlainFleet, VectorFleet):
        fleet = fleet_type(tiny)
        fleet.recorder = Recorder(2)
        for _ in range(4):
            for name in ("a", "b"):
                model = {name: {"w": torch.tensor([3.0, 2.0, 1.0, 0.0])}}
                reports = fleet.execute(Plan(program, {c: Task(model) for c in tiny}))
                chosen = sum(r.tensors["classes"]["counts"][1] for r in reports.values())
                assert int(chosen.argmax()) == (0 if name == "a" else 3)


@pytest.mark.parametrize("fleet_type", [PlainFleet, VectorFleet])
def test_earlier_work_of_a_fleet_does_not_matter(fleet_type):
    """The network is so large that kernels for shared and for stacked weights round differently."""
    from federations import tiny_federation

    federation = tiny_federation(5, (1, 28, 28))
    model = load_model("mlp", (1, 28, 28), 4)
    program = LocalTraining(model, epochs=4, batch_size=7, momentum=0.5, mu=0.1)
    plan = Plan(program, {c: Task({"g": model.init(0)}, {"lr": 0.1}, seed=i) for i, c in enumerate(federation)})
    fleet = fleet_type(federation)
    fleet.recorder = Recorder(5)
    begin = tree.map_leaves(torch.clone, plan.tasks["c0"].models)
    first = {c: r.tensors["model"] for c, r in fleet.execute(plan).items()}
    later = [{c: r.tensors["model"] for c, r in fleet.execute(plan).items()} for _ in range(4)]
    assert num_recordings(fleet.recorder)
    assert all(tree.max_abs_difference(first, found) == 0 for found in later)
    assert tree.max_abs_difference(begin, plan.tasks["c0"].models) == 0  # the models of a task never change


def test_nothing_is_overwritten_that_is_still_read(tiny):
    """The step adds a matrix and its transpose, and one leaf is a view of another."""
    from shoal.types import Phase, Report

    class Aliasing:
        name, batchable = "aliasing", True
        phases = (Phase("train", 3, 4, lambda s, b: Aliasing.step(s)),)

        @staticmethod
        def step(s):
            twice = s["w"] * 0.5
            w = (twice + twice.t()) + s["turned"] * 0.25
            new = torch.add(s["w"], w, alpha=0.1)
            return {"w": new, "turned": new.t()}

        def begin(self, task, private):
            w = torch.arange(9.0).view(3, 3) / 10
            return {"w": w, "turned": w.t()}

        def end(self, task, s, counts):
            return Report({"m": {"w": s["w"]}}, {}, counts), None

    found = []
    for after in (10**9, 1, 2):
        fleet = PlainFleet(tiny)
        fleet.recorder = Recorder(after)
        reports = fleet.execute(Plan(Aliasing(), {c: Task() for c in tiny}))
        found.append({c: r.tensors["m"] for c, r in reports.items()})
        assert bool(num_recordings(fleet.recorder)) == (after < 10)
    assert tree.max_abs_difference(found[0], found[1]) == tree.max_abs_difference(found[0], found[2]) == 0
