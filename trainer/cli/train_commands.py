"""The commands of runs: ``cowrec fit | config init | train | online | plot``."""

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from cowrec.errors import UserError

from ..runtime.environment import launched_rank, show_log
from .data_commands import prepared_summary
from .flags import (
    RAW_FILES,
    LogForm,
    NewRunDir,
    Overrides,
    PositiveValues,
    Resume,
    RunToml,
    TrainData,
    load_run,
    new_run_dir,
    output_flag,
    parse_local,
    progress_bar,
)

app = typer.Typer()
config_file = typer.Typer(no_args_is_help=True, help="Writes run files.")
app.add_typer(config_file, name="config")


@config_file.command()
def init(
    preset: Annotated[
        str, typer.Option("--for", help="What to begin with: own-data, or a shipped configuration such as criteo.")
    ] = "own-data",
    output: Annotated[Path | None, output_flag("File to write, a new one. [standard output]")] = None,
) -> None:
    """Writes a run file with every key, its description and its default, as comments.

    For own-data all keys have their defaults; for a shipped configuration its values are set.

    Example: `cowrec config init --for criteo --output run.toml`
    """
    from cowrec.files import replace_file, require_target

    from ..config.reference import run_file

    text = run_file(preset)
    if output is None:
        sys.stdout.write(text)
        return
    require_target(output, new=True)
    replace_file(output, text.encode())
    print(output)


@app.command()
def train(
    config: Annotated[Path | None, typer.Argument(help="The run's TOML file. [the defaults]")] = None,
    data: TrainData = None,
    run_dir: NewRunDir = None,
    overrides: Overrides = None,
    resume: Resume = False,
) -> None:
    """Trains a model on a prepared data set. train.batch_size is the global batch, over all processes.

    With the default settings, the run ends when the validation samples are no longer predicted better.

    Example: `cowrec train --data data/clicks --set train.batch_size=8K`, with the default settings, or
    `cowrec train run.toml --data data/clicks --run-dir runs/clicks`

    Several GPUs: `torchrun --nproc-per-node 8 -m cowrec.trainer train CONFIG.toml --data DIR --run-dir RUN`
    """
    from ..training.trainer import train as run

    loaded, data_dir = load_run(config, overrides, data)
    folder = run_dir or str(new_run_dir(config or data_dir, resume))
    report = run(loaded, data_dir, folder, resume=resume)
    if launched_rank() == 0:
        print(_summary(report, folder))


def _summary(report: dict[str, Any], folder: str | Path) -> str:
    from ..reports.text_table import speed_text

    auc, logloss, speed = report["auc"], report["logloss"], speed_text(report["samples_per_second"])
    epoch = f"  epoch {report['epoch']} of {len(report['epochs'])}"
    return f"AUC {auc:.4f}  logloss {logloss:.4f}{epoch}  {speed}  run {folder}"


@app.command()
def fit(
    inputs: Annotated[list[str], typer.Argument(help=RAW_FILES)],
    label: Annotated[str, typer.Option(help="Column of the label. [the one that looks like it]")] = "",
    positive: PositiveValues = None,
    schema_file: Annotated[
        Path | None,
        typer.Option("--schema", help="TOML file that describes the columns, such as RUN/data.toml, corrected."),
    ] = None,
    config: Annotated[Path | None, typer.Option(help="A run's TOML file. [the defaults]")] = None,
    run_dir: Annotated[
        Path | None,
        typer.Option(parser=parse_local, help="Folder of the run, new or empty. [runs/NAME-DATE]"),
    ] = None,
    overrides: Overrides = None,
) -> None:
    """Trains a model on raw files: schema infer, prepare and train in one command.

    The run's folder then also has the description of the columns, data.toml, and the prepared data. Please check what
    data.toml says of the label, the time, and which integers are numbers and which are ids; a corrected copy is for
    --schema of the next run. `cowrec predict` and `cowrec evaluate` apply the model to further files.

    Example: `cowrec fit clicks.csv --label click --run-dir runs/clicks`, then
    `cowrec predict runs/clicks --input new.csv --output predictions.parquet`
    """
    from cowrec.data_pipeline import work_bytes

    from ..config.run import load_config
    from ..training.fit import fit_files

    loaded = load_config(config, overrides or ())
    folder = run_dir or new_run_dir(Path(Path(inputs[0]).name.partition(".")[0]), resume=False)
    with progress_bar(work_bytes(inputs, config=loaded.prepare), "B", "prepare") as progress:
        model = fit_files(inputs, folder, label, loaded, schema_file, positive=positive or (), progress=progress)
    print(f"{model.data_dir}: {prepared_summary(model.schema)}\n{_summary(model.report, folder)}")


