"""Compares jobs by joules: the cost of an accuracy, and the accuracy at a budget of joules.

`shoal compare --to-accuracy` and `--at-budget` print what `Comparison` computes. `cost_curves.py` has the measures.
"""

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
    ACCURACY_DESCRIPTIONS,
    JOULE_PARTS,
    EnergyBreakdown,
    Spread,
    accuracy_at_budget,
    cost_curve,
    cost_to_accuracy,
    default_sustained_rounds,
    effective_accuracy_key,
    has_joules,
    server_joules_fraction,
    spread_over_seeds,
)
from shoal.report.summary import duration_text, joules_text, percent_text
from shoal.report.table import ReportTable, best_cells, spread_text
from shoal.store.reader import RunRecord, differing_settings, run_labels, runs_by_job

JOULES_PER_UNIT = {"J": 1.0, "kJ": 1e3, "MJ": 1e6, "Wh": 3600.0, "kWh": 3.6e6}
ENERGY_SETTINGS = ("devices", "link", "radio_w", "count_idle")
SERVER_NOTE_FRACTION = 0.1  # above this fraction of a run's joules, a note points out the server's joules


@dataclass(frozen=True)
class Budget:
    """A budget in joules, or as a fraction of the joules of the reference run."""

    text: str
    amount: float
    is_relative: bool  # True if the amount is a fraction of the reference, False if it is in joules

    def joules(self, reference_joules: float | None) -> float | None:
        """Returns the budget in joules, or None if it is relative and the joules of the reference are unknown."""
        if not self.is_relative:
            return self.amount
        return None if reference_joules is None else self.amount * reference_joules


@dataclass(frozen=True)
class ComparisonRequest:
    """What to compare: target accuracies, budgets, and the runs whose joules are 100 %."""

    target_accuracies: tuple[float, ...] = ()
    budgets: tuple[Budget, ...] = ()
    reference: str | None = None  # a name of runs; None chooses as `find_reference` does
    sustained_rounds: int | None = None  # None chooses as `default_sustained_rounds` does

    @classmethod
    def parse(
        cls,
        target_accuracies: str | None,
        budgets: str | None,
        reference: str | None = None,
        sustained_rounds: int | None = None,
    ) -> ComparisonRequest:
        """Returns the request of the command line, such as "0.4,0.5" and "60,80,1.5kJ"."""
        if sustained_rounds is not None and sustained_rounds < 1:
            raise UserError(
                f"--sustained-rounds is {sustained_rounds}. It must be a number of evaluated rounds, 1 or more."
            )
        if reference is not None and budgets is None:
            raise UserError(
                f"--reference is {reference!r}, but --at-budget is not given. The joules of the reference are the "
                "100 % of --at-budget. Give both, or leave --reference out."
            )
        return cls(
            tuple(dict.fromkeys(parse_target_accuracy("--to-accuracy", t) for t in target_accuracies.split(",")))
            if target_accuracies is not None
            else (),
            tuple(dict.fromkeys(parse_budget("--at-budget", t) for t in budgets.split(",")))
            if budgets is not None
            else (),
            reference,
            sustained_rounds,
        )


def parse_target_accuracy(flag: str, text: str) -> float:
    """Returns an accuracy above 0 and at most 1. Raises `UserError` for any other text."""
    target = _parse_number(text)
    if target is None or not 0 < target <= 1:
        raise UserError(f"{flag} has {text!r}. An accuracy must be above 0 and at most 1, such as 0.4.")
    return target


def parse_budget(flag: str, text: str) -> Budget:
    """Returns a budget such as 60 (percent), 500J or 2Wh. Raises `UserError` for any other text."""
    match = re.fullmatch(r"(.*?)\s*(%|[kM]?J|k?Wh)?", text.strip())
    number, unit = match.groups() if match else ("", None)
    amount = _parse_number(number)
    if amount is None or amount <= 0:
        raise UserError(
            f"{flag} has {text!r}. A budget must be a percentage such as 60, or joules such as 500J, 1.5kJ or 2Wh."
        )
    if unit in JOULES_PER_UNIT:
        return Budget(f"{amount:g} {unit}", amount * JOULES_PER_UNIT[unit], is_relative=False)
    return Budget(f"{amount:g} %", amount / 100, is_relative=True)


