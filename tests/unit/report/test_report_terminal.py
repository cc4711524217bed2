from __future__ import annotations

import io
import re

from rich.console import Console

from shoal.report import compare_table, partition_view, result_table
from shoal.store.reader import read_run


def shown(renderable, colour: bool = False, width: int = 120) -> str:
    stream = io.StringIO()
    Console(file=stream, width=width, force_terminal=colour, no_color=True).print(renderable)
    return stream.getvalue()


def bold_numbers(renderable) -> list[str]:
    return re.findall(r"\x1b\[1m *(\d[\d.]*)", shown(renderable, colour=True))


def test_results_are_shown_with_their_numbers(write_run):
    text = shown(result_table([read_run(write_run(mean=0.7512))]))
    for part in ("fedavg", "75.1", "4.0 kB", "12.0 kB", "1m 30s"):
        assert part in text


def test_nothing_is_lost_on_a_narrow_terminal(write_run):
    runs = [read_run(write_run("a", mean=0.7512, done=4)), read_run(write_run("b", mean=0.5, done=3))]
    text = shown(compare_table(runs), width=80)
    for part in ("Time", "75.1", "0.500", "1m 30s", "4.5 s", "unfinished", "(round 3"):
        assert part in text


def test_the_best_is_bold(write_run):
    runs = [read_run(write_run("a", mean=0.7, loss=0.2)), read_run(write_run("b", mean=0.8, loss=0.4))]
    assert bold_numbers(compare_table(runs)) == ["0.200", "80.0", "60.0", "75.0"]
    assert bold_numbers(result_table(runs)) == []


def test_seeds_are_aggregated_below_the_runs(write_run):
    text = shown(compare_table([read_run(write_run(str(s), seed=s, mean=0.6 + s / 5)) for s in range(2)]))
    assert "2 seeds" in text and "70.0" in text and "± 14.1" in text


def test_markup_in_names_stays_text(write_run):
    assert "[red]x[/red]" in shown(result_table([read_run(write_run(method="[red]x[/red]"))]))


def test_the_partition_is_shaded_by_count():
    partition = {
        "clients": ["a", "b"],
        "classes": ["x", "y", "z"],
        "counts": [[0, 1, 5], [6, 11, 20]],
        "figures": {"js_distance": 0.25, "rows": 43},
        "note": "uneven",
    }
    lines = [line.rstrip() for line in shown(partition_view(partition)).splitlines()]
    assert lines[:2] == ["a   ░░░░  6", "b ▒▒▓▓██ 37"]
    assert lines[2] == "Row: one client. Column: one class, x to z. █ = 20 examples."
    assert lines[3:] == ["js distance  0.25", "rows         43", "uneven"]


def test_a_large_fleet_fits_forty_rows():
    partition = {"clients": [f"c{i}" for i in range(1000)], "classes": ["x"], "counts": [[1]] * 1000}
    lines = shown(partition_view(partition)).splitlines()
    assert len(lines) == 41
    assert lines[0].split() == ["c0", "…", "c24", "██", "25"]
    assert "25 clients added up" in lines[-1]
