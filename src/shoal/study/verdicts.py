"""Judges the claims of a study by their limits and by the metrics of the runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from shoal.study.measurements import Interval, StudyRun, StudyRuns, interval_over_seeds
from shoal.study.plan import Claim, ClaimTest

Verdict = Literal["holds", "fails", "undecided", "not measured"]
TO_TARGET = {"epochs_to_target": "epochs", "joules_to_target": "joules"}


@dataclass(frozen=True)
class Outcome:
    """The outcome of one test in one cell."""

    test: ClaimTest
    cell: str
    interval: Interval | None
    num_unknown: int  # seeds that were run and have no number for the test
    verdict: Verdict


@dataclass(frozen=True)
class ClaimResult:
    """The outcomes of a claim's tests, and their combined verdict."""

    claim: Claim
    outcomes: tuple[Outcome, ...]
    verdict: Verdict


def judge_claim(claim: Claim, runs: StudyRuns) -> ClaimResult:
    """Judges every test of a claim in every cell."""
    outcomes = []
    for test in claim.tests:
        for cell in test.cells:
            numbers = numbers_by_seed(test, cell, runs)
            interval, num_unknown = interval_of_test(test, cell, runs, numbers), numbers.count(None)
            outcomes.append(Outcome(test, cell, interval, num_unknown, verdict_of_test(test, interval, num_unknown)))
    return ClaimResult(claim, tuple(outcomes), combined_verdict([o.verdict for o in outcomes]))


def combined_verdict(verdicts: Sequence[Verdict]) -> Verdict:
    """Returns the verdict of a claim. One failed test refutes it, and it holds only if every test holds."""
    if "fails" in verdicts:
        return "fails"
    if all(v == "not measured" for v in verdicts):
        return "not measured"
    return "holds" if all(v == "holds" for v in verdicts) else "undecided"


def verdict_of_test(test: ClaimTest, interval: Interval | None, num_unknown: int = 0) -> Verdict:
    """Returns the verdict of a test.

    By the interval, a test holds if the whole interval is within the limit, and fails if the whole interval is outside.
    By `every_seed`, each seed must be within the limit. If the number of a seed is unknown, the others decide nothing,
    except that one seed outside the limit refutes `every_seed`.
    """
    if interval is None:
        return "undecided" if num_unknown else "not measured"
    if test.criterion == "every_seed" and not all(_is_within_limit(test, x) for x in interval.values):
        return "fails"
    if num_unknown:
        return "undecided"
    if test.criterion == "every_seed":
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
    """Returns the number of every seed that was run.

    A number is None if a metric is missing, if `requires_positive` is not met, or if the run failed.
    """
    match test.kind:
        case "difference":
            numbers = [(run, _difference(test, run, baseline)) for run, baseline in _pairs(test, cell, runs)]
        case "ratio":
            numbers = [(run, _ratio(test, run, baseline)) for run, baseline in _pairs(test, cell, runs)]
        case "recovered":
            numbers = [(run, _recovered(test, run)) for run in runs.of_variant(cell, test.variant)]
        case "value":
            numbers = [(run, run.metric(test.metric)) for run in runs.of_variant(cell, test.variant)]
    failed = [None] * len(runs.failed_seeds(cell, test.variant, test.baseline))
    return [
        *(
            number if test.requires_positive is None or run.metric(test.requires_positive) else None
            for run, number in numbers
        ),
        *failed,
    ]


def _pairs(test: ClaimTest, cell: str, runs: StudyRuns) -> list[tuple[StudyRun, StudyRun]]:
    assert test.baseline is not None
    return runs.pairs(cell, test.variant, test.baseline)


def interval_of_test(test: ClaimTest, cell: str, runs: StudyRuns, numbers: Sequence[float | None]) -> Interval | None:
    """Returns the interval of the known numbers, or None without any. A single pair is compared by client."""
    known_numbers = [x for x in numbers if x is not None]
    if not known_numbers:
        return None
    if test.kind == "ratio":
        is_lower_bound = any(_never_reached(baseline, test.metric) for _, baseline in _pairs(test, cell, runs))
        return replace(interval_over_seeds(known_numbers), is_lower_bound=is_lower_bound)
    if test.kind == "difference" and test.baseline and len(numbers) == 1:
        return runs.difference(cell, test.variant, test.baseline, test.metric, test.baseline_metric)  # by client
    return interval_over_seeds(known_numbers)


def _difference(test: ClaimTest, run: StudyRun, baseline: StudyRun) -> float | None:
    value, reference = run.metric(test.metric), baseline.metric(test.baseline_metric or test.metric)
    return None if value is None or reference is None else value - reference


def _ratio(test: ClaimTest, run: StudyRun, baseline: StudyRun) -> float | None:
    """Returns the cost of the baseline divided by that of the run.

    If the baseline never reached its target, its total cost counts, which is a lower bound. If the run never reached
    it, the ratio is 0. If neither reached it, there is no ratio.
    """
    cost, reference = run.metric(test.metric), baseline.metric(test.metric)
    if cost is not None and _never_reached(baseline, test.metric):
        reference = baseline.total_cost()[TO_TARGET[test.metric]]
    if reference is None or (cost is None and not _never_reached(run, test.metric)):
        return None
    return reference / cost if cost else 0.0


def _never_reached(run: StudyRun, metric: str) -> bool:
    """Returns whether the run had a target that it did not reach."""
    return metric in TO_TARGET and run.entry.target_accuracy is not None and run.metric(metric) is None


def _recovered(test: ClaimTest, run: StudyRun) -> float | None:
    start, reached, goal = (run.metric(name) for name in (test.start_metric, test.metric, test.goal_metric))
    if start is None or reached is None or goal is None or goal == start:
        return None
    return (reached - start) / (goal - start)
