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

from shoal.experiment.assemble import Bench, setup
from shoal.experiment.job import Job
from shoal.experiment.run import check_same, run_or_resume
from shoal.stages.base import CLUSTERING_LIBRARIES
from shoal.store.atomic_files import write_json
from shoal.store.failure import record_exceptions, record_failure
from shoal.store.reader import read_run
from shoal.store.run_directory import RunStore
from shoal.study.plan import Entry
from shoal.study.unseen import unseen_figures

UNSEEN = "unseen.json"  # in a run directory: what clients that never trained are served


def finished(place: Path, job: Job) -> bool:
    return (place / "result.json").exists() and (not job.unseen or (place / UNSEEN).exists())


def finish(job: Job, place: Path, inputs: Sequence[int]) -> None:
    """Played to its end, from wherever it is, and its unseen clients evaluated."""
    made: list[Bench] = []
    if not (place / "result.json").exists():
        run_or_resume(job, place, on_setup=made.append)
    if job.unseen:
        bench = made[0] if made else setup(job)
        with RunStore.open(place) as store:
            write_json(place / UNSEEN, unseen_figures(bench, store.load_final_state(job.device), inputs))


def _work(line: Connection, text: str, place: Path, inputs: Sequence[int]) -> None:
    """In a process of its own, on one thread. It goes when whoever started it is gone: nothing is lost, a run goes on
    from its last complete round. It sends why it failed, or nothing."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent's to hear
    torch.set_num_threads(1)
    threading.Thread(target=_leave_with_parent, args=(line,), daemon=True).start()
    job = Job.model_validate_json(text)
    with record_exceptions(place, job.model_dump(mode="json"), lambda reason: line.send_bytes(reason.encode())):
        finish(job, place, inputs)
        line.send_bytes(b"")


def _leave_with_parent(line: Connection) -> None:
    try:
        line.recv_bytes()
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

    def share(self, entries: Sequence[Entry]) -> float:
        done = sum(self.seconds.get(e, 0.0) for e in entries)
        return done / max(1e-9, sum(map(self.expected_s, entries)))

    def left_s(self, entries: Sequence[Entry], workers: int) -> float:
        rest = [self.expected_s(e) for e in entries if e not in self.seconds]
        return max([sum(rest) / workers, *rest], default=0.0)


@dataclass(frozen=True)
class Progress:
    entry: Entry
    failure: str  # the reason; empty if it is finished
    seconds: float
    done: int
    total: int
    share: float
    left_s: float


def play(
    entries: Sequence[Entry],
    out: Path,
    inputs: Sequence[int],
    workers: int,
    on_done: Callable[[Progress], None],
) -> None:
    """Every entry that is not finished, in order, so many at a time. One that fails does not end the others."""
    forecast = Forecast()
    for entry in entries:
        place = out / entry.place
        if (place / "config.json").exists():
            check_same(place, entry.job)
        if finished(place, entry.job):
            forecast.seconds[entry] = float((read_run(place).result or {}).get("wall_s", 0.0))
    waiting = [entry for entry in entries if entry not in forecast.seconds]
    with _processes() as started:
        while waiting or started:
            while waiting and len(started) < workers:
                started.append(_Started.begin(waiting.pop(0), out, inputs))
            done, failure = _next(started, out)
            forecast.seconds[done.entry] = time.monotonic() - done.begun
            on_done(
                Progress(
                    done.entry,
                    failure,
                    forecast.seconds[done.entry],
                    len(forecast.seconds),
                    len(entries),
                    forecast.share(entries),
                    forecast.left_s(entries, workers),
                )
            )


@dataclass(frozen=True)
class _Started:
    entry: Entry
    process: ForkServerProcess
    line: Connection
    begun: float

    @classmethod
    def begin(cls, entry: Entry, out: Path, inputs: Sequence[int]) -> _Started:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["shoal.experiment.run", "shoal.study.unseen", *CLUSTERING_LIBRARIES])
        ours, theirs = context.Pipe()
        process = context.Process(
            target=_work, args=(theirs, entry.job.model_dump_json(), out / entry.place, tuple(inputs))
        )
        process.start()
        theirs.close()
        return cls(entry, process, ours, time.monotonic())


def _next(started: list[_Started], out: Path) -> tuple[_Started, str]:
    """The first that is done, and why it failed; a process that died cannot say so itself."""
    ready = wait([s.line for s in started])
    done = next(s for s in started if s.line is ready[0])
    try:
        failure = done.line.recv_bytes().decode()
        done.process.join()
    except EOFError:
        done.process.join()
        failure = f"its process ended with code {done.process.exitcode}"
        record_failure(out / done.entry.place, done.entry.job.model_dump(mode="json"), failure)
    started.remove(done)
    return done, failure


@contextmanager
def _processes() -> Iterator[list[_Started]]:
    started: list[_Started] = []
    try:
        yield started
    finally:
        for s in started:
            s.process.terminate()
        for s in started:
            s.process.join()
