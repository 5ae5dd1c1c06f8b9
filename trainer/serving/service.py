"""A prediction service: a model that answers requests while newer versions of it are applied."""

import asyncio
import gc
import logging
import math
import time
from collections import deque
from collections.abc import Callable, Sequence, Sized
from dataclasses import dataclass
from itertools import repeat
from pathlib import Path
from typing import Any

import numpy as np

from cowrec.data_pipeline import SampleCodec
from cowrec.errors import UserError

from ..publishing.blob import Blob
from ..publishing.follower import VersionFollower
from .metrics import ServiceMetrics
from .request_samples import RequestSample, encode_samples
from .served_model import ServedModel

logger = logging.getLogger(__name__)

BATCH = 1024
"""Samples computed together at most, unless a single request may have more."""

_MANY_SAMPLES, _FIRST_SAMPLES = 256, 100
_NOT_FINITE = "the prediction is not a finite number; correct the numbers of the sample, some are too large"

Result = float | dict[str, float] | str
"""The click probability of a sample, or that of each of several tasks by its label; or an error message."""

Answer = tuple[Result, int]
"""A result and the version that made it."""

_Call = tuple[Sequence[Any], float, "asyncio.Future[Sequence[Any]]"]


@dataclass(frozen=True)
class Limits:
    """Limits of a service; requests beyond them are refused.

    Attributes:
        samples: largest number in one request.
        timeout_ms: milliseconds from the arrival of a request to its prediction; a request that has waited longer is
            refused, and not computed.
        concurrent_requests: largest number of requests that have arrived and wait for their result.
        request_seconds: time for the headers of a request to arrive, and for the body.
        connections: largest number of open connections; further ones get one refusal each, and answers about health.
        idle_seconds: time after which a connection without a request is closed, longer than proxies keep one, so that
            they close it and not the server.
        header_bytes: largest size of the headers of a request.
    """

    samples: int = 1000
    timeout_ms: float = 1000.0
    concurrent_requests: int = 256
    request_seconds: float = 10.0
    connections: int = 2048
    idle_seconds: float = 75.0
    header_bytes: int = 32 << 10

    @property
    def request_bytes(self) -> int:
        """Size of a request's body: 1 KiB for each sample, at least 1 MiB."""
        return max(1 << 20, self.samples << 10)


