"""APCSMA's steps, one by one."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from shoal import engine, tree
from shoal.client.conditional_update import ConditionalUpdate
from shoal.client.train import LocalTraining
from shoal.client.training_metrics import MeasureAccuracy, MeasuredTraining
from shoal.client_table import ClientTable
from shoal.cost.ledger import Ledger
from shoal.errors import UserError
from shoal.fleet.plain import PlainFleet, run_program
from shoal.methods import Setting, build
from shoal.methods.composition.model_functions import one_model_for
from shoal.models import load_model
from shoal.selectors.contribution import metrics
from shoal.stages.contribution import (
    AggregateByContribution,
    Coefficients,
    Kappa,
    SelectByContribution,
    UpdatePersonalModels,
)
from shoal.stages.train import LearningRate
from shoal.stages.vectors import flatten_params
from shoal.types import Report, Samples, ServerState, Task

LINEAR = load_model("linear", (1,), 2)
MLP = load_model("mlp", (6,), 4)


def line(slope, bias=0.0):
    return {"head.bias": torch.tensor([bias, -bias]), "head.weight": torch.tensor([[slope], [-slope]])}


def rows(xs, ys):
    return Samples(torch.tensor(xs).reshape(-1, 1), torch.tensor(ys))


def held(xs, ys):
    return dict.fromkeys(("train", "val", "test"), rows(xs, ys))


def setting(public=None, **kw):
    return Setting(MLP, **{"rounds": 6, "cohort": 2, "epochs": 1, "lr": 0.1, "public": public} | kw)


def played(tiny, rounds=6, fleet=PlainFleet, public=True, **options):
    given = Samples(tiny.central.x[:20], tiny.central.y[:20]) if public else None
    method = build("apcsma", setting(given, rounds=rounds, options=options))
    clients, ledger = fleet(tiny), Ledger()
    result = engine.run(method, clients, rounds=rounds, seed=0, central_samples=tiny.central, ledger=ledger)
    return result, clients, method


class TestConditionalUpdate:
    """Rows x = 1 of class 0 and x = -1 of class 1: slope 1 has two hits, slope -1 none, slope 0 one (of equals class 0
    is taken)."""

    DATA = held([1.0, -1.0], [0, 1])

    def update(self, received, own, kappa=0.2, judge="val"):
        private = {} if own is None else {"model": own}
        program = ConditionalUpdate(LINEAR, judge)
        return run_program(program, Task({"global": received}, {"kappa": kappa}), self.DATA, private)

    def test_a_tie_gives_exactly_the_global_model(self):
        report, private = self.update(line(1.0), line(3.0))
        assert tree.max_abs_difference(private["model"], line(1.0)) == 0
        assert report.metrics["kept"] == (0.0, 1.0)

    def test_a_better_own_model_is_mixed_in(self):
        """0.8 * (-1) + 0.2 * 1 = -0.6"""
        report, private = self.update(line(-1.0, 2.0), line(1.0))
        assert tree.max_abs_difference(private["model"], line(-0.6, 1.6)) < 1e-6
        assert report.metrics["kept"] == (1.0, 1.0)

    def test_a_worse_one_is_not(self):
        _, private = self.update(line(1.0), line(-1.0))
        assert tree.max_abs_difference(private["model"], line(1.0)) == 0

    def test_who_has_none_takes_the_global_one(self):
        report, private = self.update(line(-1.0), None)
        assert tree.max_abs_difference(private["model"], line(-1.0)) == 0
        assert not report.tensors  # nothing of the model is told

    def test_without_kappa_it_is_the_global_one(self):
        _, private = self.update(line(-1.0), line(1.0), kappa=0.0)
        assert tree.max_abs_difference(private["model"], line(-1.0)) == 0

    def test_rows_to_judge_by(self):
        """On validation rows the own model is better, on training rows it is not."""
        data = {"train": rows([1.0, -1.0], [1, 0]), "val": rows([1.0, -1.0], [0, 1]), "test": rows([1.0], [0])}
        for judge, slope in (("val", -0.6), ("train", -1.0)):
            task = Task({"global": line(-1.0)}, {"kappa": 0.2})
            _, private = run_program(ConditionalUpdate(LINEAR, judge), task, data, {"model": line(1.0)})
            assert tree.max_abs_difference(private["model"], line(slope)) < 1e-6

    def test_kappa_follows_its_schedule(self):
        stage = UpdatePersonalModels(
            ConditionalUpdate(LINEAR), one_model_for, Kappa(rounds=10, kappa=0.4, schedule="cosine", decay=0.5)
        )
        state = ServerState(0, {"global": line(0.0)}, roster=("a", "b"))
        assert [t.config["kappa"] for t in stage.plan(state, 0).tasks.values()] == [0.4, 0.4]
        half = stage.plan(replace(state, round=5), 0)
        assert half.tasks["a"].config["kappa"] == pytest.approx(0.4 * 0.75)  # half way from 1 to decay
        assert half.cache_models

    @pytest.mark.parametrize("wrong", [{"kappa": 1.5}, {"kappa": -0.1}, {"schedule": "square"}])
    def test_wrong_values_are_refused(self, wrong):
        with pytest.raises(UserError, match=f"update.{next(iter(wrong))} is "):
            build("apcsma", setting(options={"update": wrong}))


class TestMeasured:
    def test_training_is_that_of_fedavg_and_tells_how_good_it_became(self, tiny):
        task = Task({"global": MLP.init(0)}, {"lr": 0.1}, seed=5)
        plain, _ = run_program(LocalTraining(MLP), task, tiny["c3"], {})
        found, _ = run_program(MeasuredTraining(MLP), task, tiny["c3"], {})
        assert tree.max_abs_difference(plain.tensors, found.tensors) == 0
        x, y = tiny["c3"]["train"]
        logits = MLP.predict(found.tensors["model"], x)
        assert found.metrics["accuracy"] == (float((logits.argmax(-1) == y).sum()), len(y))
        assert found.metrics["loss_after"][0] == pytest.approx(float(F.cross_entropy(logits, y, reduction="sum")), 1e-4)

    def test_a_client_with_a_model_of_its_own_is_asked_about_that(self):
        data = held([1.0, -1.0], [0, 1])
        of_received, _ = run_program(MeasureAccuracy(LINEAR), Task({"global": line(-1.0)}), data, {})
        of_own, _ = run_program(MeasureAccuracy(LINEAR), Task({"global": line(-1.0)}), data, {"model": line(1.0)})
        assert of_received.metrics["accuracy"] == (0.0, 2.0)
        assert of_own.metrics["accuracy"] == (2.0, 2.0)


class TestCoefficients:
    def some(self, clients=5, seed=0):
        g = np.random.default_rng(seed)
        table = metrics(*(g.random(clients) for _ in range(4)))
        models = [MLP.init(k) for k in range(clients)]
        share = Samples(torch.randn(30, 6, generator=torch.Generator().manual_seed(1)), torch.arange(30) % 4)
        return table, models, share

    def learned(self, table, models, share, **kw):
        stacked = torch.stack([flatten_params(m) for m in models])
        return Coefficients(MLP, share, **kw).learn(table, stacked, models[0], ServerState(0, {"global": models[0]}))

    def test_the_same_as_through_every_model_with_torchs_adam(self):
        table, models, share = self.some()
        theta = torch.zeros(4, requires_grad=True)
        adam = torch.optim.Adam([theta], lr=0.1, eps=1e-4)
        for _ in range(10):
            weights = torch.from_numpy(table).float() @ theta.softmax(-1)
            mixed = {k: sum(w * m[k] for w, m in zip(weights, models, strict=True)) for k in models[0]}
            adam.zero_grad()
            F.cross_entropy(MLP.predict(mixed, share.x), share.y).backward()
            adam.step()
        assert self.learned(table, models, share) == pytest.approx(theta.softmax(-1).detach().numpy(), abs=1e-5)

    def test_they_are_on_the_simplex_and_the_loss_is_not_above_that_of_the_start(self):
        for seed in range(5):
            table, models, share = self.some(seed=seed)
            a = self.learned(table, models, share)
            assert a.sum() == pytest.approx(1)
            assert (a > 0).all()

            def loss(a, table=table, models=models, share=share):
                mean = tree.weighted_mean(models, (table @ a).tolist())
                return float(F.cross_entropy(MLP.predict(mean, share.x), share.y))

            assert loss(a) <= loss(np.full(4, 0.25)) + 1e-6

    def test_steps_that_lead_up_are_not_taken(self):
        """With steps as long as a thousand the softmax is a corner at once, here a worse one than the centre: one model
        is right and another wrong on every row, and only in the corner of the first metric do both count alike."""
        table = np.array([[0.5, 0.9, 0.9, 0.9], [0.5, 0.1, 0.1, 0.1]])
        share = rows([1.0, -1.0], [0, 1])
        stacked = torch.stack([flatten_params(line(-40.0)), flatten_params(line(50.0))])
        state = ServerState(0, {"global": line(0.0)})
        found = Coefficients(LINEAR, share, steps=2, lr=1000.0).learn(table, stacked, line(0.0), state)

        def loss(a):
            return float(F.cross_entropy(LINEAR.predict(line(float((table @ a) @ [-40.0, 50.0])), share.x), share.y))

        assert loss(found) <= loss(np.full(4, 0.25)) + 1e-6

    @pytest.mark.parametrize("steps", [10, 200])
    def test_equal_models_leave_them_equal(self, steps):
        table, models, share = self.some()
        assert self.learned(table, [models[0]] * 5, share, steps=steps) == pytest.approx([0.25] * 4, abs=1e-3)

    def test_without_steps_or_rows_they_are_exactly_equal(self):
        table, models, share = self.some()
        assert self.learned(table, models, share, steps=0).tolist() == [0.25] * 4
        assert self.learned(table, models, None).tolist() == [0.25] * 4

    @pytest.mark.parametrize(("key", "value"), [("steps", -1), ("lr", 0.0)])
    def test_wrong_values_are_refused(self, key, value):
        with pytest.raises(UserError, match=f"learn.{key} is {value}"):
            build("apcsma", setting(options={"learn": {key: value}}))


def reports(models, sizes, accuracies, losses):
    return {
        f"c{i}": Report(
            {"model": m}, {"accuracy": (a * n, n), "loss_after": (x * n, n), "loss": (x * n, n)}, {"train": n}
        )
        for i, (m, n, a, x) in enumerate(zip(models, sizes, accuracies, losses, strict=True))
    }


def federate(by, steps=0):
    program = MeasuredTraining(LINEAR)
    return AggregateByContribution(
        program,
        one_model_for,
        LearningRate(0.1, 10),
        trainable=LINEAR.trainable,
        coefficients=Coefficients(LINEAR, steps=steps),
        weight_by=by,
    )


class TestAggregation:
    STATE = ServerState(0, {"global": line(1.0)}, roster=("c0", "c1"), cohort=("c0", "c1"))

    def test_contributions_weigh_by_hand(self):
        """Rows 1/4 and 3/4; rounds alike; accuracies alike; losses of 1 and 3: 2 and 0.415 of 2.415. A quarter each:
        (0.25 + 0.5 + 0.5 + 0.828) / 4 = 0.5195 for the first. Slopes 0 and 1: 0.4805."""
        told = reports([line(0.0), line(1.0)], [10, 30], [0.5, 0.5], [1.0, 3.0])
        after = federate("contribution").fold(self.STATE, told, 0)
        assert float(after.models["global"]["head.weight"][0]) == pytest.approx(0.4805, abs=1e-4)
        assert after.figures["train.coefficient_num"] == 0.25
        assert ClientTable.load(after, "train")["count"].tolist() == [1, 1]

    def test_directions_count_too(self):
        """The linear network is all head and has no base: five columns. The head's cosines with the slope of 1 are 1
        for slope 2 and 0 for slope 0, whose log norm is (0, 1). Rows 1/4 and 3/4, losses of 3 and 1."""
        told = reports([line(2.0), line(0.0)], [10, 30], [0.5, 0.5], [3.0, 1.0])
        after = federate("cosine").fold(self.STATE, told, 0)
        first = (0.25 + 0.5 + 0.5 + 0.415 / 2.415 + 0.0) / 5
        assert [k for k in after.figures if "coefficient" in k][-2:] == [
            "train.coefficient_loss",
            "train.coefficient_head",
        ]
        assert float(after.models["global"]["head.weight"][0]) == pytest.approx(2 * first, abs=1e-3)

    def test_by_rows_it_is_fedavg(self):
        told = reports([line(0.0), line(1.0)], [10, 30], [0.5, 0.5], [1.0, 3.0])
        after = federate("size").fold(self.STATE, told, 0)
        assert float(after.models["global"]["head.weight"][0]) == pytest.approx(0.75)
        assert len(ClientTable.load(after, "train")) == 2  # kept for the selection all the same

    @pytest.mark.parametrize("by", ["contribution", "cosine"])
    def test_equal_models_give_the_model_and_a_single_one_is_taken_as_it_is(self, by):
        alike = reports([line(2.0)] * 3, [1, 2, 3], [0.1, 0.9, 0.0], [1.0, 3.0, 0.0])
        assert tree.max_abs_difference(federate(by).fold(self.STATE, alike, 0).models["global"], line(2.0)) < 1e-6
        alone = reports([line(5.0)], [7], [0.0], [0.0])
        assert tree.max_abs_difference(federate(by).fold(self.STATE, alone, 0).models["global"], line(5.0)) == 0

    def test_without_reports_or_rows_nothing_changes(self):
        for told in ({}, reports([line(9.0)], [0], [0.0], [0.0])):
            after = federate("cosine").fold(self.STATE, told, 0)
            assert tree.max_abs_difference(after.models["global"], line(1.0)) == 0

    def test_each_model_is_weighed_among_its_members(self):
        """Two groups of one: each takes its member's model."""
        member = {"c0": torch.tensor([1.0, 0.0]), "c1": torch.tensor([0.0, 1.0])}
        state = replace(self.STATE, models={"a": line(0.0), "b": line(0.0)}, membership=member)
        told = reports([line(3.0), line(4.0)], [10, 30], [0.5, 0.5], [1.0, 3.0])
        after = federate("contribution").fold(state, told, 0)
        assert tree.max_abs_difference(after.models, {"a": line(3.0), "b": line(4.0)}) == 0
        assert "train b.coefficient_num" in after.figures


