"""Runs the entries of a study, several at a time, each in its own process. Finished runs are not run again."""

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

UNSEEN_FILE = "unseen.json"  # in a run directory: the accuracies of the unseen clients


def is_finished(path: Path, job: Job) -> bool:
    """Returns whether the run is finished and its unseen clients are evaluated."""
    return (path / "result.json").exists() and (not job.unseen or (path / UNSEEN_FILE).exists())


def finish_run(job: Job, path: Path, num_inputs: Sequence[int]) -> None:
    """Runs or resumes a job to its end, and evaluates its unseen clients."""
    experiments: list[Experiment] = []
    if not (path / "result.json").exists():
        run_or_resume(job, path, on_setup=experiments.append)
    if job.unseen:
        experiment = experiments[0] if experiments else assemble_job(job)
        with RunStore.open(path) as store:
            write_json(
                path / UNSEEN_FILE, evaluate_unseen_ways(experiment, store.load_final_state(job.device), num_inputs)
            )


def _run_in_process(connection: Connection, job_json: str, path: Path, num_inputs: Sequence[int]) -> None:
    """Runs a job in a process of its own on one thread, and sends the reason of a failure, or an empty text.

    The process exits when its parent is gone. Nothing is lost, because a run resumes from its last complete round.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
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
    """Predicts the seconds of an entry from entries of its cell and variant, else of its variant, else from all."""

    seconds: dict[Entry, float] = field(default_factory=dict)

    def expected_s(self, entry: Entry) -> float:
        """Returns the seconds that an entry took or will probably take."""
        if entry in self.seconds:
            return self.seconds[entry]
        similarities = (
            lambda e: (e.cell, e.variant) == (entry.cell, entry.variant),
            lambda e: e.variant == entry.variant,
            lambda e: True,
        )
        for is_similar in similarities:
            if durations_s := [duration_s for e, duration_s in self.seconds.items() if is_similar(e)]:
                return fmean(durations_s)
        return 1.0

    def done_fraction(self, entries: Sequence[Entry]) -> float:
        """Returns the fraction of the expected time that finished entries took."""
        done_s = sum(self.seconds.get(e, 0.0) for e in entries)
        return done_s / max(1e-9, sum(map(self.expected_s, entries)))

    def remaining_s(self, entries: Sequence[Entry], num_workers: int) -> float:
        """Returns the expected seconds until all entries are finished."""
        waiting_s = [self.expected_s(e) for e in entries if e not in self.seconds]
        return max([sum(waiting_s) / num_workers, *waiting_s], default=0.0)


@dataclass(frozen=True)
class StudyProgress:
    """The state of a study after one of its runs ended."""

    entry: Entry
    failure: str  # the reason, or empty if the run finished
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
    """Runs the unfinished entries in order, `num_workers` at a time. An entry that fails does not stop the others."""
    forecast = Forecast()
    for entry in entries:
        path = out / entry.relative_path
        if (path / "config.json").exists():
            check_same_job(path, entry.job)
        if is_finished(path, entry.job):
            forecast.seconds[entry] = float((read_run(path).result or {}).get("wall_s", 0.0))
    waiting = [entry for entry in entries if entry not in forecast.seconds]
    with _running_entries() as running:
        while waiting or running:
            while waiting and len(running) < num_workers:
                running.append(_RunningEntry.start(waiting.pop(0), out, num_inputs))
            ended, failure = _wait_for_next(running, out)
            forecast.seconds[ended.entry] = time.monotonic() - ended.started_s
            on_done(
                StudyProgress(
                    ended.entry,
                    failure,
                    forecast.seconds[ended.entry],
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
        connection, child_connection = context.Pipe()
        process = context.Process(
            target=_run_in_process,
            args=(child_connection, entry.job.model_dump_json(), out / entry.relative_path, tuple(num_inputs)),
        )
        process.start()
        child_connection.close()
        return cls(entry, process, connection, time.monotonic())


def _wait_for_next(running: list[_RunningEntry], out: Path) -> tuple[_RunningEntry, str]:
    """Returns the first entry that ends, and the reason if it failed. A process that died sends no reason."""
    ready = wait([one.connection for one in running])
    ended = next(one for one in running if one.connection is ready[0])
    try:
        failure = ended.connection.recv_bytes().decode()
        ended.process.join()
    except EOFError:
        ended.process.join()
        failure = f"its process ended with code {ended.process.exitcode}"
        record_failure(out / ended.entry.relative_path, ended.entry.job.model_dump(mode="json"), failure)
    running.remove(ended)
    return ended, failure


@contextmanager
def _running_entries() -> Iterator[list[_RunningEntry]]:
    """Yields a list for the running entries, and ends their processes afterwards."""
    running: list[_RunningEntry] = []
    try:
        yield running
    finally:
        for one in running:
            one.process.terminate()
        for one in running:
            one.process.join()
