"""Our numbers beside a paper's, and whether they put the methods in the same order.

Absolute numbers hang on hardware, splits and seeds; an ordering that survives them is what a reproduction can show.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import combinations
from math import sqrt
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from shoal.errors import UserError, did_you_mean
from shoal.report.comparison import (
    JOULES_PER_UNIT,
    Reference,
    accuracy_note,
    find_reference,
    joules_notes,
    parse_budget,
    parse_target_accuracy,
    reference_runs,
    require_joules,
    short_run_notes,
)
from shoal.report.cost_curves import (
    SUSTAINED_ROUNDS,
    Spread,
    accuracy_at_budget,
    cost_to_accuracy,
    final_accuracy,
    final_metric,
    parse_accuracy,
    spread_over_seeds,
)
from shoal.report.paper_tables import Cell, Ordering, PaperTable, Verdict
from shoal.store.reader import RunRecord, runs_by_job

END_METRICS = ("final", "figures")


class Paper(BaseModel):
    """The [paper] table of a recipe. A row is a method, or the values of other keys of a job (`rows`), or a figure of
    rounds. The key of a column is a budget or a level or `final`, or the values of keys of a job (`by`)."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    source: str
    metric: Literal["at_budget", "to_accuracy", "final", "figures"]
    columns: dict[str, dict[str, float]]  # column -> row -> the paper's number
    row_keys: tuple[str, ...] = ("method",)
    column_keys: tuple[str, ...] = ()
    accuracy: Literal["central", "local"] | None = None
    unit: str = "%"
    sustained_rounds: int = Field(default=SUSTAINED_ROUNDS, ge=1)
    reference: str | None = None  # whose joules are 100 %: fedavg, if it is there
    joules_scope: Literal["all", "clients"] = "all"  # whose count: clients leaves the server's out

    @property
    def is_relative(self) -> bool:
        """Whether anything is measured against a reference."""
        if self.metric == "to_accuracy":
            return self.unit == "%"
        if self.column_keys:
            return False
        return any(parse_budget("", c).is_relative for c in self.columns if not self.is_final(c))

    def is_final(self, column: str) -> bool:
        return self.metric in END_METRICS or (self.metric == "at_budget" and column == "final")


def read_paper(table: Mapping[str, Any]) -> Paper:
    """A recipe's [paper] table, checked as far as it can be before anything is run."""
    try:
        paper = Paper(**table)
    except ValidationError as error:
        problem = error.errors()[0]
        found = "missing" if problem["type"] == "missing" else repr(problem["input"])
        where = ".".join(map(str, problem["loc"]))
        raise UserError(f"[paper] {where} is {found}: {problem['msg'].lower()}") from None
    if paper.column_keys and paper.metric not in END_METRICS:
        raise UserError(
            f"[paper] by is {list(paper.column_keys)} with metric {paper.metric!r}; it must be one of {', '.join(END_METRICS)}"
        )
    units = ("%", "rounds", "s", *JOULES_PER_UNIT) if paper.metric == "to_accuracy" else ("%", "")
    if paper.unit not in units:
        known = ", ".join(repr(u) for u in units)
        raise UserError(f"[paper] unit is {paper.unit!r}; with metric {paper.metric!r} it must be one of {known}")
    for column in paper.columns:
        if paper.metric == "to_accuracy":
            parse_target_accuracy("[paper] columns", column)
        elif paper.metric in END_METRICS and not paper.column_keys and column != "final":
            raise UserError(
                f"[paper] columns has {column!r}; with metric {paper.metric!r} it must be final, unless `by` says more"
            )
        elif not paper.column_keys and not paper.is_final(column):
            parse_budget("[paper] columns", column)
    return paper


def validate_paper(table: Mapping[str, Any], plans: Sequence[RunRecord], methods: Iterable[str]) -> None:
    """All that can be refused before the jobs are run. A method that the recipe does not run is the reader's to see;
    one that does not exist is a slip of the pen."""
    paper = read_paper(table)
    if paper.is_relative or paper.reference is not None:
        reference_runs(plans, paper.reference, "[paper] of")
    known = {*methods, *(plan.label for plan in plans)}
    for column, numbers in paper.columns.items():
        for row in numbers:
            if paper.metric != "figures" and paper.row_keys == ("method",) and row not in known:
                raise UserError(
                    f"[paper] columns.{column} has {row!r}, which is not a known method{did_you_mean(row, known)}"
                )


