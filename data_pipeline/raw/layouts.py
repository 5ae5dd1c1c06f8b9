"""Layouts of raw files: their columns in order, the labels and fields that the columns hold. R samples."""

import codecs
import csv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from cowrec.errors import UserError

from ..dataset.schema import (
    BUCKET_SUFFIX,
    KEPT_PREFIX,
    LABEL,
    LABEL_PREFIX,
    MISSING_SUFFIX,
    SAMPLE_NUMBER,
    SAMPLE_WEIGHT,
    TIME,
    WEIGHT_SUFFIX,
    DenseTransform,
    Pooling,
    SparseKind,
)
from .inputs import Source
from .times import RawTime, TimePart, TimeUnit
from .values import as_numbers, marker_numbers, mask, without_markers

MOST_NAMED = 200
"""Columns that a message names."""
LABEL_ADVICE = (
    '. Name the positive values in the schema file, as in positive = ["1"], where all others are negative; or give a'
    ' threshold; or, for shares from 0 to 1, write label = {{column = {0}, kind = "rate"}}'
)


@dataclass(frozen=True)
class RawLabel:
    """One label of a raw file.

    By default 1, 1.0 and true are positive, 0, 0.0 and false negative, in any notation and case; others are wrong.

    Attributes:
        name: name of the task of the label.
        column: raw column; by default the name.
        kind: "rate" for numbers from 0 to 1: the share of positives of what the sample stands for; empty for classes.
        count, of: columns of the number of positives of a sample and of its total, which is at least 1, in place of
            `column` and `kind`. The label is the share of positives, and the total multiplies the weight of the sample.
        positive: values that are positive; all others are negative. A number here means that number in any notation.
        threshold: least number that is positive; all other numbers are negative.
        null: texts that mean a missing label, as the empty text always does. A number here means that number in any
            notation.
    """

    name: str = LABEL
    column: str = ""
    positive: tuple[str, ...] = ()
    threshold: float | None = None
    null: tuple[str, ...] = ()
    kind: Literal["", "rate"] = ""
    count: str = ""
    of: str = ""

    def __post_init__(self) -> None:
        if self.kind not in ("", "rate"):
            raise UserError(f'label {self.name!r}: kind must be "rate", or left out for classes, got {self.kind!r}')
        if bool(self.count) != bool(self.of) or (self.count and (self.kind or self.column not in ("", self.count))):
            raise UserError(f"label {self.name!r}: count and of go together, in place of column and kind")
        if self.is_rate and (self.positive or self.threshold is not None):
            raise UserError(f"label {self.name!r}: positive and threshold are for classes, not for a rate or a count")
        if self.positive and self.threshold is not None:
            raise UserError(f"label {self.name!r}: give positive or threshold, not both")
        if self.threshold is not None and not np.isfinite(self.threshold):
            raise UserError(f"label {self.name!r}: threshold must be a finite number, got {self.threshold}")
        object.__setattr__(self, "column", self.count or self.column or self.name)
        for key in ("positive", "null"):
            object.__setattr__(self, key, tuple(text for text in getattr(self, key) if text))

    @property
    def is_rate(self) -> bool:
        """True if labels are shares of positives, from 0 to 1, instead of classes."""
        return bool(self.kind or self.of)

    @property
    def columns(self) -> tuple[str, ...]:
        return (self.column, self.of) if self.of else (self.column,)

    @property
    def rule(self) -> str:
        if self.of:
            return f"a count must be a number from 0 to its total in column {self.of!r}"
        if self.kind:
            return "a rate must be a number from 0 to 1"
        if self.threshold is not None:
            return "a label with a threshold must be a number"
        return "a label must be 0 or 1"

    def values(self, text: pa.Array) -> tuple[np.ndarray, np.ndarray]:
        """Converts strings [R] without nulls; the empty text and `null` are missing labels.

        Returns float32 [R]: 0, 1, or NaN where missing or wrong; and bool [R], True where wrong.
        """
        if markers := marker_numbers(self.null):
            text = pc.if_else(pa.array(np.isin(as_numbers(text)[0], markers)), "", text)
        text = without_markers(text, self.null)
        missing = mask(pc.equal(text, ""))
        if self.positive:
            positive = mask(pc.is_in(text, pa.array(self.positive, text.type)))
            if numbers := marker_numbers(self.positive):
                positive |= np.isin(as_numbers(text)[0], numbers)
            return np.where(missing, np.nan, positive).astype(np.float32), np.zeros(len(text), bool)
        numbers_found, _ = as_numbers(text)
        if self.threshold is not None:
            wrong = np.isnan(numbers_found) & ~missing
            positive = numbers_found >= self.threshold
        else:
            word = pc.utf8_lower(text) if np.isnan(numbers_found[~missing]).any() else text
            positive = (numbers_found == 1) | mask(pc.equal(word, "true"))
            wrong = ~(positive | (numbers_found == 0) | mask(pc.equal(word, "false")) | missing)
        return np.where(missing | wrong, np.nan, positive).astype(np.float32), wrong


