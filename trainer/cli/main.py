"""The command line: ``cowrec prepare | synthesize | train | sweep | bench``, and those of the other cli files.

Commands import what they need when they run, so that ``--help`` answers at once.
"""

import dataclasses
import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from tqdm import tqdm

from cowrec.trainer.runtime.environment import launched_rank, launched_world_size, prepare_process
from cowrec.trainer.runtime.errors import Interrupted, is_message

from .flag_values import listed, number, size, table_rows
from .run_flags import Overrides, RunToml, TrainData, loaded_run, new_run_dir
from .saved_run_commands import app as saved_run
from .stream_commands import app as streams

app = typer.Typer(
    name="cowrec",
    help="Trains click-through-rate models at large batch sizes with CowClip.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    rich_markup_mode="markdown",
)


app.add_typer(saved_run)
app.add_typer(streams)


class LayoutName(StrEnum):
    criteo = "criteo"
    avazu = "avazu"
    csv = "csv"


Output = Annotated[Path, typer.Option("--output", "-o", help="Folder to make.")]


@app.command()
def prepare(
    layout: Annotated[LayoutName, typer.Argument(help="What the raw files look like.")],
    inputs: Annotated[
        list[Path], typer.Option("--input", "-i", help="Raw file, plain or gz, xz, zst; repeat it for several.")
    ],
    output: Output,
    csv_schema: Annotated[
        Path | None, typer.Option("--schema", help="For csv: TOML file that describes the columns; not with --like.")
    ] = None,
    like: Annotated[
        Path | None, typer.Option(help="Run or data set whose ids and scales to apply; all rows become the test split.")
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a data set that is there.")] = False,
    config: Annotated[Path | None, typer.Option(help="A run's TOML, for its [prepare]; flags go before it.")] = None,
    min_count: Annotated[int | None, typer.Option(help="Ids rarer than this in training share one row. [1]")] = None,
    hash_buckets: Annotated[
        int | None, typer.Option(help="Rows per field by a stateless hash, instead of a vocabulary. [0, off]")
    ] = None,
    raw_ids: Annotated[
        bool | None, typer.Option("--raw-ids", help="64-bit ids that become rows in training; no vocabulary.")
    ] = None,
    dense: Annotated[str | None, typer.Option(help="What becomes of numbers: [minmax], log, buckets, none.")] = None,
    fit_on: Annotated[str | None, typer.Option(help="Rows whose minimum and maximum count: [train], all.")] = None,
    split: Annotated[str | None, typer.Option(help="Rows for testing: [random], tail (the last ones).")] = None,
    test_fraction: Annotated[float | None, typer.Option(help="Of the random split. [0.1, for avazu 0.2]")] = None,
    test_rows: Annotated[int | None, typer.Option(help="Of the tail split.")] = None,
    seed: Annotated[int | None, typer.Option(help="Of the random split. [0]")] = None,
    on_bad_row: Annotated[str | None, typer.Option(help="At a bad row: [error], skip.")] = None,
    max_bad_rows: Annotated[int | None, typer.Option(help="How many may be skipped. [1000]")] = None,
    shard_rows: Annotated[int | None, typer.Option(help="Raw rows that go to one Parquet file of each split.")] = None,
    scheduler: Annotated[
        str | None, typer.Option(help="Dask cluster to do it, such as tcp://host:8786; it must see all folders.")
    ] = None,
) -> None:
    """Turns raw click logs into a data set: Parquet shards of ids and a schema.json.

    The layouts criteo (label, I1..I13, C1..C26, tabs, no header) and avazu (a header, then id, click, hour, C1,
    banner_pos ... C21) are Kaggle's; csv is your own delimited files, with numeric, categorical, multi-valued and
    weighted fields.

    Example: `cowrec prepare criteo --input train.txt.gz --output data/criteo --min-count 4`

    Example: `cowrec prepare csv --schema columns.toml --input ratings.csv --output data/ratings`
    """
    flags = {
        "min_count": min_count,
        "hash_buckets": hash_buckets,
        "raw_ids": raw_ids,
        "dense": dense,
        "fit_on": fit_on,
        "split": split,
        "test_fraction": test_fraction,
        "test_rows": test_rows,
        "seed": seed,
        "on_bad_row": on_bad_row,
        "max_bad_rows": max_bad_rows,
        "shard_rows": shard_rows,
    }
    from cowrec.data_pipeline import prepare as run
    from cowrec.data_pipeline import work_bytes

    settings = _prepare_config(config, {key: value for key, value in flags.items() if value is not None})
    with _bar(work_bytes(inputs, like=like), "B", f"prepare {layout}") as bar:
        schema = run(
            layout.value,
            inputs,
            output,
            settings,
            csv_schema=csv_schema,
            like=like,
            overwrite=overwrite,
            progress=bar.update,
            scheduler=scheduler,
        )
    rows = ", ".join(f"{split.rows:,} {name} rows" for name, split in schema.splits.items())
    bad = sum(source.bad_rows for source in schema.sources)
    skipped = f"; {bad:,} bad rows left out" if bad else ""
    rows_of_ids = sum(field.num_embeddings for field in schema.sparse)
    ids = "raw ids" if schema.has_raw_ids else f"{rows_of_ids:,} ids"
    print(f"{output}: {rows}, {len(schema.dense)} dense and {len(schema.sparse)} sparse fields, {ids}{skipped}")


@app.command()
def synthesize(
    output: Output,
    rows: Annotated[int, typer.Option(help="Training rows.")] = 1_000_000,
    test_rows: Annotated[int, typer.Option(help="Test rows.")] = 100_000,
    seed: Annotated[int, typer.Option(help="Of everything.")] = 0,
    vocabulary_scale: Annotated[
        float | None, typer.Option(help="Share of Criteo's 33.8 million ids; not with --days. [0.01]")
    ] = None,
    days: Annotated[
        float, typer.Option(help="Drifting samples: so many days of training rows, ids that come and go. [0, off]")
    ] = 0.0,
) -> None:
    """Makes click data from a planted model, whose best possible AUC is written down.

    By default it is Criteo-shaped and stands still. With --days, tastes drift in time, most ids are new at some moment
    and gone at another, and the data set has raw ids and times; `cowrec stream` sends the samples that follow.

    Example: `cowrec synthesize --output data/synthetic --rows 1000000`

    Example: `cowrec synthesize --output data/drifting --rows 1000000 --days 10`
    """
    from cowrec.data_pipeline import SynthesizeConfig, synthesize_drifting
    from cowrec.data_pipeline import synthesize as run
    from cowrec.data_pipeline.synthetic.drifting import DriftConfig

    with _bar(rows + test_rows, " rows", "synthesize") as bar:
        if days:
            if vocabulary_scale is not None:
                raise ValueError("--vocabulary-scale has no effect on drifting samples; leave it out or --days")
            drift = DriftConfig(rows=rows, days=days, seed=seed)
            schema = synthesize_drifting(output, drift, test_rows=test_rows, progress=bar.update)
        else:
            scale = SynthesizeConfig.vocabulary_scale if vocabulary_scale is None else vocabulary_scale
            config = SynthesizeConfig(rows=rows, test_rows=test_rows, seed=seed, vocabulary_scale=scale)
            schema = run(output, config, progress=bar.update)
    best = schema.best or {}
    print(f"{output}: {rows:,} train rows, {test_rows:,} test rows, best possible AUC {best['auc']:.4f}")


@app.command()
def train(
    config: RunToml,
    data: TrainData = None,
    run_dir: Annotated[Path | None, typer.Option(help="Folder of the run, new or empty. [runs/NAME-DATE]")] = None,
    overrides: Overrides = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with the run in --run-dir; start it where there is none.")
    ] = False,
) -> None:
    """Trains a model; batch size means the global batch, over all processes.

    Example: `cowrec train scripts/configs/criteo.toml --data data/criteo --set train.batch_size=131072`

    Several GPUs: `torchrun --nproc-per-node 8 -m cowrec.trainer train CONFIG.toml --data DIR --run-dir RUN`
    """
    from cowrec.trainer.training.loop import train as run

    loaded, data_dir = loaded_run(config, overrides, data)
    if run_dir is None and launched_world_size() > 1:
        raise ValueError("pass --run-dir under torchrun, so that all processes agree on it")
    if run_dir is None and resume:
        raise ValueError("--resume goes on with a run; say which with --run-dir")
    folder = run_dir or new_run_dir(config)
    report = run(loaded, data_dir, folder, resume=resume)
    if launched_rank() == 0:
        auc, logloss, speed = report["auc"], report["logloss"], report["samples_per_second"]
        print(f"AUC {auc:.4f}  logloss {logloss:.4f}  {speed:,.0f} samples/s  run {folder}")


