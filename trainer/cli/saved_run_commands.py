"""The commands that put a saved run to use: ``cowrec evaluate | predict | export``."""

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
    run_dir: RunDir, data: RunData, split: Annotated[str, typer.Option(help="Which rows: test, train.")] = "test"
) -> None:
    """Prints AUC, logloss and rows of a data set under a run's newest checkpoint, as JSON.

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
    output: Annotated[Path, typer.Option("--output", "-o", help="Parquet file to write; replaced where it is there.")],
    split: Annotated[str, typer.Option(help="Which rows: test, train.")] = "test",
) -> None:
    """Writes the click probability of every row, in order, to a Parquet file.

    Raw data first take the run's ids: `cowrec prepare criteo --like RUN --input new.txt --output DIR`

    Example: `cowrec predict runs/criteo --data DIR --output predictions.parquet`
    """
    from cowrec.trainer.training.saved_run import predict_run

    print(f"{output}: {predict_run(run_dir, data, output, split):,} rows")


@app.command()
def export(
    run_dir: RunDir,
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder to make.")],
    precision: Annotated[PrecisionName, typer.Option(help="Of the tables.")] = PrecisionName.float32,
) -> None:
    """Writes a run's model as files to predict with: tables, network, schema, vocabularies, and a manifest of them.

    int8 has a float32 scale for each row. The manifest says how far tables and logits are off.

    Example: `cowrec export runs/criteo --output exports/criteo --precision int8`
    """
    from cowrec.trainer.export.export import export_run

    manifest = export_run(run_dir, output, precision.value)
    size = sum(each[0] for each in manifest.files.values())
    print(f"{output}: step {manifest.step}, {size:,} bytes, logits within {manifest.logits_error:.2g}")
