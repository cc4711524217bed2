"""Plots of one or several runs.

The colours can be told apart by colour-blind readers, on a light and on a dark page.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from itertools import accumulate
from math import isfinite
from statistics import fmean, stdev
from typing import Any

import plotly.graph_objects as go
from plotly.colors import hex_to_rgb
from rich.filesize import pick_unit_and_suffix

from shoal.report.bins import Bins, bin_counts
from shoal.report.cost_curves import (
    ACCURACY_DESCRIPTIONS,
    JOULE_PARTS,
    SUSTAINED_ROUNDS,
    EnergyBreakdown,
    cost_curve,
    effective_accuracy_key,
    energy_breakdowns,
)
from shoal.report.summary import joules_text, joules_unit
from shoal.store.reader import RunRecord, run_labels, runs_by_job

PALETTE = (
    "#2A8AC8", "#E69F00", "#009E73", "#CC79A7", "#D55E00", "#56B4E9", "#8A8A8A", "#7B68D9", "#9AA825", "#A0673A",
    "#D23F6A", "#2FB9A8",
)  # fmt: skip
SYMBOLS = ("circle", "square", "diamond", "triangle-up", "x", "star", "cross", "triangle-down")
JOULE_PART_PATTERNS = {"training": "", "preparation": "/", "communication": "x", "server": "."}
GREY = "#8A8A8A"
GRID = "rgba(128,128,128,0.25)"
CLEAR = "rgba(0,0,0,0)"

MAX_ROWS = 200
MAX_BANDS = 4  # more bands would hide each other
LAST_ROUNDS = 20
MAX_POINTS = 500
MAX_LABELLED_CELLS = 400
MAX_NAME_LENGTH = 18

_AXIS = {"gridcolor": GRID, "zerolinecolor": GRID, "linecolor": GRID, "automargin": True, "ticks": "outside",
         "tickcolor": CLEAR, "title": {"standoff": 12}}  # fmt: skip
TEMPLATE = go.layout.Template(
    layout={
        "font": {"family": "system-ui, -apple-system, 'Segoe UI', Roboto, sans-serif", "size": 14},
        "paper_bgcolor": CLEAR,
        "plot_bgcolor": CLEAR,
        "colorway": PALETTE,
        "title": {"x": 0, "xref": "paper", "xanchor": "left"},
        "xaxis": _AXIS,
        "yaxis": _AXIS,
        "legend": {"orientation": "h", "x": 0, "y": -0.22, "yanchor": "top"},
        "margin": {"l": 56, "r": 16, "t": 88, "b": 56},
        "hovermode": "closest",
        "modebar": {"bgcolor": CLEAR, "color": "rgba(128,128,128,0.6)", "activecolor": "rgb(128,128,128)"},
        "height": 440,
    }
)


def accuracy_over_rounds(runs: Sequence[RunRecord]) -> go.Figure:
    """Plots local and central accuracy of every run over its rounds."""
    figure = go.Figure()
    banded = len(runs) <= MAX_BANDS
    for i, (run, name) in enumerate(zip(runs, _escaped_labels(runs), strict=True)):
        rounds = [line["round"] for line in run.evaluated_rounds]
        accuracy = [line["accuracy"] for line in run.evaluated_rounds]
        if banded:
            figure.add_trace(_band(rounds, accuracy, i))
        figure.add_trace(_line(rounds, [a["local"] for a in accuracy], name, i, "round %{x}"))
        if any(a.get("central") is not None for a in accuracy):
            figure.add_trace(_central(rounds, [a.get("central") for a in accuracy], name, i))
    caption = "The solid line is local accuracy (mean over the clients’ own test sets)."
    caption += " The band is ± 1 standard deviation across clients." if banded else ""
    caption += " The dashed line is central accuracy (on the central test set)."
    _set_layout(figure, "Accuracy over rounds", caption, "Round", "Test accuracy (%)")
    few = max((r.rounds[-1]["round"] for r in runs if r.rounds), default=0) <= 10
    figure.update_xaxes(rangemode="tozero", dtick=1 if few else None)  # no ticks between two rounds
    return figure.update_yaxes(tickformat=".0%")


def accuracy_over_bytes(runs: Sequence[RunRecord]) -> go.Figure:
    """Plots local accuracy of every run over the bytes that were sent."""
    figure = go.Figure()
    traffic = [list(accumulate(line["bytes_up"] + line["bytes_down"] for line in r.rounds)) for r in runs]
    unit, suffix = pick_unit_and_suffix(
        max((t[-1] for t in traffic if t), default=0), ["bytes", "kB", "MB", "GB", "TB", "PB"], 1000
    )
    for i, (run, name, bytes_so_far) in enumerate(zip(runs, _escaped_labels(runs), traffic, strict=True)):
        points = [
            (total / unit, line["accuracy"]["local"])
            for total, line in zip(bytes_so_far, run.rounds, strict=True)
            if line.get("accuracy")
        ]
        x, y = [p[0] for p in points], [p[1] for p in points]
        figure.add_trace(_line(x, y, name, i, f"%{{x:.4~g}} {suffix}"))
    _set_layout(
        figure,
        "Accuracy over bytes",
        "Local accuracy (mean over the clients’ own test sets) over all bytes that were sent until then, up and down.",
        f"Sent by and to all clients ({suffix})",
        "Test accuracy (%)",
    )
    figure.update_xaxes(rangemode="tozero")
    return figure.update_yaxes(tickformat=".0%")


def accuracy_over_joules(runs: Sequence[RunRecord]) -> go.Figure:
    """Plots accuracy over joules, with one line per job (mean over its seeds)."""
    figure = go.Figure()
    jobs = runs_by_job(runs)
    banded = len(jobs) <= MAX_BANDS
    unit, suffix = joules_unit(max((cost_curve(run)[-1].joules for run in runs if run.rounds), default=0.0))
    for i, (name, job_runs) in enumerate(jobs):
        joules, accuracy = _mean_over_seeds(job_runs)
        x = [j / unit for j in joules]
        if banded and len(job_runs) > 1:
            figure.add_trace(_band(x, accuracy, i))
        label = escape(name if job_runs[0].is_finished else f"{name}, unfinished")
        figure.add_trace(_line(x, [a["local"] for a in accuracy], label, i, f"%{{x:.4~g}} {suffix}"))
    descriptions = dict.fromkeys(ACCURACY_DESCRIPTIONS[effective_accuracy_key(run)] for run in runs)
    scope_text = "all clients" if all(run.joules_scope == "clients" for run in runs) else "all clients and the server"
    caption = f"{' or '.join(descriptions)} over the joules of {scope_text} until then."
    caption = caption[0].upper() + caption[1:]
    if any(len(job_runs) > 1 for _, job_runs in jobs):
        caption += " The line is the mean over seeds."
        caption += " The band is ± 1 standard deviation over seeds." if banded else ""
    _set_layout(figure, "Accuracy over joules", caption, f"Energy ({suffix})", "Test accuracy (%)")
    figure.update_xaxes(rangemode="tozero")
    return figure.update_yaxes(tickformat=".0%")


def _mean_over_seeds(runs: Sequence[RunRecord]) -> tuple[list[float], list[dict[str, float]]]:
    """Returns the mean joules, and mean and deviation of accuracy, of the rounds that all seeds evaluated."""
    curves = [{p.round: p for p in cost_curve(run) if p.accuracy is not None} for run in runs]
    rounds = [r for r in curves[0] if all(r in c for c in curves)]
    joules = [fmean(c[r].joules for c in curves) for r in rounds]
    accuracy = [[c[r].accuracy or 0.0 for c in curves] for r in rounds]
    return joules, [{"local": fmean(a), "std": stdev(a) if len(a) > 1 else 0.0} for a in accuracy]


def joule_bars(runs: Sequence[RunRecord], sustained_rounds: int = SUSTAINED_ROUNDS) -> go.Figure:
    """Plots the joules of each job by purpose, until it sustained the accuracy that all jobs sustained."""
    target, jobs = energy_breakdowns(runs, sustained_rounds)
    unit, suffix = joules_unit(max((breakdown.joules for breakdown in jobs), default=0.0))
    names = [escape(b.label if b.is_finished else f"{b.label}, unfinished").replace(" ", "<br>") for b in jobs]
    figure = go.Figure(
        [_part_bars(part, jobs, names, unit) for part in JOULE_PARTS]
        + [_part_legend(part, names[:1]) for part in JOULE_PARTS]
    )
    _set_layout(figure, *_bars_title(target, sustained_rounds, jobs), f"Energy ({suffix})", "")
    lines = max((name.count("<br>") + 1 for name in names), default=1)
    figure.update_layout(
        barmode="stack",
        height=150 + len(jobs) * max(46, 20 * lines + 12),
        legend={"y": 1.0, "yanchor": "bottom", "itemclick": False, "itemdoubleclick": False},
    )
    longest = max((breakdown.joules for breakdown in jobs), default=0.0) / unit
    figure.update_xaxes(range=(0, 1.15 * longest or 1))  # leaves room for the total behind the bar
    return figure.update_yaxes(type="category", autorange="reversed", showgrid=False)


def _part_bars(part: str, breakdowns: Sequence[EnergyBreakdown], names: Sequence[str], unit: float) -> go.Bar:
    return go.Bar(
        y=names,
        x=[breakdown.joules_by_part[part] / unit for breakdown in breakdowns],
        orientation="h",
        width=0.6,
        showlegend=False,
        marker=_pattern(part, [_colour(i) for i, _ in enumerate(breakdowns)]),
        customdata=[_breakdown_text(breakdown) for breakdown in breakdowns],
        hovertemplate="%{customdata}<extra></extra>",
        text=[f" {joules_text(b.joules)}" for b in breakdowns] if part == JOULE_PARTS[-1] else None,
        textposition="outside",
        cliponaxis=False,
    )


def _part_legend(part: str, names: Sequence[str]) -> go.Bar:
    """Returns a bar for the legend, which is grey because the legend explains the patterns and not the colours."""
    return go.Bar(y=names, x=[None], orientation="h", name=part, legendgroup=part, marker=_pattern(part, GREY))


def _pattern(part: str, colour: str | list[str]) -> dict[str, Any]:
    pattern = {"shape": JOULE_PART_PATTERNS[part], "fillmode": "replace", "size": 7, "solidity": 0.35}
    return {"color": colour, "line": {"color": colour, "width": 1}, "pattern": pattern}


def _breakdown_text(breakdown: EnergyBreakdown) -> str:
    lines = [
        f"{part}: {joules_text(joules)} ({joules / (breakdown.joules or 1):.2%})"
        for part, joules in ((part, breakdown.joules_by_part[part]) for part in JOULE_PARTS)
    ]
    return "<br>".join((f"<b>{escape(breakdown.label)}</b>", *lines, f"total: {joules_text(breakdown.joules)}"))


def _bars_title(
    target_accuracy: float | None, sustained_rounds: int, breakdowns: Sequence[EnergyBreakdown]
) -> tuple[str, str]:
    seeds = " The bars are means over seeds." if any(b.num_seeds > 1 for b in breakdowns) else ""
    if target_accuracy is None:
        caption = f"No accuracy was sustained by every run for {sustained_rounds} evaluated rounds in a row.{seeds}"
        return "Joules of the whole run", caption
    return (
        f"Joules to {target_accuracy:.0%} accuracy",
        f"The joules until a run had sustained {target_accuracy:.0%} or more for {sustained_rounds} evaluated rounds "
        f"in a row. This is the highest whole percent that every run sustained.{seeds}",
    )


def _last_accuracies(run: RunRecord) -> list[float | None]:
    """Returns each client's mean accuracy over the last rounds, or None if it has none.

    One round alone would say little because models change from round to round.
    """
    lines = [line["accuracy"] for line in run.clients if line["round"] > run.clients[-1]["round"] - LAST_ROUNDS]
    accuracies = [[a for a in column if a is not None and isfinite(a)] for column in zip(*lines, strict=True)]
    return [fmean(column) if column else None for column in accuracies]


def client_boxes(runs: Sequence[RunRecord]) -> go.Figure:
    """Plots the accuracies of the clients of every run as boxes.

    Only runs with an evaluated round have a box. A client that did not respond has no point.
    """
    figure = go.Figure()
    for i, (run, name) in enumerate(zip(runs, _escaped_labels(runs), strict=True)):
        if not run.clients:
            continue
        clients = zip(run.partition["clients"], _last_accuracies(run), run.clients[-1]["num_samples"], strict=True)
        points = [(escape(str(c)), a, n) for c, a, n in clients if a is not None]
        figure.add_trace(
            go.Box(
                y=[a for _, a, _ in points],
                name=name,
                customdata=[(c, n) for c, _, n in points],
                hovertemplate="%{customdata[0]}<br>%{y:.2%} of %{customdata[1]} test samples<extra></extra>",
                width=0.4,
                boxpoints="all" if len(points) <= MAX_POINTS else "outliers",
                jitter=0.5,
                pointpos=0,
                marker={"color": _colour(i), "size": 5, "opacity": 0.55},
                line={"width": 2},
                fillcolor=_transparent_colour(i, 0.18),
            )
        )
    _set_layout(
        figure,
        "Accuracy of each client",
        f"Each point is the accuracy of one client on its own test set, as the mean of the rounds that were evaluated "
        f"among the last {LAST_ROUNDS} rounds of the run.",
        "Run",
        "Test accuracy (%)",
    )
    figure.update_layout(showlegend=False)
    boxes = len(figure.data)
    figure.update_xaxes(type="category", range=(-1, 1) if boxes < 2 else (-0.5, boxes - 0.5))
    return figure.update_yaxes(tickformat=".0%")


def partition_heatmap(partition: Mapping[str, Any]) -> go.Figure:
    """Plots the number of samples of every client and class."""
    bins = bin_counts(partition, MAX_ROWS)
    rows, columns = [escape(r) for r in bins.rows], [escape(c) for c in bins.columns]
    few = bins.counts.size <= MAX_LABELLED_CELLS
    figure = go.Figure(
        go.Heatmap(
            z=bins.counts.tolist(),
            x=columns,
            y=rows,
            colorscale="Cividis",
            zmin=0,
            zmax=max(1, int(bins.counts.max())),
            texttemplate="%{z}" if few else None,
            hovertemplate="%{y}<br>class %{x}<br>%{z} samples<extra></extra>",
            colorbar={"title": {"text": "Samples", "side": "right"}, "thickness": 12, "outlinewidth": 0},
        )
    )
    _set_layout(figure, *_heatmap_title(bins, len(partition["clients"])), "Class", "Client")
    figure.update_layout(height=min(900, max(320, 160 + 18 * len(rows))))
    figure.update_xaxes(type="category", labelalias=_short_labels(bins.columns), showgrid=False)
    return figure.update_yaxes(
        type="category", labelalias=_short_labels(bins.rows), showgrid=False, autorange="reversed"
    )


def _heatmap_title(bins: Bins, num_clients: int) -> tuple[str, str]:
    title = "Samples per client and class"
    if bins.clients_per_row == 1:
        return title, f"Each row is one of {num_clients} clients."
    return (
        f"{title}, {bins.clients_per_row} clients added up per row",
        f"The {num_clients} clients are in the order of the partition, in {len(bins.rows)} rows.",
    )


def _line(x: Sequence[float], y: Sequence[float], name: str, i: int, hover_position: str) -> go.Scatter:
    return go.Scatter(
        x=x,
        y=y,
        name=name,
        legendgroup=str(i),
        mode="lines+markers",
        line={"color": _colour(i), "width": 2.5},
        marker={"symbol": SYMBOLS[i % len(SYMBOLS)], "size": 7, "maxdisplayed": 20},
        hovertemplate=f"%{{fullData.name}}<br>{hover_position}: %{{y:.2%}}<extra></extra>",
    )


def _central(x: Sequence[int], y: Sequence[float | None], name: str, i: int) -> go.Scatter:
    return go.Scatter(
        x=x,
        y=y,
        name=f"{name}, central",
        legendgroup=str(i),
        showlegend=False,
        mode="lines",
        connectgaps=True,
        line={"color": _colour(i), "width": 2, "dash": "dash"},
        hovertemplate="%{fullData.name}<br>round %{x}: %{y:.2%}<extra></extra>",
    )


def _band(x: Sequence[float], accuracy: Sequence[Mapping[str, Any]], i: int) -> go.Scatter:
    points = [(r, a["local"], a["std"]) for r, a in zip(x, accuracy, strict=True) if a["local"] is not None]
    upper = [(r, min(1.0, mean + std)) for r, mean, std in points]
    lower = [(r, max(0.0, mean - std)) for r, mean, std in reversed(points)]
    outline = upper + lower
    return go.Scatter(
        x=[r for r, _ in outline],
        y=[a for _, a in outline],
        legendgroup=str(i),
        showlegend=False,
        mode="lines",
        line={"width": 0},
        fill="toself",
        fillcolor=_transparent_colour(i, 0.14),
        hoverinfo="skip",
    )


def _set_layout(figure: go.Figure, title: str, caption: str, x_title: str, y_title: str) -> None:
    figure.update_layout(
        template=TEMPLATE,
        title={"text": title, "subtitle": {"text": caption}},
        showlegend=len({trace.legendgroup for trace in figure.data}) > 1,
    )
    figure.update_xaxes(title_text=x_title)
    figure.update_yaxes(title_text=y_title)


def _escaped_labels(runs: Sequence[RunRecord]) -> list[str]:
    """Returns the labels of runs, escaped because plotly interprets a subset of HTML in every text that it draws."""
    return [
        escape(name if run.is_finished else f"{name}, unfinished")
        for name, run in zip(run_labels(runs), runs, strict=True)
    ]


def _short_labels(names: Sequence[str]) -> dict[str, str]:
    half = MAX_NAME_LENGTH // 2
    return {escape(n): escape(f"{n[:half]}…{n[-half:]}") for n in names if len(n) > MAX_NAME_LENGTH}


def _colour(i: int) -> str:
    return PALETTE[i % len(PALETTE)]


def _transparent_colour(i: int, opacity: float) -> str:
    red, green, blue = hex_to_rgb(_colour(i))
    return f"rgba({red},{green},{blue},{opacity})"
