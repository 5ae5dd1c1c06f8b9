"""The flags that describe a run: its TOML file, overrides, data set and folder."""

from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

import typer

RunToml = Annotated[Path, typer.Argument(help="The run's TOML file.")]
TrainData = Annotated[
    str | None, typer.Option(help="Prepared data set: a path or s3://BUCKET/DATA. [data.dir of the TOML file]")
]
NewRunDir = Annotated[
    str | None, typer.Option(help="Folder of the run, new or empty; a path or s3://BUCKET/RUN. [runs/NAME-DATE]")
]
Overrides = Annotated[
    list[str] | None, typer.Option("--set", help="section.key=value, overrides the TOML file; repeatable.")
]
Resume = Annotated[bool, typer.Option("--resume", help="Continue the run in --run-dir; start one if there is none.")]


def load_run(config: Path, overrides: list[str] | None, data: str | None) -> tuple[Any, Path]:
    """Loads a run's configuration; also returns its data set. Raises ValueError if one is missing or wrong."""
    from cowrec.trainer.config.run import load_config
    from cowrec.trainer.runs.remote_run import local_copy

    loaded = load_config(config, overrides or ())
    if data is None and not loaded.data.dir:
        raise ValueError("no data set: pass --data DIR or set data.dir in the TOML")
    return loaded, local_copy(data or loaded.data.dir, "data set")


def new_run_dir(config: Path) -> Path:
    """Default folder of a run."""
    return Path("runs") / f"{config.stem}-{datetime.now():%Y%m%d-%H%M%S}"