def compare_with_paper(records: Sequence[RunRecord], table: Mapping[str, Any]) -> PaperTable:
    paper_spec = read_paper(table)
    judged = parse_accuracy("", paper_spec.accuracy)
    records = [replace(run, accuracy_key=judged, joules_scope=paper_spec.joules_scope) for run in records]
    rows = tuple(dict.fromkeys(row for column in paper_spec.columns.values() for row in column))
    jobs, notes = _runs_by_cell(records, paper_spec, rows)
    finished = {row: ended for (row, _), runs in jobs.items() if (ended := [run for run in runs if not run.failure])}
    groups = list(finished.items())
    if paper_spec.metric not in END_METRICS:
        require_joules([run for _, runs in groups for run in runs])
    reference_run = find_reference(records, paper_spec.reference, "[paper] of") if paper_spec.is_relative else None
    cells = [
        Cell(
            row,
            column,
            spread_over_seeds(
                [_our_number(run, paper_spec, row, column, reference_run) for run in jobs.get((row, column), ())]
            ),
            numbers.get(row),
            num_failed_seeds=sum(run.failure is not None for run in jobs.get((row, column), ())),
        )
        for column, numbers in paper_spec.columns.items()
        for row in rows
    ]
    if groups:
        if paper_spec.metric != "figures":
            notes.append(accuracy_note(groups))
        if paper_spec.metric not in END_METRICS:
            notes += [
                *short_run_notes(groups, paper_spec.sustained_rounds),
                *joules_notes(records, '[paper] joules = "clients"'),
            ]
    return PaperTable(
        **paper_spec.model_dump(include={"source", "metric", "unit", "held"}),
        columns=tuple(paper_spec.columns),
        rows=rows,
        cells=tuple(cells),
        orderings=tuple(
            o
            for column in paper_spec.columns
            for o in _orderings([c for c in cells if c.column == column and (c.row, column) in jobs])
        ),
        notes=(*([reference_run.sentence] if reference_run else []), *notes),
        row_keys="figure" if paper_spec.metric == "figures" else ", ".join(paper_spec.row_keys),
        accuracy_key=judged,
        joules_scope=paper_spec.joules_scope,
    )


def _runs_by_cell(
    records: Sequence[RunRecord], paper: Paper, rows: Sequence[str]
) -> tuple[dict[tuple[str, str], list[RunRecord]], list[str]]:
    """The runs of each cell, one per seed, and those that failed. A cell with several jobs has no one number."""
    found: dict[tuple[str, str], list[list[RunRecord]]] = {}
    for _, runs in runs_by_job(records):
        for place in _cells_of_run(runs[0], paper, rows):
            found.setdefault(place, []).append(runs)
    for run in (run for run in records if run.failure):
        for place in _cells_of_run(run, paper, rows):
            first, *others = found.get(place, [[]])
            found[place] = [[*first, run], *others]
    rows_with_runs = {row for row, column in found if column in paper.columns}
    several = dict.fromkeys(row for (row, column), jobs in found.items() if len(jobs) > 1 and column in paper.columns)
    missing = [row for row in rows if row not in rows_with_runs]
    notes = [f"Left out, because its runs differ in more than the seed: {row}." for row in several if row in rows]
    notes += [f"Not run, so not judged: {', '.join(missing)}."] if missing else []
    return {cell: jobs[0] for cell, jobs in found.items() if len(jobs) == 1 and cell[0] in rows}, notes


def _cells_of_run(run: RunRecord, paper: Paper, rows: Sequence[str]) -> Iterator[tuple[str, str]]:
    """The cells, by row and column, that a run counts in."""
    for column in [_key_values(run, paper.column_keys)] if paper.column_keys else paper.columns:
        for row in rows if paper.metric == "figures" else [_key_values(run, paper.row_keys)]:
            yield row, column


def _key_values(run: RunRecord, keys: Sequence[str]) -> str:
    return " ".join(str(run.settings.get(key, "–")) for key in keys)


def _our_number(run: RunRecord, paper: Paper, row: str, column: str, reference_run: Reference | None) -> float | None:
    """In the paper's unit. A run that failed has no number, nor has one beside a reference that failed."""
    whole_joules = reference_run.joules if reference_run else 1.0
    if run.failure or whole_joules is None:
        return None
    if paper.metric == "figures":
        return final_metric(run, row, paper.sustained_rounds)
    if paper.metric == "to_accuracy":
        reached = cost_to_accuracy(run, float(column), paper.sustained_rounds)
        if reached is None:
            return None
        if paper.unit in ("rounds", "s"):
            return reached.round if paper.unit == "rounds" else reached.sim_s
        return reached.joules / (whole_joules / 100 if paper.unit == "%" else JOULES_PER_UNIT[paper.unit])
    if paper.is_final(column):
        accuracy = final_accuracy(run, paper.sustained_rounds)
    else:
        accuracy = accuracy_at_budget(run, parse_budget("", column).joules(whole_joules), paper.sustained_rounds)
    return accuracy if accuracy is None or paper.unit != "%" else 100 * accuracy


def _orderings(cells: Sequence[Cell]) -> list[Ordering]:
    """Every pair of one column that the paper orders."""
    found = []
    for pair in combinations([c for c in cells if c.paper is not None], 2):
        low, high = sorted(pair, key=lambda c: c.paper or 0.0)
        assert low.paper is not None and high.paper is not None
        if high.paper > low.paper:
            difference, error = _mean_difference(high.ours, low.ours)
            verdict = _verdict(difference, error)
            apart = high.paper - low.paper
            found.append(Ordering(high.column, high.row, low.row, apart, difference, error, verdict))
    return found


def _mean_difference(a: Spread | None, b: Spread | None) -> tuple[float | None, float | None]:
    """Of the means, and its standard error: sqrt(s_a² / n_a + s_b² / n_b). Unknown with one seed.

    Where some seeds have no number, those that have one are a choice and not a sample.
    """
    if a is None or b is None:
        return None, None
    if a.std is None or b.std is None or not (a.is_complete and b.is_complete):
        return a.mean - b.mean, None
    return a.mean - b.mean, sqrt(a.std**2 / a.num_values + b.std**2 / b.num_values)


def _verdict(difference: float | None, error: float | None) -> Verdict:
    if difference is None or error is None or abs(difference) <= error:
        return "undecided"
    return "same" if difference > 0 else "opposite"
