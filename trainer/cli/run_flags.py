"""The flags that say which run: its TOML, what goes over it, its data, its folder."""

from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

import typer

RunToml = Annotated[Path, typer.Argument(help="The run's TOML file.")]
TrainData = Annotated[Path | None, typer.Option(help="Prepared data set. [data.dir of the TOML]")]
Overrides = Annotated[
    list[str] | None, typer.Option("--set", help="section.key=value over the TOML; repeat it for several.")
]


def loaded_run(config: Path, overrides: list[str] | None, data: Path | None) -> tuple[Any, Path]:
    """A run's configuration and its data set. Raises ValueError where one is missing or wrong."""
    from cowrec.trainer.config.run import load_config

    loaded = load_config(config, overrides or ())
    if data is None and not loaded.data.dir:
        raise ValueError("no data set: pass --data DIR or set data.dir in the TOML")
    return loaded, data or Path(loaded.data.dir)


def new_run_dir(config: Path) -> Path:
    """Where a run goes that was given no folder."""
    return Path("runs") / f"{config.stem}-{datetime.now():%Y%m%d-%H%M%S}"
