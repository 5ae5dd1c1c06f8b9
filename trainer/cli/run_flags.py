"""Flags of several commands: those that describe a run, and those of the log of commands that run for months."""

from datetime import datetime
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from .flag_values import count_flag, parse_local

RunToml = Annotated[Path, typer.Argument(help="The run's TOML file.")]
TrainData = Annotated[
    str | None, typer.Option(help="Prepared data set: a path or s3://BUCKET/DATA. [data.dir of the TOML file]")
]
NewRunDir = Annotated[
    str | None, typer.Option(help="Folder of the run, new or empty; a path or s3://BUCKET/RUN. [runs/NAME-DATE]")
]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", help="section.key=value, overrides the TOML file; 64K is 65,536; repeatable."),
]
Resume = Annotated[bool, typer.Option("--resume", help="Continue the run in --run-dir; start one if there is none.")]


class LogFormName(StrEnum):
    text = "text"
    json = "json"


LogForm = Annotated[LogFormName, typer.Option("--log-format", help="Form of the log: lines of text, or JSON lines.")]
LogFile = Annotated[
    Path | None,
    typer.Option("--log-file", parser=parse_local, help="File for the log, which rotates. [standard error]"),
]
LogMaxBytes = Annotated[int, count_flag("Size at which the log file is renamed to FILE.1; 0: never.")]
LogBackups = Annotated[int, count_flag("Number of renamed log files to keep.")]


def load_run(config: Path, overrides: list[str] | None, data: str | None) -> tuple[Any, Path]:
    """Loads a run's configuration; also returns its data set. Raises ValueError if one is missing or wrong."""
    from cowrec.trainer.config.run import load_config
    from cowrec.trainer.runs.remote_run import local_data

    loaded = load_config(config, overrides or ())
    if data is None and not loaded.data.dir:
        raise ValueError("no data set: pass --data DIR or set data.dir in the TOML")
    return loaded, local_data(data or loaded.data.dir)


def new_run_dir(config: Path) -> Path:
    """Default folder of a run."""
    return Path("runs") / f"{config.stem}-{datetime.now():%Y%m%d-%H%M%S}"
