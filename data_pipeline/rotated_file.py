"""A file of lines that does not grow for ever: when it is full it becomes FILE.1, in place of the one before."""

import os
from pathlib import Path


def earlier(path: Path) -> Path:
    """The file that a full one is renamed to."""
    return path.with_name(f"{path.name}.1")


def append_line(path: Path, line: bytes, max_bytes: int) -> bool:
    """Appends a line; returns whether the file was full and has been renamed before.

    Args:
        path: the file; created if missing.
        line: ends with a line end.
        max_bytes: size of a full file; 0: none is.

    Raises:
        OSError: it cannot be written.
    """
    with path.open("ab") as file:
        if not max_bytes or not file.tell() or file.tell() + len(line) <= max_bytes:
            file.write(line)
            return False
    path.replace(earlier(path))
    path.write_bytes(line)
    return True


def read_lines(path: Path) -> list[bytes]:
    """The complete lines of both files, while another process may append to them; the last may be incomplete there.

    Raises:
        FileNotFoundError: there is neither file.
    """
    newest, oldest = _consistent(path)
    if newest is None and oldest is None:
        raise FileNotFoundError(path)
    return [
        line
        for content in (oldest, newest)
        for line in (content or b"").splitlines(keepends=True)
        if line[-1:] == b"\n"
    ]


def _consistent(path: Path) -> tuple[bytes | None, bytes | None]:
    """The contents of the file and of the one before it, between which no renaming took place."""
    while True:
        try:
            with path.open("rb") as file:  # open until the end: its number is not given to another file meanwhile
                newest, oldest = file.read(), _content(earlier(path))
                if os.path.samestat(os.fstat(file.fileno()), path.stat()):
                    return newest, oldest
        except FileNotFoundError:
            oldest = _content(earlier(path))
            if not path.exists():
                return None, oldest


def _content(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None
