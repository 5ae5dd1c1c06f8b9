"""Parsing of JSON samples to Arrow columns: all at once if their types are uniform, else one by one.

Both ways give the same result: the first is used only if every line is one object whose values have the types of the
first lines. If a key occurs twice in an object, its last value counts.
"""

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import isfinite
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.json

from cowrec.errors import UserError

from .raw.columns import PAIR
from .raw.layouts import RawField
from .raw.values import NUMBER_PATTERN, marker_numbers

ValueKind = Literal["number", "time", "label", "id", "ids", "weighted"]

CANONICAL = {
    "number": pa.float64(),
    "time": pa.float64(),
    "label": pa.string(),
    "id": pa.string(),
    "ids": pa.list_(pa.string()),
    "weighted": pa.list_(PAIR),
}
RULES = {
    "number": "must be a number or null",
    "time": "must be Unix seconds or ISO 8601 text",
    "label": "must be true, false, a number or a string",
    "id": "must be a string, a number, true, false or null",
    "ids": "must be a list of strings, numbers or nulls, its text joined by {0!r}, or null",
    "weighted": 'must be a list of {{"id": string or number, "weight": number}}, an object of weights by id, text'
    " (id{1}weight, by {0!r}) or null",
}
_KINDS: Mapping[str, ValueKind] = {
    "numeric": "number",
    "categorical": "id",
    "multi": "ids",
    "sequence": "ids",
    "weighted": "weighted",
}

MAX_BYTES = 1 << 20
"""Longest JSON sample, and longest text in a column of a table; parsing takes about nine times this memory."""
PROBED_LINES = 16
"""Number of lines whose values determine the column types."""

_INT64 = 2.0**63
_SURROGATE = re.compile("[\ud800-\udfff]")


@dataclass(frozen=True)
class ColumnType:
    """Type of a raw column: kind of its values, the separators of lists and weights given as text, and the texts that
    mean a missing value.
    """

    kind: ValueKind
    separator: str = ""
    weight_separator: str = ""
    null: tuple[str, ...] = ()

    @staticmethod
    def of(field: RawField) -> "ColumnType":
        """Returns the type of a raw field's column."""
        return ColumnType(_KINDS[field.kind], field.separator, field.weight_separator, field.null)

    @staticmethod
    def of_all(types: Sequence["ColumnType"]) -> "ColumnType":
        """Returns the type of a column of several fields: its values are any of theirs; `SampleColumns` tells which."""
        null = tuple(text for text in types[0].null if all(text in each.null for each in types))
        alike = len({replace(each, null=()) for each in types}) == 1
        return replace(types[0], null=null) if alike else ColumnType("id", null=null)

    @cached_property
    def null_numbers(self) -> list[float]:
        """The numbers that mean a missing value."""
        return marker_numbers(self.null)

    @property
    def rule(self) -> str:
        return RULES[self.kind].format(self.separator, self.weight_separator)


def uniform_table(lines: Sequence[bytes], columns: Mapping[str, ColumnType]) -> pa.Table | None:
    """Parses lines of uniform types, one table row per line; None if types differ or a line is malformed.

    Columns that no line has are left out.
    """
    if max(map(len, lines)) > MAX_BYTES:
        return None
    types, seen = _types_of(lines[:PROBED_LINES], columns)
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
            pa.json.ParseOptions(explicit_schema=pa.schema(list(types.items())), unexpected_field_behavior="ignore"),
        )
        if table.num_rows != len(lines):
            return None
        absent = {name for name in columns if name not in seen and table[name].null_count == len(lines)}
        for line in lines[PROBED_LINES:] if absent else ():
            absent -= json.loads(line).keys()
    except (ValueError, RecursionError):  # Arrow's are ValueErrors; Python refuses some of what Arrow reads
        return None
    return table.select([name for name in columns if name not in absent])


