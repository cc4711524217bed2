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
from shoal.report.cost_curves import HELD, OF_ACCURACY, PART_NAMES, PARTS, Bill, accuracy_of, bills, course
from shoal.report.summary import joules_text, joules_unit
from shoal.store.reader import RunRecord, run_labels, runs_by_job

PALETTE = (
    "#2A8AC8", "#E69F00", "#009E73", "#CC79A7", "#D55E00", "#56B4E9", "#8A8A8A", "#7B68D9", "#9AA825", "#A0673A",
    "#D23F6A", "#2FB9A8",
)  # fmt: skip
SYMBOLS = ("circle", "square", "diamond", "triangle-up", "x", "star", "cross", "triangle-down")
PATTERNS = {"train": "", "pre": "/", "comm": "x", "server": "."}
GREY = "#8A8A8A"
GRID = "rgba(128,128,128,0.25)"
CLEAR = "rgba(0,0,0,0)"

MOST_ROWS = 200
MOST_BANDS = 4  # more bands on top of each other show nothing
LATE = 20  # rounds
MOST_POINTS = 500
MOST_WRITTEN_CELLS = 400
LONGEST_NAME = 18

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
    banded = len(runs) <= MOST_BANDS
    for i, (run, name) in enumerate(zip(runs, _names(runs), strict=True)):
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
    _finish(figure, "Accuracy over rounds", reading, "Round", "Test accuracy (%)")
    few = max((r.rounds[-1]["round"] for r in runs if r.rounds), default=0) <= 10
    figure.update_xaxes(rangemode="tozero", dtick=1 if few else None)  # there is no half round
    return figure.update_yaxes(tickformat=".0%")


