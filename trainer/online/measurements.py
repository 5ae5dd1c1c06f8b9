"""Measurements of an online run: progressive quality, samples and speed, logged, reported and served to Prometheus."""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from math import nan
from pathlib import Path
from socket import AF_INET, AF_INET6
from socketserver import ThreadingMixIn
from threading import Thread
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

import numpy as np
import pyarrow as pa
import torch
from pyarrow import feather
from torch import Tensor

from cowrec.data_pipeline import SampleStream, StreamBatch
from cowrec.data_pipeline.codec import TIME_COLUMN
from cowrec.data_pipeline.dataset.schema import LABEL, SAMPLE_WEIGHT
from cowrec.data_pipeline.streams.position import LEFT_OUT
from cowrec.errors import UserError

from ..config.sections import seconds
from ..measures.quality import Samples, measure
from ..runs.metrics_log import MetricsLog
from ..training.active_run import ActiveRun
from .publication import OnlinePublication

WINDOW_FILE = "window.arrow"
COUNTERS = {
    "samples": "Samples trained on, since the start of the run.",
    "steps": "Training steps, since the start of the run.",
    "batches_set_aside": "Batches that would have made the model non-finite.",
    "publication_failures": "Publications that could not be written.",
    "snapshot_failures": "Snapshots that could not be written, since the process started.",
}
GAUGES = {
    "samples_per_second": "Samples per second of the steps, without waiting for the stream.",
    "reading_share": "Share of the busy time in which the first process reads and encodes samples.",
    "lag_seconds": "Now minus the newest sample time that was trained on.",
    "waiting_samples": "Samples that wait for their turn.",
    "window_auc": "Progressive AUC of the last complete window.",
    "window_logloss": "Progressive logloss of the last complete window.",
    "window_calibration": "Mean prediction over mean label of the last complete window.",
    "seconds_since_snapshot": "Time since a snapshot was last complete, or since the start.",
    "waits_for_correction": "1 while no sample is taken, as too many are malformed.",
    "seconds_since_publication": "Time since a version was last written, or since the start.",
}
LABELLED = {
    "stream_samples": ("kind", "Samples of the stream, by what happened to them."),
    "missing_values": ("field", "Samples of the stream without a value of a field, since the process started."),
    "usual_missing_share": ("field", "Share of the data set's samples without a value of a field."),
}
"""Metrics with a label, the name of the label, and their descriptions; the last one is a gauge."""
OFTEN, FEWEST = 0.2, 100
"""Share by which missing values exceed the usual one, and samples, for which a field is warned of."""

Readings = Callable[[], tuple[Mapping[str, float], Mapping[str, Mapping[str, float]]]]
"""Returns values of `COUNTERS` and `GAUGES`, which may lack some, and those of `LABELLED` by their labels."""