RawKind = Literal["numeric", "vector", "categorical", "multi", "sequence", "weighted"]
ValueKind = Literal["number", "vector", "time", "label", "id", "ids", "weighted"]


class FieldKind(NamedTuple):
    """What the kind of a field implies.

    Attributes:
        keys: keys that the kind takes; all kinds take the keys that no kind lists.
        sparse: kind of the sparse field of the ids, or of the buckets of numbers.
        poolings, transforms: values of these keys, the default first, which for "" is that of `[prepare]`.
    """

    values: ValueKind
    keys: tuple[str, ...]
    sparse: SparseKind = "categorical"
    poolings: tuple[Pooling, ...] = ()
    transforms: tuple[DenseTransform | Literal[""], ...] = ()

    @property
    def is_of_numbers(self) -> bool:
        """True for numbers, which are transformed; False for ids."""
        return bool(self.transforms)


_KEYS_OF_LISTS = "separator", "brackets", "min_count", "max_ids"
FIELD_KINDS: Mapping[RawKind, FieldKind] = {
    "numeric": FieldKind("number", ("transform",), transforms=("", *get_args(DenseTransform))),
    "vector": FieldKind("vector", ("width", "separator", "transform"), transforms=("none", "minmax")),
    "categorical": FieldKind("id", ("min_count", "max_ids", "part")),
    "multi": FieldKind("ids", (*_KEYS_OF_LISTS, "pooling"), "multi", poolings=("mean", "sum")),
    "sequence": FieldKind("ids", (*_KEYS_OF_LISTS, "max_length", "shares", "along", "age"), "sequence"),
    "weighted": FieldKind("weighted", (*_KEYS_OF_LISTS, "weight_separator", "pooling"), "weighted", poolings=("sum",)),
}
_KEYS_OF_KINDS = tuple(dict.fromkeys(key for kind in FIELD_KINDS.values() for key in kind.keys))
LayoutName = Literal["criteo", "avazu", "tabular"]


