"""The encoder of parsed samples, and the vocabularies and hashes that turn ids into embedding rows.

R ids looked up, U distinct ids."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numba
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from cowrec.data_pipeline.dataset.schema import (
    KEPT_PREFIX,
    MISSING,
    OUT_OF_VOCABULARY,
    RESERVED_ROWS,
    SAMPLE_NUMBER,
    SAMPLE_WEIGHT,
    TIME,
    WEIGHT_SUFFIX,
    DenseField,
    Schema,
    SparseField,
    label_columns,
)
from cowrec.data_pipeline.hashing import bytes_hashes, string_buffers, string_hashes
from cowrec.data_pipeline.raw.parsing import Parsed

from .dense import bucket_ids, transformed

VOCABULARY_FOLDER = "vocabulary"


@dataclass(frozen=True)
class Encoder:
    """Fitted transforms and vocabularies of every field.

    Attributes:
        dense, sparse: the fields as the schema describes them.
        vocabularies: by name of the sparse field; only fields encoded by a vocabulary have one.
    """

    dense: tuple[DenseField, ...]
    sparse: tuple[SparseField, ...]
    vocabularies: "Mapping[str, Vocabulary]"

    def encode(self, parsed: Parsed) -> pa.Table:
        """Encodes all samples of a block to the columns of `arrow_schema`."""
        labels = zip(label_columns(list(parsed.labels)), parsed.labels.values(), strict=True)
        columns: dict[str, pa.Array] = {name: pa.array(values) for name, values in labels}
        columns[SAMPLE_NUMBER] = pa.array(parsed.sample_numbers)
        columns |= {KEPT_PREFIX + name: values for name, values in parsed.kept.items()}
        if parsed.sample_weights is not None:
            columns[SAMPLE_WEIGHT] = pa.array(parsed.sample_weights)
        if parsed.time is not None:
            columns[TIME] = pa.array(parsed.time)
        for dense in self.dense:
            columns[dense.name] = pa.array(transformed(dense, parsed.numbers[dense.source]))
        for sparse in self.sparse:
            columns |= self._ids(sparse, parsed)
        return pa.table(columns)

    def _ids(self, field: SparseField, parsed: Parsed) -> dict[str, pa.Array]:
        text = bucket_ids(parsed.numbers[field.source]) if field.bucketed else parsed.ids[field.source]
        if field.kind == "categorical":
            return {field.name: pa.array(self._rows(field, text))}
        offsets = list_offsets(text)
        columns = {field.name: pa.ListArray.from_arrays(offsets, pa.array(self._rows(field, text.flatten())))}
        if field.kind == "weighted":
            weights = pa.array(parsed.weights[field.source])
            columns[field.name + WEIGHT_SUFFIX] = pa.ListArray.from_arrays(offsets, weights)
        return columns

    def _rows(self, field: SparseField, text: pa.Array) -> np.ndarray:
        if field.encoding == "hash":
            return hashed_rows(text, field.num_embeddings - RESERVED_ROWS)
        if field.encoding == "raw":
            return raw_ids(text)
        if field.encoding == "synthetic":
            return text.to_numpy()  # the ids are embedding rows already
        return self.vocabularies[field.name].rows(text)

    def save(self, folder: Path) -> None:
        """Writes the vocabularies to `folder/vocabulary/`."""
        (folder / VOCABULARY_FOLDER).mkdir()
        for name, vocabulary in self.vocabularies.items():
            vocabulary.save(_file(folder, name))

    @staticmethod
    def load(folder: Path, schema: Schema) -> "Encoder":
        """Loads the encoder of a data set. Raises ValueError if a vocabulary is missing or unlike the schema."""
        vocabularies = {}
        for field in schema.sparse:
            if field.encoding == "vocabulary":
                vocabulary = Vocabulary.load(_file(folder, field.name))
                if len(vocabulary) + RESERVED_ROWS != field.num_embeddings:
                    raise ValueError(
                        f"{_file(folder, field.name)} has {len(vocabulary)} ids, schema.json has "
                        f"{field.num_embeddings - RESERVED_ROWS}; the files do not match"
                    )
                vocabularies[field.name] = vocabulary
        return Encoder(schema.dense, schema.sparse, vocabularies)


def list_offsets(lists: pa.Array) -> pa.Array:
    """Returns offsets int32 [R + 1] that start at 0, even if the array is a slice of a longer one."""
    offsets = lists.offsets.to_numpy()
    return pa.array(offsets - offsets[0])


def _file(folder: Path, field: str) -> Path:
    return folder / VOCABULARY_FOLDER / f"{field}.parquet"


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


MIN_SLOTS = 8
WORD_BYTES = 8


class StringTable:
    """Numbers distinct strings in the order of their insertion.

    Lookup takes constant time; memory is about 40 bytes plus its length for each string. Can be pickled.
    """

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

    def find(self, text: pa.Array) -> np.ndarray:
        """Looks up the indices of strings: int64 [R], -1 where a string is absent."""
        return self.find_hashed(string_hashes(text), *string_buffers(text))

    def find_hashed(self, hashes: np.ndarray, offsets: np.ndarray, data: np.ndarray) -> np.ndarray:
        """Does the same as `find`, for strings in the form of `string_buffers` with known hashes, uint64 [R]."""
        return _find(hashes, offsets, data, self._slots, self._starts, self._data, self._size, False)[0]

    def strings(self) -> pa.Array:
        """Returns all strings in order, large_string [U], without a copy: valid until the next `insert`."""
        buffers = [None, pa.py_buffer(self._starts[: self._size + 1]), pa.py_buffer(self._data)]
        return pa.Array.from_buffers(pa.large_string(), self._size, buffers)

    def _reserve(self, strings: int, size: int) -> None:
        """Makes room for `strings` more strings of `size` bytes in total, with at least two slots per string."""
        most, used = self._size + strings, int(self._starts[self._size])
        self._starts = _grown(self._starts, self._size + 1, most + 1)
        self._data = _grown(self._data, used, used + size)
        if 2 * most > len(self._slots):
            self._slots = np.zeros(1 << (2 * most - 1).bit_length(), np.uint64)
            _fill(bytes_hashes(self._starts[: self._size + 1], self._data), self._slots)


def string_order(text: pa.Array, keys: np.ndarray) -> np.ndarray:
    """Sorts strings by the integers `keys` [U], then by their bytes, eight bytes at a time.

    Much faster than string comparisons where most strings are short.

    Returns:
        Indices of the strings in sorted order, int64 [U].
    """
    offsets, data = string_buffers(text)
    lengths = np.diff(offsets)
    order = np.arange(len(text))
    # Positions in `order` that are not final yet, and the rank of each among the words compared so far.
    unsorted, group = order.copy(), keys
    end = WORD_BYTES
    while len(unsorted):
        index = order[unsorted]
        words, ends = _words(offsets, data, index, end - WORD_BYTES), np.minimum(lengths[index], end)
        inner = np.lexsort((ends, words, group))
        order[unsorted] = index[inner]
        group, words, ends = group[inner], words[inner], ends[inner]
        same = (group[1:] == group[:-1]) & (words[1:] == words[:-1]) & (ends[1:] == ends[:-1]) & (ends[1:] == end)
        tied = np.r_[same, False] | np.r_[False, same]
        group = np.cumsum(np.r_[True, ~same])[tied]
        unsorted = unsorted[tied]
        end += WORD_BYTES
    return order


def _grown(array: np.ndarray, used: int, needed: int) -> np.ndarray:
    """Copies the first `used` elements to an array of at least `needed`; the remaining ones take no memory yet."""
    if needed <= len(array):
        return array
    larger = np.empty(max(needed, 2 * len(array)), array.dtype)
    larger[:used] = array[:used]
    return larger


@numba.njit(nogil=True, cache=True)
def _fill(hashes: np.ndarray, slots: np.ndarray) -> None:
    """Enters the strings 0, 1, ... with these hashes, each into the first free slot from its hash's lower bits on."""
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
    """Finds, and with `insert` adds, strings; compares their bytes, so equal hashes never merge two strings."""
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


@numba.njit(nogil=True, cache=True)
def _words(offsets: np.ndarray, data: np.ndarray, index: np.ndarray, skip: int) -> np.ndarray:
    """Packs bytes skip to skip + 8 of the strings `index` into uint64 of the same order, zero-padded."""
    words = np.zeros(len(index), np.uint64)
    for i in range(len(index)):
        start = offsets[index[i]] + skip
        for k in range(min(WORD_BYTES, offsets[index[i] + 1] - start)):
            words[i] |= np.uint64(data[start + k]) << np.uint64(56 - 8 * k)
    return words