@app.command()
def sweep(
    config: RunToml,
    batch_sizes: Annotated[str, typer.Option(help="Such as 1K,8K,64K; K is 1024.")],
    data: TrainData = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="Folder of the sweep; one interrupted is continued. [sweeps/NAME]"),
    ] = None,
    rules: Annotated[str, typer.Option(help="Scaling rules.")] = "cowclip,linear,none",
    clip: Annotated[str, typer.Option(help="With the TOML's clip rule (on), without (off), or both.")] = "on,off",
    seeds: Annotated[int, typer.Option(help="Runs of each combination, with seeds from train.seed on.")] = 3,
    overrides: Overrides = None,
) -> None:
    """Trains a grid of batch sizes, scaling rules, clip on and off; writes sweep.jsonl and sweep.png, prints a table.

    The same command goes on where it was interrupted, and with more values adds to what is there.

    Example: `cowrec sweep scripts/configs/criteo.toml --data data/criteo --batch-sizes 1K,8K,64K`
    """
    from cowrec.trainer.sweep.grid import Grid
    from cowrec.trainer.sweep.plot import PLOT, plot, table
    from cowrec.trainer.sweep.sweep import sweep as run

    if launched_world_size() > 1:
        raise ValueError("sweep starts its runs itself; start it without torchrun")
    grid = Grid([size(each) for each in listed(batch_sizes)], listed(rules), listed(clip), seeds)
    loaded, data_dir = loaded_run(config, overrides, data)
    folder = output or Path("sweeps") / config.stem
    lines = run(loaded, data_dir, folder, grid)
    print(f"{table(lines)}\n\n{folder}, plot: {plot(lines, folder / PLOT)}")


