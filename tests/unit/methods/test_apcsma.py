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


def same_in_all_splits(xs, ys):
    return dict.fromkeys(("train", "val", "test"), rows(xs, ys))


def setting(public_samples=None, **kw):
    return Setting(
        MLP, **{"rounds": 6, "cohort_size": 2, "epochs": 1, "lr": 0.1, "public_samples": public_samples} | kw
    )


def run_apcsma(tiny, rounds=6, fleet=PlainFleet, has_public_samples=True, **options):
    public_samples = Samples(tiny.central.x[:20], tiny.central.y[:20]) if has_public_samples else None
    method = build("apcsma", setting(public_samples, rounds=rounds, options=options))
    clients, ledger = fleet(tiny), Ledger()
    result = engine.run(method, clients, rounds=rounds, seed=0, central_samples=tiny.central, ledger=ledger)
    return result, clients, method


class TestConditionalUpdate:
    """The samples are x = 1 of class 0 and x = -1 of class 1. A model with slope 1 has two hits, with slope -1 none,
    and with slope 0 one, because equal logits predict class 0.
    """

    DATA = same_in_all_splits([1.0, -1.0], [0, 1])

    def update(self, received, own, kappa=0.2, validation_split="val"):
        private = {} if own is None else {"model": own}
        program = ConditionalUpdate(LINEAR, validation_split)
        return run_program(program, Task({"global": received}, {"kappa": kappa}), self.DATA, private)

    def test_a_tie_gives_exactly_the_global_model(self):
        report, private = self.update(line(1.0), line(3.0))
        assert tree.max_abs_difference(private["model"], line(1.0)) == 0
        assert report.metrics["kept"] == (0.0, 1.0)

    def test_a_better_personal_model_is_mixed_in(self):
        """0.8 * (-1) + 0.2 * 1 = -0.6"""
        report, private = self.update(line(-1.0, 2.0), line(1.0))
        assert tree.max_abs_difference(private["model"], line(-0.6, 1.6)) < 1e-6
        assert report.metrics["kept"] == (1.0, 1.0)

    def test_a_worse_one_is_not(self):
        _, private = self.update(line(1.0), line(-1.0))
        assert tree.max_abs_difference(private["model"], line(1.0)) == 0

    def test_a_client_without_one_takes_the_global_one(self):
        report, private = self.update(line(-1.0), None)
        assert tree.max_abs_difference(private["model"], line(-1.0)) == 0
        assert not report.tensors  # no part of the model is reported

    def test_without_kappa_it_is_the_global_one(self):
        _, private = self.update(line(-1.0), line(1.0), kappa=0.0)
        assert tree.max_abs_difference(private["model"], line(-1.0)) == 0

    def test_models_are_compared_on_the_chosen_split(self):
        """On validation rows the own model is better, on training rows it is not."""
        data = {"train": rows([1.0, -1.0], [1, 0]), "val": rows([1.0, -1.0], [0, 1]), "test": rows([1.0], [0])}
        for validation_split, slope in (("val", -0.6), ("train", -1.0)):
            task = Task({"global": line(-1.0)}, {"kappa": 0.2})
            _, private = run_program(ConditionalUpdate(LINEAR, validation_split), task, data, {"model": line(1.0)})
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
    def test_training_is_that_of_fedavg_and_reports_its_metrics(self, tiny):
        task = Task({"global": MLP.init(0)}, {"lr": 0.1}, seed=5)
        plain, _ = run_program(LocalTraining(MLP), task, tiny["c3"], {})
        measured, _ = run_program(MeasuredTraining(MLP), task, tiny["c3"], {})
        assert tree.max_abs_difference(plain.tensors, measured.tensors) == 0
        x, y = tiny["c3"]["train"]
        logits = MLP.predict(measured.tensors["model"], x)
        assert measured.metrics["accuracy"] == (float((logits.argmax(-1) == y).sum()), len(y))
        assert measured.metrics["loss_after"][0] == pytest.approx(
            float(F.cross_entropy(logits, y, reduction="sum")), 1e-4
        )

    def test_a_client_with_a_personal_model_measures_that(self):
        data = same_in_all_splits([1.0, -1.0], [0, 1])
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
        is right and another wrong on every sample, and only in the corner of the first metric do both count equally.
        """
        table = np.array([[0.5, 0.9, 0.9, 0.9], [0.5, 0.1, 0.1, 0.1]])
        share = rows([1.0, -1.0], [0, 1])
        stacked = torch.stack([flatten_params(line(-40.0)), flatten_params(line(50.0))])
        state = ServerState(0, {"global": line(0.0)})
        coefficients = Coefficients(LINEAR, share, steps=2, lr=1000.0).learn(table, stacked, line(0.0), state)

        def loss(a):
            return float(F.cross_entropy(LINEAR.predict(line(float((table @ a) @ [-40.0, 50.0])), share.x), share.y))

        assert loss(coefficients) <= loss(np.full(4, 0.25)) + 1e-6

    @pytest.mark.parametrize("steps", [10, 200])
    def test_equal_models_leave_them_equal(self, steps):
        table, models, share = self.some()
        assert self.learned(table, [models[0]] * 5, share, steps=steps) == pytest.approx([0.25] * 4, abs=1e-3)

    def test_without_steps_or_samples_they_are_exactly_equal(self):
        table, models, share = self.some()
        assert self.learned(table, models, share, steps=0).tolist() == [0.25] * 4
        assert self.learned(table, models, None).tolist() == [0.25] * 4

    @pytest.mark.parametrize(("key", "value"), [("steps", -1), ("lr", 0.0)])
    def test_wrong_values_are_refused(self, key, value):
        with pytest.raises(UserError, match=f"coefficients.{key} is {value}"):
            build("apcsma", setting(options={"coefficients": {key: value}}))


def reports(models, sizes, accuracies, losses):
    return {
        f"c{i}": Report(
            {"model": m}, {"accuracy": (a * n, n), "loss_after": (x * n, n), "loss": (x * n, n)}, {"train": n}
        )
        for i, (m, n, a, x) in enumerate(zip(models, sizes, accuracies, losses, strict=True))
    }


def aggregation(weight_by, steps=0):
    program = MeasuredTraining(LINEAR)
    return AggregateByContribution(
        program,
        one_model_for,
        LearningRate(0.1, 10),
        trainable=LINEAR.trainable,
        coefficients=Coefficients(LINEAR, steps=steps),
        weight_by=weight_by,
    )


class TestAggregation:
    STATE = ServerState(0, {"global": line(1.0)}, roster=("c0", "c1"), cohort=("c0", "c1"))

    def test_weights_by_contribution_by_hand(self):
        """The shares of samples are 1/4 and 3/4, rounds and accuracies are equal, and losses of 1 and 3 give 2 and
        0.415 of 2.415. With a quarter each the first client has (0.25 + 0.5 + 0.5 + 0.828) / 4 = 0.5195. Slopes 0 and 1
        give 0.4805.
        """
        client_reports = reports([line(0.0), line(1.0)], [10, 30], [0.5, 0.5], [1.0, 3.0])
        after = aggregation("contribution").fold(self.STATE, client_reports, 0)
        assert float(after.models["global"]["head.weight"][0]) == pytest.approx(0.4805, abs=1e-4)
        assert after.round_metrics["train.coefficient_num"] == 0.25
        assert ClientTable.load(after, "train")["count"].tolist() == [1, 1]

    def test_directions_count_too(self):
        """The linear network has a head and no base, so there are five columns. The head's cosines with the slope of 1
        are 1 for slope 2 and 0 for slope 0, whose log norm is (0, 1). Samples are 1/4 and 3/4, losses are 3 and 1.
        """
        client_reports = reports([line(2.0), line(0.0)], [10, 30], [0.5, 0.5], [3.0, 1.0])
        after = aggregation("cosine").fold(self.STATE, client_reports, 0)
        first = (0.25 + 0.5 + 0.5 + 0.415 / 2.415 + 0.0) / 5
        assert [k for k in after.round_metrics if "coefficient" in k][-2:] == [
            "train.coefficient_loss",
            "train.coefficient_head",
        ]
        assert float(after.models["global"]["head.weight"][0]) == pytest.approx(2 * first, abs=1e-3)

    def test_weighted_by_samples_it_is_fedavg(self):
        client_reports = reports([line(0.0), line(1.0)], [10, 30], [0.5, 0.5], [1.0, 3.0])
        after = aggregation("size").fold(self.STATE, client_reports, 0)
        assert float(after.models["global"]["head.weight"][0]) == pytest.approx(0.75)
        assert len(ClientTable.load(after, "train")) == 2  # kept for the selection in any case

    @pytest.mark.parametrize("weight_by", ["contribution", "cosine"])
    def test_equal_models_give_the_model_and_a_single_one_is_taken_as_it_is(self, weight_by):
        alike = reports([line(2.0)] * 3, [1, 2, 3], [0.1, 0.9, 0.0], [1.0, 3.0, 0.0])
        assert (
            tree.max_abs_difference(aggregation(weight_by).fold(self.STATE, alike, 0).models["global"], line(2.0))
            < 1e-6
        )
        alone = reports([line(5.0)], [7], [0.0], [0.0])
        assert (
            tree.max_abs_difference(aggregation(weight_by).fold(self.STATE, alone, 0).models["global"], line(5.0)) == 0
        )

    def test_without_reports_or_samples_nothing_changes(self):
        for client_reports in ({}, reports([line(9.0)], [0], [0.0], [0.0])):
            after = aggregation("cosine").fold(self.STATE, client_reports, 0)
            assert tree.max_abs_difference(after.models["global"], line(1.0)) == 0

    def test_each_model_is_weighted_among_its_members(self):
        """There are two clusters of one client. Each takes the model of its member."""
        member = {"c0": torch.tensor([1.0, 0.0]), "c1": torch.tensor([0.0, 1.0])}
        state = replace(self.STATE, models={"a": line(0.0), "b": line(0.0)}, membership=member)
        client_reports = reports([line(3.0), line(4.0)], [10, 30], [0.5, 0.5], [1.0, 3.0])
        after = aggregation("contribution").fold(state, client_reports, 0)
        assert tree.max_abs_difference(after.models, {"a": line(3.0), "b": line(4.0)}) == 0
        assert "train b.coefficient_num" in after.round_metrics


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

    def test_the_largest_contributions_are_selected(self):
        assert self.chosen(self.state()) == ("c1", "c2")

    def test_a_client_that_trained_often_contributes_less(self):
        """The 30 of 60 samples of c1 are a quarter more than the 10 of c0. Rounds of 1, 30 and 1 are 5, 0.09 and 5
        bits, so c1 has a hundredth of that column and the others have half of it each.
        """
        assert self.chosen(self.state(counts=(1, 30, 1)), size=1) == ("c2",)

    def test_of_equal_contributions_the_first_client(self):
        assert self.chosen(self.state(sizes=(10, 10, 10)), size=2) == ("c0", "c1")

    def test_late_joining_clients_are_selected_beside_the_others(self):
        assert self.chosen(self.state(roster=("c0", "c1", "c2", "c9"))) == ("c1", "c2", "c9")

    def test_absent_clients_and_clients_without_samples_are_not_selected(self):
        assert self.chosen(self.state(roster=("c0", "c2"))) == ("c0", "c2")
        assert self.chosen(self.state(sizes=(0, 30, 20)), size=3) == ("c1", "c2")

    def test_the_first_cohort_has_all_clients(self):
        assert self.chosen(ServerState(0, {"global": line(0.0)}, roster=("b", "a"))) == ("b", "a")

    def test_relabelling_relabels(self):
        sizes = {"c0": 10, "c1": 30, "c2": 20}
        for order in (("c0", "c1", "c2"), ("c2", "c0", "c1"), ("c1", "c2", "c0")):
            cohort = self.chosen(self.state(sizes=[sizes[c] for c in order]), size=1)
            assert order[int(cohort[0][1])] == "c1"


def test_cohorts_have_the_given_size_and_counts_add_up(tiny):
    result, _, _ = run_apcsma(tiny, rounds=6, select={"start": "cold"})
    assert [r.cohort_size for r in result.rounds] == [2] * 6
    assert float(ClientTable.load(result.state, "train")["count"].sum()) == 12


def test_a_warm_start_has_all_clients_once(tiny):
    result, _, _ = run_apcsma(tiny, rounds=3)
    assert [r.cohort_size for r in result.rounds] == [6, 2, 2]
    assert float(ClientTable.load(result.state, "train")["count"].sum()) == 10


def test_cold_clients_are_represented_by_the_first_model(tiny):
    """Coefficients of the first round are learned on equal models: they stay equal."""
    result, _, _ = run_apcsma(tiny, rounds=2, select={"start": "cold"})
    first = [result.rounds[0].metrics[f"select.coefficient_{k}"] for k in ("num", "epoch", "acc", "loss")]
    assert first == pytest.approx([0.25] * 4, abs=1e-3)
    later = [result.rounds[1].metrics[f"select.coefficient_{k}"] for k in ("num", "epoch", "acc", "loss")]
    assert later != pytest.approx([0.25] * 4, abs=1e-3)


def test_fresh_metrics_are_those_of_the_models_that_clients_have_now(tiny):
    """All clients are queried in every round but the first, in which all train anyway. No model is sent for it."""
    result, _, _ = run_apcsma(tiny, rounds=3, select={"metrics": "fresh"})
    measurements = [p for p in result.ledger.entries if p.stage == "measure"]
    assert [len(p.clients) for p in measurements] == [6, 6]
    model_bytes = min(int(p.bytes_down.min()) for p in result.ledger.entries if p.stage == "update")
    assert all(int(p.bytes_down.max()) < 0.2 * model_bytes for p in measurements)
    last, _, _ = run_apcsma(tiny, rounds=3)
    assert [p for p in last.ledger.entries if p.stage == "measure"] == []


def test_clients_train_from_their_personal_models(tiny):
    """Training in the second round starts from the model that Eq. 16 left with the client."""
    result, fleet, method = run_apcsma(tiny, rounds=1)
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
    without_kappa, _, _ = run_apcsma(tiny, update={"kappa": 0.0})
    cosine, _, _ = run_apcsma(tiny, components={"conditional_update": False})
    assert tree.max_abs_difference(without_kappa.state.models, cosine.state.models) == 0
    assert without_kappa.accuracy == cosine.accuracy


def test_random_and_weighted_by_samples_it_is_fedavg(tiny):
    options = {"selection": "random", "aggregation": "size", "conditional_update": False}
    ours, _, _ = run_apcsma(tiny, components=options)
    fedavg = engine.run(build("fedavg", setting()), PlainFleet(tiny), rounds=6, seed=0, central_samples=tiny.central)
    assert tree.max_abs_difference(ours.state.models, fedavg.state.models) == 0


def test_a_cached_model_is_not_sent_again_for_training(tiny):
    result, _, _ = run_apcsma(tiny, rounds=2)
    entries = [p for p in result.ledger.entries if p.round == 2]
    sent = {p.stage: int(p.bytes_down.max()) for p in entries}
    assert sent["train"] < 0.2 * sent["update"]
    plain, _, _ = run_apcsma(tiny, rounds=2, components={"conditional_update": False})
    assert min(int(p.bytes_down.min()) for p in plain.ledger.entries if p.stage == "train") > 0.9 * sent["update"]


def test_the_result_states_the_source_of_the_samples(tiny):
    assert run_apcsma(tiny, rounds=1)[2].notes == ("coefficients are learned on 20 public samples",)
    assert "equal" in run_apcsma(tiny, rounds=1, has_public_samples=False)[2].notes[0]
    assert "equal" in run_apcsma(tiny, rounds=1, share={"source": "none"})[2].notes[0]
    result, _, method = run_apcsma(
        tiny, rounds=1, has_public_samples=False, share={"source": "clients", "num_samples": 2}
    )
    note = (
        "up to 2 labelled samples of each client of the first round go to the server, which learns coefficients on them"
    )
    assert method.notes == (note,)
    assert next(p.stage for p in result.ledger.entries) == "share"


def test_settings_without_effect_are_refused():
    fedavg = {"components": {"selection": "random", "aggregation": "size"}}
    for options, reason in (
        ({"share": {"num_samples": 3}}, "has no effect unless share.source is clients"),
        ({"train": {"weighting": "uniform"}}, "not known to method apcsma"),
        ({"select": {"probability": "size"}}, "not known to method apcsma"),
        ({"share": {"source": "none"}, "coefficients": {"steps": 9}}, "has no effect with share.source=none"),
        (
            {"share": {"source": "clients"}, "coefficients": {"steps": 0}},
            "has no effect unless coefficients.steps is above 0",
        ),
        (fedavg | {"coefficients": {"steps": 9}}, "has no effect with components.selection=random"),
        (fedavg | {"share": {"source": "clients"}}, "has no effect with components.selection=random"),
    ):
        with pytest.raises(UserError, match=reason):
            build("apcsma", setting(options=options))


class TestMissingReports:
    """Clients without samples, clients that did not respond, and diverged clients."""

    def state(self, losses, sizes, roster=None):
        rows_by_client = {
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
        roster = roster or tuple(rows_by_client)
        return ServerState(
            1, {"global": line(0.0)}, roster=roster, memory={"train": ClientTable.from_rows(rows_by_client).to_tree()}
        )

    def selected(self, state, size=2):
        share = rows([1.0, -1.0, 0.5], [0, 1, 0])
        return SelectByContribution(Coefficients(LINEAR, share)).fold(replace(state, cohort_size=size), {}, 0)

    @pytest.mark.parametrize(("loss", "size"), [(0.0, 0), (float("nan"), 50), (float("inf"), 50)])
    def test_a_client_without_samples_or_finite_loss_does_not_count(self, loss, size):
        """By Eq. 6 and 7 an accuracy of 0 would weigh most of all."""
        with_it = self.selected(self.state([0.3, 0.5, 0.4, loss], [10, 30, 20, size]))
        without = self.selected(self.state([0.3, 0.5, 0.4], [10, 30, 20]))
        assert with_it.round_metrics == without.round_metrics
        assert with_it.cohort == without.cohort

    def test_a_diverged_model_is_left_out_of_the_mean(self):
        state = ServerState(0, {"global": line(1.0)}, roster=("c0", "c1"), cohort=("c0", "c1"))
        client_reports = reports([line(float("nan")), line(5.0)], [10, 30], [0.5, 0.5], [float("nan"), 3.0])
        after = aggregation("contribution").fold(state, client_reports, 0)
        assert tree.max_abs_difference(after.models["global"], line(5.0)) == 0

    def test_if_all_diverge_the_error_is_that_of_any_method(self, tiny):
        for method in ("apcsma", "fedavg"):
            built = build(method, setting(lr=1e30, rounds=3))
            with pytest.raises(UserError, match=r"are not finite; a smaller --lr"):
                engine.run(built, PlainFleet(tiny), rounds=3, seed=0)

    def test_a_client_that_did_not_respond_is_selected_again_within_the_cohort(self, tiny):
        class Deaf(PlainFleet):
            def execute(self, plan):
                return {c: r for c, r in super().execute(plan).items() if c != "c5" or plan.program.name != "train"}

        result, _, _ = run_apcsma(tiny, rounds=4, fleet=Deaf)
        assert [r.cohort_size for r in result.rounds] == [6, 2, 2, 2]
        trained = [p.clients for p in result.ledger.entries if p.stage == "train"]
        assert all("c5" in clients for clients in trained)

    def test_several_such_clients_take_turns(self):
        state = self.state([0.3, 0.5, 0.4], [10, 30, 20], roster=("c0", "c1", "c2", "x", "y"))
        once = ClientTable.from_rows({c: {"asked": torch.tensor(True)} for c in ("c0", "c1", "c2", "x", "y")}).to_tree()
        state = replace(state, memory={**state.memory, "select": once})
        late_clients = [set(self.selected(replace(state, round=r)).cohort) & {"x", "y"} for r in (1, 2, 3)]
        assert late_clients == [{"y"}, {"x"}, {"y"}]

    def test_a_personal_model_that_is_not_finite_is_not_kept(self):
        """Its largest logit would be that of class 0, which is the class of all samples here."""
        data = same_in_all_splits([1.0, 2.0, 3.0], [0, 0, 0])
        task = Task({"global": line(-1.0)}, {"kappa": 0.2})
        report, private = run_program(ConditionalUpdate(LINEAR), task, data, {"model": line(float("nan"))})
        assert tree.max_abs_difference(private["model"], line(-1.0)) == 0
        assert report.metrics["kept"] == (0.0, 1.0)

    def test_without_validation_samples_no_comparison_is_reported(self):
        data = {**same_in_all_splits([1.0], [0]), "val": rows([], [])}
        report, private = run_program(
            ConditionalUpdate(LINEAR), Task({"global": line(-1.0)}, {"kappa": 0.2}), data, {"model": line(1.0)}
        )
        assert report.metrics["kept"] == (0.0, 0.0)
        assert tree.max_abs_difference(private["model"], line(-1.0)) == 0


def test_coefficients_of_networks_with_batch_norm():
    """The statistics of batch norm have no gradients, but they are mixed as well."""
    model = load_model("networks:SmallBatchNorm", (1, 6, 6), 4)
    models = [model.init(k) for k in range(3)]
    share = Samples(torch.randn(8, 1, 6, 6, generator=torch.Generator().manual_seed(0)), torch.arange(8) % 4)
    table = metrics([1, 2, 3], [1, 1, 2], [0.1, 0.5, 0.9], [3.0, 2.0, 1.0])
    stacked = torch.stack([flatten_params(m) for m in models])
    coefficients = Coefficients(model, share).learn(table, stacked, models[0], ServerState(0, {"global": models[0]}))
    assert coefficients.sum() == pytest.approx(1)
    assert coefficients.max() > 0.26


def test_the_largest_coefficient_is_bounded_by_the_steps():
    """Ten steps of 0.1 move a logarithm by 1 at most: e / (e + 3 / e) = 0.711."""
    table, models, share = TestCoefficients().some()
    assert TestCoefficients().learned(table, models, share).max() < 0.72


def test_sensitive_samples_are_not_used(tiny):
    """With training on samples of low sensitivity, no other sample is sent, measured or counted."""
    options = {
        "train": {"sensitivity": "low"},
        "share": {"source": "clients", "num_samples": 4},
        "select": {"start": "cold"},
    }
    result, _, method = run_apcsma(tiny, rounds=3, has_public_samples=False, **options)
    used = {phase.split for program in method.programs.values() for phase in program.phases}
    assert used == {"train/low", "val/low"}
    shared = ClientTable.load(result.state, "share")
    for client, row in zip(shared.clients, shared["rows"], strict=True):
        sent = row[4:].view(4, 6)[row[:4] > 0]
        low = tiny[client]["train/low"].x
        assert all(bool((low == x).all(1).any()) for x in sent)
    measured, trained = (ClientTable.load(result.state, slot) for slot in ("measure", "train"))
    sizes = measured.to_dict("size")
    assert all(sizes[c] == n for c, n in zip(trained.clients, trained["size"].tolist(), strict=True))


def test_a_late_joining_client_is_represented_by_the_model_it_was_measured_with():
    client_metrics = {
        c: {"size": torch.tensor(5), "accuracy": torch.tensor(0.5), "loss_after": torch.tensor(1.0)} for c in "ab"
    }
    stage = SelectByContribution(Coefficients(LINEAR, steps=0), start="cold")

    def at(round_index, model, clients):
        rows = {c: client_metrics[c] | {"told": torch.tensor(0 if c == "a" else 6)} for c in clients}
        state = ServerState(round_index, {"global": model}, roster=tuple(clients))
        return replace(state, memory={"measure": ClientTable.from_rows(rows).to_tree()})

    first = stage.fold(at(0, line(1.0), "a"), {}, 0)
    later = at(6, line(2.0), "ab")
    state = stage.fold(replace(later, memory={**first.memory, **later.memory}), {}, 0)
    assert ClientTable.load(state, "select")["model"].tolist() == [flatten_params(line(x)).tolist() for x in (1.0, 2.0)]


def test_a_survey_counts_only_while_it_is_newer_than_the_training():
    """In round 1 all clients train. In round 2 client a responds to the survey and trains after it. In round 3 client a
    does not respond.
    """
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
    metrics_by_name = SelectByContribution(Coefficients(LINEAR, steps=0), metrics="fresh")._client_metrics(state)
    assert metrics_by_name["accuracy"].tolist() == pytest.approx([0.9, 0.5])
    assert metrics_by_name["loss"].tolist() == pytest.approx([0.1, 1.0])
