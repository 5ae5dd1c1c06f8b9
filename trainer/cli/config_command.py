"""The command ``cowrec config init``."""

import sys
from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(name="config", help="Writes run files.", no_args_is_help=True)


@app.callback()
def group() -> None:
    """Writes run files."""


@app.command()
def init(
    preset: Annotated[
        str, typer.Option("--for", help="What to begin with: own-data, or a shipped configuration such as criteo.")
    ] = "own-data",
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="File to write, a new one. [standard output]")
    ] = None,
) -> None:
    """Writes a run file with every key, its description and its default, as comments.

    For own-data all keys have their defaults; for a shipped configuration its values are set.

    Example: `cowrec config init --for criteo --output run.toml`
    """
    from cowrec.trainer.config.reference import run_file

    text = run_file(preset)
    if output is None:
        sys.stdout.write(text)
        return
    try:
        with output.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise ValueError(f"{output} exists; choose another --output, or remove it") from None
    print(output)
