"""Every round of these runs takes 10 J: pre 3, train 6, comm 1."""

from __future__ import annotations

import json
from dataclasses import replace
from math import sqrt

import pytest
from typer.testing import CliRunner

from shoal.cli import app
from shoal.errors import UserError
from shoal.report import Comparison, ComparisonRequest
from shoal.report.comparison import find_reference, parse_budget
from shoal.store.reader import read_run


@pytest.fixture
def paths(write_course):
    """Two seeds of fedavg, which spend 40 J and 60 J, and one of local."""
    return [
        write_course("a", [0.2, 0.4, 0.4, 0.4], seed=0),
        write_course("b", [0.1, 0.2, 0.3, 0.4, 0.4, 0.5], seed=1, config={"rounds": 4}),
        write_course("c", [0.3, 0.3, 0.3, 0.3], "local"),
    ]


@pytest.fixture
def runs(paths):
    return [read_run(p) for p in paths]


@pytest.mark.parametrize(
    ("text", "joules"),
    [("60", 30), ("60%", 30), ("120 %", 60), ("500J", 500), ("1.5kJ", 1500), ("2 MJ", 2e6), ("2Wh", 7200)],
)
def test_budgets_are_percents_or_joules(text, joules):
    assert parse_budget("--at-budget", text).joules(50.0) == pytest.approx(joules)


@pytest.mark.parametrize("text", ["", "much", "0", "-5", "5 parsec", "J", "nan", "inf", "60j"])
def test_a_bad_budget_is_named(text):
    with pytest.raises(UserError, match=f"--at-budget has {text!r}; a budget must be percents such as 60, or joules"):
        parse_budget("--at-budget", text)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("40", None), r"--to-accuracy has '40'; an accuracy must be above 0 and at most 1, such as 0\.4"),
        (("0.4,", None), "--to-accuracy has ''"),
        (("nan", None), "--to-accuracy has 'nan'"),
        (("0.4", None, "fedavg"), "--of is 'fedavg', but it says whose joules are 100 % of --at-budget"),
        (("0.4", None, None, 0), "--held is 0"),
    ],
)
def test_bad_questions_are_named(arguments, message):
    with pytest.raises(UserError, match=message):
        ComparisonRequest.parse(*arguments)


def test_the_reference_is_fedavg_or_the_first_or_as_asked(runs, paths):
    assert (find_reference(runs).name, find_reference(runs).num_runs, find_reference(runs).joules) == ("fedavg", 2, 50)
    assert find_reference(runs[2:]).joules == 40
    assert find_reference(runs, "local").name == "local"
    assert find_reference(runs, "fedavg seed=1").joules == 60
    assert find_reference(runs, str(paths[1])).joules == 60
    with pytest.raises(UserError, match=r"--of is 'fedprox', which is none of the runs; give one of .*local"):
        find_reference(runs, "fedprox")


def test_an_unfinished_reference_is_refused(write_course):
    run = read_run(write_course("a", [0.1, 0.2], finished=False))
    with pytest.raises(UserError, match="the reference fedavg has not finished"):
        find_reference([run])


def test_joules_to_an_accuracy_over_seeds(runs):
    fedavg, local = Comparison(runs, ComparisonRequest.parse("0.3,0.4", None, sustained_rounds=2)).to_accuracy
    # 0.3 is held for two rounds at round 3 (seed 0) and round 4 (seed 1), 0.4 at rounds 3 and 5.
    assert fedavg[0].round.mean == 3.5
    assert fedavg[0].joules.mean == 35
    assert fedavg[0].joules.std == pytest.approx(10 / sqrt(2))
    assert fedavg[0].joules_by_part["train"].mean == 21
    assert (fedavg[1].joules.mean, fedavg[1].seeds) == (40, [0, 1])
    assert local[0].joules.mean == 20 and local[0].joules.std is None
    assert local[1].joules is None


def test_accuracy_at_a_budget_over_seeds(runs):
    questions = ComparisonRequest.parse(None, "60,100,10J", sustained_rounds=2)  # of 50 J: 30 J and 50 J
    fedavg, local = Comparison(runs, questions).at_budget
    assert [a.budget_joules for a in fedavg] == [30, 50, 10]
    # 30 J: windows end by round 3: seed 0 holds 0.4, seed 1 0.2. 50 J: 0.4 and 0.4.
    assert fedavg[0].accuracy.mean == pytest.approx(0.3)
    assert (fedavg[1].accuracy.mean, fedavg[1].accuracy.std) == (0.4, 0)
    assert fedavg[2].accuracy is None
    assert local[0].accuracy.mean == 0.3


def test_sheets_say_what_is_best_and_what_it_hangs_on(runs):
    to_accuracy, at_budget = Comparison(runs, ComparisonRequest.parse("0.3", "100", sustained_rounds=2)).tables()
    assert to_accuracy.headers == ("Run", "to 30 %", "time", "rounds")
    assert to_accuracy.rows == (
        ("fedavg\n2 seeds", "35.0 J\n± 7.07 J", "7.0 s\n± 1.4 s", "3.5\n± 0.7"),
        ("local", "20.0 J", "4.0 s", "2"),
    )
    assert to_accuracy.best_cells == {(1, 1)}
    assert at_budget.headers == ("Run", "100 %\n50.0 J")
    assert at_budget.rows == (("fedavg\n2 seeds", "40.0\n± 0"), ("local", "30.0"))
    assert at_budget.best_cells == {(0, 1)}
    assert "100 % is 50.0 J: the mean of 2 runs of fedavg." in at_budget.notes
    assert "Accuracy: on the central test set." in at_budget.notes


