"""Flags of several commands and the values of flags: runs, logs, counts, lists with commas, paths."""

import dataclasses
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from tqdm import tqdm
from typer.core import TyperCommand

from cowrec.errors import UserError
from cowrec.names import parse_count

from ..runtime.environment import launched_world_size


def count_flag(help: str) -> Any:
    """A flag whose value is a count such as 512, 64K or 1M."""
    return typer.Option(parser=_count, metavar="COUNT", help=help)


def output_flag(help: str) -> Any:
    """The flag of a local file or folder to write."""
    return typer.Option("--output", "-o", parser=parse_local, help=help)


def _count(text: str | int) -> int:
    try:
        return text if isinstance(text, int) else parse_count(text, "a count")
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


def parse_counts(text: str, flag: str) -> list[int]:
    """Splits ``1K, 8K`` into [1024, 8192]."""
    return [parse_count(count, flag) for count in parse_list(text)]


def parse_list(text: str) -> list[str]:
    """Splits ``a, b`` into ["a", "b"]."""
    return [part.strip() for part in text.split(",")]


def parse_table_rows(text: str) -> int | None:
    """Reads the most rows of a table; full is None. Raises UserError for any other text."""
    return None if text == "full" else parse_count(text, "--rows, if not full,")


def parse_range(flag: str, text: str) -> tuple[float, float] | None:
    """Reads LOWEST,HIGHEST; fixed is None. Raises UserError, which names the flag."""
    if text == "fixed":
        return None
    try:
        low, high = map(float, parse_list(text))
    except ValueError:
        raise UserError(f"{flag} must be fixed or LOWEST,HIGHEST, such as 1e-5,1e-3; got {text!r}") from None
    return low, high


def parse_local(text: str) -> Path:
    """Reads a path that cannot be in an object store; a typer parser, whose errors name the flag."""
    from cowrec.data_pipeline.remote import is_remote, local_path

    try:
        if not is_remote(text):
            return local_path(text)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    raise typer.BadParameter(f"{text} must be a local path; write there, then copy it")


RAW_FILES = "Files, patterns, folders: text, JSON lines, these in gz, zst, xz, bz2, lz4, zip; Parquet; Arrow."


class InputsCommand(TyperCommand):
    """A command that takes several files after one --input, as a shell's pattern gives them."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        return super().parse_args(ctx, list(_one_flag_per_input(args)))


def _one_flag_per_input(args: Sequence[str]) -> Iterator[str]:
    """Repeats --input, --validation and --test before each of several values."""
    flag, values = "", 0  # values since the flag
    for argument in args:
        if argument.startswith("-"):
            flag, values = argument if argument in ("--input", "-i", "--validation", "--test") else "", 0
        elif flag:
            if values:
                yield flag
            values += 1
        yield argument


Keep = Annotated[
    list[str] | None,
    typer.Option(help="Raw columns, such as A,B, that predictions show beside the probability; repeatable."),
]


def kept_columns(keep: Sequence[str] | None) -> list[str]:
    return [column for columns in keep or () for column in parse_list(columns)]


PositiveValues = Annotated[
    list[str] | None,
    typer.Option("--positive", help="Value of the label that is positive, of several words; repeatable."),
]
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


LogForm = Annotated[
    Literal["text", "json"], typer.Option("--log-format", help="Form of the log: lines of text, or JSON lines.")
]


def load_run(config: Path | None, overrides: list[str] | None, data: str | None) -> tuple[Any, Path]:
    """Loads a run's configuration; also returns its data set. Raises UserError if one is missing or wrong."""
    from ..config.run import load_config
    from ..runs.local_copy import local_data

    loaded = load_config(config, overrides or ())
    if data is None and not loaded.data.dir:
        raise UserError("no data set: pass --data DIR or set data.dir in the run's TOML file")
    return loaded, local_data(data or loaded.data.dir)


def new_run_dir(named: Path, resume: bool) -> Path:
    """Default folder of a run of that configuration or data set. Raises UserError if the run needs a named one."""
    if launched_world_size() > 1:
        raise UserError("pass --run-dir under torchrun, so that all processes agree on it")
    if resume:
        raise UserError("--resume continues a run; name it with --run-dir")
    return Path("runs") / f"{named.stem}-{datetime.now():%Y%m%d-%H%M%S}"


def prepare_config(toml: Path | None, overrides: Sequence[str]) -> Any:
    """Applies overrides to the ``[prepare]`` section of a run's TOML file, all of which must be valid."""
    from cowrec.data_pipeline import PrepareConfig

    from ..config.run import apply_override, config_from, load_config

    section = load_config(toml).prepare if toml else PrepareConfig()
    given: dict[str, Any] = {"prepare": {}}
    for override in overrides:
        apply_override(given, override)
    values = given.pop("prepare")
    if given:
        raise UserError(f"prepare takes --set prepare.key=value only, got section {', '.join(given)}")
    if values.get("split", section.split) != section.split:
        # The file's sizes of splits belong to the file's kind of split.
        sizes = [f"{name}_{size}" for name in ("test", "validation") for size in ("fraction", "rows", "from")]
        values = {**dict.fromkeys(sizes), **values}
    return config_from({"prepare": {**dataclasses.asdict(section), **values}}).prepare


@contextmanager
def progress_bar(total: int, unit: str, what: str) -> Iterator[Callable[[int], None]]:
    """Gives what to call with the work just done; on a terminal a bar shows it until all is done."""
    with tqdm(total=total, unit=unit, desc=what, unit_scale=True, leave=False, disable=not sys.stderr.isatty()) as bar:

        def add(done: int) -> None:
            bar.update(done)
            if bar.n >= total:
                bar.close()

        yield add
