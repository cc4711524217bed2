"""What a person sees while a run goes on: a live bar on a terminal, plain lines elsewhere. All on stderr."""

from __future__ import annotations

import logging
import time
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from rich.console import Console
from rich.logging import RichHandler
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

if TYPE_CHECKING:
    from shoal.engine import Record  # brings torch, which `--help` need not wait for

LINE_EVERY_S = 2.0  # between plain lines, so that a log of a thousand quick rounds stays short


def setup_logging(console: Console) -> None:
    handler = RichHandler(console=console, show_time=False, show_path=False, markup=False)
    logging.basicConfig(level=logging.WARNING, format="%(message)s", handlers=[handler], force=True)
    logging.getLogger("shoal").setLevel(logging.INFO)


def _figures(record: Record) -> str:
    parts = [f"loss {record.metrics['train.loss']:.3f}"] if "train.loss" in record.metrics else []
    if record.evaluation is not None:
        accuracy = record.evaluation.figures()["accuracy"]
        names = {"mean": "local", "central": "central"}
        parts = [f"{names[k]} {accuracy[k]:.1%}" for k in names if accuracy[k] is not None] + parts
    return "  ".join(parts)


class RunProgress:
    """Rounds, accuracy, time left."""

    def __init__(self, console: Console, title: str, rounds: int) -> None:
        self.console, self.title, self.rounds = console, title, rounds
        self._bar: Progress | None = None
        self._task: TaskID | None = None
        self._began: tuple[float, int] | None = None
        self._last_line = -LINE_EVERY_S
        self._seen = ""
        self._untold: Record | None = None  # the last round, while no line has told of it

    def __enter__(self) -> Self:
        if self.console.is_terminal:
            columns = (
                TextColumn("[bold]{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("{task.fields[seen]}"),
                TimeElapsedColumn(),
                TextColumn("left"),
                TimeRemainingColumn(),
            )
            self._bar = Progress(*columns, console=self.console)
            self._task = self._bar.add_task(self.title, total=self.rounds, seen="")
            self._bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, t: TracebackType | None) -> None:
        if self._bar is not None:
            self._bar.stop()

    def on_round(self, record: Record) -> None:
        self._seen = _figures(record)  # of this round alone: what was not evaluated has no figure
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, completed=record.round, seen=self._seen)
            return
        now = time.monotonic()
        if self._began is None:
            self._began = (now, record.round)
        self._untold = record
        if record.round == self.rounds or now - self._last_line >= LINE_EVERY_S:
            self._last_line = now
            self._tell(record, self._left(now, record.round))

    def on_end(self, stopped: str | None) -> None:
        """A run that ends before its last round says so, and why."""
        if stopped:
            if self._untold is not None:
                self._tell(self._untold)
            self._print(stopped)

    def _tell(self, record: Record, left: str = "") -> None:
        self._untold = None
        self._print(f"round {record.round}/{self.rounds}  {self._seen}{left}")

    def _print(self, text: str) -> None:
        self.console.print(f"{self.title}  {text}", highlight=False, soft_wrap=True, markup=False)

    def _left(self, now: float, round: int) -> str:
        began, first = self._began or (now, round)
        if round == first or round == self.rounds:
            return ""
        return f"  {(now - began) / (round - first) * (self.rounds - round):.0f} s left"


class DownloadProgress:
    """Called by the downloader with (file, bytes so far, bytes in all or None)."""

    def __init__(self, console: Console) -> None:
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            DownloadColumn(),
            TimeRemainingColumn(),
            console=console,
        )
        self._tasks: dict[str, TaskID] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: Any) -> None:
        if self._tasks:
            self._bar.stop()

    def __call__(self, name: str, done: int, total: int | None) -> None:
        if name not in self._tasks:
            self._bar.start()
            self._tasks[name] = self._bar.add_task(name, total=total)
        self._bar.update(self._tasks[name], completed=done, total=total)
