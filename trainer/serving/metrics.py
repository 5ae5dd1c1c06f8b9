"""Prometheus metrics of a prediction service."""

import time
from collections.abc import Callable, Iterator
from typing import Protocol

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.registry import Collector

SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
SAMPLES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 4096)


class State(Protocol):
    """State of the service that is read for each scrape; times in Unix seconds, NaN where there is none yet."""

    @property
    def version(self) -> int: ...

    @property
    def step(self) -> int: ...

    @property
    def sample_time(self) -> float: ...

    @property
    def applied_time(self) -> float: ...

    @property
    def following(self) -> float: ...

    def counters(self) -> dict[str, int]:
        """Counters of the model: ids without a row of their own, rows written and removed, ids that have a row."""
        ...


class ServiceMetrics:
    """Metrics of one service, in their own registry."""

    content_type = CONTENT_TYPE_LATEST

    def __init__(self, state: State) -> None:
        self._registry = registry = CollectorRegistry()
        self.latency = Histogram(
            "cowrec_request_seconds",
            "Time from a request's header to its response.",
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
        for name, help_, read in (
            ("cowrec_model_version", "Published version of the served model.", lambda: state.version),
            ("cowrec_model_step", "Training step of the served model.", lambda: state.step),
            ("cowrec_model_age_seconds", "Now minus the newest sample time.", lambda: _since(state.sample_time)),
            (
                "cowrec_last_delta_age_seconds",
                "Time since a published version was last applied.",
                lambda: _since(state.applied_time),
            ),
            (
                "cowrec_following",
                "1 if a publication target is followed without problems.",
                lambda: state.following,
            ),
        ):
            _gauge(registry, name, help_, read)
        registry.register(_ModelCounters(state))

    def text(self) -> bytes:
        """The metrics in Prometheus' text format."""
        return generate_latest(self._registry)


class _ModelCounters(Collector):
    """Counters that the model keeps itself, read for each scrape."""

    def __init__(self, state: State) -> None:
        self._state = state

    def collect(self) -> Iterator[Metric]:
        counts = self._state.counters()
        for name, help_ in (
            ("unknown_ids", "Requested ids without a row of their own."),
            ("applied_rows", "Rows written by published versions."),
            ("removed_rows", "Rows removed by published versions."),
        ):
            yield CounterMetricFamily(f"cowrec_{name}", help_, value=counts.get(name, 0))
        yield GaugeMetricFamily("cowrec_resident_ids", "Ids that have a row.", value=counts.get("resident_ids", 0))


def _gauge(registry: CollectorRegistry, name: str, help_: str, read: Callable[[], float]) -> None:
    Gauge(name, help_, registry=registry).set_function(read)


def _since(moment: float) -> float:
    return time.time() - moment
