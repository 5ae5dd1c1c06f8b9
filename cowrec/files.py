"""Durable files, atomic replacement, exclusive locks, checksums, and files of lines that do not grow for ever."""

import errno
import fcntl
import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from cowrec.errors import UserError

NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Numbers of the errors of a full disk: full, beyond a quota, beyond the largest file."""
PARTIAL = ".partial"
"""Suffix of a file or folder that is still being written."""


def space_remedy(error: OSError) -> str:
    """What to do about an error whose number is in `NO_SPACE`."""
    return "raise the limit of file sizes (ulimit -f)" if error.errno == errno.EFBIG else "free disk space"


def sync_file(file: IO[bytes]) -> None:
    """Flushes an open file to disk. Raises OSError if the disk is full."""
    file.flush()
    os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Flushes the names in a folder to disk, so that a rename in it survives a power failure."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def naming_full_disk(path: Path) -> Iterator[None]:
    """Adds the file that is being written to the system's error about a full disk, which lacks it."""
    try:
        yield
    except OSError as error:
        if error.errno in NO_SPACE and error.filename is None:
            error.filename = str(path)
        raise


@contextmanager
def durable_file(path: Path) -> Iterator[IO[bytes]]:
    """Opens a new file for writing and flushes it to disk at the end of the block."""
    with naming_full_disk(path), path.open("wb") as file:
        yield file
        sync_file(file)


def require_target(path: Path, *, new: bool = False) -> None:
    """Raises UserError if no file, or no `new` one, can be written at a path; call it before long work."""
    if path.is_dir():
        raise UserError(f"{path} is a folder; name a file, such as {path / 'result'}")
    if path.exists() and not path.is_file():
        raise UserError(f"{path} is a device or a pipe; name a file")
    if new and path.exists():
        raise UserError(f"{path} exists; choose another --output, or remove it (schema infer: --overwrite)")
    folder = Path(os.path.realpath(path)).parent if path.is_symlink() else path.parent
    if not folder.is_dir():
        raise UserError(f"{path} cannot be written: the folder {folder} does not exist; create it first")


def write_file(path: Path, content: bytes) -> None:
    """Writes a file and flushes it to disk. Raises OSError if the disk is full."""
    with durable_file(path) as file:
        file.write(content)


@contextmanager
def replacing(path: Path) -> Iterator[IO[bytes]]:
    """Opens `<path>.partial` for writing; renames it to `path` when the block ends, or removes it on an exception.

    What a killed process has left there is overwritten. Where `path` is a symbolic link, its target is replaced. Raises
    UserError if another process is writing the file.
    """
    path = Path(os.path.realpath(path))
    partial = path.with_name(path.name + PARTIAL)
    with naming_full_disk(path), open(partial, "wb", opener=_without_emptying) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # The process that had the lock until now may have renamed the file.
            is_own = os.path.samestat(os.fstat(file.fileno()), partial.stat())
        except (BlockingIOError, FileNotFoundError):
            is_own = False
        if not is_own:
            raise UserError(f"{path} is being written by another process; wait for it, or choose another file")
        try:
            file.truncate(0)
            yield file
            sync_file(file)
            partial.replace(path)
        except BaseException:
            partial.unlink(missing_ok=True)
            raise
    sync_folder(path.parent)


def _without_emptying(path: str, flags: int) -> int:
    return os.open(path, flags & ~os.O_TRUNC, 0o666)


def replace_file(path: Path, content: bytes) -> None:
    """Writes a file atomically: `path` has either its earlier content or all of `content`, on disk."""
    with replacing(path) as file:
        file.write(content)


def checksum(path: Path) -> str:
    """Computes the SHA-256 of a file, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextmanager
def locked(path: Path, busy: str = "") -> Iterator[None]:
    """Holds an exclusive lock on an existing file or folder; the system releases it when the process ends.

    Raises UserError if another process holds the lock, with the message `busy` if given.
    """
    handle = os.open(path, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            default = f"another process is at work in {path}; wait for it or choose another folder"
            raise UserError(busy or default) from None
        yield
    finally:
        os.close(handle)


@contextmanager
def locked_folder(folder: Path) -> Iterator[None]:
    """Creates a folder if needed and holds its lock. Raises UserError if it is a file or in use by another process."""
    if folder.exists() and not folder.is_dir():
        raise UserError(f"{folder} is a file; choose another folder")
    folder.mkdir(parents=True, exist_ok=True)
    with locked(folder):
        yield


def earlier(path: Path) -> Path:
    """Returns the name that a full file of lines gets; it replaces the file that had this name before."""
    return path.with_name(f"{path.name}.1")


def append_line(path: Path, line: bytes, max_bytes: int) -> bool:
    """Appends a line, with its line end; returns whether the file had `max_bytes` (0: no limit) and was renamed before.

    Raises OSError if the line cannot be written; the file then holds no part of the line.
    """
    with naming_full_disk(path), path.open("ab", buffering=0) as file:
        size = file.tell()
        if not max_bytes or not size or size + len(line) <= max_bytes:
            if file.write(line) < len(line):
                file.truncate(size)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return False
    path.replace(earlier(path))
    append_line(path, line, 0)
    return True


def read_lines(path: Path) -> list[bytes]:
    """Reads the complete lines of both files, to which others may append. Raises FileNotFoundError without any file."""
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
    """Reads the file and the one before it, with no renaming between."""
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
