"""Clients that choose among models (IFCA), worked out by hand for models that are mirror images of each other."""

import math
from dataclasses import replace

import pytest
import torch
from federations import tiny_federation
from networks import SmallBatchNorm
from recorded import num_recordings
from sklearn.metrics import adjusted_rand_score

import shoal
from shoal import engine, tree
from shoal.client.model_choice import ChooseAndTrain, ChooseModel
from shoal.client.train import LocalTraining
from shoal.codec import task_bytes
from shoal.errors import UserError
from shoal.fleet.plain import PlainFleet, run_program
from shoal.fleet.tracing import Recorder
from shoal.fleet.vector import VectorFleet
from shoal.methods import Setting, build
from shoal.models import load_model
from shoal.models.model import Model
from shoal.stages.experts import expert_for
from shoal.stages.model_choice import AggregateByChoice, RandomRestarts, RechooseModels, all_models
from shoal.stages.train import LearningRate
from shoal.store.checkpoint import Checkpoints
from shoal.types import Plan, Report, Samples, ServerState, Task

LINEAR = load_model("linear", (1,), 2)


def line(slope):
    """Logits (slope x, -slope x): class 0 has probability 1 / (1 + exp(-2 slope x))."""
    return {"head.bias": torch.zeros(2), "head.weight": torch.tensor([[slope], [-slope]])}


UP, DOWN = line(1.0), line(-1.0)


def client(x, y):
    return dict.fromkeys(("train", "val", "test"), Samples(torch.tensor(x)[:, None], torch.tensor(y)))


DATA = {
    "rising": client([1.0, -1.0], [0, 1]),
    "falling": client([1.0, -1.0], [1, 0]),
    "mostly": client([1.0, 1.0, 1.0, -1.0, 1.0], [1, 1, 1, 0, 0]),  # four of five samples fall
    "blind": client([0.0, 0.0, 0.0], [0, 1, 1]),  # no line distinguishes classes at 0
}
CHOICES = {"rising": 0, "falling": 1, "mostly": 1, "blind": 0}  # a tie goes to the first


def executed(fleet, program, models=None, data=DATA, **config):
    tasks = {c: Task(models or {"a": UP, "b": DOWN}, config, i) for i, c in enumerate(data)}
    return fleet(data).execute(Plan(program, tasks))


def choices(reports):
    return {c: int(r.tensors["choice"]["place"]) for c, r in reports.items()}


def trainer(model=LINEAR, **kw):
    return ChooseAndTrain(LocalTraining(model, **{"epochs": 1, "batch_size": 1000, "lr": 0.5} | kw))


