"""Runs every benchmark in its tiny form, as a user does. The result is checked, but not its seconds."""

from __future__ import annotations

import json
import math
import os
import platform
import re
import subprocess
import sys
from datetime import datetime
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BENCHMARKS = ROOT / "benchmarks"

# A peer is called with a folder, the number of rounds, and its name, which selects how this one fails.
FAILING_PEER = """
import json, os, sys
from pathlib import Path
import numpy as np

folder, rounds, name = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
if name == "aborts":
    os.abort()
if name == "exits":
    sys.exit("there is no room left")
if name == "other-work":
    np.savez(folder / f"{name}.npz", **{k: v + 1 for k, v in np.load(folder / "first.npz").items()})
    (folder / f"{name}.json").write_text(json.dumps({"round_ends": list(range(rounds))}))
"""


def run(name: str, *arguments: object, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, BENCHMARKS / f"{name}.py", *arguments]
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.run(list(map(str, command)), cwd=cwd, env=env, capture_output=True, text=True, check=False)


def git(*arguments: str) -> str | None:
    done = subprocess.run(["git", "-C", ROOT, *arguments], capture_output=True, text=True, check=False)
    return None if done.returncode else done.stdout.strip()


def by(key: str, rows: list[dict]) -> dict[str, dict]:
    assert len({row[key] for row in rows}) == len(rows)
    return {row[key]: row for row in rows}


def assert_positive(row: dict, *keys: str) -> None:
    for key in keys:
        assert math.isfinite(row[key]) and row[key] > 0, f"{key}: {row}"


def check_compare(result: dict) -> None:
    rows = by("peer", result["rows"])
    assert list(rows)[:4] == ["shoal", "bare", "pfl", "flower"]
    needs = {"shoal": (), "bare": (), "pfl": ("pfl",), "flower": ("flwr", "ray")}
    for name, modules in needs.items():
        absent = [m for m in modules if find_spec(m) is None]
        if absent:
            assert rows[name]["status"] == "not installed"
            assert absent[0] in rows[name]["reason"] and rows[name]["per_round_s"] is None
        else:
            assert rows[name]["status"] == "ok", rows[name]
            assert rows[name]["weights_differ_by"] <= 1e-4
            assert_positive(rows[name], "per_round_s", "whole_s", "times_shoal", "whole_times_shoal")
            assert_positive(rows[name], "share_of_multiply_rate")
    assert all(rows[name]["turns"] == 0 and rows[name]["times_shoal"] is None for name in list(rows)[4:])
    reasons = {name: (rows[name]["status"], rows[name]["reason"]) for name in list(rows)[4:]}
    assert reasons == {
        "aborts": ("crashed", "ended by SIGABRT"),
        "exits": ("failed", "exit code 1: there is no room left"),
        "silent": ("failed", "left the ends of 0 rounds, not of 3"),
        "other-work": ("failed", "did other work: its weights differ from shoal's by 1"),
        "absent": ("failed", "no-such-program cannot be started: No such file or directory"),
    }


def check_fleets(result: dict) -> None:
    rows = {(row["model"], row["fleet"]): row for row in result["rows"]}
    fleets = {"mlp": ("plain", "vector", "pool", "flower"), "cnn-cifar": ("plain", "pool", "flower")}
    assert list(rows) == [(model, fleet) for model, names in fleets.items() for fleet in names]
    for (_, fleet), row in rows.items():
        if fleet == "flower" and find_spec("flwr") is None:
            assert row["status"] == "not installed" and "flwr" in row["reason"]
        else:
            assert row["status"] == "ok", row
            assert_positive(row, "per_round_s", "times_as_fast_as_plain")


def check_scale(result: dict) -> None:
    rows = by("part", result["rows"])
    assert list(rows) == ["overhead", "evaluation-10-epochs", "evaluation-1-epoch", "clients-4", "clients-8", "private"]
    assert all(row["status"] == "ok" for row in rows.values())
    assert 0 < rows["overhead"]["share_of_round"] < 1
    for epochs in ("10-epochs", "1-epoch"):
        assert_positive(rows[f"evaluation-{epochs}"], "train_s", "evaluate_s", "times_training")
    for count in (4, 8):
        assert rows[f"clients-{count}"]["clients"] == count
        assert_positive(rows[f"clients-{count}"], "per_round_s", "times_smallest", "resident_bytes")
    assert_positive(rows["private"], "whole_s", "resident_bytes")


