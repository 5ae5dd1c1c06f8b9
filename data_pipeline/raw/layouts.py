"""Layouts of raw files: their columns in order, and the field that each one holds."""

import csv
import dataclasses
import os
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from cowrec.data_pipeline.dataset.schema import LABEL, TIME, WEIGHT_SUFFIX, Pooling

RawKind = Literal["numeric", "categorical", "multi", "weighted"]
LayoutName = Literal["criteo", "avazu", "csv"]
TimeFormat = Literal["timestamp", "hour"]

# Names become Parquet columns, file names and PyTorch module names.
FIELD_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_-]*")


@dataclass(frozen=True)
class RawField:
    """One feature of a raw file.

    Attributes:
        name: name of the feature.
        kind: "numeric" (one number), "categorical" (one id), "multi" (ids joined by `separator`) or "weighted" (the
            same, each id followed by `weight_separator` and its weight).
        column: raw column; the name by default.
        separator, weight_separator: for list kinds only.
        pooling: "sum" or "mean", for list kinds only; "mean" by default for multi, always "sum" for weighted.
    """

    name: str
    kind: RawKind
    column: str = ""
    separator: str = ""
    weight_separator: str = ""
    pooling: Pooling | Literal[""] = ""

    def __post_init__(self) -> None:
        where = f"field {self.name!r}"
        if not FIELD_NAME.fullmatch(self.name):
            raise ValueError(f"{where}: a name is made of letters, digits, _ and -; give the raw name as `column`")
        if self.name == LABEL or self.name.endswith(WEIGHT_SUFFIX):
            raise ValueError(f"{where}: this name is taken; choose another, and give the raw name as `column`")
        if self.kind not in get_args(RawKind):
            raise ValueError(f"{where}: kind must be one of {', '.join(get_args(RawKind))}, got {self.kind!r}")
        is_list, weighted = self.kind in ("multi", "weighted"), self.kind == "weighted"
        _check_separator(where, "separator", self.separator, is_list)
        _check_separator(where, "weight_separator", self.weight_separator, weighted)
        if weighted and self.separator == self.weight_separator:
            raise ValueError(f"{where}: separator and weight_separator must differ, both are {self.separator!r}")
        if self.pooling not in ("", "sum", "mean") or (weighted and self.pooling == "mean"):
            raise ValueError(f"{where}: pooling must be sum or mean (weighted: sum), got {self.pooling!r}")
        if self.pooling and not is_list:
            raise ValueError(f"{where}: pooling is for the kinds multi and weighted")
        object.__setattr__(self, "column", self.column or self.name)
        if is_list and not self.pooling:
            object.__setattr__(self, "pooling", "mean" if self.kind == "multi" else "sum")


def _check_separator(where: str, name: str, value: str, wanted: bool) -> None:
    if bool(value) != wanted:
        raise ValueError(f"{where}: {name} {'must be given' if wanted else 'is for list kinds only'}")


@dataclass(frozen=True)
class Layout:
    """A raw text format.

    Attributes:
        name: "criteo", "avazu" or "csv".
        delimiter: one character.
        quote: one character, or empty if quotes have no meaning.
        header: True if the first line names the columns.
        columns: all raw columns in order; empty if they are read from the header.
        label: column of the label.
        fields: the features; other columns are ignored.
        time: column of the sample's time, which may be a field as well; empty if there is none.
        time_format: "timestamp" (Unix seconds, with or without decimals, or ISO 8601) or "hour" (YYMMDDHH, UTC).
    """

    name: str
    delimiter: str
    quote: str
    header: bool
    columns: tuple[str, ...]
    label: str
    fields: tuple[RawField, ...]
    time: str = ""
    time_format: TimeFormat = "timestamp"

    def __post_init__(self) -> None:
        if len(self.delimiter) != 1 or not self.delimiter.isascii() or self.delimiter in "\r\n":
            raise ValueError(f"delimiter must be one ASCII character, got {self.delimiter!r}")
        if len(self.quote) > 1 or not self.quote.isascii() or self.quote == self.delimiter:
            raise ValueError(f"quote must be one ASCII character or empty, got {self.quote!r}")
        if not self.fields:
            raise ValueError("a layout needs at least one field besides the label")
        names = [field.name for field in self.fields]
        if len(set(names)) < len(names):
            raise ValueError(f"field names must differ, got {sorted({n for n in names if names.count(n) > 1})} twice")
        if self.time and TIME in names:
            raise ValueError(f"field {TIME!r}: this name is reserved for the time of samples; rename the field")
        if self.time and self.time == self.label:
            raise ValueError(f"column {self.label!r} is the label, so it cannot be the time as well")
        if self.columns:
            self._check_columns(self.columns, labelled=False)

    def resolve(self, first_line: bytes, path: str, *, need_label: bool) -> "Layout":
        """Returns the layout with the `columns` of a file that starts with `first_line`.

        Without `need_label`, the label's column may be absent, as in the test files of Criteo and Avazu.

        Raises:
            ValueError: a column is missing or repeated, or the line is not UTF-8 or no CSV; the message names it.
        """
        try:
            found = next(csv.reader([first_line.decode()], delimiter=self.delimiter, quotechar=self.quote or None,
                                    quoting=csv.QUOTE_MINIMAL if self.quote else csv.QUOTE_NONE), [])  # fmt: skip
        except UnicodeDecodeError as error:
            raise ValueError(f"{path}, line 1: not UTF-8 ({error}); convert the file to UTF-8 first") from None
        except csv.Error as error:
            raise ValueError(f"{path}, line 1: {error}") from None
        columns = tuple(found) if self.header else self.columns
        if not self.header and not need_label and len(found) == len(columns) - 1:
            columns = tuple(name for name in columns if name != self.label)
        try:
            self._check_columns(columns, labelled=need_label)
        except ValueError as error:
            raise ValueError(f"{path}, line 1: {error}") from None
        return dataclasses.replace(self, columns=columns)

    def _check_columns(self, columns: Sequence[str], *, labelled: bool) -> None:
        wanted = [field.column for field in self.fields] + [self.time] * bool(self.time) + [self.label] * labelled
        missing = sorted(set(wanted) - set(columns))
        if missing:
            raise ValueError(f"no column {', '.join(map(repr, missing))} among {', '.join(columns)}")
        twice = sorted(name for name in {*wanted, self.label} if list(columns).count(name) > 1)
        if twice:
            raise ValueError(f"column {', '.join(map(repr, twice))} occurs more than once")

    @staticmethod
    def from_json(content: Mapping[str, Any]) -> "Layout":
        """Builds a layout from the result of `dataclasses.asdict`."""
        fields = tuple(RawField(**field) for field in content["fields"])
        return Layout(**{**content, "columns": tuple(content["columns"]), "fields": fields})


