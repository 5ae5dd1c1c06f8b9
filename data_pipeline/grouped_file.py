"""Parquet and Arrow files by groups of rows: row groups of the one, record batches of the other."""

from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

import pyarrow as pa
import pyarrow.parquet as pq


class ArrowFile:
    """What is used here of pyarrow.parquet.ParquetFile's interface, for an Arrow IPC file (Feather version 2)."""

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
    """Opens a Parquet file; INT96 times, as Spark writes them, are microseconds: nanoseconds would wrap in 2262."""
    return pq.ParquetFile(source, coerce_int96_timestamp_unit="us", **options)


_VALUE_BYTES = 8
"""Least size of a value in memory; on disk, dictionaries and runs make values smaller."""


def group_sizes(file: GroupedFile) -> list[int]:
    """Returns the number of rows of each group."""
    if isinstance(file, ArrowFile):
        return file.group_sizes()
    return [file.metadata.row_group(group).num_rows for group in range(file.num_row_groups)]


def row_bytes(file: GroupedFile, columns: Sequence[str]) -> float:
    """Estimates the size of a row in memory."""
    if isinstance(file, ArrowFile):
        # Unlike `nbytes` this does not follow offsets, which may be damaged.
        batches = (each for each in file.iter_batches(0, None, columns) if each.num_rows)
        return next((each.get_total_buffer_size() / each.num_rows for each in batches), 0.0)
    # The leaves of a nested column have the paths `column.list.element` and the like.
    leaves = [file.metadata.schema.column(leaf).path for leaf in range(file.metadata.num_columns)]
    wanted = [i for i, path in enumerate(leaves) if any(path == c or path.startswith(f"{c}.") for c in columns)]
    size = 0
    for group in range(file.num_row_groups):
        chunks = [file.metadata.row_group(group).column(leaf) for leaf in wanted]
        size += sum(max(each.total_uncompressed_size, _VALUE_BYTES * each.num_values) for each in chunks)
    return float(size / max(file.metadata.num_rows, 1))
