"""Raw text files, plain or compressed, as blocks of whole lines whose line numbers are known."""

import hashlib
import io
import lzma
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, cast

import pyarrow as pa

BLOCK_BYTES = 16 << 20
BYTE_ORDER_MARK = b"\xef\xbb\xbf"


@dataclass(frozen=True)
class Block:
    """Whole lines of one file, each ended by a newline.

    Attributes:
        path: the file, as given.
        data: the bytes.
        first_line: line number of the first line in the file, from 1.
        first_row: number of the first row over all files, from 0; headers are not rows, bad rows are.
        lines: how many.
        file_bytes: bytes of the file on disk that were read since the block before.
    """

    path: str
    data: bytes
    first_line: int
    first_row: int
    lines: int
    file_bytes: int


class _Tally(io.RawIOBase):
    """A file that counts what is read from it and, if asked, takes its SHA-256."""

    def __init__(self, path: str, checksum: bool) -> None:
        self._file = open(path, "rb", buffering=0)  # noqa: SIM115 - closed by close()
        self.digest = hashlib.sha256() if checksum else None
        self.bytes_read = 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        count = self._file.readinto(buffer) or 0
        self.bytes_read += count
        if self.digest is not None:
            self.digest.update(memoryview(buffer)[:count])
        return count

    def close(self) -> None:
        self._file.close()
        super().close()


class RawFiles:
    """The raw files of a run, read once per pass and in the order given.

    Args:
        paths: plain, gzip (several members too), xz or zstd files; told apart by their first bytes, not their names.
        header: the first line of each file is a header, the same in all.

    Raises:
        ValueError: no file, or one that is missing, empty or not a regular file (a pipe cannot be read twice).
    """

    def __init__(self, paths: Sequence[str | os.PathLike[str]], *, header: bool) -> None:
        if not paths:
            raise ValueError("no input file given")
        self.paths = [os.fspath(path) for path in paths]
        self._has_header = header
        for path in self.paths:
            if not Path(path).exists():
                raise ValueError(f"input file {path} does not exist")
            if not Path(path).is_file():
                raise ValueError(f"input {path} is not a regular file; it is read twice, so a pipe or folder cannot be")
            if Path(path).stat().st_size == 0:
                raise ValueError(f"input file {path} is empty")
        self._stamps = [_stamp(path) for path in self.paths]
        self.rows: dict[str, int] = {}
        self.checksums: dict[str, str] = {}

    @property
    def total_bytes(self) -> int:
        """Bytes on disk of all files: the sum of `Block.file_bytes` over a pass."""
        return sum(size for size, _ in self._stamps)

    def first_line(self) -> bytes:
        """The first line of the first file, without its end."""
        for block in _blocks_of(_Tally(self.paths[0], False), self.paths[0], BLOCK_BYTES):
            return _without_end(block.data[: block.data.index(b"\n") + 1])
        raise ValueError(f"input file {self.paths[0]} is empty")

    def blocks(self, *, checksum: bool = False, block_bytes: int = BLOCK_BYTES) -> Iterator[Block]:
        """All lines of all files but headers; with `checksum`, `checksums` is complete at the end.

        Raises:
            ValueError: a truncated or damaged archive, a line longer than a block, an empty file, a differing header, a
                file that changed since the pass before.
        """
        header, row = None, 0
        for path, stamp in zip(self.paths, self._stamps, strict=True):
            if _stamp(path) != stamp:
                raise ValueError(f"{path} changed while it was being read; run again")
            first_row, opened = row, _Tally(path, checksum)
            for position, raw in enumerate(_blocks_of(opened, path, block_bytes)):
                block = raw
                if position == 0 and self._has_header:
                    mine, block = _cut_header(raw)
                    if header not in (None, mine):
                        raise ValueError(f"{path}, line 1: header differs from that of {self.paths[0]}")
                    header = mine
                yield Block(path, block.data, block.first_line, row, block.lines, block.file_bytes)
                row += block.lines
            if row == first_row:
                raise ValueError(f"input file {path} has no rows")
            self.rows[path] = row - first_row
            if opened.digest is not None:
                self.checksums[path] = opened.digest.hexdigest()


def _stamp(path: str) -> tuple[int, int]:
    status = os.stat(path)
    return status.st_size, status.st_mtime_ns


def _cut_header(block: Block) -> tuple[bytes, Block]:
    end = block.data.index(b"\n") + 1
    rest = Block(block.path, block.data[end:], 2, 0, block.lines - 1, block.file_bytes)
    return _without_end(block.data[:end]), rest


def _without_end(line: bytes) -> bytes:
    return line.removesuffix(b"\n").removesuffix(b"\r")


def _blocks_of(raw: _Tally, path: str, block_bytes: int) -> Iterator[Block]:
    """Blocks of one file. Decompresses as it goes, and reads the file to its end, so that the checksum covers it."""
    line, done, rest = 1, 0, b""
    with raw:
        for chunk in _chunks(raw, path, block_bytes):
            data = rest + chunk
            if line == 1:
                data = data.removeprefix(BYTE_ORDER_MARK)
            end = data.rfind(b"\n") + 1
            if not end:
                if len(data) > block_bytes:
                    raise ValueError(f"{path}, line {line}: longer than {block_bytes:,} bytes; is this a text file?")
                rest = data
                continue
            whole, rest = data[:end], data[end:]
            lines = whole.count(b"\n")
            yield Block(path, whole, line, 0, lines, raw.bytes_read - done)
            line, done = line + lines, raw.bytes_read
        if rest:
            yield Block(path, rest + b"\n", line, 0, 1, raw.bytes_read - done)


def _chunks(raw: _Tally, path: str, size: int) -> Iterator[bytes]:
    buffered = io.BufferedReader(raw, 1 << 20)
    kind, opener = _format(buffered.peek(6)[:6])
    try:
        stream = opener(buffered)
        while chunk := stream.read(size):
            yield chunk
        while buffered.read(1 << 20):  # whatever follows the archive, for the checksum
            pass
    except (EOFError, OSError, lzma.LZMAError) as error:
        truncated = isinstance(error, EOFError) or "runcated" in str(error)
        if kind == "plain":
            raise
        raise ValueError(
            f"{path}: the {kind} archive is {'truncated' if truncated else 'damaged'} ({error}); nothing was written. "
            "Copy or download it again"
        ) from error


def _format(magic: bytes) -> tuple[str, Callable[[BinaryIO], BinaryIO]]:
    if magic.startswith(b"\x1f\x8b"):
        return "gzip", lambda file: _arrow_stream(file, "gzip")
    if magic.startswith(b"\x28\xb5\x2f\xfd"):
        return "zstd", lambda file: _arrow_stream(file, "zstd")
    if magic.startswith(b"\xfd7zXZ\x00"):
        return "xz", lambda file: cast(BinaryIO, lzma.LZMAFile(file))
    return "plain", lambda file: file


def _arrow_stream(file: BinaryIO, codec: str) -> BinaryIO:
    return pa.CompressedInputStream(pa.PythonFile(file, mode="r"), codec)