class TestSelection:
    def state(self, sizes=(10, 30, 20), counts=(1, 1, 1), roster=("c0", "c1", "c2")):
        table = ClientTable.from_rows(
            {
                f"c{i}": {
                    "size": torch.tensor(n),
                    "count": torch.tensor(float(k)),
                    "accuracy": torch.tensor(0.5),
                    "loss": torch.tensor(1.0),
                    "model": flatten_params(line(float(i))),
                }
                for i, (n, k) in enumerate(zip(sizes, counts, strict=True))
            }
        )
        return ServerState(1, {"global": line(0.0)}, roster=roster, memory={"train": table.to_tree()})

    def chosen(self, state, size=2, **kw):
        return (
            SelectByContribution(Coefficients(LINEAR, steps=0), **kw)
            .fold(replace(state, cohort_size=size), {}, 0)
            .cohort
        )

    def test_the_largest_contributions_take_part(self):
        assert self.chosen(self.state()) == ("c1", "c2")

    def test_who_took_part_often_gives_way(self):
        """c1's 30 rows of 60 are a quarter more than c0's 10; rounds of 1, 30 and 1 are 5, 0.09 and 5 bits, so that c1
        has a hundredth of that column and the others half."""
        assert self.chosen(self.state(counts=(1, 30, 1)), size=1) == ("c2",)

    def test_of_equals_the_first(self):
        assert self.chosen(self.state(sizes=(10, 10, 10)), size=2) == ("c0", "c1")

    def test_newcomers_take_part_beside_the_others(self):
        assert self.chosen(self.state(roster=("c0", "c1", "c2", "c9"))) == ("c1", "c2", "c9")

    def test_who_left_or_has_no_rows_is_not_asked(self):
        assert self.chosen(self.state(roster=("c0", "c2"))) == ("c0", "c2")
        assert self.chosen(self.state(sizes=(0, 30, 20)), size=3) == ("c1", "c2")

    def test_at_first_everybody_takes_part(self):
        assert self.chosen(ServerState(0, {"global": line(0.0)}, roster=("b", "a"))) == ("b", "a")

    def test_relabelling_relabels(self):
        sizes = {"c0": 10, "c1": 30, "c2": 20}
        for order in (("c0", "c1", "c2"), ("c2", "c0", "c1"), ("c1", "c2", "c0")):
            found = self.chosen(self.state(sizes=[sizes[c] for c in order]), size=1)
            assert order[int(found[0][1])] == "c1"


