"""The metrics of the service in the format of Prometheus."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

CONTENT_TYPE = CONTENT_TYPE_LATEST
SAMPLE_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)


class Metrics:
    """The metrics of one service. They have their own registry, because one process may have several services."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        self.requests = Counter(
            "shoal_requests", "Number of requests that were answered.", ["path", "status"], registry=registry
        )
        self.request_seconds = Histogram(
            "shoal_request_seconds",
            "Seconds from the first byte of a request to the last byte of its response.",
            ["path"],
            registry=registry,
        )
        self.predicted_samples = Counter(
            "shoal_samples",
            "Number of predicted samples, by the model that predicted them.",
            ["expert"],
            registry=registry,
        )
        self.abstained_samples = Counter(
            "shoal_abstained_samples", "Number of samples whose confidence was below the threshold.", registry=registry
        )
        self.batch_samples = Histogram(
            "shoal_batch_samples", "Number of samples in a batch.", buckets=SAMPLE_BUCKETS, registry=registry
        )
        self.queued_samples = Gauge(
            "shoal_queued_samples", "Number of samples that wait for a batch.", registry=registry
        )
        self.model_round = Gauge(
            "shoal_model_round", "Training round of the serving models, or -1 before the first one.", registry=registry
        )
        self.model_swaps = Counter(
            "shoal_model_swaps", "Number of times that newer models were loaded.", registry=registry
        )
        self.model_round.set(-1)

    def text(self) -> bytes:
        """Returns the metrics in the text format of Prometheus."""
        return generate_latest(self.registry)
