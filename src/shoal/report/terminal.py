"""Results and partitions in the terminal."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from shoal.report.bins import Bins, bin_counts
from shoal.report.paper_tables import PaperTable, paper_report_tables
from shoal.report.summary import (
    best_rows,
    comparability_warning,
    run_remarks,
    shown_columns,
    summarise,
    summarise_seeds,
)
from shoal.report.table import ReportTable
from shoal.store.reader import RunRecord

CAPTION = "Accuracy and F1 in %; central: what a client that never trained is served."
MAX_ROWS = 40
MAX_COLUMNS = 64
SHADES = " ░▒▓█"  # readable without colour too
COLOURS = ("", "#3b6fb6", "#2a9d8f", "#c9a227", "#e07a1f")


def result_table(records: Sequence[RunRecord]) -> RenderableType:
    return Group(*_run_parts(records, mark_best=False), Text(CAPTION, style="dim"))


def compare_table(records: Sequence[RunRecord]) -> RenderableType:
    """The runs with the best of each column in bold, then the mean over seeds where there are several."""
    parts = _run_parts(records, mark_best=True)
    if seeds := summarise_seeds(records):
        parts += [Text("\nMean ± standard deviation over seeds"), _table(seeds, mark_best=True)]
    parts.append(Text(CAPTION, style="dim"))
    if warning := comparability_warning(records):
        parts.append(Text(warning, style="yellow"))
    return Group(*parts)


def _run_parts(records: Sequence[RunRecord], mark_best: bool) -> list[RenderableType]:
    rows = summarise(records)
    failed = [Text(f"{row['label']}: {row['status']}", style="red") for row in rows if row["failure"]]
    return [_table(rows, mark_best), *failed, *(Text(remark, style="yellow") for remark in run_remarks(records))]


def evaluation_view(evaluation: Mapping[str, Any]) -> RenderableType:
    """What a finished run serves, in one line of figures; and who answered, where that was chosen row by row."""
    count = evaluation.get("unseen", len(evaluation["clients"]))
    clients_text = f"{count} client{'' if count == 1 else 's'}{' that never trained' if 'unseen' in evaluation else ''}"
    how_assigned = ", each as its rows without labels tell" if evaluation.get("assigned") else ""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 2, 0, 0))
    heads = {"mean": "Mean %", "std": "Std %", "worst10": "Worst 10 %", "f1": "F1 %", "central": "Central %"}
    known = {k: head for k, head in heads.items() if evaluation["accuracy"][k] is not None}
    for head in known.values():
        table.add_column(Text(head), justify="right")
    table.add_row(*(f"{100 * evaluation['accuracy'][k]:.1f}" for k in known))
    options = [
        f"{piece}.{key}={value}" for piece, keys in evaluation.get("set", {}).items() for key, value in keys.items()
    ]
    what = f"{evaluation['method']} after round {evaluation['round']}{' with ' + ', '.join(options) if options else ''}"
    return Group(Text(f"{what}: {clients_text}{how_assigned}"), table, *_samples_by_model(evaluation["clients"]))


def _samples_by_model(clients: Mapping[str, Mapping[str, Any]]) -> list[RenderableType]:
    routed = {client: score for client, score in clients.items() if "answered_by" in score}
    if not routed:
        return []
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 2, 0, 0))
    for head in ("Client", "Rows", "Accuracy %", "Rows answered by each model"):
        table.add_column(Text(head), justify="right" if head in ("Rows", "Accuracy %") else "left", overflow="fold")
    for client, score in routed.items():
        by = ", ".join(f"{name}: {rows:,}" for name, rows in score["answered_by"].items())
        table.add_row(Text(client), f"{score['n']:,}", f"{100 * score['accuracy']:.1f}", Text(by))
    return [table]


def report_table_view(report_table: ReportTable) -> RenderableType:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 2, 0, 0))
    for i, head in enumerate(report_table.headers):
        table.add_column(Text(head), justify="right" if i else "left", overflow="fold")
    for i, row in enumerate(report_table.rows):
        table.add_row(
            *(Text(cell, style="bold" if (i, j) in report_table.best_cells else "") for j, cell in enumerate(row))
        )
    return Group(Text(f"\n{report_table.title}"), table, *(Text(note, style="dim") for note in report_table.notes))


def paper_view(table: PaperTable) -> RenderableType:
    return Group(*map(report_table_view, paper_report_tables(table)))


def partition_view(partition: Mapping[str, Any]) -> RenderableType:
    """Clients down, classes across; the fuller a cell, the more examples."""
    bins = bin_counts(partition, MAX_ROWS, MAX_COLUMNS)
    parts: list[RenderableType] = [_heatmap(bins), Text(_bins_caption(bins), style="dim")]
    if figures := partition.get("figures"):
        parts.append(_heterogeneity_table(figures))
    if shifts := Counter((partition.get("shifts") or {}).values()):
        told = "; ".join(f"{n} x {what}" for what, n in sorted(shifts.items()))
        parts.append(Text(f"shifted clients: {told}"))
    if note := partition.get("note"):
        parts.append(Text(str(note), style="yellow"))
    return Group(*parts)


def _table(rows: Sequence[Mapping[str, Any]], mark_best: bool) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("Run", min_width=10, max_width=30, overflow="fold")
    columns = shown_columns(rows)
    for column in columns:
        table.add_column(column.title.removesuffix(" %"), justify="right", overflow="fold")
    best = [best_rows(rows, column) if mark_best else set() for column in columns]
    for i, row in enumerate(rows):
        cells = [
            Text("–" if row.get("failure") else column.text(row), style="bold" if i in winners else "")
            for column, winners in zip(columns, best, strict=True)
        ]
        table.add_row(_run_cell(row), *cells)
    return table


def _run_cell(row: Mapping[str, Any]) -> Text:
    """One word per line: the numbers need the width."""
    cell = Text(row["label"].replace(" ", "\n"))
    if "seeds" in row:
        cell.append(f"\n{len(row['seeds'])} seeds", style="dim")
    elif row["failure"]:
        cell.append("\nfailed", style="red")
    elif row["status"] != "finished":
        cell.append("\nended early" if row["finished"] else "\nunfinished", style="yellow")
    return cell


def _heatmap(bins: Bins) -> Table:
    grid = Table.grid(padding=(0, 1))
    grid.add_column(justify="right", no_wrap=True, max_width=24, overflow="ellipsis")
    grid.add_column(no_wrap=True)
    grid.add_column(justify="right", no_wrap=True, style="dim")
    wide = 2 if len(bins.columns) <= MAX_COLUMNS // 2 else 1
    top = max(1, int(bins.counts.max(initial=0)))
    for name, counts in zip(bins.rows, bins.counts.tolist(), strict=True):
        cells = Text()
        for count in counts:
            level = -(-count * (len(SHADES) - 1) // top)  # rounded up: one example is already visible
            cells.append(SHADES[level] * wide, style=COLOURS[level])
        grid.add_row(Text(name), cells, f"{sum(counts):,}")
    return grid


def _bins_caption(bins: Bins) -> str:
    down = "one client" if bins.clients_per_row == 1 else f"{bins.clients_per_row} clients added up"
    across = "one class" if bins.classes_per_column == 1 else f"{bins.classes_per_column} classes added up"
    first, last = (bins.columns[0], bins.columns[-1]) if bins.columns else ("–", "–")
    top = int(bins.counts.max(initial=0))
    return f"Row: {down}. Column: {across}, {first} to {last}. {SHADES[-1]} = {top:,} examples."


def _heterogeneity_table(metrics: Mapping[str, Any]) -> Table:
    grid = Table.grid(padding=(0, 2))
    for name, value in metrics.items():
        grid.add_row(Text(name.replace("_", " ")), Text(f"{value:,.4g}" if isinstance(value, float) else str(value)))
    return grid