def test_exactly_as_many_as_are_asked_for_and_counts_add_up(tiny):
    result, _, _ = played(tiny, rounds=6, select={"start": "cold"})
    assert [r.cohort for r in result.rounds] == [2] * 6
    assert float(ClientTable.load(result.state, "train")["count"].sum()) == 12


def test_a_warm_start_hears_everybody_once(tiny):
    result, _, _ = played(tiny, rounds=3)
    assert [r.cohort for r in result.rounds] == [6, 2, 2]
    assert float(ClientTable.load(result.state, "train")["count"].sum()) == 10


def test_cold_clients_are_represented_by_the_first_model(tiny):
    """Coefficients of the first round are learned on equal models: they stay equal."""
    result, _, _ = played(tiny, rounds=2, select={"start": "cold"})
    first = [result.rounds[0].metrics[f"select.coefficient_{k}"] for k in ("num", "epoch", "acc", "loss")]
    assert first == pytest.approx([0.25] * 4, abs=1e-3)
    later = [result.rounds[1].metrics[f"select.coefficient_{k}"] for k in ("num", "epoch", "acc", "loss")]
    assert later != pytest.approx([0.25] * 4, abs=1e-3)


def test_fresh_metrics_are_those_of_the_models_that_clients_have_now(tiny):
    """Everybody is asked in every round but the first, in which all train anyway; nobody is sent a model for it."""
    result, _, _ = played(tiny, rounds=3, select={"metrics": "fresh"})
    asked = [p for p in result.ledger.entries if p.stage == "measure"]
    assert [len(p.clients) for p in asked] == [6, 6]
    whole = min(int(p.bytes_down.min()) for p in result.ledger.entries if p.stage == "update")
    assert all(int(p.bytes_down.max()) < 0.2 * whole for p in asked)
    last, _, _ = played(tiny, rounds=3)
    assert [p for p in last.ledger.entries if p.stage == "measure"] == []


