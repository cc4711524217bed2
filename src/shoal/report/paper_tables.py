"""A paper's numbers beside ours, as tables: `shoal.reproduce.paper_table` computes them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Literal

from shoal.report.cost_curves import Spread
from shoal.report.table import ReportTable, spread_text

METRIC_DESCRIPTIONS = {
    "at_budget": "accuracy held for {held} evaluated rounds in a row at a budget of joules",
    "to_accuracy": "what it took to hold an accuracy for {held} evaluated rounds in a row",
    "final": "mean accuracy of the last {held} evaluated rounds",
    "figures": "mean of the last {held} rounds that have this figure",
}
Verdict = Literal["same", "undecided", "opposite"]
VERDICTS: tuple[Verdict, ...] = ("same", "undecided", "opposite")


@dataclass(frozen=True)
class Cell:
    row: str
    column: str
    ours: Spread | None
    paper: float | None
    num_failed_seeds: int = 0  # seeds


@dataclass(frozen=True)
class Ordering:
    """Two rows that the paper puts in an order, and what ours says about it."""

    column: str
    higher: str  # in the paper
    lower: str
    paper_difference: float
    difference: float | None  # ours, of the means
    standard_error: float | None  # its standard error over seeds
    verdict: Verdict


@dataclass(frozen=True)
class PaperTable:
    source: str
    metric: str
    unit: str
    sustained_rounds: int
    columns: tuple[str, ...]
    rows: tuple[str, ...]
    cells: tuple[Cell, ...]
    orderings: tuple[Ordering, ...]
    notes: tuple[str, ...]
    row_keys: str = "method"  # of jobs, whose values the rows are
    accuracy_key: str | None = None  # by which accuracy, a key of OF_ACCURACY
    joules_scope: str = "all"  # whose joules

    def cell(self, row: str, column: str) -> Cell:
        return next(c for c in self.cells if (c.row, c.column) == (row, column))

    def verdict_counts(self, column: str | None = None) -> dict[str, int]:
        found = Counter(o.verdict for o in self.orderings if column in (None, o.column))
        return {verdict: found[verdict] for verdict in VERDICTS}

    @property
    def verdict(self) -> str:
        return ", ".join(f"{verdict} {n}" for verdict, n in self.verdict_counts().items())

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"verdicts": self.verdict_counts()}


def paper_report_tables(table: PaperTable) -> list[ReportTable]:
    return [_number_table(table), _verdict_table(table)]


def _number_table(table: PaperTable) -> ReportTable:
    def show(x: float) -> str:
        return f"{x:.2f}" if table.unit == "%" else f"{x:.4g}"

    rows = []
    for row in table.rows:
        cells = [table.cell(row, column) for column in table.columns]
        pairs = [(_our_text(c, show), "–" if c.paper is None else show(c.paper)) for c in cells]
        rows.append((row, *(text for pair in pairs for text in pair)))
    unit = f" ({table.unit})" if table.unit else ""
    return ReportTable(
        f"Beside the paper: {table.source}{unit}",
        (table.row_keys.capitalize(), *(head for column in table.columns for head in (f"{column}\nours", "\npaper"))),
        tuple(rows),
        notes=(f"{_metric_sentence(table)}. Ours: mean ± sample standard deviation over seeds.", *table.notes),
    )


def _our_text(cell: Cell, show: Callable[[float], str]) -> str:
    return "failed" if cell.num_failed_seeds and cell.ours is None else spread_text(cell.ours, show)


def _metric_sentence(table: PaperTable) -> str:
    meaning = METRIC_DESCRIPTIONS[table.metric].format(held=table.sustained_rounds)
    return meaning[0].upper() + meaning[1:]


def _verdict_table(table: PaperTable) -> ReportTable:
    rows = []
    for column in table.columns:
        against = [f"{o.higher} > {o.lower}" for o in table.orderings if (o.column, o.verdict) == (column, "opposite")]
        rows.append((column, *map(str, table.verdict_counts(column).values()), "\n".join(against) or "–"))
    reading = (
        "For every two rows that the paper orders. Same or opposite: our means differ by more than the standard "
        "error of their difference over seeds; else undecided, as it is with one seed or where a seed has no number."
    )
    heads = ("Column", *VERDICTS, "opposite to the paper’s")
    return ReportTable(f"Orderings: {table.verdict}", heads, tuple(rows), notes=(reading,))


def ordering_table(table: PaperTable) -> ReportTable:
    """All of them, one by one."""

    def show(x: float | None) -> str:
        return "–" if x is None else f"{x:.3g}"

    rows = [
        (
            f"{o.higher} > {o.lower}",
            o.column,
            *map(show, (o.paper_difference, o.difference, o.standard_error)),
            o.verdict,
        )
        for o in table.orderings
    ]
    heads = ("In the paper", "column", "by", "ours", "± standard error", "verdict")
    return ReportTable("Every ordering", heads, tuple(rows))
