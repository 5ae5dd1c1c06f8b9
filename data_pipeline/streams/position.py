"""Position of a stream and journal: all that a stream resumes from.

Which samples a poll returns, and whether the stream waited too long, depends on timing. Each such event is in the
journal, on disk, before it takes effect; everything else follows from a position and the journal's entries, so a stream
that crashed continues exactly as it would have.
"""

import errno
import json
import threading
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa

from cowrec.errors import UserError
from cowrec.files import durable_file, replace_file, sync_file, sync_folder, write_file

from ..codec import TIME_COLUMN
from .reorder import ReorderBuffer

POSITION_FILE, PENDING_FILE, RECENT_FILE = "position.json", "pending.arrow", "recent.arrow"
FORMAT = 4

LEFT_OUT = ("malformed", "duplicates", "late", "lost")
COUNTERS = ("samples", *LEFT_OUT, "bounded", "forced", "flushes", "handed_out", "batches")

_PLAIN = ("partitions", "entry", "present", "newest", "due", "ended", "counters")
"""Attributes of a position that are plain JSON."""


@dataclass(frozen=True)
class Position:
    """State of a stream between two batches. Immutable, and cheap enough to keep one for each batch.

    Attributes:
        partitions: position in each partition of the source.
        entry: number of the next entry of the journal.
        present: Unix seconds; see `reorder.follow`. None before the first sample, and while a partition that has more
            samples has given none.
        newest: the newest time of each partition, Unix seconds; None for one that has given no sample with a time.
        due: number of waiting samples, oldest first, to return regardless of the watermark.
        waiting: samples not yet returned in a batch.
        recent: ids of the latest samples; see `RecentIds`.
        counters: totals since the start of the stream. samples: received; of these malformed, duplicates and late
            (dropped or trained on, by the stream's `late`); lost: deleted before they were read (1 if the source cannot
            count them); bounded: numbers beyond their bound (`encoding.numbers.bound`); forced: returned before the
            watermark because too many samples waited; flushes: waits longer than `max_wait_seconds`; handed_out:
            returned in batches; batches.
    """

    partitions: Mapping[str, Any] = field(default_factory=dict)
    entry: int = 0
    present: int | None = None
    newest: Mapping[str, int | None] = field(default_factory=dict)
    due: int = 0
    ended: bool = False
    waiting: ReorderBuffer = field(default_factory=ReorderBuffer)
    recent: tuple[np.ndarray, ...] = (np.zeros(0, np.uint64),)
    counters: Mapping[str, int] = field(default_factory=lambda: dict.fromkeys(COUNTERS, 0))

    def counted(self, **counts: int) -> dict[str, int]:
        """Returns the counters after these additions."""
        return {name: self.counters.get(name, 0) + counts.get(name, 0) for name in COUNTERS}

    def save(self, folder: Path) -> None:
        """Writes the position into an existing folder; durable when this returns."""
        waiting = self.waiting.compact()
        content = {name: getattr(self, name) for name in _PLAIN}
        content |= {"format": FORMAT, "waiting": len(waiting)}
        if len(waiting):
            _write_table(folder / PENDING_FILE, waiting.table)
        _write_table(folder / RECENT_FILE, pa.table({"id": np.concatenate(self.recent)}))
        write_file(folder / POSITION_FILE, json.dumps(content, indent=1, allow_nan=False).encode())

    @staticmethod
    def load(folder: Path) -> "Position":
        """Reads a saved position. Raises ValueError if a file is missing or damaged."""
        try:
            content = json.loads((folder / POSITION_FILE).read_text(encoding="utf-8"))
            if content["format"] != FORMAT:
                wanted = f"this version of cowrec reads {FORMAT}; resume with the version that wrote it"
                raise UserError(f"format {content['format']!r}, {wanted}, or start a new run")
            waiting = ReorderBuffer()
            if content["waiting"]:
                table = _read_table(folder / PENDING_FILE)
                waiting = waiting.add(table, table[TIME_COLUMN].to_numpy())
            return Position(
                **{name: content[name] for name in _PLAIN},
                waiting=waiting,
                recent=(_read_table(folder / RECENT_FILE)["id"].to_numpy(),),
            )
        except (OSError, ValueError, KeyError, TypeError, pa.ArrowException) as error:
            raise UserError(f"the stream's position in {folder} cannot be read: {error}") from error


