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

from shoal.serve.model_version import PredictRequest, PredictResult
from shoal.serve.prometheus import Metrics

SHORT_BATCH_S = 0.02  # of a pass
QueuedRequest = tuple[PredictRequest, "asyncio.Future[Told]"]


class QueueFull(Exception):
    """More rows are waiting than the queue may hold."""


@dataclass(frozen=True)
class BatchOptions:
    max_samples: int = 64  # of one pass at most, unless one request alone has more
    max_wait_s: float = 0.002  # for company, after the first request of a pass
    max_queued_samples: int = 4096


class Batcher:
    """What comes while a pass is computed is the next pass.

    A long pass has a thread of its own, so that the loop goes on reading. A short one has not: a busy loop gives a
    thread its turn at the interpreter only every few milliseconds, again after each tensor operation, which made passes
    of a small network many times as long as they are.
    """

    def __init__(
        self,
        predict: Callable[[Sequence[PredictRequest]], list[PredictResult]],
        options: BatchOptions,
        metrics: Metrics,
    ) -> None:
        self._predict, self.options, self.metrics = predict, options, metrics
        self._queue: deque[QueuedRequest] = deque()
        self._num_queued = 0
        self._s_per_sample = math.inf  # what a row took in the last pass: at first nothing is known
        self._has_requests, self._has_full_batch = asyncio.Event(), asyncio.Event()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="answers")

    async def submit(self, request: PredictRequest) -> PredictResult:
        if self._num_queued and self._num_queued + len(request.x) > self.options.max_queued_samples:
            raise QueueFull
        future: asyncio.Future[PredictResult] = asyncio.get_running_loop().create_future()
        self._queue.append((request, future))
        self._add_queued(len(request.x))
        self._has_requests.set()
        if self._num_queued >= self.options.max_samples:
            self._has_full_batch.set()
        return await future

    def _add_queued(self, num_samples: int) -> None:
        self._num_queued += num_samples
        self.metrics.queued_samples.set(self._num_queued)

    async def run(self) -> None:
        """Until it is cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            await self._has_requests.wait()
            if self.options.max_wait_s and self._num_queued < self.options.max_samples:
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._has_full_batch.wait(), self.options.max_wait_s)
            batch = self._take_batch()
            if self._s_per_sample * sum(len(asked.x) for asked, _ in batch) < SHORT_BATCH_S:
                _resolve_futures(batch, self._compute(batch))
                await asyncio.sleep(0)
            else:
                _resolve_futures(batch, await loop.run_in_executor(self._thread, self._compute, batch))

    def _take_batch(self) -> list[QueuedRequest]:
        batch: list[QueuedRequest] = []
        rows = 0
        while self._queue and (not batch or rows + len(self._queue[0][0].x) <= self.options.max_samples):
            batch.append(self._queue.popleft())
            rows += len(batch[-1][0].x)
        self._add_queued(-rows)
        self._has_full_batch.clear()
        if not self._queue:
            self._has_requests.clear()
        self.metrics.batch_samples.observe(rows)
        return batch

    def _compute(self, batch: Sequence[QueuedRequest]) -> Sequence[PredictResult | Exception]:
        begun = time.thread_time()
        try:
            return self._predict([asked for asked, _ in batch])
        except Exception:  # one request must not fail its neighbours
            return [self._predict_alone(asked) for asked, _ in batch]
        finally:
            self._s_per_sample = (time.thread_time() - begun) / sum(len(asked.x) for asked, _ in batch)

    def _predict_alone(self, request: PredictRequest) -> PredictResult | Exception:
        try:
            return self._predict([request])[0]
        except Exception as error:
            return error

    def close(self) -> None:
        self._thread.shutdown(wait=True)


def _resolve_futures(batch: Sequence[QueuedRequest], results: Sequence[PredictResult | Exception]) -> None:
    for (_, future), answer in zip(batch, results, strict=True):
        if future.done():  # whoever asked has gone
            continue
        if isinstance(answer, Exception):
            future.set_exception(answer)
        else:
            future.set_result(answer)