def check_clusters(result: dict) -> None:
    asked = [(row["clusterer"], row["clients"], row["clusters"]) for row in result["rows"]]
    assert asked == [("SimClust", 20, 5), ("SimClust", 40, 5), ("RepClust", 20, 4), ("RepClust", 40, 8)]
    for row in result["rows"]:
        assert_positive(row, "seconds", "joules", "within", "between", "random_within", "random_between")
        better = row["within"] < row["random_within"]
        assert better == (row["clusterer"] == "SimClust")  # similar clients together, or different ones


def check_serve(result: dict) -> None:
    rows = by("server", result["rows"])
    assert list(rows) == ["gathered", "one by one"]
    for row in rows.values():
        assert row["status"] == "ok", row
        assert row["errors"] == 0
        assert_positive(row, "requests", "per_s", "server_cpu_ms", "p50_ms", "p99_ms", "experts")
    assert_positive(result, "gathered_over_one_by_one")


def check_bandit(result: dict) -> None:
    rows = by("arm", result["rows"])
    assert list(rows) == ["random sets", "oracle: drop", "as printed"]
    for row in rows.values():
        assert (row["clusters"], row["seed"]) == (4, 0)
        assert all(0 < row[key] < 1 for key in ("at_end", "over_rounds", "at_equal_time"))
        assert_positive(row, "time", "clients")
    assert rows["random sets"]["time"] == 1


def check_contribution(result: dict) -> None:
    (row,) = result["rows"]
    assert row["round"] == 2  # the first round is left out
    assert_positive(row, "learn_s", "train_s")
    assert row["share"] == row["learn_s"] / row["train_s"] == result["share_of_training"]


def check_density(result: dict) -> None:
    assert [(row["fleet"], row["clients"], row["references"]) for row in result["rows"]] == [
        ("groups", 30, None),
        ("groups", 30, 20),
    ]
    for row in result["rows"]:
        assert row["status"] == "ok", row
        assert_positive(row, "fit_s", "predict_s", "update_s", "joules", "resident_bytes", "clusters")
        assert -1 <= row["agree"] <= 1 and -1 <= row["truth"] <= 1
    assert result["rows"][0]["agree"] == 1  # the full matrix agrees with itself
    guards = by("fleet", result["guards"])
    assert {fleet: guard["one_cluster"] for fleet, guard in guards.items()} == {"groups": 0, "iid": 1}
    assert_positive(guards["groups"], "least_ratio", "largest_ratio")


def check_durability(result: dict) -> None:
    (row,) = result["costs"]
    assert row["method"] == "fedavg-ft"
    assert_positive(row, "fsyncs_per_round", "write_s", "write_without_fsync_s", "round_s")
    assert [r["way"] for r in result["stops"]] == ["kill", "power cut", "resume"]
    for row in result["stops"]:
        assert row["stops"] == row["recoveries"] >= 1 and row["lost"] == {}


def check_fuzz(result: dict) -> None:
    clean, (planted,) = result["clean"], result["planted"]
    assert clean["executions"] == 300 and clean["finding"] is None
    assert 0.8 < clean["covered_lines"] / clean["lines"] <= 1
    assert planted["is_found"] and "Error" in planted["finding"]


def check_gate(result: dict) -> None:
    assert [(row["model"], row["samples"], row["experts"]) for row in result["rows"]] == [("mlp", 2, 2), ("mlp", 2, 3)]
    for row in result["rows"]:
        assert_positive(row, "three_models_s", "gate")


def check_leakage(result: dict) -> None:
    (row,) = result["rows"]
    assert row["data"] == "digits"
    assert [(r["skew"], r["noise"]) for r in row["readings"]] == [(1.0, 0.0), (1.0, 0.05)]
    for reading in row["readings"]:
        assert 0 <= reading["members"] <= 1
        for way in ("mixture", "received", "adapted", "all"):
            r2, fraction_correct = reading[way]
            assert math.isfinite(r2) and 0 <= fraction_correct <= 1
    assert [r["noise"] for r in row["clusters"]] == [0.0, 0.05]
    for clusters in row["clusters"]:
        for way in ("adapted", "unguarded", "received"):
            index, planted, same = clusters[way]
            assert -1 <= index <= 1 and planted >= 1 and same >= 1
    (guarantee,) = row["guarantees"]
    assert_positive(guarantee, "record_epsilon", "record_epsilon_without_adaptation", "local_epsilon")