def test_clients_go_on_from_their_own_models(tiny):
    """What trains in the second round starts from what Eq. 16 left with the client."""
    result, fleet, method = played(tiny, rounds=1)
    before = {c: fleet.private[c]["model"] for c in tiny}
    seen = {}

    class Watched(PlainFleet):
        def execute_one(self, program, client, task):
            if program.name == "train":
                seen[client] = tree.max_abs_difference(
                    program.begin(task, self.private[client])["params"], before[client]
                )
            return super().execute_one(program, client, task)

    engine.run(
        method, Watched(tiny, dict(fleet.private)), rounds=2, seed=0, state=result.state, earlier_rounds=result.rounds
    )
    assert len(seen) == 2
    assert all(gap == 0 for gap in seen.values())


def test_without_kappa_it_is_the_method_without_the_update(tiny):
    whole, _, _ = played(tiny, update={"kappa": 0.0})
    cosine, _, _ = played(tiny, components={"conditional_update": False})
    assert tree.max_abs_difference(whole.state.models, cosine.state.models) == 0
    assert whole.accuracy == cosine.accuracy


def test_by_chance_and_by_rows_it_is_fedavg(tiny):
    options = {"selection": "random", "aggregation": "size", "conditional_update": False}
    ours, _, _ = played(tiny, components=options)
    fedavg = engine.run(build("fedavg", setting()), PlainFleet(tiny), rounds=6, seed=0, central_samples=tiny.central)
    assert tree.max_abs_difference(ours.state.models, fedavg.state.models) == 0


