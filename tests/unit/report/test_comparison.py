"""Every round of these runs spends 10 J: preparation 1, training 6, communication 1, server 2."""

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
    with pytest.raises(UserError, match=f"--at-budget has {text!r}. A budget must be a percentage such as 60"):
        parse_budget("--at-budget", text)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("40", None), r"--to-accuracy has '40'\. An accuracy must be above 0 and at most 1, such as 0\.4"),
        (("0.4,", None), "--to-accuracy has ''"),
        (("nan", None), "--to-accuracy has 'nan'"),
        (("0.4", None, "fedavg"), "--reference is 'fedavg', but --at-budget is not given"),
        (("0.4", None, None, 0), "--sustained-rounds is 0"),
    ],
)
def test_a_bad_request_is_named(arguments, message):
    with pytest.raises(UserError, match=message):
        ComparisonRequest.parse(*arguments)


def test_the_reference_is_fedavg_or_the_first_run_or_the_named_one(runs, paths):
    assert (find_reference(runs).name, find_reference(runs).num_runs, find_reference(runs).joules) == ("fedavg", 2, 50)
    assert find_reference(runs[2:]).joules == 40
    assert find_reference(runs, "local").name == "local"
    assert find_reference(runs, "fedavg seed=1").joules == 60
    assert find_reference(runs, str(paths[1])).joules == 60
    with pytest.raises(UserError, match=r"--reference is 'fedprox', which is not one of the runs\. .*local"):
        find_reference(runs, "fedprox")


def test_an_unfinished_reference_is_refused(write_course):
    run = read_run(write_course("a", [0.1, 0.2], finished=False))
    with pytest.raises(UserError, match="The reference fedavg has not finished"):
        find_reference([run])


def test_joules_to_an_accuracy_over_seeds(runs):
    fedavg, local = Comparison(runs, ComparisonRequest.parse("0.3,0.4", None, sustained_rounds=2)).to_accuracy
    # 0.3 is sustained for two rounds at round 3 (seed 0) and round 4 (seed 1), 0.4 at rounds 3 and 5.
    assert fedavg[0].round.mean == 3.5
    assert fedavg[0].joules.mean == 35
    assert fedavg[0].joules.std == pytest.approx(10 / sqrt(2))
    assert fedavg[0].joules_by_part["training"].mean == 21
    assert (fedavg[1].joules.mean, fedavg[1].seeds) == (40, [0, 1])
    assert local[0].joules.mean == 20 and local[0].joules.std is None
    assert local[1].joules is None


def test_accuracy_at_a_budget_over_seeds(runs):
    request = ComparisonRequest.parse(None, "60,100,10J", sustained_rounds=2)  # 60 % and 100 % of 50 J
    fedavg, local = Comparison(runs, request).at_budget
    assert [a.budget_joules for a in fedavg] == [30, 50, 10]
    # 30 J: windows end by round 3: seed 0 sustains 0.4, seed 1 0.2. 50 J: 0.4 and 0.4.
    assert fedavg[0].accuracy.mean == pytest.approx(0.3)
    assert (fedavg[1].accuracy.mean, fedavg[1].accuracy.std) == (0.4, 0)
    assert fedavg[2].accuracy is None
    assert local[0].accuracy.mean == 0.3


def test_tables_mark_the_best_and_name_the_reference(runs):
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
    assert "Accuracy means central accuracy (on the central test set)." in at_budget.notes


def test_a_large_fraction_of_the_server_is_noted_and_can_be_excluded(runs):
    (table,) = Comparison(runs, ComparisonRequest.parse("0.3", None, sustained_rounds=2)).tables()
    assert any(note.startswith("Up to 20% of a run’s joules are the server’s. They") for note in table.notes)
    (table,) = Comparison(
        [replace(run, joules_scope="clients") for run in runs], ComparisonRequest.parse("0.3", None, sustained_rounds=2)
    ).tables()
    assert table.rows[1][1] == "16.0 J"
    assert "Joules are those of all clients (modelled), without the server." in table.notes
    assert not any("Up to" in note for note in table.notes)


