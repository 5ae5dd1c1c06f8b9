"""Encoding of parsed samples: transforms of numbers, and the vocabularies and hashes that turn ids into embedding rows.

R numbers or ids, U distinct ones."""

from bisect import bisect_left as bisect
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import NormalDist

import numba
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from cowrec.errors import UserError

from .dataset.schema import (
    KEPT_PREFIX,
    MISSING,
    MISSING_SUFFIX,
    OUT_OF_VOCABULARY,
    RESERVED_ROWS,
    SAMPLE_NUMBER,
    SAMPLE_WEIGHT,
    TIME,
    VOCABULARY_FOLDER,
    WEIGHT_SUFFIX,
    DenseField,
    DenseTransform,
    Schema,
    SparseField,
    label_columns,
    vocabulary_file,
)
from .hashing import bytes_hashes, string_buffers, string_hashes
from .raw.parsing import Parsed


@dataclass(frozen=True)
class Encoder:
    """Fitted transforms and vocabularies of every field.

    Attributes:
        dense, sparse: the fields as the schema describes them.
        vocabularies: by name of the sparse field; only fields encoded by a vocabulary of their own have one.
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
            return {field.name: pa.array(self._rows_of_text(field, text))}
        offsets = list_offsets(text)
        columns = {field.name: pa.ListArray.from_arrays(offsets, pa.array(self._rows_of_text(field, text.flatten())))}
        if field.kind == "weighted":
            weights = pa.array(parsed.weights[field.source])
            columns[field.name + WEIGHT_SUFFIX] = pa.ListArray.from_arrays(offsets, weights)
        return columns

    def _rows_of_text(self, field: SparseField, text: pa.Array) -> np.ndarray:
        if field.encoding == "synthetic":
            found: np.ndarray = text.to_numpy()  # the ids are embedding rows already
            return found
        return self.rows(field, string_hashes(text), *string_buffers(text))

    def rows(self, field: SparseField, hashes: np.ndarray, offsets: np.ndarray, data: np.ndarray) -> np.ndarray:
        """Returns rows, int32 [R], or raw ids, int64 [R], of strings as `string_buffers` gives them.

        `hashes`, uint64 [R], are the strings' and may be changed.
        """
        if field.encoding == "vocabulary":
            return self.vocabularies[field.vocabulary].rows_of_hashed(hashes, offsets, data)
        if field.encoding == "hash":
            buckets = np.uint64(field.num_embeddings - RESERVED_ROWS)
            return _with_missing((hashes % buckets).astype(np.int32) + np.int32(RESERVED_ROWS), offsets)
        return _raw_ids(hashes, offsets)

    def save(self, folder: Path) -> None:
        """Writes the vocabularies to `folder/vocabulary/`."""
        (folder / VOCABULARY_FOLDER).mkdir()
        for name, vocabulary in self.vocabularies.items():
            vocabulary.save(vocabulary_file(folder, name))

    @staticmethod
    def load(folder: Path, schema: Schema) -> "Encoder":
        """Loads the encoder of a data set. Raises ValueError if a vocabulary is missing or unlike the schema."""
        vocabularies = {}
        for each in schema.sparse:
            if each.encoding == "vocabulary" and not each.shares:
                vocabulary = Vocabulary.load(vocabulary_file(folder, each.name))
                if len(vocabulary) + RESERVED_ROWS != each.num_embeddings:
                    raise UserError(
                        f"{vocabulary_file(folder, each.name)} has {len(vocabulary)} ids, schema.json has "
                        f"{each.num_embeddings - RESERVED_ROWS}; the files do not match"
                    )
                vocabularies[each.name] = vocabulary
        return Encoder(schema.dense, schema.sparse, vocabularies)


def list_offsets(lists: pa.Array) -> pa.Array:
    """Returns offsets int32 [R + 1] that start at 0, even if the array is a slice of a longer one."""
    offsets = lists.offsets.to_numpy()
    return pa.array(offsets - offsets[0])


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
        return self.rows_of_hashed(string_hashes(text), *string_buffers(text))

    def rows_of_hashed(self, hashes: np.ndarray, offsets: np.ndarray, data: np.ndarray) -> np.ndarray:
        """Does the same as `rows`, for strings as `string_buffers` gives them, with known hashes [R]."""
        indices = self._table.find(hashes, offsets, data)
        rows = np.where(indices < 0, OUT_OF_VOCABULARY, indices + RESERVED_ROWS).astype(np.int32)
        return _with_missing(rows, offsets)

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
    return _raw_ids(string_hashes(text), string_buffers(text)[0])


def _raw_ids(hashes: np.ndarray, offsets: np.ndarray) -> np.ndarray:
    ids = hashes.view(np.int64)
    ids[(ids == OUT_OF_VOCABULARY) | (ids == MISSING)] += RESERVED_ROWS
    return _with_missing(ids, offsets)


def _with_missing(rows: np.ndarray, offsets: np.ndarray) -> np.ndarray:
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

    def find(self, hashes: np.ndarray, offsets: np.ndarray, data: np.ndarray) -> np.ndarray:
        """Looks up the indices of strings, as `string_buffers` gives them with their hashes, uint64 [R].

        Returns int64 [R], -1 where a string is absent.
        """
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


MOST_VALUES = 1 << 15
_SIGN = np.uint64(1 << 63)


class ValueCounts:
    """Counts distinct finite numbers; merging is exact and does not depend on the order.

    Numbers are counted by their float64 bits. Where more than `most` differ, their lowest bits are ignored, as few as
    leave at most so many: numbers of nearly the same value are then counted together. Can be pickled.

    Args:
        most: largest U.

    Attributes:
        counts: occurrences of each of `values`, int64 [U].
    """

    def __init__(self, most: int = MOST_VALUES) -> None:
        self._most, self._shift = most, 0
        self._keys, self.counts = np.zeros(0, np.uint64), np.zeros(0, np.int64)

    def add(self, values: np.ndarray) -> None:
        """Counts numbers, float64 [R], all finite."""
        # Bits in the order of the numbers: those of negative ones are reversed. -0.0 + 0.0 is 0.0.
        bits = (values.astype(np.float64) + 0.0).view(np.uint64)
        keys = np.where(bits & _SIGN, ~bits, bits | _SIGN) >> np.uint64(self._shift)
        self._add(*np.unique(keys, return_counts=True))

    def merge(self, other: "ValueCounts") -> None:
        """Adds the counts of another part of the column."""
        shift = max(self._shift, other._shift)
        self._coarsen(shift)
        self._add(other._keys >> np.uint64(shift - other._shift), other.counts)

    @property
    def total(self) -> int:
        """R."""
        return int(self.counts.sum())

    @property
    def values(self) -> np.ndarray:
        """The distinct numbers in order: float64 [U]; where they are rounded, the least of those counted together."""
        keys = self._keys << np.uint64(self._shift)
        return np.where(keys & _SIGN, keys & ~_SIGN, ~keys).view(np.float64)

    def _add(self, keys: np.ndarray, counts: np.ndarray) -> None:
        self._set(np.r_[self._keys, keys], np.r_[self.counts, counts])
        if len(self._keys) > self._most:
            apart = self._keys[1:] ^ self._keys[:-1]  # keys that differ in their upper bits stay apart
            bits = bisect(range(64), -self._most, key=lambda bits: -1 - int(np.count_nonzero(apart >> np.uint64(bits))))
            self._coarsen(self._shift + bits)

    def _coarsen(self, shift: int) -> None:
        if shift > self._shift:
            keys = self._keys >> np.uint64(shift - self._shift)
            self._shift = shift
            self._set(keys, self.counts)

    def _set(self, keys: np.ndarray, counts: np.ndarray) -> None:
        self._keys, index = np.unique(keys, return_inverse=True)
        self.counts = np.zeros(len(self._keys), np.int64)
        np.add.at(self.counts, index, counts)


_NORMAL = NormalDist()
_RANKS = np.unique(np.r_[np.arange(1, 192) / 192, [_NORMAL.cdf(score / 8) for score in range(-36, 37)]])
"""Ranks of the knots of a column with more distinct numbers: evenly spaced, and for the tails evenly in score."""
MOST_KNOTS = len(_RANKS) + 2

BOUND = 100.0
"""Largest magnitude of an encoded number. Numbers fitted on are in [0, 1] under "minmax", and the logarithm of float64
numbers of up to 1e43 is below 100."""
LEAST_BOUND_UNSCALED, LARGEST_BOUND_UNSCALED = 1e6, 1e15
"""Limits of the largest magnitude under "none". The square of the second, a gradient's, is far from float32's end."""


@dataclass
class NumberStatistics:
    """What the transform of a column is fitted on.

    Attributes:
        minimum, maximum: range, with missing values taken as 0.
        counts: of the numbers that are not missing; None where the transform takes the range alone.
        missing: how many are missing.
    """

    minimum: float = np.inf
    maximum: float = -np.inf
    counts: ValueCounts | None = field(default_factory=ValueCounts)
    missing: int = 0

    def add(self, values: np.ndarray) -> None:
        """Adds numbers, float64 [R], NaN where missing."""
        is_missing = np.isnan(values)
        self.missing += int(is_missing.sum())
        if len(values):
            present = np.nan_to_num(values, nan=0.0)
            self.minimum = min(self.minimum, float(present.min()))
            self.maximum = max(self.maximum, float(present.max()))
            if self.counts is not None:
                self.counts.add(values[~is_missing])

    def merge(self, other: "NumberStatistics") -> None:
        """Adds those of another part of the column."""
        self.missing += other.missing
        self.minimum = min(self.minimum, other.minimum)
        self.maximum = max(self.maximum, other.maximum)
        if self.counts is not None and other.counts is not None:
            self.counts.merge(other.counts)


OFTEN_MISSING = 0.01
"""Share of missing values from which on "quantile" also tells where they are, which the middle does not."""


def fitted(name: str, transform: DenseTransform, statistics: NumberStatistics) -> list[DenseField]:
    """Returns the field with its transform; "buckets" scales numbers like "minmax" and adds ids in another field.

    Under "quantile", a field of which numbers are often missing has another one that tells where.
    """
    knots, levels = normal_scores(statistics.counts) if statistics.counts is not None else ([], [])
    kept = "minmax" if transform == "buckets" else transform
    number = DenseField(name, kept, statistics.minimum, statistics.maximum, name, tuple(knots), tuple(levels))
    present = statistics.counts.total if statistics.counts is not None else 0
    if not present or statistics.missing / (present + statistics.missing) < OFTEN_MISSING:
        return [number]
    return [number, DenseField(name + MISSING_SUFFIX, "missing", source=name)]


def normal_scores(counts: ValueCounts) -> tuple[list[float], list[float]]:
    """Returns up to `MOST_KNOTS` numbers of a column, in order, and the normal quantile of the mid-rank of each.

    The mid-rank of x is the share of numbers below x and half of those equal to it, so the score of every number has
    the standard normal distribution, up to ties, whatever the distribution of the column (van der Waerden scores).
    """
    if not counts.total:
        return [], []
    values = counts.values
    ranks = (np.cumsum(counts.counts) - counts.counts / 2) / counts.total
    chosen = np.arange(len(values))
    if len(values) > MOST_KNOTS:
        last = len(values) - 1
        chosen = np.unique(np.r_[0, np.searchsorted(ranks, _RANKS).clip(max=last), last])
    return values[chosen].tolist(), [_NORMAL.inv_cdf(rank) for rank in ranks[chosen].tolist()]


def transformed(field: DenseField, values: np.ndarray) -> np.ndarray:
    """Applies a field's transform: float32 [R] from raw numbers, float64 [R], NaN where missing.

    Samples that the transform was not fitted on may leave [0, 1] under "minmax"; below the fitted minimum the
    logarithm is 0, and outside the fitted range the normal score is that of its end. No result is beyond `bound`.
    """
    if field.transform == "missing":
        found: np.ndarray = np.isnan(values).astype(np.float32)
        return found
    if field.transform == "quantile":
        return scores(field, values).astype(np.float32)
    present = np.nan_to_num(values, nan=0.0)
    with np.errstate(over="ignore", invalid="ignore"):  # the range of a column may be wider than float64
        if field.transform == "minmax":
            width = field.maximum - field.minimum
            present = (present - field.minimum) / width if width > 0 else np.zeros_like(present)
        elif field.transform == "log":
            present = np.log1p(np.maximum(present - field.minimum, 0.0))
    return bounded(present, bound(field))


def bound(field: DenseField) -> float:
    """Returns the largest magnitude of a field's encoded numbers, so that one number cannot end or cripple training.

    Under "none", ten times that of the numbers fitted on, within limits. All are float32 numbers.
    """
    if field.transform != "none":
        return BOUND
    fitted_on = max(abs(field.minimum), abs(field.maximum))
    return float(np.float32(min(max(10 * fitted_on, LEAST_BOUND_UNSCALED), LARGEST_BOUND_UNSCALED)))


def bounded(values: np.ndarray, largest: float | np.ndarray) -> np.ndarray:
    """Bounds encoded numbers, float64, by magnitude; NaN, of a range wider than float64, becomes 0. Returns float32."""
    limited = np.minimum(np.maximum(values, -largest), largest)
    return np.where(np.isnan(limited), 0.0, limited).astype(np.float32)


def count_bounded(fields: Iterable[DenseField], encoded: pa.Table) -> Counter[str]:
    """Returns how many numbers of each field are at its `bound`, without the fields that have none."""
    columns = ((field, encoded[field.name].to_numpy()) for field in fields)
    return +Counter({field.name: int((np.abs(values) >= bound(field)).sum()) for field, values in columns})


def scores(field: DenseField, values: np.ndarray) -> np.ndarray:
    """Interpolates a field's normal scores: float64 [R] from raw numbers, 0 where missing."""
    if not field.knots:
        return np.zeros(len(values))
    return np.where(np.isnan(values), 0.0, np.interp(values, field.knots, field.levels))


def bucket_ids(values: np.ndarray) -> pa.Array:
    """Returns the bucket of each number as a string [R], from float64 [R]; empty where missing.

    The bucket is floor(log(x)^2) above 2, and "=x" (x rounded down) otherwise. The two kinds are different ids, as in
    the winning solution of Criteo's Kaggle challenge (libffm's "3 idiots": `int(log(x)^2)` and `"SP" + x`).
    """
    rounded = np.floor(np.nan_to_num(values, nan=0.0)) + 0.0  # -0.0 is 0
    large = rounded > 2
    # One number codes both kinds: 0.5 added to the squares separates them from the values.
    codes = np.where(large, np.floor(np.log(np.where(large, rounded, 1.0)) ** 2) + 0.5, rounded)
    distinct, index = np.unique(codes, return_inverse=True)
    names = [f"={code:.0f}" if code == np.floor(code) else f"{code - 0.5:.0f}" for code in distinct]
    index = np.where(np.isnan(values), len(names), index)
    return pa.array([*names, ""]).take(pa.array(index))
