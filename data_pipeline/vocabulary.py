"""Vocabularies: counting the ids of a stream, and looking ids up.

U distinct ids, R values looked up.
"""

from pathlib import Path

import numba
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from .hashing import string_buffers, string_hashes
from .schema import MISSING, OUT_OF_VOCABULARY, RESERVED_ROWS

VALUE, COUNT = "value", "count"
LONG = pa.large_string()
SMALLEST_MERGE = 1 << 16


class VocabularyCounter:
    """Counts strings that arrive in chunks; memory is proportional to the distinct ones.

    Chunks wait until they outnumber what is merged already and are then merged all at once, so that each merge at least
    doubles its reach and a string takes part in two merges on average.
    """

    def __init__(self) -> None:
        self._merged: list[pa.Table] = []
        self._waiting: list[pa.Table] = []

    def add(self, counted: pa.Table) -> None:
        """Adds what `counted_values` made of a chunk."""
        self._waiting.append(counted)
        waiting = sum(table.num_rows for table in self._waiting)
        if waiting > max(SMALLEST_MERGE, sum(table.num_rows for table in self._merged)):
            self._merge()

    def _merge(self) -> None:
        tables = [*self._merged, *self._waiting]
        # One thread: the order of the groups is then fixed, and the pool is left to the parsers.
        summed = pa.concat_tables(tables).group_by(VALUE, use_threads=False).aggregate([(COUNT, "sum")])
        self._merged = [pa.table({VALUE: summed[VALUE], COUNT: summed[f"{COUNT}_sum"]})]
        self._waiting = []

    def finish(self, min_count: int) -> "Vocabulary":
        """The ids seen at least `min_count` times: the most frequent first, equally frequent ones by their bytes."""
        self._waiting.append(counted_values(pa.array([], pa.string())))
        self._merge()
        counts, self._merged = self._merged[0], []
        counts = counts.filter(pc.greater_equal(counts[COUNT], min_count))
        order = pc.sort_indices(counts, [(COUNT, "descending"), (VALUE, "ascending")])
        return Vocabulary(counts.take(order))


def counted_values(text: pa.Array | pa.ChunkedArray) -> pa.Table:
    """Distinct non-empty strings of a chunk of the stream and how often each occurs: columns value, count."""
    counted = pc.value_counts(text)
    table = pa.table({VALUE: counted.field(0).cast(LONG), COUNT: counted.field(1)})
    return table.filter(pc.not_equal(table[VALUE], ""))


class Vocabulary:
    """The ids of a field that have a row of their own: the id at place p has row 2 + p.

    Args:
        table: columns value (large_string, distinct, without nulls) and count (int64), [U].
    """

    def __init__(self, table: pa.Table) -> None:
        self.values = table[VALUE].combine_chunks()
        self.counts = table[COUNT].to_numpy()
        hashes = string_hashes(self.values)
        slots = 1 << max(3, (2 * len(hashes)).bit_length())
        self._slots = _fill(hashes, np.full(slots, -1, np.int32))

    def __len__(self) -> int:
        return len(self.values)

    def rows(self, text: pa.Array) -> np.ndarray:
        """Embedding rows of strings: int32 [R]. Empty ones are missing, unknown ones out of the vocabulary."""
        offsets, data = string_buffers(text)
        return _look_up(string_hashes(text), offsets, data, self._slots, *string_buffers(self.values))

    def save(self, path: Path) -> None:
        table = pa.table({VALUE: self.values, COUNT: pa.array(self.counts)})
        pq.write_table(table, path, compression="zstd", use_dictionary=False)

    @staticmethod
    def load(path: Path) -> "Vocabulary":
        """Raises ValueError where the file is missing or damaged."""
        try:
            table = pq.read_table(path, columns=[VALUE, COUNT])
            return Vocabulary(table.set_column(0, VALUE, table[VALUE].cast(LONG)))
        except (OSError, KeyError, pa.ArrowException) as error:
            raise ValueError(f"vocabulary file {path} is missing or damaged ({error}); prepare again") from error


def hashed_rows(text: pa.Array, buckets: int) -> np.ndarray:
    """Embedding rows without a vocabulary: 2 + hash % buckets, int32 [R]; empty strings are missing."""
    rows = (string_hashes(text) % np.uint64(buckets)).astype(np.int32) + np.int32(RESERVED_ROWS)
    offsets, _ = string_buffers(text)
    rows[offsets[1:] == offsets[:-1]] = MISSING
    return rows


@numba.njit(nogil=True, cache=True)
def _fill(hashes: np.ndarray, slots: np.ndarray) -> np.ndarray:
    """Open addressing, linear probing: each id's place in the first free slot from its hash on."""
    mask = np.uint64(len(slots) - 1)
    for place in range(len(hashes)):
        slot = hashes[place] & mask
        while slots[slot] >= 0:
            slot = (slot + np.uint64(1)) & mask
        slots[slot] = place
    return slots


@numba.njit(nogil=True, cache=True)
def _look_up(
    hashes: np.ndarray,
    offsets: np.ndarray,
    data: np.ndarray,
    slots: np.ndarray,
    known_offsets: np.ndarray,
    known_data: np.ndarray,
) -> np.ndarray:
    """Compares the strings themselves, so two ids never share a row, not even with equal hashes."""
    mask = np.uint64(len(slots) - 1)
    rows = np.empty(len(hashes), np.int32)
    for i in range(len(hashes)):
        start = offsets[i]
        size = offsets[i + 1] - start
        rows[i] = MISSING if size == 0 else OUT_OF_VOCABULARY
        slot = hashes[i] & mask
        while size > 0 and slots[slot] >= 0:
            known = known_offsets[slots[slot]]
            if known_offsets[slots[slot] + 1] - known == size:
                k = 0
                while k < size and data[start + k] == known_data[known + k]:
                    k += 1
                if k == size:
                    rows[i] = RESERVED_ROWS + slots[slot]
                    break
            slot = (slot + np.uint64(1)) & mask
    return rows
