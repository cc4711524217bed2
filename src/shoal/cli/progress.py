"""Shows the progress of a run on stderr: a live bar on a terminal, plain lines elsewhere."""

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
    from shoal.engine import RoundRecord  # imports torch, which would slow `--help` down

LINE_EVERY_S = 2.0  # between plain lines, so that the log of a thousand short rounds stays short


def setup_logging(console: Console) -> None:
    """Sends log messages to the console: those of shoal from INFO on, others from WARNING on."""
    handler = RichHandler(console=console, show_time=False, show_path=False, markup=False)
    logging.basicConfig(level=logging.WARNING, format="%(message)s", handlers=[handler], force=True)
    logging.getLogger("shoal").setLevel(logging.INFO)


def _metrics_text(record: RoundRecord) -> str:
    parts = [f"loss {record.metrics['train.loss']:.3f}"] if "train.loss" in record.metrics else []
    if record.evaluation is not None:
        accuracy = record.evaluation.summary()["accuracy"]
        keys = ("local", "central")
        parts = [f"{k} {accuracy[k]:.1%}" for k in keys if accuracy[k] is not None] + parts
    return "  ".join(parts)


class RunProgress:
    """Shows rounds, accuracy, loss and the remaining time of a run."""

    def __init__(self, console: Console, title: str, num_rounds: int) -> None:
        self.console, self.title, self.num_rounds = console, title, num_rounds
        self._bar: Progress | None = None
        self._task: TaskID | None = None
        self._started: tuple[float, int] | None = None
        self._last_line = -LINE_EVERY_S
        self._metrics_shown = ""
        self._unprinted: RoundRecord | None = None  # the last round, until a line shows it

    def __enter__(self) -> Self:
        if self.console.is_terminal:
            columns = (
                TextColumn("[bold]{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("{task.fields[metrics]}"),
                TimeElapsedColumn(),
                TextColumn("left"),
                TimeRemainingColumn(),
            )
            self._bar = Progress(*columns, console=self.console)
            self._task = self._bar.add_task(self.title, total=self.num_rounds, metrics="")
            self._bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, t: TracebackType | None) -> None:
        if self._bar is not None:
            self._bar.stop()

    def on_round(self, record: RoundRecord) -> None:
        """Shows a round. It is the callback for `run_job`."""
        self._metrics_shown = _metrics_text(record)  # of this round alone, so that no old accuracy is shown
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, completed=record.round, metrics=self._metrics_shown)
            return
        now = time.monotonic()
        if self._started is None:
            self._started = (now, record.round)
        self._unprinted = record
        if record.round == self.num_rounds or now - self._last_line >= LINE_EVERY_S:
            self._last_line = now
            self._print_round(record, self._time_left(now, record.round))

    def on_end(self, stop_reason: str | None) -> None:
        """Shows why a run ended early. It is the callback for `run_job`."""
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
        started_s, first_round = self._started or (now, round_number)
        if round_number == first_round or round_number == self.num_rounds:
            return ""
        return f"  {(now - started_s) / (round_number - first_round) * (self.num_rounds - round_number):.0f} s left"


class DownloadProgress:
    """Shows downloads. The downloader calls it with the file, the bytes so far and the total bytes or None."""

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
