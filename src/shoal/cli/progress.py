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
    from shoal.engine import RoundRecord  # brings torch, which `--help` need not wait for

LINE_EVERY_S = 2.0  # between plain lines, so that a log of a thousand quick rounds stays short


def setup_logging(console: Console) -> None:
    handler = RichHandler(console=console, show_time=False, show_path=False, markup=False)
    logging.basicConfig(level=logging.WARNING, format="%(message)s", handlers=[handler], force=True)
    logging.getLogger("shoal").setLevel(logging.INFO)


def _metrics_text(record: RoundRecord) -> str:
    parts = [f"loss {record.metrics['train.loss']:.3f}"] if "train.loss" in record.metrics else []
    if record.evaluation is not None:
        accuracy = record.evaluation.summary()["accuracy"]
        names = {"mean": "local", "central": "central"}
        parts = [f"{names[k]} {accuracy[k]:.1%}" for k in names if accuracy[k] is not None] + parts
    return "  ".join(parts)


class RunProgress:
    """Rounds, accuracy, time left."""

    def __init__(self, console: Console, title: str, num_rounds: int) -> None:
        self.console, self.title, self.num_rounds = console, title, num_rounds
        self._bar: Progress | None = None
        self._task: TaskID | None = None
        self._started: tuple[float, int] | None = None
        self._last_line = -LINE_EVERY_S
        self._metrics_shown = ""
        self._unprinted: RoundRecord | None = None  # the last round, while no line has told of it

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
            self._task = self._bar.add_task(self.title, total=self.num_rounds, seen="")
            self._bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, t: TracebackType | None) -> None:
        if self._bar is not None:
            self._bar.stop()

    def on_round(self, record: RoundRecord) -> None:
        self._metrics_shown = _metrics_text(record)  # of this round alone: what was not evaluated has no figure
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, completed=record.round, seen=self._metrics_shown)
            return
        now = time.monotonic()
        if self._started is None:
            self._started = (now, record.round)
        self._unprinted = record
        if record.round == self.num_rounds or now - self._last_line >= LINE_EVERY_S:
            self._last_line = now
            self._print_round(record, self._time_left(now, record.round))

    def on_end(self, stop_reason: str | None) -> None:
        """A run that ends before its last round says so, and why."""
        if stop_reason:
            if self._unprinted is not None:
                self._print_round(self._unprinted)
            self._print(stop_reason)

    def _print_round(self, record: RoundRecord, time_left: str = "") -> None:
        self._unprinted = None
        self._print(f"round {record.round}/{self.num_rounds}  {self._metrics_shown}{time_left}")

    def _print(self, text: str) -> None:
        self.console.print(f"{self.title}  {text}", highlight=False, soft_wrap=True, markup=False)

    def _time_left(self, now: float, round_number: int) -> str:
        began, first = self._started or (now, round_number)
        if round_number == first or round_number == self.num_rounds:
            return ""
        return f"  {(now - began) / (round_number - first) * (self.num_rounds - round_number):.0f} s left"


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

    def __call__(self, name: str, done_bytes: int, total_bytes: int | None) -> None:
        if name not in self._tasks:
            self._bar.start()
            self._tasks[name] = self._bar.add_task(name, total=total_bytes)
        self._bar.update(self._tasks[name], completed=done_bytes, total=total_bytes)
