"""The commands of samples and models that flow: ``cowrec serve``."""

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer()


@app.command()
def serve(
    export_dir: Annotated[Path, typer.Argument(help="Exported model.")],
    follow: Annotated[
        str | None,
        typer.Option(help="Publication whose versions are applied as they come: a folder, or redis://HOST:PORT."),
    ] = None,
    host: Annotated[str, typer.Option(help="Address to listen at; 0.0.0.0 is open to all who reach this machine.")] = (
        "127.0.0.1"
    ),
    port: Annotated[int, typer.Option(help="To listen at.")] = 8000,
    max_request_bytes: Annotated[int, typer.Option(help="Of a request's body.")] = 1 << 20,
    max_samples: Annotated[int, typer.Option(help="Of a request.")] = 1000,
    max_concurrent: Annotated[int, typer.Option(help="Requests for predictions under way; more are sent away.")] = 256,
) -> None:
    """Answers requests for predictions over HTTP: POST /predict, GET /health, GET /metrics (Prometheus).

    A sample is a JSON object of the raw columns; a request is one of them, or a list.

    Example: `cowrec serve exports/criteo --follow published`

    Example: `curl localhost:8000/predict --data '{"I1": 3, "C1": "68fd1e64", ...}'`
    """
    from .service import Limits
    from .service import serve as run

    limits = Limits(max_request_bytes, max_samples, max_concurrent)
    run(export_dir, follow, host=host, port=port, limits=limits)
