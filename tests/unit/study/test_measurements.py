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
            "cohort": 3,
            "accuracy": {"central": x, "mean": local},
            "joules": dict(zip(("train", "comm"), joules, strict=True)),
            "metrics": metrics or {},
        }
        for i, x in enumerate(central, start=1)
    )
    accuracy = {"mean": local, "worst10": 0.5, "central": central[-1]}
    spent = {"train": joules[0] * len(rounds), "comm": joules[1] * len(rounds), "kind": "modelled"}
    return RunRecord(
        path=Path("r"),
        config={"method": "m", "epochs": 2, "seed": 0, "rounds": len(rounds)},
        about={},
        partition={"clients": [f"c{i}" for i in range(len(clients))]},
        rounds=rounds,
        clients=({"accuracy": list(clients)},),
        result={"accuracy": accuracy, "joules_of_clients": spent, **result},
        accuracy_key="central",
        joules_scope="clients",
    )


def measured(variant="a", seed=0, target=0.8, unseen=None, held=1, cell="here", **kw):
    return StudyRun(Entry(cell, variant, seed, Job(seed=seed), target), run(**kw), unseen or {}, held, 50)


class Known(StudyRuns):
    """Runs that were never on a disk."""

    failures: ClassVar = {}

    def __init__(self, *found):
        self.run_by_key = {(m.entry.cell, m.entry.variant, m.entry.seed): m for m in found}


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
        m = measured()
        assert m.cost_to_target() == {"epochs": 12.0, "joules": 30.0}
        assert (m.metric("epochs_to"), m.metric("joules_to")) == (12.0, 30.0)

    def test_held_for_two_rounds(self):
        assert measured(held=2).metric("epochs_to") == 18.0

    def test_never_or_not_asked_for(self):
        assert measured(target=0.95).metric("epochs_to") is None
        assert measured(target=None).metric("joules_to") is None


def test_figures_of_a_run():
    served = {"none": {"mean": 0.6, "clients": {"x": 0.6}}, "50": {"mean": 0.75, "clients": {"x": 0.75}}}
    m = measured(unseen=served, metrics={"probe.groups": 2.0}, groups_ari=0.9)
    found = {name: m.metric(name) for name in ("local", "worst10", "central", "unseen", "unseen.none", "unseen.true")}
    assert found == {
        "local": 90.0,
        "worst10": 50.0,
        "central": 90.0,
        "unseen": 75.0,
        "unseen.none": 60.0,
        "unseen.true": None,
    }
    assert (m.metric("split"), m.metric("ari")) == (1.0, 0.9)
    assert measured(unseen={"none": {"mean": 0.6}}).metric("unseen") == 60.0  # who cannot do better
    assert measured().metric("split") is None


class TestDifferences:
    def test_paired_by_seed(self):
        """10, 20 and 30 points; a fourth seed that only one of them has does not count."""
        ours = [measured("a", s, local=x) for s, x in enumerate((0.6, 0.8, 0.9, 0.1))]
        other = [measured("b", s, local=x) for s, x in enumerate((0.5, 0.6, 0.6))]
        found = Known(*ours, *other).difference("here", "a", "b", "local")
        assert found.mean == pytest.approx(20.0)
        assert found.low == pytest.approx(20 - 24.84138, abs=1e-4)

    def test_paired_by_client_with_one_seed(self):
        runs = Known(
            measured("a", clients=(1.0, 0.8, 0.6), local=0.8), measured("b", clients=(0.9, 0.7, 0.5), local=0.7)
        )
        found = runs.difference("here", "a", "b", "local")
        assert found.basis == "bootstrap, 3 clients of one seed"
        assert (found.mean, found.low, found.high) == pytest.approx((10.0, 10.0, 10.0))
        assert runs.difference("here", "a", "b", "central").low is None  # no clients to draw from
        assert runs.difference("here", "a", "c", "local") is None

    def test_two_figures_of_one_variant(self):
        runs = Known(measured("a", unseen={"none": {"mean": 0.5}, "50": {"mean": 0.7}}))
        assert runs.difference("here", "a", "a", "unseen.50", "unseen.none").mean == pytest.approx(20.0)


