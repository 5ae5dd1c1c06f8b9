"""Raw files on this machine or in an object store: finding, opening and recognizing changes of them.

A file is named by its path or its URI.
"""

import fnmatch
import glob
import os
import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from urllib.parse import quote, unquote

import pyarrow as pa
import pyarrow.fs as pafs

from cowrec.data_pipeline.remote import is_remote, open_filesystem

Stamp = tuple[int, int]
"""Size in bytes and time of the last change in nanoseconds."""

PATTERN = frozenset("*?[")
HIDDEN = (".", "_")
LOCAL_READ, REMOTE_READ = 1 << 20, 8 << 20
"""Bytes that are read at a time: each read of an object store is a request."""

_URI = re.compile(r"(?P<start>[^:]+://[^/?]*)(?P<path>[^?]*)(?P<query>\?.*)?")
"""A URI: the file system (for s3:// and gs:// the bucket), the path in it, and options."""


def path_of(place: str) -> str:
    """Returns the path of a file, without the file system that a URI names."""
    match = _URI.fullmatch(place) if is_remote(place) else None
    return place if match is None else unquote(match["path"])


def read_bytes(place: str) -> int:
    """Returns how many bytes of a file are read at a time."""
    return REMOTE_READ if is_remote(place) else LOCAL_READ


def stamp(place: str) -> Stamp:
    """Returns the size and time of a file. Raises FileNotFoundError, and ValueError if it is no regular file."""
    if not is_remote(place):
        status = os.stat(place)
        if not os.path.isfile(place):
            raise ValueError(f"input {place} is not a regular file; it is read several times, so it cannot be a pipe")
        return status.st_size, status.st_mtime_ns
    found = _info(place)
    if found.type != pafs.FileType.File:
        raise FileNotFoundError(f"{place} does not exist")
    return found.size, found.mtime_ns


def open_file(place: str) -> pa.NativeFile:
    """Opens a file for reading at any position. Raises FileNotFoundError, OSError."""
    if not is_remote(place):
        return pa.OSFile(place)
    files, path = _opened(place)
    return files.open_input_file(path)


def find_files(text: str) -> list[str]:
    """Returns the files that a file, folder or pattern stands for; see `inputs.find_inputs`.

    Raises:
        ValueError: a pattern matches nothing, or a folder has no file.
    """
    if not is_remote(text):
        return _find_local(text)
    match = _URI.fullmatch(text)
    assert match is not None
    start, path, query = match["start"], match["path"].strip("/"), match["query"] or ""
    parts = path.split("/")
    plain = next((index for index, part in enumerate(parts) if PATTERN & set(part)), len(parts))
    folder = "/".join([start, *parts[:plain]]).rstrip("/") + query
    names = _names_below(folder)
    if plain < len(parts):
        names = [name for name in names if _matches(name.split("/"), parts[plain:])]
        if not names:
            raise ValueError(f"input {text}: no file or folder matches this pattern")
    elif not names:
        if _info(text).type == pafs.FileType.File:
            return [text]
        raise ValueError(f"input {text} does not exist, or is a folder without files")
    base = folder.removesuffix(query)
    return [f"{base}/{quote(name, safe='/=')}{query}" for name in sorted(names, key=lambda name: name.split("/"))]


def _find_local(text: str) -> list[str]:
    if os.path.isdir(text):
        return _files_below(text)
    if os.path.exists(text) or not PATTERN & set(text):
        return [text]
    matches = sorted(glob.glob(text, recursive=True), key=lambda path: Path(path).parts)
    if not matches:
        raise ValueError(f"input {text}: no file or folder matches this pattern")
    return [file for each in matches for file in (_files_below(each) if os.path.isdir(each) else (each,))]


def _files_below(folder: str) -> list[str]:
    found: list[str] = []
    for parent, folders, names in os.walk(folder, followlinks=True):
        folders[:] = [each for each in folders if not each.startswith(HIDDEN)]
        found += [os.path.join(parent, name) for name in names if not name.startswith(HIDDEN)]
    if not found:
        raise ValueError(f"input folder {folder} has no file (names that start with . or _ are left out)")
    return sorted(found, key=lambda path: Path(path).parts)


def _names_below(folder: str) -> list[str]:
    """Returns the names, relative to a remote folder, of all files in it that are not hidden."""
    files, path = _opened(folder)
    try:
        found = files.get_file_info(pafs.FileSelector(path, allow_not_found=True, recursive=True))
    except OSError as error:
        raise ValueError(f"input {folder} cannot be listed: {error}") from error
    names = [each.path.removeprefix(path).strip("/") for each in found if each.type == pafs.FileType.File]
    return [name for name in names if not any(part.startswith(HIDDEN) for part in name.split("/"))]


def _matches(name: Sequence[str], pattern: Sequence[str]) -> bool:
    """Returns whether a path, or a folder in it, matches a pattern, whose part `**` stands for any folders."""
    if not pattern:
        return True
    if pattern[0] == "**":
        return any(_matches(name[skipped:], pattern[1:]) for skipped in range(len(name)))
    return bool(name) and fnmatch.fnmatchcase(name[0], pattern[0]) and _matches(name[1:], pattern[1:])


def _info(place: str) -> pafs.FileInfo:
    files, path = _opened(place)
    try:
        return files.get_file_info(path)
    except OSError as error:
        raise ValueError(f"input {place} cannot be read: {error}") from error


def _opened(place: str) -> tuple[pafs.FileSystem, str]:
    """Returns the file system of a URI, opened once for all its files, and the path in it."""
    match = _URI.fullmatch(place)
    assert match is not None
    files, root = _file_system(match["start"] + (match["query"] or ""))
    return files, root + unquote(match["path"]).strip("/")


@cache
def _file_system(uri: str) -> tuple[pafs.FileSystem, str]:
    files, path = open_filesystem(uri)
    return files, f"{path.strip('/')}/" if path.strip("/") else "/"
