"""Tables of Parquet and Arrow files: structs as columns, and the validity of values, which Arrow does not check."""

from collections.abc import Collection, Iterator
from itertools import pairwise

import pyarrow as pa
import pyarrow.compute as pc

from .values import plain_array, without_views

NOT_UTF8 = "not UTF-8; write the column as text in UTF-8"
BYTES = (pa.binary(), pa.large_binary(), pa.binary_view())
TEXT = (*BYTES, pa.string(), pa.large_string(), pa.string_view())


def flattened(table: pa.Table) -> pa.Table:
    """Returns a table with the fields of structs as columns, such as `user.id`; null structs have null fields.

    A column whose own name is `user.id` comes first.
    """
    if not any(pa.types.is_struct(kind) for kind in table.schema.types):
        return table
    plain = {field.name for field in table.schema if not pa.types.is_struct(field.type)}
    columns = [
        (name, values)
        for top, column in zip(table.column_names, table.columns, strict=True)
        for name, values in _leaves(top, column)
        if name == top or name not in plain
    ]
    found = pa.Table.from_arrays([values for _, values in columns], [name for name, _ in columns])
    return found.replace_schema_metadata(table.schema.metadata)


def _leaves(name: str, column: pa.ChunkedArray) -> Iterator[tuple[str, pa.ChunkedArray]]:
    if not pa.types.is_struct(column.type):
        yield name, column
        return
    for field, values in zip(column.type, column.flatten(), strict=True):
        yield from _leaves(f"{name}.{field.name}", values)


def unreadable_rows(table: pa.Table) -> dict[int, tuple[str, str]]:
    """Returns by row the first column with an invalid value, such as text that is not UTF-8, and what is wrong.

    Raises ArrowInvalid if the table is damaged, so that no row of it can be read.
    """
    invalid = require_offsets(table)
    found: dict[int, tuple[str, str]] = {}
    for name, column in zip(table.column_names, table.columns, strict=True):
        start = 0
        for chunk in column.chunks:
            for row, problem in _invalid(chunk, start, whole=name in invalid):
                found.setdefault(row, (name, problem))
            start += len(chunk)
    return dict(sorted(found.items()))


def without_rows(table: pa.Table, rows: Collection[int]) -> pa.Table:
    """Returns a table without some rows, from slices, since Arrow cannot take rows of every type."""
    bounds = [-1, *sorted(rows), table.num_rows]
    return pa.concat_tables([table.slice(left + 1, right - left - 1) for left, right in pairwise(bounds)])


def require_offsets(table: pa.Table) -> list[str]:
    """Returns the columns with an invalid value; bytes are not looked at.

    Raises ArrowInvalid if values begin or end outside of their data, whose use would crash the process. An Arrow file
    without compression may have such values after an interrupted copy.
    """
    invalid = []
    for name, column in zip(table.column_names, table.columns, strict=True):  # names may be repeated
        try:
            column.validate(full=True)
        except pa.ArrowInvalid as error:
            if "ffset" in str(error):
                raise pa.ArrowInvalid(f"column {name}: {error}") from None
            invalid.append(name)
    return invalid


def _invalid(values: pa.Array, start: int, *, whole: bool) -> Iterator[tuple[int, str]]:
    """Yields the rows of a slice with an invalid value, counted from `start`, and what is wrong."""
    try:
        _check(values, whole=whole)
    except pa.ArrowInvalid as error:
        half = len(values) // 2
        if not half:
            yield start, str(error)
            return
        yield from _invalid(values.slice(0, half), start, whole=whole)
        yield from _invalid(values.slice(half), start + half, whole=whole)


def _check(values: pa.Array, *, whole: bool) -> None:
    """Raises ArrowInvalid if a value of a slice is invalid, at any depth; unless `whole`, bytes alone are checked."""
    kind = values.type
    if pa.types.is_dictionary(kind):
        _check(without_views(values.dictionary).take(values.indices.drop_null().unique()), whole=whole)
    elif pa.types.is_run_end_encoded(kind):
        _check(pc.run_end_decode(values), whole=whole)
    elif pa.types.is_map(kind) or pa.types.is_fixed_size_list(kind) or isinstance(values, pa.ExtensionArray):
        _check(plain_array(values), whole=whole)
    elif pa.types.is_list(kind) or pa.types.is_large_list(kind):
        _check(values.flatten(), whole=whole)
    elif pa.types.is_struct(kind):
        for field in values.flatten():
            _check(field, whole=whole)
    elif kind in BYTES or (whole and kind in TEXT):
        try:
            without_views(values).cast(pa.large_binary()).cast(pa.large_string())
        except pa.ArrowInvalid:
            raise pa.ArrowInvalid(NOT_UTF8) from None
    elif whole:
        values.validate(full=True)