def test_the_model_that_everybody_was_sent_is_not_sent_again_to_train(tiny):
    result, _, _ = played(tiny, rounds=2)
    pages = [p for p in result.ledger.entries if p.round == 2]
    sent = {p.stage: int(p.bytes_down.max()) for p in pages}
    assert sent["train"] < 0.2 * sent["update"]
    plain, _, _ = played(tiny, rounds=2, components={"conditional_update": False})
    assert min(int(p.bytes_down.min()) for p in plain.ledger.entries if p.stage == "train") > 0.9 * sent["update"]


def test_the_result_says_on_whose_rows_coefficients_were_learned(tiny):
    assert played(tiny, rounds=1)[2].notes == ("coefficients are learned on 20 public rows",)
    assert "equal" in played(tiny, rounds=1, public=False)[2].notes[0]
    assert "equal" in played(tiny, rounds=1, share={"rows_of": "nobody"})[2].notes[0]
    result, _, method = played(tiny, rounds=1, public=False, share={"rows_of": "clients", "rows": 2})
    said = "up to 2 labelled rows of each of the first clients go to the server, to learn coefficients on"
    assert method.notes == (said,)
    assert next(p.stage for p in result.ledger.entries) == "share"


def test_settings_without_effect_are_refused():
    fedavg = {"components": {"selection": "random", "aggregation": "size"}}
    for options, why in (
        ({"share": {"rows": 3}}, "has no effect unless share.rows_of is clients"),
        ({"train": {"weighting": "uniform"}}, "not known to method apcsma"),
        ({"select": {"by": "size"}}, "not known to method apcsma"),
        ({"share": {"rows_of": "nobody"}, "learn": {"steps": 9}}, "has no effect with share.rows_of=nobody"),
        ({"share": {"rows_of": "clients"}, "learn": {"steps": 0}}, "has no effect unless learn.steps is above 0"),
        (fedavg | {"learn": {"steps": 9}}, "has no effect with components.selection=random"),
        (fedavg | {"share": {"rows_of": "clients"}}, "has no effect with components.selection=random"),
    ):
        with pytest.raises(UserError, match=why):
            build("apcsma", setting(options=options))


