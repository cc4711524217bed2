"""The code of all benchmarks: processes that fail, options that are refused, files that are never half-written."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def module(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module


@pytest.fixture
def harness(module):
    return module("harness")


@pytest.mark.parametrize(
    ("code", "status", "reason"),
    [
        ("print(1)", "ok", None),
        ("import os; os.abort()", "crashed", "ended by SIGABRT"),
        ("import os, sys; sys.stderr.write('Bad luck\\n===\\n'); os._exit(7)", "failed", "exit code 7: Bad luck"),
    ],
)
def test_the_outcome_of_a_program_has_a_status_and_a_reason(harness, code, status, reason):
    outcome = harness.run_process([sys.executable, "-c", code], timeout_s=60)
    assert outcome.row == {"status": status, "reason": reason}


def test_a_program_that_does_not_end_in_time_is_ended_with_what_it_started(harness, tmp_path):
    command = ["sh", "-c", f"sleep 60 & echo $! > {tmp_path}/child; wait"]
    outcome = harness.run_process(command, timeout_s=1)
    assert outcome.row == {"status": "timed out", "reason": "did not end within 1 s"}
    state = Path(f"/proc/{(tmp_path / 'child').read_text().strip()}/stat")
    for _ in range(100):  # an ended process may still wait for its parent
        if not state.exists() or state.read_text().rpartition(")")[2].split()[0] == "Z":
            return
        time.sleep(0.05)
    pytest.fail("the child still runs")


def test_a_module_that_is_not_installed_is_named_with_advice(harness):
    assert harness.missing(["json"], "advice") is None
    outcome = harness.missing(["json", "no_such_module"], "pip install it")
    assert outcome.row == {"status": "not installed", "reason": "no_such_module is not installed: pip install it"}


def test_a_result_that_cannot_be_written_leaves_the_old_one(harness, tmp_path):
    path = tmp_path / "result.json"
    path.write_text("old")

    def fail(temporary_path):
        temporary_path.write_text("half of the n")
        raise OSError("the disk is full")

    with pytest.raises(OSError, match="full"):
        harness.write_atomically(path, fail)
    assert {p.name: p.read_text() for p in tmp_path.iterdir()} == {"result.json": "old"}
    harness.write_atomically(path, lambda temporary_path: temporary_path.write_text("new"))
    assert {p.name: p.read_text() for p in tmp_path.iterdir()} == {"result.json": "new"}


def test_a_result_is_json_even_with_a_ratio_that_is_not_finite(harness, tmp_path):
    harness.Run(tmp_path / "x.json", {}, {}).write(rows=[{"ratio": float("nan"), "pair": (1, float("inf"))}])
    written = json.loads((tmp_path / "x.json").read_text(), parse_constant=pytest.fail)
    assert written["rows"] == [{"ratio": None, "pair": [1, None]}]


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--tiny"], "--tiny needs --out FILE"),
        (["--rounds", "3"], "--rounds is not at its default, so --out FILE is needed"),
        (["--tiny", "--out", str(BENCHMARKS / "results/x.json")], "a tiny run does not write to the stored results"),
        (["--out", "."], "--out is ., which is a folder"),
        (["--out", "no-such-folder/x.json"], "its folder does not exist"),
        (["--rounds", "0"], "'0' is not a whole number of 1 or more"),
        (["--limit-s", "nan"], "'nan' is not a number of seconds above 0"),
    ],
)
def test_options_that_cannot_work_are_refused_before_anything_runs(harness, arguments, problem, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["x.py", *arguments])
    with pytest.raises(SystemExit) as stopped:
        harness.begin(parser(harness), "x.json", tiny={"rounds": 1})
    assert stopped.value.code == 2
    assert problem in capsys.readouterr().err


def parser(harness):
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=harness.parse_positive, default=5)
    parser.add_argument("--limit-s", type=harness.parse_seconds, default=1.0)
    return parser


@pytest.mark.parametrize(
    ("arguments", "rounds", "out"),
    [
        ([], 5, BENCHMARKS / "results/x.json"),
        (["--rounds", "3", "--out", "y.json"], 3, Path("y.json")),
        (["--tiny", "--out", "y.json"], 1, Path("y.json")),
        (["--tiny", "--rounds", "2", "--out", "y.json"], 2, Path("y.json")),
    ],
)
def test_only_a_full_run_writes_to_the_stored_results(harness, arguments, rounds, out, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["x.py", *arguments])
    options, run = harness.begin(parser(harness), "x.json", tiny={"rounds": 1})
    assert (options.rounds, run.out) == (rounds, out)
    assert run.facts["options"] == {"rounds": rounds, "limit_s": 1.0}


def test_replaced_results_do_not_make_the_tree_dirty_but_other_files_do(harness, tmp_path, monkeypatch):
    def git(*arguments):
        subprocess.run(["git", "-C", tmp_path, "-c", "user.name=x", "-c", "user.email=x", *arguments], check=True)

    folder = tmp_path / "benchmarks"
    (folder / "results").mkdir(parents=True)
    (folder / "results/x.json").write_text("old")
    monkeypatch.setattr(harness, "HERE", folder)
    assert harness.commit_facts() == {"commit": None, "dirty": None}
    git("init", "--quiet")
    git("add", ".")
    git("commit", "--quiet", "--message", "first")
    facts = harness.commit_facts()
    assert len(facts["commit"]) == 40 and facts["dirty"] is False
    (folder / "results/x.json").write_text("new")
    assert harness.commit_facts() == facts
    (tmp_path / "other.py").write_text("")
    assert harness.commit_facts() == facts | {"dirty": True}


def test_bad_data_is_one_sentence_and_exit_code_2(tmp_path):
    command = [sys.executable, BENCHMARKS / "leakage.py", "--data", "no-such-data", "--out", "x.json"]
    process = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert process.returncode == 2
    assert process.stderr.startswith("leakage.py: error: ") and "no-such-data" in process.stderr
    assert "Traceback" not in process.stderr and not list(tmp_path.iterdir())


PEER = """
import json, os, sys
from pathlib import Path

