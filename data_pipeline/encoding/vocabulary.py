"""Vocabularies and hashes that turn ids into embedding rows.

U distinct ids, R ids looked up.
"""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from cowrec.data_pipeline.dataset.schema import MISSING, OUT_OF_VOCABULARY, RESERVED_ROWS
from cowrec.data_pipeline.hashing import string_buffers, string_hashes

from .strings import StringTable, string_order

VALUE, COUNT = "value", "count"
LONG = pa.large_string()


class VocabularyCounter:
    """Counts strings in chunks; memory is proportional to the number of distinct ones."""

    def __init__(self) -> None:
        self._table = StringTable()
        self._counts = np.zeros(0, np.int64)

    def add(self, counted: pa.Table) -> None:
        """Adds the result of `counted_values` for a chunk."""
        indices = self._table.insert(one_array(counted[VALUE]))
        if len(self._table) > len(self._counts):
            self._counts = np.r_[self._counts, np.zeros(len(self._table), np.int64)]
        self._counts[indices] += counted[COUNT].to_numpy()

    def finish(self, min_count: int, max_ids: int = 0) -> "Vocabulary":
        """Builds the vocabulary of ids seen at least `min_count` times, by decreasing count, then by their bytes.

        Keeps the first `max_ids` of them if that is above 0. Releases the counts: other fields need the memory.
        """
        values, counts = self._table.strings(), self._counts[: len(self._table)]
        self._table, self._counts = StringTable(), np.zeros(0, np.int64)
        kept = np.flatnonzero(counts >= min_count)
        if len(kept) < len(counts):
            values, counts = values.take(pa.array(kept)), counts[kept]
        order = string_order(values, -counts)[: max_ids or None]
        return Vocabulary(values.take(pa.array(order)), counts[order])


def counted_values(text: pa.Array | pa.ChunkedArray) -> pa.Table:
    """Counts the distinct non-empty strings of a chunk: a table with the columns value and count."""
    counted = pc.value_counts(text)
    table = pa.table({VALUE: counted.field(0).cast(LONG), COUNT: counted.field(1)})
    return table.filter(pc.not_equal(table[VALUE], ""))


class Vocabulary:
    """The ids of a field that have their own embedding row: the id at index i has row 2 + i.

    Args:
        values: distinct strings without nulls, [U].
        counts: occurrences of each, int64 [U].
    """

    def __init__(self, values: pa.Array, counts: np.ndarray) -> None:
        self._table = StringTable()
        self._table.insert(values)
        self.counts = counts

    def __len__(self) -> int:
        return len(self._table)

    def rows(self, text: pa.Array) -> np.ndarray:
        """Looks up embedding rows of strings, int32 [R]; empty strings are missing, unknown ones out of vocabulary."""
        return _with_missing(self.rows_of_hashed(string_hashes(text), *string_buffers(text)), text)

    def rows_of_hashed(self, hashes: np.ndarray, offsets: np.ndarray, data: np.ndarray) -> np.ndarray:
        """Does the same as `rows`, for non-empty strings as `string_buffers` gives them, with known hashes [R]."""
        indices = self._table.find_hashed(hashes, offsets, data)
        return np.where(indices < 0, OUT_OF_VOCABULARY, indices + RESERVED_ROWS).astype(np.int32)

    def save(self, path: Path) -> None:
        """Writes a Parquet file with the columns value and count."""
        table = pa.table({VALUE: self._table.strings(), COUNT: pa.array(self.counts)})
        pq.write_table(table, path, compression="zstd", use_dictionary=False)

    @staticmethod
    def load(path: Path) -> "Vocabulary":
        """Reads a file written by `save`. Raises ValueError if it is missing or damaged."""
        try:
            table = pq.read_table(path, columns=[VALUE, COUNT])
            return Vocabulary(one_array(table[VALUE]), table[COUNT].to_numpy())
        except (OSError, KeyError, pa.ArrowException) as error:
            raise ValueError(f"vocabulary file {path} is missing or damaged ({error}); prepare again") from error


def hashed_rows(text: pa.Array, buckets: int) -> np.ndarray:
    """Returns embedding rows of strings without a vocabulary, int32 [R]: `MISSING` for empty ones."""
    return _with_missing(hash_bucket_rows(string_hashes(text), buckets), text)


def hash_bucket_rows(hashes: np.ndarray, buckets: int) -> np.ndarray:
    """Returns 2 + hash % buckets: int32 [R] from uint64 [R]."""
    return (hashes % np.uint64(buckets)).astype(np.int32) + np.int32(RESERVED_ROWS)


def raw_ids(text: pa.Array) -> np.ndarray:
    """Returns raw ids, the bits of `string_hashes` as int64 [R]: `MISSING` for empty strings.

    0 and 1 are reserved rows, never ids, so a hash of 0 or 1 becomes 2 or 3.
    """
    return _with_missing(raw_ids_of_hashed(string_hashes(text)), text)


def raw_ids_of_hashed(hashes: np.ndarray) -> np.ndarray:
    """Does the same as `raw_ids`, for non-empty strings with known hashes, uint64 [R], which it may change."""
    ids = hashes.view(np.int64)
    ids[(ids == OUT_OF_VOCABULARY) | (ids == MISSING)] += RESERVED_ROWS
    return ids


def _with_missing(rows: np.ndarray, text: pa.Array) -> np.ndarray:
    offsets, _ = string_buffers(text)
    rows[offsets[1:] == offsets[:-1]] = MISSING
    return rows


def one_array(column: pa.ChunkedArray) -> pa.Array:
    """Combines a column of strings to one array: large_string, since the strings of a field may exceed 2 GB."""
    combined = column.cast(LONG).combine_chunks()
    return pa.concat_arrays(combined.chunks) if isinstance(combined, pa.ChunkedArray) else combined