class Measurements:
    """What an online run has measured so far; all but the samples and their speed on the first process.

    Attributes:
        samples: number of samples trained on since the start of the run.
        trained_seconds: time that the steps took.
        reading_seconds: time that :class:`Turns` has counted since the process started.
        turned_at: when a turn of the run last began, by the monotonic clock.
        quality, windows: of the open window, and of those that were closed since the process started.
    """

    def __init__(self, run: ActiveRun) -> None:
        self._run = run
        self.samples = 0
        self.trained_seconds = self.reading_seconds = self._seconds_before = 0.0
        self.windows = list[WindowQuality]()
        self.turned_at = time.monotonic()
        self.quality = ProgressiveQuality(seconds(run.config.online.window, "online.window"))
        self._reported, self._reported_at = dict[str, int](), time.monotonic()
        """What had arrived from the stream at the last report of it."""
        self._usual, self._missing = dict[str, float](), dict[str, int]()
        """Shares of missing values in the data set, and the missing values at the last report."""

    @property
    def samples_per_second(self) -> float:
        """Samples per second of the steps, without waiting for the stream; NaN before the first step."""
        return self.samples / self.trained_seconds if self.trained_seconds else nan

    @property
    def reading_share(self) -> float:
        """Share of the busy time since the process started in which the first process read and encoded samples."""
        busy = self.reading_seconds + self.trained_seconds - self._seconds_before
        return self.reading_seconds / busy if busy else nan

    def resume(self, samples: int, trained_seconds: float) -> None:
        """Continues from the counts of a checkpoint."""
        self.samples, self.trained_seconds = samples, trained_seconds
        self._seconds_before = trained_seconds

    def start(self, stream: SampleStream | None, usual: Mapping[str, float]) -> None:
        """Begins to report what arrives from the stream, of which some may have arrived before the run was resumed.

        ``usual`` has the share of samples without a value in the data set, by field.
        """
        self._usual = dict(usual)
        self._reported, self._reported_at = stream.counters if stream else {}, time.monotonic()

    def has_trained(self, samples: int, seconds: float) -> None:
        self.samples += samples
        self.trained_seconds += seconds

    def add(self, arrived: StreamBatch, logits: Tensor, log: MetricsLog) -> None:
        """Adds the predictions for a batch that was trained on, [B]; on the first process."""
        names = [LABEL, TIME_COLUMN, *[SAMPLE_WEIGHT] * (SAMPLE_WEIGHT in arrived.table.column_names)]
        columns = (torch.from_numpy(arrived.table[name].to_numpy().copy()) for name in names)
        for window in self.quality.add(logits, *columns):
            self._write_window(log, window)

    def _write_window(self, log: MetricsLog, window: "WindowQuality") -> None:
        log.write("window", self._run.steps, **asdict(window))
        self.windows.append(window)
        self._run.say(str(window))

    def write(self, log: MetricsLog, stream: SampleStream | None) -> None:
        """Writes the metrics since the last call; all processes call together, the first one with the stream."""
        run = self._run
        loss, steps, speed = run.checked_loss(), run.steps, self.samples_per_second
        values = {"loss": loss, "samples_per_second": speed, "reading_share": self.reading_share}
        log.write("train", steps, **values, samples=self.samples)
        if stream:
            log.write("stream", steps, **stream.counters, batches_set_aside=run.state.set_aside)
        run.write_statistics(log)

    def finish(self, log: MetricsLog, stream: SampleStream | None) -> None:
        """Closes the open window, if it has samples, and writes everything; all processes call together."""
        if not self.quality.is_empty:
            self._write_window(log, self.quality.close())
        self.write_stream(log, stream, even_if_not_due=True)
        self.write(log, stream)

    def write_stream(self, log: MetricsLog, stream: SampleStream | None, *, even_if_not_due: bool = False) -> None:
        """Logs what arrived since the last report, if anything did, and warns of samples that were left out.

        Reports are due every `online.report_seconds`, also while nothing is trained on.
        """
        is_due = even_if_not_due or time.monotonic() - self._reported_at >= self._run.config.online.report_seconds
        if stream is None or not is_due:
            return
        counters, run = stream.counters, self._run
        new = {name: value - self._reported.get(name, 0) for name, value in counters.items()}
        missing, before = dict(stream.missing), self._missing
        self._reported, self._missing, self._reported_at = counters, missing, time.monotonic()
        if not any(new.values()):
            return
        log.write("stream", run.steps, **counters, batches_set_aside=run.state.set_aside)
        left_out = ", ".join(f"{new[name]:,} {name}" for name in LEFT_OUT if new[name])
        if left_out:
            run.warn(f"warning: of the last {new['samples']:,} samples some were left out: {left_out}")
        count = new["samples"] - new["malformed"]
        shares = {name: (value - before.get(name, 0)) / max(1, count) for name, value in missing.items()}
        often = [
            f"{name} in {100 * share:.1f} % (of the data set {100 * self._usual[name]:.1f} %)"
            for name, share in shares.items()
            if count >= FEWEST and share > self._usual.get(name, 1.0) + OFTEN
        ]
        if often:
            run.warn(
                f"warning: the last {count:,} samples lack values of {', '.join(often)}; has a field another name?"
            )

    def readings(
        self, stream: SampleStream, publication: OnlinePublication | None
    ) -> tuple[dict[str, float], dict[str, Mapping[str, float]]]:
        """Values for the endpoint of metrics, which calls it in another thread."""
        values = {
            "samples": self.samples,
            "steps": self._run.steps,
            "batches_set_aside": self._run.state.set_aside,
            "samples_per_second": self.samples_per_second,
            "reading_share": self.reading_share,
            "waiting_samples": len(stream.position.waiting),
            "snapshot_failures": self._run.checkpoints.failures,
            "seconds_since_snapshot": time.monotonic() - self._run.checkpoints.sealed_at,
            "waits_for_correction": float(stream.waits_for_correction),
        }
        if self.quality.newest_time:
            values["lag_seconds"] = time.time() - self.quality.newest_time
        if self.windows:
            last = self.windows[-1]
            values |= {"window_auc": last.auc, "window_logloss": last.logloss, "window_calibration": last.calibration}
        labelled: dict[str, Mapping[str, float]] = {
            "stream_samples": stream.counters,
            "missing_values": dict(stream.missing),
            "usual_missing_share": self._usual,
        }
        return values | (publication.readings() if publication else {}), labelled

    def report(self, stream: SampleStream | None) -> dict[str, Any]:
        assert stream is not None
        return {
            "samples": self.samples,
            "samples_per_second": self.samples_per_second,
            "reading_share": self.reading_share,
            "windows": [asdict(window) for window in self.windows],
            "stream": stream.counters,
        }


