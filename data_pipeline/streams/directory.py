"""A folder as a stream: Parquet and Arrow files that are read in the order of their names, while it grows.

A writer renames each file into the folder when it is complete. Names that start with a dot, and names that do not end
in .parquet or .arrow (Arrow's IPC file format), are ignored. An empty file `_END` ends the stream once all files are
read. A file whose name sorts before one already read is late: it is logged, counted and not read. A file that appeared
while no source was open cannot be distinguished from one that was read. Files may be removed once read, unless a
journal still refers to them.
"""

import logging
import os
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Literal

import pyarrow as pa
import pyarrow.parquet as pq

from cowrec.errors import UserError
from cowrec.files import replacing

from ..raw.reading import ArrowFile, group_sizes, parquet_file
from ..raw.values import plain_array
from .source import CHUNK_BYTES, Chunk, SourcePosition

END = "_END"
SUFFIXES = (".parquet", ".arrow")
SCAN_SECONDS = 0.05
"""Seconds between two looks at a folder without new files."""
LARGE, REST = 1000, 10
"""A folder of more files is listed at most one `REST`th of the time."""

logger = logging.getLogger(__name__)


class DirectorySource:
    """Files of a folder; a position is {"file": name, "row": rows of the file already read}.

    Args:
        damaged: at a file that cannot be read, "stop" with an error, or "skip" it with a warning and a count.

    Raises:
        OSError: the folder does not exist.
    """

    def __init__(self, folder: Path, damaged: Literal["stop", "skip"] = "stop") -> None:
        if not folder.is_dir():
            raise FileNotFoundError(f"{folder} is not a folder")
        self._folder, self._damaged = folder, damaged
        self.counters = {"late_files": 0, "damaged_files": 0}
        self._open: _GroupedFile | None = None
        self._skipped: set[str] = set()
        self.seek({})

    def seek(self, positions: Mapping[str, SourcePosition]) -> None:
        position = positions.get("", {"file": "", "row": 0})
        self._file, self._row = position["file"], position["row"]
        self.ended = False
        self._names, self._ahead = set[str](), list[str]()
        self._list(as_read=True)

    def poll(self, max_samples: int, timeout: float) -> Chunk | None:
        deadline = time.monotonic() + timeout
        while not self.ended:
            # Checked before the folder is scanned, so that no file written before the end is missed.
            is_last = (self._folder / END).exists()
            if is_last or time.monotonic() >= self._rests_until:
                self._list()
            chunk = self._next(max_samples)
            if chunk is not None:
                return chunk
            self.ended = is_last
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                break
            if not self.ended:
                time.sleep(min(SCAN_SECONDS, remaining))
        return None

    def read(self, partition: str, start: SourcePosition, end: SourcePosition) -> Chunk:
        try:
            rows = self._opened(start["file"]).rows(start["row"], end["row"] - start["row"])
        except (OSError, pa.ArrowException) as error:
            raise UserError(f"{self._folder / start['file']} must be read again, but cannot be: {error}") from error
        return Chunk(partition, start, end, rows)

    def close(self) -> None:
        if self._open is not None:
            self._open.close()
        self._open = None

    def _next(self, max_samples: int) -> Chunk | None:
        for index, name in enumerate(self._ahead):
            row = self._row if name == self._file else 0
            try:
                rows = self._opened(name).rows(row, max_samples)
            except FileNotFoundError:  # removed since the folder was listed
                continue
            except (OSError, pa.ArrowException) as error:
                self._skip(name, error)
                continue
            while rows.num_rows > 1 and rows.nbytes > CHUNK_BYTES:
                rows = rows.slice(0, rows.num_rows // 2)
            if rows.num_rows:
                start = {"file": name, "row": row}
                self._file, self._row = name, row + rows.num_rows
                del self._ahead[:index]
                return Chunk("", start, {"file": name, "row": self._row}, rows)
        return None

    def _list(self, *, as_read: bool = False) -> None:
        """Lists the folder; reports new files that sort before the one being read, unless they count as read."""
        began = time.monotonic()
        names = {name for name in os.listdir(self._folder) if name.endswith(SUFFIXES) and not name.startswith(".")}
        for name in () if as_read else sorted(name for name in names - self._names if name < self._file):
            logger.warning("%s is late: %s was already read; it is skipped", self._folder / name, self._file)
            self.counters["late_files"] += 1
        if names != self._names:
            self._names, self._ahead = names, sorted(name for name in names if name >= self._file)
        now = time.monotonic()
        self._rests_until = now + REST * (now - began) if len(names) > LARGE else now

    def _skip(self, name: str, error: Exception) -> None:
        if self._damaged == "stop":
            raise UserError(
                f"{self._folder / name} cannot be read: {error}. Remove it, or skip such files: online.damaged_files ="
                ' "skip", in Python open_source(damaged="skip")'
            ) from error
        if name not in self._skipped:
            logger.warning("%s cannot be read and is skipped: %s", self._folder / name, error)
            self.counters["damaged_files"] += 1
            self._skipped.add(name)

    def _opened(self, name: str) -> "_GroupedFile":
        if self._open is None or self._open.name != name:
            self.close()
            self._open = _GroupedFile(self._folder / name)
        return self._open


class DirectorySink:
    """Parquet files named in the order of the samples, each renamed into the folder when complete.

    Numbers continue after those of files already in the folder.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._next = 1 + max((int(path.stem) for path in folder.glob("*.parquet") if path.stem.isdecimal()), default=-1)

    def write(self, table: pa.Table) -> None:
        with replacing(self._folder / f"{self._next:012d}.parquet") as file:
            pq.write_table(table, file)
        self._next += 1

    def end(self) -> None:
        """Marks the end of the stream: no more files will come."""
        (self._folder / END).touch()


def send(tables: Iterable[pa.Table], sink: DirectorySink, rate: float = 0.0) -> int:
    """Sends tables at up to `rate` samples per second (0: unlimited). Returns the number of samples sent."""
    start, sent = time.monotonic(), 0
    for table in tables:
        sent += table.num_rows
        if rate:  # a table is sent when its last sample is due
            time.sleep(max(0.0, start + sent / rate - time.monotonic()))
        sink.write(table)
    return sent


class _GroupedFile:
    """Groups of rows of a Parquet or Arrow file, one of them in memory at a time."""

    def __init__(self, path: Path) -> None:
        self.name = path.name
        self._file = parquet_file(path) if path.suffix == ".parquet" else ArrowFile(pa.memory_map(str(path)))
        self._sizes = group_sizes(self._file)
        self._group, self._table = -1, pa.table({})

    def rows(self, first: int, limit: int) -> pa.Table:
        """Returns up to `limit` rows from `first`, all of one group; none at the end of the file.

        Dictionaries are decoded: the size of a part of such a column is that of its whole dictionary.
        """
        start = 0
        for group, size in enumerate(self._sizes):
            if first < start + size:
                if group != self._group:
                    self._group, self._table = group, self._file.read_row_group(group)
                rows = self._table.slice(first - start, limit)
                for index, column in enumerate(rows.columns):
                    if pa.types.is_dictionary(column.type):
                        plain = pa.chunked_array([plain_array(each) for each in column.chunks])
                        rows = rows.set_column(index, rows.column_names[index], plain)
                return rows
            start += size
        return pa.table({})

    def close(self) -> None:
        self._file.close()
