"""Raw files by path or URI: finding those that a user names, and their division into segments."""

import fnmatch
import glob
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import accumulate, chain
from pathlib import Path
from typing import Literal
from urllib.parse import quote, unquote

import pyarrow as pa
import pyarrow.fs as pafs

from cowrec.errors import UserError

from ..remote import RemoteFolder, is_remote, local_path, open_filesystem

HIVE_NULL = "__HIVE_DEFAULT_PARTITION__"


def find_inputs(inputs: Sequence[str]) -> list[str]:
    """Returns the files of all inputs, in their order.

    An input is a file; a folder, which stands for all files in it and in its folders, ordered by path; or a pattern
    with `*`, `?`, `[...]` or `**`, which stands for the files and folders that match. Names that start with `.` or `_`
    are left out, unless a part of the pattern starts so too. Inputs may be URIs of an object store
    (s3://bucket/folder), in which `?` starts options. Raises ValueError if a file does not exist, is empty, no regular
    file (a pipe cannot be read again) or given twice, or if a pattern or folder has no file.
    """
    return find_groups([inputs])[0]


def find_groups(groups: Sequence[Sequence[str]]) -> list[list[str]]:
    """Returns the files of each group of inputs by `find_inputs`. The first group must have files."""
    if not groups[0]:
        raise UserError("no input file given")
    found = [
        [file for place in inputs for file in find_files(place if is_remote(place) else str(local_path(place)))]
        for inputs in groups
    ]
    seen: set[str] = set()
    for file in chain.from_iterable(found):
        try:
            size, _ = stamp(file)
        except FileNotFoundError:
            raise UserError(f"input file {file} does not exist") from None
        if size == 0:
            raise UserError(f"input file {file} is empty; copy it again, or remove it")
        key = file if is_remote(file) else os.path.realpath(file)
        if key in seen:
            raise UserError(f"input file {file} is given twice; its samples would count double")
        seen.add(key)
    return found


def partition_of(place: str) -> tuple[tuple[str, str | None], ...]:
    """Returns (column, value) of each folder `column=value` in a path, as Hive names folders; None is missing."""
    values: dict[str, str | None] = {}
    for part in Path(path_of(place)).parts[:-1]:
        name, equals, value = part.partition("=")
        if equals and name:
            values[unquote(name)] = None if value == HIVE_NULL else unquote(value)
    return tuple(values.items())


FileFormat = Literal["text", "json", "parquet", "arrow"]
Report = Callable[[int], None]
"""Called with the number of bytes on disk just processed."""


@dataclass(frozen=True)
class Source:
    """What reading a raw file takes, in any process.

    Attributes:
        format: recognized by the content; "json" is text with an object a line.
        stamp: of the file at the survey.
        first_line: of text: the first line, without its ending.
        columns: of Parquet and Arrow: those that are read, at first all; of JSON: those of the file's beginning.
        partition: values of columns that the path gives, see `partition_of`.
    """

    path: str
    format: FileFormat
    stamp: tuple[int, int]
    first_line: bytes = b""
    columns: tuple[str, ...] = ()
    partition: tuple[tuple[str, str | None], ...] = ()

    @property
    def is_lines(self) -> bool:
        """True if the file is text, compressed or not."""
        return self.format in ("text", "json")

    @property
    def place(self) -> str:
        """What a sample's number in the file is called."""
        return "line" if self.is_lines else "row"


@dataclass(frozen=True)
class Segment:
    """Consecutive samples of one file, about 16 MB at most; headers belong to no segment.

    Attributes:
        direct: True if the segment can be read without most of the file before it.
        offset: first byte in the text, after decompression; of Parquet and Arrow files, the first row, from 0.
        size: bytes of text, or rows.
        samples: number of lines or rows.
        first_place: number of the first line or row in the file, from 1.
        first_sample: number of the first sample over all files, from 0; bad rows count, headers do not.
        file_bytes: bytes on disk; those of a file's segments add up to its size.
    """

    source: Source
    direct: bool
    offset: int
    size: int
    samples: int
    first_place: int
    first_sample: int
    file_bytes: int


@dataclass(frozen=True)
class Block:
    """The samples of a `Segment`: text in which each line ends with a newline, or a table."""

    source: Source
    data: bytes | pa.Table
    first_place: int
    first_sample: int
    samples: int


@dataclass(frozen=True)
class RawFile:
    """The result of a survey."""

    source: Source
    samples: int
    segments: tuple[Segment, ...]


@dataclass(frozen=True)
class Partition:
    """Consecutive segments, which one task turns into a shard of each split."""

    number: int
    segments: tuple[Segment, ...]

    @property
    def file_bytes(self) -> int:
        return sum(segment.file_bytes for segment in self.segments)

    @property
    def samples(self) -> int:
        """Samples of all segments, bad rows included."""
        return sum(segment.samples for segment in self.segments)


Survey = Callable[[Source, Report], RawFile]


def partitions(files: Sequence[RawFile], partition_samples: int) -> list[Partition]:
    """Groups the segments of all files in order into partitions of at most `partition_samples` samples."""
    starts = accumulate((file.samples for file in files), initial=0)
    segments = [
        replace(segment, first_sample=segment.first_sample + start)
        for file, start in zip(files, starts, strict=False)
        for segment in file.segments
    ]
    groups: list[list[Segment]] = []
    samples = 0
    for segment in segments:
        if not groups or samples + segment.samples > partition_samples:
            groups.append([])
            samples = 0
        groups[-1].append(segment)
        samples += segment.samples
    return [Partition(number, tuple(group)) for number, group in enumerate(groups)]


