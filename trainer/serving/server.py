"""HTTP server of a prediction service: POST /predict, GET /livez, /readyz and /metrics.

TLS and clients that read slowly are a proxy's in front of it; scripts/deploy has a configuration of nginx.
"""

import asyncio
import errno
import functools
import logging
import math
import re
import resource
import signal
import socket
import threading
import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, cast

import orjson
import torch
import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Lifespan

from .connections import SPARE, BoundedConnection
from .request_samples import Rejected, RequestSample, SharedProblem, samples_of
from .service import Late, Limits, Service

logger = logging.getLogger(__name__)

_RETRY = {"Retry-After": "1"}
_REQUEST_ID, _IS_ID = b"x-request-id", re.compile(rb"[!-~]{1,128}")
_CLOSE = {"Connection": "close"}
"""Of a response to a request whose body is not read any further."""


def serve(
    export_dir: Path,
    follow: str | None = None,
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    health_port: int | None = None,
    limits: Limits | None = None,
    max_age: float | None = None,
    drain_seconds: float = 0.0,
    access_log: bool = False,
) -> None:
    """Answers requests until SIGTERM or SIGINT; requests in progress are finished. Logs where it listens.

    Args:
        export_dir, follow, max_age: see :class:`Service`.
        host: address to listen on; by default the loopback address, which other machines cannot reach.
        port: port to listen on; 0 chooses a free one.
        health_port: another port, on which a thread of its own answers everything except predictions; None for none.
        drain_seconds: time after SIGTERM in which requests are answered, while ``/readyz`` says that none should come.
        access_log: whether each request to predict is a line of the log.

    Raises:
        ValueError: ``export_dir`` has no exported model or a damaged one, or ``follow`` is not a publication target.
        OSError: it cannot listen there.
    """
    service = Service(export_dir, follow, limits, max_age)
    listener = _listen(host, port)
    health = None if health_port is None else _listen(host, health_port, "--health-port")
    if health:
        logger.info("listening on %s: GET /livez, /readyz, /metrics", _shown(health))
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)  # each connection is an open file
    wanted = service.limits.connections + SPARE + 512
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(wanted, hard)), hard))
    # Batches are small, and torch's threads would wait for cores that are busy with the HTTP of other requests.
    torch.set_num_threads(1)
    with _health_server(service, health) if health else nullcontext():
        routes = "POST /predict, GET /livez, /readyz, /metrics"

        def loaded() -> None:
            if service.failure:
                server.should_exit = True
            else:
                logger.info("listening on %s: %s", _shown(listener), routes)

        server = http_server(service_app(service, loaded, access_log=access_log), service, drain_seconds)
        # uvicorn raises the signal again after its shutdown; ending by SIGTERM should exit with 0.
        signal.signal(signal.SIGTERM, lambda *_: None)
        with torch.inference_mode():  # entering it takes as long as several operations of a prediction
            server.run([listener])
    if service.failure:
        raise service.failure
    logger.info("stopped")


def service_app(service: Service, loaded: Callable[[], object], *, access_log: bool = False) -> Starlette:
    """Creates the application of a server that predicts and reports its health.

    The service loads while the first requests arrive; ``loaded`` is called once it has, or has failed to.
    """

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        loading = asyncio.create_task(load())
        try:
            yield
        finally:
            await loading
            await asyncio.to_thread(service.close)

    async def load() -> None:
        await asyncio.to_thread(service.load)
        loaded()

    predict = Route("/predict", functools.partial(_predict, service, access_log), methods=["POST"])
    return _app([predict, *_health_routes(service)], lifespan)


