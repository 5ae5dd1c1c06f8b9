"""Validity of the values of Parquet and Arrow files, which Arrow does not check as it reads them."""

from functools import partial

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from .values import plain_array


def unreadable_rows(table: pa.Table) -> tuple[pa.Table, dict[int, tuple[str, str]]]:
    """Returns a table, of which rows can be taken, and by row the column and what is wrong with it.

    Text that is not UTF-8 is, and what else Arrow does not check as it reads, such as the day of a date.

    Raises:
        pyarrow.ArrowInvalid: the table is damaged, so that no row of it can be taken.
    """
    if not _problem(table):
        return table, {}
    require_offsets(table)
    table = pa.table({name: _takeable(table[name]) for name in table.column_names})

    def first(row: int) -> tuple[str, str]:
        columns = ((name, _problem(_copy(table.select([name]), row, row + 1))) for name in table.column_names)
        return next((name, problem) for name, problem in columns if problem)

    return table, {row: first(row) for row in _unreadable(table)}


def require_offsets(table: pa.Table) -> None:
    """Raises ArrowInvalid if values begin or end outside of their data, which an Arrow file without compression may
    have after an interrupted copy, and whose use would crash the process.
    """
    for index, name in enumerate(table.column_names):
        problem = _problem(table.select([index]))
        if "ffset" in problem:
            raise pa.ArrowInvalid(f"column {name}: {problem}")


def _unreadable(table: pa.Table, start: int = 0) -> list[int]:
    """Returns the rows, counted from `start`, that have a problem."""
    if not _problem(table):
        return []
    rows, half = table.num_rows, table.num_rows // 2
    if rows == 1:
        return [start]
    return [*_unreadable(_copy(table, 0, half), start), *_unreadable(_copy(table, half, rows), start + half)]


def _copy(table: pa.Table, start: int, stop: int) -> pa.Table:
    """Returns rows of a table; of lists in a slice, the values outside it would be checked as well."""
    return table.take(pa.array(np.arange(start, stop)))


def _problem(table: pa.Table) -> str:
    """Returns what is wrong with a value; empty if nothing is."""
    try:
        table.validate(full=True)
        for chunk in (chunk for column in table.columns for chunk in column.chunks):
            _require_utf8(chunk)
    except pa.ArrowInvalid as error:
        return "not UTF-8; write the column as text in UTF-8" if "UTF8" in str(error) else str(error)
    return ""


def _require_utf8(values: pa.Array) -> None:
    """Raises ArrowInvalid if bytes, at any depth, are not UTF-8."""
    if pa.types.is_dictionary(values.type):
        return _require_utf8(values.dictionary)
    values = plain_array(values)
    if pa.types.is_list(values.type) or pa.types.is_large_list(values.type):
        _require_utf8(values.flatten())
    for each in values.flatten() if pa.types.is_struct(values.type) else ():
        _require_utf8(each)


def _takeable(values: pa.ChunkedArray) -> pa.ChunkedArray:
    """Returns values of which rows can be taken, which Arrow does not do of views and runs, without those of no row."""
    if pa.types.is_run_end_encoded(values.type):
        values = pc.run_end_decode(values)
    for decode in (False, True):  # Arrow does not decode dictionaries of views
        values = values.cast(_takeable_type(values.type, decode=decode))
    return values


def _takeable_type(kind: pa.DataType, *, decode: bool) -> pa.DataType:
    """Returns a type with binary for views, at any depth, and, to `decode` them, the values for dictionaries."""
    inner = partial(_takeable_type, decode=decode)
    if pa.types.is_dictionary(kind):
        return inner(kind.value_type) if decode else pa.dictionary(kind.index_type, inner(kind.value_type))
    if pa.types.is_map(kind):
        return pa.map_(inner(kind.key_type), inner(kind.item_type))
    if pa.types.is_struct(kind):
        return pa.struct([(each.name, inner(each.type)) for each in kind])
    if pa.types.is_list(kind) or pa.types.is_fixed_size_list(kind):
        return pa.list_(inner(kind.value_type))
    if pa.types.is_large_list(kind):
        return pa.large_list(inner(kind.value_type))
    return pa.binary() if kind in (pa.string_view(), pa.binary_view()) else kind