_CRITEO_NUMBERS = tuple(f"I{number}" for number in range(1, 14))
_CRITEO_IDS = tuple(f"C{number}" for number in range(1, 27))
_AVAZU_IDS = (
    "hour", "C1", "banner_pos", "site_id", "site_domain", "site_category", "app_id", "app_domain", "app_category",
    "device_id", "device_ip", "device_model", "device_type", "device_conn_type", "C14", "C15", "C16", "C17", "C18",
    "C19", "C20", "C21",
)  # fmt: skip

CRITEO = Layout(
    name="criteo",
    delimiter="\t",
    quote="",
    header=False,
    columns=(LABEL, *_CRITEO_NUMBERS, *_CRITEO_IDS),
    label=LABEL,
    fields=tuple(RawField(name, "numeric") for name in _CRITEO_NUMBERS)
    + tuple(RawField(name, "categorical") for name in _CRITEO_IDS),
)
"""Criteo's Kaggle `train.txt` (and `test.txt`, which has no label)."""

AVAZU = Layout(
    name="avazu",
    delimiter=",",
    quote="",
    header=True,
    columns=(),
    label="click",
    fields=tuple(RawField(name, "categorical") for name in _AVAZU_IDS),
    time="hour",
    time_format="hour",
)
"""Avazu's Kaggle `train` (and `test`, without `click`). `id` is unique to each sample, so it is no feature."""


def load_csv_schema(path: str | os.PathLike[str]) -> Layout:
    """Reads a schema file: TOML that describes the columns of a CSV file.

        delimiter = ","                  # default
        quote = '"'                      # default; "" if quotes have no meaning
        header = true                    # default
        columns = ["label", "age"]       # instead of a header
        label = "label"                  # default
        time = "seen at"                 # column of the sample's time; default: none
        [[fields]]
        name = "genres"
        kind = "multi"                   # numeric | categorical | multi | weighted
        column = "movie genres"          # by default the name
        separator = "|"                  # multi and weighted
        weight_separator = ":"           # weighted
        pooling = "mean"                 # multi: mean (default) or sum

    An empty value is a missing one. A time is Unix seconds (rounded down) or ISO 8601 text ("2014-10-21T07:00:00Z", or
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
    types = {"delimiter": str, "quote": str, "header": bool, "columns": list, "label": str, "time": str, "fields": list}
    _check_types("", content, types)
    header, columns = content.get("header", True), content.get("columns", [])
    if header == bool(columns):
        raise ValueError("give `columns` if, and only if, header = false")
    fields = []
    for number, field in enumerate(content.get("fields", []), start=1):
        if not isinstance(field, dict) or not {"name", "kind"} <= field.keys():
            raise ValueError(f"fields entry {number} needs a name and a kind")
        _check_types(f"fields entry {number}: ", field, {each.name: str for each in dataclasses.fields(RawField)})
        fields.append(RawField(**field))
    layout = Layout(
        "csv", content.get("delimiter", ","), content.get("quote", '"'), header, tuple(columns),
        content.get("label", LABEL), tuple(fields), content.get("time", ""),
    )  # fmt: skip
    if columns:
        layout._check_columns(columns, labelled=True)
    if layout.label in [field.column for field in fields]:
        raise ValueError(f"column {layout.label!r} is the label, so it cannot be a field as well")
    return layout


def _check_types(where: str, content: Mapping[str, Any], types: Mapping[str, type]) -> None:
    for key, value in content.items():
        if key not in types:
            raise ValueError(f"{where}unknown key {key!r}; the keys are {', '.join(types)}")
        if not isinstance(value, types[key]):
            raise ValueError(f"{where}{key} must be a {types[key].__name__}, got {value!r}")
