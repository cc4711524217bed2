"""A short job on digits, the files of a run, and the number of steps that a fleet has recorded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from quick import quick_options

from shoal.experiment.job import Job
from shoal.fleet.tracing import Recorder


def file_contents(folder: Path) -> dict[str, bytes]:
    """Returns the content of every file of a run, except files that contain clock times."""
    skip = ("timing.jsonl", "result.json", "lock")
    files = {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}
    return {k: v for k, v in files.items() if k not in skip}


def num_recordings(recorder: Recorder) -> int:
    return sum(len(steps.replays) for steps in recorder._steps.values())


def digits_job(method: str, **kw: Any) -> Job:
    settings = {"data": "digits", "clients": 6, "max_train_samples": 300, "rounds": 3, "cohort": 3}
    settings |= {"epochs": 1, "eval_every": 2}
    return Job(method=method, set=quick_options(method), **settings | kw)
