"""Values of flags: lists with commas, known names, numbers, of batch sizes with K, and paths."""

from collections.abc import Collection
from pathlib import Path
from typing import Annotated

import typer

from cowrec.trainer.config.nearest_name import hint
from cowrec.trainer.signing import SigningKey, read_key

KeyFile = Annotated[
    Path | None,
    typer.Option(help="File of the secret key that exports, versions and pins are signed with. [they are not signed]"),
]


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


def parse_batch_size(text: str) -> int:
    """Reads a batch size; 8K is 8192. Raises ValueError for any other text."""
    digits, factor = (text[:-1], 1024) if text[-1:] in ("K", "k") else (text, 1)
    return factor * parse_number(digits, "a batch size must be a number, with K for 1024, such as 512 or 8K", text)


def parse_table_rows(text: str) -> int | None:
    """Reads the most rows of a table; full is None. Raises ValueError for any other text."""
    if text == "full":
        return None
    return parse_number(text, "--rows must be full or a number, such as 100000")


def parse_range(flag: str, text: str) -> tuple[float, float] | None:
    """Reads LOWEST,HIGHEST; fixed is None. Raises ValueError, which names the flag."""
    if text == "fixed":
        return None
    try:
        low, high = map(float, parse_list(text))
    except ValueError:
        raise ValueError(f"{flag} must be fixed or LOWEST,HIGHEST, such as 1e-5,1e-3; got {text!r}") from None
    return low, high


def parse_number(digits: str, what: str, text: str | None = None) -> int:
    """Reads a whole number. Raises ValueError, which starts with ``what`` and ends with ``text``, what was written."""
    if not digits.isdecimal():
        raise ValueError(f"{what}; got {text or digits!r}")
    return int(digits)


def key_of(path: Path | None) -> SigningKey | None:
    """Reads the key of --key-file, if it is given."""
    return None if path is None else read_key(path)


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
