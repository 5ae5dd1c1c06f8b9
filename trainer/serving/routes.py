"""HTTP routes of a prediction service except POST /predict, which predict_protocol.py answers."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import orjson
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Lifespan

from .predict_protocol import PATH
from .service import Service, shown_text

Handler = Callable[[Request], Awaitable[Response]]


def health_app(service: Service) -> Starlette:
    """Creates the application of GET /livez, /readyz, /health and /metrics."""
    return _app(_routes(service))


def service_app(service: Service, stop: Callable[[], None]) -> Starlette:
    """Creates the application of a server that predicts: that of `health_app`, which names POST /predict too.

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

    # Requests to predict do not come here; their methods are those of any other request to this path.
    predict = Route(PATH, _only_post, methods=["GET", "HEAD", "PUT", "PATCH", "DELETE", "OPTIONS"])
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


async def _only_post(_: Request) -> Response:
    raise HTTPException(405, headers={"Allow": "POST"})


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
    """Wraps a handler: records the latency."""

    async def handle(request: Request) -> Response:
        start = time.perf_counter()
        response = await handler(request)
        service.metrics.latency.labels(path, str(response.status_code)).observe(time.perf_counter() - start)
        return response

    return handle


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    known = (f"{'POST' if each.path == PATH else 'GET'} {each.path}" for each in request.app.routes)
    message = f"{error.detail}; use {', '.join(known)}"
    return _json(error.status_code, {"error": message}, dict(error.headers or {}))


def _json(status: int, content: dict[str, Any], headers: dict[str, str] | None = None) -> Response:
    return Response(orjson.dumps(content), status, headers, media_type="application/json")
