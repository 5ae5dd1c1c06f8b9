"""A folder as a stream: Parquet and Arrow files, also in folders within it, that are read while it grows.

Files are read in the order of their modification times, then of their names, as they appear: writers such as Spark,
Flink and Firehose name files by UUIDs, and folders by dates. Names that were read are remembered, so a file that
appears later, though it was written earlier, is read too. In the order "name" files are read by name alone, in an order
that another copy of the folder repeats, and a file whose name sorts before one already read is late: it is logged,
counted and not read. So is a file that is older than the last `REMEMBERED` files.

A file appears by a rename, or is complete before it has not been written to for the grace period: until then the source
waits for a file that cannot be read. Names that start with a dot or an underscore, and names that do not end in
.parquet or .arrow (Arrow's IPC file format), are ignored. An empty file `_END` ends the stream once all files are read.
Files may be removed once read, unless a journal still refers to them.
"""

import logging
import os
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Literal, NamedTuple

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
REMEMBERED = 10_000
"""Files read last whose names are remembered in the order of time."""

logger = logging.getLogger(__name__)


class _Key(NamedTuple):
    """Place of a file in the order: when it was last written to, in nanoseconds, 0 in the order of names; its name."""

    time: int
    name: str


class DirectorySource:
    """Files of a folder, each a partition; a position is the rows of a file that were read.

    Positions also tell whether the file was read to its end, and the last file that is remembered no longer.

    Args:
        damaged: at a file that cannot be read, "stop" with an error, or "skip" it with a warning and a count.
        order: "time" of modification, or "name".
        grace: seconds since a file was last written to, in which it does not count as damaged.

    Raises OSError: the folder does not exist.
    """

    def __init__(
        self,
        folder: Path,
        damaged: Literal["stop", "skip"] = "stop",
        order: Literal["time", "name"] = "time",
        grace: float = 30.0,
    ) -> None:
        if not folder.is_dir():
            raise FileNotFoundError(f"{folder} is not a folder")
        self._folder, self._damaged, self._order, self._grace = folder, damaged, order, grace
        self.counters = {"late_files": 0, "damaged_files": 0}
        self._open: _GroupedFile | None = None
        self.seek({})

    def seek(self, positions: Mapping[str, SourcePosition]) -> None:
        self._rows = {name: position["row"] for name, position in positions.items()}
        """Rows read of each file that is remembered."""
        self._done = {name: _Key(each["time"], name) for name, each in positions.items() if each["done"]}
        self._before = max((_Key(*each["before"]) for each in positions.values()), default=_Key(-1, ""))
        """The last file of those that are remembered no longer."""
        self.ended, self._waits = False, False
        self._known, self._ahead, self._passed = set[str](), list[_Key](), dict[str, int]()
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
            self.ended = is_last and not self._waits
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                break
            if not self.ended:
                time.sleep(min(SCAN_SECONDS, remaining))
        return None

    def read(self, partition: str, start: SourcePosition, end: SourcePosition) -> Chunk:
        try:
            rows = self._opened(partition).rows(start["row"], end["row"] - start["row"])
        except FileNotFoundError:
            return Chunk(partition, start, end, [])
        except (OSError, pa.ArrowException) as error:
            raise UserError(f"{self._folder / partition} must be read again, but cannot be: {error}") from error
        return Chunk(partition, start, end, rows)

    def close(self) -> None:
        if self._open is not None:
            self._open.close()
        self._open = None

    def _next(self, max_samples: int) -> Chunk | None:
        self._waits = False
        for key in [*self._ahead]:
            row, name = self._rows.get(key.name, 0), key.name
            try:
                file = self._opened(name)
                rows = file.rows(row, max_samples)
            except FileNotFoundError:  # removed since the folder was listed
                self._ahead.remove(key)
                continue
            except (OSError, pa.ArrowException) as error:
                if abs(time.time() - self._written(name) / 1e9) < self._grace:
                    self._waits = True
                    return None
                self._skip(name, error)
                self._ahead.remove(key)
                continue
            while rows.num_rows > 1 and rows.nbytes > CHUNK_BYTES:
                rows = rows.slice(0, rows.num_rows // 2)
            if not rows.num_rows:
                self._passed[name] = self._written(name)
                self._ahead.remove(key)
                continue
            end = row + rows.num_rows
            forgotten = self._remember(key, end, is_done=end == file.num_rows)
            position = {"row": end, "time": key.time, "done": end == file.num_rows, "before": [*self._before]}
            return Chunk(name, {"row": row}, position, rows, forgotten=forgotten)
        return None

    def _remember(self, key: "_Key", row: int, is_done: bool) -> list[str]:
        """Notes how far a file was read; returns the files that are forgotten."""
        self._rows[key.name] = row
        if is_done:
            self._ahead.remove(key)
            self._done[key.name] = key
        forgotten = list[str]()
        if self._order == "name":
            self._before, forgotten = key, [name for name in self._rows if name != key.name]
        elif len(self._done) > REMEMBERED:
            oldest = sorted(self._done.values())[: REMEMBERED // 10]
            self._before, forgotten = max(self._before, oldest[-1]), [name for _, name in oldest]
        for name in forgotten:
            del self._rows[name]
            self._done.pop(name, None)
        return forgotten

    def _list(self, *, as_read: bool = False) -> None:
        """Finds new files; reports those that are late, unless they count as read."""
        began = time.monotonic()
        for name in [name for name, written in self._passed.items() if self._written(name) != written]:
            self._known.discard(name)  # it was written to since
            del self._passed[name]
        names = self._scan()
        for name in sorted(names - self._known):
            key = _Key(0 if self._order == "name" else self._written(name), name)
            if key > self._before or name in self._rows:
                self._ahead += [key] * (name not in self._done)
            elif not as_read:
                logger.warning("%s is late: %s was already read; it is skipped", self._folder / name, self._before.name)
                self.counters["late_files"] += 1
        self._known = names
        # A file that was begun is read to its end.
        self._ahead.sort(key=lambda key: (key.name not in self._rows, key))
        now = time.monotonic()
        self._rests_until = now + REST * (now - began) if len(names) > LARGE else now

    def _scan(self) -> set[str]:
        """Returns the paths of all files of samples, in the folder and in folders within it."""
        found, folders = set[str](), [""]
        while folders:
            place = folders.pop()
            try:
                with os.scandir(self._folder / place) as entries:
                    for each in entries:
                        if each.name.startswith((".", "_")):
                            continue
                        if each.is_dir(follow_symlinks=False):
                            folders.append(f"{place}{each.name}/")
                        elif each.name.endswith(SUFFIXES):
                            found.add(place + each.name)
            except FileNotFoundError:
                if not place:
                    raise
        return found

    def _written(self, name: str) -> int:
        """When a file was last written to, in nanoseconds; 0 if it was removed."""
        try:
            return (self._folder / name).stat().st_mtime_ns
        except FileNotFoundError:
            return 0

    def _skip(self, name: str, error: Exception) -> None:
        if self._damaged == "stop":
            raise UserError(
                f"{self._folder / name} cannot be read: {error}. Remove it, or skip such files: online.damaged_files ="
                ' "skip", in Python open_source(damaged="skip")'
            ) from error
        logger.warning("%s cannot be read and is skipped: %s", self._folder / name, error)
        self.counters["damaged_files"] += 1
        self._passed[name] = self._written(name)

    def _opened(self, name: str) -> "_GroupedFile":
        if self._open is None or self._open.name != name:
            self.close()
            self._open = _GroupedFile(self._folder / name, name)
        return self._open


class DirectorySink:
    """Parquet files in a folder. A file gets its name when it is complete; numbers go on after those in the folder."""

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

    def __init__(self, path: Path, name: str) -> None:
        self.name = name
        self._file = parquet_file(path) if path.suffix == ".parquet" else ArrowFile(pa.memory_map(str(path)))
        self._sizes = group_sizes(self._file)
        self.num_rows = sum(self._sizes)
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
