"""Parsing of JSON samples to Arrow columns: all at once if their types are uniform, else one by one.

Both ways give the same result: the first is used only if every line is one object whose values have the types of the
first lines. If a key occurs twice in an object, its last value counts.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.json

from cowrec.errors import UserError

from .raw.columns import WrongValue
from .raw.kinds import RawType

MAX_BYTES = 1 << 20
"""Longest JSON sample, and longest text in a column of a table; parsing takes about nine times this memory."""
PROBED_LINES = 16
"""Number of lines whose values determine the column types."""


def uniform_table(lines: Sequence[bytes], types: Mapping[str, RawType]) -> pa.Table | None:
    """Parses lines of uniform types, one table row per line; None if types differ or a line is malformed.

    Columns that no line has are left out.
    """
    if max(map(len, lines)) > MAX_BYTES:
        return None
    arrow_types, seen = _types_of(lines[:PROBED_LINES], types)
    # If the text parses, lines that start with { and end with } hold complete objects: within an object, the line after
    # a } would have to start with a comma. So as many rows as lines means one object per line.
    objects = pa.array(lines, pa.binary())
    if not (pc.all(pc.starts_with(objects, b"{")).as_py() and pc.all(pc.ends_with(objects, b"}")).as_py()):
        return None
    data = b"\n".join(lines)
    try:
        if not data.isascii():
            data.decode()
        table = pa.json.read_json(
            pa.BufferReader(data),
            pa.json.ReadOptions(use_threads=False, block_size=len(data) + 1),
            pa.json.ParseOptions(
                explicit_schema=pa.schema(list(arrow_types.items())), unexpected_field_behavior="ignore"
            ),
        )
        if table.num_rows != len(lines):
            return None
        absent = {name for name in types if name not in seen and table[name].null_count == len(lines)}
        for line in lines[PROBED_LINES:] if absent else ():
            absent -= json.loads(line).keys()
    except (ValueError, RecursionError):  # Arrow's are ValueErrors; Python refuses some of what Arrow reads
        return None
    return table.select([name for name in types if name not in absent])


def long_texts(table: pa.Table) -> dict[int, str]:
    """Returns what is wrong with rows of a table that have a text of more than `MAX_BYTES`, by row, in order."""
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
            yield Malformed(f"not JSON: {error}")


def canonical_values(sample: Any, types: Mapping[str, RawType]) -> dict[str, Any]:
    """Converts a sample's values to floats (or text for times), strings, lists of strings or of {id, weight}, or None.

    Raises:
        ValueError: the sample is not an object, or a value has the wrong type for its column.
    """
    if isinstance(sample, Malformed):
        raise sample
    if not isinstance(sample, Mapping):
        raise UserError(f"must be a JSON object, got {abbreviated(sample)}")
    values = {}
    for name, kind in types.items():
        try:
            values[name] = kind.canonical_value(sample.get(name))
        except WrongValue:
            raise UserError(f"column {name}: {kind.rule}, got {abbreviated(sample[name])}") from None
    return values


def to_array(values: Sequence[Any], kind: RawType) -> pa.Array:
    """Converts canonical values to an Arrow array."""
    if kind.kind == "time" and any(isinstance(value, str) for value in values):
        texts = [repr(value) if isinstance(value, float) else value for value in values]
        return pa.array(texts, pa.string())
    return pa.array(values, kind.arrow)


def require_columns(wanted: Iterable[str], present: Iterable[str]) -> None:
    """Raises ValueError if columns are missing."""
    missing = sorted(set(wanted) - set(present))
    if missing:
        names = ", ".join(map(repr, missing))
        raise UserError(f"no sample has the column {names}; give null for a missing value")


def abbreviated(value: Any) -> str:
    """Returns the JSON of a value, shortened; only its type if it is nested too deeply for Python."""
    try:
        text = json.dumps(value, default=str)
    except RecursionError:
        return f"a deeply nested {type(value).__name__}"
    return text if len(text) <= 60 else text[:60] + "..."


class Malformed(UserError):
    """Value of a line that is not JSON."""


def _types_of(lines: Sequence[bytes], types: Mapping[str, RawType]) -> tuple[dict[str, pa.DataType], set[str]]:
    """Returns Arrow types from the first value of each column in these lines, and the columns these lines have."""
    found: dict[str, pa.DataType] = {}
    seen: set[str] = set()
    for sample in parsed_lines(lines):
        if not isinstance(sample, dict):
            continue
        seen |= sample.keys() & types.keys()
        for name in types.keys() - found.keys():
            kind = types[name].arrow_of(sample.get(name))
            if kind is not None:
                found[name] = kind
        if len(found) == len(types):
            break
    return {name: found.get(name, kind.arrow) for name, kind in types.items()}, seen
