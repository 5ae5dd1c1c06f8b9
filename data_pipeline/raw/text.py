"""The text of a raw file, plain or compressed, read forward and decompressed on the way."""

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
    """The text of a file from `offset` on, decompressed; to be closed.

    Attributes:
        stamp: the file's size and time of change.
        plain: the file is not compressed.
        offset: bytes of text read or skipped.
    """

    def __init__(self, path: str, *, checksum: bool = False) -> None:
        self.path, self.offset = path, 0
        self._raw = _Tally(path, checksum)
        status = os.fstat(self._raw.fileno())
        self.stamp = (status.st_size, status.st_mtime_ns)
        self._buffered = io.BufferedReader(self._raw, 1 << 20)
        self._kind, opener = _format(self._buffered.peek(6)[:6])
        self.plain = self._kind == "plain"
        with self._damage_told():
            self._stream = opener(self._buffered)

    @property
    def disk_bytes(self) -> int:
        """Bytes of the file that were read so far."""
        return self._raw.bytes_read

    @property
    def sha256(self) -> str:
        """Of the file; known once all of it is read."""
        assert self._raw.digest is not None
        return self._raw.digest.hexdigest()

    def read(self, size: int) -> bytes:
        """`size` bytes, or what is left of them at the end of the text."""
        parts, missing = [], size
        with self._damage_told():
            while missing and (part := self._stream.read(missing)):
                parts.append(part)
                missing -= len(part)
            if missing:
                while self._buffered.read(1 << 20):  # whatever follows the archive, for the checksum
                    pass
        self.offset += size - missing
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def skip_to(self, offset: int) -> None:
        """Forward to a place in the text."""
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
    def _damage_told(self) -> Iterator[None]:
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


def whole_lines(text: RawText, block_bytes: int) -> Iterator[tuple[bytes, int]]:
    """All text in pieces that end with a newline, but for the last one maybe; and the number of their lines."""
    line, rest = 1, b""
    while chunk := text.read(block_bytes):
        data = rest + chunk
        end = data.rfind(b"\n") + 1
        if not end and len(data) > block_bytes:
            raise ValueError(f"{text.path}, line {line}: longer than {block_bytes:,} bytes; is this a text file?")
        rest = data[end:]
        if end:
            count = data.count(b"\n")
            yield data[:end], count
            line += count
    if rest:
        yield rest, 1


def first_of(lines: bytes) -> bytes:
    """The first line of a file's beginning, without its end and without a byte order mark."""
    return lines.split(b"\n", 1)[0].removesuffix(b"\r").removeprefix(BYTE_ORDER_MARK)


class _Tally(io.RawIOBase):
    """A file that counts what is read from it and, if asked, takes its SHA-256."""

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
    if magic.startswith(b"\x1f\x8b"):
        return "gzip", lambda file: _arrow_stream(file, "gzip")
    if magic.startswith(b"\x28\xb5\x2f\xfd"):
        return "zstd", lambda file: _arrow_stream(file, "zstd")
    if magic.startswith(b"\xfd7zXZ\x00"):
        return "xz", lambda file: cast(BinaryIO, lzma.LZMAFile(file))
    return "plain", lambda file: file


def _arrow_stream(file: BinaryIO, codec: str) -> BinaryIO:
    return pa.CompressedInputStream(pa.PythonFile(file, mode="r"), codec)
