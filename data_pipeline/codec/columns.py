"""Raw columns of samples, of any Arrow type that can hold their values, converted to the input of an `Encoder`.

R samples.
"""

from collections.abc import Iterable

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from cowrec.data_pipeline.raw.csv_parser import split_pairs
from cowrec.data_pipeline.raw.numbers import as_numbers
from cowrec.data_pipeline.raw.times import TIME_RULES, as_times, bounded_seconds

from .json_lines import ColumnType

MAX_SHOWN = 60


class SampleColumns:
    """Reads the columns of a table and records the first error of each sample.

    Attributes:
        reasons: error messages by row.
    """

    def __init__(self, table: pa.Table) -> None:
        self._columns = {name: _one_array(table[name]) for name in table.column_names}
        self._rows = table.num_rows
        self.reasons: dict[int, str] = {}

    @property
    def good(self) -> np.ndarray:
        """Samples without an error: bool [R]."""
        good = np.ones(self._rows, bool)
        good[list(self.reasons)] = False
        return good

    def numbers(self, name: str) -> np.ndarray:
        """Returns float64 [R], NaN where missing or wrong."""
        column = self._columns[name]
        if _is_text(column.type):
            values, wrong = as_numbers(column.fill_null(""))
        else:
            if not (_is_number(column.type) or pa.types.is_null(column.type)):
                raise _wrong_type(name, column.type, "numbers or their text")
            values = column.cast(pa.float64(), safe=False).to_numpy(zero_copy_only=False)
            wrong = ~np.isfinite(values) & _mask(column.is_valid())
        self._fail(wrong, name, column, "must be a finite number or null")
        return np.where(wrong, np.nan, values) if wrong.any() else values

    def labels(self, name: str) -> np.ndarray:
        """Returns float32 [R]; a missing label is an error."""
        values = self.numbers(name)
        self._fail((values != 0) & (values != 1), name, self._columns[name], "a label must be 0 or 1")
        return values.astype(np.float32)

    def times(self, name: str, time_format: str) -> np.ndarray:
        """Returns int64 [R], Unix seconds; a missing time is an error."""
        column = self._columns[name]
        if time_format == "timestamp" and pa.types.is_timestamp(column.type):
            column = pc.floor_temporal(column, unit="second").cast(pa.timestamp("s", column.type.tz)).cast(pa.int64())
        if time_format == "timestamp" and not _is_text(column.type):
            if not (_is_number(column.type) or pa.types.is_null(column.type)):
                raise _wrong_type(name, column.type, "times")
            seconds = column.cast(pa.float64(), safe=False).to_numpy(zero_copy_only=False)
            values, wrong = bounded_seconds(seconds)
        else:
            values, wrong = as_times(self.texts(name), time_format)
        self._fail(wrong, name, column, TIME_RULES[time_format])
        return values

    def texts(self, name: str) -> pa.Array:
        """Returns strings [R], empty where missing."""
        return _texts(self._columns[name], name).fill_null("")

    def row_numbers(self, name: str, missing: int, end: int) -> np.ndarray:
        """Returns rows of an embedding table, int32 [R], from integers or their text; `missing` where null."""
        values = self.numbers(name)
        rows = np.where(np.isnan(values), missing, values)
        self._fail((rows < 0) | (rows >= end) | (rows % 1 != 0), name, self._columns[name], f"must be in [0, {end})")
        return rows.astype(np.int32)

    def lists(self, name: str, kind: ColumnType) -> tuple[pa.Array, np.ndarray | None]:
        """Returns lists of strings [R] and, if weighted, the weights of all strings, float32.

        A missing or empty list is one missing value of weight 1, like empty text in a raw file.
        """
        column = self._columns[name]
        if pa.types.is_null(column.type):
            column = column.cast(pa.string())
        if _is_text(column.type):
            column = pc.split_pattern(column.cast(pa.string()).fill_null(""), kind.separator)
        if not (pa.types.is_list(column.type) or pa.types.is_large_list(column.type)):
            raise _wrong_type(name, column.type, "lists or their joined text")
        lengths = pc.list_value_length(column).fill_null(0).to_numpy(zero_copy_only=False)
        offsets, items = np.r_[0, np.cumsum(lengths, dtype=np.int64)], column.flatten()
        if kind.kind == "ids":
            ids, weights, wrong = _texts(items, name), None, _mask(items.is_null())
        else:
            ids, weights, wrong = _pairs(items, name, kind)
        if wrong.any():
            rows = np.bincount(np.searchsorted(offsets, np.flatnonzero(wrong), side="right") - 1, minlength=self._rows)
            self._fail(rows > 0, name, self._columns[name], kind.rule)
        return _with_missing(offsets, ids.fill_null(""), weights)

    def _fail(self, wrong: np.ndarray, name: str, column: pa.Array, rule: str) -> None:
        for row in np.flatnonzero(wrong).tolist():
            value = repr(column[row].as_py())
            value = value if len(value) <= MAX_SHOWN else value[:MAX_SHOWN] + "..."
            self.reasons.setdefault(row, f"column {name}: {rule}, got {value}")