@dataclass(frozen=True)
class RawField:
    """One feature of a raw file.

    Attributes:
        name: name of the feature.
        kind: "numeric": one number. "vector": a list of `width` numbers, such as a pretrained embedding, or the numbers
            as text joined by `separator`, with or without brackets. "categorical": one id. "multi": a list of ids, or
            ids joined by `separator`. "sequence": as multi, but in order, with the newest id last. "weighted": a list
            of {id, weight}, a map from id to weight, or joined text in which `weight_separator` and a weight follow
            each id.
        column: raw column; by default the name.
        width: for vectors: how many numbers each vector has.
        separator, weight_separator: for vectors and lists as text: what separates the items, and an id from its weight.
            Spaces around items are removed.
        brackets: for lists: whether their text is in brackets, such as ["a", "b"], in place of the separators.
        pooling: for multi and weighted: "sum" or "mean" of the embeddings; by default "mean" for multi, always "sum"
            for weighted.
        null: texts that mean a missing value, as the empty text always does. They may be whole values, and ids of
            lists. In numeric fields, a number means that number in any notation. By default those of the file.
        transform: for numbers: `dense` of `[prepare]` for this field; by default the value of `[prepare]`. For vectors:
            "none", the default, or "minmax" of each number by itself.
        min_count, max_ids: for ids: `min_count` and `max_ids` of `[prepare]` for this field; by default, and with 0,
            the values of `[prepare]`. `min_count` has no effect with `raw_ids` and `hash_buckets`, which keep no
            vocabulary.
        max_length: for sequences: how many of the last ids are kept.
        shares: for sequences: the categorical field that these ids belong to. Both then have one vocabulary and one
            table.
        along: for sequences: the sequence whose ids this one describes one by one, such as the categories of a history
            of items. Both must have equally many ids, and one `max_length`.
        age: for sequences of times: whether the ids are ages. An age is the time in seconds from the event to the
            sample, and its id is the number of its binary digits: 3 for 4 to 7 seconds, 0 for an event after the
            sample.
        part: for categorical fields of times: the part that is the id, which is the hour, weekday, day or month.
        unit, format, zone: for fields with `part` or `age`: how the column writes times, as for the time of the sample.
    """

    name: str
    kind: RawKind
    column: str = ""
    width: int = 0
    separator: str = ""
    weight_separator: str = ""
    brackets: bool = False
    pooling: Pooling | Literal[""] = ""
    null: tuple[str, ...] = ()
    transform: DenseTransform | Literal[""] = ""
    min_count: int = 0
    max_ids: int = 0
    max_length: int = 0
    shares: str = ""
    along: str = ""
    age: bool = False
    part: TimePart = ""
    unit: TimeUnit = ""
    format: str = ""
    zone: str = ""

    def __post_init__(self) -> None:
        where = f"field {self.name!r}"
        if self.name == LABEL or self.name.endswith(WEIGHT_SUFFIX):
            raise UserError(f"{where}: this name is taken; choose another, and give the raw name as `column`")
        if self.kind not in FIELD_KINDS:
            raise UserError(f"{where}: kind must be one of {', '.join(FIELD_KINDS)}, got {self.kind!r}")
        kind = FIELD_KINDS[self.kind]
        for key in _KEYS_OF_KINDS:
            if getattr(self, key) and key not in kind.keys:
                kinds = ", ".join(name for name, other in FIELD_KINDS.items() if key in other.keys)
                raise UserError(f"{where}: {key} is for the kinds {kinds}, not for {self.kind}")
        for key in ("width", "max_length"):
            if key in kind.keys and getattr(self, key) < 1:
                raise UserError(f"{where}: {key} must be at least 1 for the kind {self.kind}, got {getattr(self, key)}")
        for key in ("min_count", "max_ids"):
            if getattr(self, key) < 0:
                raise UserError(f"{where}: {key} must be at least 1, got {getattr(self, key)}")
        if self.brackets and (self.separator or self.weight_separator):
            raise UserError(f"{where}: brackets takes the place of separators; give one of them")
        if self.separator and self.separator == self.weight_separator:
            raise UserError(f"{where}: separator and weight_separator must differ, both are {self.separator!r}")
        choices = {"pooling": kind.poolings, "transform": kind.transforms, "part": get_args(TimePart)}
        for key, values in choices.items():
            if getattr(self, key) not in ("", *values):
                known = ", ".join(filter(None, values))
                raise UserError(f"{where}: {key} must be one of {known}, got {getattr(self, key)!r}")
        if self.age and self.shares:
            raise UserError(f"{where}: a field of ages has ids of its own; remove shares")
        if not (self.part or self.age) and (self.unit or self.format or self.zone):
            raise UserError(f"{where}: unit, format and zone are for times, of which the field has a part or the age")
        if self.shares and (self.min_count or self.max_ids):
            raise UserError(f"{where}: min_count and max_ids are those of {self.shares!r}, whose ids it shares")
        object.__setattr__(self, "column", self.column or self.name)
        object.__setattr__(self, "null", tuple(text for text in self.null if text))
        if self.part or self.age:
            _ = self.time  # is checked
        for key, values in (("transform", kind.transforms), ("pooling", kind.poolings)):
            object.__setattr__(self, key, getattr(self, key) or next(iter(values), ""))

    @property
    def numbers(self) -> tuple[str, ...]:
        """Names of the numbers of a sample; none for a field of ids."""
        if not FIELD_KINDS[self.kind].is_of_numbers:
            return ()
        return tuple(f"{self.name}[{element}]" for element in range(self.width)) or (self.name,)

    @property
    def time(self) -> RawTime:
        """How the column writes the times whose part or age the field has."""
        return RawTime((self.column,), self.unit, self.format, self.zone)


