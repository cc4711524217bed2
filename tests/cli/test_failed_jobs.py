"""One job of several fails: its row says why, the others run, and the same command runs it again."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest
from typer.testing import CliRunner

from shoal.cli import app
from shoal.store.run_directory import RunStore

SMALL = "rounds = 3\nclients = 6\ncohort = 3\nepochs = 1\nmax_train_samples = 300\nfleet = 'plain'\n"
RATES = f"title = 'rates'\nmethod = 'fedavg'\n{SMALL}[grid]\nlr = [0.1, 1000000000.0, 1e38, 0.05]\n"
QUICK = (
    "--rounds",
    "2",
    "--clients",
    "6",
    "--cohort",
    "3",
    "--epochs",
    "1",
    "--max-train-samples",
    "300",
    "--fleet",
    "plain",
)
DIVERGED = "training diverged: "
NETWORK = """
import os, signal
from pathlib import Path
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self, shape, classes):
        super().__init__()
        self.inside = nn.Sequential(nn.Flatten(), nn.Linear(64, classes))

    def forward(self, x):
        if Path("broken").exists() and torch.is_grad_enabled():
            raise RuntimeError("the sensor is gone")
        if Path("stopped").exists():
            signal.raise_signal(signal.SIGINT)
        return self.inside(x)
