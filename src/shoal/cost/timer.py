"""Where the time of a run goes: seconds by name, gathered while it runs."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass
class Span:
    """Known when it is over."""

    seconds: float = 0.0
    cpu_s: float = 0.0  # of this process: what others do on the machine does not count


class Timer:
    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)

    @contextmanager
    def __call__(self, name: str) -> Iterator[Span]:
        begun, worked, span = time.perf_counter(), time.process_time(), Span()
        try:
            yield span
        finally:
            span.seconds, span.cpu_s = time.perf_counter() - begun, time.process_time() - worked
            self.seconds[name] += span.seconds