@dataclass(frozen=True)
class WindowQuality:
    """Quality of the predictions of one window, which begins at ``start``, Unix time; measures of :class:`Quality`."""

    start: int
    samples: int
    auc: float
    logloss: float
    calibration: float
    ctr: float

    def __str__(self) -> str:
        return (
            f"{datetime.fromtimestamp(self.start, UTC):%Y-%m-%d %H:%M}  {self.samples:,} samples  progressive AUC"
            f" {self.auc:.4f}  logloss {self.logloss:.4f}  calibration {self.calibration:.3f}"
        )


class ProgressiveQuality:
    """Collects predictions and computes a window's quality once a sample of a later window arrives.

    A sample that arrives after its window was closed counts in the open window. So that memory and snapshots stay
    small, a window is also closed, and goes on as another one, after ``most`` samples. ``window`` is a length in
    seconds.
    """

    def __init__(self, window: int, most: int = 1 << 22):
        self._window, self._most, self._held = window, most, 0
        self.newest_time = 0
        self._open: int | None = None
        self._parts: list[Samples] = []
        """The samples of the open window, logits as float64."""

    def add(
        self, logits: Tensor, labels: Tensor, times: Tensor, weights: Tensor | None = None
    ) -> Iterator[WindowQuality]:
        """Adds a batch's logits, labels, times and weights, each [B]; yields the windows that it closes."""
        samples = Samples(logits.detach().double(), labels.detach(), weights).map(Tensor.cpu)
        self.newest_time = max(self.newest_time, int(times.max()))
        windows = torch.div(times.cpu(), self._window, rounding_mode="floor")
        if self._open is not None:
            windows = windows.clamp_min(self._open)
        for window in windows.unique().tolist():
            if self._open is not None and window > self._open and not self.is_empty:
                yield self.close()
            self._open = window
            own = windows == window
            self._parts.append(samples.where(own))
            self._held += int(own.sum())
            if self._held >= self._most:
                yield self.close()

    def close(self) -> WindowQuality:
        """Closes the open window, which has samples, and computes its quality."""
        assert self._open is not None
        quality = measure(self._samples())
        self._parts, self._held = [], 0
        return WindowQuality(
            self._open * self._window, quality.rows, quality.auc, quality.logloss, quality.calibration, quality.ctr
        )

    @property
    def is_empty(self) -> bool:
        return not self._parts

    def _samples(self) -> Samples:
        logits, label, weight, _ = zip(*self._parts, strict=True)
        return Samples(torch.cat(logits), torch.cat(label), None if weight[0] is None else torch.cat(weight))

    def frozen(self) -> pa.Table:
        """The open window and the newest time, to be saved in a checkpoint later."""
        samples = Samples(torch.empty(0), torch.empty(0)) if self.is_empty else self._samples()
        table = pa.table(
            {"logit": samples.logits.numpy().astype(np.float64), "label": samples.label.numpy().astype(np.float32)}
        )
        if samples.weight is not None:
            table = table.append_column("weight", pa.array(samples.weight.numpy()))
        opened = -1 if self._open is None else self._open
        return table.replace_schema_metadata({"open": str(opened), "newest": str(self.newest_time)})

    def load(self, folder: Path) -> None:
        """Restores the window and the newest time of a checkpoint."""
        table = feather.read_table(folder / WINDOW_FILE, memory_map=False)
        start = int(table.schema.metadata[b"open"])
        self._open = None if start < 0 else start
        self.newest_time = int(table.schema.metadata[b"newest"])
        columns = [torch.from_numpy(column.to_numpy().copy()) for column in table.columns]  # in the order of Samples
        self._parts = [Samples(*columns)] if len(table) else []
        self._held = len(table)


