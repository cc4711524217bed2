"""FedALA: weights between a client's own model and the received one, worked out by hand where the numbers are small."""

import math
from dataclasses import replace

import pytest
import torch
from federations import tiny_federation

from shoal import engine, tree
from shoal.client.local_aggregation import (
    AggregateAndTrain,
    LearnAggregationWeights,
    LocalAggregation,
    aggregated_predict,
)
from shoal.client.train import LocalTraining
from shoal.errors import UserError
from shoal.fleet.plain import PlainFleet, run_program
from shoal.methods import Setting, build
from shoal.methods.composition.model_functions import one_model_for
from shoal.models import load_model
from shoal.stages.second_participation import RunOnSecondParticipation
from shoal.types import Report, Samples, ServerState, Task

LINEAR = load_model("linear", (1,), 2)
MLP = load_model("mlp", (6,), 4)
DATA = tiny_federation()["c3"]


def line(slope):
    return {"head.bias": torch.zeros(2), "head.weight": torch.tensor([[slope], [-slope]])}


def kept(slope, weight):
    return {"model": line(slope), "weights": {k: torch.full_like(v, weight) for k, v in line(0.0).items()}}


def row(label):
    return dict.fromkeys(("train", "val", "test"), Samples(torch.ones(1, 1), torch.tensor([label])))


@pytest.mark.parametrize(
    ("label", "lr", "weight"),
    [
        (0, 1.0, 0.5 + 1 / (1 + math.e)),
        (0, 10.0, 1.0),  # past 1, and cut
        (1, 0.5, 0.5 - 0.5 * math.e / (1 + math.e)),
        (1, 1.0, 0.0),
    ],
)
def test_weights_follow_the_gradient_and_stay_within_0_and_1(label, lr, weight):
    """Own slope 0, received 1, weights 1/2: logits of x = 1 are (1/2, -1/2), so P(class 0) = e / (1 + e). Of class 0
    the slope of the loss in the model's numbers is -+1/(1+e), times the gaps of 1 and -1: -1/(1+e) in both weights; of
    class 1 it is e/(1+e). Biases are equal in both models: their weights have no slope."""
    program = LearnAggregationWeights(LocalAggregation(LINEAR, lr=lr))
    report, private = run_program(program, Task({"global": line(1.0)}), row(label), kept(0.0, 0.5))
    assert private["weights"]["head.weight"].flatten().tolist() == pytest.approx([weight, weight], abs=1e-6)
    assert private["weights"]["head.bias"].tolist() == [0.5, 0.5]
    assert tree.max_abs_difference(private["model"], line(0.0)) == 0
    assert (report.tensors, report.metrics) == ({}, {"done": (1.0, 1.0)})


def test_training_starts_between_the_models():
    """Without epochs of either kind: slope 1 + (5 - 1) / 4 = 2 is sent and kept."""
    program = AggregateAndTrain(LocalAggregation(LINEAR, epochs=0), LocalTraining(LINEAR, epochs=0))
    report, private = run_program(program, Task({"global": line(5.0)}), row(0), kept(1.0, 0.25))
    assert tree.max_abs_difference(report.tensors["model"], line(2.0)) < 1e-6
    assert tree.max_abs_difference(private, kept(2.0, 0.25)) < 1e-6


@pytest.mark.parametrize(("layers", "below"), [(1, {"fc1", "fc2"}), (2, {"fc1"}), (3, set())])
def test_lower_layers_are_as_received(layers, below):
    local_aggregation = LocalAggregation(MLP, layers=layers)
    own, received = MLP.init(1), MLP.init(0)
    weights = {k: torch.zeros_like(own[k]) for k in local_aggregation.param_names}
    start = local_aggregation.initial_model(local_aggregation.begin(received, {"model": own, "weights": weights}))
    assert {k.split(".")[0] for k in start if torch.equal(start[k], received[k])} == below
    assert all(torch.equal(start[k], own[k]) for k in local_aggregation.param_names)
    assert list(start) == list(received)


def test_a_client_without_a_model_trains_the_received_one():
    task = Task({"global": MLP.init(0)}, {"lr": 0.1}, seed=3)
    training = LocalTraining(MLP, batch_size=1000)
    report, private = run_program(AggregateAndTrain(LocalAggregation(MLP), training), task, DATA, {})
    expected, _ = run_program(training, task, DATA, {})
    assert tree.max_abs_difference(report.tensors["model"], expected.tensors["model"]) < 1e-6
    assert tree.max_abs_difference(private["model"], report.tensors["model"]) == 0
    assert all(bool((w == 1).all()) for w in private["weights"].values())
    nothing, none = run_program(LearnAggregationWeights(LocalAggregation(MLP)), task, DATA, {})
    assert (nothing.metrics, none) == ({"done": (0.0, 1.0)}, None)


