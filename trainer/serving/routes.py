"""HTTP routes of a prediction service: requests, limits, errors and responses."""

import asyncio
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import orjson
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Lifespan

from .micro_batcher import Late
from .service import Service, shown_text

Handler = Callable[[Request], Awaitable[Response]]


class Rejected(Exception):
    """Raised for a request that is answered with an error.

    Attributes:
        status: HTTP status, 4xx or 503.
        reason: label for the metrics.
        headers: of the response.
    """

    def __init__(self, status: int, reason: str, message: str, headers: dict[str, str] | None = None) -> None:
        super().__init__(message)
        self.status, self.reason, self.headers = status, reason, headers


def health_app(service: Service) -> Starlette:
    """Creates the application of GET /livez, /readyz, /health and /metrics."""
    return _app(_routes(service))


def service_app(service: Service, stop: Callable[[], None]) -> Starlette:
    """Creates the application: that of `health_app`, and POST /predict.

    The service loads while the first requests arrive; ``stop`` is called if loading fails.
    """

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        loading = asyncio.create_task(_load(service, stop))
        try:
            yield
        finally:
            await loading
            await asyncio.to_thread(service.close)

    predict = Route("/predict", _timed(service, "/predict", _Predict(service)), methods=["POST"])
    return _app([predict, *_routes(service)], lifespan)


def _routes(service: Service) -> list[Route]:
    return [
        Route(path, _timed(service, path, handler), methods=["GET"])
        for path, handler in (
            ("/livez", _livez),
            ("/readyz", lambda request: _readyz(service)),
            ("/health", lambda request: _health(service)),
            ("/metrics", lambda request: _metrics(service)),
        )
    ]


def _app(routes: list[Route], lifespan: Lifespan[Starlette] | None = None) -> Starlette:
    app = Starlette(routes=routes, lifespan=lifespan, exception_handlers={HTTPException: _http_error})
    app.router.redirect_slashes = False  # the redirection would go to the host that the client names
    return app


async def _load(service: Service, stop: Callable[[], None]) -> None:
    await asyncio.to_thread(service.load)
    if service.failure:
        stop()


class _Predict:
    """POST /predict: a sample or a list of samples to probabilities."""

    def __init__(self, service: Service) -> None:
        self._service, self._active = service, 0

    async def __call__(self, request: Request) -> Response:
        limits = self._service.limits
        unable = self._service.cannot_predict()
        if unable:
            raise Rejected(503, "loading", f"{shown_text(unable)}; retry later", {"Retry-After": "1"})
        seconds = _timeout_ms(request.query_params.get("timeout_ms"), limits.timeout_ms) / 1000
        body = await _body(request, limits.request_bytes)
        due = time.monotonic() + seconds
        self._check_queue(seconds)  # a request takes a slot once it has arrived completely
        self._active += 1
        try:
            parsed = _parse(body)
            samples = parsed if isinstance(parsed, list) else [parsed]
            _check(samples, limits.samples)
            results = await self._service.predict(samples, due) if samples else []
        except Late:
            raise _busy("late", f"no prediction could be made within {1000 * seconds:g} ms", 0) from None
        finally:
            self._active -= 1
        for index, result in enumerate(results):
            if isinstance(result, str):
                raise Rejected(400, "bad_sample", result if samples is not parsed else f"sample {index}: {result}")
        response: dict[str, Any] = {"version": self._service.version}
        if samples is parsed:
            response["probabilities"] = results
        else:
            response["probability"] = results[0]
        return _json(200, response)

    def _check_queue(self, seconds: float) -> None:
        """Raises Rejected for a request that would have to wait longer than ``seconds``, or for a slot."""
        wait = self._service.expected_wait
        if self._active >= self._service.limits.concurrent_requests:
            raise _busy("busy", f"{self._active} requests are in progress, which is the limit", wait)
        if wait > seconds:
            raise _busy("queue", f"the requests before it take {1000 * wait:.0f} ms", wait)


def _busy(reason: str, message: str, wait: float) -> Rejected:
    return Rejected(503, reason, f"{message}; retry later", {"Retry-After": str(max(1, math.ceil(wait)))})


def _timeout_ms(given: str | None, limit: float) -> float:
    """Milliseconds that a request may take: what the client gives, but at most the limit."""
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


def _check(samples: list[Any], limit: int) -> None:
    if len(samples) > limit:
        message = f"a request has {len(samples):,} samples, the limit is {limit:,}; split it into several requests"
        raise Rejected(413, "too_many_samples", message)
    for index, sample in enumerate(samples):
        if not isinstance(sample, dict):
            shown = repr(sample)[:80]
            message = f"sample {index} must be a JSON object of fields and their values, got {shown}"
            raise Rejected(400, "bad_sample", message)


async def _body(request: Request, limit: int) -> bytes:
    """Reads the request's body. Raises Rejected if it is longer than ``limit`` bytes."""
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > limit:
        raise _too_large(declared, limit)
    parts, total = [], 0
    async for part in request.stream():
        parts.append(part)
        total += len(part)
        if total > limit:
            raise _too_large(f"more than {limit}", limit)
    return b"".join(parts)


def _too_large(size: str, limit: int) -> Rejected:
    message = f"the body has {size} bytes, the limit is {limit:,}; split it into several requests"
    return Rejected(413, "too_large", message, {"Connection": "close"})


async def _livez(_: Request) -> Response:
    return _json(200, {"status": "alive"})


async def _readyz(service: Service) -> Response:
    problem = service.not_ready()
    return _json(503 if problem else 200, {"ready": not problem, "problem": shown_text(problem)})


async def _health(service: Service) -> Response:
    return _json(200, service.health())


async def _metrics(service: Service) -> Response:
    metrics = service.metrics
    return Response(metrics.text(), media_type=metrics.content_type)


def _timed(service: Service, path: str, handler: Handler) -> Handler:
    """Wraps a handler: answers rejected requests with an error and records the latency."""

    async def handle(request: Request) -> Response:
        start = time.perf_counter()
        try:
            response = await handler(request)
        except Rejected as rejected:
            service.metrics.rejected.labels(rejected.reason).inc()
            response = _json(rejected.status, {"error": str(rejected)}, rejected.headers)
        except ClientDisconnect:
            response = Response(status_code=499)
        service.metrics.latency.labels(path, str(response.status_code)).observe(time.perf_counter() - start)
        return response

    return handle


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    known = (f"{'POST' if each.path == '/predict' else 'GET'} {each.path}" for each in request.app.routes)
    message = f"{error.detail}; use {', '.join(known)}"
    return _json(error.status_code, {"error": message}, dict(error.headers or {}))


def _json(status: int, content: dict[str, Any], headers: dict[str, str] | None = None) -> Response:
    finite = {
        key: None if isinstance(value, float) and not math.isfinite(value) else value for key, value in content.items()
    }
    return Response(orjson.dumps(finite), status, headers, media_type="application/json")
