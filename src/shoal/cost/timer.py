"""Where the time of a run goes: seconds by name, gathered while it runs."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass
class Span:
    seconds: float = 0.0  # known when it is over


class Timer:
    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)

    @contextmanager
    def __call__(self, name: str) -> Iterator[Span]:
        begun, span = time.perf_counter(), Span()
        try:
            yield span
        finally:
            span.seconds = time.perf_counter() - begun
            self.seconds[name] += span.seconds