class TestWhoSaysNothing:
    """Clients without rows, silent ones, diverged ones."""

    def state(self, losses, sizes, roster=None):
        of = {
            f"c{i}": {
                "size": torch.tensor(n),
                "count": torch.tensor(3.0),
                "accuracy": torch.tensor(0.9 if n else 0.0),
                "loss": torch.tensor(loss),
                "model": flatten_params(line(float(i))),
                "told": torch.tensor(0),
            }
            for i, (loss, n) in enumerate(zip(losses, sizes, strict=True))
        }
        roster = roster or tuple(of)
        return ServerState(
            1, {"global": line(0.0)}, roster=roster, memory={"train": ClientTable.from_rows(of).to_tree()}
        )

    def selected(self, state, size=2):
        share = rows([1.0, -1.0, 0.5], [0, 1, 0])
        return SelectByContribution(Coefficients(LINEAR, share)).fold(replace(state, cohort_size=size), {}, 0)

    @pytest.mark.parametrize(("loss", "size"), [(0.0, 0), (float("nan"), 50), (float("inf"), 50)])
    def test_without_rows_or_numbers_a_client_counts_nowhere(self, loss, size):
        """By Eq. 6 and 7 an accuracy of 0 would weigh most of all."""
        with_it = self.selected(self.state([0.3, 0.5, 0.4, loss], [10, 30, 20, size]))
        without = self.selected(self.state([0.3, 0.5, 0.4], [10, 30, 20]))
        assert with_it.figures == without.figures
        assert with_it.cohort == without.cohort

    def test_a_diverged_model_is_left_out_of_the_mean(self):
        state = ServerState(0, {"global": line(1.0)}, roster=("c0", "c1"), cohort=("c0", "c1"))
        told = reports([line(float("nan")), line(5.0)], [10, 30], [0.5, 0.5], [float("nan"), 3.0])
        after = federate("contribution").fold(state, told, 0)
        assert tree.max_abs_difference(after.models["global"], line(5.0)) == 0

    def test_where_all_diverge_the_error_is_that_of_any_method(self, tiny):
        for method in ("apcsma", "fedavg"):
            built = build(method, setting(lr=1e6, rounds=3))
            with pytest.raises(UserError, match=r"is no longer finite .* a smaller --lr"):
                engine.run(built, PlainFleet(tiny), rounds=3, seed=0)

    def test_a_silent_client_is_asked_again_within_the_cohort(self, tiny):
        class Deaf(PlainFleet):
            def execute(self, plan):
                return {c: r for c, r in super().execute(plan).items() if c != "c5" or plan.program.name != "train"}

        result, _, _ = played(tiny, rounds=4, fleet=Deaf)
        assert [r.cohort for r in result.rounds] == [6, 2, 2, 2]
        asked = [p.clients for p in result.ledger.entries if p.stage == "train"]
        assert all("c5" in clients for clients in asked)

    def test_several_silent_ones_take_turns(self):
        state = self.state([0.3, 0.5, 0.4], [10, 30, 20], roster=("c0", "c1", "c2", "x", "y"))
        once = ClientTable.from_rows({c: {"asked": torch.tensor(True)} for c in ("c0", "c1", "c2", "x", "y")}).to_tree()
        state = replace(state, memory={**state.memory, "select": once})
        found = [set(self.selected(replace(state, round=r)).cohort) & {"x", "y"} for r in (1, 2, 3)]
        assert found == [{"y"}, {"x"}, {"y"}]

    def test_an_own_model_without_numbers_is_not_kept(self):
        """Its largest logit would be that of class 0, which all rows here are of."""
        data = held([1.0, 2.0, 3.0], [0, 0, 0])
        task = Task({"global": line(-1.0)}, {"kappa": 0.2})
        report, private = run_program(ConditionalUpdate(LINEAR), task, data, {"model": line(float("nan"))})
        assert tree.max_abs_difference(private["model"], line(-1.0)) == 0
        assert report.metrics["kept"] == (0.0, 1.0)

    def test_without_rows_to_judge_by_nothing_is_said_of_it(self):
        data = {**held([1.0], [0]), "val": rows([], [])}
        report, private = run_program(
            ConditionalUpdate(LINEAR), Task({"global": line(-1.0)}, {"kappa": 0.2}), data, {"model": line(1.0)}
        )
        assert report.metrics["kept"] == (0.0, 0.0)
        assert tree.max_abs_difference(private["model"], line(-1.0)) == 0


