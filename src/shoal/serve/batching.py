"""Requests that come at nearly the same time are answered in one pass."""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass

from shoal.serve.model_version import Asked, Told
from shoal.serve.prometheus import Metrics

SHORT_S = 0.02  # of a pass
Waiting = tuple[Asked, "asyncio.Future[Told]"]


class Overloaded(Exception):
    """More rows are waiting than the queue may hold."""


@dataclass(frozen=True)
class Batching:
    rows: int = 64  # of one pass at most, unless one request alone has more
    wait_s: float = 0.002  # for company, after the first request of a pass
    queue_rows: int = 4096


class Batcher:
    """What comes while a pass is computed is the next pass.

    A long pass has a thread of its own, so that the loop goes on reading. A short one has not: a busy loop gives a
    thread its turn at the interpreter only every few milliseconds, again after each tensor operation, which made passes
    of a small network many times as long as they are.
    """

    def __init__(self, answer: Callable[[Sequence[Asked]], list[Told]], options: Batching, metrics: Metrics) -> None:
        self._answer, self.options, self.metrics = answer, options, metrics
        self._queue: deque[Waiting] = deque()
        self._rows = 0
        self._row_s = math.inf  # what a row took in the last pass: at first nothing is known
        self._some, self._enough = asyncio.Event(), asyncio.Event()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="answers")

    async def ask(self, asked: Asked) -> Told:
        if self._rows and self._rows + len(asked.x) > self.options.queue_rows:
            raise Overloaded
        future: asyncio.Future[Told] = asyncio.get_running_loop().create_future()
        self._queue.append((asked, future))
        self._count(len(asked.x))
        self._some.set()
        if self._rows >= self.options.rows:
            self._enough.set()
        return await future

    def _count(self, rows: int) -> None:
        self._rows += rows
        self.metrics.queued.set(self._rows)

    async def run(self) -> None:
        """Until it is cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            await self._some.wait()
            if self.options.wait_s and self._rows < self.options.rows:
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._enough.wait(), self.options.wait_s)
            batch = self._take()
            if self._row_s * sum(len(asked.x) for asked, _ in batch) < SHORT_S:
                _tell(batch, self._compute(batch))
                await asyncio.sleep(0)
            else:
                _tell(batch, await loop.run_in_executor(self._thread, self._compute, batch))

    def _take(self) -> list[Waiting]:
        batch: list[Waiting] = []
        rows = 0
        while self._queue and (not batch or rows + len(self._queue[0][0].x) <= self.options.rows):
            batch.append(self._queue.popleft())
            rows += len(batch[-1][0].x)
        self._count(-rows)
        self._enough.clear()
        if not self._queue:
            self._some.clear()
        self.metrics.batch_rows.observe(rows)
        return batch

    def _compute(self, batch: Sequence[Waiting]) -> Sequence[Told | Exception]:
        begun = time.thread_time()
        try:
            return self._answer([asked for asked, _ in batch])
        except Exception:  # one request must not fail its neighbours
            return [self._alone(asked) for asked, _ in batch]
        finally:
            self._row_s = (time.thread_time() - begun) / sum(len(asked.x) for asked, _ in batch)

    def _alone(self, asked: Asked) -> Told | Exception:
        try:
            return self._answer([asked])[0]
        except Exception as error:
            return error

    def close(self) -> None:
        self._thread.shutdown(wait=True)


def _tell(batch: Sequence[Waiting], found: Sequence[Told | Exception]) -> None:
    for (_, future), answer in zip(batch, found, strict=True):
        if future.done():  # whoever asked has gone
            continue
        if isinstance(answer, Exception):
            future.set_exception(answer)
        else:
            future.set_result(answer)