def test_a_pull_is_towards_the_received_model():
    """Rows at x = 0, one of each class, give no gradient: a step with lr mu = 1/2 halves the way from where training
    starts, slope 2, to the received one, 5."""
    rows = dict.fromkeys(("train", "val", "test"), Samples(torch.zeros(2, 1), torch.tensor([0, 1])))
    program = AggregateAndTrain(LocalAggregation(LINEAR, epochs=0), LocalTraining(LINEAR, mu=5.0, lr=0.1))
    report, _ = run_program(program, Task({"global": line(5.0)}), rows, kept(1.0, 0.25))
    assert tree.max_abs_difference(report.tensors["model"], line(3.5)) < 1e-6


def test_learned_weights_fit_the_client_better():
    own, received = MLP.init(1), MLP.init(0)
    local_aggregation = LocalAggregation(MLP, layers=3, epochs=10, batch_size=1000, sample_fraction=1.0)
    _, private = run_program(
        LearnAggregationWeights(local_aggregation), Task({"global": received}), DATA, {"model": own}
    )

    def loss(private):
        logits = aggregated_predict(local_aggregation)({"global": received}, private, DATA["train"].x)
        return float(torch.nn.functional.cross_entropy(logits, DATA["train"].y))

    assert loss(private) < loss({}) - 0.05


def test_the_newest_model_is_served_by_the_last_weights():
    x = torch.tensor([[2.0]])
    predict = aggregated_predict(LocalAggregation(LINEAR))
    assert predict({"global": line(5.0)}, kept(1.0, 0.25), x).tolist() == [[4.0, -4.0]]
    assert predict({"global": line(5.0)}, {}, x).tolist() == [[10.0, -10.0]]
    setting = Setting(LINEAR, rounds=3, cohort_size=1, options={"serve": {"model": "trained"}})
    assert build("fedala", setting).predict({"global": line(5.0)}, kept(1.0, 0.25), x).tolist() == [[2.0, -2.0]]


def test_a_returning_client_gets_a_task_until_it_is_done():
    stage = RunOnSecondParticipation(LearnAggregationWeights(LocalAggregation(LINEAR)), one_model_for, name="ala")
    state = ServerState(0, {"global": line(1.0)}, cohort=("a", "b", "c"))

    def recipients(state):
        return set(stage.plan(state, 0).tasks)

    assert recipients(state) == set()
    state = stage.fold(state, {}, 0)
    assert recipients(state) == {"a", "b", "c"}
    done, not_yet = (Report(metrics={"done": (x, 1.0)}) for x in (1.0, 0.0))
    state = stage.fold(replace(state, cohort=("a", "b", "c", "d")), {"a": done, "c": not_yet}, 0)  # b is silent
    assert recipients(state) == {"b", "c", "d"}
    assert recipients(replace(state, cohort=("a", "d", "e"))) == {"d"}


def run(data, name, **options):
    setting = Setting(MLP, rounds=3, cohort_size=6, batch_size=1000, epochs=2, lr=0.1, options=options)
    fleet = PlainFleet(data)
    return engine.run(build(name, setting), fleet, rounds=3, seed=0, central_samples=data.central), fleet


def test_without_learning_it_is_fedavg(tiny):
    """Weights stay at 1, so the global model is served. Batches have all samples, so their order does not matter."""
    base, _ = run(tiny, "fedavg")
    unlearned, _ = run(tiny, "fedala", local_aggregation={"epochs": 0, "first_epochs": 0})
    learned, _ = run(tiny, "fedala")
    assert tree.max_abs_difference(base.state.models, unlearned.state.models) < 1e-5
    assert base.accuracy == pytest.approx(unlearned.accuracy, abs=1e-6)
    assert tree.max_abs_difference(base.state.models, learned.state.models) > 1e-3


def test_first_epochs_are_run_once_and_charged(tiny):
    """All clients train in every round, so all return in the second. An epoch has round(0.8 n) samples, with 4848
    operations forward and 240 for gradients of the last layer (see test_personal_models).
    """
    result, fleet = run(tiny, "fedala", local_aggregation={"first_epochs": 7})
    entries = [p for p in result.ledger.entries if p.stage == "ala"]
    assert [p.round for p in entries] == [2]
    num_samples = {c: len(tiny[c]["train"].y) for c in tiny}
    assert sorted(entries[0].flops.tolist()) == sorted(7 * round(0.8 * n) * (4848 + 240) for n in num_samples.values())
    assert all(set(p) == {"model", "weights"} for p in fleet.private.values())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"layers": 0}, r"local_aggregation\.layers is 0; it must be 1 or more"),
        ({"layers": 4}, r"local_aggregation\.layers is 4; it must be from 1 to 3, the number of layers of mlp"),
        ({"sample_fraction": 0}, r"local_aggregation\.sample_fraction is 0; it must be above 0 and at most 1"),
        ({"lr": 0}, r"local_aggregation\.lr is 0; it must be above 0"),
        ({"epochs": -1}, r"local_aggregation\.epochs is -1; it must be 0 or more"),
        ({"first_epochs": -1}, r"local_aggregation\.first_epochs is -1; it must be 0 or more"),
        ({"batch_size": 0}, r"local_aggregation\.batch_size is 0; it must be 1 or more"),
    ],
)
def test_bad_input(options, message):
    with pytest.raises(UserError, match=message):
        build("fedala", Setting(MLP, rounds=3, cohort_size=1, options={"local_aggregation": options}))