def _rounds_text(x: float) -> str:
    return f"{x:.1f}".removesuffix(".0")


def _parse_number(text: str) -> float | None:
    try:
        number = float(text)
    except ValueError:
        return None
    return number if isfinite(number) else None


@dataclass(frozen=True)
class Reference:
    """The runs whose joules are 100 % of a relative budget."""

    name: str
    num_runs: int
    joules: float | None  # of a whole run, mean over the runs; None if they failed

    @property
    def sentence(self) -> str:
        """A sentence that says how many joules are 100 %."""
        if self.joules is None:
            return f"The joules of 100 % are unknown because {self.name} failed."
        runs_text = f"the mean of {self.num_runs} runs" if self.num_runs > 1 else "the whole run"
        return f"100 % is {joules_text(self.joules)}: {runs_text} of {self.name}."


def find_reference(
    records: Sequence[RunRecord], reference_name: str | None = None, flag: str = "--reference"
) -> Reference:
    """Returns the reference of relative budgets: by default the runs of fedavg, or else the first run.

    Raises `UserError` if no run has the name, if the runs with that name differ in more than the seed, if none of them
    has finished, or if they have no joules.
    """
    name, runs = reference_runs(records, reference_name, flag)
    if all(run.failure for run in runs):
        return Reference(name, 0, None)
    if not (finished := [run for run in runs if run.is_finished]):
        raise UserError(
            f"The reference {name} has not finished, so the joules of 100 % are unknown. Give a budget in joules, such "
            "as 500J."
        )
    require_joules(finished)
    return Reference(name, len(finished), fmean(cost_curve(run)[-1].joules for run in finished))


def reference_runs(
    records: Sequence[RunRecord], reference_name: str | None, flag: str
) -> tuple[str, Sequence[RunRecord]]:
    """Returns the name of the reference and its runs, finished or not."""
    names: dict[str, list[RunRecord]] = {name: [run] for name, run in zip(run_labels(records), records, strict=True)}
    names |= dict(runs_by_job(records))
    for method in {run.label for run in records}:
        same_label = [r for r in records if r.label == method]
        names[method] = (
            same_label if len(differing_settings(same_label)) == 0 or differing_settings(same_label) == ["seed"] else []
        )
    if reference_name is None:
        reference_name = "fedavg" if "fedavg" in names else run_labels(records)[0]
    if names.get(reference_name):
        return reference_name, names[reference_name]
    if reference_name in names:
        raise UserError(
            f"{flag} is {reference_name!r}, but its runs differ in more than the seed. "
            f"Give one of {_list_names(names)}."
        )
    if same_folder := [run for run in records if run.path.resolve() == Path(reference_name).resolve()]:
        return reference_name, same_folder
    raise UserError(
        f"{flag} is {reference_name!r}, which is not one of the runs. "
        f"Give one of {_list_names(names)}, or a run directory."
    )


def _list_names(names: Mapping[str, Sequence[RunRecord]]) -> str:
    return ", ".join(name for name, runs in names.items() if runs)


def require_joules(records: Sequence[RunRecord]) -> None:
    """Raises `UserError` if a run has no joules."""
    for run in records:
        if not has_joules(run):
            raise UserError(f"{run.path} has no joules in its rounds.jsonl, so it cannot be compared by joules.")


@dataclass(frozen=True)
class ToAccuracy:
    """The cost until a job sustained a target accuracy. A spread is None if no seed sustained it."""

    label: str
    method: str
    seeds: list[int]
    accuracy_key: str
    target_accuracy: float
    sustained_rounds: int
    round: Spread | None
    joules: Spread | None
    joules_by_part: Mapping[str, Spread | None]
    sim_s: Spread | None


@dataclass(frozen=True)
class AtBudget:
    """The highest accuracy that a job sustained within a budget. It is None if no seed sustained any."""

    label: str
    method: str
    seeds: list[int]
    accuracy_key: str
    budget: str
    budget_joules: float | None
    sustained_rounds: int
    accuracy: Spread | None


