"""Figures of one run or several. Colours stay apart for colour-blind readers, on light and on dark."""

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
    JOULE_PART_NAMES,
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
JOULE_PART_PATTERNS = {"train": "", "pre": "/", "comm": "x", "server": "."}
GREY = "#8A8A8A"
GRID = "rgba(128,128,128,0.25)"
CLEAR = "rgba(0,0,0,0)"

MAX_ROWS = 200
MAX_BANDS = 4  # more bands on top of each other show nothing
LAST_ROUNDS = 20  # rounds
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
    figure = go.Figure()
    banded = len(runs) <= MAX_BANDS
    for i, (run, name) in enumerate(zip(runs, _escaped_labels(runs), strict=True)):
        rounds = [line["round"] for line in run.evaluated_rounds]
        accuracy = [line["accuracy"] for line in run.evaluated_rounds]
        if banded:
            figure.add_trace(_band(rounds, accuracy, i))
        figure.add_trace(_line(rounds, [a["mean"] for a in accuracy], name, i, "round %{x}"))
        if any(a.get("central") is not None for a in accuracy):
            figure.add_trace(_central(rounds, [a.get("central") for a in accuracy], name, i))
    reading = "Line: mean over the clients’ own test sets."
    reading += " Band: ± 1 standard deviation across clients." if banded else ""
    reading += " Dashed: on the central test set."
    _set_layout(figure, "Accuracy over rounds", reading, "Round", "Test accuracy (%)")
    few = max((r.rounds[-1]["round"] for r in runs if r.rounds), default=0) <= 10
    figure.update_xaxes(rangemode="tozero", dtick=1 if few else None)  # there is no half round
    return figure.update_yaxes(tickformat=".0%")


def accuracy_over_bytes(runs: Sequence[RunRecord]) -> go.Figure:
    figure = go.Figure()
    traffic = [list(accumulate(line["bytes_up"] + line["bytes_down"] for line in r.rounds)) for r in runs]
    unit, suffix = pick_unit_and_suffix(
        max((t[-1] for t in traffic if t), default=0), ["bytes", "kB", "MB", "GB", "TB", "PB"], 1000
    )
    for i, (run, name, so_far) in enumerate(zip(runs, _escaped_labels(runs), traffic, strict=True)):
        points = [
            (total / unit, line["accuracy"]["mean"])
            for total, line in zip(so_far, run.rounds, strict=True)
            if line.get("accuracy")
        ]
        x, y = [p[0] for p in points], [p[1] for p in points]
        figure.add_trace(_line(x, y, name, i, f"%{{x:.4~g}} {suffix}"))
    _set_layout(
        figure,
        "Accuracy over traffic",
        "Mean over the clients’ own test sets, against all that was sent until then, up and down.",
        f"Sent so far, all clients ({suffix})",
        "Test accuracy (%)",
    )
    figure.update_xaxes(rangemode="tozero")
    return figure.update_yaxes(tickformat=".0%")


def accuracy_over_joules(runs: Sequence[RunRecord]) -> go.Figure:
    """One line per job, mean over its seeds."""
    figure = go.Figure()
    groups = runs_by_job(runs)
    banded = len(groups) <= MAX_BANDS
    unit, suffix = joules_unit(max((cost_curve(run)[-1].joules for run in runs if run.rounds), default=0.0))
    for i, (name, group) in enumerate(groups):
        joules, accuracy = _mean_over_seeds(group)
        x = [j / unit for j in joules]
        if banded and len(group) > 1:
            figure.add_trace(_band(x, accuracy, i))
        shown = escape(name if group[0].is_finished else f"{name}, unfinished")
        figure.add_trace(_line(x, [a["mean"] for a in accuracy], shown, i, f"%{{x:.4~g}} {suffix}"))
    kinds = dict.fromkeys(ACCURACY_DESCRIPTIONS[effective_accuracy_key(run)] for run in runs)
    scope_text = "all clients" if all(run.joules_scope == "clients" for run in runs) else "all clients and the server"
    reading = f"Accuracy {' or '.join(kinds)}, against the joules of {scope_text} until then."
    if any(len(group) > 1 for _, group in groups):
        reading += " Line: mean over seeds." + (" Band: ± 1 standard deviation over seeds." if banded else "")
    _set_layout(figure, "Accuracy over joules", reading, f"Spent so far ({suffix})", "Test accuracy (%)")
    figure.update_xaxes(rangemode="tozero")
    return figure.update_yaxes(tickformat=".0%")


