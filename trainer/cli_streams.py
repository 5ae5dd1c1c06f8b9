"""The commands of samples and models that flow: ``cowrec stream | serve``."""

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer()


@app.command()
def stream(
    data: Annotated[Path, typer.Argument(help="Data set made by synthesize --days.")],
    to: Annotated[str, typer.Option(help="redis://HOST:PORT/STREAM, kafka://HOST:PORT/TOPIC, or a folder.")],
    days: Annotated[float, typer.Option(help="Of sample time.")] = 1.0,
    rate: Annotated[float, typer.Option(help="Samples a second; 0: as fast as it goes.")] = 0.0,
    skip_days: Annotated[
        float | None, typer.Option(help="Of sample time since the data set's first sample. [its training rows]")
    ] = None,
    chunk_rows: Annotated[int, typer.Option(help="Samples of a file, or sent at once.")] = 1000,
) -> None:
    """Sends the samples that follow the training rows of a drifting data set, in the order of time.

    They are raw samples, as an application would write them: text ids, label, time, sample_id.

    Example: `cowrec stream data/drifting --to redis://localhost:6379/clicks --days 30 --rate 2000`
    """
    from cowrec.data_pipeline.drifting_samples import drift_config, drifting_tables
    from cowrec.data_pipeline.sample_sinks import open_sink, send

    config = drift_config(data)
    first = config.rows if skip_days is None else round(skip_days * config.rows / config.days)
    tables = drifting_tables(config, first, round(days * config.rows / config.days), chunk_rows)
    print(f"{to}: {send(tables, open_sink(to), rate):,} samples")


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
