"""The commands that make data: ``cowrec schema infer | prepare | synthesize | stream``."""

import dataclasses
from math import inf
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from cowrec.errors import UserError

from .flags import (
    RAW_FILES,
    InputsCommand,
    Keep,
    PositiveValues,
    count_flag,
    kept_columns,
    output_flag,
    prepare_config,
    progress_bar,
)

app = typer.Typer()
schema = typer.Typer(no_args_is_help=True, help="Describes the columns of raw files, for `prepare tabular --schema`.")
app.add_typer(schema, name="schema")


SplitInputs = Annotated[
    list[str] | None, typer.Option(help="Files of this split, as --input, which then gives the training samples.")
]


class _Prepare(InputsCommand):
    """The command ``prepare``; for a setting written as a flag, its error names the ``--set`` to write instead."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        from cowrec.data_pipeline import PrepareConfig

        settings = {key.name for key in dataclasses.fields(PrepareConfig)} - {"raw_ids"}
        for argument in args:
            flag, _, value = argument.partition("=")
            key = flag.removeprefix("--").replace("-", "_")
            if flag.startswith("--") and key in settings:
                raise UserError(f"prepare has no {flag}; write --set prepare.{key}={value or 'VALUE'}")
        return super().parse_args(ctx, args)


@schema.command()
def infer(
    file: Annotated[str, typer.Argument(help="Raw file: text or JSON lines, plain or compressed; Parquet; Arrow.")],
    output: Annotated[Path | None, output_flag("TOML file to write; it must not exist. [stdout]")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an existing file.")] = False,
    label: Annotated[str, typer.Option(help="Column of the label. [one of two values]")] = "",
    positive: PositiveValues = None,
    delimiter: Annotated[str, typer.Option(help=r"Of text, such as '::', ' ' or '\x01'. [found]")] = "",
) -> None:
    """Writes a commented schema file from the first rows of a raw file, and says in it what is unsure.

    Please check the label, the time, and which integers are numbers and which are ids.

    Example: `cowrec schema infer clicks.csv --output columns.toml`
    """
    from cowrec.data_pipeline import infer_schema
    from cowrec.files import replace_file, require_target

    if output is not None:
        require_target(output, new=not overwrite)
    found = infer_schema(file, label=label, positive=positive or (), delimiter=delimiter)
    if output is None:
        print(found.text, end="")
        return
    replace_file(output, found.text.encode())
    print("\n".join([*found.to_check, f"{output}: {len(found.fields)} fields, {len(found.doubts)} remarks to check"]))


@app.command(cls=_Prepare)
def prepare(
    layout: Annotated[Literal["criteo", "avazu", "tabular"], typer.Argument(help="Layout of the raw files.")],
    inputs: Annotated[
        list[str],
        typer.Option("--input", "-i", help=RAW_FILES),
    ],
    output: Annotated[str, typer.Option("--output", "-o", help="Folder to write: a path or s3://BUCKET/DATA.")],
    schema_file: Annotated[
        Path | None,
        typer.Option("--schema", help="For tabular: TOML file that describes the columns; not with --like."),
    ] = None,
    like: Annotated[
        str | None,
        typer.Option(help="Local run or data set whose ids and scales to apply; all samples go to the test split."),
    ] = None,
    validation: SplitInputs = None,
    test: SplitInputs = None,
    keep: Keep = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an existing data set.")] = False,
    config: Annotated[Path | None, typer.Option(help="A run's TOML file, whose [prepare] section to use.")] = None,
    raw_ids: Annotated[
        bool, typer.Option("--raw-ids", help="Keep ids as 64-bit numbers, which become rows in training.")
    ] = False,
    overrides: Annotated[
        list[str] | None,
        typer.Option("--set", help="prepare.key=value, overrides the TOML file; 64K is 65,536; repeatable."),
    ] = None,
    scheduler: Annotated[
        str | None,
        typer.Option(help="Dask cluster to run on, such as tcp://host:8786; its workers need access to all folders."),
    ] = None,
) -> None:
    """Turns raw click logs into a data set: Parquet shards of ids, and a schema.json.

    The layouts criteo (label, I1..I13, C1..C26, tabs, no header) and avazu (a header, then id, click, hour, C1,
    banner_pos ... C21) are Kaggle's; tabular is any delimited text, JSON lines, Parquet or Arrow, with numeric,
    categorical, multi-valued and weighted fields.

    Keys of --set, which docs/data.md explains: min_count, max_ids, hash_buckets, raw_ids, dense, fit_on, split,
    test_fraction, validation_fraction, test_rows, validation_rows, test_from, validation_from, negative_fraction, seed,
    on_bad_row, max_bad_rows, shard_rows.

    Example: `cowrec prepare criteo --input train.txt.gz --output data/criteo --set prepare.min_count=4`

    Example: `cowrec prepare tabular --schema columns.toml --input ratings.csv --output data/ratings`
    """
    from cowrec.data_pipeline import prepare as run
    from cowrec.data_pipeline import work_bytes

    files = [*inputs, *(validation or ()), *(test or ())]
    settings = prepare_config(config, [*(overrides or ()), *(["prepare.raw_ids=true"] if raw_ids else ())])
    with progress_bar(work_bytes(files, like=like, config=settings), "B", f"prepare {layout}") as bar:
        made = run(
            layout,
            inputs,
            output,
            settings,
            schema_file=schema_file,
            like=like,
            validation=validation or (),
            test=test or (),
            keep=kept_columns(keep),
            overwrite=overwrite,
            progress=bar,
            scheduler=scheduler,
        )
    print(f"{output}: {prepared_summary(made)}")


@app.command()
def synthesize(
    output: Annotated[Path, output_flag("Folder to write.")],
    rows: Annotated[int, count_flag("Training samples.")] = 1_000_000,
    test_rows: Annotated[int, count_flag("Test samples.")] = 100_000,
    seed: Annotated[int, typer.Option(help="Seed of model and samples.")] = 0,
    vocabulary_scale: Annotated[
        float | None, typer.Option(help="Share of Criteo's 33.8 million ids; not with --days. [0.01]")
    ] = None,
    days: Annotated[
        float, typer.Option(help="Days that the training samples span; above 0 their distribution drifts.")
    ] = 0.0,
    histories: Annotated[bool, typer.Option("--histories", help="An item and the user's items before it.")] = False,
) -> None:
    """Makes click data from a planted model, and records the best possible AUC.

    By default the data have Criteo's shape and one fixed distribution. With --days, preferences drift in time, ids
    appear and disappear, and the data set has raw ids and times; `cowrec stream` sends the samples that follow. With
    --histories, clicks depend on the order of a user's earlier items, and ids are raw too.

    Example: `cowrec synthesize --output data/synthetic --rows 1M`

    Example: `cowrec synthesize --output data/drifting --rows 1M --days 10`
    """
    from cowrec.data_pipeline import SynthesizeConfig, synthesize_drifting
    from cowrec.data_pipeline import synthesize as run
    from cowrec.data_pipeline.synthetic.drifting import DriftConfig
    from cowrec.data_pipeline.synthetic.histories import HistoryConfig, synthesize_histories

    with progress_bar(rows + test_rows, " samples", "synthesize") as bar:
        if histories and days:
            raise UserError("--histories and --days are two models; leave one out")
        if (histories or days) and vocabulary_scale is not None:
            kind, flag = ("samples with histories", "--histories") if histories else ("drifting samples", "--days")
            raise UserError(f"--vocabulary-scale has no effect on {kind}; leave it out or {flag}")
        if histories:
            config = HistoryConfig(rows=rows, seed=seed)
            made = synthesize_histories(output, config, test_rows=test_rows, progress=bar)
        elif days:
            drift = DriftConfig(rows=rows, days=days, seed=seed)
            made = synthesize_drifting(output, drift, test_rows=test_rows, progress=bar)
        else:
            scale = SynthesizeConfig.vocabulary_scale if vocabulary_scale is None else vocabulary_scale
            planted = SynthesizeConfig(rows=rows, test_rows=test_rows, seed=seed, vocabulary_scale=scale)
            made = run(output, planted, progress=bar)
    best = f"{made.best['auc']:.4f}" if made.best else "unknown, as test samples are of one class"
    print(f"{output}: {rows:,} train samples, {test_rows:,} test samples, best possible AUC {best}")


@app.command()
def stream(
    data: Annotated[Path, typer.Argument(help="Data set made by `cowrec synthesize --days`.")],
    to: Annotated[Path, typer.Option(help="Folder that the samples are written to, in Parquet files.")],
    days: Annotated[float, typer.Option(help="Days of sample time to send.")] = 1.0,
    skip_days: Annotated[
        float | None,
        typer.Option(help="Days of sample time to skip since the data set's start. [its training samples]"),
    ] = None,
    rate: Annotated[float, typer.Option(help="Samples per second; 0 is unlimited.")] = 0.0,
    chunk: Annotated[int, count_flag("Samples per file.")] = 1000,
    end: Annotated[bool, typer.Option("--end", help="Mark the end of the stream.")] = False,
) -> None:
    """Sends the samples that follow the training samples of a drifting data set, in the order of time.

    They are raw samples, as an application would log them: label, time, sample_id, numbers, ids as text.

    Example: `cowrec stream data/drifting --to incoming --days 30 --rate 2000`
    """
    from cowrec.data_pipeline.streams.directory import DirectorySink, send
    from cowrec.data_pipeline.synthetic.drifting import drift_config, drifting_tables
    from cowrec.files import locked_folder
    from cowrec.names import require

    require("--days", days, 0 <= days < inf, "at least 0 and finite")
    require("--skip-days", skip_days, skip_days is None or 0 <= skip_days < inf, "at least 0 and finite")
    require("--rate", rate, 0 <= rate < inf, "at least 0 and finite")
    require("--chunk", chunk, chunk >= 1, "at least 1")
    config = drift_config(data)
    first = config.rows if skip_days is None else round(skip_days * config.rows / config.days)
    with locked_folder(to):  # another command would give its files the same names
        sink = DirectorySink(to)
        sent = send(drifting_tables(config, first, round(days * config.rows / config.days), chunk), sink, rate)
        if end:
            sink.end()
    print(f"{to}: {sent:,} samples")


def prepared_summary(schema: Any) -> str:
    """Sizes of a data set and shares of positive samples, in one line."""
    from cowrec.data_pipeline.raw.parsing import counts_text

    sizes = ", ".join(f"{split.rows:,} {name} samples" for name, split in schema.splits.items())
    known = {name: split for name, split in schema.splits.items() if split.total and split.labelled}
    for task, label in enumerate(schema.labels if known else ()):
        shares = (f"{100 * split.positives[task] / split.total:.3g} % of {name}" for name, split in known.items())
        # Of one label all are known.
        sizes += f"; {label} {'positive' if len(schema.labels) == 1 else 'is 1'} in {', '.join(shares)}"
    bad = sum(schema.bad_rows.values())
    skipped = f"; {bad:,} bad rows left out ({counts_text(schema.bad_rows)})" if bad else ""
    num_ids = sum(field.num_embeddings for field in schema.sparse)
    ids = "raw ids" if schema.has_raw_ids else f"{num_ids:,} ids"
    return f"{sizes}; {len(schema.dense)} dense and {len(schema.sparse)} sparse fields, {ids}{skipped}"
