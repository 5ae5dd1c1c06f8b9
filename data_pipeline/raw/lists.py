"""Lists of R samples: multi-valued fields, sequences, weighted ids; columns and single values have the same rules."""

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from cowrec.errors import UserError

from .columns import (
    MAX_WEIGHT,
    UNMARKED,
    WEIGHTS_ARE_BOUNDED,
    SampleColumns,
    ValueType,
    WrongValue,
    id_value,
    id_values,
    number_value,
    text_value,
    wrong_type,
)
from .layouts import RawField
from .values import (
    NUMBER,
    NUMBER_PATTERN,
    as_floats,
    as_numbers,
    is_text,
    mask,
    plain_array,
    without_markers,
    without_nan,
)

BLANKS = " \t"
"""Characters that are removed from the ends of items of text."""
PAIR = pa.struct([("id", pa.string()), ("weight", pa.float64())])


class ListColumns:
    """Reads the list fields of a table; ages need the `time` of the samples [R], NaN where unknown."""

    def __init__(self, columns: SampleColumns, time: np.ndarray | None = None) -> None:
        self._columns, self._time = columns, time
        self._steps: dict[str, np.ndarray] = {}
        self._items: dict[str, _Items] = {}

    def read(self, field: RawField, along: Iterable[RawField] = ()) -> tuple[pa.Array, np.ndarray | None]:
        """Returns lists of strings [R] and, if weighted, the weights of all strings, float32.

        A missing or empty list becomes one missing value of weight 1. A sequence keeps its last ids, and a missing
        sequence is empty; `along` are the sequences along it.
        """
        found = self._items_of(field)
        if field.kind != "sequence":
            return with_missing_values(found.offsets, found.ids, found.weights)
        if field.along:
            return self._last(field, found, found.missing), None
        nothing, none = found.blank, found.empty
        for other in map(self._items_of, along):
            nothing = nothing & found.by_row(other.are_blank)  # where it has a value, a marker is a step
            none = none | found.missing & found.by_row(np.diff(other.offsets) == 0)
        return self._last(field, found, nothing | none), None

    def _items_of(self, field: RawField) -> "_Items":
        if field.name not in self._items:
            self._items[field.name] = self._read_items(field)
        return self._items[field.name]

    def _read_items(self, field: RawField) -> "_Items":
        name = field.column
        column = self._columns.arrays[name]
        if pa.types.is_null(column.type):
            column = column.cast(pa.list_(PAIR if field.kind == "weighted" else pa.null()))
        joined = is_text(column.type) and not field.brackets
        if joined and not field.separator:
            raise UserError(f"column {name!r} is text, so field {field.name!r} needs a separator, or brackets = true")
        if joined:
            column = pc.split_pattern(column.cast(pa.string()).fill_null(""), field.separator)
        elif is_text(column.type):
            column = self._without_brackets(column.cast(pa.string()).fill_null(""), field)
        if not (pa.types.is_list(column.type) or pa.types.is_large_list(column.type)):
            raise wrong_type(name, column.type, "lists or their joined text")
        lengths = pc.list_value_length(column).fill_null(0).to_numpy(zero_copy_only=False)
        offsets, items = np.r_[0, np.cumsum(lengths, dtype=np.int64)], plain_array(column.flatten())
        items = pc.utf8_trim(items, BLANKS) if joined else without_nan(items, field.null)
        if field.age:
            assert self._time is not None, "a layout with ages has times"
            ids, wrong = _ages(items, np.repeat(self._time, lengths), field)
            weights, rule = None, f"its times and the sample's must be known; {field.time.rule}"
        elif field.kind != "weighted":
            ids, wrong = self._columns.id_texts(items, name)
            weights, rule = None, "must be a list of strings or numbers"
        else:
            ids, weights, wrong = self._pairs(items, field)
            rule = 'must be a list of {"id": string or number, "weight": number}'
            rule = f"must be id{field.weight_separator}weight, joined by {field.separator!r}" if joined else rule
        if self._columns.null_items == "wrong" and weights is not None and ids.null_count:
            wrong = wrong | mask(ids.is_null())
        if wrong.any():
            self._columns.fail(wrong, name, items, rule, np.repeat(np.arange(self._columns.rows), lengths))
        if weights is not None:
            large = np.abs(weights) > MAX_WEIGHT
            self._columns.fail(
                large, name, items, WEIGHTS_ARE_BOUNDED, np.repeat(np.arange(self._columns.rows), lengths)
            )
            weights = np.where(large, 0.0, weights).astype(np.float32)
        return _Items(offsets, items, without_markers(ids.fill_null(""), field.null), weights)

    def _without_brackets(self, text: pa.Array, field: RawField) -> pa.Array:
        """Returns the lists of text [R] in brackets, reading equal texts once; other texts are wrong."""
        kind, weighted = ValueType(null=field.null, brackets=True), field.kind == "weighted"
        coded, lists, wrong = text.dictionary_encode(), list[list[Any]](), list[bool]()
        for written in coded.dictionary.to_pylist():
            try:
                lists.append(pairs_value(written, kind) if weighted else ids_value(written, kind))
                wrong.append(False)
            except ValueError:
                lists.append([])
                wrong.append(True)
        rule = f"must be {'weights' if weighted else 'a list'} in brackets"
        self._columns.fail(np.array(wrong, bool)[mask(coded.indices)], field.column, text, rule)
        return pa.array(lists, pa.list_(PAIR if weighted else pa.string())).take(coded.indices)

    def _last(self, field: RawField, found: "_Items", nothing: np.ndarray) -> pa.ListArray:
        """Returns the last ids of each list; none if its only item is `nothing`, bool [items], as empty text is.

        A sequence along another one must have as many ids.
        """
        offsets, ids = found.offsets, found.ids
        given = np.diff(offsets)
        single, own = np.flatnonzero(given == 1), given.copy()
        own[single] -= nothing[offsets[single]]
        steps = self._steps.setdefault(field.name, self._steps.get(field.along, own))
        wrong = np.where(steps > 0, given, own) != steps
        self._columns.fail(wrong, field.column, pa.array(given), f"must have as many values as field {field.along!r}")
        lengths = np.minimum(np.where(wrong, 0, steps), field.max_length)
        starts = np.r_[0, np.cumsum(lengths)]
        indices = np.arange(starts[-1]) + np.repeat(offsets[1:] - starts[1:], lengths)
        return pa.ListArray.from_arrays(pa.array(starts.astype(np.int32)), ids.take(pa.array(indices)))

    def _pairs(self, items: pa.Array, field: RawField) -> tuple[pa.Array, np.ndarray, np.ndarray]:
        """Returns ids, float64 weights and which are wrong, from text or {id, weight}; a missing item has weight 1."""
        if is_text(items.type):
            if not field.weight_separator:
                raise UserError(f"column {field.column!r} holds text, so field {field.name!r} needs a weight_separator")
            text = without_markers(items.fill_null(""), field.null)
            return split_pairs(text, field.weight_separator)
        is_pair = pa.types.is_struct(items.type) and {"id", "weight"} <= {field.name for field in items.type}
        found = as_floats(plain_array(pc.struct_field(items, "weight"))) if is_pair else None
        if found is None:
            raise wrong_type(field.column, pa.list_(items.type), "lists of {id, weight}, maps, or their joined text")
        ids, wrong = self._columns.id_texts(plain_array(pc.struct_field(items, "id")), field.column)
        present = mask(items.is_valid())
        weights = np.where(present, found[0], 1.0)
        wrong = wrong | np.isnan(weights)
        return ids, np.where(wrong, 0.0, weights), wrong


