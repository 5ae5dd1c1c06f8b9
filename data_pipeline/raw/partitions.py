"""Raw text files, plain or compressed: surveyed once, then read by segments of whole lines."""

from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path

import numpy as np

from .text import BLOCK_BYTES, BYTE_ORDER_MARK, RawText, first_of, whole_lines

NEWLINE = 10

Report = Callable[[int], None]


@dataclass(frozen=True)
class Segment:
    """Whole lines of one file, at most some 16 MB; headers are in none.

    Attributes:
        path: the file, as given.
        stamp: its size and time of change when it was surveyed.
        plain: not compressed, so that a segment can be read without those before it.
        offset: of the first byte in the text, after decompression.
        size: bytes of text.
        lines: how many.
        first_line: line number of the first line in the file, from 1.
        first_row: number of the first row over all files, from 0; headers are not rows, bad rows are.
        file_bytes: bytes on disk; those of a file's segments add up to its size.
    """

    path: str
    stamp: tuple[int, int]
    plain: bool
    offset: int
    size: int
    lines: int
    first_line: int
    first_row: int
    file_bytes: int


@dataclass(frozen=True)
class Block:
    """A segment's text, each line ended by a newline; the rest as in :class:`Segment`."""

    path: str
    data: bytes
    first_line: int
    first_row: int
    lines: int


@dataclass(frozen=True)
class RawFile:
    """What a survey found: the file's checksum, first line without its end, rows and segments."""

    path: str
    sha256: str
    first_line: bytes
    rows: int
    segments: tuple[Segment, ...]


@dataclass(frozen=True)
class Partition:
    """Consecutive segments, of which one task makes a shard of each split."""

    number: int
    segments: tuple[Segment, ...]

    @property
    def file_bytes(self) -> int:
        return sum(segment.file_bytes for segment in self.segments)


def check_inputs(paths: Sequence[str]) -> None:
    """Raises ValueError: no file, or one that is missing, empty or not a regular file (a pipe cannot be read twice)."""
    if not paths:
        raise ValueError("no input file given")
    for path in paths:
        if not Path(path).exists():
            raise ValueError(f"input file {path} does not exist")
        if not Path(path).is_file():
            raise ValueError(f"input {path} is not a regular file; it is read twice, so a pipe or folder cannot be")
        if Path(path).stat().st_size == 0:
            raise ValueError(f"input file {path} is empty")


def first_line(path: str) -> bytes:
    """The first line of a file, without its end; nothing where its text is empty."""
    with RawText(path) as text:
        lines, _ = next(whole_lines(text, BLOCK_BYTES), (b"", 0))
    return first_of(lines)


def survey(path: str, report: Report, *, header: bool, segment_rows: int, block_bytes: int = BLOCK_BYTES) -> RawFile:
    """Reads a file once, for its checksum and to find its segments.

    Args:
        path: of a plain, gzip (several members too), xz or zstd file; told apart by the first bytes, not by the name.
        report: called with bytes on disk just read.
        header: the first line is a header.
        segment_rows: of a segment at most; every so many rows of the file, a segment ends.
        block_bytes: of a line, and about of a segment, at most.

    Raises:
        ValueError: a truncated or damaged archive, a line longer than a block, a file without rows.
    """
    segments: list[Segment] = []
    first, offset, rows, told = b"", 0, 0, 0
    with RawText(path, checksum=True) as text:
        for lines, count in whole_lines(text, block_bytes):
            if offset == 0:
                first = first_of(lines)
                offset = lines.find(b"\n") + 1 if header else len(lines) - len(lines.removeprefix(BYTE_ORDER_MARK))
                lines, count = lines[offset:], count - header
            for size, cut in _cuts(lines, count, rows, segment_rows):
                place = (offset, size, cut, rows + 1 + header, rows)
                segments.append(Segment(path, text.stamp, text.plain, *place, file_bytes=0))
                offset, rows = offset + size, rows + cut
            if segments:
                told += _account(segments, text.disk_bytes - told, report)
        if not segments:
            raise ValueError(f"input file {path} has no rows")
        _account(segments, text.disk_bytes - told, report)  # what follows an archive's last line
        return RawFile(path, text.sha256, first, rows, tuple(segments))


def _account(segments: list[Segment], file_bytes: int, report: Report) -> int:
    segments[-1] = replace(segments[-1], file_bytes=segments[-1].file_bytes + file_bytes)
    report(file_bytes)
    return file_bytes


def partitions(files: Sequence[RawFile], rows: int) -> list[Partition]:
    """All segments of all files in order, put together to partitions of at most `rows` rows, numbered from 0."""
    starts = accumulate((file.rows for file in files), initial=0)
    segments = [
        replace(segment, first_row=segment.first_row + start)
        for file, start in zip(files, starts, strict=False)
        for segment in file.segments
    ]
    groups: list[list[Segment]] = []
    held = 0
    for segment in segments:
        if not groups or held + segment.lines > rows:
            groups.append([])
            held = 0
        groups[-1].append(segment)
        held += segment.lines
    return [Partition(number, tuple(group)) for number, group in enumerate(groups)]


def blocks(segments: Iterable[Segment]) -> Generator[Block, None, None]:
    """Reads segments; those of a compressed file are best asked for in order, or it is decompressed again.

    Raises:
        ValueError: a file that is missing, or that changed since the survey.
    """
    text: RawText | None = None
    try:
        for segment in segments:
            if text is None or text.path != segment.path or segment.offset < text.offset:
                if text is not None:
                    text.close()
                text = _opened(segment)
            text.skip_to(segment.offset)
            data = text.read(segment.size)
            if len(data) < segment.size:
                raise ValueError(_changed(segment.path))
            data = data if data.endswith(b"\n") else data + b"\n"
            yield Block(segment.path, data, segment.first_line, segment.first_row, segment.lines)
    finally:
        if text is not None:
            text.close()


def _opened(segment: Segment) -> RawText:
    try:
        text = RawText(segment.path)
    except FileNotFoundError:
        raise ValueError(f"input file {segment.path} is gone; put it back and run again") from None
    if text.stamp != segment.stamp:
        text.close()
        raise ValueError(_changed(segment.path))
    return text


def _changed(path: str) -> str:
    return f"{path} changed while it was being read; run again"


def _cuts(lines: bytes, count: int, rows: int, segment_rows: int) -> Iterator[tuple[int, int]]:
    """Bytes and lines of each part of `count` lines that follow on `rows` rows, cut at multiples of `segment_rows`."""
    if not count:
        return
    stops = range(segment_rows - rows % segment_rows, count, segment_rows)
    ends = np.flatnonzero(np.frombuffer(lines, np.uint8) == NEWLINE) + 1 if stops else np.empty(0)
    places = [0, *(int(ends[stop - 1]) for stop in stops), len(lines)]
    numbers = [0, *stops, count]
    for k in range(len(stops) + 1):
        yield places[k + 1] - places[k], numbers[k + 1] - numbers[k]