def test_coefficients_of_networks_with_batch_norm():
    """Its statistics have no slopes; they are mixed all the same."""
    model = load_model("networks:SmallBatchNorm", (1, 6, 6), 4)
    models = [model.init(k) for k in range(3)]
    share = Samples(torch.randn(8, 1, 6, 6, generator=torch.Generator().manual_seed(0)), torch.arange(8) % 4)
    table = metrics([1, 2, 3], [1, 1, 2], [0.1, 0.5, 0.9], [3.0, 2.0, 1.0])
    stacked = torch.stack([flatten_params(m) for m in models])
    found = Coefficients(model, share).learn(table, stacked, models[0], ServerState(0, {"global": models[0]}))
    assert found.sum() == pytest.approx(1)
    assert found.max() > 0.26


def test_the_largest_coefficient_is_bounded_by_the_steps():
    """Ten steps of 0.1 move a logarithm by 1 at most: e / (e + 3 / e) = 0.711."""
    table, models, share = TestCoefficients().some()
    assert TestCoefficients().learned(table, models, share).max() < 0.72


def test_what_is_sensitive_stays_out_of_everything(tiny):
    """With training on rows of low sensitivity, no other row is sent, measured or counted."""
    options = {"train": {"rows": "low"}, "share": {"rows_of": "clients", "rows": 4}, "select": {"start": "cold"}}
    result, _, method = played(tiny, rounds=3, public=False, **options)
    used = {phase.split for program in method.programs.values() for phase in program.phases}
    assert used == {"train/low", "val/low"}
    given = ClientTable.load(result.state, "share")
    for client, row in zip(given.clients, given["rows"], strict=True):
        sent = row[4:].view(4, 6)[row[:4] > 0]
        low = tiny[client]["train/low"].x
        assert all(bool((low == x).all(1).any()) for x in sent)
    measured, trained = (ClientTable.load(result.state, slot) for slot in ("measure", "train"))
    sizes = dict(zip(measured.clients, measured["size"].tolist(), strict=True))
    assert all(sizes[c] == n for c, n in zip(trained.clients, trained["size"].tolist(), strict=True))


