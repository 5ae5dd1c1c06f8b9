"""The commands that use a trained model: ``cowrec evaluate | predict | export | serve | versions``."""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Literal

import typer

from cowrec.errors import UserError

from ..runtime.environment import launched_rank, show_log
from .flags import (
    RAW_FILES,
    InputsCommand,
    Keep,
    LogForm,
    count_flag,
    kept_columns,
    output_flag,
    prepare_config,
    progress_bar,
)

app = typer.Typer()


RunDir = Annotated[str, typer.Argument(help="Folder of a trained run: a path or s3://BUCKET/RUN.")]
RunData = Annotated[
    str | None, typer.Option(help="Data set prepared with the run's ids, a path or s3://BUCKET/DATA; not with --input.")
]
RawInputs = Annotated[list[str] | None, typer.Option("--input", "-i", help=f"Raw samples. {RAW_FILES}")]
Skipped = Annotated[
    list[str] | None,
    typer.Option("--set", help="Of --input: prepare.on_bad_row=skip or error, prepare.max_bad_rows=N. [the run's]"),
]

Checkpoint = Annotated[
    str, typer.Option(help="Checkpoint to use: latest, best, or a step. [best, where checkpoint.keep_best keeps it]")
]


@contextmanager
def _data_of(
    run_dir: str,
    data: str | None,
    inputs: list[str] | None,
    overrides: list[str] | None,
    *,
    keep: Sequence[str],
    beside: Path | None = None,
) -> Iterator[str | Path]:
    """Gives the data set of a command: --data, or what becomes of --input, beside the file to write if there is one."""
    from cowrec.data_pipeline import work_bytes

    from ..training.saved_run import encoded

    if (data is None) == (not inputs):
        raise UserError("pass a prepared data set with --data, or raw samples with --input")
    if data is not None:
        if keep or overrides:
            raise UserError(f"{'--keep' if keep else '--set'} is for --input; a data set has what it was prepared with")
        yield data
        return
    settings = prepare_config(None, overrides or ())
    files = inputs or ()
    with (
        progress_bar(work_bytes(files, like=run_dir), "B", "encode") as bar,
        encoded(run_dir, files, settings, keep=keep, beside=beside, labelled=beside is None, progress=bar) as folder,
    ):
        yield folder


@app.command(cls=InputsCommand)
def evaluate(
    run_dir: RunDir,
    data: RunData = None,
    inputs: RawInputs = None,
    split: Annotated[str, typer.Option(help="Split to read: test, train, validation.")] = "test",
    by: Annotated[
        list[str] | None,
        typer.Option(help="Field or kept column; measures each group of samples with the same value. Repeatable."),
    ] = None,
    top: Annotated[int, count_flag("Groups of --by to list, those with most samples.")] = 20,
    importance: Annotated[
        bool, typer.Option("--importance", help="Also measure with the values of each field permuted, one by one.")
    ] = False,
    checkpoint: Checkpoint = "",
    overrides: Skipped = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, as into a pipe or a file.")] = False,
) -> None:
    """Evaluates a checkpoint of a run; prints the measures, on a terminal as tables, else as JSON.

    --input takes raw files, of any number of samples with labels, and encodes them with the ids and scales of the run.
    Rows that cannot be read are left out with prepare.on_bad_row = "skip", and counted.

    With --by also GAUC, the mean AUC of the groups weighted by their samples, NDCG, MRR, and the measures of the
    largest groups and of the rest. Takes about 120 bytes of memory for each sample, with --by 180, and with
    --importance the samples themselves.

    Uses a GPU as training does; `CUDA_VISIBLE_DEVICES=1` before the command chooses the second, an empty value the CPU.

    Example: `cowrec evaluate runs/criteo --data data/criteo --by C14`

    Example: `cowrec evaluate runs/clicks --input new.csv`
    """
    from cowrec.data_pipeline import Schema

    from ..reports.text_table import quality_tables
    from ..runs.local_copy import local_copy
    from ..runs.run_dir import to_json
    from ..training.saved_run import evaluate_run

    groups, keep = by or [], list[str]()
    if inputs:
        fields = [field.name for field in Schema.load(local_copy(run_dir, "run")).sparse]
        keep = [column for column in groups if column not in fields]
    with _data_of(run_dir, data, inputs, overrides, keep=keep) as folder:
        quality = evaluate_run(run_dir, folder, split, by=groups, top=top, importance=importance, checkpoint=checkpoint)
    if launched_rank() == 0:
        print(quality_tables(quality) if sys.stdout.isatty() and not as_json else to_json(quality, indent=2))


