"""The HTTP side of a prediction service: what is asked, what is refused and why, what is answered."""

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

from .service import Service

Handler = Callable[[Request], Awaitable[Response]]

BODY_SECONDS = 10.0
"""How long a client may take to send a request's body."""


class Refused(Exception):
    """A request that is not answered with what it asked for.

    Attributes:
        status: HTTP status, 4xx or 503.
        reason: one word for the metrics.
        headers: of the answer.
    """

    def __init__(self, status: int, reason: str, message: str, headers: dict[str, str] | None = None) -> None:
        super().__init__(message)
        self.status, self.reason, self.headers = status, reason, headers


def service_app(service: Service, give_up: Callable[[], None]) -> Starlette:
    """The application: POST /predict, GET /health, GET /metrics.

    The service loads while the first requests come in; `give_up` is called where it cannot.
    """

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        loading = asyncio.create_task(_load(service, give_up))
        try:
            yield
        finally:
            await loading
            await asyncio.to_thread(service.close)

    routes = [
        Route(path, _timed(service, path, handler), methods=[method])
        for path, method, handler in (
            ("/predict", "POST", _Predict(service)),
            ("/health", "GET", lambda request: _health(service)),
            ("/metrics", "GET", lambda request: _metrics(service)),
        )
    ]
    return Starlette(routes=routes, lifespan=lifespan, exception_handlers={HTTPException: _unknown})


async def _load(service: Service, give_up: Callable[[], None]) -> None:
    await asyncio.to_thread(service.load)
    if service.failure:
        give_up()


class _Predict:
    """POST /predict: a sample, or a list of them, to probabilities."""

    def __init__(self, service: Service) -> None:
        self._service, self._under_way = service, 0

    async def __call__(self, request: Request) -> Response:
        limits = self._service.limits
        if not self._service.ready:
            raise Refused(503, "loading", "the model is being loaded; ask again later", {"Retry-After": "1"})
        if self._under_way >= limits.concurrent_requests:
            raise Refused(
                503, "busy", f"{self._under_way} requests are under way, which is the most; ask again later",
                {"Retry-After": "1"},
            )  # fmt: skip
        self._under_way += 1
        try:
            asked = _parsed(await _body(request, limits.request_bytes))
            samples = asked if isinstance(asked, list) else [asked]
            _check(samples, limits.samples)
            results = await self._service.predict(samples) if samples else []
        finally:
            self._under_way -= 1
        for place, result in enumerate(results):
            if isinstance(result, str):
                raise Refused(400, "bad_sample", result if samples is not asked else f"sample {place}: {result}")
        answer: dict[str, Any] = {"version": self._service.version}
        if samples is asked:
            answer["probabilities"] = results
        else:
            answer["probability"] = results[0]
        return _json(200, answer)


def _parsed(body: bytes) -> Any:
    try:
        return orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise Refused(400, "bad_json", f"the body is not JSON: {error}") from None


def _check(samples: list[Any], most: int) -> None:
    if len(samples) > most:
        message = f"{len(samples):,} samples in one request, the most are {most:,}; ask in several requests"
        raise Refused(413, "too_many_samples", message)
    for place, sample in enumerate(samples):
        if not isinstance(sample, dict):
            shown = repr(sample)[:80]
            message = f"sample {place} must be a JSON object of fields and their values, got {shown}"
            raise Refused(400, "bad_sample", message)


async def _body(request: Request, most: int) -> bytes:
    """The request's body. Raises Refused where it is longer than `most` bytes, or does not come."""
    declared = request.headers.get("content-length", "")
    parts, total = [], 0
    try:
        async with asyncio.timeout(BODY_SECONDS):
            if declared.isdecimal() and int(declared) > most:
                raise _too_large(declared, most)
            async for part in request.stream():
                parts.append(part)
                total += len(part)
                if total > most:
                    raise _too_large(f"more than {most}", most)
    except TimeoutError:
        raise Refused(408, "slow", f"the body did not arrive within {BODY_SECONDS:g} seconds") from None
    return b"".join(parts)


def _too_large(size: str, most: int) -> Refused:
    message = f"the body has {size} bytes, the most are {most:,}; ask in several requests"
    return Refused(413, "too_large", message, {"Connection": "close"})


async def _health(service: Service) -> Response:
    state = service.health()
    return _json(200 if service.ready else 503, state)


async def _metrics(service: Service) -> Response:
    metrics = service.metrics
    return Response(metrics.text(), media_type=metrics.content_type)


def _timed(service: Service, path: str, handler: Handler) -> Handler:
    """The handler, with refusals as answers, its latency in the metrics."""

    async def handle(request: Request) -> Response:
        start = time.perf_counter()
        try:
            response = await handler(request)
        except Refused as refused:
            service.metrics.rejected.labels(refused.reason).inc()
            response = _json(refused.status, {"error": str(refused)}, refused.headers)
        except ClientDisconnect:
            response = Response(status_code=499)
        service.metrics.latency.labels(path, str(response.status_code)).observe(time.perf_counter() - start)
        return response

    return handle


async def _unknown(_: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    message = f"{error.detail}; there are POST /predict, GET /health and GET /metrics"
    return _json(error.status_code, {"error": message}, dict(error.headers or {}))


def _json(status: int, content: dict[str, Any], headers: dict[str, str] | None = None) -> Response:
    finite = {
        key: None if isinstance(value, float) and not math.isfinite(value) else value for key, value in content.items()
    }
    return Response(orjson.dumps(finite), status, headers, media_type="application/json")
