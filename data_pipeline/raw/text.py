"""Text files, decompressed if needed, in segments of complete lines."""

import bz2
import io
import lzma
import re
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from typing import IO, Any

import numpy as np
import pyarrow as pa

from cowrec.errors import UserError

from .inputs import (
    RawFile,
    Report,
    Segment,
    Source,
    changed_message,
    open_file,
    partition_of,
    read_bytes,
    stamp,
)
from .json_lines import are_json_lines, json_columns

NEWLINE = 10


def look_at_text(path: str) -> Source:
    """Reads the first line of a text file, empty for empty text, or the columns of JSON lines."""
    with closing(RawText(path)) as text:
        lines = next(line_blocks(text, BLOCK_BYTES), b"").removeprefix(BYTE_ORDER_MARK)
        if are_json_lines(path, lines):
            return Source(path, "json", text.stamp, columns=json_columns(lines), partition=partition_of(path))
        first = lines.split(b"\n", 1)[0].removesuffix(b"\r")
        return Source(path, "text", text.stamp, first, partition=partition_of(path))


def survey_text(source: Source, report: Report, *, header: bool, segment_samples: int, block_bytes: int) -> RawFile:
    """Reads a text file once to find its segments; see `reading.survey`.

    Empty lines at the end belong to no segment, and neither do lines that repeat the header, as in concatenated files.
    """
    segments: list[Segment] = []
    offset, place, samples, reported = 0, 1, 0, 0
    with closing(RawText(source.path, source)) as text:
        for lines in line_blocks(text, block_bytes):
            if not offset:
                offset = (
                    (lines.find(b"\n") + 1 or len(lines))
                    if header
                    else len(BYTE_ORDER_MARK) * lines.startswith(BYTE_ORDER_MARK)
                )
                place, lines = place + header, lines[offset:]
            for part, is_header in _without_headers(lines, source.first_line if header else b""):
                if is_header:
                    offset, place = offset + len(part), place + 1
                    continue
                for size, count in _split_lines(part, samples, segment_samples):
                    segments.append(Segment(source, text.plain, offset, size, count, place, samples, file_bytes=0))
                    offset, place, samples = offset + size, place + count, samples + count
            if segments:
                reported += _add_file_bytes(segments, text.disk_bytes - reported, report)
        if not segments:
            raise UserError(f"input file {source.path} has no samples; copy it again, or remove it")
        _add_file_bytes(segments, source.stamp[0] - reported, report)  # what follows an archive's last line
        return RawFile(source, samples, tuple(segments))


def _add_file_bytes(segments: list[Segment], file_bytes: int, report: Report) -> int:
    segments[-1] = replace(segments[-1], file_bytes=segments[-1].file_bytes + file_bytes)
    report(file_bytes)
    return file_bytes


def _without_headers(lines: bytes, header: bytes) -> Iterator[tuple[bytes, bool]]:
    """Yields the lines before and after each repetition of the header, and each repetition with True."""
    start = 0
    if header and header in lines:
        pattern = b"^(?:" + BYTE_ORDER_MARK + b")?" + re.escape(header) + rb"\r?(?:\n|\Z)"
        for match in re.finditer(pattern, lines, re.MULTILINE):
            if match.start() > start:
                yield lines[start : match.start()], False
            yield match.group(), True
            start = match.end()
    if start < len(lines):
        yield lines[start:] if start else lines, False


def _split_lines(lines: bytes, before: int, segment_samples: int) -> Iterator[tuple[int, int]]:
    """Splits lines that follow `before` others at multiples of `segment_samples`; yields bytes and lines of parts."""
    count = lines.count(b"\n") + (not lines.endswith(b"\n"))
    stops = range(segment_samples - before % segment_samples, count, segment_samples)
    ends = np.flatnonzero(np.frombuffer(lines, np.uint8) == NEWLINE) + 1 if stops else np.empty(0)
    offsets = [0, *(int(ends[stop - 1]) for stop in stops), len(lines)]
    yield from zip(np.diff(offsets).tolist(), np.diff([0, *stops, count]).tolist(), strict=True)