@app.command(cls=InputsCommand)
def predict(
    run_dir: RunDir,
    output: Annotated[Path, output_flag("Parquet or .csv file to write; an existing one is replaced.")],
    data: RunData = None,
    inputs: RawInputs = None,
    keep: Keep = None,
    split: Annotated[str, typer.Option(help="Split to read: test, train, validation.")] = "test",
    checkpoint: Checkpoint = "",
    overrides: Skipped = None,
) -> None:
    """Writes the click probability of every sample, in order, to a Parquet or CSV file, column `prediction`.

    Of several labels the columns are `prediction_NAME`. Beside them are `sample_number`, the sample's number over all
    raw files (bad lines count, headers do not), the labels where they are known, and the columns of --keep.

    --input takes raw files, of any number of samples, with or without labels, and encodes them with the ids and scales
    of the run. The output has a row for each sample; with prepare.on_bad_row = "skip" all but the number of one that
    cannot be read is null.

    Uses a GPU as training does; `CUDA_VISIBLE_DEVICES=1` before the command chooses the second, an empty value the CPU.

    Example: `cowrec predict runs/clicks --input new.csv --keep user_id --output predictions.parquet`

    Example: `cowrec predict runs/criteo --data DIR --output predictions.parquet`
    """
    from ..training.saved_run import predict_run, require_writable

    require_writable(output)
    with _data_of(run_dir, data, inputs, overrides, keep=kept_columns(keep), beside=output) as folder:
        rows = predict_run(run_dir, folder, output, split, every_row=bool(inputs), checkpoint=checkpoint)
    print(f"{output}: {rows:,} rows")


@app.command()
def export(
    run_dir: RunDir,
    output: Annotated[str, typer.Option("--output", "-o", help="Folder to write: a path or s3://BUCKET/EXPORT.")],
    precision: Annotated[
        Literal["float32", "float16", "int8"], typer.Option(help="Precision of the tables.")
    ] = "float32",
    checkpoint: Checkpoint = "",
) -> None:
    """Exports a run's model for serving: tables, network, schema, vocabularies, and a manifest of these files.

    int8 stores a float32 scale with each row. The manifest records the largest error of tables and logits.

    Uses a GPU as training does; `CUDA_VISIBLE_DEVICES=1` before the command chooses the second, an empty value the CPU.

    Example: `cowrec export runs/criteo --output exports/criteo --precision int8`
    """
    from ..export.export import export_run

    manifest = export_run(run_dir, output, precision, checkpoint=checkpoint)
    size = sum(size for size, _ in manifest.files.values())
    print(f"{output}: step {manifest.step}, {size:,} bytes, logits within {manifest.logits_error:.2g}")


