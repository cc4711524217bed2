"""APCSMA's steps, one by one."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from shoal import engine, tree
from shoal.client.measure import Measure, MeasuredTraining
from shoal.client.train import LocalTraining
from shoal.client.update import ConditionalUpdate
from shoal.cost.ledger import Ledger
from shoal.errors import UserError
from shoal.fleet.plain import PlainFleet, run_one
from shoal.methods import Setting, build
from shoal.methods.single import one_model_for
from shoal.models import load_model
from shoal.selectors.contribution import metrics
from shoal.stages.contribution import ByContribution, Coefficients, FederateByContribution, Update
from shoal.stages.represent import vector
from shoal.stages.train import Rate
from shoal.table import Table
from shoal.types import Examples, Report, ServerState, Task

LINEAR = load_model("linear", (1,), 2)
MLP = load_model("mlp", (6,), 4)


def line(slope, bias=0.0):
    return {"head.bias": torch.tensor([bias, -bias]), "head.weight": torch.tensor([[slope], [-slope]])}


def rows(xs, ys):
    return Examples(torch.tensor(xs).reshape(-1, 1), torch.tensor(ys))


def held(xs, ys):
    return dict.fromkeys(("train", "val", "test"), rows(xs, ys))


def setting(public=None, **kw):
    return Setting(MLP, **{"rounds": 6, "cohort": 2, "epochs": 1, "lr": 0.1, "public": public} | kw)


def played(tiny, rounds=6, fleet=PlainFleet, public=True, **options):
    given = Examples(tiny.central.x[:20], tiny.central.y[:20]) if public else None
    method = build("apcsma", setting(given, rounds=rounds, options=options))
    clients, ledger = fleet(tiny), Ledger()
    result = engine.run(method, clients, rounds=rounds, seed=0, central=tiny.central, ledger=ledger)
    return result, clients, method


class TestConditionalUpdate:
    """Rows x = 1 of class 0 and x = -1 of class 1: slope 1 has two hits, slope -1 none, slope 0 one (of equals class 0
    is taken)."""

    DATA = held([1.0, -1.0], [0, 1])

    def update(self, received, own, kappa=0.2, judge="val"):
        private = {} if own is None else {"model": own}
        program = ConditionalUpdate(LINEAR, judge)
        return run_one(program, Task({"global": received}, {"kappa": kappa}), self.DATA, private)

    def test_a_tie_gives_exactly_the_global_model(self):
        report, private = self.update(line(1.0), line(3.0))
        assert tree.distance(private["model"], line(1.0)) == 0
        assert report.metrics["kept"] == (0.0, 1.0)

    def test_a_better_own_model_is_mixed_in(self):
        """0.8 * (-1) + 0.2 * 1 = -0.6"""
        report, private = self.update(line(-1.0, 2.0), line(1.0))
        assert tree.distance(private["model"], line(-0.6, 1.6)) < 1e-6
        assert report.metrics["kept"] == (1.0, 1.0)

    def test_a_worse_one_is_not(self):
        _, private = self.update(line(1.0), line(-1.0))
        assert tree.distance(private["model"], line(1.0)) == 0

    def test_who_has_none_takes_the_global_one(self):
        report, private = self.update(line(-1.0), None)
        assert tree.distance(private["model"], line(-1.0)) == 0
        assert not report.tensors  # nothing of the model is told

    def test_without_kappa_it_is_the_global_one(self):
        _, private = self.update(line(-1.0), line(1.0), kappa=0.0)
        assert tree.distance(private["model"], line(-1.0)) == 0

    def test_rows_to_judge_by(self):
        """On validation rows the own model is better, on training rows it is not."""
        data = {"train": rows([1.0, -1.0], [1, 0]), "val": rows([1.0, -1.0], [0, 1]), "test": rows([1.0], [0])}
        for judge, slope in (("val", -0.6), ("train", -1.0)):
            task = Task({"global": line(-1.0)}, {"kappa": 0.2})
            _, private = run_one(ConditionalUpdate(LINEAR, judge), task, data, {"model": line(1.0)})
            assert tree.distance(private["model"], line(slope)) < 1e-6

    def test_kappa_follows_its_schedule(self):
        stage = Update(ConditionalUpdate(LINEAR), one_model_for, rounds=10, kappa=0.4, schedule="cosine", decay=0.5)
        state = ServerState(0, {"global": line(0.0)}, roster=("a", "b"))
        assert [t.config["kappa"] for t in stage.plan(state, 0).tasks.values()] == [0.4, 0.4]
        half = stage.plan(replace(state, round=5), 0)
        assert half.tasks["a"].config["kappa"] == pytest.approx(0.4 * 0.75)  # half way from 1 to decay
        assert half.reuse

    @pytest.mark.parametrize("wrong", [{"kappa": 1.5}, {"kappa": -0.1}, {"schedule": "square"}])
    def test_wrong_values_are_refused(self, wrong):
        with pytest.raises(UserError, match=f"update.{next(iter(wrong))} is "):
            build("apcsma", setting(options={"update": wrong}))


class TestMeasured:
    def test_training_is_that_of_fedavg_and_tells_how_good_it_became(self, tiny):
        task = Task({"global": MLP.init(0)}, {"lr": 0.1}, seed=5)
        plain, _ = run_one(LocalTraining(MLP), task, tiny["c3"], {})
        found, _ = run_one(MeasuredTraining(MLP), task, tiny["c3"], {})
        assert tree.distance(plain.tensors, found.tensors) == 0
        x, y = tiny["c3"]["train"]
        logits = MLP.predict(found.tensors["model"], x)
        assert found.metrics["accuracy"] == (float((logits.argmax(-1) == y).sum()), len(y))
        assert found.metrics["loss_after"][0] == pytest.approx(float(F.cross_entropy(logits, y, reduction="sum")), 1e-4)

    def test_a_client_with_a_model_of_its_own_is_asked_about_that(self):
        data = held([1.0, -1.0], [0, 1])
        of_received, _ = run_one(Measure(LINEAR), Task({"global": line(-1.0)}), data, {})
        of_own, _ = run_one(Measure(LINEAR), Task({"global": line(-1.0)}), data, {"model": line(1.0)})
        assert of_received.metrics["accuracy"] == (0.0, 2.0)
        assert of_own.metrics["accuracy"] == (2.0, 2.0)


class TestCoefficients:
    def some(self, clients=5, seed=0):
        g = np.random.default_rng(seed)
        table = metrics(*(g.random(clients) for _ in range(4)))
        models = [MLP.init(k) for k in range(clients)]
        share = Examples(torch.randn(30, 6, generator=torch.Generator().manual_seed(1)), torch.arange(30) % 4)
        return table, models, share

    def learned(self, table, models, share, **kw):
        stacked = torch.stack([vector(m) for m in models])
        return Coefficients(MLP, share, **kw).learned(table, stacked, models[0], ServerState(0, {"global": models[0]}))

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
        stacked = torch.stack([vector(line(-40.0)), vector(line(50.0))])
        state = ServerState(0, {"global": line(0.0)})
        found = Coefficients(LINEAR, share, steps=2, lr=1000.0).learned(table, stacked, line(0.0), state)

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
    return FederateByContribution(
        program,
        one_model_for,
        Rate(0.1, 10),
        trainable=LINEAR.trainable,
        coefficients=Coefficients(LINEAR, steps=steps),
        by=by,
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
        assert Table.load(after, "train")["count"].tolist() == [1, 1]

    def test_directions_count_too(self):
        """The linear network is all head: the base's column is 1/2 each, and the head's cosines with the slope of 1 are
        1 for slope 2 and 0 for slope 0, whose log norm is (0, 1). Sixths: c0 has 0.4195 * 4 / 6 + 1/12 with rows and
        losses changed over."""
        told = reports([line(2.0), line(0.0)], [10, 30], [0.5, 0.5], [3.0, 1.0])
        after = federate("cosine").fold(self.STATE, told, 0)
        first = (0.25 + 0.5 + 0.5 + 0.415 / 2.415 + 0.5 + 0.0) / 6
        assert float(after.models["global"]["head.weight"][0]) == pytest.approx(2 * first, abs=1e-3)

    def test_by_rows_it_is_fedavg(self):
        told = reports([line(0.0), line(1.0)], [10, 30], [0.5, 0.5], [1.0, 3.0])
        after = federate("size").fold(self.STATE, told, 0)
        assert float(after.models["global"]["head.weight"][0]) == pytest.approx(0.75)
        assert len(Table.load(after, "train")) == 2  # kept for the selection all the same

    @pytest.mark.parametrize("by", ["contribution", "cosine"])
    def test_equal_models_give_the_model_and_a_single_one_is_taken_as_it_is(self, by):
        alike = reports([line(2.0)] * 3, [1, 2, 3], [0.1, 0.9, 0.0], [1.0, 3.0, 0.0])
        assert tree.distance(federate(by).fold(self.STATE, alike, 0).models["global"], line(2.0)) < 1e-6
        alone = reports([line(5.0)], [7], [0.0], [0.0])
        assert tree.distance(federate(by).fold(self.STATE, alone, 0).models["global"], line(5.0)) == 0

    def test_without_reports_or_rows_nothing_changes(self):
        for told in ({}, reports([line(9.0)], [0], [0.0], [0.0])):
            after = federate("cosine").fold(self.STATE, told, 0)
            assert tree.distance(after.models["global"], line(1.0)) == 0

    def test_each_model_is_weighed_among_its_members(self):
        """Two groups of one: each takes its member's model."""
        member = {"c0": torch.tensor([1.0, 0.0]), "c1": torch.tensor([0.0, 1.0])}
        state = replace(self.STATE, models={"a": line(0.0), "b": line(0.0)}, membership=member)
        told = reports([line(3.0), line(4.0)], [10, 30], [0.5, 0.5], [1.0, 3.0])
        after = federate("contribution").fold(state, told, 0)
        assert tree.distance(after.models, {"a": line(3.0), "b": line(4.0)}) == 0
        assert "train b.coefficient_num" in after.figures


