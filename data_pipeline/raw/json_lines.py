"""JSON lines of files and streams as Arrow columns: all at once if types are uniform, else one by one.

Both ways give the same result: the first is used only if every line is one object whose values have the types of the
first lines. If a key occurs twice in an object, its last value counts. The column `user.id` is the value `id` within
the object `user`, unless an object has the key `user.id`.
"""

import json
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.json

from cowrec.errors import UserError

from .columns import WrongValue
from .delimited import RawTable
from .inputs import Block
from .kinds import RawType, column_types
from .layouts import Layout
from .tables import flattened

MAX_BYTES = 1 << 20
"""Longest JSON sample, and longest text in a column of a table; parsing takes about nine times this memory."""
PROBED_LINES = 16
"""Number of lines whose values determine the column types."""
LOOKED_AT = 1 << 20
"""Bytes of a file whose lines tell its columns."""
NAMED = re.compile(r"\.(jsonl|ndjson)(\.(gz|zst|zstd|xz|bz2|lz4|zip))?$", re.IGNORECASE)
ABSENT = object()
DOCUMENT = re.compile(rb'\s*(\[\s*\{|\{\s*("[^"\n]*"\s*:[^\n]*)?\n\s*["}])')
"""How JSON begins that is one value in several lines, or a list of objects."""


def are_json_lines(path: str, text: bytes) -> bool:
    """Returns whether the beginning of a file is JSON with an object a line. Raises ValueError: one JSON document."""
    if NAMED.search(path):
        return True
    line, _, others = text.partition(b"\n")
    (first,) = parsed_lines([line[:MAX_BYTES]]) if line.lstrip().startswith(b"{") else (None,)
    if isinstance(first, dict) and (
        others.strip() or not all(isinstance(value, (dict, list)) for value in first.values())
    ):
        return True
    if isinstance(first, dict) or DOCUMENT.match(text):
        raise UserError(
            f"{path} is one JSON document; write an object a line, as pandas does with .to_json(FILE, orient="
            '"records", lines=True) and, of a list, jq with -c .[]'
        )
    return False


def json_columns(text: bytes) -> tuple[str, ...]:
    """Returns the columns of the lines' objects, and of objects within them."""
    found: dict[str, None] = {}
    complete = text if len(text) <= LOOKED_AT else text[: text.rfind(b"\n", 0, LOOKED_AT)]
    for sample in parsed_lines(complete.split(b"\n")):
        if isinstance(sample, dict):
            found |= dict.fromkeys(_names(sample))
    return tuple(found)


