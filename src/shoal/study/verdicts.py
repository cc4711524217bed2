"""Claims judged by rule: the thresholds are the study's, the numbers are those of its runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from shoal.study.measurements import Interval, Measured, Runs, over_seeds
from shoal.study.plan import Check, Claim

Verdict = Literal["holds", "fails", "undecided", "not measured"]
TO_TARGET = {"epochs_to": "epochs", "joules_to": "joules"}


@dataclass(frozen=True)
class Outcome:
    """Of one test in one cell."""

    test: Check
    cell: str
    found: Interval | None
    unknown: int  # seeds that were played and have no such number
    verdict: Verdict


@dataclass(frozen=True)
class Judged:
    claim: Claim
    outcomes: tuple[Outcome, ...]
    verdict: Verdict


def judged(claim: Claim, runs: Runs) -> Judged:
    outcomes = []
    for test in claim.tests:
        for cell in test.cells:
            numbers = seeds(test, cell, runs)
            found, unknown = measured(test, cell, runs, numbers), numbers.count(None)
            outcomes.append(Outcome(test, cell, found, unknown, verdict(test, found, unknown)))
    return Judged(claim, tuple(outcomes), together([o.verdict for o in outcomes]))


def together(verdicts: Sequence[Verdict]) -> Verdict:
    """One failure refutes a claim; it holds where all of it was measured and holds."""
    if "fails" in verdicts:
        return "fails"
    if all(v == "not measured" for v in verdicts):
        return "not measured"
    return "holds" if all(v == "holds" for v in verdicts) else "undecided"


def verdict(test: Check, found: Interval | None, unknown: int = 0) -> Verdict:
    """By the interval: all of it on the right side, all on the wrong one, or neither. Or every seed for itself. Where a
    seed's number is unknown, the others decide nothing, but that a wrong one refutes `every`."""
    if found is None:
        return "undecided" if unknown else "not measured"
    if test.judge == "every" and not all(_right(test, x) for x in found.values):
        return "fails"
    if unknown:
        return "undecided"
    if test.judge == "every":
        return "holds"
    if found.low is None or found.high is None:
        return "undecided"
    if _right(test, found.low) and _right(test, found.high):
        return "holds"
    return "undecided" if found.bound or _right(test, found.low) or _right(test, found.high) else "fails"


def _right(test: Check, x: float) -> bool:
    return x >= test.at_least if test.at_least is not None else x <= (test.at_most or 0.0)


def seeds(test: Check, cell: str, runs: Runs) -> list[float | None]:
    """The number of every seed that was played; None where what it needs was not found, or not `given`, or failed."""
    match test.kind:
        case "difference":
            numbers = [(of, _difference(test, of, than)) for of, than in _pairs(test, cell, runs)]
        case "ratio":
            numbers = [(of, _ratio(test, of, than)) for of, than in _pairs(test, cell, runs)]
        case "recovered":
            numbers = [(m, _recovered(test, m)) for m in runs.of(cell, test.of)]
        case "value":
            numbers = [(m, m.figure(test.figure)) for m in runs.of(cell, test.of)]
    failed = [None] * len(runs.failed_seeds(cell, test.of, test.than))
    return [*(number if test.given is None or of.figure(test.given) else None for of, number in numbers), *failed]


def _pairs(test: Check, cell: str, runs: Runs) -> list[tuple[Measured, Measured]]:
    assert test.than is not None
    return runs.pairs(cell, test.of, test.than)


def measured(test: Check, cell: str, runs: Runs, numbers: Sequence[float | None]) -> Interval | None:
    known = [x for x in numbers if x is not None]
    if not known:
        return None
    if test.kind == "ratio":
        bound = any(_never(than, test.figure) for _, than in _pairs(test, cell, runs))
        return replace(over_seeds(known), bound=bound)
    if test.kind == "difference" and test.than and len(numbers) == 1:
        return runs.difference(cell, test.of, test.than, test.figure, test.than_figure)  # by client
    return over_seeds(known)


def _difference(test: Check, of: Measured, than: Measured) -> float | None:
    mine, other = of.figure(test.figure), than.figure(test.than_figure or test.figure)
    return None if mine is None or other is None else mine - other


def _ratio(test: Check, of: Measured, than: Measured) -> float | None:
    """Where the other never got to its target, all that it spent counts: it needs that at least. Where `of` never did,
    the ratio is 0; where neither did, there is none."""
    mine, other = of.figure(test.figure), than.figure(test.figure)
    if mine is not None and _never(than, test.figure):
        other = than.spent_in_all()[TO_TARGET[test.figure]]
    if other is None or (mine is None and not _never(of, test.figure)):
        return None
    return other / mine if mine else 0.0


def _never(m: Measured, figure: str) -> bool:
    """It had a target, and did not get there."""
    return figure in TO_TARGET and m.entry.target is not None and m.figure(figure) is None


def _recovered(test: Check, m: Measured) -> float | None:
    start, here, goal = (m.figure(name) for name in (test.start, test.figure, test.goal))
    if start is None or here is None or goal is None or goal == start:
        return None
    return (here - start) / (goal - start)
