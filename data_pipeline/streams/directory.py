"""A growing folder of Parquet and Arrow files as a source of samples, in the order of their names.

A file appears whole, by a rename. Names that begin with a dot or end in .partial or .tmp are left alone, and so is
all that does not end in .parquet or .arrow (Arrow's IPC file format). An empty file `_END` ends the stream once all
files are read. A file that appears with a name before one that was already read is late: it is named, counted and not
read. One that appeared while nobody was looking cannot be told from one that was read. Files that were read may be
removed, except those that a journal may ask for again.
"""

import logging
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import pyarrow as pa
import pyarrow.parquet as pq

from .source import Chunk, Place

END = "_END"
SUFFIXES = (".parquet", ".arrow")
LOOKS_EVERY = 0.05
"""Seconds between two looks at a folder in which nothing is new."""

logger = logging.getLogger(__name__)


class DirectorySource:
    """Files of a folder; a place is {"file": name, "row": rows of it that were read}.

    Args:
        folder: must be there.
        damaged: at a file that cannot be read, "stop" with an error that names it, or "skip", named and counted.

    Raises:
        OSError: no such folder.
    """

    def __init__(self, folder: Path, damaged: Literal["stop", "skip"] = "stop") -> None:
        if not folder.is_dir():
            raise FileNotFoundError(f"{folder} is not a folder")
        self._folder, self._damaged = folder, damaged
        self.counters = {"late_files": 0, "damaged_files": 0}
        self._open: _GroupedFile | None = None
        self.seek({})

    def seek(self, places: Mapping[str, Place]) -> None:
        place = places.get("", {"file": "", "row": 0})
        self._file, self._row = place["file"], place["row"]
        self.ended = False
        self._passed = {name for name in self._names() if name < self._file}

    def poll(self, max_samples: int, timeout: float) -> Chunk | None:
        deadline = time.monotonic() + timeout
        while not self.ended:
            # Asked before the look at the files: those that came before the end are then all seen.
            is_last = (self._folder / END).exists()
            chunk = self._next(max_samples)
            if chunk is not None:
                return chunk
            self.ended = is_last
            left = deadline - time.monotonic()
            if left <= 0:
                break
            if not self.ended:
                time.sleep(min(LOOKS_EVERY, left))
        return None

    def read(self, partition: str, start: Place, end: Place) -> Chunk:
        try:
            rows = self._opened(start["file"]).rows(start["row"], end["row"] - start["row"])
        except (OSError, pa.ArrowException) as error:
            raise ValueError(f"{self._folder / start['file']} is needed again, and cannot be read: {error}") from error
        return Chunk(partition, start, end, rows)

    def close(self) -> None:
        if self._open is not None:
            self._open.close()
        self._open = None

    def _next(self, max_samples: int) -> Chunk | None:
        names = self._names()
        self._tell_late(names)
        for name in sorted(name for name in names if name >= self._file):
            row = self._row if name == self._file else 0
            try:
                rows = self._opened(name).rows(row, max_samples)
            except (OSError, pa.ArrowException) as error:
                self._skip(name, error)
                continue
            if rows.num_rows:
                start = {"file": name, "row": row}
                self._passed |= {each for each in names if each < name}
                self._file, self._row = name, row + rows.num_rows
                return Chunk("", start, {"file": name, "row": self._row}, rows)
        return None

    def _names(self) -> set[str]:
        names = (path.name for path in self._folder.iterdir())
        return {name for name in names if name.endswith(SUFFIXES) and not name.startswith(".")}

    def _tell_late(self, names: set[str]) -> None:
        for name in sorted(name for name in names if name < self._file and name not in self._passed):
            logger.warning("%s came late: %s was already read; it is left out", self._folder / name, self._file)
            self.counters["late_files"] += 1
            self._passed.add(name)

    def _skip(self, name: str, error: Exception) -> None:
        if self._damaged == "stop":
            raise ValueError(
                f'{self._folder / name} cannot be read: {error}. Remove it, or set damaged = "skip" to leave it out'
            ) from error
        if name not in self._passed:
            logger.warning("%s cannot be read, and is left out: %s", self._folder / name, error)
            self.counters["damaged_files"] += 1
            self._passed.add(name)

    def _opened(self, name: str) -> "_GroupedFile":
        if self._open is None or self._open.name != name:
            self.close()
            self._open = _GroupedFile(self._folder / name)
        return self._open


class _GroupedFile:
    """A Parquet file's row groups, or an Arrow file's record batches, of which one is in memory at a time."""

    def __init__(self, path: Path) -> None:
        self.name = path.name
        self._file: pq.ParquetFile | pa.ipc.RecordBatchFileReader
        if path.suffix == ".parquet":
            self._file = pq.ParquetFile(path)
            metadata = self._file.metadata
            sizes = [metadata.row_group(group).num_rows for group in range(metadata.num_row_groups)]
        else:
            self._map = pa.memory_map(str(path))
            self._file = pa.ipc.open_file(self._map)
            sizes = [self._file.get_batch(group).num_rows for group in range(self._file.num_record_batches)]
        self._sizes = sizes
        self._group, self._table = -1, pa.table({})

    def rows(self, first: int, most: int) -> pa.Table:
        """Rows from `first` on, at most `most`, and not beyond the end of a group; none at the end of the file."""
        start = 0
        for group, size in enumerate(self._sizes):
            if first < start + size:
                return self._read(group).slice(first - start, most)
            start += size
        return pa.table({})

    def close(self) -> None:
        if isinstance(self._file, pq.ParquetFile):
            self._file.close()
        else:
            self._map.close()

    def _read(self, group: int) -> pa.Table:
        if group != self._group:
            if isinstance(self._file, pq.ParquetFile):
                self._table = self._file.read_row_group(group)
            else:
                self._table = pa.Table.from_batches([self._file.get_batch(group)])
            self._group = group
        return self._table