def test_seeds_that_never_reached_the_accuracy_are_counted_and_are_not_best(write_course):
    runs = [
        read_run(write_course("a", [0.5, 0.5, 0.5, 0.5], seed=0)),
        read_run(write_course("b", [0.1, 0.1, 0.1, 0.1], seed=1)),
        read_run(write_course("c", [0.1, 0.5, 0.5, 0.5], "local")),
        read_run(write_course("d", [0.1, 0.1, 0.5, 0.5], "fedprox")),
    ]
    (table,) = Comparison(runs, ComparisonRequest.parse("0.5", None, sustained_rounds=2)).tables()
    assert table.rows[0] == ("fedavg\n2 seeds", "20.0 J\n1 of 2 seeds", "4.0 s\n1 of 2 seeds", "2\n1 of 2 seeds")
    assert table.best_cells == {(1, 1)}


def test_a_dash_because_of_too_few_rounds_is_explained(runs):
    (table,) = Comparison(runs, ComparisonRequest.parse(None, "100", sustained_rounds=20)).tables()
    assert table.rows[1] == ("local", "–")
    assert any(
        note.startswith("These runs have fewer than 20 evaluated rounds: fedavg, local.") for note in table.notes
    )


def test_different_accuracies_are_noted(write_course):
    runs = [read_run(write_course("a", [0.5])), read_run(write_course("b", [0.5], "local", kind="local"))]
    (table,) = Comparison(runs, ComparisonRequest.parse("0.5", None, sustained_rounds=1)).tables()
    assert any("(on the central test set) for fedavg, and local accuracy" in note for note in table.notes)


def test_different_devices_are_noted(write_course):
    runs = [read_run(write_course(d, [0.5], config={"devices": d, "cohort": i})) for i, d in enumerate(("pi", "phone"))]
    (table,) = Comparison(runs, ComparisonRequest.parse("0.5", None, sustained_rounds=1)).tables()
    assert table.notes[-1] == "These runs differ in devices, so their joules are not directly comparable."


def test_runs_without_joules_are_refused(write_run):
    with pytest.raises(UserError, match="has no joules"):
        Comparison([read_run(write_run())], ComparisonRequest.parse("0.5", None))


def compare(*arguments):
    return CliRunner().invoke(app, ["compare", *map(str, arguments)])


def test_the_command_writes_json_and_the_page(paths, tmp_path):
    page = tmp_path / "page.html"
    flags = ("--to-accuracy", "0.3", "--at-budget", "60,1kJ", "--reference", "local", "--sustained-rounds", "2")
    found = json.loads(compare(*paths, *flags, "--out", page, "--json").stdout)
    assert [(a["label"], a["target_accuracy"], a["joules"]["mean"]) for a in found["to_accuracy"]] == [
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


def test_the_command_excludes_the_server_everywhere(paths, tmp_path):
    flags = ("--at-budget", "100", "--sustained-rounds", "2", "--joules", "clients", "--out", tmp_path / "page.html")
    found = json.loads(compare(*paths, *flags, "--json").stdout)
    assert [run["joules"]["total"] for run in found["runs"]] == [32, 48, 32]
    assert found["at_budget"][0]["budget_joules"] == 40
    page = (tmp_path / "page.html").read_text("utf-8")
    assert "without the server" in page
    assert "joules of all clients until then" in page


def test_the_command_prints_a_second_table(paths, tmp_path):
    text = compare(*paths, "--to-accuracy", "0.3", "--sustained-rounds", "2", "--out", tmp_path / "page.html").stdout
    assert "Joules, simulated time and rounds to reach an accuracy" in text and "35.0 J" in text
    assert "Accuracy at a budget" not in text


def test_nothing_is_added_without_a_request(paths, tmp_path):
    found = json.loads(compare(*paths, "--out", tmp_path / "page.html", "--json").stdout)
    assert set(found) == {"runs", "report"}


@pytest.mark.parametrize(
    "flags",
    [
        ("--to-accuracy", "high"),
        ("--at-budget", "60,x"),
        ("--at-budget", "60", "--reference", "fedprox"),
        ("--joules", "mine"),
    ],
)
def test_the_command_refuses_with_one_sentence(paths, tmp_path, flags):
    result = compare(*paths, *flags, "--out", tmp_path / "page.html", "--json")
    assert result.exit_code == 2
    assert "error" in json.loads(result.stdout)
    assert not (tmp_path / "page.html").exists()
