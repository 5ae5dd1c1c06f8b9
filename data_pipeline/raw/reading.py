"""Reading of raw files of any format: a survey finds their segments, which are then read in any order.

Only the wanted columns of Parquet and Arrow files are read, with bounded memory, by groups of rows: row groups of
Parquet files, record batches of Arrow files. `text` reads text.
"""

import re
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from cowrec.errors import UserError

from ..remote import is_remote
from .inputs import (
    Block,
    FileFormat,
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
from .tables import flattened
from .text import BLOCK_BYTES, RawText, look_at_text, survey_text

MAGIC: dict[bytes, FileFormat] = {b"PAR1": "parquet", b"ARROW1": "arrow"}
REFUSED = {
    rb"FEA1": "a file of Feather's first version; write it with pyarrow.feather.write_feather(version=2)",
    rb"\xff{4}": "an Arrow stream; write it as an Arrow file with pyarrow.ipc.new_file",
    rb"PARE": "an encrypted Parquet file; decrypt it first",
    rb"ORC": "an ORC file; convert it to Parquet",
    rb"Obj\x01": "an Avro file; convert it to Parquet",
    rb"SQLite format": "an SQLite database; export the table to Parquet or CSV",
    rb"7z\xbc\xaf\x27\x1c": "a 7z archive; extract it and give the folder",
    rb"Rar!": "a RAR archive; extract it and give the folder",
    rb"\x89HDF": "an HDF5 file; convert it to Parquet",
    rb"\x93NUMPY": "a NumPy array; write it as a Parquet file, a column for each field",
    rb"\xd0\xcf\x11\xe0": "an Excel workbook; save the sheet as CSV",
    rb"\x80[\x02-\x05]": "a pickle; write the table with pandas' to_parquet",
    # The length of a record, 8 bytes whose last four are zero, its checksum, and the first field of a message.
    rb".{4}\0{4}.{4}\n": "a TFRecord file; convert it to Parquet, a column for each feature",
}
"""Beginnings of files of other formats, as regular expressions."""
BINARY = re.compile(rb"[\x00\x02-\x08\x0e-\x1a\xff]")
"""Bytes that all these formats have at their beginning, and that text such as "PARENT_ID" lacks."""


def look(path: str) -> tuple[Source, pa.Schema | None]:
    """Reads the beginning of a file, text or, recognized by its first bytes, Parquet or Arrow IPC (Feather).

    Also returns the types of its columns, None for text. Raises ValueError if the file is damaged or of another format.
    """
    with open_file(path) as opened:
        first = opened.read(256)
    first = first if BINARY.search(first) else b""
    for beginning, what in REFUSED.items():
        if re.match(beginning, first, re.DOTALL):
            raise UserError(f"input file {path} is {what}. Text, Parquet and Arrow files are read")
    kind = next((kind for magic, kind in MAGIC.items() if first.startswith(magic)), None)
    if kind is None:
        return look_at_text(path), None
    found = stamp(path)
    with naming_file(path), closing(open_groups(path, kind)) as opened:
        schema = flattened(pa.Table.from_batches([], opened.schema_arrow)).schema
    return Source(path, kind, found, b"", tuple(schema.names), partition_of(path)), schema


def survey(
    source: Source, report: Report, *, header: bool, segment_samples: int, block_bytes: int = BLOCK_BYTES
) -> RawFile:
    """Finds the segments of a file; reads all text of a text file.

    A segment ends at every multiple of `segment_samples`. `block_bytes` is the largest size of a line, and
    approximately of a segment.

    Raises ValueError: a truncated or damaged file, a line longer than a block, or text without samples.
    """
    if source.is_lines:
        header = header and source.format == "text"
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
        return RawText(source.path, source) if source.is_lines else ColumnReader(source)
    except FileNotFoundError:
        raise UserError(f"input file {source.path} was deleted after the survey; restore it and run again") from None


MOST_ROWS = 1 << 16
"""Largest number of rows of a segment."""


def _survey_columns(source: Source, report: Report, *, segment_samples: int, block_bytes: int) -> RawFile:
    with naming_file(source.path), closing(open_groups(source.path, source.format)) as opened:
        starts, size = _group_starts(opened), row_bytes(opened, source.columns)
    if stamp(source.path) != source.stamp:
        raise UserError(changed_message(source.path))
    rows, file_bytes = int(starts[-1]), source.stamp[0]
    most = min(MOST_ROWS, max(1, int(block_bytes / max(size, 1.0))))
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
    """Reads the segments of a Parquet or Arrow file in order; `offset` is the first row that was not read yet.

    Raises ValueError if the file changed since the survey.
    """

    def __init__(self, source: Source) -> None:
        self.source, self.offset = source, 0
        if stamp(source.path) != source.stamp:
            raise UserError(changed_message(source.path))
        with naming_file(source.path):
            self._file = open_groups(source.path, source.format)
            self._starts = _group_starts(self._file)
        self._batches: Iterator[pa.RecordBatch] | None = None
        self._surplus: list[pa.RecordBatch] = []

    def read_segment(self, segment: Segment) -> pa.Table:
        """Returns the rows of a segment, the columns `source.columns`."""
        with naming_file(self.source.path, f", rows {segment.offset + 1} to {segment.offset + segment.size}"):
            if self._batches is None or segment.offset != self.offset:
                group = int(np.searchsorted(self._starts, segment.offset, side="right")) - 1
                self._batches = self._file.iter_batches(
                    segment.size, list(range(group, self._file.num_row_groups)), list(self.source.columns)
                )
                self._surplus, self.offset = [], int(self._starts[group])
                while self.offset < segment.offset:
                    self._take(min(segment.size, segment.offset - self.offset))
            return flattened(self._take(segment.size))

    def close(self) -> None:
        self._file.close(force=True)

    def _take(self, rows: int) -> pa.Table:
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


def open_groups(path: str, kind: FileFormat) -> "GroupedFile":
    """Opens a Parquet or Arrow file; read it within `naming_file`."""
    if kind == "arrow":
        return ArrowFile(open_file(path) if is_remote(path) else pa.memory_map(path))
    # Without a size of the buffer, all bytes of a row group would be read at once.
    return parquet_file(
        open_file(path), buffer_size=read_bytes(path), pre_buffer=False, page_checksum_verification=True
    )


def _group_starts(file: "GroupedFile") -> np.ndarray:
    """Returns the first row of each group, and the number of rows: int64 [groups + 1]."""
    return np.cumsum([0, *group_sizes(file)])


@contextmanager
def naming_file(path: str, where: str = "") -> Iterator[None]:
    """Turns errors of Arrow into ValueErrors that name the file."""
    try:
        yield
    except FileNotFoundError:
        raise
    except (pa.ArrowException, OSError) as error:
        raise UserError(
            f"{path}{where}: truncated or damaged, or written with a feature that pyarrow {pa.__version__} does not "
            f"support ({error}). Copy or write it again"
        ) from error


class ArrowFile:
    """Arrow IPC file (Feather version 2) with the part of ParquetFile's interface that is used here."""

    def __init__(self, source: Any) -> None:
        self._source, reader = source, pa.ipc.open_file(source)
        self.schema_arrow, self.num_row_groups = reader.schema, reader.num_record_batches

    def group_sizes(self) -> list[int]:
        reader = self._reader(())
        return [reader.get_batch(group).num_rows for group in range(self.num_row_groups)]

    def iter_batches(
        self, batch_size: int, row_groups: Sequence[int] | None = None, columns: Sequence[str] | None = None
    ) -> Iterator[pa.RecordBatch]:
        """Yields the record batches as they are, whatever ``batch_size``."""
        reader = self._reader(columns)
        return (reader.get_batch(group) for group in row_groups or range(self.num_row_groups))

    def read_row_group(self, group: int) -> pa.Table:
        return pa.Table.from_batches([*self.iter_batches(0, [group])])

    def close(self, force: bool = True) -> None:
        self._source.close()

    def _reader(self, columns: Sequence[str] | None) -> pa.RecordBatchFileReader:
        chosen = None
        if columns is not None:  # of a field in a struct, `user.id`, the struct is read
            tops = enumerate(self.schema_arrow.names)
            chosen = [index for index, top in tops if any(f"{name}.".startswith(f"{top}.") for name in columns)]
        return pa.ipc.open_file(self._source, options=pa.ipc.IpcReadOptions(included_fields=chosen))


GroupedFile: TypeAlias = pq.ParquetFile | ArrowFile


def parquet_file(source: Any, **options: Any) -> pq.ParquetFile:
    """Opens a Parquet file; INT96 times, as Spark writes them, are read as microseconds, which do not wrap in 2262."""
    return pq.ParquetFile(source, coerce_int96_timestamp_unit="us", **options)


_VALUE_BYTES = 8
"""Least size of a value in memory; on disk, dictionaries and runs make values smaller."""


def group_sizes(file: GroupedFile) -> list[int]:
    if isinstance(file, ArrowFile):
        return file.group_sizes()
    return [file.metadata.row_group(group).num_rows for group in range(file.num_row_groups)]


def row_bytes(file: GroupedFile, columns: Sequence[str]) -> float:
    """Estimates the size of a row in memory."""
    if isinstance(file, ArrowFile):
        # Unlike `nbytes` this does not follow offsets, which may be damaged.
        batches = (batch for batch in file.iter_batches(0, None, columns) if batch.num_rows)
        return next((batch.get_total_buffer_size() / batch.num_rows for batch in batches), 0.0)
    # The leaves of a nested column have the paths `column.list.element` and the like.
    leaves = [file.metadata.schema.column(leaf).path for leaf in range(file.metadata.num_columns)]
    wanted = [i for i, path in enumerate(leaves) if any(path == c or path.startswith(f"{c}.") for c in columns)]
    size = 0
    for group in range(file.num_row_groups):
        chunks = [file.metadata.row_group(group).column(leaf) for leaf in wanted]
        size += sum(max(chunk.total_uncompressed_size, _VALUE_BYTES * chunk.num_values) for chunk in chunks)
    return float(size / max(file.metadata.num_rows, 1))