def _write_table(path: Path, table: pa.Table) -> None:
    with durable_file(path) as file, pa.ipc.new_file(file, table.schema) as writer:
        writer.write_table(table)


def _read_table(path: Path) -> pa.Table:
    with pa.memory_map(str(path)) as file:
        return pa.ipc.open_file(file).read_all()


@dataclass(frozen=True)
class Entry:
    """One event of a stream.

    Attributes:
        kind: "chunk" (samples arrived), "flush" (none arrived for too long) or "end" (no more will come).
        partition, start, end, behind: of the chunk.
        now: time of the event, Unix seconds.
    """

    kind: Literal["chunk", "flush", "end"]
    partition: str = ""
    start: Any = None
    end: Any = None
    samples: int = 0
    lost: int = 0
    now: int = 0
    behind: Sequence[str] = ()


class Journal:
    """A file of entries, numbered from 0 over the life of a stream; a line has a checksum, and an entry as JSON.

    Args:
        path: the file; created if missing. An incomplete last line is dropped, since it had no effect yet.
        first: number of the first entry to replay.

    Raises ValueError: the file is damaged before its last line, or the entries from `first` on are missing.
    """

    def __init__(self, path: Path, first: int) -> None:
        self._path, self._lock = path, threading.Lock()
        entries, size = _read(path)
        if entries and not min(entries) <= first <= max(entries) + 1:
            raise UserError(
                f"{path} has the entries {min(entries)} to {max(entries)}, but the position needs {first} on. "
                "Use the position of the same run, or remove the journal to continue without it"
            )
        self._entries = {number: entry for number, entry in entries.items() if number >= first}
        self.next = max(entries) + 1 if entries else first
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("ab", buffering=0)
        self._size = size
        self._file.truncate(size)
        sync_folder(path.parent)

    def recorded(self, number: int) -> Entry | None:
        """Returns an entry read at opening, in order; None after the last one."""
        self._entries.pop(number - 1, None)
        return self._entries.get(number)

    def append(self, entry: Entry) -> None:
        """Writes an entry to disk; it is durable when this returns. After an OSError it must not take effect."""
        with self._lock:
            line = _line(self.next, entry)
            try:
                if self._file.write(line) < len(line):
                    raise OSError(errno.ENOSPC, f"no space left for the journal {self._path}")
                sync_file(self._file)
            except OSError:
                self._file.truncate(self._size)
                raise
            self._size += len(line)
            self.next += 1

    def trim(self, first: int) -> None:
        """Removes the entries before `first`, which no position to resume from needs; all are left if that fails."""
        with self._lock:
            entries, _ = _read(self._path)
            kept = [_line(number, entry) for number, entry in entries.items() if number >= first]
            # At least one entry stays, to keep the numbering.
            kept = kept or [_line(number, entry) for number, entry in list(entries.items())[-1:]]
            try:
                replace_file(self._path, b"".join(kept))
            finally:  # an error may come after the file was replaced, and the old one takes no entries then
                self._file.close()
                self._file = self._path.open("ab", buffering=0)
                self._size = self._path.stat().st_size

    def close(self) -> None:
        self._file.close()


def _line(number: int, entry: Entry) -> bytes:
    text = json.dumps({"number": number, **asdict(entry)}, separators=(",", ":")).encode()
    return b"%08x %s\n" % (zlib.crc32(text), text)


def _read(path: Path) -> tuple[dict[int, Entry], int]:
    """Returns the entries by number and their size in bytes."""
    if not path.exists():
        return {}, 0
    entries: dict[int, Entry] = {}
    size = 0
    lines = path.read_bytes().splitlines(keepends=True)
    for index, line in enumerate(lines):
        checksum, _, text = line.rstrip(b"\n").partition(b" ")
        if not line.endswith(b"\n") or checksum != b"%08x" % zlib.crc32(text):
            if index < len(lines) - 1:
                raise UserError(f"{path}, line {index + 1} is damaged; remove the journal to continue without it")
            break
        content = json.loads(text)
        number = content.pop("number")
        entries[number] = Entry(**content)
        size += len(line)
    return entries, size