@app.command()
def serve(
    export_dir: Annotated[str, typer.Argument(help="Folder of an exported model: a path or s3://BUCKET/EXPORT.")],
    follow: Annotated[
        str | None,
        typer.Option(help="Publication whose new versions to apply: folder, s3://BUCKET/FOLDER or redis://HOST:PORT."),
    ] = None,
    max_age: Annotated[
        float | None,
        typer.Option(help="Seconds since a version was published, after which /readyz is 503. [any]"),
    ] = None,
    host: Annotated[
        str, typer.Option(help="Address to listen on; 0.0.0.0 is reachable from other machines.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on.")] = 8000,
    health_port: Annotated[
        int | None,
        typer.Option(help="Port on which a thread of its own answers /livez, /readyz, /metrics. [none]"),
    ] = None,
    max_samples: Annotated[int, count_flag("Most samples in a request.")] = 1000,
    timeout_ms: Annotated[
        float, typer.Option(help="Time from a request's arrival to its prediction; a request may ask for less.")
    ] = 1000.0,
    max_requests: Annotated[int, count_flag("Most requests that have arrived and wait; others get 503.")] = 256,
    max_connections: Annotated[
        int, count_flag("Most open connections; further ones get 503, but /livez, /readyz, /metrics.")
    ] = 2048,
    max_header_bytes: Annotated[int, count_flag("Most bytes of a request's headers.")] = 32 << 10,
    request_seconds: Annotated[float, typer.Option(help="Time for a request's headers or body to arrive.")] = 10.0,
    idle_seconds: Annotated[float, typer.Option(help="Time until a connection without a request is closed.")] = 75.0,
    drain_seconds: Annotated[
        float, typer.Option(help="Time after SIGTERM in which /readyz is 503 and requests are still answered.")
    ] = 0.0,
    access_log: Annotated[bool, typer.Option("--access-log", help="Log each request, with its X-Request-ID.")] = False,
    log_format: LogForm = "text",
) -> None:
    """Serves predictions over HTTP: POST /predict, GET /livez, /readyz, /metrics (Prometheus).

    A sample is a JSON object of the raw columns; a request is one sample, a list of samples, or
    `{"shared": {...}, "samples": [...]}` for samples that share fields.

    Example: `cowrec serve exports/criteo --follow published`

    Example: `curl localhost:8000/predict --data '{"I1": 3, "C1": "68fd1e64", ...}'`
    """
    from ..runs.local_copy import local_copy

    try:
        from ..serving.server import serve as run
        from ..serving.service import Limits
    except ModuleNotFoundError as error:
        remedy = "pip install 'cowrec[serve]'"
        raise UserError(f"serve requires {error.name}, which is not installed: {remedy}") from error

    show_log(log_format, "%(asctime)s cowrec: %(message)s")
    limits = Limits(
        max_samples, timeout_ms, max_requests, request_seconds, max_connections, idle_seconds, max_header_bytes
    )
    model = local_copy(export_dir, "export")
    run(
        model,
        follow,
        host=host,
        port=port,
        health_port=health_port,
        limits=limits,
        max_age=max_age,
        drain_seconds=drain_seconds,
        access_log=access_log,
    )


@app.command()
def versions(
    target: Annotated[str, typer.Argument(help="Publication: folder, s3://BUCKET/FOLDER or redis://HOST:PORT.")],
    republish: Annotated[
        int | None, typer.Option(help="Full version to publish again as the newest, while no trainer publishes there.")
    ] = None,
) -> None:
    """Lists what a trainer has published. --republish N makes all servers that follow it go back to version N.

    N is the number of a full version. Version N becomes the newest one under a new number. A trainer that is started
    again later publishes after it.

    Example: `cowrec versions published --republish 1042`
    """
    from ..publishing import versions as published

    if republish is not None:
        number = published.republish(target, republish)
        print(f"version {republish} is published again as version {number}, to which all servers go")
        return
    from ..reports.text_table import aligned

    listed = published.list_versions(target)
    rows = [["version", "kind", "step", "newest sample", "published", "bytes", "lineage", "state"]]
    for found in listed:
        state = "cannot be read" if found.problem else ""
        about, lineage = ["", "", ""], ""
        if found.blob:
            change, lineage = found.blob.change, found.blob.lineage
            about = [str(change.step), _date(change.sample_time), _date(found.blob.created)]
        rows.append([str(found.version), found.kind, *about, f"{found.size:,}", lineage[:8], state])
    print(aligned(rows))
    for found in listed:
        if found.problem:
            print(f"version {found.version}: {found.problem}")


def _date(moment: float | None) -> str:
    return "" if moment is None else f"{datetime.fromtimestamp(moment, UTC):%Y-%m-%d %H:%M:%S} UTC"
