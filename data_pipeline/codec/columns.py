"""Raw columns of samples, of whatever Arrow type can hold them, to what an `Encoder` takes; wrong values are named.

R samples.
"""

from collections.abc import Iterable

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from cowrec.data_pipeline.raw.csv_parser import split_pairs
from cowrec.data_pipeline.raw.numbers import as_numbers
from cowrec.data_pipeline.raw.times import TIME_RULES, as_times, bounded_seconds

from .json_lines import Use

LONGEST_SHOWN = 60


class SampleColumns:
    """Reads the columns of a table, and remembers the first thing wrong with each sample.

    Attributes:
        reasons: what is wrong, by row.
    """

    def __init__(self, table: pa.Table) -> None:
        self._columns = {name: _one_array(table[name]) for name in table.column_names}
        self._rows = table.num_rows
        self.reasons: dict[int, str] = {}

    @property
    def good(self) -> np.ndarray:
        """bool [R]."""
        good = np.ones(self._rows, bool)
        good[list(self.reasons)] = False
        return good

    def numbers(self, name: str) -> np.ndarray:
        """float64 [R], NaN where missing or wrong."""
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
        """float32 [R]; a sample without one is wrong."""
        values = self.numbers(name)
        self._fail((values != 0) & (values != 1), name, self._columns[name], "a label must be 0 or 1")
        return values.astype(np.float32)

    def times(self, name: str, time_format: str) -> np.ndarray:
        """int64 [R], Unix seconds; a sample without one is wrong."""
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
        """Strings [R], empty where missing."""
        return _texts(self._columns[name], name).fill_null("")

    def row_numbers(self, name: str, missing: int, end: int) -> np.ndarray:
        """Rows of an embedding table, int32 [R], from integers or their text; `missing` where null."""
        values = self.numbers(name)
        rows = np.where(np.isnan(values), missing, values)
        self._fail((rows < 0) | (rows >= end) | (rows % 1 != 0), name, self._columns[name], f"must be in [0, {end})")
        return rows.astype(np.int32)

    def lists(self, name: str, use: Use) -> tuple[pa.Array, np.ndarray | None]:
        """Lists of strings [R], and of weighted ones the weights of all strings, float32.

        A missing or empty list is one missing value, of weight 1, as empty text is in a raw file.
        """
        column = self._columns[name]
        if pa.types.is_null(column.type):
            column = column.cast(pa.string())
        if _is_text(column.type):
            column = pc.split_pattern(column.cast(pa.string()).fill_null(""), use.separator)
        if not (pa.types.is_list(column.type) or pa.types.is_large_list(column.type)):
            raise _wrong_type(name, column.type, "lists or their joined text")
        lengths = pc.list_value_length(column).fill_null(0).to_numpy(zero_copy_only=False)
        offsets, items = np.r_[0, np.cumsum(lengths, dtype=np.int64)], column.flatten()
        if use.kind == "ids":
            ids, weights, wrong = _texts(items, name), None, _mask(items.is_null())
        else:
            ids, weights, wrong = _pairs(items, name, use)
        if wrong.any():
            rows = np.bincount(np.searchsorted(offsets, np.flatnonzero(wrong), side="right") - 1, minlength=self._rows)
            self._fail(rows > 0, name, self._columns[name], use.rule)
        return _with_missing(offsets, ids.fill_null(""), weights)

    def _fail(self, wrong: np.ndarray, name: str, column: pa.Array, rule: str) -> None:
        for row in np.flatnonzero(wrong).tolist():
            value = repr(column[row].as_py())
            value = value if len(value) <= LONGEST_SHOWN else value[:LONGEST_SHOWN] + "..."
            self.reasons.setdefault(row, f"column {name}: {rule}, got {value}")


def require_columns(wanted: Iterable[str], present: Iterable[str]) -> None:
    """Raises ValueError naming the columns that are not there."""
    missing = sorted(set(wanted) - set(present))
    if missing:
        names = ", ".join(map(repr, missing))
        raise ValueError(f"no sample has the column {names}; a missing value is null in a column that is there")


def _pairs(items: pa.Array, name: str, use: Use) -> tuple[pa.Array, np.ndarray, np.ndarray]:
    """Ids, weights, float32, and what is wrong, of items that are text or {id, weight}."""
    if _is_text(items.type):
        ids, weights, wrong = split_pairs(items.fill_null(use.weight_separator), use.weight_separator)
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
    """The lists, empty ones as one empty string of weight 1."""
    lengths = np.diff(offsets)
    if not lengths.all():
        filled = np.maximum(lengths, 1)
        starts = np.r_[0, np.cumsum(filled)]
        # Place of each value among the ids, the empty string being the last of them.
        places = np.full(starts[-1], len(ids))
        places[np.repeat(starts[:-1] - offsets[:-1], lengths) + np.arange(len(ids))] = np.arange(len(ids))
        ids = pa.concat_arrays([ids, pa.array([""], ids.type)]).take(pa.array(places))
        weights = None if weights is None else np.r_[weights, np.float32(1)][places]
        offsets = starts
    return pa.ListArray.from_arrays(pa.array(offsets.astype(np.int32)), ids), weights


def _texts(values: pa.Array, name: str) -> pa.Array:
    """Strings, null where null."""
    kind = values.type
    if not (_is_text(kind) or pa.types.is_integer(kind) or pa.types.is_null(kind)):
        raise _wrong_type(name, kind, "strings or integers")
    return values.cast(pa.string())


def _one_array(column: pa.ChunkedArray) -> pa.Array:
    if pa.types.is_dictionary(column.type):
        column = column.cast(column.type.value_type)
    whole = column.combine_chunks()
    return pa.concat_arrays(whole.chunks) if isinstance(whole, pa.ChunkedArray) else whole


def _is_text(kind: pa.DataType) -> bool:
    return pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind)


def _is_number(kind: pa.DataType) -> bool:
    return pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_decimal(kind)


def _mask(array: pa.Array) -> np.ndarray:
    return array.to_numpy(zero_copy_only=False)


def _wrong_type(name: str, kind: pa.DataType, wanted: str) -> ValueError:
    return ValueError(f"column {name!r} has the type {kind}; it must hold {wanted}")