folder, rounds, name = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
runs = folder / f"{name}.runs"
runs.write_text(runs.read_text() + "x" if runs.exists() else "x")
if name == "third-run-aborts" and len(runs.read_text()) == 3:
    os.abort()
(folder / f"{name}.npz").write_bytes((folder / "first.npz").read_bytes())
(folder / f"{name}.json").write_text(json.dumps({"round_ends": [2.0 * r for r in range(rounds)]}))
"""


def test_a_crash_in_a_later_turn_keeps_earlier_measurements_and_the_others_continue(module, tmp_path):
    import numpy as np

    compare = module("compare")
    (tmp_path / "peer.py").write_text(PEER)
    np.savez(tmp_path / "first.npz", w=np.ones(3))
    command = (sys.executable, str(tmp_path / "peer.py"))
    peers = {name: compare.Peer(name, command) for name in ("shoal", "third-run-aborts", "last")}
    comparison = compare.Comparison(peers, tmp_path, 60, {name: compare.Measurement() for name in peers})
    comparison.run(rounds=4, turns=3)  # after a first run, in which the weights are compared
    rows = {name: m.row() for name, m in comparison.measurements.items()}
    assert {name: (row["status"], row["reason"], row["turns"]) for name, row in rows.items()} == {
        "shoal": ("ok", None, 3),
        "third-run-aborts": ("crashed", "ended by SIGABRT", 1),
        "last": ("ok", None, 3),
    }
    assert {row["per_round_s"] for row in rows.values()} == {2.0}
    assert (tmp_path / "third-run-aborts.runs").read_text() == "xxx"  # not run again


@pytest.mark.parametrize("text", ["mine", "mine=", "=python x.py", "mine='python", "a/b=python", "bare=x", "data=x"])
def test_a_peer_that_cannot_be_run_is_refused(module, text, capsys):
    with pytest.raises(SystemExit) as stopped:
        module("compare").parse_own_peers(argparse.ArgumentParser(), [text])
    assert stopped.value.code == 2
    assert f"--peer is {text!r}" in capsys.readouterr().err


def test_the_row_of_a_server_that_does_not_start_has_the_reason(module, tmp_path):
    serve, log = module("serve"), tmp_path / "log"
    with log.open("wb") as out:
        process = subprocess.Popen([sys.executable, "-c", "import sys; sys.exit('no checkpoint')"], stderr=out)
    server = serve.Server(process, log)
    server.await_port()
    assert server.row()["status"] == "failed"
    assert server.row()["reason"] == "did not start (exit code 1): no checkpoint"


@pytest.mark.parametrize("name", ["mlp", "cnn"])
def test_peers_train_the_network_of_shoal(module, name, tmp_path):
    """The CNN is not part of the tiny form."""
    import torch

    from shoal.models import load_model

    work = module("work")
    spec = work.TINY_WORKS[name]
    theirs, ours = work.make_network(spec), load_model(spec.model, spec.shape, work.CLASSES)
    weights = ours.init(0)
    theirs.load_state_dict(weights)
    x = torch.randn(4, *spec.shape, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(theirs(x), ours.predict(weights, x))
    work.prepare(spec, tmp_path, rounds=2)
    assert os.path.getsize(tmp_path / "data.npz") < 100_000
    assert work.load_orders(tmp_path).shape == (2, spec.clients, spec.num_steps // spec.clients, spec.batch_size)
