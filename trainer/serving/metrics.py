"""Prometheus metrics of a prediction service."""

from collections.abc import Callable, Iterator, Mapping

from prometheus_client import Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.registry import Collector

from ..runtime.metrics_registry import metrics_registry

SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
SAMPLES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 4096)

# Values that the service reports for each scrape.
GAUGES = {
    "ready": "1 if requests should be sent here.",
    "model_version": "Published version of the served model.",
    "model_step": "Training step of the served model.",
    "model_age_seconds": "Now minus the newest sample time.",
    "last_delta_age_seconds": "Time since a published version was last applied.",
    "following": "1 if a publication target is followed without problems, 0 with problems, NaN without a target.",
    "open_connections": "Open connections, also those of the health port.",
    "queued_requests": "Requests that have arrived and wait for their predictions.",
    "resident_ids": "Ids that have a row.",
}
COUNTERS = {
    "applied_rows": "Rows written by published versions.",
    "removed_rows": "Rows removed by published deltas.",
}


class ServiceMetrics:
    """Metrics of one service, in their own registry.

    Args:
        read: returns the current values of GAUGES and COUNTERS; NaN for unknown ones, absent ones are 0.
        read_unknown: returns the number of requested ids without a row of their own, by field.
    """

    content_type = CONTENT_TYPE_LATEST

    def __init__(self, read: Callable[[], Mapping[str, float]], read_unknown: Callable[[], Mapping[str, int]]) -> None:
        self._registry = registry = metrics_registry()
        self.latency = Histogram(
            "cowrec_request_seconds",
            "Time from a request's arrival to its response.",
            ["route", "status"],
            buckets=SECONDS,
            registry=registry,
        )
        self.predictions = Counter("cowrec_predictions", "Samples predicted.", registry=registry)
        self.batch_samples = Histogram(
            "cowrec_batch_samples", "Samples computed together.", buckets=SAMPLES, registry=registry
        )
        self.rejected = Counter("cowrec_rejected_requests", "Rejected requests.", ["reason"], registry=registry)
        self.deltas_applied = Counter("cowrec_deltas_applied", "Published versions applied.", registry=registry)
        self.deltas_refused = Counter("cowrec_deltas_refused", "Published versions refused.", registry=registry)
        self.delta_seconds = Histogram(
            "cowrec_delta_apply_seconds", "Time to apply a published version.", buckets=SECONDS, registry=registry
        )
        self._registry.register(_ServiceValues(read, read_unknown))

    def text(self) -> bytes:
        """The metrics in Prometheus' text format."""
        return generate_latest(self._registry)


class _ServiceValues(Collector):
    """Values that the service reports, read for each scrape."""

    def __init__(self, read: Callable[[], Mapping[str, float]], read_unknown: Callable[[], Mapping[str, int]]) -> None:
        self._read, self._read_unknown = read, read_unknown

    def collect(self) -> Iterator[Metric]:
        values = self._read()
        for name, description in GAUGES.items():
            yield GaugeMetricFamily(f"cowrec_{name}", description, value=values.get(name, 0))
        for name, description in COUNTERS.items():
            yield CounterMetricFamily(f"cowrec_{name}", description, value=values.get(name, 0))
        unknown = CounterMetricFamily(
            "cowrec_unknown_ids", "Requested ids without a row of their own.", labels=["field"]
        )
        for field, count in self._read_unknown().items():
            unknown.add_metric([field], count)
        yield unknown
