"""The commands that measure and compare: ``cowrec sweep | tune | baseline | bench``."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from cowrec.errors import UserError

from ..runtime.environment import launched_rank, launched_world_size
from .flags import (
    Overrides,
    RunToml,
    TrainData,
    count_flag,
    load_run,
    output_flag,
    parse_counts,
    parse_list,
    parse_range,
    parse_table_rows,
)

app = typer.Typer()

_PRESETS = ("criteo", "mlperf-dcnv2")
_OF_CRITEO_ALONE = ("absent_rows", "model", "epoch_share")
_RANGE = "LOWEST,HIGHEST, or fixed. [a tenth to ten times the configuration's value]"


@app.command()
def sweep(
    config: RunToml,
    batch_sizes: Annotated[str, typer.Option(help="Batch sizes, such as 1K,8K,64K.")],
    data: TrainData = None,
    output: Annotated[Path | None, output_flag("Folder, new or to continue. [sweeps/NAME]")] = None,
    rules: Annotated[
        str | None,
        typer.Option(help="Scaling rules, separated by commas. [the TOML file's rule, and cowclip,linear,none]"),
    ] = None,
    clip: Annotated[str, typer.Option(help="on (the TOML file's clip rule), off, or on,off.")] = "on,off",
    seeds: Annotated[int, count_flag("Runs of each combination; seeds count up from train.seed.")] = 3,
    overrides: Overrides = None,
) -> None:
    """Trains a grid of batch sizes, scaling rules, clip on and off; writes sweep.jsonl and sweep.png, prints a table.

    Each run trains as long as `cowrec train` does; train.epochs gives all runs the same number of epochs.

    After an interruption the same command continues; with more values it adds runs to the sweep.

    Example: `cowrec sweep run.toml --data data/criteo --batch-sizes 1K,8K,64K`
    """
    from ..sweep.results import SWEEP_PLOT, plot_sweep, sweep_table
    from ..sweep.sweep import Grid, clip_summary, default_rules
    from ..sweep.sweep import sweep as run

    if launched_world_size() > 1:
        raise UserError("sweep starts its own processes; start it without torchrun")
    loaded, data_dir = load_run(config, overrides, data)
    grid = Grid(
        parse_counts(batch_sizes, "--batch-sizes"),
        default_rules(loaded) if rules is None else parse_list(rules),
        parse_list(clip),
        seeds,
    )
    folder = output or Path("sweeps") / config.stem
    lines = run(loaded, data_dir, folder, grid)
    remark = clip_summary(lines)
    picture = plot_sweep(lines, folder / SWEEP_PLOT)
    print(f"{sweep_table(lines)}\n\n" + (f"{remark}\n" if remark else "") + f"{folder}, plot: {picture}")


@app.command()
def tune(
    config: RunToml,
    batch_size: Annotated[int, count_flag("Batch size to tune at, such as 256 or 1K.")],
    data: TrainData = None,
    output: Annotated[Path | None, output_flag("Folder, new or to continue. [tunings/NAME]")] = None,
    trials: Annotated[int, count_flag("Trials of the study, pruned and failed ones included.")] = 20,
    embedding_lr: Annotated[str | None, typer.Option(help=_RANGE)] = None,
    dense_lr: Annotated[str | None, typer.Option(help=_RANGE)] = None,
    l2: Annotated[str | None, typer.Option(help=_RANGE)] = None,
    metric: Annotated[str, typer.Option(help="Validation quality to optimize: logloss or auc.")] = "logloss",
    validation_fraction: Annotated[
        float, typer.Option(help="Share of the training split to validate on, where nothing else sets any samples.")
    ] = 0.1,
    patience: Annotated[
        int | None,
        count_flag(
            "Epochs without improvement that end a trial, where train.patience is 0; 0: never. [1; 0 where rates decay]"
        ),
    ] = None,
    prune: Annotated[bool, typer.Option(help="End trials that are worse than the median of the others.")] = True,
    seed: Annotated[int, typer.Option(help="Seed of the search; all trials have the seed of the TOML file.")] = 0,
    overrides: Overrides = None,
) -> None:
    """Searches learning rates and L2 at one batch size; writes tuned.toml, for `cowrec train` and `cowrec sweep`.

    Trials are chosen by validation samples, never by the test split. Without a validation split, these are the last
    samples of the training split. After an interruption the same command continues; with more trials or wider ranges it
    goes on from those it has.

    Example: `cowrec tune run.toml --data data/criteo --batch-size 1K --trials 20`
    """
    try:
        from ..sweep.tune import TUNED, Search, hints
        from ..sweep.tune import tune as run
    except ModuleNotFoundError as error:
        remedy = "pip install 'cowrec[tune]'"
        raise UserError(f"tune requires {error.name}, which is not installed: {remedy}") from error
    from ..sweep.results import VALUES, tune_table

    if launched_world_size() > 1:
        raise UserError("tune starts its own processes; start it without torchrun")
    texts = dict(zip(VALUES, (embedding_lr, dense_lr, l2), strict=True))
    ranges = {name: parse_range(f"--{name.replace('_', '-')}", text) for name, text in texts.items() if text}
    search = Search(batch_size, metric, ranges, validation_fraction, patience, prune, seed)
    loaded, data_dir = load_run(config, overrides, data)
    folder = output or Path("tunings") / config.stem
    found = run(loaded, data_dir, folder, search, trials)
    if found.best is None:
        raise UserError(f"no trial is complete; the lines of {folder} say why; lower the ranges, or give more --trials")
    print(f"{tune_table(found.lines, metric)}\n\n{folder / TUNED}")
    for message in hints(found.best, found.ranges, loaded.train.epochs):
        print(f"cowrec: {message}", file=sys.stderr)


@app.command()
def baseline(
    data: Annotated[Path, typer.Argument(help="Folder of a prepared data set.")],
    output: Annotated[Path | None, output_flag("Folder to write, for cowrec plot. [runs/baseline_DATA]")] = None,
    most_rows: Annotated[int, count_flag("Training samples to use at most, the newest.")] = 10 << 20,
) -> None:
    """Trains LightGBM and logistic regression on a prepared data set, and prints their quality on the test split.

    LightGBM has its default values, ids are categories, and validation samples choose the number of trees. Logistic
    regression has a weight for each id; validation samples choose its L2 penalty. Validation samples are those of the
    data set, or the last tenth of the training split.

    Example: `cowrec baseline data/criteo`, then `cowrec plot runs/criteo runs/baseline_criteo`
    """
    from ..reports.run_curves import curves_table
    from ..sweep.baseline import baselines

    output = output or Path("runs") / f"baseline_{data.resolve().name}"
    found = list(baselines(data, output, most_rows))
    for line in found:
        chosen = f"{line['trees']} trees" if "trees" in line else f"C = {line['C']}"
        print(f"{line['model']}: {line['train_rows']:,} training samples, {chosen}, {line['seconds']:.1f} s")
    print(f"\n{curves_table([], found)}\n\nbaseline: {output}")


@app.command()
def bench(
    context: typer.Context,
    output: Annotated[Path, output_flag("JSON lines file to write; it must not exist.")] = Path("bench.jsonl"),
    preset: Annotated[
        str,
        typer.Option(help="criteo: the CowClip paper's settings. mlperf-dcnv2: DLRM-DCNv2 of MLPerf Training v6.0."),
    ] = "criteo",
    absent_rows: Annotated[str, typer.Option(help="Values of optimizer.absent_rows to compare.")] = "replay,lazy,dense",
    batch_sizes: Annotated[
        str | None,
        typer.Option(help="Batch sizes. Default: 1K,8K,64K; of mlperf-dcnv2: 6912 for each process."),
    ] = None,
    model: Annotated[str, typer.Option(help="Network, as model.name: deepfm, dcnv2 and others.")] = "deepfm",
    rows: Annotated[str, typer.Option(help="Most rows of a table, such as 100K. full: the published ones.")] = "full",
    epoch_share: Annotated[float, typer.Option(help="Share of an epoch after which the measurement starts.")] = 0.9,
    seconds: Annotated[float, typer.Option(help="Seconds to measure each combination; at least 5 steps.")] = 20.0,
    clip: Annotated[str, typer.Option(help="CowClip: on, off, or on,off to compare.")] = "on",
    precision: Annotated[str, typer.Option(help="Values of train.precision: float32, tf32, bfloat16.")] = "float32",
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
) -> None:
    """Measures training speed and memory in the steady state, on generated ids.

    By default with Criteo's frequencies and the settings published for Criteo; with --preset mlperf-dcnv2 the network,
    tables and numbers of ids of MLPerf Training's DLRM-DCNv2, on one GPU or, under torchrun, on several. Each line
    of the output is one combination: speed, memory, time of the parts of a step, configuration, versions and hardware.
    Prints tables at the end. After a combination that fails the others are measured, and the exit code is 2.

    Example: `cowrec bench --rows full --absent-rows replay,lazy,dense --batch-sizes 1K,8K,64K --output bench.jsonl`
    """
    from cowrec.files import require_target
    from cowrec.names import require_choices

    from ..bench.bench import bench as run
    from ..bench.bench import table
    from ..bench.criteo import Bench
    from ..bench.mlperf import BATCH_SIZE_OF_GPU
    from ..runtime.errors import ProcessFailed

    require_choices("--preset", [preset], _PRESETS)
    mlperf = preset == "mlperf-dcnv2"
    _refuse_flags_of_criteo(context, preset)
    if launched_world_size() > 1 and not mlperf:
        raise UserError("bench starts its own processes; start it without torchrun")
    sizes = batch_sizes or (str(BATCH_SIZE_OF_GPU * launched_world_size()) if mlperf else "1K,8K,64K")
    settings = Bench(
        parse_list(absent_rows),
        parse_counts(sizes, "--batch-sizes"),
        model,
        parse_table_rows(rows),
        epoch_share,
        seconds,
        parse_list(clip),
        parse_list(precision),
        device,
    )
    if launched_rank() == 0:
        require_target(output)
        if output.is_file() and output.stat().st_size:
            raise UserError(f"{output} exists, with earlier measurements; choose another --output, or remove it")
    lines = run(settings, output, mlperf=mlperf)
    if measured := [line for line in lines if "error" not in line]:
        print(f"{table(measured)}\n\n{output}")
    if failed := len(lines) - len(measured):
        raise ProcessFailed(f"{failed} of {len(lines)} combinations failed; their lines in {output} say why")


def _refuse_flags_of_criteo(context: typer.Context, preset: str) -> None:
    for name in _OF_CRITEO_ALONE:
        source = context.get_parameter_source(name)
        if preset != "criteo" and source is not None and source.name != "DEFAULT":
            raise UserError(f"--{name.replace('_', '-')} has no meaning for --preset {preset}; leave it out")
