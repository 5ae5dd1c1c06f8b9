"""POST /predict: requests, refusals, errors and responses, without an HTTP library."""

import functools
import logging
import math
import time
from collections.abc import Mapping, Sequence
from typing import Any, Protocol
from urllib.parse import parse_qs

import orjson

from .micro_batcher import Late
from .request_samples import NOTHING, RequestSample, SharedProblem, parts_of
from .service import Answer, Service, shown_text

logger = logging.getLogger(__name__)

_NO_HEADERS: Mapping[str, str] = {}


class Exchange(Protocol):
    """A request that has arrived, and the way to its client.

    Attributes:
        query: of its URL.
        since: time, of `time.monotonic`, at which its header arrived.
    """

    query: bytes
    since: float

    def answer(self, status: int, content: bytes, headers: Mapping[str, str]) -> None:
        """Sends the response, JSON with a status and headers."""


class Rejected(Exception):
    """Raised for a request that is answered with an error.

    Attributes:
        status: HTTP status, 4xx or 503.
        reason: label for the metrics.
        headers: of the response.
    """

    def __init__(self, status: int, reason: str, message: str, headers: Mapping[str, str] = _NO_HEADERS) -> None:
        super().__init__(message)
        self.status, self.reason, self.headers = status, reason, headers


class Predictor:
    """Answers POST /predict: a sample or several to probabilities.

    A request takes a slot once it has arrived completely; one that would wait too long, or for a slot, is refused
    before it is parsed.

    Args:
        service: that predicts.
    """

    def __init__(self, service: Service) -> None:
        self._service, self._active = service, 0
        self._latency = functools.cache(lambda status: service.metrics.latency.labels("/predict", str(status)))
        self._rejected = functools.cache(service.metrics.rejected.labels)

    @property
    def request_bytes(self) -> int:
        """Limit of a body."""
        return self._service.limits.request_bytes

    def predict(self, request: Exchange, body: bytes, read_at: float) -> None:
        """Answers a request, at once or after its batch.

        Args:
            request: as above; it gets one answer.
            body: JSON.
            read_at: time since which it is handled.
        """
        try:
            self._submit(request, body, read_at)
        except Exception as error:
            self._answer_error(request, error)

    def reject_large(self, request: Exchange) -> None:
        """Refuses a request whose body exceeds the limit."""
        message = f"the body is too large, the limit is {self.request_bytes:,} bytes; split it into several requests"
        self._answer_error(request, Rejected(413, "too_large", message, {"Connection": "close"}))

    def _submit(self, request: Exchange, body: bytes, read_at: float) -> None:
        limits, unable = self._service.limits, self._service.cannot_predict()
        if unable:
            raise Rejected(503, "loading", f"{shown_text(unable)}; retry later", {"Retry-After": "1"})
        timeout = _timeout_ms(request.query, limits.timeout_ms) if request.query else limits.timeout_ms
        self._check_queue(timeout / 1000)
        samples, many = _samples(_parse(body), limits.samples)
        if not samples:
            self._answer(request, 200, {"version": self._service.version, "probabilities": []})
            return
        self._active += 1
        done = functools.partial(self._finish, request, many, timeout)
        self._service.predict(samples, done, read_at + timeout / 1000, read_at)

    def _check_queue(self, seconds: float) -> None:
        """Raises Rejected for a request that would have to wait longer than ``seconds``, or for a slot."""
        wait = self._service.expected_wait
        if self._active >= self._service.limits.concurrent_requests:
            raise _busy("busy", f"{self._active} requests are in progress, which is the limit", wait)
        if wait > seconds:
            raise _busy("queue", f"the requests before it take {1000 * wait:.0f} ms", wait)

    def _finish(self, request: Exchange, many: bool, timeout: float, answers: Sequence[Answer] | Exception) -> None:
        self._active -= 1
        try:
            if isinstance(answers, Late):
                raise _busy("late", f"no prediction could be made within {timeout:g} ms", 0)
            if isinstance(answers, Exception):
                raise answers
            results, version = [result for result, _ in answers], answers[0][1]
            for index, result in enumerate(results):
                if isinstance(result, str):
                    named = many and not isinstance(result, SharedProblem)
                    raise Rejected(400, "bad_sample", f"sample {index}: {result}" if named else result)
            found = {"probabilities": results} if many else {"probability": results[0]}
            self._answer(request, 200, {"version": version, **found})
        except Exception as error:
            self._answer_error(request, error)

    def _answer_error(self, request: Exchange, error: Exception) -> None:
        if isinstance(error, Rejected):
            self._rejected(error.reason).inc()
            self._answer(request, error.status, {"error": str(error)}, error.headers)
        else:
            logger.error("a request to predict failed", exc_info=error)
            self._answer(request, 500, {"error": "internal error; the log of the server shows it"})

    def _answer(
        self, request: Exchange, status: int, content: Mapping[str, Any], headers: Mapping[str, str] = _NO_HEADERS
    ) -> None:
        body = orjson.dumps(content)
        # Counted before the client can ask another worker for the metrics.
        self._latency(status).observe(time.monotonic() - request.since)
        request.answer(status, body, headers)


def _busy(reason: str, message: str, wait: float) -> Rejected:
    return Rejected(503, reason, f"{message}; retry later", {"Retry-After": str(max(1, math.ceil(wait)))})


def _timeout_ms(query: bytes, limit: float) -> float:
    """Milliseconds that a request may take: what the client gives, but at most the limit."""
    given = parse_qs(query.decode(errors="replace"), keep_blank_values=True).get("timeout_ms", [None])[-1]
    try:
        timeout = limit if given is None else float(given)
    except ValueError:
        timeout = math.nan
    if not timeout > 0:
        raise Rejected(400, "bad_timeout", f"timeout_ms must be a number above 0, got {given!r}")
    return min(timeout, limit)


def _parse(body: bytes) -> Any:
    try:
        return orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise Rejected(400, "bad_json", f"the body is not JSON: {error}") from None


def _samples(parsed: Any, limit: int) -> tuple[list[RequestSample], bool]:
    """The samples of a request, and whether they were given as a list, alone or with the fields that they share."""
    shared, found, many = parts_of(parsed)
    if shared is not NOTHING:
        _check("shared", shared)
    if len(found) > limit:
        message = f"a request has {len(found):,} samples, the limit is {limit:,}; split it into several requests"
        raise Rejected(413, "too_many_samples", message)
    for index, sample in enumerate(found):
        _check(f"sample {index}", sample)
    return [RequestSample(sample, shared) for sample in found], many


def _check(name: str, fields: Any) -> None:
    if not isinstance(fields, dict):
        message = f"{name} must be a JSON object of fields and their values, got {repr(fields)[:80]}"
        raise Rejected(400, "bad_sample", message)
