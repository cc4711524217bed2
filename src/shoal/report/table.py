"""A table before it is drawn, in the terminal or on the page."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from shoal.report.cost_curves import Spread


@dataclass(frozen=True)
class ReportTable:
    """Cells may have several lines."""

    title: str
    headers: tuple[str, ...]  # the first is of the rows' names
    rows: tuple[tuple[str, ...], ...]
    best_cells: frozenset[tuple[int, int]] = frozenset()  # (row, column), with the names as column 0
    notes: tuple[str, ...] = ()


def spread_text(value: Spread | None, show: Callable[[float], str]) -> str:
    """A mean, below it its spread, and how many seeds have the number where not all do."""
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
    """The best mean of each column, among rows where every seed has the number; none without a choice."""
    found = set()
    for i, column in enumerate(columns):
        means = {row: v.mean for row, v in enumerate(column) if v is not None and v.is_complete}
        if len(set(means.values())) > 1:
            top = best(list(means.values()))
            found |= {(row, first + i * step) for row, mean in means.items() if mean == top}
    return frozenset(found)