@pytest.mark.parametrize("fleet", [PlainFleet, VectorFleet])
class TestChoosing:
    def test_the_lowest_loss_wins_and_the_first_of_equals(self, fleet):
        reports = executed(fleet, ChooseModel(LINEAR))
        assert choices(reports) == CHOICES
        # A row that fits costs log(1 + e^-2), another log(1 + e^2); at x = 0 every row costs log 2.
        fits, misses = math.log1p(math.exp(-2)), math.log1p(math.exp(2))
        expected = {"rising": 2 * fits, "falling": 2 * fits, "mostly": 4 * fits + misses, "blind": 3 * math.log(2)}
        for c, r in reports.items():
            assert r.metrics["loss"] == (pytest.approx(expected[c], abs=1e-5), len(DATA[c]["train"].y))
            assert set(r.tensors) == {"choice"}  # nothing else is sent

    def test_equal_models_are_a_tie(self, fleet):
        reports = executed(fleet, trainer(), {"a": UP, "b": tree.map_leaves(torch.clone, UP), "c": UP})
        assert set(choices(reports).values()) == {0}

    def test_other_names_for_the_models_are_other_names_for_the_choices(self, fleet):
        found = choices(executed(fleet, trainer(), {"b": UP, "a": DOWN}))
        assert found == {"rising": 1, "falling": 0, "mostly": 0, "blind": 0}

    def test_the_order_of_samples_and_of_models_in_the_task_does_not_matter(self, fleet):
        backwards = {c: {k: Samples(x.flip(0), y.flip(0)) for k, (x, y) in d.items()} for c, d in DATA.items()}
        assert choices(executed(fleet, ChooseModel(LINEAR), {"b": DOWN, "a": UP}, backwards)) == CHOICES

    def test_what_was_chosen_is_trained(self, fleet):
        # One step on all rows. Where a row fits, the wrong class has p = 1 / (1 + e^2), so the slope grows by lr * p:
        # d/dw of the loss at x = 1, y = 0 is (-p, p), and at x = -1, y = 1 the same. Biases cancel.
        reports = executed(fleet, trainer())
        slope = 1 + 0.5 / (1 + math.exp(2))
        assert choices(reports) == CHOICES
        for c, sign in (("rising", 1), ("falling", -1)):
            assert tree.max_abs_difference(reports[c].tensors["model"], line(sign * slope)) < 1e-6
            assert reports[c].metrics["loss"] == (pytest.approx(2 * math.log1p(math.exp(-2)), abs=1e-5), 2.0)
        # blind: slopes stay; of p = 1/2 for each class and labels 0, 1, 1 the biases move by lr * (1/3 - 1/2)
        blind = reports["blind"].tensors["model"]
        assert torch.equal(blind["head.weight"], UP["head.weight"])
        assert blind["head.bias"].tolist() == pytest.approx([-0.5 / 6, 0.5 / 6])

    def test_the_rate_of_the_task_counts(self, fleet):
        reports = executed(fleet, trainer(), lr=0.25)
        slope = 1 + 0.25 / (1 + math.exp(2))
        assert tree.max_abs_difference(reports["rising"].tensors["model"], line(slope)) < 1e-6

    def test_the_pull_is_towards_what_was_chosen(self, fleet):
        """Two steps with lr * mu = 1: the second undoes the first and goes from the chosen model again."""
        reports = executed(fleet, trainer(mu=2.0, epochs=2))
        once = executed(fleet, trainer())["falling"].tensors["model"]
        p = 1 / (1 + math.exp(-2 * float(once["head.weight"][0, 0])))
        assert tree.max_abs_difference(reports["falling"].tensors["model"], line(-1 - 0.5 * p)) < 1e-6

    def test_received_models_are_left_alone(self, fleet):
        before = {"a": tree.map_leaves(torch.clone, UP), "b": tree.map_leaves(torch.clone, DOWN)}
        executed(fleet, trainer(momentum=0.5, epochs=3))
        assert tree.max_abs_difference(before, {"a": UP, "b": DOWN}) == 0

    def test_one_model_leaves_no_choice(self, fleet):
        tiny, model = tiny_federation(), load_model("mlp", (6,), 4)
        training = LocalTraining(model, epochs=2, batch_size=1000, momentum=0.5)
        plain = executed(fleet, training, {"a": model.init(1)}, tiny)
        chosen = executed(fleet, ChooseAndTrain(training), {"a": model.init(1)}, tiny)
        for c in tiny:
            assert tree.max_abs_difference(plain[c].tensors["model"], chosen[c].tensors["model"]) < 1e-6


@pytest.mark.parametrize("network", ["mlp-dropout", "networks:SmallConvolution"])
def test_clients_are_stacked_and_steps_recorded(network):
    shape = (6,) if network == "mlp-dropout" else (1, 6, 6)
    tiny, model = tiny_federation(shape=shape), load_model(network, shape, 4)
    fleet = VectorFleet(tiny)
    fleet.recorder = Recorder(record_after_calls=1)
    models = {f"m{k}": model.init(k) for k in range(3)}
    tasks = {c: Task(models, {}, i) for i, c in enumerate(tiny)}
    fleet.execute(Plan(trainer(model, batch_size=8, momentum=0.5), tasks))
    assert not fleet._unstackable_programs
    assert num_recordings(fleet.recorder) >= 2  # choosing and training


def test_more_samples_than_a_batch():
    """2000 samples in two batches: 1024 that fit the first model, then 976 that do not."""
    y = [0] * 1024 + [1] * 976
    data = {"one": client([1.0] * 2000, y), "other": client([1.0] * 2000, [1 - k for k in y])}
    for fleet in (PlainFleet, VectorFleet):
        assert choices(executed(fleet, ChooseModel(LINEAR), data=data)) == {"one": 0, "other": 1}