def _mean_over_seeds(runs: Sequence[RunRecord]) -> tuple[list[float], list[dict[str, float]]]:
    """Of the rounds that all seeds evaluated: joules (mean) and accuracy (mean and std)."""
    courses = [{p.round: p for p in cost_curve(run) if p.accuracy is not None} for run in runs]
    rounds = [r for r in courses[0] if all(r in c for c in courses)]
    joules = [fmean(c[r].joules for c in courses) for r in rounds]
    accuracy = [[c[r].accuracy or 0.0 for c in courses] for r in rounds]
    return joules, [{"mean": fmean(a), "std": stdev(a) if len(a) > 1 else 0.0} for a in accuracy]


def joule_bars(runs: Sequence[RunRecord], sustained_rounds: int = SUSTAINED_ROUNDS) -> go.Figure:
    """What each job took by the time it held the accuracy that all of them held, by what it was for."""
    level, jobs = energy_breakdowns(runs, sustained_rounds)
    unit, suffix = joules_unit(max((bill.joules for bill in jobs), default=0.0))
    names = [escape(b.label if b.is_finished else f"{b.label}, unfinished").replace(" ", "<br>") for b in jobs]
    figure = go.Figure(
        [_part_bars(part, jobs, names, unit) for part in JOULE_PARTS]
        + [_part_legend(part, names[:1]) for part in JOULE_PARTS]
    )
    _set_layout(figure, *_bars_title(level, sustained_rounds, jobs), f"Spent ({suffix})", "")
    lines = max((name.count("<br>") + 1 for name in names), default=1)
    figure.update_layout(
        barmode="stack",
        height=150 + len(jobs) * max(46, 20 * lines + 12),
        legend={"y": 1.0, "yanchor": "bottom", "itemclick": False, "itemdoubleclick": False},
    )
    longest = max((bill.joules for bill in jobs), default=0.0) / unit
    figure.update_xaxes(range=(0, 1.15 * longest or 1))  # room for the sum behind the bar
    return figure.update_yaxes(type="category", autorange="reversed", showgrid=False)


def _part_bars(part: str, breakdowns: Sequence[EnergyBreakdown], names: Sequence[str], unit: float) -> go.Bar:
    return go.Bar(
        y=names,
        x=[bill.joules_by_part[part] / unit for bill in breakdowns],
        orientation="h",
        width=0.6,
        showlegend=False,
        marker=_pattern(part, [_colour(i) for i, _ in enumerate(breakdowns)]),
        customdata=[_breakdown_text(bill) for bill in breakdowns],
        hovertemplate="%{customdata}<extra></extra>",
        text=[f" {joules_text(bill.joules)}" for bill in breakdowns] if part == JOULE_PARTS[-1] else None,
        textposition="outside",
        cliponaxis=False,
    )


def _part_legend(part: str, names: Sequence[str]) -> go.Bar:
    """For the legend: there the patterns count, and not the colours."""
    name, marker = JOULE_PART_NAMES[part], _pattern(part, GREY)
    return go.Bar(y=names, x=[None], orientation="h", name=name, legendgroup=part, marker=marker)


def _pattern(part: str, colour: str | list[str]) -> dict[str, Any]:
    pattern = {"shape": JOULE_PART_PATTERNS[part], "fillmode": "replace", "size": 7, "solidity": 0.35}
    return {"color": colour, "line": {"color": colour, "width": 1}, "pattern": pattern}


def _breakdown_text(breakdown: EnergyBreakdown) -> str:
    shares = [
        f"{JOULE_PART_NAMES[part]}: {joules_text(breakdown.joules_by_part[part])} ({breakdown.joules_by_part[part] / (breakdown.joules or 1):.2%})"
        for part in JOULE_PARTS
    ]
    return "<br>".join((f"<b>{escape(breakdown.label)}</b>", *shares, f"together: {joules_text(breakdown.joules)}"))


