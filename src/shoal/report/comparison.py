"""What is asked of a comparison besides its table: joules to an accuracy, accuracy at a budget of joules."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from math import isfinite
from pathlib import Path
from statistics import fmean
from typing import Any

from shoal.errors import UserError
from shoal.report.cost_curves import (
    OF_ACCURACY,
    PART_NAMES,
    PARTS,
    Bill,
    Spread,
    accuracy_of,
    at_budget,
    course,
    has_joules,
    over_seeds,
    server_share,
    to_accuracy,
    usual_held,
)
from shoal.report.summary import duration, joules_text, percent
from shoal.report.table import Sheet, best_cells, spread_text
from shoal.store.reader import RunRecord, differing_settings, run_labels, runs_by_job

UNITS = {"J": 1.0, "kJ": 1e3, "MJ": 1e6, "Wh": 3600.0, "kWh": 3.6e6}
OF_JOULES = ("devices", "link", "radio_w", "count_idle")
SERVER_TOLD = 0.1  # the share of a run's joules from which on the server's are pointed out


@dataclass(frozen=True)
class Budget:
    text: str
    amount: float
    relative: bool  # a share of the reference, else joules

    def joules(self, reference_joules: float | None) -> float | None:
        """None: a share of what is not known."""
        if not self.relative:
            return self.amount
        return None if reference_joules is None else self.amount * reference_joules


@dataclass(frozen=True)
class Questions:
    levels: tuple[float, ...] = ()
    budgets: tuple[Budget, ...] = ()
    of: str | None = None  # whose joules are 100 %
    held: int | None = None  # None: `usual_held`

    @classmethod
    def parse(
        cls, levels: str | None, budgets: str | None, of: str | None = None, held: int | None = None
    ) -> Questions:
        """From the options of the command line: "0.4,0.5" and "60,80,1.5kJ"."""
        if held is not None and held < 1:
            raise UserError(f"--held is {held}; it must be a number of evaluated rounds, 1 or more")
        if of is not None and budgets is None:
            raise UserError(f"--of is {of!r}, but it says whose joules are 100 % of --at-budget, which is not given")
        return cls(
            tuple(dict.fromkeys(parse_level("--to-accuracy", t) for t in levels.split(",")))
            if levels is not None
            else (),
            tuple(dict.fromkeys(parse_budget("--at-budget", t) for t in budgets.split(",")))
            if budgets is not None
            else (),
            of,
            held,
        )


def parse_level(where: str, text: str) -> float:
    level = _number(text)
    if level is None or not 0 < level <= 1:
        raise UserError(f"{where} has {text!r}; an accuracy must be above 0 and at most 1, such as 0.4")
    return level


def parse_budget(where: str, text: str) -> Budget:
    found = re.fullmatch(r"(.*?)\s*(%|[kM]?J|k?Wh)?", text.strip())
    number, unit = found.groups() if found else ("", None)
    amount = _number(number)
    if amount is None or amount <= 0:
        raise UserError(
            f"{where} has {text!r}; a budget must be percents such as 60, or joules such as 500J, 1.5kJ, 2Wh"
        )
    if unit in UNITS:
        return Budget(f"{amount:g} {unit}", amount * UNITS[unit], relative=False)
    return Budget(f"{amount:g} %", amount / 100, relative=True)


def _rounds(x: float) -> str:
    return f"{x:.1f}".removesuffix(".0")


def _number(text: str) -> float | None:
    try:
        number = float(text)
    except ValueError:
        return None
    return number if isfinite(number) else None


@dataclass(frozen=True)
class Reference:
    name: str
    runs: int
    joules: float | None  # of a whole run, their mean; None: they failed

    @property
    def sentence(self) -> str:
        if self.joules is None:
            return f"What 100 % is is not known, because {self.name} failed."
        whose = f"the mean of {self.runs} runs" if self.runs > 1 else "the whole run"
        return f"100 % is {joules_text(self.joules)}: {whose} of {self.name}."


def reference(records: Sequence[RunRecord], of: str | None = None, where: str = "--of") -> Reference:
    """Whose joules are 100 %: by default the runs of fedavg, else the first run."""
    name, runs = referred(records, of, where)
    if all(run.failure for run in runs):
        return Reference(name, 0, None)
    if not (finished := [run for run in runs if run.is_finished]):
        raise UserError(
            f"the reference {name} has not finished, so what 100 % is is not known; give joules, such as 500J"
        )
    require_joules(finished)
    return Reference(name, len(finished), fmean(course(run)[-1].joules for run in finished))


def referred(records: Sequence[RunRecord], of: str | None, where: str) -> tuple[str, Sequence[RunRecord]]:
    """The runs that are called so, finished or not."""
    names: dict[str, list[RunRecord]] = {name: [run] for name, run in zip(run_labels(records), records, strict=True)}
    names |= dict(runs_by_job(records))
    for method in {run.label for run in records}:
        same = [r for r in records if r.label == method]
        names[method] = same if len(differing_settings(same)) == 0 or differing_settings(same) == ["seed"] else []
    if of is None:
        of = "fedavg" if "fedavg" in names else run_labels(records)[0]
    if names.get(of):
        return of, names[of]
    if of in names:
        raise UserError(f"{where} is {of!r}, but its runs differ in more than the seed; give one of {_known(names)}")
    if here := [run for run in records if run.path.resolve() == Path(of).resolve()]:
        return of, here
    raise UserError(f"{where} is {of!r}, which is none of the runs; give one of {_known(names)}, or a run directory")


def _known(names: Mapping[str, Sequence[RunRecord]]) -> str:
    return ", ".join(name for name, runs in names.items() if runs)


def require_joules(records: Sequence[RunRecord]) -> None:
    for run in records:
        if not has_joules(run):
            raise UserError(f"{run.path} has no joules in its rounds.jsonl; it cannot be compared by them")


@dataclass(frozen=True)
class ToAccuracy:
    label: str
    method: str
    seeds: list[int]
    accuracy_of: str
    level: float
    held: int
    round: Spread | None
    joules: Spread | None
    parts: Mapping[str, Spread | None]
    sim_s: Spread | None


@dataclass(frozen=True)
class AtBudget:
    label: str
    method: str
    seeds: list[int]
    accuracy_of: str
    budget: str
    budget_joules: float | None
    held: int
    accuracy: Spread | None


class Answers:
    """Of every job, over its seeds: a row per job, an answer per level or budget."""

    def __init__(self, records: Sequence[RunRecord], questions: Questions) -> None:
        self.questions = questions
        self.groups = runs_by_job(records)
        self.held = questions.held or usual_held(records)
        if questions.levels or questions.budgets:
            require_joules([run for _, runs in self.groups for run in runs])
        relative = any(budget.relative for budget in questions.budgets)
        self.reference = reference(records, questions.of) if relative or questions.of else None
        self.to_accuracy = [[self._reached(*group, level) for level in questions.levels] for group in self.groups]
        whole = self.reference.joules if self.reference else None
        self.budgets = [(budget, budget.joules(whole)) for budget in questions.budgets]
        self.at_budget = [[self._bought(*group, *budget) for budget in self.budgets] for group in self.groups]

    def json(self) -> dict[str, list[dict[str, Any]]]:
        """Only what was asked for."""
        found = {
            "to_accuracy": [asdict(a) for row in self.to_accuracy for a in row],
            "at_budget": [asdict(a) for row in self.at_budget for a in row],
        }
        return {key: rows for key, rows in found.items() if rows}

    def sheets(self) -> list[Sheet]:
        sheets = (self._accuracy_sheet(), self._budget_sheet()) if self.groups else ()
        return [sheet for sheet in sheets if len(sheet.heads) > 1]

    def _reached(self, label: str, runs: Sequence[RunRecord], level: float) -> ToAccuracy:
        found = [to_accuracy(run, level, self.held) for run in runs]
        return ToAccuracy(
            *_who(label, runs),
            level,
            self.held,
            over_seeds([r.round if r else None for r in found]),
            over_seeds([r.joules if r else None for r in found]),
            {part: over_seeds([r.parts[part] if r else None for r in found]) for part in PARTS},
            over_seeds([r.sim_s if r else None for r in found]),
        )

    def _bought(self, label: str, runs: Sequence[RunRecord], budget: Budget, joules: float | None) -> AtBudget:
        accuracy = over_seeds([at_budget(run, joules, self.held) for run in runs])
        return AtBudget(*_who(label, runs), budget.text, joules, self.held, accuracy)

    def _accuracy_sheet(self) -> Sheet:
        rows = [
            [
                text
                for a in row
                for text in (
                    spread_text(a.joules, joules_text),
                    spread_text(a.sim_s, duration),
                    spread_text(a.round, _rounds),
                )
            ]
            for row in self.to_accuracy
        ]
        held = f"Until accuracy had been there or above for {self.held} evaluated rounds in a row; –: never."
        return Sheet(
            "Joules, simulated time and rounds to an accuracy",
            ("Run", *(h for level in self.questions.levels for h in (f"to {100 * level:g} %", "time", "rounds"))),
            self._named(rows),
            best_cells(
                [[row[i].joules for row in self.to_accuracy] for i in range(len(self.questions.levels))], min, step=3
            ),
            (held, *self._notes()),
        )

    def _budget_sheet(self) -> Sheet:
        rows = [[spread_text(a.accuracy, percent) for a in row] for row in self.at_budget]
        heads = [
            f"{budget.text}\n{joules_text(joules)}" if budget.relative and joules is not None else budget.text
            for budget, joules in self.budgets
        ]
        held = f"The highest accuracy (%) that was held for {self.held} evaluated rounds in a row; –: none was."
        return Sheet(
            "Accuracy at a budget of joules",
            ("Run", *heads),
            self._named(rows),
            best_cells([[row[i].accuracy for row in self.at_budget] for i in range(len(heads))], max),
            (held, *((self.reference.sentence,) if self.reference else ()), *self._notes()),
        )

    def _named(self, rows: Sequence[Sequence[str]]) -> tuple[tuple[str, ...], ...]:
        return tuple((_name(*group), *row) for group, row in zip(self.groups, rows, strict=True))

    def _notes(self) -> list[str]:
        runs = [run for _, group in self.groups for run in group]
        return [
            *joules_notes(runs),
            accuracy_note(self.groups),
            *other_devices(self.groups),
            *short_runs(self.groups, self.held),
        ]


def joules_notes(runs: Sequence[RunRecord], leave_out: str = "shoal compare --joules clients") -> list[str]:
    """Whose joules these are, and a caution where those measured are many."""
    if all(run.joules_scope == "clients" for run in runs):
        return ["Joules: of all clients (modelled), without the server."]
    told = ["Joules: of all clients (modelled) and of the server (its processor seconds, times assumed watts)."]
    most = max(map(server_share, runs), default=0.0)
    if most > SERVER_TOLD:
        told.append(
            f"Up to {most:.0%} of a run’s joules are the server’s: measured, they vary from run to run; "
            f"{leave_out} leaves them out."
        )
    return told


def bill_sheet(jobs: Sequence[Bill], notes: Sequence[str] = ()) -> Sheet:
    """The numbers of the bars: what is too small to be seen there."""
    rows = []
    for bill in jobs:
        shares = [
            f"{joules_text(x)}\n{100 * x / (bill.joules or 1):.2g} %" for x in (bill.parts[part] for part in PARTS)
        ]
        rows.append((bill.label, *shares, *map(joules_text, (bill.joules, bill.whole_joules)), _rounds(bill.rounds)))
    heads = ("Run", *(PART_NAMES[part] for part in PARTS), "together", "whole run", "rounds")
    return Sheet("", heads, tuple(rows), notes=tuple(notes))


def _who(label: str, runs: Sequence[RunRecord]) -> tuple[str, str, list[int], str]:
    return label, runs[0].label, [run.config["seed"] for run in runs], accuracy_of(runs[0])


def _name(label: str, runs: Sequence[RunRecord]) -> str:
    seeds = f"{len(runs)} seeds" if len(runs) > 1 else ""
    unfinished = "" if runs[0].is_finished else "unfinished"
    return "\n".join(filter(None, (label, seeds, unfinished)))


def accuracy_note(groups: Sequence[tuple[str, Sequence[RunRecord]]]) -> str:
    kinds: dict[str, list[str]] = {}
    for label, runs in groups:
        kinds.setdefault(accuracy_of(runs[0]), []).append(label)
    if len(kinds) == 1:
        return f"Accuracy: {OF_ACCURACY[next(iter(kinds))]}."
    told = "; ".join(f"{OF_ACCURACY[kind]} for {', '.join(who)}" for kind, who in kinds.items())
    return f"Accuracy: {told}. These are not the same thing."


def other_devices(groups: Sequence[tuple[str, Sequence[RunRecord]]]) -> list[str]:
    unlike = [key for key in differing_settings([runs[0] for _, runs in groups]) if key in OF_JOULES]
    return [f"These runs differ in {', '.join(unlike)}: their joules are not directly comparable."] if unlike else []


def short_runs(groups: Sequence[tuple[str, Sequence[RunRecord]]], held: int) -> list[str]:
    """Who cannot have held anything: a dash must not be read as a failure to learn."""
    short = [label for label, runs in groups if any(len(run.evaluated_rounds) < held for run in runs)]
    return [f"Fewer than {held} evaluated rounds: {', '.join(short)}; --held asks for fewer."] if short else []