@dataclass(frozen=True)
class Layout:
    """A raw text format.

    Attributes:
        name: "criteo", "avazu" or "tabular".
        delimiter: one ASCII character; or several, or any other, where quotes have no meaning.
        quote: one character, or empty if quotes have no meaning.
        columns: all columns of text in order; empty if they are read from the header.
        fields: the features; other columns are ignored.
        time: the sample's time, whose columns may be fields as well; None if there is none.
        weight: column of the sample's weight, a number of at least 0; empty if all samples count alike.
        keep: columns that predictions show beside the probability.
        absent: columns of labels that the files lack, which can be predicted only.
        encoding: of text, as Python names it; empty for UTF-8.
        decimal: decimal sign of numbers that are text, "." or ","; then points separate thousands.
        for_prediction: True if a wrong label is unknown and a wrong weight is 0, as what is predicted needs neither.
    """

    name: str
    delimiter: str
    quote: str
    header: bool
    columns: tuple[str, ...]
    labels: tuple[RawLabel, ...]
    fields: tuple[RawField, ...]
    time: RawTime | None = None
    weight: str = ""
    keep: tuple[str, ...] = ()
    absent: tuple[str, ...] = ()
    for_prediction: bool = False
    encoding: str = ""
    decimal: str = "."

    def __post_init__(self) -> None:
        object.__setattr__(self, "encoding", _checked_encoding(self.encoding))
        if self.decimal not in (".", ","):
            raise UserError(f'decimal must be "." or ",", got {self.decimal!r}')
        if not self.delimiter or "\r" in self.delimiter or "\n" in self.delimiter:
            raise UserError(f"delimiter must be at least one character and no line ending, got {self.delimiter!r}")
        if self.quote and len(self.delimiter.encode()) > 1:
            raise UserError(f'delimiter must be one ASCII character, got {self.delimiter!r}; for others set quote = ""')
        if len(self.quote) > 1 or not self.quote.isascii() or self.quote == self.delimiter:
            raise UserError(f"quote must be one ASCII character or empty, got {self.quote!r}")
        if not self.fields:
            raise UserError("a layout needs at least one field besides the label")
        names = [field.name for field in self.fields]
        if len(set(names)) < len(names):
            raise UserError(f"field names must differ, got {sorted({n for n in names if names.count(n) > 1})} twice")
        ids = [field.name for field in self.fields if field.kind == "categorical"]
        lengths = {field.name: field.max_length for field in self.fields if not field.along}
        for field in self.fields:
            if field.age and not self.time:
                raise UserError(f"field {field.name!r}: age needs the sample's time; name its column as `time`")
            if field.along and lengths.get(field.along) != field.max_length:
                raise UserError(
                    f"field {field.name!r}: along must be a sequence of the same max_length = {field.max_length} that"
                    f" goes along with none itself, got {field.along!r}"
                )
            if field.shares and field.shares not in ids:
                raise UserError(f"field {field.name!r}: shares must be a categorical field, got {field.shares!r}")
        self.check_names("none")
        labels = [label.name for label in self.labels]
        if not labels or len(set(labels)) < len(labels):
            raise UserError(f"labels must be one name or several different ones, got {labels}")
        if len(labels) > 1 and any(label.of for label in self.labels):
            raise UserError("a label of count and of must be the only one, since its total is the weight of the sample")
        for column in {*self.label_columns} & {*self.time_columns, self.weight}:
            raise UserError(f"column {column!r} is a label, so it cannot be the time or the weight as well")
        if self.columns:
            self.check_columns(self.columns)

    def check_names(self, dense: DenseTransform) -> None:
        """Raises ValueError if a field has the name of another column of the data set; `dense`: as in `[prepare]`."""
        taken = {SAMPLE_NUMBER: "the numbers of samples"}
        taken |= {TIME: "the time of samples"} if self.time else {}
        taken |= {SAMPLE_WEIGHT: "the weight of samples"} if self.weight else {}
        taken |= {KEPT_PREFIX + name: f"the column {name!r} that is kept" for name in self.keep}
        if len(self.labels) > 1:
            taken |= {LABEL_PREFIX + label.name: f"the label {label.name!r}" for label in self.labels}
        for field in (field for field in self.fields if field.numbers):
            taken |= {name: f"a number of field {field.name!r}" for name in field.numbers if name != field.name}
            if (field.transform or dense) == "buckets":
                taken[field.name + BUCKET_SUFFIX] = f"the buckets of field {field.name!r}"
            if (field.transform or dense) == "quantile":
                taken[field.name + MISSING_SUFFIX] = f"where field {field.name!r} has no value"
        for name in [field.name for field in self.fields if field.name in taken]:
            raise UserError(
                f"field {name!r}: this name is reserved for {taken[name]}; choose another, and give the raw name as"
                " `column`"
            )

    @property
    def time_columns(self) -> tuple[str, ...]:
        return self.time.columns if self.time else ()

    @property
    def used_columns(self) -> list[str]:
        """The columns that are read: `needed_columns`, and those of `optional_columns` that are not absent."""
        found = [name for name in self.optional_columns if name not in self.absent]
        return list(dict.fromkeys([*self.needed_columns, *found]))

    @property
    def needed_columns(self) -> list[str]:
        """The columns of fields, and of the time if fields have ages."""
        return list(dict.fromkeys([*(field.column for field in self.fields), *self.time_columns * bool(self.ages)]))

    @property
    def optional_columns(self) -> tuple[str, ...]:
        """The columns of labels, weight, time and those to keep, without which files can be predicted."""
        others = [name for name in (self.weight, *self.time_columns) if name and name not in self.needed_columns]
        return tuple(dict.fromkeys([*self.label_columns, *others, *self.keep]))

    @property
    def found_labels(self) -> tuple[RawLabel, ...]:
        return tuple(label for label in self.labels if not {*label.columns} & {*self.absent})

    @property
    def has_weights(self) -> bool:
        """True if the files have sample weights, or totals of the label's counts."""
        return bool(self.weight) or any(label.of for label in self.found_labels)

    @property
    def ages(self) -> tuple[RawField, ...]:
        """The fields of ages, which need the time of samples in predictions too."""
        return tuple(field for field in self.fields if field.age)

    @property
    def label_columns(self) -> list[str]:
        return [column for label in self.labels for column in label.columns]

    def columns_in(self, source: Source) -> tuple[str, ...]:
        """Returns the columns in a file, in their order; for text without a header, those that the layout names.

        If columns are `absent`, such text may lack all labels, as Criteo's test file does, and the weight too. Raises
        ValueError if the first line is not UTF-8 or no CSV.
        """
        if source.format != "text":
            return source.columns
        where = f"{source.path}, line 1"
        try:
            line = source.first_line.decode(self.encoding or "utf-8")
            if self.quote:
                found = next(csv.reader([line], delimiter=self.delimiter, quotechar=self.quote), [])
            else:
                found = line.split(self.delimiter) if line else []
        except UnicodeDecodeError as error:
            raise UserError(f"{where}: {encoding_problem(self.encoding, error.object[error.start])}") from None
        except csv.Error as error:
            raise UserError(f"{where}: {error}") from None
        if self.header:
            return tuple(found)
        may_lack = ([], self.label_columns, [*self.label_columns, self.weight]) if self.absent else ([],)
        for lacking in may_lack:
            columns = tuple(name for name in self.columns if name not in lacking)
            if len(columns) == len(found):
                return columns
        return self.columns

    def check_columns_of(self, source: Source) -> None:
        """Raises ValueError if a column is missing in a file or occurs more than once."""
        columns = self.columns_in(source)
        given = [name for name, _ in source.partition if name not in columns]
        try:
            self.check_columns([*columns, *given])
        except ValueError as error:
            where = ", line 1" if source.format == "text" else ""
            later = "; if only later lines have it, give it as null in the first line" * (source.format == "json")
            raise UserError(f"{source.path}{where}: {error}{later}") from None

    def check_columns(self, columns: Sequence[str]) -> None:
        """Raises ValueError if a column that is read is missing or repeated."""
        wanted = self.used_columns
        missing = sorted(set(wanted) - set(columns))
        if missing:
            raise UserError(f"no column {', '.join(map(repr, missing))} among {', '.join(columns[:MOST_NAMED])}")
        twice = sorted(name for name in {*wanted, *self.optional_columns} if list(columns).count(name) > 1)
        if twice:
            raise UserError(f"column {', '.join(map(repr, twice))} occurs more than once")

    @staticmethod
    def from_json(content: Mapping[str, Any]) -> "Layout":
        """Builds a layout from the result of `dataclasses.asdict` as JSON."""
        fields = tuple(RawField(**field) for field in content["fields"])
        labels = tuple(RawLabel(**label) for label in content["labels"])
        columns, keep = tuple(content["columns"]), tuple(content["keep"])
        time = content["time"] and RawTime(**content["time"] | {"columns": tuple(content["time"]["columns"])})
        given = {"columns": columns, "keep": keep, "fields": fields, "labels": labels, "time": time}
        return Layout(**{**content, **given})


