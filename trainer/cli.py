"""The command line: ``cowrec prepare | synthesize | train | evaluate | predict``.

Commands import what they need when they run, so that ``--help`` answers at once.
"""

import logging
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from tqdm import tqdm

app = typer.Typer(
    name="cowrec",
    help="Trains click-through-rate models at large batch sizes with CowClip.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    rich_markup_mode="markdown",
)
prepare_app = typer.Typer(
    no_args_is_help=True,
    help="Turns raw click logs into Parquet shards of ids and a schema.json.",
    rich_markup_mode="markdown",
)
app.add_typer(prepare_app, name="prepare")


class DenseTransform(StrEnum):
    minmax = "minmax"
    log = "log"
    buckets = "buckets"
    none = "none"


class FitOn(StrEnum):
    train = "train"
    all = "all"


class SplitKind(StrEnum):
    random = "random"
    tail = "tail"


class OnBadRow(StrEnum):
    error = "error"
    skip = "skip"


Inputs = Annotated[
    list[Path], typer.Option("--input", "-i", help="Raw file, plain or gz, xz, zst; repeat it for several.")
]
Output = Annotated[Path, typer.Option("--output", "-o", help="Folder to make.")]
ConfigFile = Annotated[Path | None, typer.Option("--config", help="A run's TOML; its [prepare] section is used.")]
Like = Annotated[
    Path | None, typer.Option(help="Run or data set whose ids and scales to apply; all rows become the test split.")
]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace a data set that is there.")]
MinCount = Annotated[int | None, typer.Option(help="Ids rarer than this in training share one row. [default: 1]")]
HashBuckets = Annotated[
    int | None, typer.Option(help="Rows per field by a stateless hash, instead of a vocabulary. [default: 0, off]")
]
Dense = Annotated[DenseTransform | None, typer.Option(help="What becomes of numbers. [default: minmax]")]
Fit = Annotated[FitOn | None, typer.Option(help="Rows whose minimum and maximum count. [default: train]")]
Split = Annotated[SplitKind | None, typer.Option(help="Random rows for testing, or the last ones. [default: random]")]
TestFraction = Annotated[
    float | None, typer.Option(help="Of the random split. [default: 0.1, for Avazu 0.2]")
]
TestRows = Annotated[int | None, typer.Option(help="Of the tail split.")]
Seed = Annotated[int | None, typer.Option(help="Of the random split. [default: 0]")]
BadRow = Annotated[OnBadRow | None, typer.Option("--on-bad-row", help="Stop, or leave it out. [default: error]")]
MaxBadRows = Annotated[int | None, typer.Option(help="How many may be left out. [default: 1000]")]
ShardRows = Annotated[int | None, typer.Option(help="Rows of a Parquet file.")]


def _prepare(layout: str, inputs: list[Path], output: Path, config: Path | None, flags: dict[str, Any]) -> None:
    from cowrec.data_pipeline import PrepareConfig, prepare, work_bytes

    from .config import config_from, load_config

    settings: dict[str, Any] = {}
    if config is not None:
        load_config(config)  # the whole file is checked, so that a run does not fail on it later
        from .config import read_toml

        settings = dict(read_toml(config).get("prepare", {}))
    csv_schema, like, overwrite = flags.pop("csv_schema", None), flags.pop("like"), flags.pop("overwrite")
    given = {key: value for key, value in flags.items() if value is not None}
    if given.get("split", settings.get("split")) != settings.get("split"):
        # Another kind of split than the file's: the size that belonged to the file's has no meaning any more.
        settings.pop("test_rows", None)
        settings.pop("test_fraction", None)
    chosen = config_from(PrepareConfig, settings | given, "prepare.")
    total = work_bytes(inputs, chosen, like=like)
    with _bar(total, "B", f"prepare {layout}") as bar:
        schema = prepare(
            layout, inputs, output, chosen, csv_schema=csv_schema, like=like, overwrite=overwrite, progress=bar.update
        )
    rows = ", ".join(f"{split.rows:,} {name} rows" for name, split in schema.splits.items())
    bad = sum(source.bad_rows for source in schema.sources)
    skipped = f"; {bad:,} bad rows left out" if bad else ""
    ids = sum(field.num_embeddings for field in schema.sparse)
    print(f"{output}: {rows}, {len(schema.dense)} dense and {len(schema.sparse)} sparse fields, {ids:,} ids{skipped}")


