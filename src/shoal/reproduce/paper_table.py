"""Compares our numbers with those of a paper, and checks whether both put the methods in the same order.

Absolute numbers depend on hardware, splits and seeds. A reproduction can show that the methods have the same order.
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

END_METRICS = ("final", "round_metric")


class Paper(BaseModel):
    """The [paper] table of a recipe.

    A row is a method, the values of other keys of a job (`row_keys`), or a round metric. A column is a budget, a target
    accuracy, `final`, or the values of keys of a job (`column_keys`).
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    source: str
    metric: Literal["at_budget", "to_accuracy", "final", "round_metric"]
    columns: dict[str, dict[str, float]]  # by column and row: the number of the paper
    row_keys: tuple[str, ...] = ("method",)
    column_keys: tuple[str, ...] = ()
    accuracy: Literal["central", "local"] | None = None
    unit: str = "%"
    sustained_rounds: int = Field(default=SUSTAINED_ROUNDS, ge=1)
    reference: str | None = None  # the run whose joules are 100 %; None: fedavg, else the first run
    joules_scope: Literal["all", "clients"] = "all"  # clients leaves the joules of the server out

    @property
    def is_relative(self) -> bool:
        """Whether any number is relative to the reference."""
        if self.metric == "to_accuracy":
            return self.unit == "%"
        if self.column_keys:
            return False
        return any(parse_budget("", c).is_relative for c in self.columns if not self.is_final(c))

    def is_final(self, column: str) -> bool:
        """Returns whether a column has a mean of the last evaluated rounds."""
        return self.metric in END_METRICS or (self.metric == "at_budget" and column == "final")


def read_paper(table: Mapping[str, Any]) -> Paper:
    """Reads the [paper] table of a recipe, and refuses wrong values before any run."""
    try:
        paper = Paper(**table)
    except ValidationError as error:
        problem = error.errors()[0]
        value_text = "missing" if problem["type"] == "missing" else repr(problem["input"])
        where = ".".join(map(str, problem["loc"]))
        raise UserError(f"[paper] {where} is {value_text}: {problem['msg'].lower()}") from None
    if paper.column_keys and paper.metric not in END_METRICS:
        raise UserError(
            f"[paper] column_keys is {list(paper.column_keys)} with metric {paper.metric!r}. The metric must be one "
            f"of {', '.join(END_METRICS)}."
        )
    units = ("%", "rounds", "s", *JOULES_PER_UNIT) if paper.metric == "to_accuracy" else ("%", "")
    if paper.unit not in units:
        allowed = ", ".join(repr(u) for u in units)
        raise UserError(f"[paper] unit is {paper.unit!r}; with metric {paper.metric!r} it must be one of {allowed}")
    for column in paper.columns:
        if paper.metric == "to_accuracy":
            parse_target_accuracy("[paper] columns", column)
        elif paper.metric in END_METRICS and not paper.column_keys and column != "final":
            raise UserError(
                f"[paper] columns has {column!r}; with metric {paper.metric!r} it must be final, unless column_keys "
                "is set"
            )
        elif not paper.column_keys and not paper.is_final(column):
            parse_budget("[paper] columns", column)
    return paper


def validate_paper(table: Mapping[str, Any], plans: Sequence[RunRecord], methods: Iterable[str]) -> None:
    """Refuses a [paper] table that does not fit the planned runs.

    A row may name a method that the recipe does not run, but not a method that does not exist.
    """
    paper = read_paper(table)
    if paper.is_relative or paper.reference is not None:
        reference_runs(plans, paper.reference, "[paper] reference")
    known_rows = {*methods, *(plan.label for plan in plans)}
    for column, numbers in paper.columns.items():
        for row in numbers:
            if paper.metric != "round_metric" and paper.row_keys == ("method",) and row not in known_rows:
                raise UserError(
                    f"[paper] columns.{column} has {row!r}, which is not a known method{did_you_mean(row, known_rows)}"
                )


def compare_with_paper(records: Sequence[RunRecord], table: Mapping[str, Any]) -> PaperTable:
    """Returns our numbers beside those of the paper, with a verdict on every ordering."""
    paper_spec = read_paper(table)
    accuracy_key = parse_accuracy("", paper_spec.accuracy)
    records = [replace(run, accuracy_key=accuracy_key, joules_scope=paper_spec.joules_scope) for run in records]
    rows = tuple(dict.fromkeys(row for column in paper_spec.columns.values() for row in column))
    jobs, notes = _runs_by_cell(records, paper_spec, rows)
    finished = {
        row: without_failures
        for (row, _), runs in jobs.items()
        if (without_failures := [run for run in runs if not run.failure])
    }
    runs_by_row = list(finished.items())
    if paper_spec.metric not in END_METRICS:
        require_joules([run for _, runs in runs_by_row for run in runs])
    reference_run = (
        find_reference(records, paper_spec.reference, "[paper] reference") if paper_spec.is_relative else None
    )
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
    if runs_by_row:
        if paper_spec.metric != "round_metric":
            notes.append(accuracy_note(runs_by_row))
        if paper_spec.metric not in END_METRICS:
            notes += [
                *short_run_notes(runs_by_row, paper_spec.sustained_rounds),
                *joules_notes(records, '[paper] joules_scope = "clients"'),
            ]
    return PaperTable(
        **paper_spec.model_dump(include={"source", "metric", "unit", "sustained_rounds"}),
        columns=tuple(paper_spec.columns),
        rows=rows,
        cells=tuple(cells),
        orderings=tuple(
            o
            for column in paper_spec.columns
            for o in _orderings([c for c in cells if c.column == column and (c.row, column) in jobs])
        ),
        notes=(*([reference_run.sentence] if reference_run else []), *notes),
        row_keys="round metric" if paper_spec.metric == "round_metric" else ", ".join(paper_spec.row_keys),
        accuracy_key=accuracy_key,
        joules_scope=paper_spec.joules_scope,
    )


