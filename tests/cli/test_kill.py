"""kill -9 at random moments: after `resume` the run directory is always the same bytes."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import time
from contextlib import suppress
from pathlib import Path

import pytest

from shoal.experiment.job import Job
from shoal.experiment.run import resume_run, run_job

# Private state, several files per checkpoint, quick rounds: most moments fall into some write.
JOB = Job(
    method="fedavg-ft",
    data="digits",
    clients=5,
    max_train_samples=200,
    rounds=12,
    cohort=2,
    epochs=1,
    eval_every=3,
    fleet="plain",
    set={"personalise": {"epochs": 1}},
)
MOMENTS = 20


def run(path: str) -> None:
    import torch

    torch.set_num_threads(1)
    run_job(JOB, Path(path))


def digest(folder: Path) -> dict[str, bytes]:
    skip = ("timing.jsonl", "result.json", "lock")
    files = {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}
    return {k: v for k, v in files.items() if k not in skip}


@pytest.fixture(scope="module")
def processes():
    context = multiprocessing.get_context("forkserver")
    slow_to_load = ["shoal.experiment.run", "shoal.methods", "sklearn.datasets", "torch._dynamo"]
    context.set_forkserver_preload(slow_to_load)  # else 5 s each
    return context


def started(processes, path):
    child = processes.Process(target=run, args=(str(path),))
    child.start()
    while not (path / "config.json").exists() and child.is_alive():
        time.sleep(0.001)
    return child


def test_kill_at_twenty_moments(tmp_path, processes):
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