class Service:
    """Answers prediction requests; server.py is its HTTP interface.

    Args:
        export_dir: folder of an exported model.
        follow: URL of a publication target whose versions are applied as they are published; None for none.
        max_age: seconds since the publication of the served version, after which the service is not ready; None for any
            age.

    Raises:
        ValueError: ``follow`` is not the URL of a publication target, or ``max_age`` is not above 0 or without it.

    Attributes:
        loaded: whether the model is loaded and compiled.
        failure: exception raised while it was loaded, if any.
        stops: whether the server was asked to stop, so that no more requests should be sent here.
        open_connections: open connections of each server of the service.
    """

    def __init__(
        self, export_dir: Path, follow: str | None = None, limits: Limits | None = None, max_age: float | None = None
    ) -> None:
        if max_age is not None and not (follow and max_age > 0):
            raise UserError(f"--max-age must be above 0 seconds and needs --follow, got {max_age}")
        self.limits, self._max_age = limits or Limits(), max_age
        self.metrics = ServiceMetrics(self._values, lambda: self._model.unknown_by_field() if self.loaded else {})
        self._predicted = 0
        self.open_connections = list[Sized]()
        self.loaded = self.stops = False
        self.failure: Exception | None = None
        self._export_dir = export_dir
        self._model: ServedModel
        self.batcher = MicroBatcher(self.compute, max(BATCH, self.limits.samples))
        self._follower = VersionFollower(follow, self._apply, self.metrics.deltas_refused.inc) if follow else None

    def load(self) -> None:
        """Loads the model and predicts, so that everything is compiled before the service is ready."""
        try:
            self._model = ServedModel.load(self._export_dir)
            self._codec = SampleCodec.load(self._export_dir)
            for samples in (1, 1, _MANY_SAMPLES):  # few are encoded and computed in another way than many
                self._computed([RequestSample(dict.fromkeys(self._codec.columns))] * samples)
            self._model.unknown_ids[:] = 0
            # What is loaded is never garbage; looking through it again and again would stop requests for 0.3 s each.
            gc.collect()
            gc.freeze()
        except Exception as error:  # raised by `serve`, in another thread
            self.failure = error
            return
        self.loaded = True
        following = f", follows {self._follower.url}" if self._follower else ""
        logger.info("%s is served: step %d%s", self._export_dir, self._model.state.step, following)
        if self._follower:
            self._follower.start()

    def close(self) -> None:
        if self._follower:
            self._follower.close()
        gc.unfreeze()  # libraries report what is not freed when the process ends

    @property
    def version(self) -> int:
        """Published version of the served model; 0 for the export itself."""
        return self._model.state.version if self.loaded else 0

    def cannot_predict(self) -> str:
        """Why requests cannot be answered yet; empty if they can."""
        if not self.loaded:
            return "the model is still loading"
        if self._follower and not self._follower.caught_up:
            return f"the published versions have not been applied yet. {self._follower.problem}".rstrip()
        return ""

    def not_ready(self) -> str:
        """Why no requests should be sent here; empty if they should."""
        if problem := self.cannot_predict():
            return problem
        if self.stops:
            return "the server is stopping"
        age = _seconds_since(self._follower.created_time) if self._follower else 0.0
        if self._max_age is None or age <= self._max_age:
            return ""
        return f"the newest version was published {age:.0f} seconds ago, --max-age is {self._max_age:g}"

    def health(self) -> dict[str, Any]:
        """Status of the service and of its model; times in seconds."""
        if not self.loaded:
            return {"status": "loading", "ready": False, "problem": self.cannot_predict()}
        not_ready = self.not_ready()
        problem = not_ready or (self._follower.problem if self._follower else "")
        return {
            "status": "waiting" if self.cannot_predict() else "degraded" if problem else "ok",
            "ready": not not_ready,
            "problem": problem,
            "version": self.version,
            "step": self._model.state.step,
            "sample_time": self._model.state.sample_time,
            "age_seconds": _seconds_since(self._model.state.sample_time),
        }

    def compute(self, samples: Sequence[RequestSample]) -> Sequence[Answer]:
        """The result of each sample, computed in the caller's thread, and the version, which is the same for all."""
        answers, predicted = self._computed(samples)
        if predicted:
            self.metrics.predictions.inc(predicted)
            self.metrics.batch_samples.observe(predicted)
            before, self._predicted = self._predicted, self._predicted + predicted
            if before < _FIRST_SAMPLES <= self._predicted:
                self._tell_unknown()
        return answers

    def _tell_unknown(self) -> None:
        """Warns once of fields whose ids are mostly unknown, as where requests write them in another way."""
        unknown = self._model.unknown_by_field()
        if often := [f"{field} {count:,}" for field, count in unknown.items() if 2 * count > self._predicted]:
            logger.warning(
                "the first %s samples have ids that training did not have: %s; check that requests write them as the"
                " training data did",
                f"{self._predicted:,}",
                ", ".join(often),
            )

    def _computed(self, samples: Sequence[RequestSample]) -> tuple[Sequence[Answer], int]:
        """The answers, and the number of predictions among them."""
        version = self._model.state.version
        block, problems = encode_samples(self._codec, samples)
        results: list[Result] = [*problems]
        good = [index for index, problem in enumerate(problems) if not problem]
        predicted = 0
        if block is not None and good:
            labels = self._model.schema.labels
            probabilities, version = self._model.predict_with_version(block)
            finite: Any = np.isfinite(probabilities.reshape(len(good), -1)).all(axis=1)
            found = probabilities.tolist()
            if len(labels) > 1:
                found = [dict(zip(labels, tasks, strict=True)) for tasks in found]
            predicted = int(finite.sum())
            if predicted < len(good):
                found = [one if is_finite else _NOT_FINITE for one, is_finite in zip(found, finite, strict=True)]
            if len(good) == len(results):
                results = found
            else:
                for index, one in zip(good, found, strict=True):
                    results[index] = one
        return [*zip(results, repeat(version))], predicted

    def _apply(self, blob: Blob) -> None:
        with self.metrics.delta_seconds.time():
            self._model.apply(blob)
        self.metrics.deltas_applied.inc()

    def _values(self) -> dict[str, float]:
        """Values of metrics.py's GAUGES and COUNTERS."""
        follower = self._follower
        ages = {
            "ready": float(not self.not_ready()),
            "model_age_seconds": _seconds_since(self._model.state.sample_time if self.loaded else None),
            "last_delta_age_seconds": _seconds_since(follower.applied_time if follower else None),
            "following": float(not follower.problem) if follower else math.nan,
            "open_connections": sum(map(len, self.open_connections)),
            "queued_requests": self.batcher.calls,
        }
        if not self.loaded:
            return ages
        return {**ages, "model_version": self.version, "model_step": self._model.state.step, **self._model.counters()}