@prepare_app.command("criteo")
def prepare_criteo(
    inputs: Inputs, output: Output, config: ConfigFile = None, like: Like = None, overwrite: Overwrite = False,
    min_count: MinCount = None, hash_buckets: HashBuckets = None, dense: Dense = None, fit_on: Fit = None,
    split: Split = None, test_fraction: TestFraction = None, test_rows: TestRows = None, seed: Seed = None,
    on_bad_row: BadRow = None, max_bad_rows: MaxBadRows = None, shard_rows: ShardRows = None,
) -> None:  # fmt: skip
    """Kaggle's Criteo Display Advertising layout: label, I1..I13, C1..C26, tabs, no header.

    Example: `cowrec prepare criteo --input train.txt.gz --output data/criteo --min-count 4`
    """
    _prepare("criteo", **_flags(locals()))


@prepare_app.command("avazu")
def prepare_avazu(
    inputs: Inputs, output: Output, config: ConfigFile = None, like: Like = None, overwrite: Overwrite = False,
    min_count: MinCount = None, hash_buckets: HashBuckets = None, dense: Dense = None, fit_on: Fit = None,
    split: Split = None, test_fraction: TestFraction = None, test_rows: TestRows = None, seed: Seed = None,
    on_bad_row: BadRow = None, max_bad_rows: MaxBadRows = None, shard_rows: ShardRows = None,
) -> None:  # fmt: skip
    """Kaggle's Avazu layout: a header, then id, click, hour, C1, banner_pos ... C21.

    Example: `cowrec prepare avazu --input train.gz --output data/avazu`
    """
    _prepare("avazu", **_flags(locals()))


@prepare_app.command("csv")
def prepare_csv(
    inputs: Inputs, output: Output,
    csv_schema: Annotated[
        Path | None, typer.Option("--schema", help="TOML file that describes the columns; not with --like.")
    ] = None,
    config: ConfigFile = None, like: Like = None, overwrite: Overwrite = False,
    min_count: MinCount = None, hash_buckets: HashBuckets = None, dense: Dense = None, fit_on: Fit = None,
    split: Split = None, test_fraction: TestFraction = None, test_rows: TestRows = None, seed: Seed = None,
    on_bad_row: BadRow = None, max_bad_rows: MaxBadRows = None, shard_rows: ShardRows = None,
) -> None:  # fmt: skip
    """Your own delimited files: numeric, categorical, multi-valued and weighted fields.

    Example: `cowrec prepare csv --schema scripts/configs/movielens_schema.toml --input ratings.csv --output data/ml`
    """
    _prepare("csv", **_flags(locals()))


@app.command()
def synthesize(
    output: Output,
    rows: Annotated[int, typer.Option(help="Training rows.")] = 1_000_000,
    test_rows: Annotated[int, typer.Option(help="Test rows.")] = 100_000,
    seed: Annotated[int, typer.Option(help="Of everything.")] = 0,
    vocabulary_scale: Annotated[float, typer.Option(help="Share of Criteo's 33.8 million ids.")] = 0.01,
) -> None:
    """Makes Criteo-shaped data from a planted model, whose best possible AUC is written down.

    Example: `cowrec synthesize --output data/synthetic --rows 1000000`
    """
    from cowrec.data_pipeline import SynthesizeConfig
    from cowrec.data_pipeline import synthesize as run

    config = SynthesizeConfig(rows=rows, test_rows=test_rows, seed=seed, vocabulary_scale=vocabulary_scale)
    with _bar(rows + test_rows, " rows", "synthesize") as bar:
        schema = run(output, config, progress=bar.update)
    best = schema.best or {}
    print(f"{output}: {rows:,} train rows, {test_rows:,} test rows, best possible AUC {best['auc']:.4f}")


