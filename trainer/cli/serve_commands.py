"""The command of serving: ``cowrec serve``."""

from collections.abc import Callable
from typing import Annotated

import typer

from cowrec.trainer.runtime.service_log import LogSettings, open_log

from .flag_values import count_flag
from .run_flags import LogBackups, LogFile, LogForm, LogFormName, LogMaxBytes

app = typer.Typer()

Follow = Annotated[
    str | None, typer.Option(help="Publication whose new versions to apply: folder, or redis://HOST:PORT.")
]
MaxAge = Annotated[
    float | None,
    typer.Option(help="Seconds since a version was published, after which /readyz is 503. [any]"),
]
IgnorePin = Annotated[
    bool,
    typer.Option(
        "--ignore-pin", help="Follow the newest version where others stay at the one of cowrec versions --pin."
    ),
]
Host = Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 is reachable from other machines.")]
HealthPort = Annotated[
    int | None,
    typer.Option(help="Port on which a thread of its own answers /livez, /readyz, /health, /metrics. [none]"),
]
ClientConnections = Annotated[
    int, count_flag("Most open connections from one address; a proxy in front is one address.")
]
TimeoutMs = Annotated[
    float, typer.Option(help="Time from a request's arrival to its prediction; a request may ask for less.")
]


@app.command()
def serve(
    export_dir: Annotated[str, typer.Argument(help="Folder of an exported model: a path or s3://BUCKET/EXPORT.")],
    follow: Follow = None,
    max_age: MaxAge = None,
    ignore_pin: IgnorePin = False,
    host: Host = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on.")] = 8000,
    health_port: HealthPort = None,
    max_request_bytes: Annotated[int, count_flag("Largest body of a request.")] = 1 << 20,
    max_samples: Annotated[int, count_flag("Most samples in a request.")] = 1000,
    max_concurrent: Annotated[int, count_flag("Most concurrent requests; further ones are refused.")] = 256,
    max_connections: Annotated[int, count_flag("Most open connections.")] = 512,
    max_client_connections: ClientConnections = 256,
    request_seconds: Annotated[float, typer.Option(help="Time for a request to arrive.")] = 10.0,
    timeout_ms: TimeoutMs = 1000.0,
    log_format: LogForm = LogFormName.text,
    log_file: LogFile = None,
    log_max_bytes: LogMaxBytes = LogSettings.max_bytes,
    log_backups: LogBackups = LogSettings.backups,
) -> None:
    """Serves predictions over HTTP: POST /predict, GET /health, /livez, /readyz, /metrics (Prometheus).

    A sample is a JSON object of the raw columns; a request is one sample, a list of samples, or
    `{"shared": {...}, "samples": [...]}` for samples that share fields.

    Example: `cowrec serve exports/criteo --follow published`

    Example: `curl localhost:8000/predict --data '{"I1": 3, "C1": "68fd1e64", ...}'`
    """
    from cowrec.trainer.runs.remote_run import local_copy

    run = _server()
    from cowrec.trainer.serving.limits import Limits

    open_log(LogSettings(log_format.value, log_file, log_max_bytes, log_backups), "%(asctime)s cowrec: %(message)s")
    connections = (max_connections, max_client_connections)
    limits = Limits(max_request_bytes, max_samples, max_concurrent, *connections, request_seconds, timeout_ms)
    run(
        local_copy(export_dir, "export"),
        follow,
        host=host,
        port=port,
        health_port=health_port,
        limits=limits,
        max_age=max_age,
        obeys_pin=not ignore_pin,
    )


def _server() -> Callable[..., None]:
    try:
        from cowrec.trainer.serving.server import serve
    except ModuleNotFoundError as error:
        remedy = "pip install 'cowrec[serve]'"
        raise ImportError(f"serve requires {error.name}, which is not installed: {remedy}") from error
    return serve