def long_texts(table: pa.Table) -> dict[int, str]:
    """Returns what is wrong with rows of a table that have a text of more than `MAX_BYTES`, by row, in order."""
    found: dict[int, str] = {}
    for name in table.column_names:
        if pa.types.is_string(table[name].type) or pa.types.is_large_string(table[name].type):
            lengths = pc.binary_length(table[name]).fill_null(0).to_numpy()
            for row in np.flatnonzero(lengths > MAX_BYTES).tolist():
                found[row] = f"column {name}: its text has {lengths[row]:,} bytes, at most {MAX_BYTES:,} are allowed"
    return dict(sorted(found.items()))


def parse_lines(lines: Iterable[bytes]) -> Iterator[Any]:
    """Yields the value of each line, or a `Malformed`."""
    for line in lines:
        if len(line) > MAX_BYTES:
            yield Malformed(f"it has {len(line):,} bytes, at most {MAX_BYTES:,} are allowed")
            continue
        try:
            yield json.loads(line)
        except (ValueError, RecursionError) as error:
            yield Malformed(f"not JSON: {error}")


def canonical_values(sample: Any, columns: Mapping[str, ColumnType]) -> dict[str, Any]:
    """Converts a sample's values to floats (or text for times), strings, lists of strings or of {id, weight}, or None.

    Raises:
        ValueError: the sample is not an object, or a value has the wrong type for its column.
    """
    if isinstance(sample, Malformed):
        raise sample
    if not isinstance(sample, Mapping):
        raise UserError(f"must be a JSON object, got {abbreviated(sample)}")
    values = {}
    for name, column in columns.items():
        value = sample.get(name)
        try:
            values[name] = None if value is None else CANONICAL_VALUE[column.kind](value, column)
        except _WrongValue:
            raise UserError(f"column {name}: {column.rule}, got {abbreviated(value)}") from None
    return values


def to_array(values: Sequence[Any], column: ColumnType) -> pa.Array:
    """Converts canonical values to an Arrow array."""
    if column.kind == "time" and any(isinstance(value, str) for value in values):
        texts = [repr(value) if isinstance(value, float) else value for value in values]
        return pa.array(texts, pa.string())
    return pa.array(values, CANONICAL[column.kind])


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


class _WrongValue(UserError):
    pass


def _number(value: Any, column: ColumnType) -> float | None:
    if isinstance(value, str) and (not value or value in column.null):
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        raise _WrongValue
    if isinstance(value, str) and not NUMBER_PATTERN.fullmatch(value):
        raise _WrongValue
    try:
        number = float(value)
    except OverflowError:
        return float("inf")
    return None if number in column.null_numbers else number


def _time(value: Any, column: ColumnType) -> float | str | None:
    return _text(value, column) if isinstance(value, str) else _number(value, column)


def _text(value: Any, _: ColumnType) -> str:
    if isinstance(value, str) and not _SURROGATE.search(value):
        return value
    if not isinstance(value, int) or isinstance(value, bool):
        raise _WrongValue
    return str(value)


def _label(value: Any, column: ColumnType) -> str | None:
    if isinstance(value, bool):
        return "true" if value else "false"
    if value != value:  # NaN, a missing label in Parquet, too
        return None
    return repr(value) if isinstance(value, float) else _text(value, column)


def _id(value: Any, column: ColumnType) -> str:
    """Returns the id that the same value has in Parquet; of a missing value it is empty."""
    text = _id_text(value, column)
    return "" if text in column.null else text


def _id_text(value: Any, column: ColumnType) -> str:
    if isinstance(value, bool):
        text = "true" if value else "false"
    elif _is_fraction(value):
        (text,) = _fractions([value]).values()
    elif isinstance(value, float) and isfinite(value):
        text = str(int(value))
    else:
        text = _text(value, column)
    return text


def _id_texts(values: Sequence[Any], column: ColumnType) -> list[str]:
    """Converts values as `_id_text` does, but all fractions at once, which is much faster than one by one."""
    texts = _fractions(fractions) if (fractions := [each for each in values if _is_fraction(each)]) else {}
    return [_id_text(texts.get(each, each) if isinstance(each, float) else each, column) for each in values]


