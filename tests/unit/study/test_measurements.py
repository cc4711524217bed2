"""Intervals, counts to a target and verdicts, with numbers worked out by hand."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

import pytest

from shoal.experiment.job import Job
from shoal.store.reader import RunRecord
from shoal.study.measurements import Interval, StudyRun, StudyRuns, interval_over_clients, interval_over_seeds
from shoal.study.plan import Budget, Claim, ClaimTest, Entry, Study
from shoal.study.verdicts import combined_verdict, judge_claim, verdict_of_test


def run(central=(0.5, 0.8, 0.9), local=0.9, clients=(1.0, 0.8), joules=(10.0, 5.0), metrics=None, **result):
    """Rounds 1, 2, ... with a cohort of 3 and two epochs each."""
    rounds = tuple(
        {
            "round": i,
            "cohort_size": 3,
            "accuracy": {"central": x, "local": local},
            "joules": dict(zip(("training", "communication"), joules, strict=True)),
            "metrics": metrics or {},
        }
        for i, x in enumerate(central, start=1)
    )
    accuracy = {"local": local, "worst10": 0.5, "central": central[-1]}
    spent = {"training": joules[0] * len(rounds), "communication": joules[1] * len(rounds), "kind": "modelled"}
    return RunRecord(
        path=Path("r"),
        config={"method": "m", "epochs": 2, "seed": 0, "rounds": len(rounds)},
        about={},
        partition={"clients": [f"c{i}" for i in range(len(clients))]},
        rounds=rounds,
        clients=({"accuracy": list(clients)},),
        result={"accuracy": accuracy, "client_joules": spent, **result},
        accuracy_key="central",
        joules_scope="clients",
    )


def study_run(variant="a", seed=0, target_accuracy=0.8, unseen=None, sustained_rounds=1, cell="here", **kw):
    return StudyRun(
        Entry(cell, variant, seed, Job(seed=seed), target_accuracy), run(**kw), unseen or {}, sustained_rounds, 50
    )


class InMemoryRuns(StudyRuns):
    """Runs that are not on a disk."""

    failures: ClassVar = {}

    def __init__(self, *runs):
        self.run_by_key = {(m.entry.cell, m.entry.variant, m.entry.seed): m for m in runs}


def test_t_over_seeds():
    """Mean 2, s = 1, n = 3: t(.975, 2) = 4.302653, so 2 ± 4.302653 / √3 = 2 ± 2.484138."""
    found = interval_over_seeds([1.0, 2.0, 3.0])
    assert (found.mean, found.basis) == (2.0, "t, 3 seeds")
    assert (found.low, found.high) == pytest.approx((-0.484138, 4.484138), abs=1e-6)
    assert interval_over_seeds([4.0]) == Interval(4.0, None, None, "one seed", (4.0,))


def test_bootstrap_over_clients():
    """Means of four draws from {0, 4}: Binomial(4, 1/2) ones. 1/16 of them are 0, more than 2.5 %, as many are 4."""
    found = interval_over_clients([0.0, 4.0, 0.0, 4.0])
    assert (found.mean, found.low, found.high) == (2.0, 0.0, 4.0)
    assert found.basis == "bootstrap, 4 clients of one seed"
    narrow = interval_over_clients([1.0, 2.0] * 50)  # s = .5, / √100 = .05, times 1.96
    assert (narrow.low, narrow.high) == pytest.approx((1.402, 1.598), abs=0.011)


class TestToTarget:
    def test_epochs_and_joules_up_to_the_round_that_reached_it(self):
        """Reached in round 2: 2 rounds x 3 clients x 2 epochs, 2 x 15 joules."""
        m = study_run()
        assert m.cost_to_target() == {"epochs": 12.0, "joules": 30.0}
        assert (m.metric("epochs_to_target"), m.metric("joules_to_target")) == (12.0, 30.0)

    def test_sustained_for_two_rounds(self):
        assert study_run(sustained_rounds=2).metric("epochs_to_target") == 18.0

    def test_target_not_reached_or_not_set(self):
        assert study_run(target_accuracy=0.95).metric("epochs_to_target") is None
        assert study_run(target_accuracy=None).metric("joules_to_target") is None


def test_metrics_of_a_run():
    served = {
        "none": {"accuracy": 0.6, "accuracy_by_client": {"x": 0.6}},
        "50": {"accuracy": 0.75, "accuracy_by_client": {"x": 0.75}},
    }
    m = study_run(unseen=served, metrics={"probe.num_clusters": 2.0}, clusters_ari=0.9)
    found = {name: m.metric(name) for name in ("local", "worst10", "central", "unseen", "unseen.none", "unseen.true")}
    assert found == {
        "local": 90.0,
        "worst10": 50.0,
        "central": 90.0,
        "unseen": 75.0,
        "unseen.none": 60.0,
        "unseen.true": None,
    }
    assert (m.metric("has_split"), m.metric("clusters_ari")) == (1.0, 0.9)
    assert (
        study_run(unseen={"none": {"accuracy": 0.6}}).metric("unseen") == 60.0
    )  # a method that infers nothing from inputs
    assert study_run().metric("has_split") is None


class TestDifferences:
    def test_paired_by_seed(self):
        """10, 20 and 30 points; a fourth seed that only one of them has does not count."""
        ours = [study_run("a", s, local=x) for s, x in enumerate((0.6, 0.8, 0.9, 0.1))]
        other = [study_run("b", s, local=x) for s, x in enumerate((0.5, 0.6, 0.6))]
        found = InMemoryRuns(*ours, *other).difference("here", "a", "b", "local")
        assert found.mean == pytest.approx(20.0)
        assert found.low == pytest.approx(20 - 24.84138, abs=1e-4)

    def test_paired_by_client_with_one_seed(self):
        runs = InMemoryRuns(
            study_run("a", clients=(1.0, 0.8, 0.6), local=0.8), study_run("b", clients=(0.9, 0.7, 0.5), local=0.7)
        )
        found = runs.difference("here", "a", "b", "local")
        assert found.basis == "bootstrap, 3 clients of one seed"
        assert (found.mean, found.low, found.high) == pytest.approx((10.0, 10.0, 10.0))
        assert runs.difference("here", "a", "b", "central").low is None  # no clients to draw from
        assert runs.difference("here", "a", "c", "local") is None

    def test_two_metrics_of_one_variant(self):
        runs = InMemoryRuns(study_run("a", unseen={"none": {"accuracy": 0.5}, "50": {"accuracy": 0.7}}))
        assert runs.difference("here", "a", "a", "unseen.50", "unseen.none").mean == pytest.approx(20.0)


def claim_test(kind="value", metric="local", **limit):
    baseline = "b" if kind in ("difference", "ratio") else None
    return ClaimTest(
        kind=kind,
        cells=["here"],
        variant="a",
        baseline=baseline,
        metric=metric,
        **limit,
    )


class TestVerdicts:
    @pytest.mark.parametrize(
        ("low", "high", "limit", "verdict"),
        [
            (0.1, 0.5, {"at_least": 0.0}, "holds"),
            (-0.1, 0.5, {"at_least": 0.0}, "undecided"),
            (-0.5, -0.1, {"at_least": 0.0}, "fails"),
            (-0.1, 0.2, {"at_most": 0.2}, "holds"),
            (-0.1, 0.3, {"at_most": 0.2}, "undecided"),
            (0.21, 0.3, {"at_most": 0.2}, "fails"),
            (0.0, 0.0, {"at_most": 0.0}, "holds"),
            (None, None, {"at_least": 0.0}, "undecided"),
        ],
    )
    def test_by_the_interval(self, low, high, limit, verdict):
        assert verdict_of_test(claim_test(**limit), Interval(0.0, low, high, "")) == verdict

    def test_a_lower_bound_does_not_refute(self):
        test = claim_test("ratio", metric="epochs_to_target", at_least=3.0)
        assert verdict_of_test(test, Interval(2.0, 1.9, 2.1, "", is_lower_bound=True)) == "undecided"
        assert verdict_of_test(test, Interval(4.0, 3.9, 4.1, "", is_lower_bound=True)) == "holds"

    def test_every_seed_on_its_own(self):
        test = claim_test(criterion="every_seed", at_least=1.0)
        assert verdict_of_test(test, interval_over_seeds([1.0, 1.0])) == "holds"
        assert verdict_of_test(test, interval_over_seeds([1.0, 0.0])) == "fails"
        assert verdict_of_test(test, None) == "not measured"

    @pytest.mark.parametrize(
        ("verdicts", "combined"),
        [
            (["holds", "holds"], "holds"),
            (["holds", "fails", "undecided"], "fails"),
            (["holds", "undecided"], "undecided"),
            (["holds", "not measured"], "undecided"),
            (["not measured", "not measured"], "not measured"),
        ],
    )
    def test_of_a_claim(self, verdicts, combined):
        assert combined_verdict(verdicts) == combined

    def test_ratio_to_a_target(self):
        """12 epochs against 18; against a run that never got there, all of its 18; and the other way round."""
        quick, slow, never = (
            study_run("a"),
            study_run("b", central=(0.5, 0.6, 0.8)),
            study_run("b", central=(0.5, 0.5, 0.5)),
        )
        test = claim_test("ratio", metric="epochs_to_target", at_least=3.0)
        for other, mean in ((slow, 1.5), (never, 1.5)):
            claim = judge_claim(Claim(statement="", tests=[test]), InMemoryRuns(quick, other))
            assert claim.outcomes[0].interval.mean == mean
            assert claim.verdict == "undecided"  # one seed
            assert claim.outcomes[0].interval.is_lower_bound == (other is never)
        lost = judge_claim(Claim(statement="", tests=[test]), InMemoryRuns(study_run("a", central=(0.1,)), slow))
        assert lost.outcomes[0].interval.mean == 0.0
        none = judge_claim(Claim(statement="", tests=[test]), InMemoryRuns(study_run("a", central=(0.1,)), never))
        assert none.verdict == "undecided"  # both are finished, and neither was there

    def test_fraction_of_the_way(self):
        """From 50 to 90, 80 is three quarters of the way; where there is no way, nothing is said."""
        served = {"none": {"accuracy": 0.5}, "50": {"accuracy": 0.8}, "true": {"accuracy": 0.9}}
        test = claim_test("recovered", metric="unseen.50", at_least=0.5)
        found = judge_claim(Claim(statement="", tests=[test]), InMemoryRuns(study_run("a", unseen=served)))
        assert found.outcomes[0].interval.mean == pytest.approx(0.75)
        flat = {"none": {"accuracy": 0.5}, "50": {"accuracy": 0.5}, "true": {"accuracy": 0.5}}
        assert (
            judge_claim(Claim(statement="", tests=[test]), InMemoryRuns(study_run("a", unseen=flat))).verdict
            == "undecided"
        )
        assert judge_claim(Claim(statement="", tests=[test]), InMemoryRuns()).verdict == "not measured"

    @pytest.mark.parametrize(
        ("known", "criterion", "verdict"),
        [
            ((1.0, 1.0), "every_seed", "undecided"),
            ((1.0, 0.0), "every_seed", "fails"),
            ((1.0, 1.0), "interval", "undecided"),
        ],
    )
    def test_a_finished_run_without_the_metric_leaves_the_test_undecided(self, known, criterion, verdict):
        """Known seeds alone decide nothing, but one seed outside the limit refutes `every_seed`."""
        found = [study_run("a", s, clusters_ari=x) for s, x in enumerate(known)]
        test = claim_test(metric="clusters_ari", criterion=criterion, at_least=0.7)
        (outcome,) = judge_claim(Claim(statement="", tests=[test]), InMemoryRuns(*found, study_run("a", 9))).outcomes
        assert (outcome.verdict, outcome.num_unknown, outcome.interval.values) == (verdict, 1, known)

    def test_a_pair_without_the_metric_leaves_the_test_undecided(self):
        served = {"50": {"accuracy": 0.7}}
        pairs = [study_run(v, s, unseen=served) for v in "ab" for s in range(3)]
        test = claim_test("difference", metric="unseen.50", at_least=0.0)
        assert judge_claim(Claim(statement="", tests=[test]), InMemoryRuns(*pairs)).verdict == "holds"
        lacking = (study_run("a", 3, unseen=served), study_run("b", 3))
        assert judge_claim(Claim(statement="", tests=[test]), InMemoryRuns(*pairs, *lacking)).verdict == "undecided"

    def test_a_test_of_split_runs_is_undecided_if_one_run_was_not_split(self):
        """A run without a gate does not show the cost of a gate."""
        others = [study_run("b", s) for s in range(3)]
        split, unsplit = ([study_run("a", s, metrics={"probe.num_clusters": n}) for s in range(3)] for n in (2.0, 1.0))
        test = claim_test("difference", requires_positive="has_split", at_least=-0.2)
        assert judge_claim(Claim(statement="", tests=[test]), InMemoryRuns(*split, *others)).verdict == "holds"
        for some in ((*split[:2], unsplit[2]), (*split[:2], study_run("a", 2))):
            assert judge_claim(Claim(statement="", tests=[test]), InMemoryRuns(*some, *others)).verdict == "undecided"

    def test_a_baseline_without_a_target_gives_no_ratio(self):
        """It has no target, so its total cost is no lower bound."""
        test = claim_test("ratio", metric="epochs_to_target", at_least=1.0)
        found = judge_claim(
            Claim(statement="", tests=[test]), InMemoryRuns(study_run("a"), study_run("b", target_accuracy=None))
        )
        assert (found.verdict, found.outcomes[0].interval) == ("undecided", None)


def test_a_later_table_wins():
    study = Study(
        title="t",
        fixed_beforehand="",
        our_variant="a",
        job={"rounds": 1, "lr": 0.1, "max_train_samples": 1, "epochs": 1, "set": {"train": {"clip": 1.0}}},
        variants={"a": {"method": "fedprox", "epochs": 5, "set": {"train": {"mu": 2.0}}}},
        variant_lists={"all": ("a",)},
        cells={"here": {"max_train_samples": 3, "target_accuracy": 0.5}},
        budgets={
            "b": Budget(
                seeds=(4, 5),
                job={"lr": 0.2, "max_train_samples": 2},
                cells={"here": {"variants": ["all"], "rounds": 9}},
            )
        },
    )
    first, second = study.entries("b")
    job = first.job
    assert (job.rounds, job.lr, job.max_train_samples, job.epochs, job.seed, job.variant) == (9, 0.2, 3, 5, 4, "a")
    assert job.set == {"train": {"clip": 1.0, "mu": 2.0}}
    assert [str(e.relative_path) for e in (first, second)] == ["here/a-4", "here/a-5"]


def test_only_variants_evaluated_in_the_same_rounds_have_a_target():
    study = Study(
        title="t",
        our_variant="a",
        job={"rounds": 10, "eval_every": 2},
        variants={"a": {}, "b": {"eval_every": 1000}, "c": {"eval_every": 2}},
        variant_lists={"all": ("b", "a", "c")},
        cells={"here": {"target_accuracy": 0.5}},
        budgets={"x": Budget(seeds=(1,), cells={"here": {"variants": ["all"]}})},
    )
    entries = study.entries("x")
    assert {e.variant: e.target_accuracy for e in entries} == {"a": 0.5, "b": None, "c": 0.5}
    assert StudyRuns(study, entries, Path("nowhere")).target_accuracy("here") == 0.5