class TestSelection:
    def state(self, sizes=(10, 30, 20), counts=(1, 1, 1), roster=("c0", "c1", "c2")):
        table = Table.of(
            {
                f"c{i}": {
                    "size": torch.tensor(n),
                    "count": torch.tensor(float(k)),
                    "accuracy": torch.tensor(0.5),
                    "loss": torch.tensor(1.0),
                    "model": vector(line(float(i))),
                }
                for i, (n, k) in enumerate(zip(sizes, counts, strict=True))
            }
        )
        return ServerState(1, {"global": line(0.0)}, roster=roster, memory={"train": table.tree()})

    def chosen(self, state, size=2, **kw):
        return ByContribution(size, Coefficients(LINEAR, steps=0), **kw).fold(state, {}, 0).cohort

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
    assert [r.cohort for r in result.records] == [2] * 6
    assert float(Table.load(result.state, "train")["count"].sum()) == 12


def test_a_warm_start_hears_everybody_once(tiny):
    result, _, _ = played(tiny, rounds=3)
    assert [r.cohort for r in result.records] == [6, 2, 2]
    assert float(Table.load(result.state, "train")["count"].sum()) == 10


def test_cold_clients_are_represented_by_the_first_model(tiny):
    """Coefficients of the first round are learned on equal models: they stay equal."""
    result, _, _ = played(tiny, rounds=2, select={"start": "cold"})
    first = [result.records[0].metrics[f"select.coefficient_{k}"] for k in ("num", "epoch", "acc", "loss")]
    assert first == pytest.approx([0.25] * 4, abs=1e-3)
    later = [result.records[1].metrics[f"select.coefficient_{k}"] for k in ("num", "epoch", "acc", "loss")]
    assert later != pytest.approx([0.25] * 4, abs=1e-3)