class Comparison:
    """The results of a request: one row per job (over its seeds) and one entry per target accuracy or budget."""

    def __init__(self, records: Sequence[RunRecord], request: ComparisonRequest) -> None:
        self.request = request
        self.jobs = runs_by_job(records)
        self.sustained_rounds = request.sustained_rounds or default_sustained_rounds(records)
        if request.target_accuracies or request.budgets:
            require_joules([run for _, runs in self.jobs for run in runs])
        relative = any(budget.is_relative for budget in request.budgets)
        self.reference = find_reference(records, request.reference) if relative or request.reference else None
        self.to_accuracy = [
            [self._cost_to_accuracy(*job, target) for target in request.target_accuracies] for job in self.jobs
        ]
        reference_joules = self.reference.joules if self.reference else None
        self.budgets = [(budget, budget.joules(reference_joules)) for budget in request.budgets]
        self.at_budget = [[self._accuracy_at_budget(*job, *budget) for budget in self.budgets] for job in self.jobs]

    def to_json(self) -> dict[str, list[dict[str, Any]]]:
        """Returns the results as lists for `--json`. Lists that were not requested are left out."""
        results = {
            "to_accuracy": [asdict(a) for row in self.to_accuracy for a in row],
            "at_budget": [asdict(a) for row in self.at_budget for a in row],
        }
        return {key: rows for key, rows in results.items() if rows}

    def tables(self) -> list[ReportTable]:
        """Returns the tables that were requested."""
        tables = (self._accuracy_table(), self._budget_table()) if self.jobs else ()
        return [table for table in tables if len(table.headers) > 1]

    def _cost_to_accuracy(self, label: str, runs: Sequence[RunRecord], target_accuracy: float) -> ToAccuracy:
        reached = [cost_to_accuracy(run, target_accuracy, self.sustained_rounds) for run in runs]
        return ToAccuracy(
            *_job_fields(label, runs),
            target_accuracy,
            self.sustained_rounds,
            spread_over_seeds([r.round if r else None for r in reached]),
            spread_over_seeds([r.joules if r else None for r in reached]),
            {part: spread_over_seeds([r.joules_by_part[part] if r else None for r in reached]) for part in JOULE_PARTS},
            spread_over_seeds([r.sim_s if r else None for r in reached]),
        )

    def _accuracy_at_budget(
        self, label: str, runs: Sequence[RunRecord], budget: Budget, joules: float | None
    ) -> AtBudget:
        accuracy = spread_over_seeds([accuracy_at_budget(run, joules, self.sustained_rounds) for run in runs])
        return AtBudget(*_job_fields(label, runs), budget.text, joules, self.sustained_rounds, accuracy)

    def _accuracy_table(self) -> ReportTable:
        rows = [
            [
                text
                for a in row
                for text in (
                    spread_text(a.joules, joules_text),
                    spread_text(a.sim_s, duration_text),
                    spread_text(a.round, _rounds_text),
                )
            ]
            for row in self.to_accuracy
        ]
        sustained_note = (
            f"The cost until the run had sustained this accuracy for {self.sustained_rounds} evaluated rounds in a "
            "row. – means that it never did."
        )
        return ReportTable(
            "Joules, simulated time and rounds to reach an accuracy",
            (
                "Run",
                *(h for target in self.request.target_accuracies for h in (f"to {100 * target:g} %", "time", "rounds")),
            ),
            self._with_row_headers(rows),
            best_cells(
                [[row[i].joules for row in self.to_accuracy] for i in range(len(self.request.target_accuracies))],
                min,
                step=3,
            ),
            (sustained_note, *self._notes()),
        )

    def _budget_table(self) -> ReportTable:
        rows = [[spread_text(a.accuracy, percent_text) for a in row] for row in self.at_budget]
        headers = [
            f"{budget.text}\n{joules_text(joules)}" if budget.is_relative and joules is not None else budget.text
            for budget, joules in self.budgets
        ]
        sustained_note = (
            f"The highest accuracy (%) that was sustained for {self.sustained_rounds} evaluated rounds in a row. "
            "– means that there was none."
        )
        return ReportTable(
            "Accuracy at a budget of joules",
            ("Run", *headers),
            self._with_row_headers(rows),
            best_cells([[row[i].accuracy for row in self.at_budget] for i in range(len(headers))], max),
            (sustained_note, *((self.reference.sentence,) if self.reference else ()), *self._notes()),
        )

    def _with_row_headers(self, rows: Sequence[Sequence[str]]) -> tuple[tuple[str, ...], ...]:
        return tuple((_row_header(*job), *row) for job, row in zip(self.jobs, rows, strict=True))

    def _notes(self) -> list[str]:
        runs = [run for _, job_runs in self.jobs for run in job_runs]
        return [
            *joules_notes(runs),
            accuracy_note(self.jobs),
            *device_notes(self.jobs),
            *short_run_notes(self.jobs, self.sustained_rounds),
        ]


