"""Measures what it costs to force a run to the disk, and stops a run at every change of the disk.

- Cost: the same job runs with fsync and with an fsync that does nothing, in turns, so that both have the same load of
  the machine. The seconds are those in which a round writes its lines, its private state and its checkpoint.
- Stops: the changes of the disk of a small run are counted. The run is stopped at each of them and resumed. After
  `kill`, all earlier changes are on the disk. After `power cut`, only what was forced to the disk is there. In
  `resume`, the run is killed after its second checkpoint, and its resumption is killed at each of its changes.
- A recovery is a run that ends with the bytes of an undisturbed run and in which no complete round ran again.

The exit code is 1 if a run was not recovered. Writes `results/durability.json`.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any
from unittest.mock import patch

import harness
import torch

sys.path.insert(0, str(harness.HERE.parent / "tests/helpers"))

from crashes import SMALL_JOB, problem_after, problem_after_stopped_resume, run_undisturbed

from shoal.cost.timer import Timer
from shoal.experiment.job import Job, make_job
from shoal.experiment.run import run_job


def measure_writing(job: Job, folder: Path, is_forced: bool) -> dict[str, float]:
    """Returns the seconds of a round that are spent on writing, and the numbers of calls of fsync."""
    timer, real, num_calls = Timer(), os.fsync, 0

    def fsync(descriptor: int) -> None:
        nonlocal num_calls
        num_calls += 1
        if is_forced:
            real(descriptor)

    with patch.object(os, "fsync", fsync), tempfile.TemporaryDirectory(dir=folder) as name:
        result = run_job(job, Path(name) / "run", timer=timer)
    return {
        "write_s": timer.seconds["checkpoint"] / job.rounds,
        "round_s": result["wall_s"] / job.rounds,
        "fsyncs": num_calls / job.rounds,
    }


def measure_cost(method: str, rounds: int, turns: int, folder: Path) -> dict[str, Any]:
    """Returns medians over turns, per round, for a method."""
    job = make_job({"method": method, "data": "digits", "fleet": "plain", "rounds": rounds, "cohort": 10})
    measure_writing(make_job(job.model_dump() | {"rounds": 1}), folder, True)  # loads libraries
    with_fsync, without = [], []
    for _ in range(turns):
        with_fsync.append(measure_writing(job, folder, True))
        without.append(measure_writing(job, folder, False))
    row: dict[str, Any] = {"method": method, "rounds": rounds, "turns": turns}
    row["fsyncs_per_round"] = with_fsync[0]["fsyncs"]
    row["write_s"] = statistics.median(m["write_s"] for m in with_fsync)
    row["write_without_fsync_s"] = statistics.median(m["write_s"] for m in without)
    row["fsync_s"] = row["write_s"] - row["write_without_fsync_s"]
    row["round_s"] = statistics.median(m["round_s"] for m in with_fsync)
    row["fsync_fraction_of_round"] = row["fsync_s"] / row["round_s"]
    return row


def stop_everywhere(stride: int) -> list[dict[str, Any]]:
    """Returns for each way of stopping the number of stops, of recoveries, and what was lost."""
    expected = run_undisturbed(SMALL_JOB)
    changes = expected.changes
    points = range(1, len(changes) + 1, stride)
    rows = []
    for way in ("kill", "power cut"):
        problems = {n: problem_after(SMALL_JOB, expected, n, way) for n in points}  # type: ignore[arg-type]
        rows.append(summarise(way, {f"{n}: {changes[n - 1]}": p for n, p in problems.items()}))
    second = [n for n, change in enumerate(changes, start=1) if change.startswith("rename run/checkpoints/")][1]
    resumed: dict[str, str | None] = {}
    number = 1
    while True:
        try:
            resumed[str(number)] = problem_after_stopped_resume(SMALL_JOB, expected, second + 1, number)
        except IndexError:  # the resumption has no further change
            return [*rows, summarise("resume", resumed)]
        number += stride


def summarise(way: str, problems: dict[str, str | None]) -> dict[str, Any]:
    """Returns the row of a way to stop."""
    lost = {point: problem for point, problem in problems.items() if problem}
    return {"way": way, "stops": len(problems), "recoveries": len(problems) - len(lost), "lost": lost}


def main() -> int:
    torch.set_num_threads(1)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add, positive = parser.add_argument, harness.parse_positive
    add("--methods", nargs="+", default=["fedavg", "fedavg-ft"], help="Methods to time. Default: fedavg fedavg-ft.")
    add("--rounds", type=positive, default=40, help="Rounds of a timed run. Default: 40.")
    add("--turns", type=positive, default=5, help="Timed runs with fsync and without it. Default: 5 of each.")
    add("--stride", type=positive, default=1, help="Stop at every change of this number. Default: 1, which is all.")
    add("--folder", type=Path, default=Path(tempfile.gettempdir()), help="Folder of the timed runs. Default: /tmp.")
    options, run = harness.begin(
        parser, "durability.json", {"methods": ["fedavg-ft"], "rounds": 2, "turns": 1, "stride": 60}, ("folder",)
    )
    costs = [measure_cost(method, options.rounds, options.turns, options.folder) for method in options.methods]
    stops = stop_everywhere(options.stride)
    run.write(costs=costs, stops=stops)
    for row in costs:
        print(
            f"{row['method']}: {1000 * row['write_s']:.1f} ms per round to write, "
            f"{1000 * row['write_without_fsync_s']:.1f} ms of it without fsync, {row['fsyncs_per_round']:.1f} fsyncs"
        )
    for row in stops:
        print(f"{row['way']}: {row['stops']} stops, {row['recoveries']} recoveries", *row["lost"].items(), sep="\n")
    return int(any(row["lost"] for row in stops))


if __name__ == "__main__":
    harness.call(main)