def check_unseen(result: dict) -> None:
    (row,) = result["rows"]
    assert row["status"] == "ok" and row["clients"] == 1
    assert set(row["service"]) == {"none", "5"} and set(row["evaluate"]) == {"none", "5", "true"}
    assert all(0 <= accuracy <= 1 for accuracy in row["evaluate"].values())
    assert row["service"] == {how: row["evaluate"][how] for how in row["service"]}
    assert row["largest_difference_of_a_client"] == 0


CHECKS = {
    "bandit": check_bandit,
    "clusters": check_clusters,
    "compare": check_compare,
    "contribution": check_contribution,
    "density": check_density,
    "durability": check_durability,
    "fleets": check_fleets,
    "fuzz": check_fuzz,
    "gate": check_gate,
    "leakage": check_leakage,
    "scale": check_scale,
    "serve": check_serve,
    "unseen": check_unseen,
}


def check_facts(name: str, result: dict) -> None:
    """Checks the facts of the run in a result."""
    assert (result["benchmark"], result["tiny"]) == (name, True)
    assert result["commit"] == git("rev-parse", "HEAD")
    assert result["dirty"] in ([None] if result["commit"] is None else [True, False])
    machine = result["machine"]
    assert machine["cpu"] and machine["memory_bytes"] > 2**28
    assert machine["cores"] == len(os.sched_getaffinity(0))
    assert (machine["python"], machine["torch"]) == (platform.python_version(), version("torch"))
    started, ended = (datetime.fromisoformat(result[key]["date"]) for key in ("started", "ended"))
    assert started <= ended and started.tzinfo is not None
    for key in ("started", "ended"):
        assert len(result[key]["load_average"]) == 3 and all(load >= 0 for load in result[key]["load_average"])


@pytest.mark.parametrize("name", CHECKS)
def test_the_tiny_form_writes_a_complete_result(name, tmp_path):
    arguments = []
    if name == "compare":
        (tmp_path / "peer.py").write_text(FAILING_PEER)
        failing = f"{sys.executable} {tmp_path / 'peer.py'}"
        peers = dict.fromkeys(("aborts", "exits", "silent", "other-work"), failing) | {"absent": "no-such-program"}
        arguments = ["--only", "shoal", "bare", "pfl", "flower"]
        arguments += [text for n, command in peers.items() for text in ("--peer", f"{n}={command}")]
    out = tmp_path / "results" / "result.json"
    out.parent.mkdir()
    done = run(name, "--tiny", "--out", out, *arguments, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    result = json.loads(out.read_text())
    check_facts(name, result)
    CHECKS[name](result)
    assert {path.name for path in out.parent.iterdir()} <= {"result.json", "result.png"}  # nothing half-written


def test_every_benchmark_is_checked_here_listed_in_the_suite_and_named_in_the_docs():
    scripts = {path.stem for path in BENCHMARKS.glob("*.py") if "harness.begin(" in path.read_text()}
    assert scripts == set(CHECKS)
    suite = (BENCHMARKS / "suite.py").read_text()
    docs = (ROOT / "docs/benchmarks.md").read_text()
    for name in scripts:
        assert f'"{name}"' in suite
        assert re.search(rf"`make bench-{name}[` ]", docs)


def test_the_suite_continues_after_a_failure_and_names_what_failed(tmp_path):
    (tmp_path / "gate.json").mkdir()  # where a file should be written
    done = run("suite", "gate", "clusters", "--tiny", "--out", tmp_path, cwd=tmp_path)
    assert done.returncode == 1
    summary = done.stdout.partition("== summary\n")[2].splitlines()
    assert [re.sub(r" +[\d.]+ s ", "", line) for line in summary] == ["gate exit code 2", "clusters ok"]
    assert json.loads((tmp_path / "clusters.json").read_text())["benchmark"] == "clusters"
