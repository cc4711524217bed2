"""A small study from the command line: played, killed and gone on with, and its tables."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from shoal.cli import app
from shoal.study.plan import load_study

STUDY = """
title = "A small study"
fixed = "Nothing."
ours = "shoal"
inputs = [5, 10, 20]
[job]
clients = 8
unseen = 2
cohort = 3
rounds = 2
epochs = 1
rows = 400
fleet = "vector"
keep = 1
[variants.FedAvg]
method = "fedavg"
[variants."FedAvg + EMA"]
method = "shoal"
set.components = {selection = "random", prior_correction = false, experts = false}
set.server = {momentum = 0.0, lr = 1.0}
set.train = {adjust = "off"}
[variants.shoal]
method = "shoal"
[lists]
few = ["FedAvg", "shoal"]
plain = ["FedAvg + EMA"]
[cells.skewed]
partition = "dirichlet:0.1"
target = 0.1
[cells.even]
partition = "iid"
[budgets.quick]
seeds = [0]
cells.skewed.play = ["few"]
cells.even.play = ["plain"]
[budgets.more]
seeds = [0, 1]
cells.skewed.play = ["few"]
[[claims]]
says = "shoal serves unseen clients better by their inputs than without"
[[claims.tests]]
kind = "difference"
of = "shoal"
figure = "unseen.10"
than = "shoal"
than_figure = "unseen.none"
cells = ["skewed"]
at_least = -100.0
[[claims]]
says = "shoal sees a shift"
tests = [{kind = "value", of = "shoal", figure = "split", cells = ["skewed"], at_least = 1.0, judge = "every"}]
"""


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text(STUDY)
    return path


def study(*words):
    result = CliRunner().invoke(app, ["study", *map(str, words), "--json"])
    return result.exit_code, json.loads(result.stdout)


def kept(folder: Path) -> dict[str, bytes]:
    names = ("rounds.jsonl", "unseen.json", "clients.jsonl")
    return {str(p.relative_to(folder)): p.read_bytes() for name in names for p in sorted(folder.rglob(name))}


def test_killed_and_gone_on_with(file, tmp_path):
    folder = tmp_path / "killed"
    command = [sys.executable, "-m", "shoal", "study", file, "--out", folder, "--workers", "1"]
    child = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while not list(folder.rglob("unseen.json")) and child.poll() is None:
        time.sleep(0.05)
    child.kill()
    child.wait()
    before = {p: p.stat().st_mtime_ns for p in folder.rglob("unseen.json")}
    assert 0 < len(before) < 3
    time.sleep(1)  # workers go with whoever started them

    code, partly = study(file, "--out", folder, "--report-only")
    assert code == 0
    assert len(partly["missing"]) == 3 - len(before)
    assert partly["claims"][1]["verdict"] == "not measured"

    code, whole = study(file, "--out", folder)
    assert (code, whole["missing"]) == (0, [])
    assert {p: p.stat().st_mtime_ns for p in before} == before  # what was finished is kept
    fresh = tmp_path / "fresh"
    assert study(file, "--out", fresh)[0] == 0
    assert kept(folder) == kept(fresh)
    assert len(whole["runs"]) == 3
    check_tables(whole, folder)


def check_tables(whole, folder):
    ours = next(r for r in whole["runs"] if (r["cell"], r["variant"]) == ("skewed", "shoal"))
    assert {"unseen.none", "unseen.5", "unseen.10", "unseen.20", "unseen.true", "epochs_to"} <= ours["figures"].keys()
    plain = next(r for r in whole["runs"] if (r["cell"], r["variant"]) == ("even", "FedAvg + EMA"))
    assert "unseen.10" not in plain["figures"] and "epochs_to" not in plain["figures"]
    first = whole["claims"][0]
    assert first["verdict"] == "holds"
    assert first["tests"][0]["found"]["how"] == "bootstrap, 2 clients of one seed"
    assert whole["claims"][1]["verdict"] == "undecided"  # the probe comes later than the second round
    text = (folder / "study.md").read_text()
    for told in ("# A small study: quick", "3 of 3 runs are finished.", "| FedAvg + EMA |", "client-epochs to 10 %"):
        assert told in text
    assert "skewed: what shoal has more than each" in (folder / "study.html").read_text()


@pytest.mark.parametrize(
    ("old", "new", "sentence"),
    [
        (
            'few = ["FedAvg", "shoal"]',
            'few = ["FedAvgg"]',
            "lists.few has 'FedAvgg', which is no variant; did you mean FedAvg?",
        ),
        (
            'figure = "split"',
            'figure = "splits"',
            "claim 2, test 1: figure is 'splits', which is no figure; did you mean split?",
        ),
        ("at_least = -100.0", "", "claims.0.tests.0: one of at_least and at_most must be given"),
        (
            'than = "shoal"',
            'than = "G"',
            "claim 1, test 1: than is 'G', which is no variant (known: FedAvg, FedAvg + EMA",
        ),
        ('figure = "unseen.10"', 'figure = "centrl"', "figure is 'centrl', which is no figure; did you mean central?"),
        ("seeds = [0]", "seeds = 1", "budgets.quick.seeds is 1; it must be a list, such as [1]"),
        ('cells.even.play = ["plain"]', 'cells.even.play = "plain"', "play is 'plain'; it must be a list of names"),
        ('ours = "shoal"', "", "mine.toml: ours is missing; a study needs title, ours, job, variants, cells, budgets"),
        ("[lists]", '[lists]\nshoal = ["FedAvg"]', "lists.shoal has the name of a variant"),
        ('ours = "shoal"', 'ours = "shoal"\nours_too = 1', "ours_too is 1: extra inputs are not permitted"),
        ("cohort = 3", "cohort = 30", "cohort is 30; it must be between 1 and the number of clients, 6"),
        ("seeds = [0]", 'seeds = ["x"]', "budgets.quick.seeds.0 is 'x'"),
    ],
)
def test_what_is_wrong_is_said_before_anything_runs(file, tmp_path, old, new, sentence):
    assert old in STUDY
    file.write_text(STUDY.replace(old, new))
    code, told = study(file, "--out", tmp_path / "out")
    assert code == 2
    assert sentence in told["error"]
    assert not (tmp_path / "out").exists()


def test_planted_groups_that_nobody_looked_for_agree_with_nothing(tmp_path):
    planted = ["--partition", "groups:2,1.0", "--clients", "6", "--rounds", "1", "--epochs", "1", "--rows", "300"]
    result = CliRunner().invoke(app, ["run", "fedavg", *planted, "--out", str(tmp_path / "r"), "--json"])
    found = json.loads(result.stdout)
    assert found["groups_ari"] == 0.0
    assert "groups" not in found


def test_a_packaged_study_is_found_from_any_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, told = study("study/own", "--report-only")
    assert code == 0
    assert any("oracle experts" in run for run in told["missing"])
    assert (tmp_path / "runs/own-quick/study.md").exists()


@pytest.mark.parametrize(("name", "hint"), [("huge", ""), ("quik", "; did you mean quick?")])
def test_an_unknown_budget(file, name, hint):
    code, told = study(file, "--budget", name)
    assert (code, told["error"]) == (2, f"budget {name!r} is not in the study{hint} (it has quick, more)")


def test_all_that_is_missing_is_said_at_once(file):
    file.write_text('ours = "a"\n[job]\n[cells.here]\n[budgets.quick]\nseeds = [1]')
    sentence = study(file)[1]["error"]
    assert "title, variants, budgets.quick.cells are missing; a study needs title, ours, job," in sentence


def test_the_shortest_study(file):
    """Without lists, `play` names variants; without `play`, all are meant."""
    file.write_text("""
title = "t"
ours = "a"
[job]
[variants]
a = {method = "fedavg"}
b = {method = "fedprox"}
[cells]
here = {}
there = {}
[budgets.quick]
seeds = [1]
cells = {here = {play = ["b"]}, there = {}}
""")
    assert [e.label for e in load_study(file).entries("quick")] == [
        *("here, b, seed 1", "there, a, seed 1", "there, b, seed 1"),
    ]


def test_the_example_of_the_documentation_is_a_study(tmp_path):
    page = (Path(__file__).parents[2] / "docs/study.md").read_text()
    path = tmp_path / "example.toml"
    path.write_text(page.split("```toml\n")[1].split("```")[0])
    entries = load_study(path).entries("quick")
    assert [(e.variant, e.seed, e.job.rounds, e.target_accuracy) for e in entries[:3]] == [
        *(("FedAvg", 1, 10, 0.5), ("EMA", 1, 10, 0.5), ("FedAvg", 2, 10, 0.5)),
    ]
