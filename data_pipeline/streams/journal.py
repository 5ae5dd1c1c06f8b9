"""Journal of a stream: an append-only file of the events that decide how samples are batched.

Which samples a poll returns, and whether the stream waited too long, depends on timing. Each such event is on disk
before it takes effect; everything else follows from a position and the journal's entries, so a stream that crashed
continues exactly as it would have. One line per entry: a checksum, then JSON with the entry's number.
"""

import errno
import json
import threading
import zlib
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from cowrec.data_pipeline.files import replace_file, sync_file, sync_folder


@dataclass(frozen=True)
class Entry:
    """One event of a stream.

    Attributes:
        kind: "chunk" (samples arrived), "flush" (none arrived for too long) or "end" (no more will come).
        partition, start, end: position of the chunk.
        samples: number of samples in the chunk.
        lost: see `Chunk.lost`.
        now: time of the event, Unix seconds.
    """

    kind: Literal["chunk", "flush", "end"]
    partition: str = ""
    start: Any = None
    end: Any = None
    samples: int = 0
    lost: int = 0
    now: int = 0


class Journal:
    """A file of entries, numbered from 0 over the life of a stream.

    Args:
        path: the file; created if missing. An incomplete last line is dropped, since it had no effect yet.
        first: number of the first entry to replay.

    Raises:
        ValueError: the file is damaged before its last line, or the entries from `first` on are missing.
    """

    def __init__(self, path: Path, first: int) -> None:
        self._path, self._lock = path, threading.Lock()
        entries, size = _read(path)
        if entries and not min(entries) <= first <= max(entries) + 1:
            raise ValueError(
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
        """Writes an entry to disk; it is durable when this returns.

        Raises:
            OSError: the entry cannot be written, and must not take effect.
        """
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
        """Removes the entries before `first`, which no position to resume from needs."""
        with self._lock:
            entries, _ = _read(self._path)
            kept = [_line(number, entry) for number, entry in entries.items() if number >= first]
            # At least one entry stays, to keep the numbering.
            kept = kept or [_line(number, entry) for number, entry in list(entries.items())[-1:]]
            replace_file(self._path, b"".join(kept))
            self._file.close()
            self._file = self._path.open("ab", buffering=0)
            self._size = sum(map(len, kept))

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
                raise ValueError(f"{path}, line {index + 1} is damaged; remove the journal to continue without it")
            break
        content = json.loads(text)
        number = content.pop("number")
        entries[number] = Entry(**content)
        size += len(line)
    return entries, size
