"""Schema files: TOML that describes the layout of raw files."""

import dataclasses
import os
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cowrec.errors import UserError
from cowrec.names import parse_count

from ..dataset.schema import LABEL
from .layouts import Layout, RawField, RawLabel
from .times import RawTime

_FIELD_TYPES = {field.name: str if field.default is dataclasses.MISSING else type(field.default)
                for field in dataclasses.fields(RawField)}  # fmt: skip
"""Types of the keys of a field in TOML; a tuple stands for a list of strings or numbers."""
_LABEL_TYPES = {"name": str, "column": str, "positive": tuple, "threshold": float, "kind": str, "count": str, "of": str}
_TYPES = {"delimiter": str, "quote": str, "header": bool, "columns": list, "label": object, "positive": tuple,
          "threshold": float, "labels": list, "time": object, "weight": str, "keep": tuple, "fields": list,
          "null": tuple, "encoding": str, "decimal": str}  # fmt: skip


def load_schema_file(path: str | os.PathLike[str]) -> Layout:
    """Reads a schema file: TOML that describes the columns of text, JSON lines, Parquet or Arrow files.

    docs/schema_file.toml shows all keys. Raises ValueError if a problem is in the file; the message names the key.
    """
    try:
        content = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"schema file {path} does not exist") from None
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise UserError(f"schema file {path} is not valid TOML: {error}") from None
    try:
        return _layout_of(content)
    except ValueError as error:
        raise UserError(f"schema file {path}: {error}") from None


def unescaped(delimiter: str) -> str:
    """Returns a delimiter in which \\t and \\x01 became the characters that they stand for."""
    text = re.sub(r"\\x([0-9a-fA-F]{2})", lambda found: chr(int(found[1], 16)), delimiter)
    return text.replace("\\t", "\t")


def _layout_of(content: dict[str, Any]) -> Layout:
    _check_types("", content, _TYPES)
    header, columns = content.get("header", True), content.get("columns", [])
    if header == bool(columns):
        raise UserError("give `columns` if, and only if, header = false")
    fields = []
    for number, field in enumerate(content.get("fields", []), start=1):
        if not isinstance(field, dict) or not {"name", "kind"} <= field.keys():
            raise UserError(f"fields entry {number} needs a name and a kind")
        where = f"fields entry {number}: "
        for key in ("min_count", "max_ids"):
            if isinstance(field.get(key), str):
                field[key] = parse_count(field[key], where + key)
        _check_types(where, field, _FIELD_TYPES)
        fields.append(RawField(**_with_texts({"null": content.get("null", ()), **field})))
    layout = Layout(
        "tabular", unescaped(content.get("delimiter", ",")), content.get("quote", '"'), header, tuple(columns),
        _labels_of(content), tuple(fields), _time_of(content.get("time")), weight=content.get("weight", ""),
        keep=tuple(content.get("keep", ())), encoding=content.get("encoding", ""), decimal=content.get("decimal", "."),
    )  # fmt: skip
    for column in [name for name in layout.label_columns if name in [field.column for field in fields]]:
        raise UserError(f"column {column!r} is the label, so it cannot be a field as well")
    return layout


def _time_of(given: Any) -> RawTime | None:
    if not given:
        return None
    if isinstance(given, str):
        return RawTime((given,))
    if not isinstance(given, dict) or ("column" in given) == ("columns" in given):
        raise UserError(f"time must be a column, or a table with column or columns, got {given!r}")
    _check_types("time: ", given, {"column": str, "columns": list, "unit": str, "format": str, "zone": str})
    columns = [given["column"]] if "column" in given else given["columns"]
    if not all(isinstance(column, str) for column in columns):
        raise UserError(f"time: columns must be names, got {columns!r}")
    return RawTime(tuple(columns), given.get("unit", ""), given.get("format", ""), given.get("zone", ""))


def _labels_of(content: Mapping[str, Any]) -> tuple[RawLabel, ...]:
    null = content.get("null", ())
    mapping = {key: content[key] for key in ("positive", "threshold") if key in content}
    if "labels" not in content:
        given = content.get("label", LABEL)
        keys = {"column": given} if isinstance(given, str) else given
        if not isinstance(keys, dict) or not {"column", "count"} & keys.keys():
            raise UserError(f"label must be a column, or a table with column or with count and of, got {given!r}")
        _check_types("label: ", keys, {key: kind for key, kind in _LABEL_TYPES.items() if key != "name"})
        return (RawLabel(**_with_texts({"null": null, **mapping, **keys})),)
    if mapping or "label" in content:
        raise UserError("labels replaces label; give positive and threshold in its entries")
    labels = []
    for number, entry in enumerate(content["labels"], start=1):
        keys = {"name": entry} if isinstance(entry, str) else entry
        if not isinstance(keys, dict) or "name" not in keys:
            raise UserError(f"labels entry {number} must be a column or have a name, got {entry!r}")
        _check_types(f"labels entry {number}: ", keys, _LABEL_TYPES)
        labels.append(RawLabel(**_with_texts({"null": null, **keys})))
    return tuple(labels)


def _with_texts(keys: Mapping[str, Any]) -> dict[str, Any]:
    return {key: tuple(map(str, value)) if isinstance(value, (list, tuple)) else value for key, value in keys.items()}


def _check_types(where: str, content: Mapping[str, Any], types: Mapping[str, type]) -> None:
    for key, value in content.items():
        if key not in types:
            raise UserError(f"{where}unknown key {key!r}; the keys are {', '.join(types)}")
        if types[key] is tuple:
            if not isinstance(value, list) or not all(type(item) in (str, int, float) for item in value):
                raise UserError(f"{where}{key} must be a list of strings or numbers, got {value!r}")
        elif types[key] is float and type(value) is int:
            continue
        elif types[key] is not object and type(value) is not types[key]:
            raise UserError(f"{where}{key} must be of type {types[key].__name__}, got {value!r}")