def accuracy_over_bytes(runs: Sequence[RunRecord]) -> go.Figure:
    figure = go.Figure()
    traffic = [list(accumulate(line["bytes_up"] + line["bytes_down"] for line in r.rounds)) for r in runs]
    unit, suffix = pick_unit_and_suffix(
        max((t[-1] for t in traffic if t), default=0), ["bytes", "kB", "MB", "GB", "TB", "PB"], 1000
    )
    for i, (run, name, so_far) in enumerate(zip(runs, _names(runs), traffic, strict=True)):
        points = [
            (total / unit, line["accuracy"]["mean"])
            for total, line in zip(so_far, run.rounds, strict=True)
            if line.get("accuracy")
        ]
        x, y = [p[0] for p in points], [p[1] for p in points]
        figure.add_trace(_line(x, y, name, i, f"%{{x:.4~g}} {suffix}"))
    _finish(
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
    banded = len(groups) <= MOST_BANDS
    unit, suffix = joules_unit(max((course(run)[-1].joules for run in runs if run.rounds), default=0.0))
    for i, (name, group) in enumerate(groups):
        joules, accuracy = _over_seeds(group)
        x = [j / unit for j in joules]
        if banded and len(group) > 1:
            figure.add_trace(_band(x, accuracy, i))
        shown = escape(name if group[0].is_finished else f"{name}, unfinished")
        figure.add_trace(_line(x, [a["mean"] for a in accuracy], shown, i, f"%{{x:.4~g}} {suffix}"))
    kinds = dict.fromkeys(OF_ACCURACY[accuracy_of(run)] for run in runs)
    whose = "all clients" if all(run.joules_scope == "clients" for run in runs) else "all clients and the server"
    reading = f"Accuracy {' or '.join(kinds)}, against the joules of {whose} until then."
    if any(len(group) > 1 for _, group in groups):
        reading += " Line: mean over seeds." + (" Band: ± 1 standard deviation over seeds." if banded else "")
    _finish(figure, "Accuracy over joules", reading, f"Spent so far ({suffix})", "Test accuracy (%)")
    figure.update_xaxes(rangemode="tozero")
    return figure.update_yaxes(tickformat=".0%")


def _over_seeds(runs: Sequence[RunRecord]) -> tuple[list[float], list[dict[str, float]]]:
    """Of the rounds that all seeds evaluated: joules (mean) and accuracy (mean and std)."""
    courses = [{p.round: p for p in course(run) if p.accuracy is not None} for run in runs]
    rounds = [r for r in courses[0] if all(r in c for c in courses)]
    joules = [fmean(c[r].joules for c in courses) for r in rounds]
    accuracy = [[c[r].accuracy or 0.0 for c in courses] for r in rounds]
    return joules, [{"mean": fmean(a), "std": stdev(a) if len(a) > 1 else 0.0} for a in accuracy]


def joule_bars(runs: Sequence[RunRecord], held: int = HELD) -> go.Figure:
    """What each job took by the time it held the accuracy that all of them held, by what it was for."""
    level, jobs = bills(runs, held)
    unit, suffix = joules_unit(max((bill.joules for bill in jobs), default=0.0))
    names = [escape(b.label if b.finished else f"{b.label}, unfinished").replace(" ", "<br>") for b in jobs]
    figure = go.Figure(
        [_part_bars(part, jobs, names, unit) for part in PARTS] + [_part_key(part, names[:1]) for part in PARTS]
    )
    _finish(figure, *_bars_title(level, held, jobs), f"Spent ({suffix})", "")
    lines = max((name.count("<br>") + 1 for name in names), default=1)
    figure.update_layout(
        barmode="stack",
        height=150 + len(jobs) * max(46, 20 * lines + 12),
        legend={"y": 1.0, "yanchor": "bottom", "itemclick": False, "itemdoubleclick": False},
    )
    longest = max((bill.joules for bill in jobs), default=0.0) / unit
    figure.update_xaxes(range=(0, 1.15 * longest or 1))  # room for the sum behind the bar
    return figure.update_yaxes(type="category", autorange="reversed", showgrid=False)


def _part_bars(part: str, jobs: Sequence[Bill], names: Sequence[str], unit: float) -> go.Bar:
    return go.Bar(
        y=names,
        x=[bill.parts[part] / unit for bill in jobs],
        orientation="h",
        width=0.6,
        showlegend=False,
        marker=_pattern(part, [_colour(i) for i, _ in enumerate(jobs)]),
        customdata=[_bill_text(bill) for bill in jobs],
        hovertemplate="%{customdata}<extra></extra>",
        text=[f" {joules_text(bill.joules)}" for bill in jobs] if part == PARTS[-1] else None,
        textposition="outside",
        cliponaxis=False,
    )


def _part_key(part: str, anywhere: Sequence[str]) -> go.Bar:
    """For the legend: there the patterns count, and not the colours."""
    name, marker = PART_NAMES[part], _pattern(part, GREY)
    return go.Bar(y=anywhere, x=[None], orientation="h", name=name, legendgroup=part, marker=marker)


def _pattern(part: str, colour: str | list[str]) -> dict[str, Any]:
    pattern = {"shape": PATTERNS[part], "fillmode": "replace", "size": 7, "solidity": 0.35}
    return {"color": colour, "line": {"color": colour, "width": 1}, "pattern": pattern}


def _bill_text(bill: Bill) -> str:
    shares = [
        f"{PART_NAMES[part]}: {joules_text(bill.parts[part])} ({bill.parts[part] / (bill.joules or 1):.2%})"
        for part in PARTS
    ]
    return "<br>".join((f"<b>{escape(bill.label)}</b>", *shares, f"together: {joules_text(bill.joules)}"))


def _bars_title(level: float | None, held: int, jobs: Sequence[Bill]) -> tuple[str, str]:
    seeds = " Means over seeds." if any(bill.seeds > 1 for bill in jobs) else ""
    if level is None:
        reading = f"There is no accuracy that every run held for {held} evaluated rounds in a row.{seeds}"
        return "Joules of the whole run", reading
    return (
        f"Joules to {level:.0%} accuracy",
        f"Until a run had been at {level:.0%} or above for {held} evaluated rounds in a row: the highest whole percent "
        f"that every run held.{seeds}",
    )


def _late_means(run: RunRecord) -> list[float | None]:
    """Each client's accuracy, where it is known, in the last rounds: one round's says little where models move."""
    lines = [line["accuracy"] for line in run.clients if line["round"] > run.clients[-1]["round"] - LATE]
    known = [[a for a in column if a is not None and isfinite(a)] for column in zip(*lines, strict=True)]
    return [fmean(column) if column else None for column in known]


def client_boxes(runs: Sequence[RunRecord]) -> go.Figure:
    """Only runs with an evaluated round have a box; silent clients have no point."""
    figure = go.Figure()
    for i, (run, name) in enumerate(zip(runs, _names(runs), strict=True)):
        if not run.clients:
            continue
        named = zip(run.partition["clients"], _late_means(run), run.clients[-1]["n"], strict=True)
        points = [(escape(str(c)), a, n) for c, a, n in named if a is not None]
        figure.add_trace(
            go.Box(
                y=[a for _, a, _ in points],
                name=name,
                customdata=[(c, n) for c, _, n in points],
                hovertemplate="%{customdata[0]}<br>%{y:.2%} of %{customdata[1]} test examples<extra></extra>",
                width=0.4,
                boxpoints="all" if len(points) <= MOST_POINTS else "outliers",
                jitter=0.5,
                pointpos=0,
                marker={"color": _colour(i), "size": 5, "opacity": 0.55},
                line={"width": 2},
                fillcolor=_faint(i, 0.18),
            )
        )
    _finish(
        figure,
        "Accuracy of each client",
        f"One point per client, on its own test set: mean of the rounds evaluated among the last {LATE} of each run.",
        "Run",
        "Test accuracy (%)",
    )
    figure.update_layout(showlegend=False)
    boxes = len(figure.data)
    figure.update_xaxes(type="category", range=(-1, 1) if boxes < 2 else (-0.5, boxes - 0.5))
    return figure.update_yaxes(tickformat=".0%")


def partition_heatmap(partition: Mapping[str, Any]) -> go.Figure:
    bins = bin_counts(partition, MOST_ROWS)
    rows, columns = [escape(r) for r in bins.rows], [escape(c) for c in bins.columns]
    few = bins.counts.size <= MOST_WRITTEN_CELLS
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
    _finish(figure, *_heatmap_title(bins, len(partition["clients"])), "Class", "Client")
    figure.update_layout(height=min(900, max(320, 160 + 18 * len(rows))))
    figure.update_xaxes(type="category", labelalias=_aliases(bins.columns), showgrid=False)
    return figure.update_yaxes(type="category", labelalias=_aliases(bins.rows), showgrid=False, autorange="reversed")


def _heatmap_title(bins: Bins, clients: int) -> tuple[str, str]:
    title = "Examples per client and class"
    if bins.clients_per_row == 1:
        return title, f"{clients} clients, one per row."
    return (
        f"{title}, {bins.clients_per_row} clients added up per row",
        f"{clients} clients in {len(bins.rows)} rows, in the order of the partition.",
    )


def _line(x: Sequence[float], y: Sequence[float], name: str, i: int, where: str) -> go.Scatter:
    return go.Scatter(
        x=x,
        y=y,
        name=name,
        legendgroup=str(i),
        mode="lines+markers",
        line={"color": _colour(i), "width": 2.5},
        marker={"symbol": SYMBOLS[i % len(SYMBOLS)], "size": 7, "maxdisplayed": 20},
        hovertemplate=f"%{{fullData.name}}<br>{where}: %{{y:.2%}}<extra></extra>",
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
        fillcolor=_faint(i, 0.14),
        hoverinfo="skip",
    )


def _finish(figure: go.Figure, title: str, reading: str, x_title: str, y_title: str) -> None:
    figure.update_layout(
        template=TEMPLATE,
        title={"text": title, "subtitle": {"text": reading}},
        showlegend=len({trace.legendgroup for trace in figure.data}) > 1,
    )
    figure.update_xaxes(title_text=x_title)
    figure.update_yaxes(title_text=y_title)


def _names(runs: Sequence[RunRecord]) -> list[str]:
    """Escaped, because plotly reads a subset of HTML in every text that it draws."""
    return [
        escape(name if run.is_finished else f"{name}, unfinished")
        for name, run in zip(run_labels(runs), runs, strict=True)
    ]


def _aliases(names: Sequence[str]) -> dict[str, str]:
    half = LONGEST_NAME // 2
    return {escape(n): escape(f"{n[:half]}…{n[-half:]}") for n in names if len(n) > LONGEST_NAME}


def _colour(i: int) -> str:
    return PALETTE[i % len(PALETTE)]


def _faint(i: int, opacity: float) -> str:
    red, green, blue = hex_to_rgb(_colour(i))
    return f"rgba({red},{green},{blue},{opacity})"
