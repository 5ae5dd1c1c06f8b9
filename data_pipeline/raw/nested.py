"""Values within structs and JSON objects as columns: `user.id` is the field `id` of the column `user`.

A column whose own name is `user.id` comes first."""

import re
from collections.abc import Iterator, Mapping
from typing import Any

import pyarrow as pa

ABSENT = object()


def value_of(sample: Mapping[str, Any], column: str, default: Any = None) -> Any:
    """Returns the value of a column of a sample, which may be within objects; `default` if there is none."""
    if column in sample:
        return sample[column]
    for dot in re.finditer(r"\.", column):
        inner = sample.get(column[: dot.start()])
        found = value_of(inner, column[dot.end() :], ABSENT) if isinstance(inner, Mapping) else ABSENT
        if found is not ABSENT:
            return found
    return default


def flattened(table: pa.Table) -> pa.Table:
    """Returns a table with the fields of structs, at any depth, in place of the structs; null ones have null fields."""
    if not any(pa.types.is_struct(kind) for kind in table.schema.types):
        return table
    plain = {each.name for each in table.schema if not pa.types.is_struct(each.type)}
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


def nested_schema(types: Mapping[str, pa.DataType]) -> pa.Schema | None:
    """Returns the schema whose leaves are columns with dots; None if a column is a leaf and a struct at once."""
    groups: dict[str, dict[str, pa.DataType]] = {}
    for name, kind in types.items():
        top, _, inner = name.partition(".")
        groups.setdefault(top, {})[inner] = kind
    fields = []
    for top, leaves in groups.items():
        if "" not in leaves:
            inner_schema = nested_schema(leaves)
            if inner_schema is None:
                return None
            fields.append((top, pa.struct([*inner_schema])))
        elif len(leaves) == 1:
            fields.append((top, leaves[""]))
        else:
            return None
    return pa.schema(fields)