class Late(Exception):
    """Raised for a call that was due before its batch began."""


class MicroBatcher:
    """Answers the calls of one event loop in batches, without a fixed wait.

    A batch is computed in the event loop's own thread, as soon as the loop has read what has arrived; later requests
    wait in the sockets for the next batch. A separate thread would compete with the loop for the interpreter lock.

    Args:
        compute: computes the results of a batch of items, in their order.
        max_items: largest number of items in a batch.
    """

    def __init__(self, compute: Callable[[Sequence[Any]], Sequence[Any]], max_items: int) -> None:
        self._compute, self._max_items = compute, max_items
        self._queue: deque[_Call] = deque()

    @property
    def calls(self) -> int:
        """Calls that wait."""
        return len(self._queue)

    def submit(self, items: Sequence[Any], due: float = math.inf) -> "asyncio.Future[Sequence[Any]]":
        """Computes the results of up to ``max_items`` items in one batch, later.

        ``due`` is the time, of `time.monotonic`, at which the batch must have begun; otherwise the result is Late.
        """
        assert len(items) <= self._max_items
        loop = asyncio.get_running_loop()
        if not self._queue:
            loop.call_soon(self._run_batch, loop)
        future: asyncio.Future[Sequence[Any]] = loop.create_future()
        self._queue.append((items, due, future))
        return future

    def _run_batch(self, loop: asyncio.AbstractEventLoop) -> None:
        calls: list[tuple[Sequence[Any], asyncio.Future[Sequence[Any]]]] = []
        total, now = 0, time.monotonic()
        while self._queue and total + len(self._queue[0][0]) <= self._max_items:
            items, due, future = self._queue.popleft()
            if future.done():  # its client has gone
                continue
            if due >= now:
                calls.append((items, future))
                total += len(items)
            else:
                future.set_exception(Late())
        if self._queue:  # the next batch, after the loop has handled other events
            loop.call_soon(self._run_batch, loop)
        if calls:
            self._answer(calls)

    def _answer(self, calls: Sequence[tuple[Sequence[Any], "asyncio.Future[Sequence[Any]]"]]) -> None:
        try:
            results = self._compute([item for items, _ in calls for item in items])
        except Exception as error:
            if len(calls) == 1:
                calls[0][1].set_exception(error)
            else:  # one of them must not fail the others
                for call in calls:
                    self._answer([call])
            return
        start = 0
        for items, future in calls:
            future.set_result(results[start : start + len(items)])
            start += len(items)


def _seconds_since(moment: float | None) -> float:
    return math.nan if moment is None else time.time() - moment
