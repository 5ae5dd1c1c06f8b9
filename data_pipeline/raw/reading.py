"""Reading of raw files of any format: a survey finds their segments, which are then read in any order.

Text is in `text`. Of Parquet files only the wanted columns are read, with bounded memory."""

from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from .inputs import (
    Block,
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
from .text import BLOCK_BYTES, RawText, look_at_text, survey_text

PARQUET = b"PAR1"
REFUSED = {
    b"ARROW1": "an Arrow file; write it as Parquet",
    b"FEA1": "a Feather file; write it as Parquet",
    b"\xff\xff\xff\xff": "an Arrow stream; write it as Parquet",
    b"PARE": "an encrypted Parquet file; decrypt it first",
    b"ORC": "an ORC file; convert it to Parquet",
    b"Obj\x01": "an Avro file; convert it to Parquet",
    b"SQLite format": "an SQLite database; export the table to Parquet or CSV",
    b"\x89HDF": "an HDF5 file; convert it to Parquet",
}


def look(path: str) -> tuple[Source, pa.Schema | None]:
    """Reads the beginning of a file, text or, recognized by its first bytes, Parquet.

    Returns:
        What reading it takes; and the types of its columns, None for text.

    Raises:
        ValueError: a truncated or damaged file, or one of another format.
    """
    with open_file(path) as opened:
        first = opened.read(16)
    for magic, what in REFUSED.items():
        if first.startswith(magic):
            raise ValueError(f"input file {path} is {what}. Text and Parquet files are read")
    if not first.startswith(PARQUET):
        return look_at_text(path), None
    found = stamp(path)
    with _errors(path), closing(_open(path)) as opened:
        schema = opened.schema_arrow
    return Source(path, "parquet", found, b"", tuple(schema.names), partition_of(path)), schema


def survey(
    source: Source, report: Report, *, header: bool, segment_samples: int, block_bytes: int = BLOCK_BYTES
) -> RawFile:
    """Finds the segments of a file; reads all of it if it is text.

    Args:
        report: called with the number of bytes on disk just processed.
        header: True if the first line of text is a header.
        segment_samples: largest number of samples of a segment; one ends at every multiple of it.
        block_bytes: largest size of a line, and approximate largest size of a segment.

    Raises:
        ValueError: a truncated or damaged file, a line longer than a block, or text without samples.
    """
    if source.format == "text":
        return survey_text(source, report, header=header, segment_samples=segment_samples, block_bytes=block_bytes)
    return _survey_columns(source, report, segment_samples=segment_samples, block_bytes=block_bytes)


def blocks(segments: Iterable[Segment]) -> Generator[Block, None, None]:
    """Reads segments; a compressed file is decompressed again for every segment that is out of order.

    Raises ValueError if a file is missing or has changed since the survey.
    """
    reader: RawText | ColumnReader | None = None
    try:
        for segment in segments:
            if reader is None or reader.source != segment.source or segment.offset < reader.offset:
                if reader is not None:
                    reader.close()
                reader = _reader(segment.source)
            data = reader.read_segment(segment)
            yield Block(segment.source, data, segment.first_place, segment.first_sample, segment.samples)
    finally:
        if reader is not None:
            reader.close()


def _reader(source: Source) -> "RawText | ColumnReader":
    try:
        return RawText(source.path, source) if source.format == "text" else ColumnReader(source)
    except FileNotFoundError:
        raise ValueError(f"input file {source.path} was deleted after the survey; restore it and run again") from None


VALUE_BYTES = 8
"""Least size of a value in memory; on disk, dictionaries and runs make values smaller."""
MOST_ROWS = 1 << 16
"""Largest number of rows of a segment."""


def _survey_columns(source: Source, report: Report, *, segment_samples: int, block_bytes: int) -> RawFile:
    """Divides the rows of a file into segments; see `survey`."""
    with _errors(source.path), closing(_open(source.path)) as opened:
        starts, row_bytes = _group_starts(opened), _row_bytes(opened, source.columns)
    if stamp(source.path) != source.stamp:
        raise ValueError(changed_message(source.path))
    rows, file_bytes = int(starts[-1]), source.stamp[0]
    most = min(MOST_ROWS, max(1, int(block_bytes / max(row_bytes, 1.0))))
    segments, start = [], 0
    while start < rows:
        stop = min(start + most, rows, (start // segment_samples + 1) * segment_samples)
        skipped = start - int(starts[np.searchsorted(starts, start, side="right") - 1])
        share = file_bytes * stop // rows - file_bytes * start // rows
        segments.append(
            Segment(source, skipped <= segment_samples, start, stop - start, stop - start, start + 1, start, share)
        )
        start = stop
    report(file_bytes)
    return RawFile(source, rows, tuple(segments))


class ColumnReader:
    """Reads the segments of a Parquet file in their order; `offset` is the first row that was not read yet.

    Raises ValueError if the file changed since the survey.
    """

    def __init__(self, source: Source) -> None:
        self.source, self.offset = source, 0
        if stamp(source.path) != source.stamp:
            raise ValueError(changed_message(source.path))
        with _errors(source.path):
            self._file = _open(source.path)
            self._starts = _group_starts(self._file)
        self._batches: Iterator[pa.RecordBatch] | None = None
        self._surplus: list[pa.RecordBatch] = []

    def read_segment(self, segment: Segment) -> pa.Table:
        """Returns the rows of a segment, the columns `source.columns`."""
        with _errors(self.source.path, f", rows {segment.offset + 1} to {segment.offset + segment.size}"):
            if self._batches is None or segment.offset != self.offset:
                group = int(np.searchsorted(self._starts, segment.offset, side="right")) - 1
                self._batches = self._file.iter_batches(
                    segment.size, list(range(group, self._file.num_row_groups)), list(self.source.columns)
                )
                self._surplus, self.offset = [], int(self._starts[group])
                while self.offset < segment.offset:
                    self._take(min(segment.size, segment.offset - self.offset))
            return self._take(segment.size)

    def close(self) -> None:
        self._file.close(force=True)

    def _take(self, rows: int) -> pa.Table:
        """Returns the next rows."""
        assert self._batches is not None
        found, self._surplus = self._surplus, []
        count = sum(batch.num_rows for batch in found)
        while count < rows:
            batch = next(self._batches, None)
            if batch is None:
                raise pa.ArrowInvalid("there are fewer rows than its footer says")
            found.append(batch)
            count += batch.num_rows
        if count > rows:
            last = found[-1]
            kept = last.num_rows - (count - rows)
            found[-1], self._surplus = last.slice(0, kept), [last.slice(kept)]
        self.offset += rows
        return pa.Table.from_batches(found)


def _open(path: str) -> pq.ParquetFile:
    # Without a size of the buffer, all bytes of a row group would be read at once.
    return pq.ParquetFile(
        open_file(path), buffer_size=read_bytes(path), pre_buffer=False, page_checksum_verification=True
    )


def _group_starts(file: pq.ParquetFile) -> np.ndarray:
    """Returns the first row of each row group, and the number of rows: int64 [groups + 1]."""
    return np.cumsum([0, *(file.metadata.row_group(group).num_rows for group in range(file.num_row_groups))])


def _row_bytes(file: pq.ParquetFile, columns: Sequence[str]) -> float:
    """Estimates the size of a row in memory."""
    # The leaves of a nested column have the paths `column.list.element` and the like.
    leaves = [file.metadata.schema.column(leaf).path for leaf in range(file.metadata.num_columns)]
    wanted = [i for i, path in enumerate(leaves) if any(path == c or path.startswith(f"{c}.") for c in columns)]
    size = 0
    for group in range(file.num_row_groups):
        chunks = [file.metadata.row_group(group).column(leaf) for leaf in wanted]
        size += sum(max(each.total_uncompressed_size, VALUE_BYTES * each.num_values) for each in chunks)
    return size / max(file.metadata.num_rows, 1)


@contextmanager
def _errors(path: str, where: str = "") -> Iterator[None]:
    """Turns errors of Arrow into ValueErrors that name the file."""
    try:
        yield
    except FileNotFoundError:
        raise
    except (pa.ArrowException, OSError) as error:
        raise ValueError(
            f"{path}{where}: truncated or damaged, or written with a feature that pyarrow {pa.__version__} does not "
            f"support ({error}). Copy or write it again"
        ) from error
