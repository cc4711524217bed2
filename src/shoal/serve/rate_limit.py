"""Limits the number of requests per second of each caller."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable

MAX_CALLERS = 10_000  # that are remembered; the one whose last request is the oldest is forgotten first


class RateLimiter:
    """A token bucket for each caller.

    `requests_per_s` tokens flow into a bucket per second, up to `burst` tokens, and each request takes one.
    """

    def __init__(
        self, requests_per_s: float, burst: float | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.requests_per_s, self.burst, self.clock = (
            requests_per_s,
            max(1.0, requests_per_s if burst is None else burst),
            clock,
        )
        self._buckets: OrderedDict[str, tuple[float, float]] = (
            OrderedDict()
        )  # caller -> (tokens, time of the last request)

    def wait_s(self, caller: str) -> float:
        """Counts a request and returns 0, or returns for how long the caller must wait. A rate of 0 sets no limit."""
        if not self.requests_per_s:
            return 0.0
        now = self.clock()
        tokens, last_s = self._buckets.pop(caller, (self.burst, now))
        tokens = min(self.burst, tokens + (now - last_s) * self.requests_per_s)
        allowed = tokens >= 1
        self._buckets[caller] = (tokens - 1 if allowed else tokens, now)
        if len(self._buckets) > MAX_CALLERS:
            self._buckets.popitem(last=False)
        return 0.0 if allowed else (1 - tokens) / self.requests_per_s
