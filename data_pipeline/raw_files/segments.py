"""Segments of raw files: consecutive samples that can be read on their own, and their division into partitions."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Literal

import pyarrow as pa

FileFormat = Literal["text", "parquet", "arrow"]
Report = Callable[[int], None]
"""Called with the number of bytes on disk just processed."""


@dataclass(frozen=True)
class Source:
    """What reading a raw file takes, in any process.

    Attributes:
        path: the file, as given.
        format: recognized by the content.
        stamp: size and modification time of the file at the survey.
        first_line: of text: the first line, without its ending.
        columns: of Parquet and Arrow files: those that are read, all of them at first.
        partition: values of columns that the path gives, see `InputFile`.
    """

    path: str
    format: FileFormat
    stamp: tuple[int, int]
    first_line: bytes = b""
    columns: tuple[str, ...] = ()
    partition: tuple[tuple[str, str | None], ...] = ()

    @property
    def place(self) -> str:
        """What a sample's number in the file is called."""
        return "line" if self.format == "text" else "row"


@dataclass(frozen=True)
class Segment:
    """Consecutive samples of one file, about 16 MB at most; headers belong to no segment.

    Attributes:
        source: the file.
        direct: True if the segment can be read without most of the file before it.
        offset: first byte in the text, after decompression; of Parquet and Arrow files, the first row, from 0.
        size: bytes of text, or rows.
        samples: number of lines or rows.
        first_place: number of the first line or row in the file, from 1.
        first_sample: number of the first sample over all files, from 0; bad rows count, headers do not.
        file_bytes: bytes on disk; those of a file's segments add up to its size.
    """

    source: Source
    direct: bool
    offset: int
    size: int
    samples: int
    first_place: int
    first_sample: int
    file_bytes: int


@dataclass(frozen=True)
class Block:
    """The samples of a segment: text in which each line ends with a newline, or a table. Other attributes as there."""

    source: Source
    data: bytes | pa.Table
    first_place: int
    first_sample: int
    samples: int


@dataclass(frozen=True)
class RawFile:
    """The result of a survey: the file's checksum, samples and segments."""

    source: Source
    sha256: str
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

    @property
    def samples(self) -> int:
        """Samples of all segments, bad rows included."""
        return sum(segment.samples for segment in self.segments)


Survey = Callable[[Source, Report], RawFile]
"""Surveys a file, see `reading.survey`."""


def partitions(files: Sequence[RawFile], partition_samples: int) -> list[Partition]:
    """Groups the segments of all files in order into partitions of at most `partition_samples` samples."""
    starts = accumulate((file.samples for file in files), initial=0)
    segments = [
        replace(segment, first_sample=segment.first_sample + start)
        for file, start in zip(files, starts, strict=False)
        for segment in file.segments
    ]
    groups: list[list[Segment]] = []
    samples = 0
    for segment in segments:
        if not groups or samples + segment.samples > partition_samples:
            groups.append([])
            samples = 0
        groups[-1].append(segment)
        samples += segment.samples
    return [Partition(number, tuple(group)) for number, group in enumerate(groups)]


def changed_message(path: str) -> str:
    """The message for a file that is not as it was at the survey."""
    return f"{path} changed while it was being read; run again"
