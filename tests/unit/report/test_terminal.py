from __future__ import annotations

import io
import re

from rich.console import Console

from shoal.report import (
    Comparison,
    ComparisonRequest,
    compare_table,
    paper_view,
    partition_view,
    report_table_view,
    result_table,
)
from shoal.reproduce.paper_table import compare_with_paper
from shoal.store.reader import read_run


def render(renderable, colour: bool = False, width: int = 120) -> str:
    stream = io.StringIO()
    Console(file=stream, width=width, force_terminal=colour, no_color=True).print(renderable)
    return stream.getvalue()


def bold_numbers(renderable) -> list[str]:
    return re.findall(r"\x1b\[1m *(\d+\.\d+)", render(renderable, colour=True))


def test_results_are_shown_with_their_numbers(write_run):
    text = render(result_table([read_run(write_run(mean=0.7512))]))
    for part in ("fedavg", "75.1", "4.0 kB", "12.0 kB", "1m 30s"):
        assert part in text


def test_no_column_is_cut_on_a_narrow_terminal(write_run):
    runs = [read_run(write_run("a", mean=0.7512, done=4)), read_run(write_run("b", mean=0.5, done=3))]
    text = render(compare_table(runs), width=80)
    for part in ("Time", "75.1", "0.500", "1m 30s", "4.5 s", "unfinished", "(round 3"):
        assert part in text


def test_the_best_is_bold(write_run):
    runs = [read_run(write_run("a", mean=0.7, loss=0.2)), read_run(write_run("b", mean=0.8, loss=0.4))]
    assert bold_numbers(compare_table(runs)) == ["0.200", "80.0", "60.0", "75.0"]
    assert bold_numbers(result_table(runs)) == []


def test_seeds_are_aggregated_below_the_runs(write_run):
    text = render(compare_table([read_run(write_run(str(s), seed=s, mean=0.6 + s / 5)) for s in range(2)]))
    assert "2 seeds" in text and "70.0" in text and "± 14.1" in text


def test_markup_in_names_stays_text(write_run):
    assert "[red]x[/red]" in render(result_table([read_run(write_run(method="[red]x[/red]"))]))


def test_a_line_per_run_fits_a_wide_terminal(write_course):
    runs = [read_run(write_course("a", [0.5, 0.6])), read_run(write_course("b", [0.5], "local"))]
    lines = render(compare_table(runs), width=160).splitlines()
    row = next(line for line in lines if line.split()[:1] == ["fedavg"])
    assert row.split()[-6:] == ["20.0", "J", "4.0", "s", "1m", "30s"]
    assert max(map(len, lines)) <= 160


def test_a_run_that_ended_early_has_its_reason(write_course):
    text = render(result_table([read_run(write_course("a", [0.5], stopped="every battery is empty"))]))
    assert "ended early" in text
    assert "fedavg: finished (every battery is empty at round 1)." in text


def test_tables_have_their_best_in_bold_and_their_notes_below(write_course):
    runs = [read_run(write_course("a", [0.5, 0.5])), read_run(write_course("[b]", [0.3, 0.5], "[b]"))]
    (table,) = Comparison(runs, ComparisonRequest.parse("0.3,0.5", None, sustained_rounds=1)).tables()
    assert bold_numbers(report_table_view(table)) == ["10.0"]  # to 50 %; both take 10 J to 30 %
    text = render(report_table_view(table))
    assert "to 50 %" in text and "[b]" in text and "Accuracy means central accuracy (on the central test set)." in text


def test_the_paper_is_printed_with_its_verdict(write_course):
    runs = [read_run(write_course("a", [0.5])), read_run(write_course("b", [0.3], "local"))]
    numbers = {"source": "Table II", "metric": "final", "columns": {"final": {"fedavg": 46.03, "local": 40.0}}}
    text = render(paper_view(compare_with_paper(runs, numbers)))
    assert "Beside the paper: Table II (%)" in text
    assert "50.00   46.03" in text
    assert "Orderings: same 0, undecided 1, opposite 0" in text


def test_the_partition_is_shaded_by_count():
    partition = {
        "clients": ["a", "b"],
        "classes": ["x", "y", "z"],
        "counts": [[0, 1, 5], [6, 11, 20]],
        "heterogeneity": {"js_distance": 0.25, "num_samples": 43},
        "note": "uneven",
    }
    lines = [line.rstrip() for line in render(partition_view(partition)).splitlines()]
    assert lines[:2] == ["a   ░░░░  6", "b ▒▒▓▓██ 37"]
    assert lines[2] == "Row: one client. Column: one class, x to z. █ = 20 samples."
    assert lines[3:] == ["js distance  0.25", "num samples  43", "uneven"]


def test_a_large_fleet_has_at_most_forty_rows():
    partition = {"clients": [f"c{i}" for i in range(1000)], "classes": ["x"], "counts": [[1]] * 1000}
    lines = render(partition_view(partition)).splitlines()
    assert len(lines) == 41
    assert lines[0].split() == ["c0", "…", "c24", "██", "25"]
    assert "25 clients added up" in lines[-1]
