"""The process of a shadow: it predicts what the server has answered, and compares."""

import logging
import os
import signal
import socket
import time
from pathlib import Path

import orjson
import torch
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from cowrec.data_pipeline.files import PARTIAL
from cowrec.trainer.runtime.service_log import LogSettings, open_log

from ..request_samples import RequestSample, parts_of
from ..service import Result, Service
from .config import ShadowConfig
from .log import ShadowLog

logger = logging.getLogger(__name__)

_MAX_MESSAGE = 4 << 20
_REPORT_SECONDS = 1.0
_DIFFERENCES = (0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0)


def run(config: ShadowConfig, receiver: socket.socket, metrics_file: Path, log_settings: LogSettings) -> None:
    """Compares the requests that arrive until the server ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the server's, which then ends
    os.nice(10)
    torch.set_num_threads(1)
    open_log(log_settings, "%(asctime)s cowrec: shadow: %(message)s")
    service = Service(config.export_dir, config.follow, obeys_pin=False, key=config.key)
    service.load()
    if service.failure:
        logger.error("%s cannot be served: %s", config.export_dir, service.failure)
        return
    try:
        log = ShadowLog(config.log, config.log_bytes) if config.log else None
    except OSError as error:
        logger.error("the log cannot be written: %s", error)
        return
    comparison = _Comparison(service, log)
    receiver.settimeout(_REPORT_SECONDS)
    reported = 0.0
    while True:
        try:
            message = receiver.recv(_MAX_MESSAGE)
            if not message:
                return
            comparison.add(message)
        except TimeoutError:
            pass
        if time.monotonic() >= reported + _REPORT_SECONDS:
            comparison.report(metrics_file)
            reported = time.monotonic()


class _Comparison:
    def __init__(self, service: Service, log: ShadowLog | None) -> None:
        self._service, self._log = service, log
        self._registry = registry = CollectorRegistry()
        self._predictions = Counter("cowrec_shadow_predictions", "Samples predicted by both models.", registry=registry)
        self._sums = Counter(
            "cowrec_shadow_prediction_sum", "Sum of the predictions of these samples.", ["model"], registry=registry
        )
        self._difference = Histogram(
            "cowrec_shadow_absolute_difference",
            "Absolute difference of the two predictions.",
            buckets=_DIFFERENCES,
            registry=registry,
        )
        self._skipped = Counter(
            "cowrec_shadow_skipped", "Samples without a shadow's prediction.", ["reason"], registry=registry
        )
        self._ready = Gauge("cowrec_shadow_ready", "1 if the shadow's model is up to date.", registry=registry)
        self._version = Gauge("cowrec_shadow_version", "Published version of the shadow.", registry=registry)
        self._failing = False

    def add(self, message: bytes) -> None:
        """Predicts the samples of a message, counts and logs them; an error is logged, if the last message had none."""
        try:
            self._add(message)
            self._failing = False
        except Exception as error:  # the next request may be another
            self._skipped.labels("failed").inc()
            if not self._failing:
                logger.exception("a request could not be compared: %s", error)
            self._failing = True

    def report(self, metrics_file: Path) -> None:
        """Writes the metrics to a file, which always has a complete text."""
        self._ready.set(not self._service.not_ready())
        self._version.set(self._service.version)
        partial = metrics_file.with_name(metrics_file.name + PARTIAL)
        try:
            partial.write_bytes(generate_latest(self._registry))
            partial.replace(metrics_file)
        except OSError as error:
            logger.warning("the metrics cannot be written: %s", error)

    def _add(self, message: bytes) -> None:
        head, _, body = message.partition(b"\n")
        version, served = orjson.loads(head)
        shared, found, _ = parts_of(orjson.loads(body))
        samples = [RequestSample(each, shared) for each in found]
        if self._service.cannot_predict():
            self._skipped.labels("not_ready").inc(len(samples))
            return
        lines = []
        for sample, one, (other, own) in zip(samples, served, self._service.compute(samples), strict=True):
            if isinstance(other, str):
                self._skipped.labels("refused").inc()
                continue
            self._count(_main(one), _main(other))
            lines.append(
                {"time": time.time(), "sample_id": sample.fields.get("sample_id"), "served": one, "shadow": other,
                 "served_version": version, "shadow_version": own}
            )  # fmt: skip
        if self._log:
            self._log.write(lines)

    def _count(self, served: float, shadow: float) -> None:
        self._predictions.inc()
        self._sums.labels("served").inc(served)
        self._sums.labels("shadow").inc(shadow)
        self._difference.observe(abs(served - shadow))


def _main(result: Result) -> float:
    """The prediction that is compared: of several tasks, that of the first."""
    value = next(iter(result.values())) if isinstance(result, dict) else result
    return float(value)
