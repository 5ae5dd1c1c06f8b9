"""The command that describes raw files: ``cowrec schema infer``."""

from pathlib import Path
from typing import Annotated

import typer

schema = typer.Typer(no_args_is_help=True)
app = typer.Typer()
app.add_typer(schema, name="schema", help="Describes the columns of raw files.")


@schema.callback()
def _schema() -> None:
    """Describes the columns of raw files, for `cowrec prepare tabular --schema`."""


@schema.command()
def infer(
    file: Annotated[Path, typer.Argument(help="Raw file: text, plain or compressed, Parquet or Arrow.")],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="TOML file to write; it must not exist. [stdout]")
    ] = None,
    label: Annotated[str, typer.Option(help="Column of the label. [one of two values]")] = "",
) -> None:
    """Writes a commented schema file from the first rows of a raw file, and says in it what is unsure.

    Please check the label, the time, and which integers are numbers and which are ids.

    Example: `cowrec schema infer clicks.csv --output columns.toml`
    """
    from cowrec.data_pipeline import infer_schema

    if output is not None and output.exists():
        raise ValueError(f"{output} exists; choose another file or remove it")
    text = infer_schema(file, label=label)
    if output is None:
        print(text, end="")
        return
    output.write_text(text, encoding="utf-8")
    print(f"{output}: {text.count('{name')} fields, {text.count('unsure')} remarks to check")