BLOCK_BYTES = 16 << 20
BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class RawText:
    """Reader of a file's text, decompressed if needed; must be closed.

    Raises ValueError if the file has changed since the survey that found `source`. `plain` is True if the file is not
    compressed, and `offset` has the bytes of text read or skipped so far.
    """

    def __init__(self, path: str, source: Source | None = None) -> None:
        self.path, self.source, self.offset = path, source, 0
        self._raw = open_file(path)
        self.stamp = stamp(path)
        if source is not None and self.stamp != source.stamp:
            self.close()
            raise UserError(changed_message(path))
        self._buffered = io.BufferedReader(self._raw, read_bytes(path))
        self._kind, opener = _format(self._buffered.peek(6)[:6])
        self.plain = self._kind == "plain"
        try:
            with self._archive_errors():
                self._stream = opener(self._buffered)
        except ValueError:
            self.close()
            raise

    @property
    def disk_bytes(self) -> int:
        """Bytes of the file that were read so far, with those that are buffered."""
        return int(self._raw.tell())

    def read(self, size: int) -> bytes:
        """Reads `size` bytes, or fewer at the end of the text."""
        parts, missing = [], size
        with self._archive_errors():
            while missing and (part := self._stream.read(missing)):
                parts.append(part)
                missing -= len(part)
        self.offset += size - missing
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def read_segment(self, segment: Segment) -> bytes:
        """Returns the lines of a segment, each with a newline."""
        self.skip_to(segment.offset)
        data = self.read(segment.size)
        if len(data) < segment.size:
            raise UserError(changed_message(self.path))
        return data if data.endswith(b"\n") else data + b"\n"

    def skip_to(self, offset: int) -> None:
        """Moves forward to an offset in the text."""
        if self.plain and offset != self.offset:
            self._buffered.seek(offset)
            self.offset = offset
        while self.offset < offset and self.read(min(BLOCK_BYTES, offset - self.offset)):
            pass

    def close(self) -> None:
        self._raw.close()

    @contextmanager
    def _archive_errors(self) -> Iterator[None]:
        """Turns errors of a decompressor into ValueErrors that name the file."""
        try:
            yield
        except _Refused as error:
            raise UserError(f"{self.path}: {error}") from None
        except (EOFError, OSError, lzma.LZMAError, zlib.error, zipfile.BadZipFile, NotImplementedError) as error:
            truncated = isinstance(error, EOFError) or "runcated" in str(error)
            if self._kind == "plain":
                raise
            raise UserError(
                f"{self.path}: the {self._kind} archive is {'truncated' if truncated else 'damaged'} ({error}); "
                "nothing was written. Copy or download it again"
            ) from error


def line_blocks(text: RawText, block_bytes: int) -> Iterator[bytes]:
    """Yields all text but empty lines at the end, in blocks of complete lines; the last line may lack its newline.

    Raises ValueError if a line is longer than `block_bytes`, or the text is a tar archive.
    """
    line, remainder = 1, b""
    while chunk := text.read(block_bytes):
        data = remainder + chunk
        if line == 1 and data[257:262] == b"ustar" and b"\0" in data[:512]:
            raise UserError(f"{text.path}: it is a tar archive; extract the files and give their folder")
        end = _end_of_text(data)
        if not end and len(data) > block_bytes:
            end = data.rfind(b"\n") + 1  # empty lines
            if not end:
                raise UserError(f"{text.path}, line {line}: longer than {block_bytes:,} bytes; is this a text file?")
        remainder = data[end:]
        if end:
            line += data.count(b"\n", 0, end)
            yield data[:end]
    if remainder.strip(b"\r\n"):
        yield remainder


def _end_of_text(data: bytes) -> int:
    """Returns where the last complete line ends that is not empty; 0 if there is none."""
    last = data.rfind(b"\n") + 1
    while last and data[last - 1] in b"\r\n":
        last -= 1
    return data.index(b"\n", last) + 1 if last else 0


class _Refused(Exception):
    """An archive that is intact and not read."""


def _format(magic: bytes) -> tuple[str, Callable[[Any], Any]]:
    """Returns the compression of a file that begins so, "plain" for none, and a function that opens its text."""
    known = ((kind, opener) for kind, (start, opener) in COMPRESSIONS.items() if magic.startswith(start))
    return next(known, ("plain", lambda file: file))


def _arrow_stream(codec: str) -> Callable[[Any], Any]:
    return lambda file: pa.CompressedInputStream(pa.PythonFile(file, mode="r"), codec)


def _zip_member(file: Any) -> IO[bytes]:
    """Opens the one file in a zip archive. Raises `_Refused` if there are several, or they make another format."""
    archive = zipfile.ZipFile(file)
    members = [member for member in archive.infolist() if not member.is_dir() and not _is_hidden(member.filename)]
    for what, holds in OTHER_ARCHIVES.items():
        if any(map(holds, (member.filename for member in members))):
            raise _Refused(f"the file is {what}")
    if len(members) != 1:
        names = ", ".join(member.filename for member in members[:9])
        raise _Refused(f"the zip archive has {len(members)} files ({names}), must have one; give the extracted folder")
    return archive.open(members[0])


OTHER_ARCHIVES: dict[str, Callable[[str], bool]] = {
    "an Excel workbook; save the sheet as CSV": lambda name: name.startswith("xl/"),
    "an archive of NumPy arrays; write the arrays as the columns of a Parquet file": lambda name: name.endswith(".npy"),
}
"""Files that are zip archives by their form, and the names of a member that tell them."""


def _is_hidden(name: str) -> bool:
    return any(part.startswith((".", "__MACOSX")) for part in name.split("/"))


COMPRESSIONS: dict[str, tuple[bytes, Callable[[Any], Any]]] = {
    "gzip": (b"\x1f\x8b", _arrow_stream("gzip")),
    "zstd": (b"\x28\xb5\x2f\xfd", _arrow_stream("zstd")),
    "xz": (b"\xfd7zXZ\x00", lzma.LZMAFile),
    "bzip2": (b"BZh", bz2.BZ2File),
    "lz4": (b"\x04\x22\x4d\x18", _arrow_stream("lz4")),
    "zip": (b"PK\x03\x04", _zip_member),
}
"""Compressions of text: the first bytes of a file, and the function that opens it."""
