"""Tables of a paper's numbers beside ours. `shoal.reproduce.paper_table` computes the numbers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Literal

from shoal.report.cost_curves import Spread
from shoal.report.table import ReportTable, spread_text

METRIC_DESCRIPTIONS = {
    "at_budget": "the accuracy at a budget of joules, sustained for {sustained_rounds} evaluated rounds in a row",
    "to_accuracy": "the cost of an accuracy, sustained for {sustained_rounds} evaluated rounds in a row",
    "final": "the mean accuracy of the last {sustained_rounds} evaluated rounds",
    "round_metric": "the mean of this metric over the last {sustained_rounds} rounds that have it",
}
Verdict = Literal["same", "undecided", "opposite"]
VERDICTS: tuple[Verdict, ...] = ("same", "undecided", "opposite")


@dataclass(frozen=True)
class Cell:
    """One number of the paper and ours, which is None if no seed has it."""

    row: str
    column: str
    ours: Spread | None
    paper: float | None
    num_failed_seeds: int = 0


@dataclass(frozen=True)
class Ordering:
    """Two rows that the paper puts in an order, and whether our numbers agree."""

    column: str
    higher: str  # the row with the higher number in the paper
    lower: str
    paper_difference: float
    difference: float | None  # of our means
    standard_error: float | None  # of `difference`, over seeds
    verdict: Verdict


@dataclass(frozen=True)
class PaperTable:
    """A table of a paper with our numbers in the same cells."""

    source: str
    metric: str
    unit: str
    sustained_rounds: int
    columns: tuple[str, ...]
    rows: tuple[str, ...]
    cells: tuple[Cell, ...]
    orderings: tuple[Ordering, ...]
    notes: tuple[str, ...]
    row_keys: str = "method"  # the job keys whose values name the rows
    accuracy_key: str | None = None  # a key of ACCURACY_KEYS; None chooses as `effective_accuracy_key` does
    joules_scope: str = "all"  # one of JOULES_SCOPES

    def cell(self, row: str, column: str) -> Cell:
        """Returns the cell of a row and a column."""
        return next(c for c in self.cells if (c.row, c.column) == (row, column))

    def verdict_counts(self, column: str | None = None) -> dict[str, int]:
        """Returns how many orderings have each verdict, of one column or of all."""
        counts = Counter(o.verdict for o in self.orderings if column in (None, o.column))
        return {verdict: counts[verdict] for verdict in VERDICTS}

    @property
    def verdict(self) -> str:
        """The verdicts with their counts, as text."""
        return ", ".join(f"{verdict} {n}" for verdict, n in self.verdict_counts().items())

    def to_json(self) -> dict[str, Any]:
        """Returns the table with its verdict counts, for `--json`."""
        return asdict(self) | {"verdicts": self.verdict_counts()}


def paper_report_tables(table: PaperTable) -> list[ReportTable]:
    """Returns the table of numbers and the table of verdicts."""
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
        notes=(f"{_metric_sentence(table)}. Our numbers: mean ± sample standard deviation over seeds.", *table.notes),
    )


def _our_text(cell: Cell, show: Callable[[float], str]) -> str:
    return "failed" if cell.num_failed_seeds and cell.ours is None else spread_text(cell.ours, show)


def _metric_sentence(table: PaperTable) -> str:
    meaning = METRIC_DESCRIPTIONS[table.metric].format(sustained_rounds=table.sustained_rounds)
    return f"The numbers are {meaning}"


def _verdict_table(table: PaperTable) -> ReportTable:
    rows = []
    for column in table.columns:
        opposite = [o for o in table.orderings if (o.column, o.verdict) == (column, "opposite")]
        disagreements = [f"{o.higher} > {o.lower}" for o in opposite]
        rows.append((column, *map(str, table.verdict_counts(column).values()), "\n".join(disagreements) or "–"))
    explanation = (
        "Every two rows that the paper puts in an order are compared. The verdict is same or opposite if our means "
        "differ by more than the standard error of their difference over seeds. Otherwise it is undecided, for example "
        "with one seed or where a seed has no number."
    )
    headers = ("Column", *VERDICTS, "opposite orderings")
    return ReportTable(f"Orderings: {table.verdict}", headers, tuple(rows), notes=(explanation,))


def ordering_table(table: PaperTable) -> ReportTable:
    """Returns a table with one row per ordering."""

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
    headers = ("In the paper", "column", "difference", "our difference", "± standard error", "verdict")
    return ReportTable("Every ordering", headers, tuple(rows))