def _runs_by_cell(
    records: Sequence[RunRecord], paper: Paper, rows: Sequence[str]
) -> tuple[dict[tuple[str, str], list[RunRecord]], list[str]]:
    """Returns the runs of each cell, one per seed and the failed ones, and notes.

    A cell with several jobs is left out, because it has no single number.
    """
    jobs_by_cell: dict[tuple[str, str], list[list[RunRecord]]] = {}
    for _, runs in runs_by_job(records):
        for cell in _cells_of_run(runs[0], paper, rows):
            jobs_by_cell.setdefault(cell, []).append(runs)
    for run in (run for run in records if run.failure):
        for cell in _cells_of_run(run, paper, rows):
            first, *others = jobs_by_cell.get(cell, [[]])
            jobs_by_cell[cell] = [[*first, run], *others]
    rows_with_runs = {row for row, column in jobs_by_cell if column in paper.columns}
    ambiguous = dict.fromkeys(
        row for (row, column), jobs in jobs_by_cell.items() if len(jobs) > 1 and column in paper.columns
    )
    missing = [row for row in rows if row not in rows_with_runs]
    notes = [f"Left out, because its runs differ in more than the seed: {row}." for row in ambiguous if row in rows]
    notes += [f"Left out, because there are no runs: {', '.join(missing)}."] if missing else []
    return {cell: jobs[0] for cell, jobs in jobs_by_cell.items() if len(jobs) == 1 and cell[0] in rows}, notes


def _cells_of_run(run: RunRecord, paper: Paper, rows: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yields row and column of the cells in which a run counts."""
    for column in [_key_values(run, paper.column_keys)] if paper.column_keys else paper.columns:
        for row in rows if paper.metric == "round_metric" else [_key_values(run, paper.row_keys)]:
            yield row, column


def _key_values(run: RunRecord, keys: Sequence[str]) -> str:
    return " ".join(str(run.settings.get(key, "–")) for key in keys)


def _our_number(run: RunRecord, paper: Paper, row: str, column: str, reference_run: Reference | None) -> float | None:
    """Returns the number of a run in the unit of the paper.

    A failed run has no number. Neither has a run whose reference failed.
    """
    reference_joules = reference_run.joules if reference_run else 1.0
    if run.failure or reference_joules is None:
        return None
    if paper.metric == "round_metric":
        return final_metric(run, row, paper.sustained_rounds)
    if paper.metric == "to_accuracy":
        cost = cost_to_accuracy(run, float(column), paper.sustained_rounds)
        if cost is None:
            return None
        if paper.unit in ("rounds", "s"):
            return cost.round if paper.unit == "rounds" else cost.sim_s
        return cost.joules / (reference_joules / 100 if paper.unit == "%" else JOULES_PER_UNIT[paper.unit])
    if paper.is_final(column):
        accuracy = final_accuracy(run, paper.sustained_rounds)
    else:
        accuracy = accuracy_at_budget(run, parse_budget("", column).joules(reference_joules), paper.sustained_rounds)
    return accuracy if accuracy is None or paper.unit != "%" else 100 * accuracy


def _orderings(cells: Sequence[Cell]) -> list[Ordering]:
    """Returns a verdict for every pair of rows of one column that the paper orders."""
    orderings = []
    for pair in combinations([c for c in cells if c.paper is not None], 2):
        low, high = sorted(pair, key=lambda c: c.paper or 0.0)
        assert low.paper is not None and high.paper is not None
        if high.paper > low.paper:
            difference, error = _mean_difference(high.ours, low.ours)
            verdict = _verdict(difference, error)
            paper_difference = high.paper - low.paper
            orderings.append(Ordering(high.column, high.row, low.row, paper_difference, difference, error, verdict))
    return orderings


def _mean_difference(a: Spread | None, b: Spread | None) -> tuple[float | None, float | None]:
    """Returns the difference of the means and its standard error sqrt(s_a² / n_a + s_b² / n_b).

    The error is None with one seed. It is also None if some seeds have no number, because the others are not a random
    sample.
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