def _bars_title(
    target_accuracy: float | None, sustained_rounds: int, breakdowns: Sequence[EnergyBreakdown]
) -> tuple[str, str]:
    seeds = " Means over seeds." if any(bill.num_seeds > 1 for bill in breakdowns) else ""
    if target_accuracy is None:
        reading = f"There is no accuracy that every run held for {sustained_rounds} evaluated rounds in a row.{seeds}"
        return "Joules of the whole run", reading
    return (
        f"Joules to {target_accuracy:.0%} accuracy",
        f"Until a run had been at {target_accuracy:.0%} or above for {sustained_rounds} evaluated rounds in a row: the highest whole percent "
        f"that every run held.{seeds}",
    )


def _last_accuracies(run: RunRecord) -> list[float | None]:
    """Each client's accuracy, where it is known, in the last rounds: one round's says little where models move."""
    lines = [line["accuracy"] for line in run.clients if line["round"] > run.clients[-1]["round"] - LAST_ROUNDS]
    known = [[a for a in column if a is not None and isfinite(a)] for column in zip(*lines, strict=True)]
    return [fmean(column) if column else None for column in known]


def client_boxes(runs: Sequence[RunRecord]) -> go.Figure:
    """Only runs with an evaluated round have a box; silent clients have no point."""
    figure = go.Figure()
    for i, (run, name) in enumerate(zip(runs, _escaped_labels(runs), strict=True)):
        if not run.clients:
            continue
        named = zip(run.partition["clients"], _last_accuracies(run), run.clients[-1]["n"], strict=True)
        points = [(escape(str(c)), a, n) for c, a, n in named if a is not None]
        figure.add_trace(
            go.Box(
                y=[a for _, a, _ in points],
                name=name,
                customdata=[(c, n) for c, _, n in points],
                hovertemplate="%{customdata[0]}<br>%{y:.2%} of %{customdata[1]} test examples<extra></extra>",
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
        f"One point per client, on its own test set: mean of the rounds evaluated among the last {LAST_ROUNDS} of each run.",
        "Run",
        "Test accuracy (%)",
    )
    figure.update_layout(showlegend=False)
    boxes = len(figure.data)
    figure.update_xaxes(type="category", range=(-1, 1) if boxes < 2 else (-0.5, boxes - 0.5))
    return figure.update_yaxes(tickformat=".0%")


def partition_heatmap(partition: Mapping[str, Any]) -> go.Figure:
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
            hovertemplate="%{y}<br>class %{x}<br>%{z} examples<extra></extra>",
            colorbar={"title": {"text": "Examples", "side": "right"}, "thickness": 12, "outlinewidth": 0},
        )
    )
    _set_layout(figure, *_heatmap_title(bins, len(partition["clients"])), "Class", "Client")
    figure.update_layout(height=min(900, max(320, 160 + 18 * len(rows))))
    figure.update_xaxes(type="category", labelalias=_short_labels(bins.columns), showgrid=False)
    return figure.update_yaxes(
        type="category", labelalias=_short_labels(bins.rows), showgrid=False, autorange="reversed"
    )


def _heatmap_title(bins: Bins, num_clients: int) -> tuple[str, str]:
    title = "Examples per client and class"
    if bins.clients_per_row == 1:
        return title, f"{num_clients} clients, one per row."
    return (
        f"{title}, {bins.clients_per_row} clients added up per row",
        f"{num_clients} clients in {len(bins.rows)} rows, in the order of the partition.",
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
    known = [(r, a["mean"], a["std"]) for r, a in zip(x, accuracy, strict=True) if a["mean"] is not None]
    upper = [(r, min(1.0, mean + std)) for r, mean, std in known]
    lower = [(r, max(0.0, mean - std)) for r, mean, std in reversed(known)]
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
    """Escaped, because plotly reads a subset of HTML in every text that it draws."""
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
