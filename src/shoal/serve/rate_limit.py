"""How often one caller may ask."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable

MAX_CALLERS = 10_000  # that are remembered; who has not asked for longest is forgotten first, with a full bucket


class RateLimiter:
    """A bucket of tokens for each caller: `per_s` flow in, up to `burst`, and a request takes one."""

    def __init__(
        self, requests_per_s: float, burst: float | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.requests_per_s, self.burst, self.clock = (
            requests_per_s,
            max(1.0, requests_per_s if burst is None else burst),
            clock,
        )
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()  # caller -> (tokens, when)

    def wait_s(self, caller: str) -> float:
        """0 if the caller may ask now, and that is counted; else for how long it may not. A rate of 0 is no limit."""
        if not self.requests_per_s:
            return 0.0
        now = self.clock()
        tokens, when = self._buckets.pop(caller, (self.burst, now))
        tokens = min(self.burst, tokens + (now - when) * self.requests_per_s)
        allowed = tokens >= 1
        self._buckets[caller] = (tokens - 1 if allowed else tokens, now)
        if len(self._buckets) > MAX_CALLERS:
            self._buckets.popitem(last=False)
        return 0.0 if allowed else (1 - tokens) / self.requests_per_s