def _names(sample: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for key, value in sample.items():
        yield prefix + key
        if isinstance(value, dict):
            yield from _names(value, f"{prefix}{key}.")


def read_json(block: Block, layout: Layout) -> RawTable:
    """Parses a block of JSON lines; a column that a line lacks is null there."""
    assert isinstance(block.data, bytes)
    types = column_types(layout, layout.used_columns)
    lines = [line.removesuffix(b"\r") for line in block.data.removesuffix(b"\n").split(b"\n")]
    table, index, wrong = uniform_table(lines, types), np.arange(len(lines)), dict[int, str]()
    if table is None:
        table, index, wrong = canonical_table(parsed_lines(lines), types)
    for name in types.keys() - {*table.column_names, *dict(block.source.partition)}:
        table = table.append_column(name, pa.nulls(len(index), types[name].arrow))
    return RawTable(
        table, index + block.first_place, {block.first_place + row: ("", why) for row, why in wrong.items()}
    )


def uniform_table(lines: Sequence[bytes], types: Mapping[str, RawType]) -> pa.Table | None:
    """Parses lines to a row each, without columns that no line has; None if types differ or a line is malformed."""
    if max(map(len, lines)) > MAX_BYTES:
        return None
    arrow_types, seen = _types_of(lines[:PROBED_LINES], types)
    nested = _nested(arrow_types)
    # If the text parses, lines that start with { and end with } hold complete objects: within an object, the line after
    # a } would have to start with a comma. So as many rows as lines means one object per line.
    objects = pa.array(lines, pa.binary())
    if not (pc.all(pc.starts_with(objects, b"{")).as_py() and pc.all(pc.ends_with(objects, b"}")).as_py()):
        return None
    data = b"\n".join(lines)
    if nested is None or any(json.dumps(key).encode() in data for name in types for key in _keys_with_dots(name)):
        return None
    try:
        if not data.isascii():
            data.decode()
        table = pa.json.read_json(
            pa.BufferReader(data),
            pa.json.ReadOptions(use_threads=False, block_size=len(data) + 1),
            pa.json.ParseOptions(explicit_schema=nested, unexpected_field_behavior="ignore"),
        )
        if table.num_rows != len(lines):
            return None
        table = flattened(table)
        absent = {name for name in types if name not in seen and table[name].null_count == len(lines)}
        for line in lines[PROBED_LINES:] if absent else ():
            absent -= given_columns(json.loads(line), absent)
    except (ValueError, RecursionError):  # Arrow's are ValueErrors; Python refuses some of what Arrow reads
        return None
    return table.select([name for name in types if name not in absent])


def long_texts(table: pa.Table) -> dict[int, str]:
    """Returns what is wrong by row, in order, if the row has a text of more than `MAX_BYTES`."""
    found: dict[int, str] = {}
    for name in table.column_names:
        if pa.types.is_string(table[name].type) or pa.types.is_large_string(table[name].type):
            lengths = pc.binary_length(table[name]).fill_null(0).to_numpy()
            for row in np.flatnonzero(lengths > MAX_BYTES).tolist():
                found[row] = f"column {name}: its text has {lengths[row]:,} bytes, at most {MAX_BYTES:,} are allowed"
    return dict(sorted(found.items()))


def parsed_lines(lines: Iterable[bytes]) -> Iterator[Any]:
    """Yields the value of each line, or a `Malformed`."""
    for line in lines:
        if len(line) > MAX_BYTES:
            yield Malformed(f"it has {len(line):,} bytes, at most {MAX_BYTES:,} are allowed")
            continue
        try:
            yield json.loads(line)
        except (ValueError, RecursionError) as error:
            yield Malformed(f"not JSON, got {line[:60].decode(errors='replace')!r}: {error}")


def canonical_table(
    samples: Iterable[Any], types: Mapping[str, RawType]
) -> tuple[pa.Table, np.ndarray, dict[int, str]]:
    """Converts samples one by one.

    Returns the columns that at least one good sample has; the index of each row among the samples, int64 [R]; and what
    is wrong with the others, by index.
    """
    good, wrong, present = dict[int, dict[str, Any]](), dict[int, str](), set[str]()
    for index, sample in enumerate(samples):
        try:
            good[index] = canonical_values(sample, types)
        except ValueError as error:
            wrong[index] = str(error)
        else:
            present |= given_columns(sample, types)
    # If no sample is valid, missing columns are not reported as another error.
    columns = {
        name: to_array([sample[name] for sample in good.values()], kind)
        for name, kind in types.items()
        if name in present or not good
    }
    return pa.table(columns), np.array([*good], np.int64), wrong


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


def given_columns(sample: Mapping[str, Any], columns: Collection[str]) -> set[str]:
    return {name for name in columns if name in sample or value_of(sample, name, ABSENT) is not ABSENT}


def canonical_values(sample: Any, types: Mapping[str, RawType]) -> dict[str, Any]:
    """Returns the canonical values of a sample. Raises ValueError: it is no object, or a value is of a wrong type."""
    if isinstance(sample, Malformed):
        raise sample
    if not isinstance(sample, Mapping):
        raise UserError(f"must be a JSON object, got {abbreviated(sample)}")
    values = {}
    for name, kind in types.items():
        try:
            values[name] = kind.canonical_value(value_of(sample, name))
        except WrongValue:
            raise UserError(f"column {name}: {kind.rule}, got {abbreviated(value_of(sample, name))}") from None
    return values


def to_array(values: Sequence[Any], kind: RawType) -> pa.Array:
    """Converts canonical values; times are text if one of them is."""
    if kind.kind == "time" and any(isinstance(value, str) for value in values):
        texts = [repr(value) if isinstance(value, float) else value for value in values]
        return pa.array(texts, pa.string())
    return pa.array(values, kind.arrow)


def require_columns(wanted: Iterable[str], present: Iterable[str]) -> None:
    if missing := sorted(set(wanted) - set(present)):
        names = ", ".join(map(repr, missing))
        raise UserError(f"no sample has the column {names}; give null for a missing value")


def abbreviated(value: Any) -> str:
    """Returns the JSON of a value, shortened, or its type if it is nested too deeply."""
    try:
        text = json.dumps(value, default=str)
    except RecursionError:
        return f"a deeply nested {type(value).__name__}"
    return text if len(text) <= 60 else text[:60] + "..."


class Malformed(UserError):
    """Value of a line that is not JSON."""


def _types_of(lines: Sequence[bytes], types: Mapping[str, RawType]) -> tuple[dict[str, pa.DataType], set[str]]:
    """Returns the Arrow types of the first value of each column, and the columns that the lines have."""
    found: dict[str, pa.DataType] = {}
    seen: set[str] = set()
    for sample in parsed_lines(lines):
        if not isinstance(sample, dict):
            continue
        seen |= given_columns(sample, types)
        for name in types.keys() - found.keys():
            kind = types[name].arrow_of(value_of(sample, name))
            if kind is not None:
                found[name] = kind
        if len(found) == len(types):
            break
    return {name: found.get(name, kind.arrow) for name, kind in types.items()}, seen


def _nested(types: Mapping[str, pa.DataType]) -> pa.Schema | None:
    """Returns the schema whose leaves are columns with dots; None if a column is a leaf and a struct at once."""
    groups: dict[str, dict[str, pa.DataType]] = {}
    for name, kind in types.items():
        top, _, inner = name.partition(".")
        groups.setdefault(top, {})[inner] = kind
    fields = []
    for top, leaves in groups.items():
        if "" not in leaves:
            inner_schema = _nested(leaves)
            if inner_schema is None:
                return None
            fields.append((top, pa.struct([*inner_schema])))
        elif len(leaves) == 1:
            fields.append((top, leaves[""]))
        else:
            return None
    return pa.schema(fields)


def _keys_with_dots(column: str) -> Iterator[str]:
    """Yields keys with dots by which objects may have a column; Arrow does not look for such keys."""
    parts = column.split(".")
    for start in range(len(parts)):
        yield from (".".join(parts[start:stop]) for stop in range(start + 2, len(parts) + 1))
