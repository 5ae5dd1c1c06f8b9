"""Prometheus endpoint of an online run."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from wsgiref.types import StartResponse, WSGIEnvironment

    from prometheus_client.core import Metric

COUNTERS = {
    "samples": "Samples trained on, since the start of the run.",
    "steps": "Training steps, since the start of the run.",
    "batches_set_aside": "Batches that would have made the model non-finite.",
    "publication_failures": "Publications that could not be written.",
}
GAUGES = {
    "samples_per_second": "Samples per second of the steps, without waiting for the stream.",
    "reading_share": "Share of the busy time in which the first process reads and encodes samples.",
    "lag_seconds": "Now minus the newest sample time that was trained on.",
    "waiting_samples": "Samples that wait for their turn.",
    "window_auc": "Progressive AUC of the last complete window.",
    "window_logloss": "Progressive logloss of the last complete window.",
    "window_calibration": "Mean prediction over mean label of the last complete window.",
    "seconds_since_publication": "Time since a version was last written, or since the start.",
}
STREAM = "cowrec_online_stream_samples"
PATH = "/metrics"

Readings = Callable[[], tuple[Mapping[str, float], Mapping[str, int]]]
"""Returns values of `COUNTERS` and `GAUGES`, which may lack some, and the counters of the stream."""


@contextmanager
def metrics_endpoint(host: str, port: int, read: Readings) -> Iterator[int]:
    """Serves ``GET /metrics`` in a thread, and 404 for other paths; yields the port.

    Args:
        host: address to listen on.
        port: to listen on; 0 chooses a free one.
        read: called for each request, in another thread.

    Raises:
        ValueError: prometheus_client is not installed.
        OSError: it cannot listen there.
    """
    try:
        from prometheus_client import CollectorRegistry, start_http_server
        from prometheus_client.registry import Collector
    except ImportError as error:
        raise ValueError("online.metrics_port needs prometheus_client; pip install 'cowrec[online]'") from error

    class Values(Collector):
        def collect(self) -> Iterator["Metric"]:
            return _metrics(*read())

    registry = CollectorRegistry()
    registry.register(Values())
    try:
        server, thread = start_http_server(port, host, registry)
    except OSError as error:
        raise OSError(
            f"the metrics cannot be served on {host}:{port} ({error.strerror}); set online.metrics_port to another port"
        ) from error
    metrics_app = server.get_app()
    assert metrics_app

    def app(environ: "WSGIEnvironment", start_response: "StartResponse") -> Iterable[bytes]:
        if environ["PATH_INFO"] == PATH:
            return metrics_app(environ, start_response)
        start_response("404 Not Found", [("Content-Type", "text/plain; charset=utf-8")])
        return [f"the metrics are at {PATH}\n".encode()]

    server.set_app(app)
    try:
        yield server.server_port
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _metrics(values: Mapping[str, float], stream: Mapping[str, int]) -> Iterator["Metric"]:
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

    for name, description in COUNTERS.items():
        if name in values:
            yield CounterMetricFamily(f"cowrec_online_{name}", description, value=values[name])
    for name, description in GAUGES.items():
        if name in values:
            yield GaugeMetricFamily(f"cowrec_online_{name}", description, value=values[name])
    counts = CounterMetricFamily(STREAM, "Samples of the stream, by what happened to them.", labels=["kind"])
    for name, count in stream.items():
        counts.add_metric([name], count)
    yield counts