class _Server(uvicorn.Server):
    """A server that answers what was sent before it is asked to stop, and for some time what comes later."""

    def __init__(self, config: uvicorn.Config, service: Service, drain_seconds: float) -> None:
        super().__init__(config)
        self._service, self._drain_seconds = service, drain_seconds

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stops once all that waits in sockets is read: closing them would reset connections with such requests.

        Before, it is not ready and answers, until those that send requests have noticed. Connections that clients keep
        open meanwhile end with their next response.
        """
        self._service.stops = True
        self.server_state.default_headers = [*self.server_state.default_headers, (b"connection", b"close")]
        until = time.monotonic() + self._drain_seconds
        while not self.force_exit and time.monotonic() < until:
            await asyncio.sleep(0.05)
        for _ in range(3):  # accepts connections, reads from them, and again what has come during a batch
            await asyncio.sleep(0.05)
        await super().shutdown(sockets)


def http_server(app: Starlette, service: Service, drain_seconds: float = 0.0) -> uvicorn.Server:
    """Creates the server of an application, within the limits of a service; ``drain_seconds`` as of :func:`serve`."""

    def connection(**given: Any) -> asyncio.Protocol:
        return BoundedConnection(service.limits, lambda reason: service.metrics.rejected.labels(reason).inc(), **given)

    config = uvicorn.Config(
        app,
        http=cast("type[asyncio.Protocol]", connection),
        ws="none",
        log_level="error",  # a warning for each bad request would let clients fill the log
        access_log=False,
        log_config=None,  # its errors go where those of all libraries do
        timeout_graceful_shutdown=10,
        timeout_keep_alive=service.limits.idle_seconds,  # type: ignore[arg-type]  # it takes any number of seconds
        server_header=False,
        proxy_headers=False,
    )
    server = _Server(config, service, drain_seconds)
    service.open_connections.append(server.server_state.connections)
    return server


async def _predict(service: Service, access_log: bool, request: Request) -> Response:
    """Answers a request. It takes a slot once it has arrived; without a free one it is refused before it is parsed."""
    since, limits, batcher = time.monotonic(), service.limits, service.batcher
    headers, samples = dict(request.scope["headers"]), list[RequestSample]()
    given = headers.get(_REQUEST_ID, b"")
    request_id = given.decode() if given and _IS_ID.fullmatch(given) else ""
    try:
        if b"upgrade" in headers:  # uvicorn does not read its body
            message = "the server does not change the protocol; speak plain HTTP/1.1, or put a proxy in front of it"
            raise Rejected(400, "upgrade", message, _CLOSE)
        body = await _body(request, limits)
        if unable := service.cannot_predict():
            raise Rejected(503, "loading", f"{unable}; retry later", _RETRY)
        timeout = _timeout_ms(request, limits.timeout_ms)
        if batcher.calls >= limits.concurrent_requests:
            waiting = f"{batcher.calls} requests are in progress, which is the limit"
            raise Rejected(503, "busy", f"{waiting}; retry later", _RETRY)
        late = Rejected(503, "late", f"no prediction could be made within {timeout:g} ms; retry later", _RETRY)
        if time.monotonic() - since > timeout / 1000:  # not worth parsing
            raise late
        samples, many = samples_of(body, limits.samples)
        content: dict[str, Any] = {"version": service.version, "probabilities": []}
        if samples:
            try:
                answers = await batcher.submit(samples, since + timeout / 1000)
            except Late:
                raise late from None
            results, version = [result for result, _ in answers], answers[0][1]
            for index, result in enumerate(results if {*map(type, results)} - {float, dict} else ()):
                if isinstance(result, SharedProblem):
                    raise Rejected(result.status, result.reason, result)
                if isinstance(result, str):
                    raise Rejected(400, "bad_sample", f"sample {index}: {result}" if many else result)
            content = {"version": version, **({"probabilities": results} if many else {"probability": results[0]})}
        response = _json(200, content)
    except Rejected as error:
        service.metrics.rejected.labels(error.reason).inc()
        response = _json(error.status, {"error": str(error)}, error.headers)
    except Exception as error:
        request_id = request_id or uuid.uuid4().hex
        logger.error("request %s to predict failed", request_id, exc_info=error)
        response = _json(500, {"error": f"internal error; the log of the server shows it as request {request_id}"})
    seconds = time.monotonic() - since
    service.metrics.latency.labels("/predict", str(response.status_code)).observe(seconds)
    if request_id:
        response.headers["X-Request-ID"] = request_id
    if access_log:
        client = request.client.host if request.client else "-"
        about = client, request_id or "-", response.status_code, len(samples), 1000 * seconds
        logger.info("%s POST /predict, request %s: status %d, %d samples, %.1f ms", *about)
    return response


async def _body(request: Request, limits: Limits) -> bytes:
    parts, size = [], 0
    try:
        async with asyncio.timeout(limits.request_seconds):
            async for part in request.stream():
                parts.append(part)
                size += len(part)
                if size > limits.request_bytes:
                    message = (
                        f"the body is too large, the limit is {limits.request_bytes:,} bytes; send several requests"
                    )
                    raise Rejected(413, "too_large", message, _CLOSE)
    except TimeoutError:
        message = f"the request did not arrive within {limits.request_seconds:g} seconds"
        raise Rejected(408, "slow", message, _CLOSE) from None
    except ClientDisconnect:
        raise Rejected(400, "disconnected", "the request did not arrive completely", _CLOSE) from None
    return b"".join(parts)


def _timeout_ms(request: Request, limit: float) -> float:
    """Milliseconds that a request may take, at most the limit."""
    if not request.scope["query_string"] or "timeout_ms" not in request.query_params:
        return limit
    given = request.query_params["timeout_ms"]
    try:
        timeout = float(given)
    except ValueError:
        timeout = math.nan
    if not timeout > 0:
        raise Rejected(400, "bad_timeout", f"timeout_ms must be a number above 0, got {given!r}")
    return min(timeout, limit)


def _health_routes(service: Service) -> list[Route]:
    async def livez(_: Request) -> Response:
        return _json(200, {"status": "alive"})

    async def readyz(_: Request) -> Response:
        found = service.health()
        return _json(200 if found["ready"] else 503, found)

    async def metrics(_: Request) -> Response:
        return Response(service.metrics.text(), media_type=service.metrics.content_type)

    return [Route(f"/{answer.__name__}", answer, methods=["GET"]) for answer in (livez, readyz, metrics)]


def _app(routes: list[Route], lifespan: Lifespan[Starlette] | None = None) -> Starlette:
    app = Starlette(routes=routes, lifespan=lifespan, exception_handlers={HTTPException: _http_error})
    app.router.redirect_slashes = False  # the redirection would go to the host that the client names
    return app


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    known = (f"{'POST' if route.path == '/predict' else 'GET'} {route.path}" for route in request.app.routes)
    message = f"{error.detail}; use {', '.join(known)}"
    return _json(error.status_code, {"error": message}, error.headers)


def _json(status: int, content: Mapping[str, Any], headers: Mapping[str, str] | None = None) -> Response:
    return Response(orjson.dumps(content), status, headers, media_type="application/json")


@contextmanager
def _health_server(service: Service, listener: socket.socket) -> Iterator[None]:
    """Answers all requests but predictions in a thread, however busy the thread of predictions is."""
    server = http_server(_app(_health_routes(service)), service)
    thread = threading.Thread(target=server.run, args=([listener],), name="cowrec-health", daemon=True)
    thread.start()
    yield
    server.should_exit = True
    thread.join()


def _shown(listener: socket.socket) -> str:
    address, port = listener.getsockname()[:2]
    return f"http://[{address}]:{port}" if ":" in address else f"http://{address}:{port}"


def _listen(host: str, port: int, flag: str = "--port") -> socket.socket:
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family, backlog=2048)
    except OSError as error:
        remedy = (
            f"another program listens there; stop it or choose another {flag}"
            if error.errno == errno.EADDRINUSE
            else f"choose another --host or {flag}"
        )
        raise OSError(f"cannot listen on {host}:{port}: {error.strerror}; {remedy}") from error
