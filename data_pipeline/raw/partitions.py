"""Partitions of raw text files: a survey finds segments of complete lines, which are then read in any order."""

from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path

import numpy as np

from .text import BLOCK_BYTES, BYTE_ORDER_MARK, RawText, leading_line, line_blocks

NEWLINE = 10

Report = Callable[[int], None]


@dataclass(frozen=True)
class Segment:
    """Complete lines of one file, about 16 MB at most; headers belong to no segment.

    Attributes:
        path: the file, as given.
        stamp: size and modification time of the file at the survey.
        plain: True if the file is not compressed, so that a segment can be read without those before it.
        offset: first byte in the text, after decompression.
        size: bytes of text.
        lines: number of lines.
        first_line: line number of the first line in the file, from 1.
        first_sample: number of the first sample over all files, from 0; bad rows count, headers do not.
        file_bytes: bytes on disk; those of a file's segments add up to its size.
    """

    path: str
    stamp: tuple[int, int]
    plain: bool
    offset: int
    size: int
    lines: int
    first_line: int
    first_sample: int
    file_bytes: int


@dataclass(frozen=True)
class Block:
    """The text of a segment, in which each line ends with a newline; other attributes as in `Segment`."""

    path: str
    data: bytes
    first_line: int
    first_sample: int
    lines: int


@dataclass(frozen=True)
class RawFile:
    """The result of a survey: the file's checksum, first line without its line ending, samples and segments."""

    path: str
    sha256: str
    first_line: bytes
    samples: int
    segments: tuple[Segment, ...]


@dataclass(frozen=True)
class Partition:
    """Consecutive segments, which one task turns into a shard of each split."""

    number: int
    segments: tuple[Segment, ...]

    @property
    def file_bytes(self) -> int:
        """Bytes on disk of all segments."""
        return sum(segment.file_bytes for segment in self.segments)


def check_inputs(paths: Sequence[str]) -> None:
    """Raises ValueError unless all files exist, are regular files (a pipe cannot be read again) and are not empty."""
    if not paths:
        raise ValueError("no input file given")
    for path in paths:
        if not Path(path).exists():
            raise ValueError(f"input file {path} does not exist")
        if not Path(path).is_file():
            raise ValueError(f"input {path} is not a regular file; it is read several times: no pipe or folder")
        if Path(path).stat().st_size == 0:
            raise ValueError(f"input file {path} is empty")


def read_first_line(path: str) -> bytes:
    """Reads the first line of a file, without its line ending; empty if the text is empty."""
    with RawText(path) as text:
        lines, _ = next(line_blocks(text, BLOCK_BYTES), (b"", 0))
    return leading_line(lines)


def survey(path: str, report: Report, *, header: bool, segment_lines: int, block_bytes: int = BLOCK_BYTES) -> RawFile:
    """Reads a file once to compute its checksum and find its segments.

    Args:
        path: a plain, gzip (one or several members), xz or zstd file, recognized by its first bytes.
        report: called with the number of bytes on disk just read.
        header: True if the first line is a header.
        segment_lines: largest size of a segment; one ends at every multiple of it.
        block_bytes: largest size of a line, and approximate largest size of a segment.

    Raises:
        ValueError: a truncated or damaged archive, a line longer than a block, or a file without samples.
    """
    segments: list[Segment] = []
    first, offset, samples, reported = b"", 0, 0, 0
    with RawText(path, checksum=True) as text:
        for lines, count in line_blocks(text, block_bytes):
            if offset == 0:
                first = leading_line(lines)
                offset = lines.find(b"\n") + 1 if header else len(lines) - len(lines.removeprefix(BYTE_ORDER_MARK))
                lines, count = lines[offset:], count - header
            for size, split_off in _split_lines(lines, count, samples, segment_lines):
                location = (offset, size, split_off, samples + 1 + header, samples)
                segments.append(Segment(path, text.stamp, text.plain, *location, file_bytes=0))
                offset, samples = offset + size, samples + split_off
            if segments:
                reported += _add_file_bytes(segments, text.disk_bytes - reported, report)
        if not segments:
            raise ValueError(f"input file {path} has no samples")
        _add_file_bytes(segments, text.disk_bytes - reported, report)  # what follows an archive's last line
        return RawFile(path, text.sha256, first, samples, tuple(segments))


def _add_file_bytes(segments: list[Segment], file_bytes: int, report: Report) -> int:
    """Adds bytes on disk to the last segment and reports them."""
    segments[-1] = replace(segments[-1], file_bytes=segments[-1].file_bytes + file_bytes)
    report(file_bytes)
    return file_bytes


def partitions(files: Sequence[RawFile], partition_lines: int) -> list[Partition]:
    """Groups the segments of all files in order into partitions of at most `partition_lines` lines."""
    starts = accumulate((file.samples for file in files), initial=0)
    segments = [
        replace(segment, first_sample=segment.first_sample + start)
        for file, start in zip(files, starts, strict=False)
        for segment in file.segments
    ]
    groups: list[list[Segment]] = []
    lines = 0
    for segment in segments:
        if not groups or lines + segment.lines > partition_lines:
            groups.append([])
            lines = 0
        groups[-1].append(segment)
        lines += segment.lines
    return [Partition(number, tuple(group)) for number, group in enumerate(groups)]


def blocks(segments: Iterable[Segment]) -> Generator[Block, None, None]:
    """Reads segments; a compressed file is decompressed again for every segment that is out of order.

    Raises:
        ValueError: a file is missing or has changed since the survey.
    """
    text: RawText | None = None
    try:
        for segment in segments:
            if text is None or text.path != segment.path or segment.offset < text.offset:
                if text is not None:
                    text.close()
                text = _open(segment)
            text.skip_to(segment.offset)
            data = text.read(segment.size)
            if len(data) < segment.size:
                raise ValueError(_changed_message(segment.path))
            data = data if data.endswith(b"\n") else data + b"\n"
            yield Block(segment.path, data, segment.first_line, segment.first_sample, segment.lines)
    finally:
        if text is not None:
            text.close()


def _open(segment: Segment) -> RawText:
    try:
        text = RawText(segment.path)
    except FileNotFoundError:
        raise ValueError(f"input file {segment.path} was deleted after the survey; restore it and run again") from None
    if text.stamp != segment.stamp:
        text.close()
        raise ValueError(_changed_message(segment.path))
    return text


def _changed_message(path: str) -> str:
    return f"{path} changed while it was being read; run again"


def _split_lines(lines: bytes, count: int, before: int, segment_lines: int) -> Iterator[tuple[int, int]]:
    """Splits `count` lines after `before` lines at multiples of `segment_lines`; yields the bytes and lines of each."""
    if not count:
        return
    stops = range(segment_lines - before % segment_lines, count, segment_lines)
    ends = np.flatnonzero(np.frombuffer(lines, np.uint8) == NEWLINE) + 1 if stops else np.empty(0)
    offsets = [0, *(int(ends[stop - 1]) for stop in stops), len(lines)]
    yield from zip(np.diff(offsets).tolist(), np.diff([0, *stops, count]).tolist(), strict=True)
