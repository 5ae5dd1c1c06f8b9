"""The commands of samples and models that flow: ``cowrec stream | online | serve``."""

from pathlib import Path
from typing import Annotated

import typer

from .run_flags import Overrides, RunToml, TrainData, loaded_run, new_run_dir

app = typer.Typer()


@app.command()
def stream(
    data: Annotated[Path, typer.Argument(help="Data set made by synthesize --days.")],
    to: Annotated[str, typer.Option(help="A folder, redis://HOST:PORT/DB?stream=NAME, or kafka://HOST:PORT/TOPIC.")],
    days: Annotated[float, typer.Option(help="Of sample time.")] = 1.0,
    skip_days: Annotated[
        float | None, typer.Option(help="Of sample time since the data set began. [those of its training rows]")
    ] = None,
    rate: Annotated[float, typer.Option(help="Samples a second; 0: as fast as it goes.")] = 0.0,
    chunk: Annotated[int, typer.Option(help="Samples that are sent together, or make a file.")] = 1000,
    end: Annotated[bool, typer.Option("--end", help="Of a folder: say at the end that no more will come.")] = False,
) -> None:
    """Sends the samples that follow the training rows of a drifting data set, in the order of time.

    They are raw samples, as an application would log them: label, time, sample_id, numbers, ids as text.

    Example: `cowrec stream data/drifting --to redis://localhost:6379/0?stream=clicks --days 30 --rate 2000`
    """
    from cowrec.data_pipeline.streams.open import open_sink
    from cowrec.data_pipeline.streams.sinks import DirectorySink, send
    from cowrec.data_pipeline.synthetic.drifting_samples import drift_config, drifting_tables

    config, sink = drift_config(data), open_sink(to)
    if end and not isinstance(sink, DirectorySink):
        raise ValueError(f"--end is for folders; {to} has no end")
    first = config.rows if skip_days is None else round(skip_days * config.rows / config.days)
    sent = send(drifting_tables(config, first, round(days * config.rows / config.days), chunk), sink, rate)
    if isinstance(sink, DirectorySink) and end:
        sink.end()
    print(f"{to}: {sent:,} samples")


@app.command()
def online(
    config: RunToml,
    source: Annotated[
        str, typer.Option(help="Of samples: a folder, redis://HOST:PORT/DB?stream=NAME, or kafka://HOST:PORT/TOPIC.")
    ],
    data: TrainData = None,
    run_dir: Annotated[Path | None, typer.Option(help="Folder of the run, new or empty. [runs/NAME-DATE]")] = None,
    publish: Annotated[
        str | None, typer.Option(help="Where changes go: a folder, or redis://HOST:PORT/DB?name=NAME.")
    ] = None,
    overrides: Overrides = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with the run in --run-dir; start it where there is none.")
    ] = False,
) -> None:
    """Trains on samples as they arrive, each predicted before it is trained on; snapshots, expires ids, publishes.

    Fields, scales and vocabularies are those of the data set, which may be a small sample. A run that was killed goes
    on with --resume and becomes the run that was not, sample for sample.

    Example: `cowrec online scripts/configs/online.toml --data data/sample --source incoming --run-dir runs/live
    --publish published`
    """
    from cowrec.trainer.online.loop import online as run

    if run_dir is None and resume:
        raise ValueError("--resume goes on with a run; say which with --run-dir")
    loaded, data_dir = loaded_run(config, overrides, data)
    folder = run_dir or new_run_dir(config)
    report = run(loaded, data_dir, source, folder, publish=publish, resume=resume)
    print(f"{report['samples']:,} samples  {report['samples_per_second']:,.0f} samples/s  run {folder}")


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
    from cowrec.trainer.serving.service import Limits
    from cowrec.trainer.serving.service import serve as run

    limits = Limits(max_request_bytes, max_samples, max_concurrent)
    run(export_dir, follow, host=host, port=port, limits=limits)