def test_fresh_metrics_are_those_of_the_models_that_clients_have_now(tiny):
    """Asked for in every round, by everybody."""
    result, _, _ = played(tiny, rounds=3, select={"metrics": "fresh"})
    asked = [len(p.clients) for p in result.ledger.pages if p.stage == "measure"]
    assert asked == [6, 6, 6]
    last, _, _ = played(tiny, rounds=3)
    assert [p for p in last.ledger.pages if p.stage == "measure"] == []


def test_clients_go_on_from_their_own_models(tiny):
    """What trains in the second round starts from what Eq. 16 left with the client."""
    result, fleet, method = played(tiny, rounds=1)
    before = {c: fleet.private[c]["model"] for c in tiny}
    seen = {}

    class Watched(PlainFleet):
        def execute_one(self, program, client, task):
            if program.name == "train":
                seen[client] = tree.distance(program.begin(task, self.private[client])["params"], before[client])
            return super().execute_one(program, client, task)

    engine.run(method, Watched(tiny, dict(fleet.private)), rounds=2, seed=0, state=result.state, records=result.records)
    assert len(seen) == 2
    assert all(gap == 0 for gap in seen.values())


def test_without_kappa_it_is_the_method_without_the_update(tiny):
    whole, _, _ = played(tiny, update={"kappa": 0.0})
    cosine, _, _ = played(tiny, parts={"update": False})
    assert tree.distance(whole.state.models, cosine.state.models) == 0
    assert whole.accuracy == cosine.accuracy


def test_by_chance_and_by_rows_it_is_fedavg(tiny):
    options = {"select": "chance", "aggregate": "size", "update": False}
    ours, _, _ = played(tiny, parts=options)
    fedavg = engine.run(build("fedavg", setting()), PlainFleet(tiny), rounds=6, seed=0, central=tiny.central)
    assert tree.distance(ours.state.models, fedavg.state.models) == 0


def test_the_model_that_everybody_was_sent_is_not_sent_again_to_train(tiny):
    result, _, _ = played(tiny, rounds=2)
    pages = [p for p in result.ledger.pages if p.round == 2]
    sent = {p.stage: int(p.bytes_down.max()) for p in pages}
    assert sent["train"] < 0.2 * sent["update"]
    plain, _, _ = played(tiny, rounds=2, parts={"update": False})
    assert min(int(p.bytes_down.min()) for p in plain.ledger.pages if p.stage == "train") > 0.9 * sent["update"]


def test_the_result_says_on_whose_rows_coefficients_were_learned(tiny):
    assert played(tiny, rounds=1)[2].notes == ("coefficients are learned on 20 public rows",)
    assert "equal" in played(tiny, rounds=1, public=False)[2].notes[0]
    assert "equal" in played(tiny, rounds=1, share={"rows_of": "nobody"})[2].notes[0]
    result, _, method = played(tiny, rounds=1, public=False, share={"rows_of": "clients", "rows": 2})
    assert method.notes == ("coefficients are learned on up to 2 labelled rows of every client, which leave it",)
    assert next(p.stage for p in result.ledger.pages) == "share"


def test_settings_without_effect_are_refused():
    for options in ({"share": {"rows": 3}}, {"train": {"weighting": "uniform"}}, {"select": {"by": "size"}}):
        with pytest.raises(UserError, match="not known to method apcsma"):
            build("apcsma", setting(options=options))