def test_a_newcomer_is_represented_by_the_model_that_it_was_measured_with():
    told = {c: {"size": torch.tensor(5), "accuracy": torch.tensor(0.5), "loss_after": torch.tensor(1.0)} for c in "ab"}
    stage = SelectByContribution(Coefficients(LINEAR, steps=0), start="cold")

    def at(round, model, clients):
        rows = {c: told[c] | {"told": torch.tensor(0 if c == "a" else 6)} for c in clients}
        state = ServerState(round, {"global": model}, roster=tuple(clients))
        return replace(state, memory={"measure": ClientTable.from_rows(rows).to_tree()})

    first = stage.fold(at(0, line(1.0), "a"), {}, 0)
    later = at(6, line(2.0), "ab")
    state = stage.fold(replace(later, memory={**first.memory, **later.memory}), {}, 0)
    assert ClientTable.load(state, "select")["model"].tolist() == [flatten_params(line(x)).tolist() for x in (1.0, 2.0)]


def test_a_survey_counts_only_while_it_is_newer_than_the_training():
    """Round 1: everybody trains. Round 2: a answers the survey and trains after it; round 3: a is silent."""
    row = {"size": torch.tensor(5), "count": torch.tensor(1.0), "model": flatten_params(line(1.0))}
    trained = {
        c: row | {"accuracy": torch.tensor(0.9), "loss": torch.tensor(0.1), "told": torch.tensor(t)}
        for c, t in (("a", 2), ("b", 0))
    }
    survey = {
        c: {"accuracy": torch.tensor(0.5), "loss_after": torch.tensor(1.0), "told": torch.tensor(t)}
        for c, t in (("a", 2), ("b", 3))
    }
    memory = {"train": ClientTable.from_rows(trained).to_tree(), "measure": ClientTable.from_rows(survey).to_tree()}
    state = ServerState(3, {"global": line(0.0)}, roster=("a", "b"), memory=memory)
    known = SelectByContribution(Coefficients(LINEAR, steps=0), metrics="fresh")._client_metrics(state)
    assert known["accuracy"].tolist() == pytest.approx([0.9, 0.5])
    assert known["loss"].tolist() == pytest.approx([0.1, 1.0])
