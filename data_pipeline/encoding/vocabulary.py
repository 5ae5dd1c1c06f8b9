"""Vocabularies: the U ids of a field that have their own embedding row, and compiled tables of strings. R ids."""

from pathlib import Path

import numba
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from cowrec.errors import UserError

from ..dataset.schema import MISSING, OUT_OF_VOCABULARY, RESERVED_ROWS
from ..hashing import bytes_hashes, string_buffers, string_hashes

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
        """Returns the vocabulary of ids seen at least `min_count` times, by decreasing count, then by their bytes.

        It has the first `max_ids`, if that is above 0. The counts are released, since other fields need the memory.
        """
        values, counts = self._table.strings(), self._counts[: len(self._table)]
        self._table, self._counts = StringTable(), np.zeros(0, np.int64)
        kept = np.flatnonzero(counts >= min_count)
        if len(kept) < len(counts):
            values, counts = values.take(pa.array(kept)), counts[kept]
        keys = [(name, "ascending") for name in ("least", VALUE)]
        order = pc.sort_indices(pa.table({"least": -counts, VALUE: values}), keys)[: max_ids or None]
        return Vocabulary(values.take(order), counts[order.to_numpy()])


def counted_values(text: pa.Array | pa.ChunkedArray) -> pa.Table:
    """Counts the distinct non-empty strings of a chunk: a table with the columns value and count."""
    counted = pc.value_counts(text)
    table = pa.table({VALUE: counted.field(0).cast(LONG), COUNT: counted.field(1)})
    return table.filter(pc.not_equal(table[VALUE], ""))


TRUE, FALSE = ("true", "True", "TRUE", "1", "1.0", "t"), ("false", "False", "FALSE", "0", "0.0", "f")
"""Texts of truth values, each at the place of its contrary: of JSON and Arrow, of pandas, and of other programs."""


class Vocabulary:
    """The ids of a field that have their own embedding row: the id at index i has row 2 + i.

    If the ids are the two truth values, all texts of `TRUE` are one id, and so are those of `FALSE`: JSON and Parquet
    have `true` where pandas wrote `True` to CSV. `values` are distinct strings [U], `counts` their occurrences, int64.
    """

    def __init__(self, values: pa.Array, counts: np.ndarray) -> None:
        self._table = StringTable()
        self._table.insert(values)
        self.counts = counts
        self._truths: tuple[StringTable, np.ndarray] | None = None
        ids = values.to_pylist() if len(values) == 2 else []
        for one, other in zip(TRUE, FALSE, strict=True):
            if sorted(ids) == sorted((one, other)):
                known = StringTable()
                known.insert(pa.array([*TRUE, *FALSE]))
                of_true = ids.index(one)
                self._truths = known, np.repeat([of_true, 1 - of_true, -1], [len(TRUE), len(FALSE), 1])

    def __len__(self) -> int:
        return len(self._table)

    @property
    def values(self) -> pa.Array:
        """The ids, large strings [U]."""
        return self._table.strings()

    def rows(self, text: pa.Array) -> np.ndarray:
        """Looks up embedding rows of strings, int32 [R]; empty strings are missing, unknown ones out of vocabulary."""
        return self.rows_of_hashed(string_hashes(text), *string_buffers(text))

    def rows_of_hashed(self, hashes: np.ndarray, offsets: np.ndarray, data: np.ndarray) -> np.ndarray:
        """Looks up strings as `string_buffers` gives them, with their hashes, as `rows` does."""
        indices = self._table.find(hashes, offsets, data)
        if self._truths:
            texts, index_of_text = self._truths  # its last entry is that of all other texts
            indices = index_of_text[texts.find(hashes, offsets, data)]
        return _rows(indices, offsets)

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
            raise UserError(f"vocabulary file {path} is missing or damaged ({error}); prepare again") from error


def raw_ids(text: pa.Array) -> np.ndarray:
    """Returns raw ids, the bits of `string_hashes` as int64 [R]: `MISSING` for empty strings.

    0 and 1 are reserved rows, never ids, so a hash of 0 or 1 becomes 2 or 3.
    """
    return raw_ids_of_hashed(string_hashes(text), string_buffers(text)[0])


@numba.njit(nogil=True, cache=True)
def raw_ids_of_hashed(hashes: np.ndarray, offsets: np.ndarray) -> np.ndarray:
    """Returns raw ids of strings by their hashes, as `raw_ids` does; compiled, as numpy's calls cost more for few."""
    ids = np.empty(len(hashes), np.int64)
    for i in range(len(hashes)):
        id_ = np.int64(hashes[i])
        reserved = id_ in (OUT_OF_VOCABULARY, MISSING)
        ids[i] = MISSING if offsets[i + 1] == offsets[i] else id_ + RESERVED_ROWS if reserved else id_
    return ids


@numba.njit(nogil=True, cache=True)
def hashed_rows(hashes: np.ndarray, offsets: np.ndarray, buckets: int) -> np.ndarray:
    """Returns the rows of strings in a table of hash buckets, int32 [R]; empty strings are missing."""
    rows = np.empty(len(hashes), np.int32)
    for i in range(len(hashes)):
        bucket = np.int64(hashes[i] % np.uint64(buckets))
        rows[i] = MISSING if offsets[i + 1] == offsets[i] else bucket + RESERVED_ROWS
    return rows


