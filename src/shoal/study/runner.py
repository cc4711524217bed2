"""The runs of a study, several at a time, each in a process of its own: what is finished is kept, the rest goes on."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from statistics import fmean

import torch

from shoal.experiment.assemble import Experiment, assemble_job
from shoal.experiment.job import Job
from shoal.experiment.run import check_same_job, run_or_resume
from shoal.stages.base import CLUSTERING_LIBRARIES
from shoal.store.atomic_files import write_json
from shoal.store.failure import record_exceptions, record_failure
from shoal.store.reader import read_run
from shoal.store.run_directory import RunStore
from shoal.study.plan import Entry
from shoal.study.unseen import evaluate_unseen_ways

UNSEEN_FILE = "unseen.json"  # in a run directory: what clients that never trained are served


def is_finished(path: Path, job: Job) -> bool:
    return (path / "result.json").exists() and (not job.unseen or (path / UNSEEN_FILE).exists())


def finish_run(job: Job, path: Path, num_inputs: Sequence[int]) -> None:
    """Played to its end, from wherever it is, and its unseen clients evaluated."""
    assembled: list[Experiment] = []
    if not (path / "result.json").exists():
        run_or_resume(job, path, on_setup=assembled.append)
    if job.unseen:
        experiment = assembled[0] if assembled else assemble_job(job)
        with RunStore.open(path) as store:
            write_json(
                path / UNSEEN_FILE, evaluate_unseen_ways(experiment, store.load_final_state(job.device), num_inputs)
            )


def _run_in_process(connection: Connection, job_json: str, path: Path, num_inputs: Sequence[int]) -> None:
    """In a process of its own, on one thread. It goes when whoever started it is gone: nothing is lost, a run goes on
    from its last complete round. It sends why it failed, or nothing."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent's to hear
    torch.set_num_threads(1)
    threading.Thread(target=_exit_with_parent, args=(connection,), daemon=True).start()
    job = Job.model_validate_json(job_json)
    with record_exceptions(path, job.model_dump(mode="json"), lambda reason: connection.send_bytes(reason.encode())):
        finish_run(job, path, num_inputs)
        connection.send_bytes(b"")


def _exit_with_parent(connection: Connection) -> None:
    try:
        connection.recv_bytes()
    except (EOFError, OSError):
        os._exit(1)


@dataclass
class Forecast:
    """How long entries take: as others of the same kind did, else of the same variant, else all."""

    seconds: dict[Entry, float] = field(default_factory=dict)

    def expected_s(self, entry: Entry) -> float:
        if entry in self.seconds:
            return self.seconds[entry]
        alike = (
            lambda e: (e.cell, e.variant) == (entry.cell, entry.variant),
            lambda e: e.variant == entry.variant,
            lambda e: True,
        )
        for same in alike:
            if known := [s for e, s in self.seconds.items() if same(e)]:
                return fmean(known)
        return 1.0

    def done_fraction(self, entries: Sequence[Entry]) -> float:
        done = sum(self.seconds.get(e, 0.0) for e in entries)
        return done / max(1e-9, sum(map(self.expected_s, entries)))

    def remaining_s(self, entries: Sequence[Entry], num_workers: int) -> float:
        rest = [self.expected_s(e) for e in entries if e not in self.seconds]
        return max([sum(rest) / num_workers, *rest], default=0.0)


@dataclass(frozen=True)
class StudyProgress:
    entry: Entry
    failure: str  # the reason; empty if it is finished
    duration_s: float
    num_done: int
    num_total: int
    done_fraction: float
    remaining_s: float


def run_entries(
    entries: Sequence[Entry],
    out: Path,
    num_inputs: Sequence[int],
    num_workers: int,
    on_done: Callable[[StudyProgress], None],
) -> None:
    """Every entry that is not finished, in order, so many at a time. One that fails does not end the others."""
    forecast = Forecast()
    for entry in entries:
        place = out / entry.relative_path
        if (place / "config.json").exists():
            check_same_job(place, entry.job)
        if is_finished(place, entry.job):
            forecast.seconds[entry] = float((read_run(place).result or {}).get("wall_s", 0.0))
    waiting = [entry for entry in entries if entry not in forecast.seconds]
    with _running_entries() as running:
        while waiting or running:
            while waiting and len(running) < num_workers:
                running.append(_RunningEntry.start(waiting.pop(0), out, num_inputs))
            done, failure = _wait_for_next(running, out)
            forecast.seconds[done.entry] = time.monotonic() - done.started_s
            on_done(
                StudyProgress(
                    done.entry,
                    failure,
                    forecast.seconds[done.entry],
                    len(forecast.seconds),
                    len(entries),
                    forecast.done_fraction(entries),
                    forecast.remaining_s(entries, num_workers),
                )
            )


@dataclass(frozen=True)
class _RunningEntry:
    entry: Entry
    process: ForkServerProcess
    connection: Connection
    started_s: float

    @classmethod
    def start(cls, entry: Entry, out: Path, num_inputs: Sequence[int]) -> _RunningEntry:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["shoal.experiment.run", "shoal.study.unseen", *CLUSTERING_LIBRARIES])
        ours, theirs = context.Pipe()
        process = context.Process(
            target=_run_in_process,
            args=(theirs, entry.job.model_dump_json(), out / entry.relative_path, tuple(num_inputs)),
        )
        process.start()
        theirs.close()
        return cls(entry, process, ours, time.monotonic())


def _wait_for_next(running: list[_RunningEntry], out: Path) -> tuple[_RunningEntry, str]:
    """The first that is done, and why it failed; a process that died cannot say so itself."""
    ready = wait([s.connection for s in running])
    done = next(s for s in running if s.connection is ready[0])
    try:
        failure = done.connection.recv_bytes().decode()
        done.process.join()
    except EOFError:
        done.process.join()
        failure = f"its process ended with code {done.process.exitcode}"
        record_failure(out / done.entry.relative_path, done.entry.job.model_dump(mode="json"), failure)
    running.remove(done)
    return done, failure


@contextmanager
def _running_entries() -> Iterator[list[_RunningEntry]]:
    started: list[_RunningEntry] = []
    try:
        yield started
    finally:
        for s in started:
            s.process.terminate()
        for s in started:
            s.process.join()
