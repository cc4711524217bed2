"""FedCos: going the way that the global model went, worked out by hand."""

import math

import pytest
import torch

from shoal import engine, tree
from shoal.client.align import AlignedTraining, cosine
from shoal.errors import UserError
from shoal.fleet.plain import PlainFleet, run_program
from shoal.methods import Setting, build
from shoal.models import load_model
from shoal.types import Samples, Task

LINEAR = load_model("linear", (1,), 2)
MLP = load_model("mlp", (6,), 4)
# One sample of each class at x = 0: the loss has no gradient if the biases are equal.
FLAT = dict.fromkeys(("train", "val", "test"), Samples(torch.zeros(2, 1), torch.tensor([0, 1])))


def line(slope):
    return {"head.bias": torch.zeros(2), "head.weight": torch.tensor([[slope], [-slope]])}


def test_cosine_over_all_parameters():
    """(3, 4) and (4, 3), each in two tensors: 24 / sqrt(25 * 25 + 0.0001)."""
    a, b = ({"a": torch.tensor([x]), "b": torch.tensor([[y]])} for x, y in ((3.0, 4.0), (4.0, 3.0)))
    assert float(cosine(a, b)) == pytest.approx(24 / math.sqrt(625.0001))
    zero = {k: torch.zeros_like(x) for k, x in a.items()}
    assert float(cosine(a, zero)) == 0


@pytest.mark.parametrize(("epochs", "slope"), [(1, 3.1), (2, 3.1 + 0.01 * 0.894427)])
def test_updates_follow_the_direction(epochs, slope):
    """Only the cosine has a slope. Where training starts it is d / sqrt(0.0001) = 100 d: with d = (0.1, -0.1), mu 0.02
    and lr 0.5 the first step is 0.01 * 100 * 0.1 = 0.1. Now a = w - w_received = d, |a|^2 = |d|^2 = <a, d> = 0.02, so
    with r = 0.02 * 0.02 + 0.0001 = 0.0005 the slope is d / r^0.5 - <a, d> |d|^2 a / r^1.5 = 4.472136 - 3.577709."""
    task = Task({"direction": line(0.1), "global": line(3.0)}, {"lr": 0.5})
    report, private = run_program(AlignedTraining(LINEAR, epochs=epochs, cosine=0.02), task, FLAT, {})
    assert tree.max_abs_difference(report.tensors["model"], line(slope)) < 1e-6
    assert private is None


def test_with_a_proximal_term():
    """After the first step, to 3.1, a pull of mu = 1 adds a slope of 0.1: 0.05 less."""
    task = Task({"global": line(3.0), "direction": line(0.1)}, {"lr": 0.5})
    report, _ = run_program(AlignedTraining(LINEAR, epochs=2, cosine=0.02, mu=1.0), task, FLAT, {})
    assert tree.max_abs_difference(report.tensors["model"], line(3.1 + 0.01 * 0.894427 - 0.05)) < 1e-6


@pytest.mark.parametrize("extra", [{}, {"direction": line(0.0)}])
def test_without_a_direction_training_is_unchanged(extra):
    report, _ = run_program(AlignedTraining(LINEAR), Task({"global": line(3.0)} | extra, {"lr": 0.5}), FLAT, {})
    assert tree.max_abs_difference(report.tensors["model"], line(3.0)) == 0


def run_method(data, name, rounds=3, **options):
    setting = Setting(MLP, rounds=rounds, cohort_size=4, batch_size=8, epochs=2, lr=0.1, momentum=0.5, options=options)
    method = build(name, setting)
    return engine.run(method, PlainFleet(data), rounds=rounds, seed=0, central_samples=data.central)


def test_the_first_round_and_a_weight_of_0_are_fedavg(tiny):
    assert (
        tree.max_abs_difference(run_method(tiny, "fedavg", 1).state.models, run_method(tiny, "fedcos", 1).state.models)
        == 0
    )
    base = run_method(tiny, "fedavg").state.models
    assert tree.max_abs_difference(base, run_method(tiny, "fedcos", train={"cosine": 0.0}).state.models) == 0
    assert tree.max_abs_difference(base, run_method(tiny, "fedcos").state.models) > 1e-3


def test_the_direction_is_the_last_update_of_the_global_model(tiny):
    two, three = run_method(tiny, "fedcos", 2), run_method(tiny, "fedcos", 3)
    change = {k: three.state.models["global"][k] - v for k, v in two.state.models["global"].items()}
    assert tree.max_abs_difference(three.state.memory["train"]["direction"], change) == 0
    stage = build("fedcos", Setting(MLP, rounds=3, cohort_size=1)).stages[-1]
    silent = stage.fold(three.state, {}, 0)
    assert all(not x.any() for x in silent.memory["train"]["direction"].values())


def test_two_models_are_sent_from_the_second_round_on(tiny):
    """A model has 6 * 64 + 64 + 64 * 30 + 30 + 30 * 4 + 4 = 2522 numbers of 4 bytes; 4 clients take part."""
    base, result = run_method(tiny, "fedavg"), run_method(tiny, "fedcos")
    extra_bytes = [b.bytes_down - a.bytes_down for a, b in zip(base.rounds, result.rounds, strict=True)]
    assert extra_bytes[0] == 0
    assert all(4 * 2522 * 4 < x < 4 * (2522 * 4 + 1000) for x in extra_bytes[1:])
    assert [r.bytes_up for r in base.rounds] == [r.bytes_up for r in result.rounds]
    method = build("fedcos", Setting(MLP, rounds=3, cohort_size=1))
    assert set(method.models_for(result.state, "c0")) == {"global"}  # it is needed for training only


def test_a_stronger_cosine_turns_updates_more():
    task = Task({"global": MLP.init(0), "direction": MLP.init(1)}, {"lr": 0.1})
    g = torch.Generator().manual_seed(0)
    rows = Samples(torch.randn(32, 6, generator=g), torch.randint(0, 4, (32,), generator=g))

    def angle(weight):
        report, _ = run_program(AlignedTraining(MLP, epochs=3, cosine=weight), task, {"train": rows}, {})
        update = {k: v - task.models["global"][k] for k, v in report.tensors["model"].items()}
        return float(cosine(update, task.models["direction"]))

    assert angle(0.0) < angle(0.02) < angle(0.2)


def test_bad_input():
    with pytest.raises(UserError, match=r"train\.cosine is -1; it must be 0 or more"):
        build("fedcos", Setting(MLP, rounds=3, cohort_size=1, options={"train": {"cosine": -1}}))