def changed_message(path: str) -> str:
    return f"{path} changed while it was being read; run again"


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
    return REMOTE_READ if is_remote(place) else LOCAL_READ


def stamp(place: str) -> Stamp:
    """Returns the size and time of a file. Raises FileNotFoundError, and ValueError if it is no regular file."""
    if not is_remote(place):
        status = os.stat(place)
        if not os.path.isfile(place):
            raise UserError(f"input {place} is not a regular file; it is read several times, so it cannot be a pipe")
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
    """Returns the files that a file, folder or pattern stands for; see `find_inputs`."""
    if not is_remote(text):
        return _find_local(text)
    match = _URI.fullmatch(text)
    assert match is not None
    start, path, query = match["start"], match["path"].strip("/"), match["query"] or ""
    parts = path.split("/")
    plain = next((index for index, part in enumerate(parts) if PATTERN & set(part)), len(parts))
    folder = "/".join([start, *parts[:plain]]).rstrip("/") + query
    listed = RemoteFolder(folder).list()
    for table, mark in _LAKE_MARKS.items():
        _refuse_lake_table(text, table, fnmatch.filter([f"/{name}" for name in listed], f"*/{mark}*"))
    names = [name for name in listed if not _is_hidden(name.split("/"), parts[plain:])]
    if plain < len(parts):
        names = [name for name in names if _matches(name.split("/"), parts[plain:])]
        if not names:
            raise UserError(f"input {text}: no file or folder matches this pattern")
    elif not names:
        if _info(text).type == pafs.FileType.File:
            return [text]
        raise UserError(f"input {text} does not exist, or is a folder without files")
    base = folder.removesuffix(query)
    return [f"{base}/{quote(name, safe='/=')}{query}" for name in sorted(names, key=lambda name: name.split("/"))]


def _find_local(text: str) -> list[str]:
    if os.path.isdir(text):
        if not (below := _files_below(text)):
            raise UserError(f"input folder {text} has no file (names that start with . or _ are left out)")
        return below
    if os.path.exists(text) or not PATTERN & set(text):
        return [text]
    parts = Path(text).parts
    plain = next(index for index, part in enumerate(parts) if PATTERN & set(part))
    found = {path: Path(path).parts for path in glob.glob(text, recursive=True)}
    shown = (path for path in found if not _is_hidden(found[path][plain:], parts[plain:]))
    matches = sorted(shown, key=found.__getitem__)
    for folder in {Path(match).absolute().parent for match in matches}:
        _check_folders(text, folder, *folder.parents)
    # A folder and its files may both match.
    files = dict.fromkeys(file for path in matches for file in (_files_below(path) if os.path.isdir(path) else (path,)))
    if not files:
        raise UserError(f"input {text}: no file or folder matches this pattern (names with . or _ first are left out)")
    return list(files)


def _is_hidden(name: Sequence[str], pattern: Sequence[str]) -> bool:
    hidden = tuple(start for start in HIDDEN if not any(part.startswith(start) for part in pattern))
    return any(part.startswith(hidden) for part in name)


_LAKE_MARKS = {"Delta Lake": "_delta_log", "Hudi": ".hoodie", "Iceberg": "metadata/*.metadata.json"}
"""Files that tell the folder of a table, which also has the files of the table's earlier versions."""


def _check_folders(text: str, *folders: Path) -> None:
    """Raises ValueError if one of the local folders is the folder of a table."""
    for folder in folders:
        for table, mark in _LAKE_MARKS.items():
            _refuse_lake_table(text, table, [*folder.glob(mark)])


def _refuse_lake_table(text: str, table: str, marks: Sequence[object]) -> None:
    if marks:
        raise UserError(
            f"input {text} is a {table} table ({marks[0]}), whose folder has deleted and replaced samples too; name the"
            " files of its present version (of Delta Lake: DeltaTable(path).file_uris()), or write it to Parquet files"
        )


def _files_below(folder: str) -> list[str]:
    _check_folders(folder, *Path(folder).absolute().parents)
    found: list[str] = []
    for parent, folders, names in os.walk(folder, followlinks=True):
        _check_folders(folder, Path(parent))
        folders[:] = [name for name in folders if not name.startswith(HIDDEN)]
        found += [os.path.join(parent, name) for name in names if not name.startswith(HIDDEN)]
    return sorted(found, key=lambda path: Path(path).parts)


def _matches(name: Sequence[str], pattern: Sequence[str]) -> bool:
    """Returns whether a path, or a folder in it, matches a pattern; the part `**` stands for any folders."""
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
        raise UserError(f"input {place} cannot be read: {error}") from error


def _opened(place: str) -> tuple[pafs.FileSystem, str]:
    """Returns the file system of a URI, which is opened once for all its files, and the path in it."""
    match = _URI.fullmatch(place)
    assert match is not None
    files, root = _file_system(match["start"] + (match["query"] or ""))
    return files, root + unquote(match["path"]).strip("/")


@cache
def _file_system(uri: str) -> tuple[pafs.FileSystem, str]:
    files, path = open_filesystem(uri)
    return files, f"{path.strip('/')}/" if path.strip("/") else "/"