def _ages(times: pa.Array, since: np.ndarray, field: RawField) -> tuple[pa.Array, np.ndarray]:
    """Returns the bits of ages in seconds, strings (null or empty where the time is), and which are wrong."""
    if is_text(times.type) or pa.types.is_null(times.type):
        times = without_markers(times.cast(pa.string()), field.null)
        missing = mask(pc.equal(times.fill_null(""), ""))
    else:
        missing = mask(times.is_null())
    found = field.time.seconds([times])
    if found is None:
        raise wrong_type(field.column, times.type, "times")
    seconds, wrong = found
    bits = np.frexp(np.maximum(since - seconds, 0.0))[1]
    absent = pc.if_else(times.is_null(), pa.scalar(None, pa.string()), "")
    ids = pc.if_else(pa.array(missing), absent, pa.array(bits).cast(pa.string()))
    return ids, (wrong | np.isnan(since)) & ~missing


def split_pairs(text: pa.Array, separator: str) -> tuple[pa.Array, np.ndarray, np.ndarray]:
    """Splits `id:weight` pairs into ids, float64 weights (1 for empty text) and bool, True where a pair is invalid."""
    has_weight = pc.or_(pc.match_substring(text, separator), pc.equal(text, ""))
    pairs = pc.if_else(pc.and_(has_weight, pc.not_equal(text, "")), text, separator + "1")
    halves = pc.split_pattern(pairs, separator, max_splits=1, reverse=True).flatten()
    values, weights = (halves.take(pa.array(np.arange(part, len(halves), 2))) for part in (0, 1))
    numbers, invalid = as_numbers(weights)
    return values, numbers, ~mask(has_weight) | invalid | mask(pc.equal(weights, ""))


