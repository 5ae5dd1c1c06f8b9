"""The command of serving: ``cowrec serve``."""

from collections.abc import Callable
from typing import Annotated

import typer

from cowrec.trainer.runtime.environment import LogSettings, open_log

from .flag_values import count_flag
from .run_flags import LogFile, LogForm, LogFormName

app = typer.Typer()

Follow = Annotated[
    str | None,
    typer.Option(help="Publication whose new versions to apply: folder, s3://BUCKET/FOLDER or redis://HOST:PORT."),
]
MaxAge = Annotated[
    float | None,
    typer.Option(help="Seconds since a version was published, after which /readyz is 503. [any]"),
]
Host = Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 is reachable from other machines.")]
HealthPort = Annotated[
    int | None,
    typer.Option(help="Port on which a thread of its own answers /livez, /readyz, /health, /metrics. [none]"),
]
TimeoutMs = Annotated[
    float, typer.Option(help="Time from a request's arrival to its prediction; a request may ask for less.")
]


@app.command()
def serve(
    export_dir: Annotated[str, typer.Argument(help="Folder of an exported model: a path or s3://BUCKET/EXPORT.")],
    follow: Follow = None,
    max_age: MaxAge = None,
    host: Host = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on.")] = 8000,
    health_port: HealthPort = None,
    max_samples: Annotated[int, count_flag("Most samples in a request.")] = 1000,
    timeout_ms: TimeoutMs = 1000.0,
    log_format: LogForm = LogFormName.text,
    log_file: LogFile = None,
) -> None:
    """Serves predictions over HTTP: POST /predict, GET /health, /livez, /readyz, /metrics (Prometheus).

    A sample is a JSON object of the raw columns; a request is one sample, a list of samples, or
    `{"shared": {...}, "samples": [...]}` for samples that share fields.

    Example: `cowrec serve exports/criteo --follow published`

    Example: `curl localhost:8000/predict --data '{"I1": 3, "C1": "68fd1e64", ...}'`
    """
    from cowrec.trainer.runs.remote_run import local_copy

    run = _server()
    from cowrec.trainer.serving.service import Limits

    open_log(LogSettings(log_format.value, log_file), "%(asctime)s cowrec: %(message)s")
    limits = Limits(max_samples, timeout_ms)
    model = local_copy(export_dir, "export")
    run(model, follow, host=host, port=port, health_port=health_port, limits=limits, max_age=max_age)


def _server() -> Callable[..., None]:
    try:
        from cowrec.trainer.serving.server import serve
    except ModuleNotFoundError as error:
        remedy = "pip install 'cowrec[serve]'"
        raise ImportError(f"serve requires {error.name}, which is not installed: {remedy}") from error
    return serve
