"""Seconds of a run by name, measured while it runs."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass
class Span:
    """The seconds of a block, which are 0 until the block ends."""

    seconds: float = 0.0
    cpu_s: float = 0.0  # processor time of this process, without other programs


class Timer:
    """Sums seconds by name: `with timer("train"): ...` adds the seconds of the block to `timer.seconds["train"]`."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)

    @contextmanager
    def __call__(self, name: str) -> Iterator[Span]:
        start_s, cpu_start_s, span = time.perf_counter(), time.process_time(), Span()
        try:
            yield span
        finally:
            span.seconds, span.cpu_s = time.perf_counter() - start_s, time.process_time() - cpu_start_s
            self.seconds[name] += span.seconds