def asked(kind="value", judge="interval", **limit):
    than = "b" if kind in ("difference", "ratio") else None
    return ClaimTest(
        kind=kind,
        cells=["here"],
        variant="a",
        baseline=than,
        metric=limit.pop("figure", "local"),
        criterion=judge,
        **limit,
    )


class TestVerdicts:
    @pytest.mark.parametrize(
        ("low", "high", "limit", "said"),
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
    def test_by_the_interval(self, low, high, limit, said):
        assert verdict_of_test(asked(**limit), Interval(0.0, low, high, "")) == said

    def test_what_is_only_known_to_be_as_large_refutes_nothing(self):
        test = asked("ratio", figure="epochs_to", at_least=3.0)
        assert verdict_of_test(test, Interval(2.0, 1.9, 2.1, "", is_lower_bound=True)) == "undecided"
        assert verdict_of_test(test, Interval(4.0, 3.9, 4.1, "", is_lower_bound=True)) == "holds"

    def test_every_seed_for_itself(self):
        test = asked(judge="every", at_least=1.0)
        assert verdict_of_test(test, interval_over_seeds([1.0, 1.0])) == "holds"
        assert verdict_of_test(test, interval_over_seeds([1.0, 0.0])) == "fails"
        assert verdict_of_test(test, None) == "not measured"

    @pytest.mark.parametrize(
        ("parts", "whole"),
        [
            (["holds", "holds"], "holds"),
            (["holds", "fails", "undecided"], "fails"),
            (["holds", "undecided"], "undecided"),
            (["holds", "not measured"], "undecided"),
            (["not measured", "not measured"], "not measured"),
        ],
    )
    def test_of_a_claim(self, parts, whole):
        assert combined_verdict(parts) == whole

    def test_ratio_to_a_target(self):
        """12 epochs against 18; against a run that never got there, all of its 18; and the other way round."""
        quick, slow, never = (
            measured("a"),
            measured("b", central=(0.5, 0.6, 0.8)),
            measured("b", central=(0.5, 0.5, 0.5)),
        )
        test = asked("ratio", figure="epochs_to", at_least=3.0)
        for other, mean in ((slow, 1.5), (never, 1.5)):
            claim = judge_claim(Claim(statement="", tests=[test]), Known(quick, other))
            assert claim.outcomes[0].interval.mean == mean
            assert claim.verdict == "undecided"  # one seed
            assert claim.outcomes[0].interval.is_lower_bound == (other is never)
        lost = judge_claim(Claim(statement="", tests=[test]), Known(measured("a", central=(0.1,)), slow))
        assert lost.outcomes[0].interval.mean == 0.0
        none = judge_claim(Claim(statement="", tests=[test]), Known(measured("a", central=(0.1,)), never))
        assert none.verdict == "undecided"  # both are finished, and neither was there

    def test_share_of_the_way(self):
        """From 50 to 90, 80 is three quarters of the way; where there is no way, nothing is said."""
        served = {"none": {"mean": 0.5}, "50": {"mean": 0.8}, "true": {"mean": 0.9}}
        test = asked("recovered", figure="unseen.50", at_least=0.5)
        found = judge_claim(Claim(statement="", tests=[test]), Known(measured("a", unseen=served)))
        assert found.outcomes[0].interval.mean == pytest.approx(0.75)
        flat = {"none": {"mean": 0.5}, "50": {"mean": 0.5}, "true": {"mean": 0.5}}
        assert judge_claim(Claim(statement="", tests=[test]), Known(measured("a", unseen=flat))).verdict == "undecided"
        assert judge_claim(Claim(statement="", tests=[test]), Known()).verdict == "not measured"

    @pytest.mark.parametrize(
        ("known", "judge", "said"),
        [((1.0, 1.0), "every", "undecided"), ((1.0, 0.0), "every", "fails"), ((1.0, 1.0), "interval", "undecided")],
    )
    def test_a_finished_run_without_the_figure_leaves_it_open(self, known, judge, said):
        """What is known of the other seeds is no more than that; one wrong seed is enough to refute `every`."""
        found = [measured("a", s, groups_ari=x) for s, x in enumerate(known)]
        test = asked(figure="ari", judge=judge, at_least=0.7)
        (outcome,) = judge_claim(Claim(statement="", tests=[test]), Known(*found, measured("a", 9))).outcomes
        assert (outcome.verdict, outcome.num_unknown, outcome.interval.values) == (said, 1, known)

    def test_a_pair_without_the_figure_leaves_it_open(self):
        served = {"50": {"mean": 0.7}}
        pairs = [measured(v, s, unseen=served) for v in "ab" for s in range(3)]
        test = asked("difference", figure="unseen.50", at_least=0.0)
        assert judge_claim(Claim(statement="", tests=[test]), Known(*pairs)).verdict == "holds"
        lacking = (measured("a", 3, unseen=served), measured("b", 3))
        assert judge_claim(Claim(statement="", tests=[test]), Known(*pairs, *lacking)).verdict == "undecided"

    def test_what_is_asked_of_split_runs_is_open_where_one_was_not_split(self):
        """What a gate costs cannot be told from a run without one."""
        others = [measured("b", s) for s in range(3)]
        cut, whole = ([measured("a", s, metrics={"probe.groups": n}) for s in range(3)] for n in (2.0, 1.0))
        test = asked("difference", given="split", at_least=-0.2)
        assert judge_claim(Claim(statement="", tests=[test]), Known(*cut, *others)).verdict == "holds"
        for some in ((*cut[:2], whole[2]), (*cut[:2], measured("a", 2))):
            assert judge_claim(Claim(statement="", tests=[test]), Known(*some, *others)).verdict == "undecided"

    def test_who_was_not_evaluated_as_the_others_needs_no_number_of_epochs(self):
        """Its target is not asked for, so all that it spent says nothing either."""
        test = asked("ratio", figure="epochs_to", at_least=1.0)
        found = judge_claim(Claim(statement="", tests=[test]), Known(measured("a"), measured("b", target=None)))
        assert (found.verdict, found.outcomes[0].interval) == ("undecided", None)


def test_the_last_that_says_something_wins():
    study = Study(
        title="t",
        fixed_beforehand="",
        our_variant="a",
        job={"rounds": 1, "lr": 0.1, "rows": 1, "epochs": 1, "set": {"train": {"clip": 1.0}}},
        variants={"a": {"method": "fedprox", "epochs": 5, "set": {"train": {"mu": 2.0}}}},
        variant_lists={"all": ("a",)},
        cells={"here": {"rows": 3, "target": 0.5}},
        budgets={"b": Budget(seeds=(4, 5), job={"lr": 0.2, "rows": 2}, cells={"here": {"play": ["all"], "rounds": 9}})},
    )
    first, second = study.entries("b")
    job = first.job
    assert (job.rounds, job.lr, job.max_train_samples, job.epochs, job.seed, job.variant) == (9, 0.2, 3, 5, 4, "a")
    assert job.set == {"train": {"clip": 1.0, "mu": 2.0}}
    assert [str(e.relative_path) for e in (first, second)] == ["here/a-4", "here/a-5"]


def test_a_target_is_of_variants_that_are_evaluated_in_the_same_rounds():
    study = Study(
        title="t",
        our_variant="a",
        job={"rounds": 10, "eval_every": 2},
        variants={"a": {}, "b": {"eval_every": 1000}, "c": {"eval_every": 2}},
        variant_lists={"all": ("b", "a", "c")},
        cells={"here": {"target": 0.5}},
        budgets={"x": Budget(seeds=(1,), cells={"here": {"play": ["all"]}})},
    )
    entries = study.entries("x")
    assert {e.variant: e.target_accuracy for e in entries} == {"a": 0.5, "b": None, "c": 0.5}
    assert StudyRuns(study, entries, Path("nowhere")).target_accuracy("here") == 0.5