def _is_fraction(value: Any) -> bool:
    """Returns whether a value is a finite float that has no decimal digits as an int64."""
    return isinstance(value, float) and isfinite(value) and not (value.is_integer() and abs(value) < _INT64)


def _fractions(values: list[float]) -> dict[float, str]:
    """Returns the text of floats as Arrow writes it."""
    return dict(zip(values, pa.array(values).cast(pa.string()).to_pylist(), strict=True))


def _texts(value: Any, column: ColumnType) -> list[str | None]:
    """Items as text, markers of missing values too, as those of a history depend on what goes along with it."""
    if isinstance(value, str) and column.separator:
        return list(_text(value, column).split(column.separator))
    if not isinstance(value, list):
        raise _WrongValue
    ids = iter(_id_texts([each for each in value if each is not None], column))
    return [None if each is None else next(ids) for each in value]


def _pairs(value: Any, column: ColumnType) -> list[dict[str, Any]]:
    if isinstance(value, str) and column.separator and column.weight_separator:
        return [_pair_of_text(each, column) for each in _text(value, column).split(column.separator)]
    if isinstance(value, dict) and value.keys() != {"id", "weight"}:  # which would be a pair outside of a list
        value = [{"id": name, "weight": weight} for name, weight in value.items()]
    if not isinstance(value, list) or not all(isinstance(each, dict) for each in value):
        raise _WrongValue
    if any(isinstance(each.get("weight"), str) for each in value):
        raise _WrongValue
    ids = ("" if each in column.null else each for each in _id_texts([each.get("id") for each in value], column))
    return [{"id": name, "weight": _weight(each.get("weight"))} for name, each in zip(ids, value, strict=True)]


def _weight(value: Any) -> float | None:
    return _number(value, _UNMARKED)


def _pair_of_text(text: str, column: ColumnType) -> dict[str, Any]:
    name, separator, weight = text.rpartition(column.weight_separator)
    if not text or text in column.null:
        return {"id": "", "weight": 1.0}
    if not separator or not NUMBER_PATTERN.fullmatch(weight):
        raise _WrongValue
    return {"id": _id(name, column), "weight": float(weight)}


_UNMARKED = ColumnType("number")
CANONICAL_VALUE = {"number": _number, "time": _time, "label": _label, "id": _id, "ids": _texts, "weighted": _pairs}


def _types_of(lines: Sequence[bytes], columns: Mapping[str, ColumnType]) -> tuple[dict[str, pa.DataType], set[str]]:
    """Returns Arrow types from the first value of each column in these lines, and the columns these lines have."""
    types: dict[str, pa.DataType] = {}
    seen: set[str] = set()
    for sample in parse_lines(lines):
        if not isinstance(sample, dict):
            continue
        seen |= sample.keys() & columns.keys()
        for name in columns.keys() - types.keys():
            kind = _type_of(sample.get(name), columns[name])
            if kind is not None:
                types[name] = kind
        if len(types) == len(columns):
            break
    return {name: types.get(name, CANONICAL[column.kind]) for name, column in columns.items()}, seen


def _type_of(value: Any, column: ColumnType) -> pa.DataType | None:
    if value is None or value == []:
        return None
    if isinstance(value, str):
        joined = column.kind in ("ids", "weighted") and not column.separator
        return CANONICAL[column.kind] if joined else pa.string()
    if column.kind == "label":
        return pa.bool_() if isinstance(value, bool) else pa.int64() if isinstance(value, int) else pa.float64()
    if column.kind == "id" and isinstance(value, int):
        return pa.int64()
    if column.kind not in ("ids", "weighted") or not isinstance(value, list):
        return CANONICAL[column.kind]  # of a wrong value too, so that Arrow refuses it alone
    first = value[0].get("id") if isinstance(value[0], dict) else value[0]
    item = pa.int64() if isinstance(first, int) else pa.string()
    return pa.list_(item if column.kind == "ids" else pa.struct([("id", item), ("weight", pa.float64())]))