def require_columns(wanted: Iterable[str], present: Iterable[str]) -> None:
    """Raises ValueError if columns are missing."""
    missing = sorted(set(wanted) - set(present))
    if missing:
        names = ", ".join(map(repr, missing))
        raise ValueError(f"no sample has the column {names}; give null for a missing value")


def _pairs(items: pa.Array, name: str, kind: ColumnType) -> tuple[pa.Array, np.ndarray, np.ndarray]:
    """Returns ids, float32 weights and which are wrong, from items that are text or {id, weight}."""
    if _is_text(items.type):
        ids, weights, wrong = split_pairs(items.fill_null(kind.weight_separator), kind.weight_separator)
        return ids, weights.astype(np.float32), wrong
    fields = {each.name: each.type for each in items.type} if pa.types.is_struct(items.type) else {}
    if not _is_number(fields.get("weight", pa.null())) or "id" not in fields:
        raise _wrong_type(name, items.type, "of {id, weight}")
    ids, weights = _texts(pc.struct_field(items, "id"), name), pc.struct_field(items, "weight")
    numbers = weights.cast(pa.float64(), safe=False).to_numpy(zero_copy_only=False)
    wrong = ~np.isfinite(numbers) | _mask(ids.is_null())
    return ids, np.where(wrong, 0.0, numbers).astype(np.float32), wrong


def _with_missing(
    offsets: np.ndarray, ids: pa.Array, weights: np.ndarray | None
) -> tuple[pa.ListArray, np.ndarray | None]:
    """Returns the lists with each empty list replaced by one empty string of weight 1."""
    lengths = np.diff(offsets)
    if not lengths.all():
        filled = np.maximum(lengths, 1)
        starts = np.r_[0, np.cumsum(filled)]
        # Index of each value among the ids, to which the empty string is appended.
        indices = np.full(starts[-1], len(ids))
        indices[np.repeat(starts[:-1] - offsets[:-1], lengths) + np.arange(len(ids))] = np.arange(len(ids))
        ids = pa.concat_arrays([ids, pa.array([""], ids.type)]).take(pa.array(indices))
        weights = None if weights is None else np.r_[weights, np.float32(1)][indices]
        offsets = starts
    return pa.ListArray.from_arrays(pa.array(offsets.astype(np.int32)), ids), weights


def _texts(values: pa.Array, name: str) -> pa.Array:
    """Casts strings or integers to strings; null stays null."""
    kind = values.type
    if not (_is_text(kind) or pa.types.is_integer(kind) or pa.types.is_null(kind)):
        raise _wrong_type(name, kind, "strings or integers")
    return values.cast(pa.string())


def _one_array(column: pa.ChunkedArray) -> pa.Array:
    if pa.types.is_dictionary(column.type):
        column = column.cast(column.type.value_type)
    combined = column.combine_chunks()
    return pa.concat_arrays(combined.chunks) if isinstance(combined, pa.ChunkedArray) else combined


def _is_text(kind: pa.DataType) -> bool:
    return pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind)


def _is_number(kind: pa.DataType) -> bool:
    return pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_decimal(kind)


def _mask(array: pa.Array) -> np.ndarray:
    return array.to_numpy(zero_copy_only=False)


def _wrong_type(name: str, kind: pa.DataType, wanted: str) -> ValueError:
    return ValueError(f"column {name!r} has the type {kind}; it must hold {wanted}")
