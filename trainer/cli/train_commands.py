"""The commands that train: ``cowrec train | online``."""

from typing import Annotated

import typer

from cowrec.trainer.runtime.environment import LogSettings, launched_rank, launched_world_size, open_log

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
