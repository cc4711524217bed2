"""Claims judged by rule: the thresholds are the study's, the numbers are those of its runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from shoal.study.measurements import Interval, StudyRun, StudyRuns, interval_over_seeds
from shoal.study.plan import Claim, ClaimTest

Verdict = Literal["holds", "fails", "undecided", "not measured"]
TO_TARGET = {"epochs_to": "epochs", "joules_to": "joules"}


@dataclass(frozen=True)
class Outcome:
    """Of one test in one cell."""

    test: ClaimTest
    cell: str
    interval: Interval | None
    num_unknown: int  # seeds that were played and have no such number
    verdict: Verdict


@dataclass(frozen=True)
class ClaimResult:
    claim: Claim
    outcomes: tuple[Outcome, ...]
    verdict: Verdict


def judge_claim(claim: Claim, runs: StudyRuns) -> ClaimResult:
    outcomes = []
    for test in claim.tests:
        for cell in test.cells:
            numbers = numbers_by_seed(test, cell, runs)
            found, unknown = interval_of_test(test, cell, runs, numbers), numbers.count(None)
            outcomes.append(Outcome(test, cell, found, unknown, verdict_of_test(test, found, unknown)))
    return ClaimResult(claim, tuple(outcomes), combined_verdict([o.verdict for o in outcomes]))


def combined_verdict(verdicts: Sequence[Verdict]) -> Verdict:
    """One failure refutes a claim; it holds where all of it was measured and holds."""
    if "fails" in verdicts:
        return "fails"
    if all(v == "not measured" for v in verdicts):
        return "not measured"
    return "holds" if all(v == "holds" for v in verdicts) else "undecided"


def verdict_of_test(test: ClaimTest, interval: Interval | None, num_unknown: int = 0) -> Verdict:
    """By the interval: all of it on the right side, all on the wrong one, or neither. Or every seed for itself. Where a
    seed's number is unknown, the others decide nothing, but that a wrong one refutes `every`."""
    if interval is None:
        return "undecided" if num_unknown else "not measured"
    if test.criterion == "every" and not all(_is_within_limit(test, x) for x in interval.values):
        return "fails"
    if num_unknown:
        return "undecided"
    if test.criterion == "every":
        return "holds"
    if interval.low is None or interval.high is None:
        return "undecided"
    if _is_within_limit(test, interval.low) and _is_within_limit(test, interval.high):
        return "holds"
    return (
        "undecided"
        if interval.is_lower_bound or _is_within_limit(test, interval.low) or _is_within_limit(test, interval.high)
        else "fails"
    )


def _is_within_limit(test: ClaimTest, x: float) -> bool:
    return x >= test.at_least if test.at_least is not None else x <= (test.at_most or 0.0)


def numbers_by_seed(test: ClaimTest, cell: str, runs: StudyRuns) -> list[float | None]:
    """The number of every seed that was played; None where what it needs was not found, or not `given`, or failed."""
    match test.kind:
        case "difference":
            numbers = [(of, _difference(test, of, than)) for of, than in _pairs(test, cell, runs)]
        case "ratio":
            numbers = [(of, _ratio(test, of, than)) for of, than in _pairs(test, cell, runs)]
        case "recovered":
            numbers = [(m, _recovered(test, m)) for m in runs.of_variant(cell, test.variant)]
        case "value":
            numbers = [(m, m.metric(test.metric)) for m in runs.of_variant(cell, test.variant)]
    failed = [None] * len(runs.failed_seeds(cell, test.variant, test.baseline))
    return [
        *(
            number if test.requires_positive is None or of.metric(test.requires_positive) else None
            for of, number in numbers
        ),
        *failed,
    ]


def _pairs(test: ClaimTest, cell: str, runs: StudyRuns) -> list[tuple[StudyRun, StudyRun]]:
    assert test.baseline is not None
    return runs.pairs(cell, test.variant, test.baseline)


def interval_of_test(test: ClaimTest, cell: str, runs: StudyRuns, numbers: Sequence[float | None]) -> Interval | None:
    known = [x for x in numbers if x is not None]
    if not known:
        return None
    if test.kind == "ratio":
        bound = any(_never_reached(than, test.metric) for _, than in _pairs(test, cell, runs))
        return replace(interval_over_seeds(known), is_lower_bound=bound)
    if test.kind == "difference" and test.baseline and len(numbers) == 1:
        return runs.difference(cell, test.variant, test.baseline, test.metric, test.baseline_metric)  # by client
    return interval_over_seeds(known)


def _difference(test: ClaimTest, run: StudyRun, baseline: StudyRun) -> float | None:
    mine, other = run.metric(test.metric), baseline.metric(test.baseline_metric or test.metric)
    return None if mine is None or other is None else mine - other


def _ratio(test: ClaimTest, run: StudyRun, baseline: StudyRun) -> float | None:
    """Where the other never got to its target, all that it spent counts: it needs that at least. Where `of` never did,
    the ratio is 0; where neither did, there is none."""
    mine, other = run.metric(test.metric), baseline.metric(test.metric)
    if mine is not None and _never_reached(baseline, test.metric):
        other = baseline.total_cost()[TO_TARGET[test.metric]]
    if other is None or (mine is None and not _never_reached(run, test.metric)):
        return None
    return other / mine if mine else 0.0


def _never_reached(run: StudyRun, metric: str) -> bool:
    """It had a target, and did not get there."""
    return metric in TO_TARGET and run.entry.target_accuracy is not None and run.metric(metric) is None


def _recovered(test: ClaimTest, run: StudyRun) -> float | None:
    start, reached, goal = (run.metric(name) for name in (test.start_metric, test.metric, test.goal_metric))
    if start is None or reached is None or goal is None or goal == start:
        return None
    return (reached - start) / (goal - start)
