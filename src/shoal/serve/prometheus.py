"""What the service counts, in Prometheus's format."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

CONTENT_TYPE = CONTENT_TYPE_LATEST
SAMPLE_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)


class Metrics:
    """A registry of its own: several services may live in one process."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        r = self.registry
        self.requests = Counter("shoal_requests", "Answered requests.", ["path", "status"], registry=r)
        self.request_seconds = Histogram(
            "shoal_request_seconds", "From the first byte to the last.", ["path"], registry=r
        )
        self.predicted_samples = Counter(
            "shoal_rows", "Answered rows, by the model that answered.", ["expert"], registry=r
        )
        self.abstained_samples = Counter("shoal_abstained_rows", "Rows below the threshold of confidence.", registry=r)
        self.batch_samples = Histogram("shoal_batch_rows", "Rows of one pass.", buckets=SAMPLE_BUCKETS, registry=r)
        self.queued_samples = Gauge("shoal_queued_rows", "Rows that wait for a pass.", registry=r)
        self.model_round = Gauge("shoal_model_round", "After which the models were that are served, or -1.", registry=r)
        self.model_swaps = Counter("shoal_model_swaps", "Newer models that were taken up.", registry=r)
        self.model_round.set(-1)

    def text(self) -> bytes:
        return generate_latest(self.registry)