@app.command()
def online(
    config: RunToml,
    source: Annotated[
        str,
        typer.Option(
            help="Stream of samples: folder, redis://HOST:PORT/DB?stream=NAME, redis+sentinel://... (docs/online.md),"
            " or kafka://HOST:PORT/TOPIC."
        ),
    ],
    data: TrainData = None,
    run_dir: Annotated[
        str | None, typer.Option(help="Folder of the run, new or empty, on this machine. [runs/NAME-DATE]")
    ] = None,
    publish: Annotated[
        str | None,
        typer.Option(
            help="Target of publications: folder, redis://HOST:PORT/DB?name=NAME, or redis+sentinel://..."
            " (docs/online.md)."
        ),
    ] = None,
    overrides: Overrides = None,
    resume: Resume = False,
    log_format: LogForm = "text",
) -> None:
    """Trains on samples as they arrive; predicts each before training on it, saves snapshots, publishes changes.

    Fields, scales and vocabularies come from the data set, which may be a small sample. After a kill, --resume
    continues the run; the result is bit-identical to an uninterrupted run.

    Example: `cowrec online run.toml --data data/sample --source incoming --run-dir runs/live
    --publish published`

    Several processes: `torchrun --nproc-per-node 8 -m cowrec.trainer online CONFIG.toml --source SOURCE --run-dir RUN`
    """
    from cowrec.data_pipeline.remote import require_local

    from ..online.loop import online as run
    from ..reports.text_table import speed_text

    show_log(log_format)
    loaded, data_dir = load_run(config, overrides, data)
    why = "its journal is appended to with every batch"
    folder = require_local(run_dir, "--run-dir", why) if run_dir else new_run_dir(config, resume)
    report = run(loaded, data_dir, source, folder, publish=publish, resume=resume)
    if launched_rank() == 0:
        print(f"{report['samples']:,} samples  {speed_text(report['samples_per_second'])}  run {folder}")


@app.command()
def plot(
    runs: Annotated[
        list[str], typer.Argument(help="Folders of runs, finished or not, and of baselines; paths or s3://BUCKET/RUN.")
    ],
    output: Annotated[Path, output_flag("PNG, SVG or PDF file to write.")] = Path("runs.png"),
) -> None:
    """Draws the curves of one or several runs in one figure, and prints a table of their quality.

    The figure has training loss, AUC, logloss, learning rates, samples per second, calibration (click rate over mean
    prediction of each twentieth of the test samples, after the last epoch), and the clip: the share of the rows that it
    shortened, and the median of its limit to the norm of the gradient.

    Example: `cowrec plot runs/base runs/large --output comparison.png`
    """
    from cowrec.files import require_target

    from ..reports.run_curves import FORMATS, RunCurves, curves_table, plot_runs, read_baselines
    from ..runs.local_copy import local_copy
    from ..runs.run_dir import METRICS

    if output.suffix.lstrip(".") not in FORMATS:
        raise UserError(f"{output} must end in one of: {', '.join('.' + name for name in FORMATS)}")
    require_target(output)
    names = [Path(run).name or Path(run).resolve().name for run in runs]
    labels = [name if names.count(name) == 1 else run for name, run in zip(names, runs, strict=True)]
    folders = [local_copy(run, "run", copied=lambda name: name.startswith(METRICS)) for run in runs]
    of_folders = [read_baselines(folder / METRICS) for folder in folders]
    baselines = [line for lines in of_folders for line in lines]
    named = zip(labels, folders, of_folders, strict=True)
    curves = [RunCurves.read(label, folder / METRICS) for label, folder, lines in named if not lines]
    print(f"{curves_table(curves, baselines)}\n\nplot: {plot_runs(curves, output, baselines)}")
