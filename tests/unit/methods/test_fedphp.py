"""FedPHP: a private model inherited from one's own past, worked out by hand."""

import math

import pytest
import torch

from shoal import engine, tree
from shoal.client.inherit import InheritedTraining, mix_models
from shoal.errors import UserError
from shoal.fleet.plain import PlainFleet, run_program
from shoal.methods import Setting, build
from shoal.models import load_model
from shoal.types import Samples, ServerState, Task

LINEAR = load_model("linear", (1,), 2)
MLP = load_model("mlp", (6,), 4)
ROW = dict.fromkeys(("train", "val", "test"), Samples(torch.ones(1, 1), torch.tensor([0])))


def line(slope, bias=0.0):
    return {"head.bias": torch.tensor([bias, -bias]), "head.weight": torch.tensor([[slope], [-slope]])}


@pytest.mark.parametrize(("times", "slope"), [(0, 3.0), (1, 2.4), (3, 1.2), (30, 1.2)])
def test_more_participations_inherit_more(times, slope):
    """Of planned 3 times, mu is 0.9 times/3 and at most 0.9. Without epochs the trained model is the received one,
    slope 3; the private one has 1: mu + 3 (1 - mu)."""
    private = {"model": line(1.0), "times": torch.tensor(float(times))}
    task = Task({"global": line(3.0)}, {"lr": 0.1, "planned": 3.0})
    report, inherited = run_program(InheritedTraining(LINEAR, epochs=0), task, ROW, private)
    assert tree.max_abs_difference(inherited["model"], line(slope)) < 1e-6
    assert float(inherited["times"]) == times + 1
    assert tree.max_abs_difference(report.tensors["model"], line(3.0)) == 0  # what is private is not sent


def test_the_first_inherited_model_is_the_trained_one():
    report, inherited = run_program(InheritedTraining(LINEAR), Task({"global": line(0.0)}, {"planned": 3.0}), ROW, {})
    assert tree.max_abs_difference(inherited["model"], report.tensors["model"]) == 0
    assert float(inherited["times"]) == 1


def test_the_predictions_of_the_inherited_model_are_imitated():
    """Received: slope 0, so P = (1/2, 1/2) of the row x = 1 of class 0. The private model's logits (2 ln 3, -2 ln 3),
    divided by T = 4, give (3/4, 1/4). The loss's slope in the first logit is (1 - 0.4) (1/2 - 1) + 0.4 (1/2 - 3/4) =
    -0.4, in the second 0.4: with lr 1 the slope of the line and its bias become 0.4."""
    private = {"model": line(2 * math.log(3)), "times": torch.tensor(0.0)}
    program = InheritedTraining(LINEAR, transfer=0.4, temperature=4.0)
    report, _ = run_program(program, Task({"global": line(0.0)}, {"lr": 1.0, "planned": 1.0}), ROW, private)
    assert tree.max_abs_difference(report.tensors["model"], line(0.4, 0.4)) < 1e-6


def test_a_client_without_an_inherited_model_imitates_the_received_one():
    """It says (1/2, 1/2) too, so the imitation has no slope: 0.6 (1/2 - 1) = -0.3 is left."""
    program = InheritedTraining(LINEAR, transfer=0.4)
    report, _ = run_program(program, Task({"global": line(0.0)}, {"lr": 1.0, "planned": 1.0}), ROW, {})
    assert tree.max_abs_difference(report.tensors["model"], line(0.3, 0.3)) < 1e-6


def test_integer_buffers_are_taken_from_the_new_model():
    old, new = ({"mean": torch.tensor(x), "batches": torch.tensor(n)} for x, n in ((1.0, 3), (2.0, 8)))
    assert mix_models(old, new, 0.25) == {"mean": torch.tensor(1.75), "batches": torch.tensor(8)}
    assert old == {"mean": torch.tensor(1.0), "batches": torch.tensor(3)}


@pytest.mark.parametrize(("cohort", "planned"), [(1, 1), (3, 2), (6, 5)])
def test_clients_receive_their_expected_participations(cohort, planned):
    """Of 6 clients in 5 rounds: 5/6 (but 1 at least), 15/6 and 30/6 times, rounded down."""
    stage = build("fedphp", Setting(MLP, rounds=5, cohort_size=cohort)).stages[-1]
    ids = tuple("abcdef")
    state = ServerState(2, {"global": MLP.init(0)}, roster=ids, cohort=ids[:cohort])
    assert {t.config["planned"] for t in stage.plan(state, 0).tasks.values()} == {planned}


def run_method(data, name, **options):
    setting = Setting(MLP, rounds=3, cohort_size=4, batch_size=8, epochs=2, lr=0.1, momentum=0.5, options=options)
    fleet = PlainFleet(data)
    return engine.run(build(name, setting), fleet, rounds=3, seed=0, central_samples=data.central), fleet


def test_without_imitation_the_global_model_is_that_of_fedavg(tiny):
    base, _ = run_method(tiny, "fedavg")
    alone, fleet = run_method(tiny, "fedphp", train={"transfer": 0.0})
    imitating, _ = run_method(tiny, "fedphp")
    assert tree.max_abs_difference(base.state.models, alone.state.models) == 0
    assert base.accuracy["central"] == alone.accuracy["central"]
    assert tree.max_abs_difference(base.state.models, imitating.state.models) > 1e-3
    assert sum(float(p["times"]) for p in fleet.private.values()) == 3 * 4


def test_the_inherited_model_is_served(tiny):
    result, fleet = run_method(tiny, "fedphp")
    method = build("fedphp", Setting(MLP, rounds=3, cohort_size=4))
    models, x = method.models_for(result.state, "c0"), tiny.central.x
    private = next(iter(fleet.private.values()))
    assert torch.equal(method.predict(models, private, x), MLP.predict(private["model"], x))
    assert torch.equal(method.predict(models, {}, x), MLP.predict(result.state.models["global"], x))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"transfer": 1.5}, r"train\.transfer is 1\.5; it must be from 0 to 1"),
        ({"inherit": -0.1}, r"train\.inherit is -0\.1; it must be from 0 to 1"),
        ({"temperature": 0}, r"train\.temperature is 0; it must be above 0"),
        ({"epochs": -1}, r"train\.epochs is -1"),
    ],
)
def test_bad_input(options, message):
    with pytest.raises(UserError, match=message):
        build("fedphp", Setting(MLP, rounds=3, cohort_size=1, options={"train": options}))
