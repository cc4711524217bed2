"""A table as text cells, before `terminal.py` or `html.py` draws it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from shoal.report.cost_curves import Spread


@dataclass(frozen=True)
class ReportTable:
    """A table of text cells. A cell may have several lines."""

    title: str
    headers: tuple[str, ...]  # the first one is above the names of the rows
    rows: tuple[tuple[str, ...], ...]
    best_cells: frozenset[tuple[int, int]] = frozenset()  # (row, column); the names of the rows are column 0
    notes: tuple[str, ...] = ()


def spread_text(value: Spread | None, show: Callable[[float], str]) -> str:
    """Returns the mean, the standard deviation below it, and the number of seeds if some of them lack the number."""
    if value is None:
        return "–"
    lines = [show(value.mean)]
    if value.std is not None:
        lines.append(f"± {show(value.std) if value.std else '0'}")
    if not value.is_complete:
        lines.append(f"{value.num_values} of {value.num_seeds} seeds")
    return "\n".join(lines)


def best_cells(
    columns: Sequence[Sequence[Spread | None]], best: Callable[[Sequence[float]], float], first: int = 1, step: int = 1
) -> frozenset[tuple[int, int]]:
    """Returns the cells with the best mean of their column.

    Only rows in which every seed has the number count. A column whose rows are all equal has no best cell.
    """
    cells = set()
    for i, column in enumerate(columns):
        means = {row: v.mean for row, v in enumerate(column) if v is not None and v.is_complete}
        if len(set(means.values())) > 1:
            top = best(list(means.values()))
            cells |= {(row, first + i * step) for row, mean in means.items() if mean == top}
    return frozenset(cells)
