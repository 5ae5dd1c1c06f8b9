"""Text files in segments of complete lines."""

import re
from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from .inputs import InputFile
from .segments import RawFile, Report, Segment, Source, changed_message
from .text import BLOCK_BYTES, BYTE_ORDER_MARK, RawText, leading_line, line_blocks

NEWLINE = 10


def look_at_text(file: InputFile) -> Source:
    """Reads the first line of a text file; it is empty if the text is."""
    with RawText(file.path) as text:
        lines = next(line_blocks(text, BLOCK_BYTES), b"")
        return Source(file.path, "text", text.stamp, leading_line(lines), partition=file.partition)


def survey_text(source: Source, report: Report, *, header: bool, segment_samples: int, block_bytes: int) -> RawFile:
    """Reads a text file once to compute its checksum and find its segments; see `reading.survey`.

    Lines that repeat the header, as in the concatenation of several files, belong to no segment; neither do empty lines
    at the end.
    """
    segments: list[Segment] = []
    offset, place, samples, reported = 0, 1, 0, 0
    with RawText(source.path, checksum=True) as text:
        for lines in line_blocks(text, block_bytes):
            if not offset:
                offset = (lines.find(b"\n") + 1 or len(lines)) if header else _mark_bytes(lines)
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
        if text.stamp != source.stamp:
            raise ValueError(changed_message(source.path))
        if not segments:
            raise ValueError(f"input file {source.path} has no samples; copy it again, or remove it")
        _add_file_bytes(segments, text.disk_bytes - reported, report)  # what follows an archive's last line
        return RawFile(source, text.sha256, samples, tuple(segments))


class TextReader:
    """Reads the segments of a text file in their order. Raises ValueError if it changed since the survey."""

    def __init__(self, source: Source) -> None:
        self.source, self._text = source, RawText(source.path)
        if self._text.stamp != source.stamp:
            self.close()
            raise ValueError(changed_message(source.path))

    @property
    def offset(self) -> int:
        """First byte of the text that was not read yet."""
        return self._text.offset

    def read(self, segment: Segment) -> bytes:
        """Returns the lines of a segment, each with a newline."""
        self._text.skip_to(segment.offset)
        data = self._text.read(segment.size)
        if len(data) < segment.size:
            raise ValueError(changed_message(self.source.path))
        return data if data.endswith(b"\n") else data + b"\n"

    def close(self) -> None:
        self._text.close()


def _mark_bytes(lines: bytes) -> int:
    return len(lines) - len(lines.removeprefix(BYTE_ORDER_MARK))


def _add_file_bytes(segments: list[Segment], file_bytes: int, report: Report) -> int:
    """Adds bytes on disk to the last segment and reports them."""
    segments[-1] = replace(segments[-1], file_bytes=segments[-1].file_bytes + file_bytes)
    report(file_bytes)
    return file_bytes


def _without_headers(lines: bytes, header: bytes) -> Iterator[tuple[bytes, bool]]:
    """Yields the lines before and after each repetition of the header, and the repetition itself with True."""
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
    """Splits lines after `before` others at multiples of `segment_samples`; yields the bytes and lines of each part."""
    count = lines.count(b"\n") + (not lines.endswith(b"\n"))
    stops = range(segment_samples - before % segment_samples, count, segment_samples)
    ends = np.flatnonzero(np.frombuffer(lines, np.uint8) == NEWLINE) + 1 if stops else np.empty(0)
    offsets = [0, *(int(ends[stop - 1]) for stop in stops), len(lines)]
    yield from zip(np.diff(offsets).tolist(), np.diff([0, *stops, count]).tolist(), strict=True)