def with_missing_values(
    offsets: np.ndarray, ids: pa.Array, weights: np.ndarray | None
) -> tuple[pa.ListArray, np.ndarray | None]:
    """Replaces each empty list by one empty string of weight 1."""
    lengths = np.diff(offsets)
    if not lengths.all():
        filled = np.maximum(lengths, 1)
        starts = np.r_[0, np.cumsum(filled)]
        # Index of each value among the ids, to which the empty string is appended.
        indices = np.full(starts[-1], len(ids))
        indices[np.repeat(starts[:-1] - offsets[:-1], lengths) + np.arange(len(ids))] = np.arange(len(ids))
        ids = pa.concat_arrays([ids, pa.array([""], ids.type)]).take(pa.array(indices))
        weights = None if weights is None else np.r_[weights, np.float32(1)][indices]
        offsets = starts
    return pa.ListArray.from_arrays(pa.array(offsets.astype(np.int32)), ids), weights


@dataclass(frozen=True)
class _Items:
    """The items of a field of R lists; joined text has at least one.

    Attributes:
        offsets: int64 [R + 1].
        ids: strings, empty where an item is null, empty or a marker of missing values.
        weights: float32, if weighted.
    """

    offsets: np.ndarray
    raw: pa.Array
    ids: pa.Array
    weights: np.ndarray | None

    @cached_property
    def empty(self) -> np.ndarray:
        """Items that are empty text, bool."""
        text = self.raw if is_text(self.raw.type) else pa.nulls(len(self.raw), pa.string())
        return mask(pc.equal(text, "").fill_null(False))

    @cached_property
    def missing(self) -> np.ndarray:
        """Items without a value, bool."""
        return mask(pc.equal(self.ids, ""))

    @cached_property
    def blank(self) -> np.ndarray:
        """Items without a value that are not null, bool."""
        found: np.ndarray = self.missing & ~mask(self.raw.is_null())
        return found

    @property
    def are_blank(self) -> np.ndarray:
        """Lists that have no item, or one that is blank, bool [R]."""
        given = np.diff(self.offsets)
        result: np.ndarray = given == 0
        single = np.flatnonzero(given == 1)
        result[single] = self.blank[self.offsets[single]]
        return result

    def by_row(self, values: np.ndarray) -> np.ndarray:
        """Values [R] repeated for the items of each list."""
        return np.repeat(values, np.diff(self.offsets))


def ids_value(value: Any, kind: ValueType) -> list[str | None]:
    """Items as text; markers of missing values stay, since what goes along a history decides on them."""
    if isinstance(value, str) and kind.separator:
        return [item.strip(BLANKS) for item in text_value(value, kind).split(kind.separator)]
    if isinstance(value, str) and kind.brackets:
        value = [] if not value or value in kind.null else items_of(text_value(value, kind))
    if not isinstance(value, list):
        raise WrongValue
    ids = iter(id_values([item for item in value if item is not None], kind))
    return [None if item is None else next(ids) for item in value]


def pairs_value(value: Any, kind: ValueType) -> list[dict[str, Any]]:
    if isinstance(value, str) and kind.separator and kind.weight_separator:
        return [_pair_of_text(item.strip(BLANKS), kind) for item in text_value(value, kind).split(kind.separator)]
    if isinstance(value, str) and kind.brackets:
        value = {} if not value or value in kind.null else weights_of(text_value(value, kind))
    if isinstance(value, dict) and value.keys() != {"id", "weight"}:  # which would be a pair outside of a list
        value = [{"id": name, "weight": weight} for name, weight in value.items()]
    if not isinstance(value, list) or not all(isinstance(pair, dict) for pair in value):
        raise WrongValue
    if any(isinstance(pair.get("weight"), str) for pair in value):
        raise WrongValue
    ids = ("" if name in kind.null else name for name in id_values([pair.get("id") for pair in value], kind))
    weights = [number_value(pair.get("weight"), UNMARKED) for pair in value]
    return [{"id": name, "weight": weight} for name, weight in zip(ids, weights, strict=True)]


def _pair_of_text(text: str, kind: ValueType) -> dict[str, Any]:
    name, separator, weight = text.rpartition(kind.weight_separator)
    if not text or text in kind.null:
        return {"id": "", "weight": 1.0}
    if not separator or not NUMBER_PATTERN.fullmatch(weight):
        raise WrongValue
    return {"id": id_value(name, kind), "weight": float(weight)}


def weights_of_pairs(weights: Sequence[float]) -> np.ndarray:
    """Returns the weights of ids, float32. Raises ValueError if one is too large."""
    found = np.array(weights, np.float64)
    if not (np.abs(found) <= MAX_WEIGHT).all():
        raise ValueError(WEIGHTS_ARE_BOUNDED)
    return found.astype(np.float32)


