"""Claims judged by rule: the thresholds are the study's, the numbers are those of its runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from shoal.study.figures import Interval, Measured, Runs, over_seeds
from shoal.study.plan import Check, Claim

Verdict = Literal["holds", "fails", "undecided", "not measured"]
TO_TARGET = {"epochs_to": "epochs", "joules_to": "joules"}


@dataclass(frozen=True)
class Outcome:
    """Of one test in one cell."""

    test: Check
    cell: str
    found: Interval | None
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
            found = measured(test, cell, runs)
            outcomes.append(Outcome(test, cell, found, verdict(test, found)))
    return Judged(claim, tuple(outcomes), together([o.verdict for o in outcomes]))


def together(verdicts: Sequence[Verdict]) -> Verdict:
    """One failure refutes a claim; it holds where all of it was measured and holds."""
    if "fails" in verdicts:
        return "fails"
    if all(v == "not measured" for v in verdicts):
        return "not measured"
    return "holds" if all(v == "holds" for v in verdicts) else "undecided"


def verdict(test: Check, found: Interval | None) -> Verdict:
    """By the interval: all of it on the right side, all on the wrong one, or neither. Or every seed for itself."""
    if found is None:
        return "not measured"
    if test.judge == "every":
        return "holds" if all(_right(test, x) for x in found.values) else "fails"
    if found.low is None or found.high is None:
        return "undecided"
    if _right(test, found.low) and _right(test, found.high):
        return "holds"
    return "undecided" if found.bound or _right(test, found.low) or _right(test, found.high) else "fails"


def _right(test: Check, x: float) -> bool:
    return x >= test.at_least if test.at_least is not None else x <= (test.at_most or 0.0)


def measured(test: Check, cell: str, runs: Runs) -> Interval | None:
    match test.kind:
        case "difference":
            assert test.than is not None
            return runs.difference(cell, test.of, test.than, test.figure, test.than_figure)
        case "ratio":
            assert test.than is not None
            return _ratios(runs.pairs(cell, test.of, test.than), test.figure)
        case "recovered":
            numbers = [_recovered(m, test) for m in runs.of(cell, test.of)]
        case "value":
            numbers = [m.figure(test.figure) for m in runs.of(cell, test.of)]
    known = [x for x in numbers if x is not None]
    return over_seeds(known) if known else None


def _ratios(pairs: Sequence[tuple[Measured, Measured]], figure: str) -> Interval | None:
    """Where the other never got to its target, all that it spent counts: it needs that at least. Where `of` never did,
    the ratio is 0; where neither did, there is none."""
    known, bound = [], False
    for of, than in pairs:
        mine, other = of.figure(figure), than.figure(figure)
        if other is None and mine is not None and figure in TO_TARGET:
            other, bound = than.spent_in_all()[TO_TARGET[figure]], True
        if other is not None:
            known.append(other / mine if mine else 0.0)
    return replace(over_seeds(known), bound=bound) if known else None


def _recovered(m: Measured, test: Check) -> float | None:
    start, here, goal = (m.figure(name) for name in (test.start, test.figure, test.goal))
    if start is None or here is None or goal is None or goal == start:
        return None
    return (here - start) / (goal - start)