@numba.njit(nogil=True, cache=True)
def _rows(indices: np.ndarray, offsets: np.ndarray) -> np.ndarray:
    """Returns rows, int32 [R], of strings by their indices in a vocabulary, -1 if absent."""
    rows = np.empty(len(indices), np.int32)
    for i in range(len(indices)):
        row = OUT_OF_VOCABULARY if indices[i] < 0 else indices[i] + RESERVED_ROWS
        rows[i] = MISSING if offsets[i + 1] == offsets[i] else row
    return rows


def one_array(column: pa.ChunkedArray) -> pa.Array:
    """Combines a column of strings to one array: large_string, since the strings of a field may exceed 2 GB."""
    combined = column.cast(LONG).combine_chunks()
    return pa.concat_arrays(combined.chunks) if isinstance(combined, pa.ChunkedArray) else combined


MIN_SLOTS = 8


class StringTable:
    """Numbers distinct strings in the order of insertion, in about 40 bytes plus the string. Can be pickled."""

    def __init__(self) -> None:
        self._size = 0
        # Bytes of string i: _data[_starts[i] : _starts[i + 1]].
        self._starts = np.zeros(1, np.int64)
        self._data = np.zeros(0, np.uint8)
        # Open addressing: the upper half of the hash, and the string's index + 1; 0 is an empty slot.
        self._slots = np.zeros(MIN_SLOTS, np.uint64)

    def __len__(self) -> int:
        return self._size

    def insert(self, text: pa.Array) -> np.ndarray:
        """Adds the strings that are absent. Returns the indices of all strings, int64 [R]."""
        offsets, data = string_buffers(text)
        hashes = string_hashes(text)
        self._reserve(len(text), int(offsets[-1] - offsets[0]))
        indices, self._size = _find(hashes, offsets, data, self._slots, self._starts, self._data, self._size, True)
        return indices

    def find(self, hashes: np.ndarray, offsets: np.ndarray, data: np.ndarray) -> np.ndarray:
        """Looks up strings as `string_buffers` gives them, with their hashes, uint64 [R]: int64 [R], -1 if absent."""
        return _find(hashes, offsets, data, self._slots, self._starts, self._data, self._size, False)[0]

    def strings(self) -> pa.Array:
        """Returns all strings in order, large_string [U], without a copy, valid until the next `insert`."""
        buffers = [None, pa.py_buffer(self._starts[: self._size + 1]), pa.py_buffer(self._data)]
        return pa.Array.from_buffers(pa.large_string(), self._size, buffers)

    def _reserve(self, strings: int, size: int) -> None:
        """Makes room for `strings` more strings of `size` bytes in all, with at least two slots for each string."""
        most, used = self._size + strings, int(self._starts[self._size])
        self._starts = _grown(self._starts, self._size + 1, most + 1)
        self._data = _grown(self._data, used, used + size)
        if 2 * most > len(self._slots):
            self._slots = np.zeros(1 << (2 * most - 1).bit_length(), np.uint64)
            _fill(bytes_hashes(self._starts[: self._size + 1], self._data), self._slots)


def _grown(array: np.ndarray, used: int, needed: int) -> np.ndarray:
    """Copies the first `used` elements to an array of at least `needed`; the remaining ones take no memory yet."""
    if needed <= len(array):
        return array
    larger = np.empty(max(needed, 2 * len(array)), array.dtype)
    larger[:used] = array[:used]
    return larger


@numba.njit(nogil=True, cache=True)
def _fill(hashes: np.ndarray, slots: np.ndarray) -> None:
    """Enters the strings 0, 1, ... into the first free slots from the lower bits of their hashes on."""
    mask = np.uint64(len(slots) - 1)
    for index in range(len(hashes)):
        slot = hashes[index] & mask
        while slots[slot] != 0:
            slot = (slot + np.uint64(1)) & mask
        slots[slot] = _entry(hashes[index], index)


@numba.njit(nogil=True, cache=True)
def _find(
    hashes: np.ndarray,
    offsets: np.ndarray,
    data: np.ndarray,
    slots: np.ndarray,
    starts: np.ndarray,
    known: np.ndarray,
    size: int,
    insert: bool,
) -> tuple[np.ndarray, int]:
    """Finds, and with `insert` adds, strings; compares bytes, so that equal hashes never merge two strings."""
    mask = np.uint64(len(slots) - 1)
    indices = np.full(len(hashes), -1, np.int64)
    for i in range(len(hashes)):
        length = offsets[i + 1] - offsets[i]
        slot = hashes[i] & mask
        while slots[slot] != 0:
            index = np.int64(slots[slot] & np.uint64(0xFFFFFFFF)) - 1
            if slots[slot] == _entry(hashes[i], index) and starts[index + 1] - starts[index] == length:
                k = 0
                while k < length and data[offsets[i] + k] == known[starts[index] + k]:
                    k += 1
                if k == length:
                    indices[i] = index
                    break
            slot = (slot + np.uint64(1)) & mask
        if insert and indices[i] < 0:
            slots[slot] = _entry(hashes[i], size)
            for k in range(length):
                known[starts[size] + k] = data[offsets[i] + k]
            starts[size + 1] = starts[size] + length
            indices[i] = size
            size += 1
    return indices, size


@numba.njit(inline="always")
def _entry(string_hash: np.uint64, index: int | np.int64) -> np.uint64:
    return (string_hash & np.uint64(0xFFFFFFFF00000000)) | np.uint64(index + 1)