@app.command()
def train(
    config: Annotated[Path, typer.Argument(help="The run's TOML file.")],
    data: Annotated[Path | None, typer.Option(help="Prepared data set; default: data.dir of the TOML.")] = None,
    run_dir: Annotated[Path | None, typer.Option(help="Folder of the run. [default: runs/NAME-DATE]")] = None,
    overrides: Annotated[
        list[str] | None, typer.Option("--set", help="section.key=value over the TOML; repeat it for several.")
    ] = None,
) -> None:
    """Trains a model; batch size means the global batch, over all processes.

    Example: `cowrec train scripts/configs/criteo.toml --data data/criteo --set train.batch_size=131072`

    Several GPUs: `torchrun --nproc-per-node 8 -m cowrec.trainer train CONFIG.toml --data DIR --run-dir RUN`
    """
    from .config import load_config
    from .loop import train as run

    loaded = load_config(config, overrides or ())
    data_dir = data or (Path(loaded.data.dir) if loaded.data.dir else None)
    if data_dir is None:
        raise ValueError("no data set: pass --data DIR or set data.dir in the TOML")
    folder = run_dir or _new_run_dir(config.stem)
    report = run(loaded, data_dir, folder)
    if int(os.environ.get("RANK", 0)) == 0:
        print(
            f"AUC {_number(report['auc'], '.4f')}  logloss {_number(report['logloss'], '.4f')}  "
            f"{report['samples_per_second']:,.0f} samples/s  run {folder}"
        )


@app.command()
def evaluate(
    run_dir: Annotated[Path, typer.Argument(help="Folder of a trained run.")],
    data: Annotated[Path, typer.Option(help="Data set prepared with the run's ids.")],
    split: Annotated[str, typer.Option(help="Which rows.")] = "test",
) -> None:
    """Prints AUC, logloss and rows of a data set under a run's newest checkpoint, as JSON.

    Example: `cowrec evaluate runs/criteo --data data/criteo`
    """
    from .run_dir import to_json
    from .saved_run import evaluate_run

    quality = evaluate_run(run_dir, data, split)
    if int(os.environ.get("RANK", 0)) == 0:
        print(to_json(quality))


@app.command()
def predict(
    run_dir: Annotated[Path, typer.Argument(help="Folder of a trained run.")],
    data: Annotated[Path, typer.Option(help="Data set prepared with the run's ids.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="Parquet file to write.")],
    split: Annotated[str, typer.Option(help="Which rows.")] = "test",
) -> None:
    """Writes the click probability of every row, in order, to a Parquet file.

    Raw data first take the run's ids: `cowrec prepare criteo --like RUN --input new.txt --output DIR`

    Example: `cowrec predict runs/criteo --data DIR --output predictions.parquet`
    """
    from .saved_run import predict_run

    print(f"{output}: {predict_run(run_dir, data, output, split):,} rows")


def main() -> None:
    """Runs the command line; a user's mistake ends in one line and exit code 2, Ctrl-C in 130."""
    # Deprecations inside libraries are not the user's concern, and say nothing about their data.
    warnings.filterwarnings("ignore", category=DeprecationWarning)
    warnings.filterwarnings("ignore", category=FutureWarning)
    logging.getLogger("torch.fx._symbolic_trace").setLevel(logging.ERROR)
    try:
        app()
    except KeyboardInterrupt as stopped:
        print(f"cowrec: {stopped or 'interrupted'}", file=sys.stderr)
        sys.exit(130)
    except (ValueError, OSError, ImportError, RuntimeError) as error:
        if not _is_message(error):
            raise
        print(f"cowrec: error: {error}", file=sys.stderr)
        sys.exit(2)


def _is_message(error: Exception) -> bool:
    """True for errors that are written for users; a RuntimeError of a library keeps its traceback."""
    return not isinstance(error, RuntimeError) or type(error).__module__.startswith("cowrec.")


def _flags(arguments: dict[str, Any]) -> dict[str, Any]:
    """A command's arguments as keywords of _prepare: where to, and the flags."""
    where = {key: arguments.pop(key) for key in ("inputs", "output", "config")}
    return {**where, "flags": {key: getattr(value, "value", value) for key, value in arguments.items()}}


def _new_run_dir(name: str) -> Path:
    from datetime import datetime

    launched = os.environ.get("WORLD_SIZE", "1") != "1"
    if launched:
        raise ValueError("pass --run-dir under torchrun, so that all processes agree on it")
    return Path("runs") / f"{name}-{datetime.now():%Y%m%d-%H%M%S}"


@contextmanager
def _bar(total: int, unit: str, what: str) -> Iterator[tqdm]:
    with tqdm(
        total=total, unit=unit, desc=what, unit_scale=True, leave=False, disable=not sys.stderr.isatty()
    ) as bar:
        yield bar


def _number(value: float | None, form: str) -> str:
    return "undefined" if value is None or value != value else format(value, form)