@app.command()
def bench(
    output: Annotated[
        Path, typer.Option("--output", "-o", help="JSON lines to write; the plot goes beside them.")
    ] = Path("bench.jsonl"),
    absent_rows: Annotated[str, typer.Option(help="What the rows do that a batch lacks.")] = "replay,lazy,dense",
    batch_sizes: Annotated[str, typer.Option(help="Such as 1K,8K,64K; K is 1024.")] = "1K,8K,64K",
    model: Annotated[str, typer.Option(help="Network: wdl, deepfm, dcn, dcnmix, dcnv2.")] = "deepfm",
    rows: Annotated[
        str, typer.Option(help="Rows of a table at most, such as 100K; K is 1000. full: Criteo's 33.8 million in all.")
    ] = "full",
    spacing: Annotated[
        str, typer.Option(help="Tables so many times larger than their ids need, which lie that far apart.")
    ] = "1",
    epoch_share: Annotated[
        float, typer.Option(help="Share of an epoch that the ids have run before the clock starts.")
    ] = 0.9,
    seconds: Annotated[float, typer.Option(help="Measured in each combination, at least 5 steps.")] = 20.0,
    clip: Annotated[str, typer.Option(help="CowClip: on, off, or on,off to compare.")] = "on",
    precision: Annotated[str, typer.Option(help="As train.precision: float32, tf32, bfloat16.")] = "float32",
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
) -> None:
    """Measures training in the steady state, with ids as frequent as Criteo's, made in memory.

    The settings are the published ones for Criteo. A line of the output is a combination, with its speed, its memory,
    where a step's time went, configuration, versions and hardware. At the end come tables, ratios among them.

    Example: `cowrec bench --rows full --absent-rows replay,lazy,dense --batch-sizes 1K,8K,64K --output bench.jsonl`
    """
    from cowrec.trainer.bench.bench import Bench
    from cowrec.trainer.bench.bench import bench as run
    from cowrec.trainer.bench.plot import table

    if launched_world_size() > 1:
        raise ValueError("bench starts its processes itself; start it without torchrun")
    settings = Bench(
        listed(absent_rows),
        [size(each) for each in listed(batch_sizes)],
        model,
        table_rows(rows),
        [number(each, 1, "--spacing is a whole number, such as 10") for each in listed(spacing)],
        epoch_share,
        seconds,
        listed(clip),
        listed(precision),
        device,
    )
    print(f"{table(run(settings, output))}\n\n{output}, plot: {output.with_suffix('.png')}")


def main() -> None:
    """Runs the command line; a user's mistake or a run gone astray ends in one line and exit code 2, Ctrl-C in 130."""
    prepare_process()
    try:
        app()
    except SystemExit as ended:
        _exit(ended.code if isinstance(ended.code, int) else int(ended.code is not None))
    except Exception as error:
        rank = f" (rank {launched_rank()})" if launched_world_size() > 1 else ""
        if isinstance(error, Interrupted):
            # All processes stop at the same step; one of them says so.
            if launched_rank() == 0:
                print(f"cowrec: {error}", file=sys.stderr)
            _exit(130)
        if not is_message(error):
            traceback.print_exc()
            _exit(1)
        print(f"cowrec{rank}: error: {error}", file=sys.stderr)
        _exit(2)


def _exit(code: int) -> NoReturn:
    """Ends the process; one of several at once, since Python would first wait for what the others will never send.

    And a thread of theirs that lets go of a Python object while Python winds up aborts the process.
    """
    if launched_world_size() > 1:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


def _prepare_config(toml: Path | None, flags: dict[str, Any]) -> Any:
    """The `[prepare]` section of a run's TOML, which must be right as a whole, with flags put over it."""
    from cowrec.data_pipeline import PrepareConfig
    from cowrec.trainer.config.run import load_config

    section = load_config(toml).prepare if toml else PrepareConfig()
    if flags.get("split", section.split) != section.split:
        # The file's sizes belong to the file's kind of split.
        flags = {"test_rows": None, "test_fraction": None, **flags}
    return dataclasses.replace(section, **flags)


@contextmanager
def _bar(total: int, unit: str, what: str) -> Iterator[tqdm]:
    with tqdm(total=total, unit=unit, desc=what, unit_scale=True, leave=False, disable=not sys.stderr.isatty()) as bar:
        yield bar