_CRITEO_NUMBERS = tuple(f"I{number}" for number in range(1, 14))
_CRITEO_IDS = tuple(f"C{number}" for number in range(1, 27))
_AVAZU_IDS = (
    "hour", "C1", "banner_pos", "site_id", "site_domain", "site_category", "app_id", "app_domain", "app_category",
    "device_id", "device_ip", "device_model", "device_type", "device_conn_type", "C14", "C15", "C16", "C17", "C18",
    "C19", "C20", "C21",
)  # fmt: skip


def _checked_encoding(name: str) -> str:
    """Returns the name of an encoding, empty for UTF-8. Raises ValueError if it is unknown or does not extend ASCII."""
    try:
        known = codecs.lookup(name or "utf-8").name
        usable = b"\n,".decode(known) == "\n," and "\n".encode(known).endswith(b"\n")
    except (LookupError, ValueError):
        raise UserError(f'encoding = {name!r} is unknown; write one of Python\'s, such as "latin-1"') from None
    if not usable:
        raise UserError(f"encoding = {name!r}: only UTF-8 and encodings that extend ASCII are read; {TO_UTF_8}")
    return "" if known in ("utf-8", "utf-8-sig", "ascii") else known


CRITEO = Layout(
    name="criteo",
    delimiter="\t",
    quote="",
    header=False,
    columns=(LABEL, *_CRITEO_NUMBERS, *_CRITEO_IDS),
    labels=(RawLabel(),),
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
    labels=(RawLabel(column="click"),),
    fields=tuple(RawField(name, "categorical") for name in _AVAZU_IDS),
    time=RawTime(("hour",), format="%y%m%d%H"),
)
"""Avazu's Kaggle `train` (and `test`, without `click`). `id` is unique to each sample, so it is no feature."""


TO_UTF_8 = "convert the file to UTF-8 first, as by iconv -f UTF-16 -t UTF-8"


def encoding_problem(encoding: str, byte: int) -> str:
    problem = f"not {encoding or 'UTF-8'} (byte 0x{byte:02x}); convert the file to UTF-8 first"
    return problem + ', or name its encoding in the schema file, such as encoding = "latin-1"' * (not encoding)
