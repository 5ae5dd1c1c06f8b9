"""HTTP server of a prediction service."""

import signal
from pathlib import Path

import torch
import uvicorn

from .routes import service_app
from .service import Limits, Service


def serve(
    export_dir: Path,
    follow: str | None = None,
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    limits: Limits | None = None,
) -> None:
    """Answers requests until SIGTERM or SIGINT; requests in progress are finished.

    Args:
        export_dir, follow, limits: see :class:`Service`.
        host: address to listen on; by default the loopback address, which other machines cannot reach.
        port: to listen on.

    Raises:
        ValueError: ``export_dir`` has no exported model or a damaged one, or ``follow`` is not a publication target.
    """
    # Batches are small, and torch's threads would wait for cores that are busy with the HTTP of other requests.
    torch.set_num_threads(1)
    service = Service(export_dir, follow, limits)
    config = uvicorn.Config(
        service_app(service, lambda: setattr(server, "should_exit", True)),
        host=host,
        port=port,
        log_level="warning",
        access_log=False,
        timeout_graceful_shutdown=10,
        timeout_keep_alive=75,  # longer than proxies keep a connection, so that they close it and not the server
        server_header=False,
        proxy_headers=False,
    )
    server = uvicorn.Server(config)
    # uvicorn raises the signal again after its shutdown; ending by SIGTERM should exit with 0.
    signal.signal(signal.SIGTERM, lambda *_: None)
    server.run()
    if service.failure:
        raise service.failure
