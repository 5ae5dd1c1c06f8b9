"""The commands that use a trained model: ``cowrec evaluate | predict | export | serve``."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from cowrec.trainer.runtime.environment import launched_rank

app = typer.Typer()


class PrecisionName(StrEnum):
    float32 = "float32"
    float16 = "float16"
    int8 = "int8"


RunDir = Annotated[Path, typer.Argument(help="Folder of a trained run.")]
RunData = Annotated[Path, typer.Option(help="Data set prepared with the run's ids.")]


@app.command()
def evaluate(
    run_dir: RunDir, data: RunData, split: Annotated[str, typer.Option(help="Split to read: test, train.")] = "test"
) -> None:
    """Evaluates a run's newest checkpoint on a data set; prints AUC, logloss and the number of samples as JSON.

    Example: `cowrec evaluate runs/criteo --data data/criteo`
    """
    from cowrec.trainer.runs.run_dir import to_json
    from cowrec.trainer.training.saved_run import evaluate_run

    quality = evaluate_run(run_dir, data, split)
    if launched_rank() == 0:
        print(to_json(quality))


@app.command()
def predict(
    run_dir: RunDir,
    data: RunData,
    output: Annotated[Path, typer.Option("--output", "-o", help="Parquet file to write; an existing one is replaced.")],
    split: Annotated[str, typer.Option(help="Split to read: test, train.")] = "test",
) -> None:
    """Writes the click probability of every sample, in order, to a Parquet file.

    Prepare raw data with the run's ids first: `cowrec prepare criteo --like RUN --input new.txt --output DIR`

    Example: `cowrec predict runs/criteo --data DIR --output predictions.parquet`
    """
    from cowrec.trainer.training.saved_run import predict_run

    print(f"{output}: {predict_run(run_dir, data, output, split):,} rows")


@app.command()
def export(
    run_dir: RunDir,
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder to write.")],
    precision: Annotated[PrecisionName, typer.Option(help="Precision of the tables.")] = PrecisionName.float32,
) -> None:
    """Exports a run's model for serving: tables, network, schema, vocabularies, and a manifest of these files.

    int8 stores a float32 scale with each row. The manifest records the largest error of tables and logits.

    Example: `cowrec export runs/criteo --output exports/criteo --precision int8`
    """
    from cowrec.trainer.export.export import export_run

    manifest = export_run(run_dir, output, precision.value)
    size = sum(each[0] for each in manifest.files.values())
    print(f"{output}: step {manifest.step}, {size:,} bytes, logits within {manifest.logits_error:.2g}")


@app.command()
def serve(
    export_dir: Annotated[Path, typer.Argument(help="Folder of an exported model.")],
    follow: Annotated[
        str | None,
        typer.Option(help="Publication whose new versions to apply: folder, or redis://HOST:PORT."),
    ] = None,
    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 is reachable from other machines.")] = (
        "127.0.0.1"
    ),
    port: Annotated[int, typer.Option(help="Port to listen on.")] = 8000,
    max_request_bytes: Annotated[int, typer.Option(help="Largest body of a request.")] = 1 << 20,
    max_samples: Annotated[int, typer.Option(help="Most samples in a request.")] = 1000,
    max_concurrent: Annotated[int, typer.Option(help="Most concurrent requests; further ones are refused.")] = 256,
) -> None:
    """Serves predictions over HTTP: POST /predict, GET /health, GET /metrics (Prometheus).

    A sample is a JSON object of the raw columns; a request is one sample or a list of samples.

    Example: `cowrec serve exports/criteo --follow published`

    Example: `curl localhost:8000/predict --data '{"I1": 3, "C1": "68fd1e64", ...}'`
    """
    try:
        from cowrec.trainer.serving.server import serve as run
        from cowrec.trainer.serving.service import Limits
    except ModuleNotFoundError as error:
        remedy = "pip install 'cowrec[serve]'"
        raise ImportError(f"serve requires {error.name}, which is not installed: {remedy}") from error

    limits = Limits(max_request_bytes, max_samples, max_concurrent)
    run(export_dir, follow, host=host, port=port, limits=limits)
