"""Stops at any moment, by kill -9 or a power cut: after `resume` the run directory is always the same bytes.

`python benchmarks/durability.py` tries every change of the disk. These tests try some of them.
"""

from __future__ import annotations

import os
import random
import signal
import time
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from crashes import (
    SMALL_JOB,
    Disk,
    digest,
    preloaded_processes,
    problem_after,
    problem_after_stopped_resume,
    run_undisturbed,
)

from shoal.experiment.run import resume_run, run_job

# More rounds than SMALL_JOB, so that a random moment falls into some round.
JOB = SMALL_JOB.model_copy(update={"rounds": 12, "keep_checkpoints": 3})
MOMENTS = 8  # the tests below stop runs at chosen changes of the disk


def run(path: str) -> None:
    torch.set_num_threads(1)
    run_job(JOB, Path(path))


@pytest.fixture(scope="module")
def processes():
    return preloaded_processes()


def started(processes, path):
    child = processes.Process(target=run, args=(str(path),))
    child.start()
    while not (path / "config.json").exists() and child.is_alive():
        time.sleep(0.001)
    return child


def test_kill_at_random_moments(tmp_path, processes):
    child = started(processes, tmp_path / "whole")
    start_s = time.monotonic()
    child.join()
    duration_s = time.monotonic() - start_s
    expected = digest(tmp_path / "whole")
    assert "checkpoints/round-000012/state.safetensors" in expected
    assert any(name.startswith("private/") for name in expected)

    generator = random.Random(7)
    reached = set()
    for i in range(MOMENTS):
        path = tmp_path / f"killed-{i}"
        child = started(processes, path)
        time.sleep(generator.uniform(0, duration_s))
        with suppress(ProcessLookupError):  # it may just have ended
            os.kill(child.pid, signal.SIGKILL)
        child.join()
        reached.add(len(list((path / "checkpoints").glob("round-*"))))
        resume_run(path)
        assert digest(path) == expected, f"killed at moment {i}"
    assert len(reached) > 1  # the moments were spread over the run


def test_kill_before_the_first_round_and_twice(tmp_path, processes):
    path = tmp_path / "run"
    child = started(processes, path)
    os.kill(child.pid, signal.SIGKILL)
    child.join()
    begun = (path / "config.json").read_bytes()

    class Stop(Exception):
        pass

    def stop(record):
        if record.round in (3, 7):
            raise Stop

    for _ in range(2):
        with pytest.raises(Stop):
            resume_run(path, on_round=stop)
    result = resume_run(path)
    assert result["rounds"] == 12
    assert (path / "config.json").read_bytes() == begun


@pytest.fixture(scope="module")
def undisturbed():
    return run_undisturbed(SMALL_JOB)


STRIDE = 23  # of the changes at which a run is stopped here


class TestEveryChangeOfTheDisk:
    def test_all_kinds_of_changes_are_stopped_at(self, undisturbed):
        kinds = {change.rpartition(" ")[0] for change in undisturbed.changes}
        assert kinds == {
            *("open", "write first half", "write second half", "fsync", "rename", "unlink", "mkdir", "rmdir")
        }
        assert len(undisturbed.changes) > 150
        assert any(name.startswith("private/") for name in undisturbed.files)

    @pytest.mark.parametrize(("way", "first"), [("kill", 1), ("power cut", 1 + STRIDE // 2)])
    def test_the_run_is_recovered(self, undisturbed, way, first):
        points = range(first, len(undisturbed.changes) + 1, STRIDE)
        problems = {n: problem_after(SMALL_JOB, undisturbed, n, way) for n in points}
        lost = {undisturbed.changes[n - 1]: problem for n, problem in problems.items() if problem}
        print(f"{way}: {len(points)} stops, {len(points) - len(lost)} recoveries")
        assert len(points) >= 7 and not lost

    def test_a_stopped_resumption_is_recovered(self, undisturbed):
        middle = next(i for i, c in enumerate(undisturbed.changes) if c.endswith("000003") and c.startswith("rename"))
        for stop_at in (1, 3, 8, 20):
            assert problem_after_stopped_resume(SMALL_JOB, undisturbed, middle, stop_at) is None

    def test_a_real_kill(self, tmp_path, processes, undisturbed):
        for n in range(40, len(undisturbed.changes), 45):
            path = tmp_path / str(n)
            path.mkdir()
            child = processes.Process(target=run_until_killed, args=(path, n))
            child.start()
            child.join()
            assert child.exitcode == -signal.SIGKILL
            resume_run(path / "run")
            assert digest(path / "run") == undisturbed.files


def run_until_killed(folder: Path, stop_at: int) -> None:
    torch.set_num_threads(1)
    with Disk(folder, stop_at, lambda: os.kill(os.getpid(), signal.SIGKILL)).watch():
        run_job(SMALL_JOB, folder / "run")
