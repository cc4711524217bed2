"""Writes the report on one or several runs: a single HTML file that works without a network.

`page.html` is its template. The tables and plots are those of the other modules of this folder.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from html import escape
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Any

from plotly.graph_objects import Figure
from plotly.offline import get_plotlyjs

from shoal import __version__
from shoal.errors import UserError
from shoal.report.appendix import appendix_tables
from shoal.report.comparison import Comparison, ComparisonRequest, energy_breakdown_table, joules_notes
from shoal.report.cost_curves import default_sustained_rounds, energy_breakdowns, has_joules
from shoal.report.paper_tables import PaperTable, ordering_table, paper_report_tables
from shoal.report.plots import (
    accuracy_over_bytes,
    accuracy_over_joules,
    accuracy_over_rounds,
    client_boxes,
    joule_bars,
    partition_heatmap,
)
from shoal.report.summary import (
    best_rows,
    comparability_warning,
    run_remarks,
    shown_columns,
    summarise,
    summarise_seeds,
)
from shoal.report.table import ReportTable
from shoal.store.outputs import OutputKind, begins_with, write_output
from shoal.store.reader import RunRecord, differing_settings, require_rounds, run_labels

SHARED_SETTINGS = (
    "method", "data", "partition", "clients", "rounds", "cohort", "epochs", "batch_size", "lr", "momentum",
    "model", "seed",
)  # fmt: skip
OPTIONAL_SETTINGS = (
    "devices", "link", "radio_w", "count_idle", "battery_joules", "budget_joules", "deadline_s", "measure", "country",
)  # fmt: skip
PAGE = OutputKind("an HTML page", ".html", begins_with('<meta name="generator" content="shoal '))
BEST_CELL = ' class="best"'
MAX_OPEN_ROWS = 12  # a table with more rows is folded


def write_page(
    runs: Sequence[RunRecord],
    path: Path,
    title: str | None = None,
    *,
    request: ComparisonRequest = ComparisonRequest(),  # noqa: B008  frozen
    paper: PaperTable | None = None,
    force: bool = False,
) -> Path:
    """Writes the report on runs and returns its path.

    Parameters
    ----------
    runs : Sequence[RunRecord]
        The runs to report on. A failed run is in the results and in no plot.
    path : Path
        The file to write. An existing file is only replaced if it is a page of shoal.
    title : str or None
        The heading of the page. The default names methods and data.
    request : ComparisonRequest
        The comparison by joules to add.
    paper : PaperTable or None
        The table of a paper to add, beside our numbers.
    force : bool
        Replace an existing file of any kind.

    Returns
    -------
    Path
        The file that was written.

    Raises
    ------
    UserError
        If there are no runs, if a run has no rounds yet, or if the file cannot be written.
    """
    if not runs:
        raise UserError("The report needs at least one run directory, but none was given.")
    completed = [run for run in runs if run.failure is None]  # a failed run has no numbers to plot
    for run in completed:
        require_rounds(run)
    sections = [
        _settings(completed or runs),
        _results(runs),
        *(_card(_report_table(table)) for table in Comparison(runs, request).tables()),
        *([_paper_card(paper)] if paper else []),
        *map(_card, _plots(completed, request.sustained_rounds or default_sustained_rounds(completed))),
        *([_card("".join(map(_fold_if_long, more)))] if (more := appendix_tables(completed)) else []),
        *([_partitions(completed)] if completed else []),
        _configs(runs),
    ]
    return _write(path, title or _heading(runs), _run_origin(runs), sections, force)


def write_partition_page(partition: Mapping[str, Any], path: Path, force: bool = False) -> Path:
    """Writes a page that shows how a data set is divided among clients, and returns its path."""
    heading = f"{len(partition['clients'])} clients, partition {partition.get('partition', '')}"
    return _write(path, heading, "", [_card(_partition(partition))], force)


def write_tables(tables: Sequence[ReportTable], path: Path, heading: str, force: bool = False) -> Path:
    """Writes a page of tables and returns its path."""
    return _write(path, heading, "", [_card(_report_table(table)) for table in tables], force)


def _write(path: Path, heading: str, origin: str, sections: Sequence[str], force: bool) -> Path:
    page = Template((files("shoal.report") / "page.html").read_text(encoding="utf-8")).substitute(
        title=escape(f"{heading} – shoal"),
        heading=escape(heading),
        origin=origin,
        version=escape(__version__),
        plotly_js=get_plotlyjs(),
        sections="\n".join(sections),
    )
    write_output(path, page.encode(), PAGE, force)
    return path


def _heading(runs: Sequence[RunRecord]) -> str:
    methods = list(dict.fromkeys(run.label for run in runs))
    data = list(dict.fromkeys(_plain_text(run.config.get("data", "")) for run in runs))
    heading = f"{', '.join(methods)} on {', '.join(data)}"
    return heading if len(runs) == 1 else f"{heading}: {len(runs)} runs"


def _run_origin(runs: Sequence[RunRecord]) -> str:
    if len(runs) > 1:
        failed = sum(run.failure is not None for run in runs)
        counts = {"failed": failed, "unfinished": sum(not run.is_finished for run in runs) - failed}
        return " ".join(f'<span class="badge">{n} {status}</span>' for status, n in counts.items() if n)
    (run,) = runs
    versions = ", ".join(f"{k} {run.about[k]}" for k in ("shoal", "python", "torch", "numpy") if k in run.about)
    status = "failed" if run.failure else run.status
    badge = "" if status == "finished" else f' <span class="badge">{escape(status)}</span>'
    return f"{escape(str(run.path))}{badge}<br>{escape(versions)}"


def _settings(runs: Sequence[RunRecord]) -> str:
    differing = differing_settings(runs)
    first = runs[0].settings
    chosen = [k for k in OPTIONAL_SETTINGS if first.get(k) not in (None, False, "none")]
    unused = ["cohort"] if all((run.result or {}).get("cohort", "unknown") is None for run in runs) else []
    shared = {k: first[k] for k in (*SHARED_SETTINGS, *chosen) if k in first and k not in (*differing, *unused)}
    facts = "".join(
        f"<div><dt>{escape(k.replace('_', ' '))}</dt><dd>{escape(_plain_text(v))}</dd></div>" for k, v in shared.items()
    )
    body = f'<dl class="facts">{facts}</dl>'
    if differing:
        rows = [[_plain_text(run.settings.get(k)) for k in differing] for run in runs]
        differences = _plain_table(runs, differing, rows)
        body = f"<h2>Settings that all runs share</h2>{body}{_details('Settings that differ', differences)}"
    return _card(body)


def _plain_table(runs: Sequence[RunRecord], headers: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f'<th scope="col">{escape(h)}</th>' for h in ("run", *headers))
    body = "".join(
        f'<tr><th scope="row">{escape(name)}</th>{"".join(f"<td>{escape(cell)}</td>" for cell in row)}</tr>'
        for name, row in zip(run_labels(runs), rows, strict=True)
    )
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _results(runs: Sequence[RunRecord]) -> str:
    parts = ["<h2>Results</h2>", _table(summarise(runs))]
    if len(runs) > 1:
        parts.append('<p class="quiet">The best finished run of each column is highlighted.</p>')
    parts += [f'<p class="quiet">{escape(remark)}</p>' for remark in run_remarks(runs)]
    if warning := comparability_warning(runs):
        parts.append(f'<p class="warn">{escape(warning)}</p>')
    if seeds := summarise_seeds(runs):
        parts += ["<h2>Means over seeds</h2>", _table(seeds)]
        parts.append(
            '<p class="quiet">The numbers are mean ± sample standard deviation over the seeds of finished runs.</p>'
        )
    meanings = "".join(f"<li>{escape(c.title)}: {escape(c.meaning)}</li>" for c in shown_columns(summarise(runs)))
    parts.append(_details("Meaning of the columns", f"<ul>{meanings}</ul>"))
    return _card("".join(parts))


def _table(rows: Sequence[Mapping[str, Any]]) -> str:
    columns = shown_columns(rows)
    head = "".join(f'<th scope="col" title="{escape(c.meaning)}">{escape(c.title)}</th>' for c in columns)
    best = [best_rows(rows, column) for column in columns]
    body = ""
    for i, row in enumerate(rows):
        cells = "".join(
            f"<td{BEST_CELL if i in winners else ''}>{escape(column.text(row))}</td>"
            for column, winners in zip(columns, best, strict=True)
        )
        if row.get("failure"):
            cells = f'<td class="failed" colspan="{len(columns)}">{escape(row["status"])}</td>'
        body += f'<tr><th scope="row">{_run_cell(row)}</th>{cells}</tr>'
    return (
        f'<div class="scroll"><table><thead><tr><th scope="col">Run</th>{head}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
    )


def _run_cell(row: Mapping[str, Any]) -> str:
    name = escape(row["label"])
    if "seeds" in row:
        return f'{name} <span class="quiet">({len(row["seeds"])} seeds)</span>'
    if row["status"] == "finished" or row["failure"]:
        return name
    return (
        f'{name} <span class="quiet">ended early</span>'
        if row["finished"]
        else f'{name} <span class="badge">unfinished</span>'
    )


def _report_table(table: ReportTable) -> str:
    title = f"<h2>{escape(table.title)}</h2>" if table.title else ""
    head = "".join(f'<th scope="col">{escape(h)}</th>' for h in table.headers)
    body = ""
    for i, (name, *cells) in enumerate(table.rows):
        marks = [BEST_CELL if (i, j) in table.best_cells else "" for j, _ in enumerate(cells, start=1)]
        row = "".join(f"<td{mark}>{escape(cell)}</td>" for mark, cell in zip(marks, cells, strict=True))
        body += f'<tr><th scope="row">{escape(name)}</th>{row}</tr>'
    notes = f'<p class="quiet">{escape(" ".join(table.notes))}</p>' if table.notes else ""
    return (
        f'{title}<div class="scroll"><table class="sheet"><thead><tr>{head}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>{notes}"
    )


def _fold_if_long(table: ReportTable) -> str:
    """Returns the table as HTML, folded if it is long."""
    if len(table.rows) <= MAX_OPEN_ROWS:
        return _report_table(table)
    return _details(escape(table.title), _report_table(replace(table, title="")))


def _paper_card(table: PaperTable) -> str:
    all_orderings = ordering_table(table)
    return _card(
        "".join(map(_report_table, paper_report_tables(table)))
        + _details(all_orderings.title, _report_table(replace(all_orderings, title="")))
    )


def _plots(runs: Sequence[RunRecord], sustained_rounds: int) -> list[str]:
    if not any(run.evaluated_rounds for run in runs):
        return ['<p class="quiet">No round has been evaluated yet, so there are no plots.</p>']
    plots = [_plot(make(runs)) for make in (accuracy_over_rounds, client_boxes, accuracy_over_bytes)]
    if runs_with_joules := [run for run in runs if has_joules(run)]:
        bars = _plot(joule_bars(runs_with_joules, sustained_rounds)) + _report_table(
            energy_breakdown_table(
                energy_breakdowns(runs_with_joules, sustained_rounds)[1], joules_notes(runs_with_joules)
            )
        )
        plots += [_plot(accuracy_over_joules(runs_with_joules)), bars]
    return plots


def _partitions(runs: Sequence[RunRecord]) -> str:
    """Returns the partition of the first run, and below it, folded, the partitions that differ from it."""
    distinct: dict[str, list[str]] = {}
    partitions: dict[str, Mapping[str, Any]] = {}
    for run, name in zip(runs, run_labels(runs), strict=True):
        key = json.dumps(run.partition, sort_keys=True)
        distinct.setdefault(key, []).append(name)
        partitions[key] = run.partition
    (first, _), *others = distinct.items()
    body = _partition(partitions[first])
    for key, names in others:
        body += _details(f"Partition of {escape(', '.join(names))}", _partition(partitions[key]))
    return _card(body)


def _partition(partition: Mapping[str, Any]) -> str:
    facts = "".join(
        f"<div><dt>{escape(k.replace('_', ' '))}</dt><dd>{escape(_plain_text(v))}</dd></div>"
        for k, v in partition.get("heterogeneity", {}).items()
    )
    note = f'<p class="quiet">{escape(str(partition["note"]))}</p>' if partition.get("note") else ""
    return f'{_plot(partition_heatmap(partition))}<dl class="facts">{facts}</dl>{note}'


def _configs(runs: Sequence[RunRecord]) -> str:
    parts = ["<h2>Configuration</h2>"]
    for run, name in zip(runs, run_labels(runs), strict=True):
        text = json.dumps({"config": run.config, "about": run.about}, indent=2, ensure_ascii=False)
        summary = f'{escape(name)} <span class="quiet">{escape(str(run.path))}</span>'
        parts.append(_details(summary, f"<pre>{escape(text)}</pre>"))
    return _card("".join(parts))


def _plot(figure: Figure) -> str:
    """Returns the plot as HTML. Its title moves into the page, where it wraps on a narrow screen."""
    title, caption = figure.layout.title.text, figure.layout.title.subtitle.text
    height = figure.layout.height or figure.layout.template.layout.height
    figure.update_layout(title=None, margin_t=32)
    return (
        f'<figure><figcaption><h2>{title}</h2><p class="quiet">{caption}</p></figcaption>'
        f'<div class="plot" role="img" aria-label="{title}" style="min-height:{height}px"></div>'
        f'<script type="application/json">{_escape_json(figure.to_json())}</script></figure>'
    )


def _escape_json(text: str) -> str:
    """Returns JSON that can neither close its script element nor open a comment."""
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _details(summary: str, body: str) -> str:
    return f"<details><summary>{summary}</summary>{body}</details>"


def _card(body: str) -> str:
    return f'<section class="card">{body}</section>'


def _plain_text(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
