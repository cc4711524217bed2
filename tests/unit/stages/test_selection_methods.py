"""Selection stages: the clients that are queried and selected, and what the server remembers."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from shoal import engine
from shoal.client.histogram import LabelHistogram
from shoal.client.probe import GradientProbe, LossProbe, SendSamples
from shoal.client_table import ClientTable
from shoal.errors import UserError
from shoal.fleet.plain import PlainFleet
from shoal.fleet.vector import VectorFleet
from shoal.methods import Setting, build
from shoal.models import load_model
from shoal.selectors.clusters import one_of_each
from shoal.stages.cluster import DiverseLabels, FormClusters, SimilarLabels
from shoal.stages.loss_correlation import SURVEY, SelectByLossCorrelation, SurveyLosses
from shoal.stages.prediction_similarity import shared_samples
from shoal.stages.query import QueryClients
from shoal.stages.select import SIZE_STAGE, SelectFromClusters, SelectLargestLoss, SelectRandom
from shoal.stages.update_selection import sgd_displacement
from shoal.stages.vectors import report_row
from shoal.types import Plan, Report, Samples, ServerState, Task

CHOOSING = ("simclust", "repclust", "powerd", "fedcor", "delta", "clustlowvar", "flis", "haccs", "clsm-fl")


def setting(**kw):
    return Setting(**{"model": load_model("mlp", (6,), 4), "rounds": 4, "cohort_size": 3, "batch_size": 8} | kw)


def state(round=0, roster=("a", "b", "c", "d"), cohort_size=2, **memory):
    return ServerState(round, {"global": {}}, roster=roster, cohort_size=cohort_size, memory=memory)


def loss_reports(**columns):
    return {c: Report(metrics={"loss": (loss, 1.0)}, counts={"train": n}) for c, (loss, n) in columns.items()}


class TestTable:
    def test_a_table_survives_in_a_state(self):
        table = ClientTable.from_rows({"ü b": {"x": torch.tensor([3.0])}, "a": {"x": torch.tensor([1.0])}})
        found = ClientTable.load(state(slot=table.to_tree()), "slot")
        assert found.clients == ("a", "ü b")
        assert found["x"].tolist() == [[1.0], [3.0]]

    def test_newer_rows_win(self):
        old = ClientTable.from_rows({"a": {"x": torch.tensor(1)}, "c": {"x": torch.tensor(3)}})
        new = ClientTable.from_rows({"b": {"x": torch.tensor(2)}, "c": {"x": torch.tensor(30)}})
        both = old.updated_with(new)
        assert (both.clients, both["x"].tolist()) == (("a", "b", "c"), [1, 2, 30])
        assert old["x"].tolist() == [1, 3]
        assert ClientTable().updated_with(old) == old == old.updated_with(ClientTable())

    def test_an_empty_table_has_no_columns(self):
        assert ClientTable.from_rows({}).to_tree() == {}
        assert len(ClientTable.load(state(), "slot")) == 0

    def test_a_column_for_all_clients(self):
        table = ClientTable.from_rows({"b": {"n": torch.tensor(3)}, "a": {"n": torch.tensor(1)}})
        np.testing.assert_array_equal(table.column("n", ("b", "c", "a")), [3, np.nan, 1])
        np.testing.assert_array_equal(ClientTable().column("n", ("b",)), [np.nan])


class TestAskOnce:
    def test_only_clients_that_have_not_reported(self):
        stage = QueryClients(LabelHistogram(2))
        answered = stage.fold(state(), {"b": Report({"labels": {"p": torch.tensor([1.0, 0.0])}}, {}, {"train": 4})}, 0)
        assert set(stage.plan(answered, 0).tasks) == {"a", "c", "d"}
        late = QueryClients(LabelHistogram(2), includes_late_clients=False)
        assert set(late.plan(state(), 0).tasks) == {"a", "b", "c", "d"}
        assert not late.plan(answered, 0).tasks

    def test_a_round_without_reports_changes_nothing(self):
        before = state()
        assert QueryClients(LabelHistogram(2)).fold(before, {}, 0) is before

    def test_a_report_as_a_row(self):
        report = Report(
            {"g": {"b": torch.tensor([[3.0, 4.0]]), "a": torch.tensor([1, 2])}}, {"v": (6.0, 4.0)}, {"train": 7}
        )
        found = report_row(report)
        assert found["g"].tolist() == [1, 2, 3, 4]
        assert (float(found["v"]), int(found["size"])) == (1.5, 7)


@pytest.mark.parametrize("fleet", [PlainFleet, VectorFleet])
class TestPrograms:
    def test_histogram(self, tiny, fleet):
        stage = QueryClients(LabelHistogram(4))
        reports = fleet(tiny).execute(stage.plan(state(roster=tuple(tiny)), 0))
        for c, r in reports.items():
            counts = torch.bincount(tiny[c]["train"].y, minlength=4)
            assert r.tensors["labels"]["p"].tolist() == pytest.approx((counts / counts.sum()).tolist())
            assert r.counts == {"train": len(tiny[c]["train"].y)}

    def test_noise_leaves_a_distribution(self, tiny, fleet):
        stage = QueryClients(LabelHistogram(4, noise_scale=2.0))
        reports = fleet(tiny).execute(stage.plan(state(roster=tuple(tiny)), 0))
        rows = torch.stack([r.tensors["labels"]["p"] for r in reports.values()])
        assert rows.min() >= 0
        assert rows.sum(1).tolist() == pytest.approx([1.0] * len(tiny))
        plain = fleet(tiny).execute(QueryClients(LabelHistogram(4)).plan(state(roster=tuple(tiny)), 0))
        assert not torch.allclose(rows, torch.stack([r.tensors["labels"]["p"] for r in plain.values()]), atol=0.01)

    @pytest.mark.parametrize(("threshold", "is_kept"), [(0.1, False), (0.9, True), (1.0, True)])
    def test_a_noisy_release_stands_until_labels_have_changed_much(self, fleet, threshold, is_kept):
        """Half of the labels change, which is a fraction of 0.5."""
        program, x = LabelHistogram(2, noise_scale=0.1, rerelease_threshold=threshold), torch.zeros(8, 1)
        running = fleet({c: {"train": Samples(x, torch.zeros(8, dtype=torch.long))} for c in "ab"})

        def release(seed):
            reports = running.execute(Plan(program, {c: Task(seed=seed) for c in "ab"}))
            return reports["a"].tensors["labels"]["p"]

        first, same = release(1), release(2)
        assert torch.equal(first, same)
        running.data = {c: {"train": Samples(x, torch.tensor([0, 1] * 4))} for c in "ab"}
        assert torch.equal(release(3), first) == is_kept
        if not is_kept:
            assert release(4).tolist() == release(5).tolist() == pytest.approx([0.5, 0.5], abs=0.2)

    def test_loss_probe_is_the_mean_loss(self, tiny, fleet):
        model = load_model("mlp", (6,), 4)
        params = model.init(0)
        tasks = {c: Task({"global": params}) for c in tiny}
        reports = fleet(tiny).execute(replace(QueryClients(LossProbe(model)).plan(state(roster=()), 0), tasks=tasks))
        for c, r in reports.items():
            x, y = tiny[c]["train"]
            expected = torch.nn.functional.cross_entropy(model.predict(params, x), y)
            total, rows = r.metrics["loss"]
            assert total / rows == pytest.approx(float(expected), rel=1e-5)

    def test_gradient_probe(self, tiny, fleet):
        """If all samples fit into one batch, it is the gradient of the mean loss, without variance."""
        model = load_model("mlp", (6,), 4)
        params = model.init(0)
        plan = QueryClients(GradientProbe(model, batch_size=64)).plan(state(roster=()), 0)
        reports = fleet(tiny).execute(replace(plan, tasks={c: Task({"global": params}) for c in tiny}))
        x, y = tiny["c2"]["train"]
        leaves = {k: v.clone().requires_grad_() for k, v in params.items()}
        torch.nn.functional.cross_entropy(model.predict(leaves, x), y).backward()
        for k, g in reports["c2"].tensors["gradient"].items():
            assert torch.allclose(g, leaves[k].grad, atol=1e-6)
        assert reports["c2"].metrics["variance"][0] == pytest.approx(0.0, abs=1e-6)

    def test_all_samples_count_equally_in_a_gradient(self, tiny, fleet):
        """c0 has 9 samples: a batch of 8 and one of 1. The mean over samples is that of one large batch."""
        model = load_model("mlp-dropout", (6,), 4)
        ends = []
        for size in (8, 64):
            plan = QueryClients(GradientProbe(model, batch_size=size)).plan(state(roster=()), 0)
            reports = fleet(tiny).execute(replace(plan, tasks={c: Task({"global": model.init(0)}) for c in tiny}))
            ends.append(reports["c0"].tensors["gradient"])
        for k in ends[0]:
            assert torch.allclose(ends[0][k], ends[1][k], atol=1e-6)

    def test_noise_is_released_once(self, tiny, fleet):
        """With another seed a client reports the same again, because fresh noise could be averaged out."""
        stage, running = QueryClients(LabelHistogram(4, noise_scale=2.0)), fleet(tiny)
        first, second = (running.execute(stage.plan(state(roster=tuple(tiny)), seed)) for seed in (1, 2))
        assert all(torch.equal(first[c].tensors["labels"]["p"], second[c].tensors["labels"]["p"]) for c in tiny)
        other = fleet(tiny).execute(stage.plan(state(roster=tuple(tiny)), 2))
        assert not torch.equal(first["c1"].tensors["labels"]["p"], other["c1"].tensors["labels"]["p"])

    def test_gradients_of_batches_vary(self, tiny, fleet):
        model = load_model("mlp", (6,), 4)
        plan = QueryClients(GradientProbe(model, batch_size=4)).plan(state(roster=()), 0)
        reports = fleet(tiny).execute(replace(plan, tasks={c: Task({"global": model.init(0)}) for c in tiny}))
        assert all(r.metrics["variance"][0] > 1e-4 for r in reports.values())

    def test_shared_samples_are_the_clients_own(self, tiny, fleet):
        stage = QueryClients(SendSamples((6,), num_samples=12), name="share")
        reports = fleet(tiny).execute(stage.plan(state(roster=tuple(tiny)), 0))
        for c, r in reports.items():
            kept = r.tensors["rows"]["x"][r.tensors["rows"]["w"] > 0]
            held = tiny[c]["train"].x
            assert len(kept) == min(12, len(held))
            assert all((held == x).all(1).any() for x in kept)
            assert len(torch.unique(kept, dim=0)) == len(kept)
            assert "labels" not in r.tensors

    def test_shared_labels_belong_to_the_samples(self, tiny, fleet):
        stage = QueryClients(SendSamples((6,), num_samples=12, sends_labels=True), name="share")
        known = state(roster=tuple(tiny))
        known = stage.fold(known, fleet(tiny).execute(stage.plan(known, 0)), 0)
        x, y = shared_samples(known, load_model("mlp", (6,), 4))
        assert len(x) == len(y) == sum(min(12, len(tiny[c]["train"].y)) for c in tiny)
        held = {tuple(row.tolist()): int(label) for c in tiny for row, label in zip(*tiny[c]["train"], strict=True)}
        assert [held[tuple(row.tolist())] for row in x] == y.tolist()


def clustered_state(labels):
    return ClientTable(tuple("abcdefgh"[: len(labels)]), {"group": torch.tensor(labels)}).to_tree()


def test_clusters_are_formed_once_and_again_for_new_clients():
    calls = []

    def rule(rows, seed, cohort_size):
        calls.append(len(rows))
        return np.arange(len(rows)) % 2

    stage = FormClusters(rule, column="labels")
    rows = {c: {"labels": torch.tensor([1.0, 0.0])} for c in "abc"}
    first = stage.fold(state(represent=ClientTable.from_rows(rows).to_tree()), {}, 0)
    again = stage.fold(first, {}, 0)
    assert calls == [3]
    assert again is first
    more = ClientTable.from_rows(rows | {"d": {"labels": torch.tensor([0.0, 1.0])}})
    last = stage.fold(replace(first, memory={**first.memory, "represent": more.to_tree()}), {}, 0)
    assert calls == [3, 4]
    assert ClientTable.load(last, "cluster")["group"].tolist() == [0, 1, 0, 1]
    assert stage.fold(state(), {}, 0) == state()


def test_clusters_select_among_present_clients():
    stage = SelectFromClusters(one_of_each)
    here = state(roster=("a", "d"), cluster=clustered_state([0, 0, 1, 1]))
    assert stage.fold(here, {}, 0).cohort == ("a", "d")
    assert stage.fold(state(), {}, 0).cohort == ()


def test_two_clusters_make_a_cohort_by_default():
    rows = np.eye(4).repeat(3, axis=0)  # 12 clients
    labels = DiverseLabels()(rows, 0, 4)
    assert np.bincount(labels).tolist() == [2] * 6
    assert np.bincount(DiverseLabels(num_clusters=3)(rows, 0, 4)).tolist() == [4] * 3


def test_random_by_size():
    """a has 98 of 101 samples, so a single draw selects it nearly always."""
    sizes = ClientTable(tuple("abcd"), {"size": torch.tensor([98, 1, 1, 1])}).to_tree()
    drawn = [
        SelectRandom(probability="size").fold(replace(state(sizes=sizes), cohort_size=1), {}, seed).cohort
        for seed in range(200)
    ]
    assert 185 <= drawn.count(("a",)) < 200
    assert SelectRandom(probability="size").fold(replace(state(), cohort_size=1), {}, 0).cohort == ()


class TestLargestLoss:
    stage = SelectLargestLoss(LossProbe(None), lambda s, c: {}, candidates=3)

    def test_queries_the_given_number_of_candidates(self):
        sizes = ClientTable(tuple("abcd"), {"size": torch.tensor([1, 1, 1, 1])}).to_tree()
        assert len(self.stage.plan(state(**{SIZE_STAGE: sizes}), 0).tasks) == 3
        assert not self.stage.plan(state(), 0).tasks

    def test_takes_the_largest(self):
        found = self.stage.fold(state(), loss_reports(a=(0.1, 5), b=(3.0, 5), c=(2.0, 5)), 0)
        assert found.cohort == ("b", "c")
        assert self.stage.fold(state(), {}, 0).cohort == ()

    def test_too_few_candidates(self):
        options = {"select": {"candidates": 1}}
        with pytest.raises(UserError, match=r"select\.candidates is 1; .*at least the cohort size, 2"):
            build("powerd", Setting(load_model("mlp", (4,), 2), rounds=1, cohort_size=2, options=options))


class TestSurvey:
    survey = SurveyLosses(LossProbe(None), lambda s, c: {}, warmup=3, every_rounds=4, history=2)

    def test_rounds(self):
        """Every round of the warm-up and the one after; then pairs that end every fourth round."""
        assert [r for r in range(13) if self.survey.due(r)] == [0, 1, 2, 3, 6, 7, 10, 11]

    def test_changes_are_between_rounds_that_follow_each_other(self):
        s = self.survey.fold(state(0), loss_reports(a=(2.0, 5), b=(1.0, 6)), 0)
        s = self.survey.fold(replace(s, round=1), loss_reports(a=(1.5, 5), c=(4.0, 7)), 0)
        s = self.survey.fold(replace(s, round=2), loss_reports(a=(1.75, 5), b=(0.5, 6), c=(3.0, 7)), 0)
        table = ClientTable.load(s, SURVEY)
        assert table.clients == ("a", "b", "c")
        nan = float("nan")
        expected = [[-0.5, 0.25], [nan, nan], [nan, -1.0]]  # b did not report in the middle, c joined late
        np.testing.assert_array_equal(table["changes"].numpy(), np.array(expected))
        assert table["when"][0].tolist() == [0, 1]
        assert table["size"].tolist() == [5, 6, 7]

    def test_a_survey_without_a_pair_adds_no_change(self):
        s = self.survey.fold(state(0), loss_reports(a=(2.0, 5)), 0)
        s = self.survey.fold(replace(s, round=1), loss_reports(a=(1.5, 5)), 0)
        s = self.survey.fold(replace(s, round=6), loss_reports(a=(1.0, 5)), 0)
        s = self.survey.fold(replace(s, round=7), loss_reports(a=(0.75, 5)), 0)
        table = ClientTable.load(s, SURVEY)
        assert table["changes"][0].tolist() == [-0.5, -0.25]
        assert table["when"][0].tolist() == [0, 6]

    def test_surveyed_changes_come_from_random_clients(self):
        assert [r for r in range(12) if self.survey.begins_pair(r)] == [0, 1, 2, 6, 10]

    def test_warm_up_is_random_then_correlation_decides(self):
        stage = SelectByLossCorrelation(survey=self.survey, noise=0.01)
        cohorts = {stage.fold(state(1, cohort_size=1), {}, seed).cohort for seed in range(30)}
        assert len(cohorts) == 4
        # a, b and c move together; d is independent and has few samples: one of the three represents all
        g = torch.Generator().manual_seed(0)
        common = torch.randn(20, generator=g, dtype=torch.float64)
        changes = torch.stack([common, common, common, torch.randn(20, generator=g, dtype=torch.float64)])
        columns = {
            "changes": changes,
            "size": torch.tensor([5, 5, 5, 1]),
            "loss": torch.zeros(4),
            "when": torch.arange(-17, 3).expand(4, 20).clone(),
            "round": torch.full((4,), 3),
        }
        known = state(3, cohort_size=1, **{SURVEY: ClientTable(tuple("abcd"), columns).to_tree()})
        first = stage.fold(known, {}, 0)
        assert first.cohort[0] in "abc"
        second = stage.fold(replace(first, round=4), {}, 0)  # no survey is due: the selected client is discounted
        assert second.cohort[0] in set("abc") - set(first.cohort)
        assert ClientTable.load(second, "select")["chosen"].sum() == 2


@pytest.mark.parametrize("name", CHOOSING)
class TestEveryMethod:
    def test_takes_exactly_the_cohort(self, tiny, name):
        result = engine.run(build(name, setting(rounds=13)), PlainFleet(tiny), rounds=13, seed=1)
        trained = [p for p in result.ledger.entries if p.stage == "train"]
        assert [len(set(p.clients)) for p in trained] == [3] * 13
        assert all(r.cohort_size == 3 for r in result.rounds)

    def test_learns(self, tiny, name):
        result = engine.run(
            build(name, setting(rounds=13)), PlainFleet(tiny), rounds=13, seed=1, central_samples=tiny.central
        )
        assert result.accuracy["central"] > 0.6

    def test_goes_on_with_one_client(self, tiny, name):
        alone = {"c0": tiny["c0"]}
        result = engine.run(build(name, setting(rounds=12)), PlainFleet(alone), rounds=12, seed=1)
        assert [r.cohort_size for r in result.rounds] == [1] * 12

    def test_continues_when_half_of_the_clients_do_not_report(self, tiny, name):
        class Deaf(PlainFleet):
            def execute(self, plan):
                return {c: r for c, r in super().execute(plan).items() if c in ("c0", "c1", "c2")}

        result = engine.run(build(name, setting(rounds=12)), Deaf(tiny), rounds=12, seed=1)
        assert result.state.round == 12


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (("simclust", "cluster", "num_clusters", -2), r"cluster\.num_clusters is -2; it must be 0 or more"),
        (
            ("repclust", "cluster", "num_searched", 1),
            r"cluster\.num_searched is 1\. It must be 0 \(search all clusters\)",
        ),
        (("flis", "share", "num_samples", 0), r"share\.num_samples is 0; it must be 1 or more"),
        (("fedcor", "select", "noise", 0.0), r"noise is 0\.0; it must be above 0"),
        (("repclust", "cluster", "num_clusters", -1), r"cluster\.num_clusters is -1; it must be 0 or more"),
        (("simclust", "represent", "noise_scale", -1.0), r"represent\.noise_scale is -1\.0; it must be 0"),
        (("fedcor", "select", "beta", 1.5), r"select\.beta is 1\.5; it must be above 0 and at most 1"),
        (("fedcor", "survey", "every_rounds", 0), r"survey\.every_rounds is 0; it must be 1 or more"),
        (("delta", "select", "alpha1", -1.0), r"select\.alpha1 is -1\.0; it must be 0 or more"),
        (("haccs", "cluster", "radius", 0.0), r"cluster\.radius is 0\.0; it must be above 0 and at most 1"),
        (("haccs", "select", "rho", 1.5), r"select\.rho is 1\.5; it must be from 0"),
        (("clsm-fl", "cluster", "num_clusters", 0), r"cluster\.num_clusters is 0; it must be 1 or more"),
        (("clsm-fl", "cluster", "fuzziness", 1.0), r"cluster\.fuzziness is 1\.0; it must be above 1"),
        (("flis", "cluster", "threshold", 2.0), r"cluster\.threshold is 2\.0"),
        (
            ("fedepc", "cluster", "merge", 0.5),
            r"cluster\.merge is 0\.5 and cluster\.split is 0\.42\. cluster\.merge must not be",
        ),
        (("fedepc", "cluster", "split", -1.0), r"cluster\.split is -1\.0; it must be 0 or more"),
        (
            ("fedepc", "cluster", "noise_guard_ratio", -1.0),
            r"cluster\.noise_guard_ratio is -1\.0; it must be 0 or more",
        ),
        (("fedepc", "cluster", "drift_ratio", -1.0), r"cluster\.drift_ratio is -1\.0; it must be 0 or more"),
        (("fedepc", "cluster", "min_size", 0), r"cluster\.min_size is 0; it must be 1 or more"),
        (("fedepc", "cluster", "num_references", -1), r"cluster\.num_references is -1; it must be 0 or more"),
        (("fce", "cluster", "radius", 0.0), r"cluster\.radius is 0\.0; it must be above 0"),
        (("fce", "cluster", "min_size", 0), r"cluster\.min_size is 0; it must be 1 or more"),
    ],
)
def test_bad_options(bad, message):
    name, piece, key, value = bad
    with pytest.raises(UserError, match=message):
        build(name, setting(options={piece: {key: value}}))


def test_similar_labels_are_in_one_cluster():
    rows = np.array([[0.9, 0.1], [0.1, 0.9], [0.8, 0.2], [0.2, 0.8]])
    assert SimilarLabels(num_clusters=2)(rows, 0, 1).tolist() == [0, 1, 0, 1]
    assert SimilarLabels()(rows, 0, 2).tolist() == [0, 1, 0, 1]


def test_displacement_with_momentum():
    """Steps 1, 1.5, 1.75 with momentum 0.5; three steps of 1 without."""
    assert sgd_displacement(3, 0.5) == pytest.approx(4.25)
    assert sgd_displacement(3, 0.0) == 3


def test_refreshed_gradients_have_the_length_of_probed_ones(tiny):
    """At a learning rate so small that the model hardly moves, training gives the same gradient as the probe."""
    setup = setting(rounds=2, cohort_size=6, lr=1e-6, momentum=0.5, epochs=2, batch_size=64)
    result = engine.run(build("delta", setup), PlainFleet(tiny), rounds=2, seed=0)
    first = engine.run(build("delta", setup), PlainFleet(tiny), rounds=1, seed=0)
    probed, refreshed = (ClientTable.load(r.state, "probe")["gradient"] for r in (first, result))
    assert not torch.equal(probed, refreshed)
    assert torch.allclose(refreshed.norm(dim=1), probed.norm(dim=1), rtol=0.05)


def test_weights_of_training_multiply_those_of_the_selection(tiny):
    ends = [
        engine.run(build("delta", setting(options={"train": {"weighting": w}})), PlainFleet(tiny), rounds=2, seed=0)
        for w in ("size", "uniform")
    ]
    assert ends[0].rounds[1].metrics != ends[1].rounds[1].metrics
