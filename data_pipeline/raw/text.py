"""Sequential reading of a raw file's text, decompressed if needed."""

import hashlib
import io
import lzma
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import BinaryIO, cast

import pyarrow as pa

BLOCK_BYTES = 16 << 20
BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class RawText:
    """Reader of a file's text, decompressed if needed. A context manager.

    Attributes:
        stamp: the file's size and modification time.
        plain: True if the file is not compressed.
        offset: bytes of text read or skipped so far.
    """

    def __init__(self, path: str, *, checksum: bool = False) -> None:
        self.path, self.offset = path, 0
        self._raw = _CountedFile(path, checksum)
        status = os.fstat(self._raw.fileno())
        self.stamp = (status.st_size, status.st_mtime_ns)
        self._buffered = io.BufferedReader(self._raw, 1 << 20)
        self._kind, opener = _format(self._buffered.peek(6)[:6])
        self.plain = self._kind == "plain"
        with self._archive_errors():
            self._stream = opener(self._buffered)

    @property
    def disk_bytes(self) -> int:
        """Bytes of the file read so far."""
        return self._raw.bytes_read

    @property
    def sha256(self) -> str:
        """SHA-256 of the file; valid once all of it is read."""
        assert self._raw.digest is not None
        return self._raw.digest.hexdigest()

    def read(self, size: int) -> bytes:
        """Reads `size` bytes, or fewer at the end of the text."""
        parts, missing = [], size
        with self._archive_errors():
            while missing and (part := self._stream.read(missing)):
                parts.append(part)
                missing -= len(part)
            if missing:
                while self._buffered.read(1 << 20):  # the checksum includes what follows the archive
                    pass
        self.offset += size - missing
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def skip_to(self, offset: int) -> None:
        """Moves forward to an offset in the text."""
        if self.plain and offset != self.offset:
            self._buffered.seek(offset)
            self.offset = offset
        while self.offset < offset and self.read(min(BLOCK_BYTES, offset - self.offset)):
            pass

    def close(self) -> None:
        self._raw.close()

    def __enter__(self) -> "RawText":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @contextmanager
    def _archive_errors(self) -> Iterator[None]:
        """Turns errors of a decompressor into ValueErrors that name the file."""
        try:
            yield
        except (EOFError, OSError, lzma.LZMAError) as error:
            truncated = isinstance(error, EOFError) or "runcated" in str(error)
            if self._kind == "plain":
                raise
            raise ValueError(
                f"{self.path}: the {self._kind} archive is {'truncated' if truncated else 'damaged'} ({error}); "
                "nothing was written. Copy or download it again"
            ) from error


def line_blocks(text: RawText, block_bytes: int) -> Iterator[tuple[bytes, int]]:
    """Yields all text in blocks of complete lines, with their number; only the last line may lack its newline.

    Raises:
        ValueError: a line is longer than `block_bytes`.
    """
    line, remainder = 1, b""
    while chunk := text.read(block_bytes):
        data = remainder + chunk
        end = data.rfind(b"\n") + 1
        if not end and len(data) > block_bytes:
            raise ValueError(f"{text.path}, line {line}: longer than {block_bytes:,} bytes; is this a text file?")
        remainder = data[end:]
        if end:
            count = data.count(b"\n")
            yield data[:end], count
            line += count
    if remainder:
        yield remainder, 1


def leading_line(lines: bytes) -> bytes:
    """Returns the first line of the beginning of a file, without its line ending and byte order mark."""
    return lines.split(b"\n", 1)[0].removesuffix(b"\r").removeprefix(BYTE_ORDER_MARK)


class _CountedFile(io.RawIOBase):
    """A file that counts the bytes read from it and optionally computes their SHA-256."""

    def __init__(self, path: str, checksum: bool) -> None:
        self._file = open(path, "rb", buffering=0)  # noqa: SIM115 - closed by close()
        self.digest = hashlib.sha256() if checksum else None
        self.bytes_read = 0

    def fileno(self) -> int:
        return self._file.fileno()

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        return self._file.seek(offset, whence)

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        count = self._file.readinto(buffer) or 0
        self.bytes_read += count
        if self.digest is not None:
            self.digest.update(memoryview(buffer)[:count])
        return count

    def close(self) -> None:
        self._file.close()
        super().close()


def _format(magic: bytes) -> tuple[str, Callable[[BinaryIO], BinaryIO]]:
    """Identifies a file by its first bytes. Returns the format's name and a function that opens its text."""
    if magic.startswith(b"\x1f\x8b"):
        return "gzip", lambda file: _arrow_stream(file, "gzip")
    if magic.startswith(b"\x28\xb5\x2f\xfd"):
        return "zstd", lambda file: _arrow_stream(file, "zstd")
    if magic.startswith(b"\xfd7zXZ\x00"):
        return "xz", lambda file: cast(BinaryIO, lzma.LZMAFile(file))
    return "plain", lambda file: file


def _arrow_stream(file: BinaryIO, codec: str) -> BinaryIO:
    return pa.CompressedInputStream(pa.PythonFile(file, mode="r"), codec)