@contextmanager
def metrics_endpoint(host: str, port: int, read: Readings, is_alive: Callable[[], bool]) -> Iterator[int]:
    """Serves ``GET /metrics`` and ``GET /livez`` in a thread; yields the port.

    ``read`` and ``is_alive`` are called for each request, in that thread; ``/livez`` is 503 if the run is not alive.

    Raises ValueError: prometheus_client is not installed; OSError: it cannot listen there.
    """
    try:
        from prometheus_client import make_wsgi_app
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
        from prometheus_client.registry import Collector

        from ..runtime.metrics_registry import metrics_registry
    except ImportError as error:
        raise UserError("online.metrics_port needs prometheus_client; pip install 'cowrec[online]'") from error

    class Values(Collector):
        def collect(self) -> Iterator[Metric]:
            values, labelled = read()
            for family, described in ((CounterMetricFamily, COUNTERS), (GaugeMetricFamily, GAUGES)):
                for name, description in described.items():
                    if name in values:
                        yield family(f"cowrec_online_{name}", description, value=values[name])
            for name, (label, description) in LABELLED.items():
                kind = GaugeMetricFamily if name == "usual_missing_share" else CounterMetricFamily
                metric = kind(f"cowrec_online_{name}", description, labels=[label])
                for value_of, value in labelled[name].items():
                    metric.add_metric([value_of], value)
                yield metric

    registry = metrics_registry()
    registry.register(Values())
    metrics = make_wsgi_app(registry)

    def answer(environ: dict[str, Any], start_response: Callable[..., Any]) -> Any:
        if environ["PATH_INFO"] != "/livez":
            return metrics(environ, start_response)
        alive = is_alive()
        start_response("200 OK" if alive else "503 Service Unavailable", [("Content-Type", "application/json")])
        return [b'{"status": "%s"}\n' % (b"alive" if alive else b"stuck")]

    try:
        server = make_server(host, port, answer, _Server, _Handler)
    except OSError as error:
        raise OSError(
            f"the metrics cannot be served on {host}:{port} ({error.strerror}); set online.metrics_port to another port"
        ) from error
    thread = Thread(target=server.serve_forever, name="cowrec-metrics", daemon=True)
    thread.start()
    try:
        yield server.server_port
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True

    def __init__(self, address: tuple[str, int], handler: Any) -> None:
        self.address_family = AF_INET6 if ":" in address[0] else AF_INET
        super().__init__(address, handler)


class _Handler(WSGIRequestHandler):
    def log_message(self, *_: Any) -> None:
        """Logs nothing of requests."""