"""


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))


def shoal(*words):
    result = CliRunner().invoke(app, list(words))
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def rows_by_folder(result):
    return {Path(row["run_dir"]).name: row for row in json.loads(result.stdout)["runs"]}


def last_line(result):
    return result.stderr.strip().splitlines()[-1]


def test_the_other_jobs_run_and_the_table_has_the_reason():
    Path("g.toml").write_text(RATES)
    result = shoal("run", "g.toml", "--json")
    assert result.exit_code == 1
    rows = rows_by_folder(result)
    assert [name for name, row in rows.items() if row["finished"]] == ["0.1", "0.05"]
    assert [name for name, row in rows.items() if row["failure"]] == ["1000000000.0", "1e+38"]
    assert rows["1e+38"]["failure"].startswith(DIVERGED)
    assert rows["1e+38"]["status"] == f"failed: {rows['1e+38']['failure']}"
    assert rows["0.1"]["failure"] is None
    assert last_line(result) == "2 of 4 jobs failed. The same command runs them again."
    kept = json.loads(Path("runs/g/1e+38/failure.json").read_text())
    assert kept["reason"] == rows["1e+38"]["failure"]
    assert (kept["config"]["lr"], "traceback" in kept) == (1e38, False)
    page = Path("runs/g/report.html").read_text()
    assert "2 failed</span>" in page
    assert "failed: training diverged: " in page
    printed = shoal("run", "g.toml")
    assert (printed.exit_code, "failed: training diverged" in printed.stdout) == (1, True)


def test_a_job_that_fails_later_keeps_its_rounds_and_goes_on_from_there():
    Path("g.toml").write_text(RATES.replace("rounds = 3", "rounds = 9"))
    assert shoal("run", "g.toml", "--json").exit_code == 1
    place = Path("runs/g/1000000000.0")
    rounds = (place / "rounds.jsonl").read_bytes()
    reason = json.loads((place / "failure.json").read_text())["reason"]
    assert rounds
    assert reason.startswith(DIVERGED)
    assert f" of round {len(rounds.splitlines()) + 1} " in reason.replace(";", " ")
    again = shoal("run", "g.toml", "--json")
    assert rows_by_folder(again)["1000000000.0"]["failure"] == reason, (
        "it was tried again, and diverged in the same round"
    )
    assert (place / "rounds.jsonl").read_bytes() == rounds


def test_an_unexpected_error_of_one_job_does_not_end_the_others():
    Path("net.py").write_text(NETWORK)
    Path("broken").touch()
    Path("g.toml").write_text(f"method = 'fedavg'\n{SMALL}[grid]\nmodel = ['net:Net', 'mlp']\n")
    result = shoal("run", "g.toml", "--json")
    rows = rows_by_folder(result)
    assert result.exit_code == 1
    assert (rows["mlp"]["finished"], rows["netNet"]["finished"]) == (True, False)
    assert "the sensor is gone" in rows["netNet"]["failure"]
    assert "in forward" in json.loads(Path("runs/g/netNet/failure.json").read_text())["traceback"]
    before = Path("runs/g/mlp/result.json").stat().st_mtime_ns
    Path("broken").unlink()
    again = shoal("run", "g.toml", "--json")
    assert again.exit_code == 0
    assert rows_by_folder(again)["netNet"]["finished"]
    assert not Path("runs/g/netNet/failure.json").exists()
    assert Path("runs/g/mlp/result.json").stat().st_mtime_ns == before


def test_ctrl_c_stops_everything():
    Path("net.py").write_text(NETWORK)
    Path("stopped").touch()
    Path("g.toml").write_text(f"method = 'fedavg'\n{SMALL}[grid]\nmodel = ['net:Net', 'mlp']\n")
    result = shoal("run", "g.toml")
    assert result.exit_code == 130
    assert not Path("runs/g/mlp").exists()
    assert not list(Path("runs/g").glob("*/failure.json"))


def test_where_every_job_fails_there_is_still_a_page():
    Path("g.toml").write_text(RATES.replace("0.1, 1000000000.0, 1e38, 0.05", "1e37, 1e38"))
    result = shoal("run", "g.toml", "--json")
    assert result.exit_code == 1
    assert last_line(result) == "2 of 2 jobs failed. The same command runs them again."
    assert Path("runs/g/report.html").read_text().count("failed: training diverged") == 2
    assert shoal("run", "g.toml").exit_code == 1
    for words in (["report", "runs/g"], ["report", "runs/g/1e+38", "-o", "one.html"], ["compare", "runs/g"]):
        assert shoal(*words).exit_code == 0, "a failure of earlier is shown, and is none of this command"


def test_methods_that_are_compared_fail_one_by_one():
    Path("own.py").write_text(
        "from dataclasses import replace\nfrom shoal.methods import build\n\n\n"
        "def wild(setting):\n    return build('fedavg', replace(setting, lr=1e38))\n"
    )
    flags = ("--to-accuracy", "0.1", "--at-budget", "60", "--sustained-rounds", "1", *QUICK)
    result = shoal("compare", "own:wild", "local", "fedavg", *flags, "--json")
    assert result.exit_code == 1, result.output
    found = json.loads(result.stdout)
    assert [(row["method"], row["finished"]) for row in found["runs"]] == [
        *(("own:wild", False), ("local", True), ("fedavg", True)),
    ]
    assert {row["label"] for row in found["to_accuracy"]} == {"local", "fedavg"}
    assert last_line(result) == "1 of 3 jobs failed."
    assert "failed: training diverged" in Path(found["report"]).read_text()
    reference = shoal("compare", "own:wild", "local", "--reference", "own:wild", *flags[2:], "--json")
    assert reference.exit_code == 1, reference.output
    assert json.loads(reference.stdout)["at_budget"][0]["budget_joules"] is None


def test_a_cell_of_a_paper_s_table_whose_jobs_failed_says_so():
    paper = "source = 'x'\nmetric = 'final'\nrow_keys = ['lr']\n[paper.columns.final]\n'0.1' = 2.0\n'1e+38' = 1.0\n"
    Path("g.toml").write_text(f"{RATES}[paper]\n{paper}")
    result = shoal("run", "g.toml", "--json")
    assert result.exit_code == 1
    table = json.loads(result.stdout)["paper"]
    assert [(c["row"], c["ours"] is None, c["num_failed_seeds"]) for c in table["cells"]] == [
        ("0.1", False, 0),
        ("1e+38", True, 1),
    ]
    assert table["verdicts"] == {"same": 0, "undecided": 1, "opposite": 0}
    assert not any("no runs" in note for note in table["notes"])
    assert "<td>failed</td>" in Path("runs/g/report.html").read_text()


@pytest.mark.parametrize(
    ("grid", "sentence"),
    [
        ("data = ['digits', 'mnits']", "data 'mnits' is neither a file nor a known set; did you mean mnist"),
        ("data = ['digits', 'no/such.csv']", "data 'no/such.csv' does not exist"),
        ("partition = ['iid', 'dirichlett:1']", "'dirichlett' is not a base"),
        ("method = ['fedavg', 'fedavgg']", "did you mean fedavg"),
        ("lr = [0.1, -1.0]", "lr is -1"),
    ],
)
def test_what_can_be_seen_before_any_job_ran_still_refuses_the_whole_recipe(grid, sentence):
    Path("g.toml").write_text(f"{SMALL}[grid]\n{grid}\n")
    result = shoal("run", "g.toml", "--json")
    assert result.exit_code == 2
    assert sentence in json.loads(result.stdout)["error"]
    assert not Path("runs").exists()


def test_a_run_that_another_process_writes_refuses_the_whole_recipe():
    Path("g.toml").write_text(RATES)
    assert shoal("run", "g.toml", "--json").exit_code == 1
    Path("runs/g/0.1/result.json").unlink()
    with RunStore.open(Path("runs/g/0.1")):
        result = shoal("run", "g.toml", "--json")
    assert result.exit_code == 2
    assert "is being written by another process" in json.loads(result.stdout)["error"]
    assert not Path("runs/g/0.1/failure.json").exists()


STUDY = """
title = "t"
our_variant = "tame"
[job]
clients = 6
cohort = 3
rounds = 3
epochs = 1
max_train_samples = 300
fleet = "plain"
unseen = 1
[variants]
wild = {method = "fedavg", lr = 1e38}
tame = {method = "fedavg"}
broken = {method = "fedavg", model = "net:Net"}
[cells.here]
[budgets.quick]
seeds = [1]
cells.here = {}
[[claims]]
statement = "tame is better"
tests = [{kind = "difference", variant = "tame", baseline = "wild", metric = "local", cells = ["here"], at_least = 0.0}]
"""


def test_a_study_goes_on_after_a_failed_run():
    Path("net.py").write_text(NETWORK)
    Path("broken").touch()
    Path("s.toml").write_text(STUDY)
    result = shoal("study", "s.toml", "--workers", "1", "--json")
    assert result.exit_code == 1, result.output
    found = json.loads(result.stdout)
    assert [run["variant"] for run in found["runs"]] == ["tame"]
    failed = {run["variant"]: run["reason"] for run in found["failed"]}
    assert failed["wild"].startswith(DIVERGED)
    assert "the sensor is gone" in failed["broken"]
    assert found["claims"][0]["verdict"] == "undecided", "a run that failed has no number, so nothing is decided"
    assert last_line(result) == "2 of 3 jobs failed. The same command runs them again."
    assert "## Failed runs" in Path("runs/s-quick/study.md").read_text()
    Path("broken").unlink()
    again = json.loads(shoal("study", "s.toml", "--workers", "1", "--json").stdout)
    assert [run["variant"] for run in again["failed"]] == ["wild"]
    assert shoal("study", "s.toml", "--report-only", "--json").exit_code == 0


def test_a_process_of_a_study_that_dies_is_a_failed_run():
    dying = NETWORK.replace('raise RuntimeError("the sensor is gone")', "os.kill(os.getpid(), signal.SIGKILL)")
    assert dying != NETWORK
    Path("net.py").write_text(dying)
    Path("broken").touch()
    Path("s.toml").write_text(STUDY)
    result = shoal("study", "s.toml", "--workers", "2", "--json")
    assert result.exit_code == 1, result.output
    failed = {run["variant"]: run["reason"] for run in json.loads(result.stdout)["failed"]}
    assert failed["broken"] == f"its process ended with code {-signal.SIGKILL}"
    assert Path("runs/s-quick/here/tame-1/unseen.json").exists()
