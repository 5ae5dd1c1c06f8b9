"""The journal of a stream: what was taken in, and when all that waited was handed out, on disk before it has any
effect.

Which samples a poll returns, and whether a wait was too long, depends on the moment. Whatever follows from a position
and the journal's entries does not: so a stream that died goes on exactly as it would have. One line an entry: a
checksum, then JSON with the entry's number.
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
    """What happened.

    Attributes:
        kind: "chunk" (samples came), "flush" (nothing came for too long) or "end" (nothing more will come).
        partition, start, end: of a chunk.
        samples: how many it has.
        lost: as the source said.
        now: the clock then, Unix seconds.
    """

    kind: Literal["chunk", "flush", "end"]
    partition: str = ""
    start: Any = None
    end: Any = None
    samples: int = 0
    lost: int = 0
    now: int = 0


class Journal:
    """A file of entries, numbered from 0 over the whole life of a stream.

    Args:
        path: the file; made where it is not there. A last line that is not whole is dropped: nothing followed from it.
        first: number of the first entry that is asked for.

    Raises:
        ValueError: the file is damaged before its last line, or does not have the entries from `first` on.
    """

    def __init__(self, path: Path, first: int) -> None:
        self._path, self._lock = path, threading.Lock()
        entries, whole = _read(path)
        if entries and not min(entries) <= first <= max(entries) + 1:
            raise ValueError(
                f"{path} has the entries {min(entries)} to {max(entries)}, the position asks for {first} on: they do "
                "not belong together. Give the position that does, or remove the journal to go on with other batches"
            )
        self._entries = {number: entry for number, entry in entries.items() if number >= first}
        self.next = max(entries) + 1 if entries else first
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("ab", buffering=0)
        self._whole = whole
        self._file.truncate(whole)
        sync_folder(path.parent)

    def past(self, number: int) -> Entry | None:
        """An entry that was there when the file was opened; asked for once, in order. None beyond the last one."""
        return self._entries.pop(number, None)

    def append(self, entry: Entry) -> None:
        """On disk when this returns.

        Raises:
            OSError: it cannot be written, and nothing may follow from it.
        """
        with self._lock:
            line = _line(self.next, entry)
            try:
                if self._file.write(line) < len(line):
                    raise OSError(errno.ENOSPC, f"no room left for the journal {self._path}")
                sync_file(self._file)
            except OSError:
                self._file.truncate(self._whole)
                raise
            self._whole += len(line)
            self.next += 1

    def cut(self, first: int) -> None:
        """Forgets the entries before `first`: no position before it will be asked for."""
        with self._lock:
            entries, _ = _read(self._path)
            kept = [_line(number, entry) for number, entry in entries.items() if number >= first]
            # One entry always stays, to say where the numbers are.
            kept = kept or [_line(number, entry) for number, entry in list(entries.items())[-1:]]
            replace_file(self._path, b"".join(kept))
            self._file.close()
            self._file = self._path.open("ab", buffering=0)
            self._whole = sum(map(len, kept))

    def close(self) -> None:
        self._file.close()


def _line(number: int, entry: Entry) -> bytes:
    text = json.dumps({"number": number, **asdict(entry)}, separators=(",", ":")).encode()
    return b"%08x %s\n" % (zlib.crc32(text), text)


def _read(path: Path) -> tuple[dict[int, Entry], int]:
    """Entries by number, and the bytes that they take."""
    if not path.exists():
        return {}, 0
    entries: dict[int, Entry] = {}
    whole = 0
    lines = path.read_bytes().splitlines(keepends=True)
    for place, line in enumerate(lines):
        checksum, _, text = line.rstrip(b"\n").partition(b" ")
        if not line.endswith(b"\n") or checksum != b"%08x" % zlib.crc32(text):
            if place < len(lines) - 1:
                raise ValueError(f"{path}, line {place + 1} is damaged; remove the journal to go on with other batches")
            break
        content = json.loads(text)
        number = content.pop("number")
        entries[number] = Entry(**content)
        whole += len(line)
    return entries, whole
