"""Collects requests that arrive at nearly the same time, and predicts them as one batch."""

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

SHORT_BATCH_S = 0.02  # a batch that takes less time than this is computed without a thread
QueuedRequest = tuple[PredictRequest, "asyncio.Future[PredictResult]"]


class QueueFull(Exception):
    """More samples are waiting than the queue may have."""


@dataclass(frozen=True)
class BatchOptions:
    """The limits of batches and of the queue."""

    max_samples: int = 64  # of one batch, unless a single request has more
    max_wait_s: float = 0.002  # for further requests, after the first one of a batch
    max_queued_samples: int = 4096


class Batcher:
    """Predicts the requests of a queue in batches.

    Requests that arrive while a batch is computed become the next batch. A long batch is computed in a thread, so that
    the event loop continues to read requests. A short batch is computed in the event loop itself: a busy event loop
    lets a thread run only every few milliseconds, again after each tensor operation, and a batch of a small network
    would take many times as long.
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
        self._s_per_sample = math.inf  # of the last batch; infinite before the first one
        self._has_requests, self._has_full_batch = asyncio.Event(), asyncio.Event()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="predictions")

    async def submit(self, request: PredictRequest) -> PredictResult:
        """Returns the result of a request. Raises `QueueFull` if too many samples are waiting."""
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
        """Predicts batches until it is cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            await self._has_requests.wait()
            if self.options.max_wait_s and self._num_queued < self.options.max_samples:
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._has_full_batch.wait(), self.options.max_wait_s)
            batch = self._take_batch()
            if self._s_per_sample * sum(len(request.x) for request, _ in batch) < SHORT_BATCH_S:
                _resolve_futures(batch, self._compute(batch))
                await asyncio.sleep(0)
            else:
                _resolve_futures(batch, await loop.run_in_executor(self._thread, self._compute, batch))

    def _take_batch(self) -> list[QueuedRequest]:
        batch: list[QueuedRequest] = []
        num_samples = 0
        while self._queue and (not batch or num_samples + len(self._queue[0][0].x) <= self.options.max_samples):
            batch.append(self._queue.popleft())
            num_samples += len(batch[-1][0].x)
        self._add_queued(-num_samples)
        self._has_full_batch.clear()
        if not self._queue:
            self._has_requests.clear()
        self.metrics.batch_samples.observe(num_samples)
        return batch

    def _compute(self, batch: Sequence[QueuedRequest]) -> Sequence[PredictResult | Exception]:
        start_s = time.thread_time()
        try:
            return self._predict([request for request, _ in batch])
        except Exception:  # one bad request must not make the other requests of its batch fail
            return [self._predict_alone(request) for request, _ in batch]
        finally:
            self._s_per_sample = (time.thread_time() - start_s) / sum(len(request.x) for request, _ in batch)

    def _predict_alone(self, request: PredictRequest) -> PredictResult | Exception:
        try:
            return self._predict([request])[0]
        except Exception as error:
            return error

    def close(self) -> None:
        """Waits for the thread to end."""
        self._thread.shutdown(wait=True)


def _resolve_futures(batch: Sequence[QueuedRequest], results: Sequence[PredictResult | Exception]) -> None:
    for (_, future), result in zip(batch, results, strict=True):
        if future.done():  # the caller has closed the connection
            continue
        if isinstance(result, Exception):
            future.set_exception(result)
        else:
            future.set_result(result)
