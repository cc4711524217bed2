"""A small study from the command line: run, killed and continued, and its tables."""

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
fixed_beforehand = "Nothing."
our_variant = "shoal"
num_inputs = [5, 10, 20]
[job]
clients = 8
unseen = 2
cohort = 3
rounds = 2
epochs = 1
max_train_samples = 400
fleet = "vector"
keep_checkpoints = 1
[variants.FedAvg]
method = "fedavg"
[variants."FedAvg + EMA"]
method = "shoal"
set.components = {selection = "random", prior_correction = false, experts = false}
set.server = {momentum = 0.0, lr = 1.0}
set.train = {logit_adjustment = "off"}
[variants.shoal]
method = "shoal"
[variant_lists]
few = ["FedAvg", "shoal"]
plain = ["FedAvg + EMA"]
[cells.skewed]
partition = "dirichlet:0.1"
target_accuracy = 0.1
[cells.even]
partition = "iid"
[budgets.quick]
seeds = [0]
cells.skewed.variants = ["few"]
cells.even.variants = ["plain"]
[budgets.more]
seeds = [0, 1]
cells.skewed.variants = ["few"]
[[claims]]
statement = "shoal serves unseen clients better by their inputs than without"
[[claims.tests]]
kind = "difference"
variant = "shoal"
metric = "unseen.10"
baseline = "shoal"
baseline_metric = "unseen.none"
cells = ["skewed"]
at_least = -100.0
[[claims]]
statement = "shoal sees a shift"
[[claims.tests]]
kind = "value"
variant = "shoal"
metric = "has_split"
cells = ["skewed"]
at_least = 1.0
criterion = "every_seed"
"""


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text(STUDY)
    return path


def study(*words):
    result = CliRunner().invoke(app, ["study", *map(str, words), "--json"])
    return result.exit_code, json.loads(result.stdout)


def results_in(folder: Path) -> dict[str, bytes]:
    names = ("rounds.jsonl", "unseen.json", "clients.jsonl")
    return {str(p.relative_to(folder)): p.read_bytes() for name in names for p in sorted(folder.rglob(name))}


def test_a_killed_study_continues(file, tmp_path):
    folder = tmp_path / "killed"
    command = [sys.executable, "-m", "shoal", "study", file, "--out", folder, "--workers", "1"]
    child = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while not list(folder.rglob("unseen.json")) and child.poll() is None:
        time.sleep(0.05)
    child.kill()
    child.wait()
    before = {p: p.stat().st_mtime_ns for p in folder.rglob("unseen.json")}
    assert 0 < len(before) < 3
    time.sleep(1)  # the workers exit with their parent

    code, partly = study(file, "--out", folder, "--report-only")
    assert code == 0
    assert len(partly["missing"]) == 3 - len(before)
    assert partly["claims"][1]["verdict"] == "not measured"

    code, facts = study(file, "--out", folder)
    assert (code, facts["missing"]) == (0, [])
    assert {p: p.stat().st_mtime_ns for p in before} == before  # what was finished is kept
    fresh = tmp_path / "fresh"
    assert study(file, "--out", fresh)[0] == 0
    assert results_in(folder) == results_in(fresh)
    assert len(facts["runs"]) == 3
    check_tables(facts, folder)


def check_tables(facts, folder):
    ours = next(r for r in facts["runs"] if (r["cell"], r["variant"]) == ("skewed", "shoal"))
    assert {"unseen.none", "unseen.5", "unseen.10", "unseen.20", "unseen.true", "epochs_to_target"} <= ours[
        "metrics"
    ].keys()
    plain = next(r for r in facts["runs"] if (r["cell"], r["variant"]) == ("even", "FedAvg + EMA"))
    assert "unseen.10" not in plain["metrics"] and "epochs_to_target" not in plain["metrics"]
    first = facts["claims"][0]
    assert first["verdict"] == "holds"
    assert first["tests"][0]["interval"]["basis"] == "bootstrap, 2 clients of one seed"
    assert facts["claims"][1]["verdict"] == "undecided"  # the probe comes later than the second round
    text = (folder / "study.md").read_text()
    for text_part in (
        "# A small study: quick",
        "3 of 3 runs are finished.",
        "| FedAvg + EMA |",
        "client-epochs to 10 %",
    ):
        assert text_part in text
    assert "skewed: shoal minus each other variant" in (folder / "study.html").read_text()


@pytest.mark.parametrize(
    ("old", "new", "sentence"),
    [
        (
            'few = ["FedAvg", "shoal"]',
            'few = ["FedAvgg"]',
            "variant_lists.few has 'FedAvgg', which is no variant; did you mean FedAvg?",
        ),
        (
            'metric = "has_split"',
            'metric = "has_splits"',
            "claim 2, test 1: metric is 'has_splits', which is no metric; did you mean has_split?",
        ),
        ("at_least = -100.0", "", "claims.0.tests.0: give exactly one of at_least and at_most"),
        (
            'baseline = "shoal"',
            'baseline = "G"',
            "claim 1, test 1: baseline is 'G', which is no variant (known: FedAvg, FedAvg + EMA",
        ),
        ('metric = "unseen.10"', 'metric = "centrl"', "metric is 'centrl', which is no metric; did you mean central?"),
        ("seeds = [0]", "seeds = 1", "budgets.quick.seeds is 1; it must be a list, such as [1]"),
        (
            'cells.even.variants = ["plain"]',
            'cells.even.variants = "plain"',
            "variants is 'plain'; it must be a list of names",
        ),
        (
            'our_variant = "shoal"',
            "",
            "mine.toml: our_variant is missing; a study needs title, our_variant, job, variants, cells, budgets",
        ),
        ("[variant_lists]", '[variant_lists]\nshoal = ["FedAvg"]', "variant_lists.shoal has the name of a variant"),
        (
            'our_variant = "shoal"',
            'our_variant = "shoal"\nours_too = 1',
            "ours_too is 1: extra inputs are not permitted",
        ),
        ("cohort = 3", "cohort = 30", "cohort is 30; it must be between 1 and the number of clients, 6"),
        ("seeds = [0]", 'seeds = ["x"]', "budgets.quick.seeds.0 is 'x'"),
    ],
)
def test_a_wrong_study_is_refused_before_any_run(file, tmp_path, old, new, sentence):
    assert old in STUDY
    file.write_text(STUDY.replace(old, new))
    code, facts = study(file, "--out", tmp_path / "out")
    assert code == 2
    assert sentence in facts["error"]
    assert not (tmp_path / "out").exists()


def test_one_cluster_does_not_agree_with_planted_groups(tmp_path):
    planted = [
        "--partition",
        "groups:2,1.0",
        "--clients",
        "6",
        "--rounds",
        "1",
        "--epochs",
        "1",
        "--max-train-samples",
        "300",
    ]
    result = CliRunner().invoke(app, ["run", "fedavg", *planted, "--out", str(tmp_path / "r"), "--json"])
    found = json.loads(result.stdout)
    assert found["clusters_ari"] == 0.0
    assert "clusters" not in found


def test_a_packaged_study_is_found_from_any_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, facts = study("study/own", "--report-only")
    assert code == 0
    assert any("oracle experts" in run for run in facts["missing"])
    assert (tmp_path / "runs/own-quick/study.md").exists()


@pytest.mark.parametrize(("name", "hint"), [("huge", ""), ("quik", "; did you mean quick?")])
def test_an_unknown_budget(file, name, hint):
    code, facts = study(file, "--budget", name)
    assert (code, facts["error"]) == (2, f"budget {name!r} is not in the study{hint} (it has quick, more)")


def test_all_missing_keys_are_named_at_once(file):
    file.write_text('our_variant = "a"\n[job]\n[cells.here]\n[budgets.quick]\nseeds = [1]')
    sentence = study(file)[1]["error"]
    assert "title, variants, budgets.quick.cells are missing; a study needs title, our_variant, job," in sentence


def test_the_shortest_study(file):
    """Without variant lists, `variants` of a budget names variants. Without `variants`, all of them run."""
    file.write_text("""
title = "t"
our_variant = "a"
[job]
[variants]
a = {method = "fedavg"}
b = {method = "fedprox"}
[cells]
here = {}
there = {}
[budgets.quick]
seeds = [1]
cells = {here = {variants = ["b"]}, there = {}}
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
