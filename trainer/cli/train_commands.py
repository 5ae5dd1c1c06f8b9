"""The commands that train: ``cowrec train | online | sweep``."""

from pathlib import Path
from typing import Annotated

import typer

from cowrec.trainer.runtime.environment import launched_rank, launched_world_size
from cowrec.trainer.runtime.service_log import LogSettings, open_log

from .flag_values import count_flag, parse_counts, parse_list, parse_local
from .run_flags import (
    LogBackups,
    LogFile,
    LogForm,
    LogFormName,
    LogMaxBytes,
    NewRunDir,
    Overrides,
    Resume,
    RunToml,
    TrainData,
    load_run,
    new_run_dir,
)

app = typer.Typer()


@app.command()
def train(
    config: RunToml,
    data: TrainData = None,
    run_dir: NewRunDir = None,
    overrides: Overrides = None,
    resume: Resume = False,
) -> None:
    """Trains a model on a prepared data set. train.batch_size is the global batch, over all processes.

    Example: `cowrec train run.toml --data data/criteo --set train.batch_size=131072`

    Several GPUs: `torchrun --nproc-per-node 8 -m cowrec.trainer train CONFIG.toml --data DIR --run-dir RUN`
    """
    from cowrec.trainer.reports.text_table import speed_text
    from cowrec.trainer.training.loop import train as run

    loaded, data_dir = load_run(config, overrides, data)
    if run_dir is None and launched_world_size() > 1:
        raise ValueError("pass --run-dir under torchrun, so that all processes agree on it")
    if run_dir is None and resume:
        raise ValueError("--resume continues a run; name it with --run-dir")
    folder = run_dir or str(new_run_dir(config))
    report = run(loaded, data_dir, folder, resume=resume)
    if launched_rank() == 0:
        auc, logloss, speed = report["auc"], report["logloss"], speed_text(report["samples_per_second"])
        epoch = f"  epoch {report['epoch']} of {len(report['epochs'])}"
        print(f"AUC {auc:.4f}  logloss {logloss:.4f}{epoch}  {speed}  run {folder}")


@app.command()
def online(
    config: RunToml,
    source: Annotated[
        str,
        typer.Option(help="Stream of samples: folder, redis://HOST:PORT/DB?stream=NAME, or kafka://HOST:PORT/TOPIC."),
    ],
    data: TrainData = None,
    run_dir: Annotated[
        str | None, typer.Option(help="Folder of the run, new or empty, on this machine. [runs/NAME-DATE]")
    ] = None,
    publish: Annotated[
        str | None, typer.Option(help="Target of publications: folder, or redis://HOST:PORT/DB?name=NAME.")
    ] = None,
    overrides: Overrides = None,
    resume: Resume = False,
    log_format: LogForm = LogFormName.text,
    log_file: LogFile = None,
    log_max_bytes: LogMaxBytes = LogSettings.max_bytes,
    log_backups: LogBackups = LogSettings.backups,
) -> None:
    """Trains on samples as they arrive; predicts each before training on it, saves snapshots, publishes changes.

    Fields, scales and vocabularies come from the data set, which may be a small sample. After a kill, --resume
    continues the run; the result is bit-identical to an uninterrupted run.

    Example: `cowrec online run.toml --data data/sample --source incoming --run-dir runs/live
    --publish published`

    Several processes: `torchrun --nproc-per-node 8 -m cowrec.trainer online CONFIG.toml --source SOURCE --run-dir RUN`
    """
    from cowrec.data_pipeline.remote import require_local
    from cowrec.trainer.online.loop import online as run
    from cowrec.trainer.reports.text_table import speed_text

    if run_dir is None and launched_world_size() > 1:
        raise ValueError("pass --run-dir under torchrun, so that all processes agree on it")
    open_log(LogSettings(log_format.value, log_file, log_max_bytes, log_backups))
    if run_dir is None and resume:
        raise ValueError("--resume continues a run; name it with --run-dir")
    loaded, data_dir = load_run(config, overrides, data)
    why = "its journal is appended to with every batch"
    folder = require_local(run_dir, "--run-dir", why) if run_dir else new_run_dir(config)
    report = run(loaded, data_dir, source, folder, publish=publish, resume=resume)
    if launched_rank() == 0:
        print(f"{report['samples']:,} samples  {speed_text(report['samples_per_second'])}  run {folder}")


@app.command()
def sweep(
    config: RunToml,
    batch_sizes: Annotated[str, typer.Option(help="Batch sizes, such as 1K,8K,64K.")],
    data: TrainData = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            parser=parse_local,
            help="Folder of the sweep; an interrupted sweep continues. [sweeps/NAME]",
        ),
    ] = None,
    rules: Annotated[
        str | None,
        typer.Option(help="Scaling rules, separated by commas. [the TOML file's rule, and cowclip,linear,none]"),
    ] = None,
    clip: Annotated[str, typer.Option(help="on (the TOML file's clip rule), off, or both.")] = "on,off",
    seeds: Annotated[int, count_flag("Runs of each combination; seeds count up from train.seed.")] = 3,
    overrides: Overrides = None,
) -> None:
    """Trains a grid of batch sizes, scaling rules, clip on and off; writes sweep.jsonl and sweep.png, prints a table.

    After an interruption the same command continues; with more values it adds runs to the sweep.

    Example: `cowrec sweep run.toml --data data/criteo --batch-sizes 1K,8K,64K`
    """
    from cowrec.trainer.sweep.grid import Grid, default_rules
    from cowrec.trainer.sweep.plot import PLOT, plot
    from cowrec.trainer.sweep.sweep import clip_remark
    from cowrec.trainer.sweep.sweep import sweep as run
    from cowrec.trainer.sweep.table import table

    if launched_world_size() > 1:
        raise ValueError("sweep starts its own processes; start it without torchrun")
    loaded, data_dir = load_run(config, overrides, data)
    grid = Grid(
        parse_counts(batch_sizes, "--batch-sizes"),
        default_rules(loaded) if rules is None else parse_list(rules),
        parse_list(clip),
        seeds,
    )
    folder = output or Path("sweeps") / config.stem
    lines = run(loaded, data_dir, folder, grid)
    remark = clip_remark(lines)
    print(f"{table(lines)}\n\n" + (f"{remark}\n" if remark else "") + f"{folder}, plot: {plot(lines, folder / PLOT)}")