def last_values(
    values: Sequence[Any], main: Sequence[Any], along: Sequence[Sequence[Any]], most: int
) -> list[list[str]]:
    """Returns at most `most` last ids of canonical values of a sequence, as `ListColumns.read` does for columns.

    `main` are the values of the sequence that it goes along with, or its own, and `along` those of all sequences along
    that one. Raises ValueError if a value has another number of ids than its main one.
    """
    steps = _steps(main, along)
    for value, count in zip(values, steps, strict=True):
        given = len(value or ())
        if given != count and not (count == 0 and given == 1 and not value[0]):
            raise ValueError("sequences that go along with each other differ in length")
    return [value[-most:] if count else [] for value, count in zip(values, steps, strict=True)]


class _Marker(str):
    """An empty text that stands for a marker of missing values in a list."""


MARKER = _Marker()


def _steps(values: Sequence[Any], along: Sequence[Sequence[Any]]) -> list[int]:
    """The lengths of sequences as `ListColumns` has them; `along` are the values of sequences along them."""
    steps = [len(value or ()) for value in values]
    for row in (row for row, value in enumerate(values) if value and len(value) == 1 and not value[0]):
        (item,), others = values[row], [other[row] for other in along]
        # Where one along it has a value, a marker is a step; null is one unless one has no item.
        if item is MARKER:
            nothing = not all(others) or all(other == [""] for other in others)
        else:
            nothing = item is not None or not all(others)
        if nothing:
            steps[row] = 0
    return steps


# Lists in brackets as programs write them: JSON ["a", "b"], Python ['a', 'b'], NumPy the same without commas, Postgres
# {a,"b c"}; and weights by id, {"a": 0.5}.
_QUOTED = r"""(?:"((?:[^"\\]|\\.)*)"|'((?:[^'\\]|\\.)*)')"""
_PLAIN = r"""([^\s,"'\[\]{}(][^,\[\]{}]*?)"""
_ITEM = re.compile(rf"""\s*(?:{_QUOTED}\s*(?:,|$|(?=["']))|{_PLAIN}\s*(?:,|$))""", re.DOTALL)
_WEIGHT = re.compile(rf"\s*(?:{_QUOTED}|([^\s,:\"'][^,:]*?))\s*:\s*({NUMBER[1:-1]})\s*(?:,|$)", re.DOTALL)
_NUMBERS = re.compile(r"[\s0-9.eE+-]+")
_NULLS = ("NULL", "null", "None", "nan", "NaN")


def items_of(text: str) -> list[Any]:
    """Returns the trimmed items of a list in brackets, None if missing. Raises ValueError if the text is no list."""
    text = text.strip()
    found = _json(text) if text.startswith("[") else None
    if found is not None:
        if any(isinstance(item, (list, dict)) for item in found):
            raise ValueError("a list within a list")
        return [item.strip() if isinstance(item, str) else item for item in found]
    inner = _inner(text, "[]", "{}", "()")
    if "," not in inner and _NUMBERS.fullmatch(inner):
        return list(inner.split())
    items: list[Any] = []
    for double, single, plain in _parts(_ITEM, inner):
        items.append(None if plain in _NULLS else plain or _unescaped(double or single or ""))
    return items


def weights_of(text: str) -> dict[str, float]:
    """Returns the weights by id that are written as an object. Raises ValueError if the text is none."""
    text = text.strip()
    inner = _inner(text, "{}")
    found = _json(text)
    if isinstance(found, dict) and all(type(weight) in (int, float) for weight in found.values()):
        return {name.strip(): float(weight) for name, weight in found.items()}
    parts = _parts(_WEIGHT, inner)
    return {
        plain or _unescaped(double or single or ""): float(weight or 0) for double, single, plain, weight, *_ in parts
    }


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _inner(text: str, *brackets: str) -> str:
    if text[:1] + text[1:][-1:] not in brackets:
        raise ValueError(f"it has no brackets such as {brackets[0]}")
    return text[1:-1].strip()


def _parts(pattern: re.Pattern[str], text: str) -> list[tuple[str | None, ...]]:
    """Returns the groups of a pattern's matches, which must cover all text."""
    found, place = [], 0
    while place < len(text):
        match = pattern.match(text, place)
        if match is None:
            raise ValueError(f"not readable from {text[place : place + 20]!r} on")
        found.append(match.groups())
        place = match.end()
    return found


def _unescaped(text: str) -> str:
    return re.sub(r"\\(.)", r"\1", text, flags=re.DOTALL).strip()
