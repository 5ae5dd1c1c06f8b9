"""HTTP server of a prediction service."""

import errno
import logging
import os
import resource
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import torch
import uvicorn
from starlette.applications import Starlette
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from .limited_protocol import limited_protocol
from .limits import Limits
from .predict_protocol import predict_protocol
from .predictor import Predictor
from .routes import health_app, service_app
from .service import Service

logger = logging.getLogger(__name__)


def serve(
    export_dir: Path,
    follow: str | None = None,
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    health_port: int | None = None,
    limits: Limits | None = None,
    max_age: float | None = None,
    obeys_pin: bool = True,
) -> None:
    """Answers requests until SIGTERM or SIGINT; requests in progress are finished. Logs where it listens.

    Args:
        export_dir, follow, max_age, obeys_pin: see :class:`Service`.
        limits: see :class:`Limits`.
        host: address to listen on; by default the loopback address, which other machines cannot reach.
        port: to listen on; 0 chooses a free one.
        health_port: another port, on which a thread of its own answers everything except predictions; None for none.

    Raises:
        ValueError: ``export_dir`` has no exported model or a damaged one, or ``follow`` is not a publication target.
        OSError: it cannot listen there.
    """
    service = Service(export_dir, follow, limits, max_age, obeys_pin=obeys_pin)
    listener = _listen(host, port)
    health = None if health_port is None else _listen(host, health_port, "--health-port")
    logger.info("listening on %s: POST /predict, GET /health, /livez, /readyz, /metrics", _shown(listener))
    if health:
        logger.info("listening on %s: GET /health, /livez, /readyz, /metrics", _shown(health))
    with _health_server(service, health) if health else nullcontext():
        _answer(service, listener)


def _answer(service: Service, listener: socket.socket) -> None:
    """Answers requests in this process, until SIGTERM or SIGINT. Raises what prevents the model from being loaded."""
    _allow_open_files(service.limits.connections + 512)
    # Batches are small, and torch's threads would wait for cores that are busy with the HTTP of other requests.
    torch.set_num_threads(1)
    app = service_app(service, lambda: setattr(server, "should_exit", True))
    server = _server(service, app, predict_protocol(Predictor(service)))
    # uvicorn raises the signal again after its shutdown; ending by SIGTERM should exit with 0.
    signal.signal(signal.SIGTERM, lambda *_: None)
    with torch.inference_mode():  # entering it takes as long as several operations of a prediction
        server.run([listener])
    if service.failure:
        raise service.failure


def _server(
    service: Service,
    app: Starlette,
    protocol: type[HttpToolsProtocol] = HttpToolsProtocol,
) -> uvicorn.Server:
    config = uvicorn.Config(
        app,
        http=limited_protocol(service.limits, service.metrics, protocol),
        ws="none",
        log_level="error",  # a warning for each bad request would let clients fill the log
        access_log=False,
        log_config=None,  # its errors go where those of all libraries do
        timeout_graceful_shutdown=10,
        timeout_keep_alive=75,  # longer than proxies keep a connection, so that they close it and not the server
        server_header=False,
        proxy_headers=False,
    )
    return uvicorn.Server(config)


@contextmanager
def _health_server(service: Service, listener: socket.socket) -> Iterator[None]:
    """Answers all requests but predictions in a thread, however busy the thread of predictions is."""
    server = _server(service, health_app(service))
    thread = threading.Thread(target=server.run, args=([listener],), name="cowrec-health", daemon=True)
    thread.start()
    yield
    server.should_exit = True
    thread.join()


def _shown(listener: socket.socket) -> str:
    address, port = listener.getsockname()[:2]
    return f"http://[{address}]:{port}" if ":" in address else f"http://{address}:{port}"


def _allow_open_files(count: int) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < count:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(count, hard), hard))


def _listen(host: str, port: int, flag: str = "--port") -> socket.socket:
    if not 0 <= port < 1 << 16:
        raise ValueError(f"{flag} must be between 0 and 65535, got {port}")
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family, backlog=2048)
    except OSError as error:
        remedy = (
            f"another program listens there; stop it or choose another {flag}"
            if error.errno == errno.EADDRINUSE
            else f"choose another --host or {flag}"
        )
        raise OSError(f"cannot listen on {host}:{port}: {_reason(error)}; {remedy}") from error


def _reason(error: OSError) -> str:
    """The system's text, to which Python adds the address; that of a wrong host name has no number of its own."""
    return os.strerror(error.errno) if error.errno and error.errno > 0 else str(error.strerror)
