"""Vocabularies: counting the ids of a stream, and looking ids up.

U distinct ids, R values looked up.
"""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from cowrec.data_pipeline.dataset.schema import MISSING, OUT_OF_VOCABULARY, RESERVED_ROWS
from cowrec.data_pipeline.hashing import string_buffers, string_hashes

from .string_order import string_order
from .string_table import StringTable

VALUE, COUNT = "value", "count"
LONG = pa.large_string()


class VocabularyCounter:
    """Counts strings that arrive in chunks; memory is proportional to the distinct ones."""

    def __init__(self) -> None:
        self._table = StringTable()
        self._counts = np.zeros(0, np.int64)

    def add(self, counted: pa.Table) -> None:
        """Adds what `counted_values` made of a chunk."""
        places = self._table.insert(one_array(counted[VALUE]))
        if len(self._table) > len(self._counts):
            self._counts = np.r_[self._counts, np.zeros(len(self._table), np.int64)]
        self._counts[places] += counted[COUNT].to_numpy()

    def finish(self, min_count: int) -> "Vocabulary":
        """The ids seen at least `min_count` times: the most frequent first, equally frequent ones by their bytes.

        Nothing is counted any more afterwards, since the other fields need the memory.
        """
        values, counts = self._table.strings(), self._counts[: len(self._table)]
        self._table, self._counts = StringTable(), np.zeros(0, np.int64)
        kept = np.flatnonzero(counts >= min_count)
        if len(kept) < len(counts):
            values, counts = values.take(pa.array(kept)), counts[kept]
        order = string_order(values, -counts)
        return Vocabulary(values.take(pa.array(order)), counts[order])


def counted_values(text: pa.Array | pa.ChunkedArray) -> pa.Table:
    """Distinct non-empty strings of a chunk of the stream and how often each occurs: columns value, count."""
    counted = pc.value_counts(text)
    table = pa.table({VALUE: counted.field(0).cast(LONG), COUNT: counted.field(1)})
    return table.filter(pc.not_equal(table[VALUE], ""))


class Vocabulary:
    """The ids of a field that have a row of their own: the id at place p has row 2 + p.

    Args:
        values: distinct strings without nulls, [U].
        counts: how often each was seen, int64 [U].
    """

    def __init__(self, values: pa.Array, counts: np.ndarray) -> None:
        self._table = StringTable()
        self._table.insert(values)
        self.counts = counts

    def __len__(self) -> int:
        return len(self._table)

    def rows(self, text: pa.Array) -> np.ndarray:
        """Embedding rows of strings: int32 [R]. Empty ones are missing, unknown ones out of the vocabulary."""
        return _with_missing(self.rows_of_hashed(string_hashes(text), *string_buffers(text)), text)

    def rows_of_hashed(self, hashes: np.ndarray, offsets: np.ndarray, data: np.ndarray) -> np.ndarray:
        """`rows` of strings as `string_buffers` gives them, none of them empty, whose hashes are known: uint64 [R]."""
        places = self._table.find_hashed(hashes, offsets, data)
        return np.where(places < 0, OUT_OF_VOCABULARY, places + RESERVED_ROWS).astype(np.int32)

    def save(self, path: Path) -> None:
        table = pa.table({VALUE: self._table.strings(), COUNT: pa.array(self.counts)})
        pq.write_table(table, path, compression="zstd", use_dictionary=False)

    @staticmethod
    def load(path: Path) -> "Vocabulary":
        """Raises ValueError where the file is missing or damaged."""
        try:
            table = pq.read_table(path, columns=[VALUE, COUNT])
            return Vocabulary(one_array(table[VALUE]), table[COUNT].to_numpy())
        except (OSError, KeyError, pa.ArrowException) as error:
            raise ValueError(f"vocabulary file {path} is missing or damaged ({error}); prepare again") from error


def hashed_rows(text: pa.Array, buckets: int) -> np.ndarray:
    """Embedding rows without a vocabulary, int32 [R]; empty strings are missing."""
    return _with_missing(bucket_rows(string_hashes(text), buckets), text)


def bucket_rows(hashes: np.ndarray, buckets: int) -> np.ndarray:
    """2 + hash % buckets: int32 [R] from uint64 [R]."""
    return (hashes % np.uint64(buckets)).astype(np.int32) + np.int32(RESERVED_ROWS)


def raw_ids(text: pa.Array) -> np.ndarray:
    """Raw ids: the bits of `string_hashes` as int64 [R]; empty strings are missing.

    0 and 1 are rows, never ids, so a hash of 0 or 1 becomes 2 or 3.
    """
    ids = string_hashes(text).view(np.int64)
    ids[(ids == OUT_OF_VOCABULARY) | (ids == MISSING)] += RESERVED_ROWS
    return _with_missing(ids, text)


def _with_missing(rows: np.ndarray, text: pa.Array) -> np.ndarray:
    offsets, _ = string_buffers(text)
    rows[offsets[1:] == offsets[:-1]] = MISSING
    return rows


def one_array(column: pa.ChunkedArray) -> pa.Array:
    """A column's strings in one piece; wide, because all strings of a field together may exceed 2 GB."""
    whole = column.cast(LONG).combine_chunks()
    return pa.concat_arrays(whole.chunks) if isinstance(whole, pa.ChunkedArray) else whole
