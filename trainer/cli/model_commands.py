"""The commands that use a trained model: ``cowrec evaluate | predict | export``."""

import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from cowrec.trainer.runtime.environment import launched_rank

from .flag_values import count_flag, parse_local

app = typer.Typer()


class PrecisionName(StrEnum):
    float32 = "float32"
    float16 = "float16"
    int8 = "int8"


RunDir = Annotated[str, typer.Argument(help="Folder of a trained run: a path or s3://BUCKET/RUN.")]
RunData = Annotated[str, typer.Option(help="Data set prepared with the run's ids; a path or s3://BUCKET/DATA.")]

Checkpoint = Annotated[
    str, typer.Option(help="Checkpoint to use: latest, best, or a step. [best, where checkpoint.keep_best keeps it]")
]


@app.command()
def evaluate(
    run_dir: RunDir,
    data: RunData,
    split: Annotated[str, typer.Option(help="Split to read: test, train, validation.")] = "test",
    by: Annotated[
        list[str] | None,
        typer.Option(help="Field or kept column; measures each group of samples with the same value. Repeatable."),
    ] = None,
    top: Annotated[int, count_flag("Groups of --by to list, those with most samples.")] = 20,
    checkpoint: Checkpoint = "",
) -> None:
    """Evaluates a checkpoint of a run on a data set; prints the measures as JSON.

    With --by also GAUC, the mean AUC of the groups weighted by their samples, and the measures of the largest groups
    and of the rest, with a table on stderr. Takes about 120 bytes of memory for each sample, with --by 180.

    Example: `cowrec evaluate runs/criteo --data data/criteo --by C14`
    """
    from cowrec.trainer.reports.segments_table import segments_table
    from cowrec.trainer.runs.run_dir import to_json
    from cowrec.trainer.training.saved_run import evaluate_run

    quality = evaluate_run(run_dir, data, split, by=by or (), top=top, checkpoint=checkpoint)
    if launched_rank() == 0:
        for column in by or ():
            print(segments_table(column, quality["by"][column]), file=sys.stderr)
        print(to_json(quality))


@app.command()
def predict(
    run_dir: RunDir,
    data: RunData,
    output: Annotated[
        Path,
        typer.Option("--output", "-o", parser=parse_local, help="Parquet file to write; an existing one is replaced."),
    ],
    split: Annotated[str, typer.Option(help="Split to read: test, train, validation.")] = "test",
    checkpoint: Checkpoint = "",
) -> None:
    """Writes the click probability of every sample, in order, to a Parquet file, column `prediction`.

    Of several labels the columns are `prediction_NAME`. Beside them are `sample_number`, the sample's number over all
    raw files (bad lines count, headers do not), the labels where they are known, and the columns that were kept by
    `cowrec prepare --keep`.

    Prepare raw data with the run's ids first: `cowrec prepare criteo --like RUN --input new.txt --output DIR`

    Example: `cowrec predict runs/criteo --data DIR --output predictions.parquet`
    """
    from cowrec.trainer.training.saved_run import predict_run

    print(f"{output}: {predict_run(run_dir, data, output, split, checkpoint=checkpoint):,} rows")


@app.command()
def export(
    run_dir: RunDir,
    output: Annotated[str, typer.Option("--output", "-o", help="Folder to write: a path or s3://BUCKET/EXPORT.")],
    precision: Annotated[PrecisionName, typer.Option(help="Precision of the tables.")] = PrecisionName.float32,
    checkpoint: Checkpoint = "",
) -> None:
    """Exports a run's model for serving: tables, network, schema, vocabularies, and a manifest of these files.

    int8 stores a float32 scale with each row. The manifest records the largest error of tables and logits.

    Example: `cowrec export runs/criteo --output exports/criteo --precision int8`
    """
    from cowrec.trainer.export.export import export_run

    manifest = export_run(run_dir, output, precision.value, checkpoint=checkpoint)
    size = sum(each[0] for each in manifest.files.values())
    print(f"{output}: step {manifest.step}, {size:,} bytes, logits within {manifest.logits_error:.2g}")
