"""Schema files: TOML that describes the columns of raw files."""

import dataclasses
import os
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cowrec.data_pipeline.counts import parse_count
from cowrec.data_pipeline.dataset.schema import LABEL

from .labels import RawLabel
from .layouts import FIELD_NAME, NAME_RULE, Layout, RawField

_FIELD_TYPES = {
    each.name: {"null": tuple, "min_count": int, "max_ids": int}.get(each.name, str)
    for each in dataclasses.fields(RawField)
}
"""Types of the keys of a field in TOML; a tuple stands for a list of strings or numbers."""
_LABEL_TYPES = {"name": str, "column": str, "positive": tuple, "threshold": float}
_TYPES = {"delimiter": str, "quote": str, "header": bool, "columns": list, "label": str, "positive": tuple,
          "threshold": float, "labels": list, "time": str, "weight": str, "keep": tuple, "fields": list,
          "null": tuple}  # fmt: skip


def load_schema_file(path: str | os.PathLike[str]) -> Layout:
    """Reads a schema file: TOML that describes the columns of text, Parquet or Arrow files.

        delimiter = ","                  # default; of several characters where quote = ""
        quote = '"'                      # default; "" if quotes have no meaning
        header = true                    # default
        columns = ["label", "age"]       # instead of a header
        label = "label"                  # default
        positive = ["yes", "4"]          # values of the label that are positive, all others are negative; default: the
                                         # label is 0 or 1, 0.0 or 1.0, false or true
        threshold = 4                    # instead of positive: numbers from this on are positive
        labels = ["click", {name = "buy", column = "bought", positive = ["yes"]}]  # instead of label: several tasks
        weight = "weight"                # column of the sample's weight; default: all samples count alike
        keep = ["user id"]               # columns that predictions show
        time = "seen at"                 # column of the sample's time; default: none
        null = ["NA", "\\N"]             # texts that mean a missing value in every field; default: the empty value only
        [[fields]]
        name = "genres"
        kind = "multi"                   # numeric | categorical | multi | weighted
        column = "movie genres"          # by default the name
        separator = "|"                  # multi and weighted, where the column is text
        weight_separator = ":"           # weighted, where the column is text
        pooling = "mean"                 # multi: mean (default) or sum
        null = ["-1"]                    # for this field instead of the file's
        transform = "log"                # numeric: quantile (default), minmax, log, buckets or none
        min_count = 5                    # ids: seen less often than this in training, they share one row
        max_ids = "64K"                  # ids: only so many, the most frequent ones, have their own row

    An empty value is a missing one. Of several labels, a missing one is unknown; a sample without its only label is a
    bad row. A time is Unix seconds (rounded down) or ISO 8601 text ("2014-10-21T07:00:00Z", or
    a date alone; UTC unless it names a zone); a sample without a time is a bad row.

    Raises:
        ValueError: a problem in the file; the message names the file, the key and the remedy.
    """
    try:
        content = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"schema file {path} does not exist") from None
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ValueError(f"schema file {path} is not valid TOML: {error}") from None
    try:
        return _layout_of(content)
    except ValueError as error:
        raise ValueError(f"schema file {path}: {error}") from None


def _layout_of(content: dict[str, Any]) -> Layout:
    _check_types("", content, _TYPES)
    header, columns = content.get("header", True), content.get("columns", [])
    if header == bool(columns):
        raise ValueError("give `columns` if, and only if, header = false")
    fields = []
    for number, field in enumerate(content.get("fields", []), start=1):
        if not isinstance(field, dict) or not {"name", "kind"} <= field.keys():
            raise ValueError(f"fields entry {number} needs a name and a kind")
        where = f"fields entry {number}: "
        for key in ("min_count", "max_ids"):
            if isinstance(field.get(key), str):
                field[key] = parse_count(field[key], where + key)
        _check_types(where, field, _FIELD_TYPES)
        fields.append(RawField(**_with_texts({"null": content.get("null", ()), **field})))
    layout = Layout(
        "tabular", content.get("delimiter", ","), content.get("quote", '"'), header, tuple(columns),
        _labels_of(content), tuple(fields), content.get("time", ""), weight=content.get("weight", ""),
        keep=tuple(content.get("keep", ())),
    )  # fmt: skip
    for column in [label.column for label in layout.labels if label.column in [field.column for field in fields]]:
        raise ValueError(f"column {column!r} is the label, so it cannot be a field as well")
    return layout


def _labels_of(content: Mapping[str, Any]) -> tuple[RawLabel, ...]:
    """Returns the labels that `label` or `labels` describe."""
    null = content.get("null", ())
    mapping = {key: content[key] for key in ("positive", "threshold") if key in content}
    if "labels" not in content:
        return (RawLabel(**_with_texts({"column": content.get("label", LABEL), "null": null, **mapping})),)
    if mapping or "label" in content:
        raise ValueError("labels replaces label; give positive and threshold in its entries")
    labels = []
    for number, entry in enumerate(content["labels"], start=1):
        keys = {"name": entry} if isinstance(entry, str) else entry
        if not isinstance(keys, dict) or "name" not in keys:
            raise ValueError(f"labels entry {number} must be a column or have a name, got {entry!r}")
        _check_types(f"labels entry {number}: ", keys, _LABEL_TYPES)
        if not FIELD_NAME.fullmatch(keys["name"]):
            raise ValueError(f"label {keys['name']!r}: {NAME_RULE}")
        labels.append(RawLabel(**_with_texts({"null": null, **keys})))
    return tuple(labels)


def _with_texts(keys: Mapping[str, Any]) -> dict[str, Any]:
    """Returns keys whose lists hold text, as values in files are."""
    return {key: tuple(map(str, value)) if isinstance(value, (list, tuple)) else value for key, value in keys.items()}


def _check_types(where: str, content: Mapping[str, Any], types: Mapping[str, type]) -> None:
    for key, value in content.items():
        if key not in types:
            raise ValueError(f"{where}unknown key {key!r}; the keys are {', '.join(types)}")
        if types[key] is tuple:
            if not isinstance(value, list) or not all(type(each) in (str, int, float) for each in value):
                raise ValueError(f"{where}{key} must be a list of strings or numbers, got {value!r}")
        elif types[key] is float and type(value) is int:
            continue
        elif type(value) is not types[key]:
            raise ValueError(f"{where}{key} must be of type {types[key].__name__}, got {value!r}")