def test_batch_norm_is_judged_as_served():
    model = Model("norm", lambda: SmallBatchNorm((1, 6, 6), 4), (1, 6, 6), 4)
    tiny = tiny_federation(shape=(1, 6, 6))
    models = {f"m{k}": model.init(k) | {"1.running_mean": torch.full((4,), 0.1 * k)} for k in range(3)}
    reports = executed(PlainFleet, ChooseAndTrain(LocalTraining(model, batch_size=8)), models, tiny)
    asked = executed(VectorFleet, ChooseModel(model), models, tiny)
    for c in tiny:
        x, y = tiny[c]["train"]
        losses = [float(torch.nn.functional.cross_entropy(model.predict(m, x), y)) for m in models.values()]
        assert choices(reports)[c] == choices(asked)[c] == min(range(3), key=losses.__getitem__)
        counted = reports[c].tensors["model"]["1.num_batches_tracked"]
        steps = -(-len(y) // 8) - (len(y) % 8 == 1)  # a single row joins the batch before it
        assert int(counted) == steps  # by training, not by choosing
    assert len(set(choices(asked).values())) > 1


STATE = ServerState(0, {"expert-000": UP, "expert-001": DOWN, "expert-002": line(9.0)}, roster=tuple(DATA))


def federate(**kw):
    return AggregateByChoice(trainer(), all_models, LearningRate(0.5, 10), **{"weighting": "uniform"} | kw)


def report(place, slope, rows):
    return Report({"model": line(slope), "choice": {"place": torch.tensor(place)}}, {}, {"train": rows})


REPORTS = {"rising": report(0, 2.0, 10), "falling": report(1, -3.0, 10), "blind": report(0, 5.0, 30)}


class TestFederateChoices:
    def test_models_are_averaged_over_the_clients_that_chose_them(self):
        after = federate().fold(STATE, REPORTS, 0)
        slopes = {k: float(m["head.weight"][0, 0]) for k, m in after.models.items()}
        assert slopes == {"expert-000": 3.5, "expert-001": -3.0, "expert-002": 9.0}
        assert after.models["expert-002"] is STATE.models["expert-002"]  # no client chose it

    def test_weights_by_samples(self):
        after = federate(weighting="size").fold(STATE, REPORTS, 0)
        assert float(after.models["expert-000"]["head.weight"][0, 0]) == pytest.approx((10 * 2 + 30 * 5) / 40)

    def test_choices_are_memberships(self):
        before = replace(STATE, membership={"rising": torch.tensor([0.0, 0.0, 1.0]), "mostly": torch.eye(3)[2]})
        after = federate().fold(before, REPORTS, 0)
        found = {c: m.tolist() for c, m in after.membership.items()}
        assert found == {"rising": [1, 0, 0], "falling": [0, 1, 0], "blind": [1, 0, 0], "mostly": [0, 0, 1]}
        assert before.membership["rising"].tolist() == [0, 0, 1]
        assert expert_for(after, None)["expert"] is after.models["expert-000"]

    def test_a_client_without_samples_chooses_nothing(self):
        reports = executed(PlainFleet, trainer(), STATE.models, {"none": client([], []), "rising": DATA["rising"]})
        assert choices(reports)["none"] == 0  # all losses are 0
        after = federate().fold(STATE, reports, 0)
        assert set(after.membership) == {"rising"}
        assert after.models["expert-000"] is STATE.models["expert-000"]
        assert expert_for(after, "none")["expert"] is after.models["expert-002"]  # the largest cluster's

    def test_a_round_without_reports_changes_nothing(self):
        after = federate().fold(STATE, {}, 0)
        assert after.models == STATE.models
        assert after.membership == {}

    def test_a_round(self):
        stage = federate()
        plan = stage.plan(replace(STATE, cohort=tuple(DATA)), 0)
        assert all(set(t.models) == set(STATE.models) for t in plan.tasks.values())
        after = stage.fold(STATE, PlainFleet(DATA).execute(plan), 0)
        # "mostly" and "falling" train the falling line: p as above; four rows of five pull by p, one back by 1 - p
        p = 1 / (1 + math.exp(2))
        mean = -1 - 0.5 * (p + (4 * p - (1 - p)) / 5) / 2
        assert float(after.models["expert-001"]["head.weight"][0, 0]) == pytest.approx(mean)
        assert int(after.membership["rising"].argmax()) == 2  # the steepest line fits best


class TestRechooseModels:
    stage = RechooseModels(ChooseModel(LINEAR), rounds=10, every_rounds=4)

    def test_when(self):
        assert [r for r in range(10) if self.stage.due(r)] == [3, 7, 9]
        assert self.stage.purpose == "preparation"

    def test_all_clients_choose_among_the_models_after_the_round(self):
        """rising took part, and chose what is now the wrong model."""
        state = replace(STATE, cohort=("rising",), membership={"rising": torch.eye(3)[1], "falling": torch.eye(3)[0]})
        plan = self.stage.plan(state, 0)
        assert set(plan.tasks) == set(DATA)
        after = self.stage.fold(state, PlainFleet(DATA).execute(plan), 0)
        found = {c: int(m.argmax()) for c, m in after.membership.items()}
        assert found == {"rising": 2, "falling": 1, "mostly": 1, "blind": 0}  # the steepest line fits rising best
        assert after.models is state.models

    def test_without_present_clients(self):
        assert not self.stage.plan(replace(STATE, roster=()), 0).tasks


def starts(**kw):
    return RandomRestarts(ChooseModel(LINEAR), LINEAR, **{"rounds": 20} | kw)


def choice_reports(loss):
    """Reports with this mean loss over 40 samples of two clients, which choose one model each."""
    return {
        "a": Report({"choice": {"place": torch.tensor(0)}}, {"loss": (loss * 10 - 3, 10.0)}, {"train": 10}),
        "b": Report({"choice": {"place": torch.tensor(1)}}, {"loss": (loss * 30 + 3, 30.0)}, {"train": 30}),
    }


class TestStarts:
    def test_models_differ_and_follow_from_the_seed(self):
        one, again, other = (starts(num_clusters=4).init(seed).models for seed in (0, 0, 1))
        assert sorted(one) == [f"expert-00{k}" for k in range(4)]
        assert tree.max_abs_difference(one, again) == 0
        assert tree.max_abs_difference(one, other) > 0.01
        assert min(tree.max_abs_difference(one["expert-000"], one[f"expert-00{k}"]) for k in (1, 2, 3)) > 0.01

    @pytest.mark.parametrize(
        ("rounds", "restarts", "due"),
        [(20, 1, []), (20, 2, [5, 10]), (20, 3, [3, 6, 9]), (4, 9, [1, 2]), (1, 5, []), (0, 5, [])],
    )
    def test_half_of_the_rounds_are_for_trying(self, rounds, restarts, due):
        stage = starts(rounds=rounds, restarts=restarts)
        assert [r for r in range(rounds) if stage.due(r)] == due

    def test_the_best_of_three_goes_on(self, tmp_path):
        stage, state = (
            starts(restarts=3, num_clusters=2),
            ServerState(3, {"expert-000": line(1.0), "expert-001": line(2.0)}),
        )
        second = stage.fold(state, choice_reports(2.0), 5)
        assert tree.max_abs_difference(second.models, stage.init(5).models) == 0
        assert second.membership == {}
        third = stage.fold(replace(second, round=6), choice_reports(1.0), 6)
        Checkpoints(tmp_path).save(replace(third, round=9), [])
        kept = Checkpoints(tmp_path).load(9).state
        best = stage.fold(kept, choice_reports(1.5), 7)
        assert tree.max_abs_difference(best.models, second.models) == 0
        assert {c: m.tolist() for c, m in best.membership.items()} == {"a": [1, 0], "b": [0, 1]}
        assert best.memory == {}

    def test_a_start_without_reports_is_not_preferred(self):
        stage, state = (
            starts(restarts=2, num_clusters=2),
            ServerState(5, {"expert-000": line(1.0), "expert-001": line(2.0)}),
        )
        second = stage.fold(state, choice_reports(2.0), 0)
        assert tree.max_abs_difference(stage.fold(replace(second, round=10), {}, 0).models, state.models) == 0
        silent = stage.fold(state, {}, 0)
        assert tree.max_abs_difference(stage.fold(replace(silent, round=10), {}, 0).models, state.models) == 0

    @pytest.mark.parametrize("key", ["num_clusters", "restarts"])
    def test_bad_options(self, key):
        with pytest.raises(UserError, match=f"cluster.{key} is 0; it must be 1 or more"):
            starts(**{key: 0})


def setting(**kw):
    return Setting(**{"model": load_model("mlp", (6,), 4), "rounds": 4, "cohort_size": 3, "batch_size": 1000} | kw)


class TestMethod:
    def test_one_cluster_is_fedavg(self, tiny):
        """With full batches, whose order does not matter, and the same first model."""
        options = {"train": {"weighting": "uniform"}}
        single = build("ifca", setting(options={"cluster": {"num_clusters": 1}}))
        first = single.init(3)
        found = engine.run(single, PlainFleet(tiny), rounds=4, seed=3, state=first)
        start = ServerState(0, {"global": first.models["expert-000"]})
        plain = build("fedavg", setting(options=options))
        expected = engine.run(plain, PlainFleet(tiny), rounds=4, seed=3, state=start)
        assert tree.max_abs_difference(found.state.models["expert-000"], expected.state.models["global"]) < 1e-6
        assert found.accuracy == pytest.approx(expected.accuracy)

    def test_every_client_is_a_member_when_evaluated(self, tiny):
        result = engine.run(build("ifca", setting(eval_every=2)), PlainFleet(tiny), rounds=4, seed=0, eval_every=2)
        assert set(result.state.membership) == set(tiny)
        asked = {(p.round, p.stage, p.purpose): len(p.clients) for p in result.ledger.entries}
        training = {(r, "train", "training"): 3 for r in (1, 2, 3, 4)}
        assert asked == training | {(r, "choose", "preparation"): 6 for r in (2, 4)}

    def test_all_models_go_down_and_one_comes_up(self, tiny):
        result = engine.run(build("ifca", setting()), PlainFleet(tiny), rounds=4, seed=0)
        page = next(p for p in result.ledger.entries if p.stage == "train")
        model = load_model("mlp", (6,), 4)
        one = task_bytes(Task({"m": model.init(0)}))
        assert 2.9 * one < page.bytes_down.min() <= page.bytes_down.max() < 3.1 * one
        assert 0.9 * one < page.bytes_up.min() <= page.bytes_up.max() < 1.1 * one

    def test_restarts_in_a_run(self, tiny):
        options = {"cluster": {"num_clusters": 2, "restarts": 2}}
        method = build("ifca", setting(rounds=8, options=options))
        result = engine.run(method, PlainFleet(tiny), rounds=8, seed=0)
        assert [p.round for p in result.ledger.entries if p.stage == "restart"] == [3, 5]  # at their beginning
        assert set(result.state.membership) == set(tiny)
        assert result.state.memory == {}

    def test_restarts_need_a_constant_rate(self):
        options = {"cluster": {"restarts": 2}, "train": {"schedule": "cosine"}}
        message = "cluster.restarts is 2 and train.schedule is 'cosine'; starts are compared, so train.schedule"
        with pytest.raises(UserError, match=message):
            build("ifca", setting(options=options))
        build("ifca", setting(options={"train": {"schedule": "cosine"}}))
        build("ifca", setting(options={"cluster": {"restarts": 2}, "train": {"schedule": "constant"}}))

    def test_planted_groups_are_found(self):
        fleet = shoal.partition(shoal.load("digits"), "groups:3,100", clients=12, seed=0)
        result = shoal.run("ifca", fleet, rounds=6, cohort=12, epochs=2, lr=0.1, seed=0, eval_every=6, fleet="vector")
        found = [int(result.state.membership[c].argmax()) for c in fleet]
        assert adjusted_rand_score([fleet.planted_groups[c] for c in fleet], found) == 1
        assert result.accuracy["local"] > 0.9


def test_a_single_row_is_enough_to_compare_models_with_batch_norm():
    """Models are compared in evaluation mode, so that no batch statistics are needed."""
    model = load_model("networks:SmallBatchNorm", (1, 6, 6), 4)
    row = Samples(torch.randn(1, 1, 6, 6, generator=torch.Generator().manual_seed(0)), torch.tensor([2]))
    models = {str(k): model.init(k) for k in range(5)}
    losses = [float(torch.nn.functional.cross_entropy(model.predict(m, row.x), row.y)) for m in models.values()]
    training = LocalTraining(model, batch_size=8)
    report, _ = run_program(ChooseAndTrain(training), Task(models, {}, 0), {"train": row}, {})
    best = min(range(5), key=losses.__getitem__)
    assert best > 0
    assert int(report.tensors["choice"]["place"]) == best
