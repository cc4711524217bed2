"""Draws results, comparisons, evaluations and partitions in the terminal."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Group, JustifyMethod, RenderableType
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

CAPTION = "Accuracy and F1 are in %. Central accuracy is that of the serving model of unseen clients."
MAX_ROWS = 40  # of a partition
MAX_COLUMNS = 64
SHADES = " ░▒▓█"  # the shades can be told apart without colours too
COLOURS = ("", "#3b6fb6", "#2a9d8f", "#c9a227", "#e07a1f")


def result_table(records: Sequence[RunRecord]) -> RenderableType:
    """Returns the table of results of finished or unfinished runs, with their remarks."""
    return Group(*_run_parts(records, mark_best=False), Text(CAPTION, style="dim"))


def compare_table(records: Sequence[RunRecord]) -> RenderableType:
    """Returns the runs with the best of each column in bold, and the means over seeds where a job has several."""
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
    """Returns the accuracies of `shoal evaluate`, and how many samples each model predicted if the method routes."""
    count = evaluation.get("num_unseen_clients", len(evaluation["clients"]))
    unseen_text = "unseen " if "num_unseen_clients" in evaluation else ""
    clients_text = f"{count} {unseen_text}client{'' if count == 1 else 's'}"
    inference_text = ", with models inferred from inputs" if evaluation.get("inferred_from_inputs") else ""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 2, 0, 0))
    headers = {"local": "Local %", "std": "Std %", "worst10": "Worst 10 %", "f1": "F1 %", "central": "Central %"}
    headers = {k: header for k, header in headers.items() if evaluation["accuracy"][k] is not None}
    for header in headers.values():
        table.add_column(Text(header), justify="right")
    table.add_row(*(f"{100 * evaluation['accuracy'][k]:.1f}" for k in headers))
    options = [
        f"{piece}.{key}={value}" for piece, keys in evaluation.get("set", {}).items() for key, value in keys.items()
    ]
    options_text = f" with {', '.join(options)}" if options else ""
    what = f"{evaluation['method']} after round {evaluation['round']}{options_text}"
    return Group(Text(f"{what}: {clients_text}{inference_text}"), table, *_samples_by_model(evaluation["clients"]))


def _samples_by_model(clients: Mapping[str, Mapping[str, Any]]) -> list[RenderableType]:
    routed = {client: score for client, score in clients.items() if "samples_by_model" in score}
    if not routed:
        return []
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 2, 0, 0))
    for header in ("Client", "Samples", "Accuracy %", "Samples of each model"):
        justify: JustifyMethod = "right" if header in ("Samples", "Accuracy %") else "left"
        table.add_column(Text(header), justify=justify, overflow="fold")
    for client, score in routed.items():
        counts = ", ".join(f"{name}: {count:,}" for name, count in score["samples_by_model"].items())
        table.add_row(Text(client), f"{score['num_samples']:,}", f"{100 * score['accuracy']:.1f}", Text(counts))
    return [table]


def report_table_view(report_table: ReportTable) -> RenderableType:
    """Returns a `ReportTable` with its best cells in bold and its notes below."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 2, 0, 0))
    for i, header in enumerate(report_table.headers):
        table.add_column(Text(header), justify="right" if i else "left", overflow="fold")
    for i, row in enumerate(report_table.rows):
        table.add_row(
            *(Text(cell, style="bold" if (i, j) in report_table.best_cells else "") for j, cell in enumerate(row))
        )
    return Group(Text(f"\n{report_table.title}"), table, *(Text(note, style="dim") for note in report_table.notes))


def paper_view(table: PaperTable) -> RenderableType:
    """Returns our numbers beside those of a paper, and the verdicts."""
    return Group(*map(report_table_view, paper_report_tables(table)))


def partition_view(partition: Mapping[str, Any]) -> RenderableType:
    """Returns the partition as a heat map: one row per client, one column per class, darker for more samples."""
    bins = bin_counts(partition, MAX_ROWS, MAX_COLUMNS)
    parts: list[RenderableType] = [_heatmap(bins), Text(_bins_caption(bins), style="dim")]
    if heterogeneity := partition.get("heterogeneity"):
        parts.append(_heterogeneity_table(heterogeneity))
    if shifts := Counter((partition.get("shifts") or {}).values()):
        counts = ", ".join(f"{n} x {shift}" for shift, n in sorted(shifts.items()))
        parts.append(Text(f"shifted clients: {counts}"))
    if note := partition.get("note"):
        parts.append(Text(str(note), style="yellow"))
    return Group(*parts)


def _table(rows: Sequence[Mapping[str, Any]], mark_best: bool) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("Run", min_width=10, max_width=30, overflow="fold")
    columns = shown_columns(rows)
    for column in columns:
        table.add_column(_narrow(column.title.removesuffix(" %")), justify="right", overflow="fold")
    best = [best_rows(rows, column) if mark_best else set() for column in columns]
    for i, row in enumerate(rows):
        cells = [
            Text("–" if row.get("failure") else column.text(row), style="bold" if i in winners else "")
            for column, winners in zip(columns, best, strict=True)
        ]
        table.add_row(_run_cell(row), *cells)
    return table


def _narrow(text: str) -> str:
    """Returns the text with one word per line, because the numbers of the table need the width."""
    return text.replace(" ", "\n")


def _run_cell(row: Mapping[str, Any]) -> Text:
    cell = Text(_narrow(row["label"]))
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
    width = 2 if len(bins.columns) <= MAX_COLUMNS // 2 else 1
    top = max(1, int(bins.counts.max(initial=0)))
    for name, counts in zip(bins.rows, bins.counts.tolist(), strict=True):
        cells = Text()
        for count in counts:
            level = -(-count * (len(SHADES) - 1) // top)  # rounded up, so that one sample is visible
            cells.append(SHADES[level] * width, style=COLOURS[level])
        grid.add_row(Text(name), cells, f"{sum(counts):,}")
    return grid


def _bins_caption(bins: Bins) -> str:
    row = "one client" if bins.clients_per_row == 1 else f"{bins.clients_per_row} clients added up"
    column = "one class" if bins.classes_per_column == 1 else f"{bins.classes_per_column} classes added up"
    first, last = (bins.columns[0], bins.columns[-1]) if bins.columns else ("–", "–")
    top = int(bins.counts.max(initial=0))
    return f"Row: {row}. Column: {column}, {first} to {last}. {SHADES[-1]} = {top:,} samples."


def _heterogeneity_table(metrics: Mapping[str, Any]) -> Table:
    grid = Table.grid(padding=(0, 2))
    for name, value in metrics.items():
        grid.add_row(Text(name.replace("_", " ")), Text(f"{value:,.4g}" if isinstance(value, float) else str(value)))
    return grid
