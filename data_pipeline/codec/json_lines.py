"""Samples as JSON objects, one each, to Arrow columns: all at once where they are alike, else one after the other.

The two ways give the same: the first is used only where every line is one object whose values have the types that the
first lines have. A key that occurs twice in an object counts with its last value.
"""

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.json

from cowrec.data_pipeline.raw.numbers import NUMBER

UseKind = Literal["number", "time", "id", "ids", "weighted"]

PAIR = pa.struct([("id", pa.string()), ("weight", pa.float64())])
CANONICAL = {
    "number": pa.float64(),
    "time": pa.float64(),
    "id": pa.string(),
    "ids": pa.list_(pa.string()),
    "weighted": pa.list_(PAIR),
}
RULES = {
    "number": "must be a number or null",
    "time": "must be Unix seconds or ISO 8601 text",
    "id": "must be a string, an integer or null",
    "ids": "must be a list of strings or integers, its text joined by {0!r}, or null",
    "weighted": 'must be a list of {{"id": string or integer, "weight": number}}, its text (id{1}weight, by {0!r})'
    " or null",
}
LOOKED_AT = 16
"""Lines whose values' types decide how all are read at once."""

_NUMBER = re.compile(NUMBER)
_SURROGATE = re.compile("[\ud800-\udfff]")


@dataclass(frozen=True)
class Use:
    """What a raw column holds: a number, a time, an id, a list of ids or one of {id, weight}; and its separators."""

    kind: UseKind
    separator: str = ""
    weight_separator: str = ""

    @property
    def rule(self) -> str:
        return RULES[self.kind].format(self.separator, self.weight_separator)


def alike_table(lines: Sequence[bytes], uses: Mapping[str, Use]) -> pa.Table | None:
    """Columns of lines that are alike, one row a line; None where they are not, or where one is malformed.

    A column that no line has is left out.
    """
    types, seen = _types_of(lines[:LOOKED_AT], uses)
    # Lines that begin with { and end with } hold whole objects if the text can be read at all: inside of an object,
    # what follows a line's end would have to begin with a comma. So as many rows as lines means one object on each.
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
    except (pa.ArrowInvalid, UnicodeDecodeError):
        return None
    if table.num_rows != len(lines):
        return None
    absent = {name for name in uses if name not in seen and table[name].null_count == len(lines)}
    if absent:
        for line in lines[LOOKED_AT:]:
            absent -= json.loads(line).keys()
    return table.select([name for name in uses if name not in absent])


def parsed_lines(lines: Iterable[bytes]) -> Iterator[Any]:
    """Of each line its value, or a `Malformed`."""
    for line in lines:
        try:
            yield json.loads(line)
        except (ValueError, RecursionError) as error:
            yield Malformed(f"not JSON: {error}")


def canonical_values(sample: Any, uses: Mapping[str, Use]) -> dict[str, Any]:
    """A sample's values: floats (of times their text, too), strings, lists of strings, lists of {id, weight}; or None.

    Raises:
        ValueError: one that a column of its use cannot hold, or the sample is no object.
    """
    if isinstance(sample, Malformed):
        raise sample
    if not isinstance(sample, Mapping):
        raise ValueError(f"must be a JSON object, got {_shown(sample)}")
    values = {}
    for name, use in uses.items():
        value = sample.get(name)
        try:
            values[name] = None if value is None else _CANONICAL_VALUE[use.kind](value, use)
        except _WrongValue:
            raise ValueError(f"column {name}: {use.rule}, got {_shown(value)}") from None
    return values


def column_of(values: Sequence[Any], use: Use) -> pa.Array:
    """An Arrow array of canonical values."""
    if use.kind == "time" and any(isinstance(value, str) for value in values):
        texts = [repr(value) if isinstance(value, float) else value for value in values]
        return pa.array(texts, pa.string())
    return pa.array(values, CANONICAL[use.kind])


class Malformed(ValueError):
    """A line that is not JSON."""


class _WrongValue(Exception):
    pass


def _number(value: Any, _: Use) -> float | None:
    if isinstance(value, str) and (not value or _NUMBER.fullmatch(value)):
        return float(value) if value else None
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise _WrongValue
    try:
        return float(value)
    except OverflowError:
        return float("inf")


def _time(value: Any, use: Use) -> float | str | None:
    return _text(value, use) if isinstance(value, str) else _number(value, use)


def _text(value: Any, _: Use) -> str:
    if isinstance(value, str) and not _SURROGATE.search(value):
        return value
    if not isinstance(value, int) or isinstance(value, bool):
        raise _WrongValue
    return str(value)


def _texts(value: Any, use: Use) -> list[str]:
    if isinstance(value, str):
        return _text(value, use).split(use.separator)
    if not isinstance(value, list):
        raise _WrongValue
    return [_text(each, use) for each in value]


def _pairs(value: Any, use: Use) -> list[dict[str, Any]]:
    if isinstance(value, str):
        return [_pair_of_text(each, use) for each in _text(value, use).split(use.separator)]
    if not isinstance(value, list) or not all(isinstance(each, dict) for each in value):
        raise _WrongValue
    if any(isinstance(each.get("weight"), str) for each in value):
        raise _WrongValue
    return [{"id": _text(each.get("id"), use), "weight": _number(each.get("weight"), use)} for each in value]


def _pair_of_text(text: str, use: Use) -> dict[str, Any]:
    name, separator, weight = text.rpartition(use.weight_separator)
    if not text:
        return {"id": "", "weight": 1.0}
    if not separator or not _NUMBER.fullmatch(weight):
        raise _WrongValue
    return {"id": name, "weight": float(weight)}


_CANONICAL_VALUE = {"number": _number, "time": _time, "id": _text, "ids": _texts, "weighted": _pairs}


def _types_of(lines: Sequence[bytes], uses: Mapping[str, Use]) -> tuple[dict[str, pa.DataType], set[str]]:
    """Arrow types by the first value that each column has in these lines, and which columns these lines have."""
    types: dict[str, pa.DataType] = {}
    seen: set[str] = set()
    for sample in parsed_lines(lines):
        if not isinstance(sample, dict):
            continue
        seen |= sample.keys() & uses.keys()
        for name in uses.keys() - types.keys():
            kind = _type_of(sample.get(name), uses[name])
            if kind is not None:
                types[name] = kind
        if len(types) == len(uses):
            break
    return {name: types.get(name, CANONICAL[use.kind]) for name, use in uses.items()}, seen


def _type_of(value: Any, use: Use) -> pa.DataType | None:
    if value is None or value == []:
        return None
    if isinstance(value, str):
        return pa.string()
    if use.kind == "id" and isinstance(value, int):
        return pa.int64()
    if not isinstance(value, list):
        return CANONICAL[use.kind]
    first = value[0].get("id") if isinstance(value[0], dict) else value[0]
    of = pa.int64() if isinstance(first, int) else pa.string()
    return pa.list_(of if use.kind == "ids" else pa.struct([("id", of), ("weight", pa.float64())]))


def _shown(value: Any) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) <= 60 else text[:60] + "..."
