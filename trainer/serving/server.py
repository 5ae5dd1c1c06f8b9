"""HTTP server of a prediction service."""

import errno
import logging
import os
import resource
import signal
import socket
from pathlib import Path

import torch
import uvicorn

from .limited_protocol import limited_protocol
from .limits import Limits
from .routes import service_app
from .service import Service

logger = logging.getLogger(__name__)


def serve(
    export_dir: Path,
    follow: str | None = None,
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    limits: Limits | None = None,
    max_age: float | None = None,
) -> None:
    """Answers requests until SIGTERM or SIGINT; requests in progress are finished. Logs where it listens.

    Args:
        export_dir, follow, max_age: see :class:`Service`.
        limits: see :class:`Limits`.
        host: address to listen on; by default the loopback address, which other machines cannot reach.
        port: to listen on; 0 chooses a free one.

    Raises:
        ValueError: ``export_dir`` has no exported model or a damaged one, or ``follow`` is not a publication target.
        OSError: it cannot listen there.
    """
    service = Service(export_dir, follow, limits, max_age)
    listener = _listen(host, port)
    _allow_open_files(service.limits.connections + 512)
    # Batches are small, and torch's threads would wait for cores that are busy with the HTTP of other requests.
    torch.set_num_threads(1)
    config = uvicorn.Config(
        service_app(service, lambda: setattr(server, "should_exit", True)),
        http=limited_protocol(service.limits, service.metrics),
        ws="none",
        log_level="error",  # a warning for each bad request would let clients fill the log
        access_log=False,
        timeout_graceful_shutdown=10,
        timeout_keep_alive=75,  # longer than proxies keep a connection, so that they close it and not the server
        server_header=False,
        proxy_headers=False,
    )
    server = uvicorn.Server(config)
    # uvicorn raises the signal again after its shutdown; ending by SIGTERM should exit with 0.
    signal.signal(signal.SIGTERM, lambda *_: None)
    address, port = listener.getsockname()[:2]
    shown = f"[{address}]" if ":" in address else address
    logger.info("listening on http://%s:%d: POST /predict, GET /health, /livez, /readyz, /metrics", shown, port)
    server.run([listener])
    if service.failure:
        raise service.failure


def _allow_open_files(count: int) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < count:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(count, hard), hard))


def _listen(host: str, port: int) -> socket.socket:
    if not 0 <= port < 1 << 16:
        raise ValueError(f"--port must be between 0 and 65535, got {port}")
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family, backlog=2048)
    except OSError as error:
        remedy = (
            "another program listens there; stop it or choose another --port"
            if error.errno == errno.EADDRINUSE
            else "choose another --host or --port"
        )
        raise OSError(f"cannot listen on {host}:{port}: {_reason(error)}; {remedy}") from error


def _reason(error: OSError) -> str:
    """The system's text, to which Python adds the address; that of a wrong host name has no number of its own."""
    return os.strerror(error.errno) if error.errno and error.errno > 0 else str(error.strerror)