def joules_notes(runs: Sequence[RunRecord], exclude_hint: str = "shoal compare --joules clients") -> list[str]:
    """Returns a sentence on which joules are counted, and a caution if a large part of them is the server's."""
    if all(run.joules_scope == "clients" for run in runs):
        return ["Joules are those of all clients (modelled), without the server."]
    notes = ["Joules are those of all clients (modelled) and of the server (processor seconds times assumed watts)."]
    max_server_fraction = max(map(server_joules_fraction, runs), default=0.0)
    if max_server_fraction > SERVER_NOTE_FRACTION:
        notes.append(
            f"Up to {max_server_fraction:.0%} of a run’s joules are the server’s. They are measured and vary from "
            f"run to run. {exclude_hint} excludes them."
        )
    return notes


def energy_breakdown_table(breakdowns: Sequence[EnergyBreakdown], notes: Sequence[str] = ()) -> ReportTable:
    """Returns the numbers of the bars of `joule_bars`, of which some are too small to be seen there."""
    rows = []
    for breakdown in breakdowns:
        parts = [
            f"{joules_text(x)}\n{100 * x / (breakdown.joules or 1):.2g} %"
            for x in (breakdown.joules_by_part[part] for part in JOULE_PARTS)
        ]
        totals = map(joules_text, (breakdown.joules, breakdown.whole_joules))
        rows.append((breakdown.label, *parts, *totals, _rounds_text(breakdown.mean_rounds)))
    headers = ("Run", *JOULE_PARTS, "total", "whole run", "rounds")
    return ReportTable("", headers, tuple(rows), notes=tuple(notes))


def _job_fields(label: str, runs: Sequence[RunRecord]) -> tuple[str, str, list[int], str]:
    return label, runs[0].label, [run.config["seed"] for run in runs], effective_accuracy_key(runs[0])


def _row_header(label: str, runs: Sequence[RunRecord]) -> str:
    seeds = f"{len(runs)} seeds" if len(runs) > 1 else ""
    unfinished = "" if runs[0].is_finished else "unfinished"
    return "\n".join(filter(None, (label, seeds, unfinished)))


def accuracy_note(jobs: Sequence[tuple[str, Sequence[RunRecord]]]) -> str:
    """Returns a sentence on which accuracy is compared, with a caution if it is not the same for all jobs."""
    labels_by_key: dict[str, list[str]] = {}
    for label, runs in jobs:
        labels_by_key.setdefault(effective_accuracy_key(runs[0]), []).append(label)
    if len(labels_by_key) == 1:
        return f"Accuracy means {ACCURACY_DESCRIPTIONS[next(iter(labels_by_key))]}."
    descriptions = ", and ".join(
        f"{ACCURACY_DESCRIPTIONS[key]} for {', '.join(labels)}" for key, labels in labels_by_key.items()
    )
    return f"Accuracy means {descriptions}. These two accuracies are not directly comparable."


def device_notes(jobs: Sequence[tuple[str, Sequence[RunRecord]]]) -> list[str]:
    """Returns a caution if the jobs differ in settings that change the modelled energy."""
    differing = [key for key in differing_settings([runs[0] for _, runs in jobs]) if key in ENERGY_SETTINGS]
    if not differing:
        return []
    return [f"These runs differ in {', '.join(differing)}, so their joules are not directly comparable."]


def short_run_notes(jobs: Sequence[tuple[str, Sequence[RunRecord]]], sustained_rounds: int) -> list[str]:
    """Returns a note on jobs with too few evaluated rounds, whose dash does not mean that they failed to learn."""
    short = [label for label, runs in jobs if any(len(run.evaluated_rounds) < sustained_rounds for run in runs)]
    if not short:
        return []
    return [
        f"These runs have fewer than {sustained_rounds} evaluated rounds: {', '.join(short)}. "
        "Lower --sustained-rounds to compare them."
    ]
