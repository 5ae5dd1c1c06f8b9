"""Values of flags: counts, lists with commas, known names, ranges and paths."""

from collections.abc import Collection
from pathlib import Path
from typing import Any

import typer

from cowrec.trainer.config.checks import hint


def count_flag(help: str) -> Any:
    """A flag whose value is a count such as 512, 64K or 1M."""
    return typer.Option(parser=_count, metavar="COUNT", help=help)


def _count(text: str | int) -> int:
    try:
        return text if isinstance(text, int) else parse_count(text, "a count")
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


def parse_count(text: str, key: str) -> int:
    """Reads a count as :func:`cowrec.data_pipeline.counts.parse_count` does."""
    from cowrec.data_pipeline.counts import parse_count as parse  # loads torch, which --help does without

    return parse(text, key)


def parse_counts(text: str, flag: str) -> list[int]:
    """Splits ``1K, 8K`` into [1024, 8192]."""
    return [parse_count(each, flag) for each in parse_list(text)]


def parse_list(text: str) -> list[str]:
    """Splits ``a, b`` into ["a", "b"]."""
    return [each.strip() for each in text.split(",")]


def parse_names(flag: str, text: str, known: Collection[str]) -> list[str]:
    """Splits a list into known names, each once. Raises ValueError for an unknown name."""
    names = list(dict.fromkeys(parse_list(text)))
    for name in names:
        if name not in known:
            raise ValueError(f"--{flag} {name!r} is not known; {hint(name, known)}")
    return names


def parse_table_rows(text: str) -> int | None:
    """Reads the most rows of a table; full is None. Raises ValueError for any other text."""
    return None if text == "full" else parse_count(text, "--rows, if not full,")


def parse_range(flag: str, text: str) -> tuple[float, float] | None:
    """Reads LOWEST,HIGHEST; fixed is None. Raises ValueError, which names the flag."""
    if text == "fixed":
        return None
    try:
        low, high = map(float, parse_list(text))
    except ValueError:
        raise ValueError(f"{flag} must be fixed or LOWEST,HIGHEST, such as 1e-5,1e-3; got {text!r}") from None
    return low, high


def parse_local(text: str) -> Path:
    """Reads a path that cannot be in an object store; a typer parser, whose errors name the flag."""
    from cowrec.data_pipeline.remote import is_remote, local_path

    try:
        remote = is_remote(text)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    if remote:
        raise typer.BadParameter(f"{text} must be a local path; write there, then copy it")
    return local_path(text)