def test_a_large_share_of_the_server_is_told_and_can_be_left_out(runs):
    (sheet,) = Comparison(runs, ComparisonRequest.parse("0.3", None, sustained_rounds=2)).tables()
    assert any(
        note.startswith("Up to 20% of a run’s joules are the server’s: measured, they vary") for note in sheet.notes
    )
    (sheet,) = Comparison(
        [replace(run, counted="clients") for run in runs], ComparisonRequest.parse("0.3", None, sustained_rounds=2)
    ).tables()
    assert sheet.rows[1][1] == "16.0 J"
    assert "Joules: of all clients (modelled), without the server." in sheet.notes
    assert not any("Up to" in note for note in sheet.notes)


def test_seeds_that_never_got_there_are_told_and_win_nothing(write_course):
    runs = [
        read_run(write_course("a", [0.5, 0.5, 0.5, 0.5], seed=0)),
        read_run(write_course("b", [0.1, 0.1, 0.1, 0.1], seed=1)),
        read_run(write_course("c", [0.1, 0.5, 0.5, 0.5], "local")),
        read_run(write_course("d", [0.1, 0.1, 0.5, 0.5], "fedprox")),
    ]
    (sheet,) = Comparison(runs, ComparisonRequest.parse("0.5", None, sustained_rounds=2)).tables()
    assert sheet.rows[0] == ("fedavg\n2 seeds", "20.0 J\n1 of 2 seeds", "4.0 s\n1 of 2 seeds", "2\n1 of 2 seeds")
    assert sheet.best_cells == {(1, 1)}


def test_a_dash_for_want_of_rounds_is_explained(runs):
    (sheet,) = Comparison(runs, ComparisonRequest.parse(None, "100", sustained_rounds=20)).tables()
    assert sheet.rows[1] == ("local", "–")
    assert "Fewer than 20 evaluated rounds: fedavg, local; --held asks for fewer." in sheet.notes


def test_different_accuracies_are_not_mixed_in_silence(write_course):
    runs = [read_run(write_course("a", [0.5])), read_run(write_course("b", [0.5], "local", kind="mean"))]
    (sheet,) = Comparison(runs, ComparisonRequest.parse("0.5", None, sustained_rounds=1)).tables()
    assert any("central test set for fedavg; mean over" in note for note in sheet.notes)


def test_joules_of_other_devices_are_not_compared_in_silence(write_course):
    runs = [read_run(write_course(d, [0.5], config={"devices": d, "cohort": i})) for i, d in enumerate(("pi", "phone"))]
    (sheet,) = Comparison(runs, ComparisonRequest.parse("0.5", None, sustained_rounds=1)).tables()
    assert sheet.notes[-1] == "These runs differ in devices: their joules are not directly comparable."


def test_runs_without_joules_are_refused(write_run):
    with pytest.raises(UserError, match="has no joules"):
        Comparison([read_run(write_run())], ComparisonRequest.parse("0.5", None))


def compare(*arguments):
    return CliRunner().invoke(app, ["compare", *map(str, arguments)])


def test_the_command_answers_in_json_and_on_the_page(paths, tmp_path):
    page = tmp_path / "page.html"
    asked = ("--to-accuracy", "0.3", "--at-budget", "60,1kJ", "--of", "local", "--held", "2")
    found = json.loads(compare(*paths, *asked, "--out", page, "--json").stdout)
    assert [(a["label"], a["level"], a["joules"]["mean"]) for a in found["to_accuracy"]] == [
        ("fedavg", 0.3, 35),
        ("local", 0.3, 20),
    ]
    assert [(a["label"], a["budget"], a["budget_joules"]) for a in found["at_budget"]] == [
        ("fedavg", "60 %", 24),
        ("fedavg", "1 kJ", 1000),
        ("local", "60 %", 24),
        ("local", "1 kJ", 1000),
    ]
    assert "Accuracy at a budget of joules" in page.read_text("utf-8")


def test_the_command_leaves_the_server_out_everywhere(paths, tmp_path):
    asked = ("--at-budget", "100", "--held", "2", "--joules", "clients", "--out", tmp_path / "page.html")
    found = json.loads(compare(*paths, *asked, "--json").stdout)
    assert [run["joules"]["total"] for run in found["runs"]] == [32, 48, 32]
    assert found["at_budget"][0]["budget_joules"] == 40
    page = (tmp_path / "page.html").read_text("utf-8")
    assert "without the server" in page
    assert "against the joules of all clients until then" in page


def test_the_command_prints_a_second_table(paths, tmp_path):
    text = compare(*paths, "--to-accuracy", "0.3", "--held", "2", "--out", tmp_path / "page.html").stdout
    assert "Joules, simulated time and rounds to an accuracy" in text and "35.0 J" in text
    assert "Accuracy at a budget" not in text


def test_nothing_is_added_where_nothing_is_asked(paths, tmp_path):
    found = json.loads(compare(*paths, "--out", tmp_path / "page.html", "--json").stdout)
    assert set(found) == {"runs", "report"}


@pytest.mark.parametrize(
    "asked",
    [
        ("--to-accuracy", "high"),
        ("--at-budget", "60,x"),
        ("--at-budget", "60", "--of", "fedprox"),
        ("--joules", "mine"),
    ],
)
def test_the_command_refuses_with_one_sentence(paths, tmp_path, asked):
    result = compare(*paths, *asked, "--out", tmp_path / "page.html", "--json")
    assert result.exit_code == 2
    assert "error" in json.loads(result.stdout)
    assert not (tmp_path / "page.html").exists()
