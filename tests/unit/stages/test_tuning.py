"""Fine-tuning with a learning rate and epochs chosen on validation samples, and of the last layer only."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from federations import tiny_federation

import shoal
from shoal import engine
from shoal.client.train import LocalTraining
from shoal.client.tuning import TryTuning, index_of_most_hits
from shoal.errors import UserError
from shoal.fleet.plain import PlainFleet
from shoal.fleet.vector import VectorFleet
from shoal.methods import Setting, build, dry_build
from shoal.models import load_model
from shoal.stages.tuning import ChooseTuning
from shoal.types import Plan, Report, Samples, ServerState, Task

MODEL = load_model("mlp", (6,), 4)
TRAINING = LocalTraining(MODEL, epochs=3, batch_size=8, sends_model=False, keeps_model=True, name="personalise")


def hits_of(values):
    return Report({"val": {"hits": torch.tensor(values)}}, {}, {"val": 5})


def test_most_hits_over_all_clients_and_not_what_most_clients_like():
    """Rows: 1 and 5 epochs, columns: rates of 0.1 and 0.3. 0.1 has one hit more at two clients, 0.3 four at one."""
    tune = ChooseTuning(TryTuning(TRAINING, (0.1, 0.3), (1, 5)), lambda state, client: {}, rounds=2, every_rounds=1)
    hits_by_client = {"a": [[3.0, 2.0], [0.0, 0.0]], "b": [[3.0, 2.0], [0.0, 0.0]], "c": [[1.0, 5.0], [4.0, 4.0]]}
    state = tune.fold(ServerState(0, {}), {c: hits_of(v) for c, v in hits_by_client.items()}, 0)
    assert state.round_metrics == {"tune.epochs": 1.0, "tune.lr": 0.3}  # 9 hits; 7, 4 and 4 of the others
    assert tune.fold(state, {}, 0) is state  # without reports the last choice stays


@pytest.mark.parametrize(
    ("hits", "place"), [([[1, 2], [2, 0]], (0, 1)), ([[0, 0], [3, 3]], (1, 0)), ([[2, 2], [2, 2]], (0, 0))]
)
def test_a_tie_goes_to_the_candidate_that_trains_least(hits, place):
    assert index_of_most_hits(torch.tensor(hits)) == place


def test_tries_are_what_training_alone_would_give():
    """The hits of a candidate are those of a model trained with its rate and epochs, here one epoch."""
    federation = tiny_federation(4)
    task = Task({"global": MODEL.init(1)}, {}, seed=5)
    trying = TryTuning(TRAINING, (0.05, 0.2), (1, 3))
    fleet = PlainFleet(federation)
    hits = fleet.execute_one(trying, "c3", task).tensors["val"]["hits"]
    for place, rate in enumerate(trying.lr_grid):
        alone = replace(TRAINING, epochs=1, lr=rate, name="alone")
        other = PlainFleet(federation)
        other.execute_one(alone, "c3", task)
        x, y = federation["c3"]["val"]
        assert hits[0, place] == (MODEL.predict(other.private["c3"]["model"], x).argmax(-1) == y).sum()
    assert not fleet.private.get("c3")  # trying leaves nothing behind


def test_stacked_clients_report_what_single_ones_do():
    federation = tiny_federation(5)
    plan = Plan(
        TryTuning(TRAINING, (0.05, 0.5), (0, 1, 2)),
        {c: Task({"m": MODEL.init(0)}, {}, i) for i, c in enumerate(federation)},
    )
    plain, stacked = PlainFleet(federation).execute(plan), VectorFleet(federation).execute(plan)
    for client in federation:
        assert torch.equal(plain[client].tensors["val"]["hits"], stacked[client].tensors["val"]["hits"])


def test_clients_are_served_the_candidate_that_is_best_on_validation_samples():
    """Test samples are not used: with other ones the choice is the same."""
    federation = tiny_federation(5)
    options = {"personalise": {"search": True, "lr_grid": "0.0001,0.2", "epochs_grid": "1,5"}}
    setting = Setting(MODEL, rounds=2, cohort_size=3, eval_every=2, batch_size=8, options=options)
    method = build("fedavg-ft", setting)
    chosen = []
    for data in (federation, {c: {**federation[c], "test": _empty(federation[c]["test"])} for c in federation}):
        fleet = PlainFleet(data)
        result = engine.run(method, fleet, rounds=2, seed=0, eval_every=3 if chosen else 2)
        figures = result.rounds[-1].metrics
        assert "tune.lr" not in result.rounds[0].metrics  # only where the fleet is evaluated
        chosen.append((figures["tune.lr"], figures["tune.epochs"]))
        assert all("model" in fleet.private[c] for c in federation)
    assert chosen[0] == chosen[1] == (0.2, 5.0)


def _empty(rows: Samples) -> Samples:
    return Samples(rows.x[:1], 3 - rows.y[:1])


@pytest.mark.parametrize("tune", [False, True])
def test_fine_tuning_the_head_leaves_all_else_bit_for_bit(tune):
    federation = tiny_federation(4)
    options = {"personalise": {"part": "head", **({"search": True, "epochs_grid": "1,2"} if tune else {})}}
    method = build("fedavg-ft", Setting(MODEL, rounds=1, cohort_size=3, batch_size=8, options=options))
    fleet = PlainFleet(federation)
    state = engine.run(method, fleet, rounds=1, seed=0).state
    for client in federation:
        own, shared = fleet.private[client]["model"], state.models["global"]
        assert own.keys() == shared.keys()
        assert {k for k in own if not torch.equal(own[k], shared[k])} == set(MODEL.head)


def test_a_tuned_run_and_one_with_the_same_numbers_given_serve_the_same_global_model():
    fleet = tiny_federation(4)
    tuned = shoal.run("fedavg-ft", fleet, rounds=2, cohort=2, set={"personalise": {"search": True}})
    given = shoal.run("fedavg-ft", fleet, rounds=2, cohort=2)
    assert all(torch.equal(tuned.state.models["global"][k], x) for k, x in given.state.models["global"].items())


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"search": True, "lr": 0.2}, "personalise.lr is 0.2, but it has no effect unless personalise.search is false"),
        ({"lr_grid": "0.1"}, "personalise.lr_grid is '0.1', but it has no effect unless personalise.search is true"),
        ({"search": True, "lr_grid": "0.3,0.1"}, "personalise.lr_grid is '0.3,0.1'; it must be numbers"),
        ({"search": True, "lr_grid": "fast"}, "personalise.lr_grid is 'fast'; it must be numbers"),
        ({"search": True, "epochs_grid": "1,2.5"}, "personalise.epochs_grid is '1,2.5'; it must be whole numbers"),
        ({"part": "base"}, "personalise.part is 'base'"),
    ],
)
def test_what_does_not_fit_together_is_refused(options, sentence):
    with pytest.raises(UserError, match=sentence.replace("(", r"\(")):
        dry_build("fedavg-ft", {"personalise": options})
