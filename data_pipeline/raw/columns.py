"""Raw columns of any Arrow type that can hold their values, checked and converted to the input of an `Encoder`.

Text, JSON and Parquet all come here as one typed table. R samples.
"""

import json
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from cowrec.errors import UserError

from ..dataset.schema import MISSING
from .layouts import RawField, RawLabel
from .values import (
    TIME_RULES,
    as_floats,
    as_id_text,
    as_numbers,
    as_times,
    bounded_seconds,
    is_text,
    looks_missing,
    mask,
    plain_array,
    without_marker_numbers,
    without_markers,
    without_nan,
)

LONGEST_QUOTED_VALUE = 60
PAIR = pa.struct([("id", pa.string()), ("weight", pa.float64())])
"""An item of a weighted list."""
WEIGHTLESS = "weightless"
"""Samples to predict whose weight is missing or wrong."""
NEGATIVE = "negative: "
"""Samples with a text that `positive` does not list; the text follows."""
MOST_TEXTS = 100
MISSING_LABEL = "the label is missing"
MAX_WEIGHT = 1e6
"""Largest magnitude of the weight of a sample or of an id."""
WEIGHTS_ARE_BOUNDED = f"weights must be at most {MAX_WEIGHT:,.0f}, since one sample could end training otherwise"


class SampleColumns:
    """Reads the columns of a table and records the first problem of each sample.

    Args:
        table: typed columns; null is a missing value.
        null_items: whether a null id that has a weight is "missing" or "wrong"; without a weight it is missing.
        for_prediction: see `Layout`.

    Attributes:
        problems: column and what is wrong, by row.
        doubts: what may be suspicious: about ids, see `as_id_text`, and labels; by column and doubt.
    """

    def __init__(
        self, table: pa.Table, null_items: Literal["missing", "wrong"], *, for_prediction: bool = False
    ) -> None:
        self._columns = {name: _one_array(table[name]) for name in table.column_names}
        self._rows, self._null_items, self._for_prediction = table.num_rows, null_items, for_prediction
        self._steps: dict[str, np.ndarray] = {}
        self._items: dict[str, _Items] = {}
        self.problems: dict[int, tuple[str, str]] = {}
        self.doubts: Counter[tuple[str, str]] = Counter()

    @property
    def good(self) -> np.ndarray:
        """Samples without a problem: bool [R]."""
        good = np.ones(self._rows, bool)
        good[list(self.problems)] = False
        return good

    def numbers(self, name: str, null: Collection[str] = ()) -> np.ndarray:
        """Returns float64 [R], NaN where missing or wrong; `null` lists texts that mean a missing value."""
        values, wrong = self._numbers(name, null)
        column = self._columns[name]
        rule = f"must be a finite number or {'empty' if is_text(column.type) else 'null'}"
        if wrong.any() and is_text(column.type):
            for marker in column.filter(pa.array(wrong & looks_missing(column))).unique().to_pylist():
                hint = f"if this means a missing value, set null = [{json.dumps(marker)}] in the schema file"
                self._fail(wrong & mask(pc.equal(column, marker).fill_null(False)), name, column, f"{rule}; {hint}")
        if wrong.any() and pa.types.is_floating(column.type):
            for marker, is_marker in (("NaN", pc.is_nan), ("inf", pc.is_inf)):
                hint = f'if {marker} means a missing value, set null = ["{marker}"] in the schema file'
                self._fail(wrong & mask(is_marker(column).fill_null(False)), name, column, f"{rule}; {hint}")
        self._fail(wrong, name, column, rule)
        return without_marker_numbers(values, null)

    def labels(self, label: RawLabel, *, required: bool) -> np.ndarray:
        """Returns float32 [R]: 0, 1, or NaN where wrong or missing, which is a problem if `required`."""
        column = self._columns[label.column]
        found = as_id_text(without_nan(column, ["NaN"]))
        if found is None:
            raise _wrong_type(label.column, column.type, "labels: numbers, truth values or text")
        text = found[0].fill_null("")
        values: np.ndarray
        if label.positive:
            coded = text.dictionary_encode()
            of_texts, indices = label.values(coded.dictionary)[0], mask(coded.indices)
            values, wrong = of_texts[indices], np.zeros(len(text), bool)
            counts = np.bincount(indices, minlength=len(of_texts))
            for each in np.flatnonzero(of_texts == 0)[:MOST_TEXTS].tolist():
                self.doubts[label.column, NEGATIVE + coded.dictionary[each].as_py()] += int(counts[each])
        else:
            values, wrong = label.values(text)
        if self._for_prediction:
            return values
        self._fail(wrong, label.column, self._columns[label.column], label.rule)
        if required:
            self._fail(np.isnan(values), label.column, self._columns[label.column], MISSING_LABEL)
        return values

    def weights(self, name: str) -> np.ndarray:
        """Returns sample weights, float32 [R]; a missing, negative or very large one is a problem."""
        values, wrong = self._numbers(name)
        wrong, large = wrong | ~(values >= 0), values > MAX_WEIGHT
        if self._for_prediction:
            self.doubts[name, WEIGHTLESS] += int((wrong | large).sum())
        else:
            self._fail(wrong, name, self._columns[name], "a sample weight must be a finite number of at least 0")
            self._fail(large, name, self._columns[name], WEIGHTS_ARE_BOUNDED)
        return np.where(wrong | large, 0.0, values).astype(np.float32)

    def shown(self, name: str) -> pa.Array:
        """Returns the text of values of any type, strings [R], empty where missing, as predictions show them."""
        column = self._columns[name]
        ids = as_id_text(column)  # without exponents
        try:
            return (column.cast(pa.string()) if ids is None else ids[0]).fill_null("")
        except pa.ArrowNotImplementedError:
            raise _wrong_type(name, column.type, "values that can be shown as text") from None

    def times(self, name: str, time_format: str) -> np.ndarray:
        """Returns int64 [R], Unix seconds; a missing time is a problem."""
        values, wrong = self._times(name, time_format)
        self._fail(wrong, name, self._columns[name], TIME_RULES[time_format])
        return values

    def known_times(self, name: str, time_format: str) -> np.ndarray:
        """Returns float64 [R], Unix seconds; NaN where missing or wrong."""
        values, wrong = self._times(name, time_format)
        return np.where(wrong, np.nan, values)

    def _times(self, name: str, time_format: str) -> tuple[np.ndarray, np.ndarray]:
        column = self._columns[name]
        if time_format == "timestamp" and not is_text(column.type):
            return _seconds(column, name)
        return as_times(self.texts(name), time_format)

    def texts(self, name: str, null: Collection[str] = ()) -> pa.Array:
        """Returns strings [R], empty where missing; `null` lists further texts that mean a missing value."""
        text, wrong = self._id_texts(without_nan(self._columns[name], null), name)
        self._fail(wrong, name, self._columns[name], "must be a finite number or null")
        return without_markers(text.fill_null(""), null)

    def of_fields(
        self, fields: Iterable[RawField], tables: Mapping[str, int] | None = None, time: np.ndarray | None = None
    ) -> tuple[dict[str, np.ndarray], dict[str, pa.Array], dict[str, np.ndarray]]:
        """Returns the numbers, ids and weights of fields, by name, as `Parsed` has them.

        `tables` are the embedding rows of fields whose ids are row numbers already; of them the ids are int32. `time`
        [R] are the samples' times, which ages need; NaN where unknown.
        """
        numbers: dict[str, np.ndarray] = {}
        ids: dict[str, pa.Array] = {}
        weights: dict[str, np.ndarray] = {}
        ordered = sorted(fields, key=lambda each: bool(each.along))
        for field in ordered:
            if field.kind == "numeric":
                numbers[field.name] = self.numbers(field.column, field.null)
            elif tables and field.name in tables:
                ids[field.name] = pa.array(self.row_numbers(field.column, MISSING, tables[field.name]))
            elif field.kind == "categorical":
                ids[field.name] = self.texts(field.column, field.null)
            else:
                along = [each for each in ordered if each.along == field.name]
                ids[field.name], of_pairs = self.lists(field, time, along)
                if of_pairs is not None:
                    weights[field.name] = of_pairs
        return numbers, ids, weights

    def row_numbers(self, name: str, missing: int, end: int) -> np.ndarray:
        """Returns rows of an embedding table, int32 [R], from integers or their text; `missing` where null."""
        values = self.numbers(name)
        rows = np.where(np.isnan(values), missing, values)
        self._fail((rows < 0) | (rows >= end) | (rows % 1 != 0), name, self._columns[name], f"must be in [0, {end})")
        return rows.astype(np.int32)

    def lists(
        self, field: RawField, time: np.ndarray | None = None, along: Iterable[RawField] = ()
    ) -> tuple[pa.Array, np.ndarray | None]:
        """Returns lists of strings [R] and, if weighted, the weights of all strings, float32.

        A missing or empty list is one missing value of weight 1, like empty text in a raw file. Of a sequence these
        are its last ids, and a missing one is empty; `along` are the sequences along it.
        """
        found = self._items_of(field, time)
        if field.kind != "sequence":
            return _with_missing(found.offsets, found.ids, found.weights)
        if field.along:
            return self._last(field, found, found.missing), None
        nothing, none = found.blank, found.empty
        for other in (self._items_of(each, time) for each in along):
            nothing = nothing & found.by_row(other.are_blank)  # where it has a value, a marker is a step
            none = none | found.missing & found.by_row(np.diff(other.offsets) == 0)
        return self._last(field, found, nothing | none), None

    def _items_of(self, field: RawField, time: np.ndarray | None) -> "_Items":
        """The items of a field of lists; of a sequence along another one they are needed twice."""
        if field.name not in self._items:
            self._items[field.name] = self._read_items(field, time)
        return self._items[field.name]

    def _read_items(self, field: RawField, time: np.ndarray | None) -> "_Items":
        name = field.column
        column = self._columns[name]
        if pa.types.is_null(column.type):
            column = column.cast(pa.list_(PAIR if field.kind == "weighted" else pa.null()))
        joined = is_text(column.type)
        if joined and not field.separator:
            raise UserError(f"column {name!r} is text, so field {field.name!r} needs a separator")
        if joined:
            column = pc.split_pattern(column.cast(pa.string()).fill_null(""), field.separator)
        if not (pa.types.is_list(column.type) or pa.types.is_large_list(column.type)):
            raise _wrong_type(name, column.type, "lists or their joined text")
        lengths = pc.list_value_length(column).fill_null(0).to_numpy(zero_copy_only=False)
        offsets, items = np.r_[0, np.cumsum(lengths, dtype=np.int64)], plain_array(column.flatten())
        items = without_nan(items, field.null)
        if field.age:
            assert time is not None, "a layout with ages has times"
            ids, wrong = _ages(items, np.repeat(time, lengths), field)
            weights, rule = None, f"its times and the sample's must be known; {TIME_RULES['timestamp']}"
        elif field.kind != "weighted":
            ids, wrong = self._id_texts(items, name)
            weights, rule = None, "must be a list of strings or numbers"
        else:
            ids, weights, wrong = self._pairs(items, field)
            rule = 'must be a list of {"id": string or number, "weight": number}'
            rule = f"must be id{field.weight_separator}weight, joined by {field.separator!r}" if joined else rule
        if self._null_items == "wrong" and weights is not None and ids.null_count:
            wrong = wrong | mask(ids.is_null())
        if wrong.any():
            self._fail(wrong, name, items, rule, np.repeat(np.arange(self._rows), lengths))
        if weights is not None:
            large = np.abs(weights) > MAX_WEIGHT
            self._fail(large, name, items, WEIGHTS_ARE_BOUNDED, np.repeat(np.arange(self._rows), lengths))
            weights = np.where(large, 0.0, weights).astype(np.float32)
        return _Items(offsets, items, without_markers(ids.fill_null(""), field.null), weights)

    def _last(self, field: RawField, found: "_Items", nothing: np.ndarray) -> pa.ListArray:
        """Returns the last ids of each list; none of a list of one that is `nothing`, as empty text becomes.

        A sequence along another one has as many ids, of which one may be such.
        """
        offsets, ids = found.offsets, found.ids
        given = np.diff(offsets)
        single, own = np.flatnonzero(given == 1), given.copy()
        own[single] -= nothing[offsets[single]]
        steps = self._steps.setdefault(field.name, self._steps.get(field.along, own))
        wrong = np.where(steps > 0, given, own) != steps
        self._fail(wrong, field.column, pa.array(given), f"must have as many values as field {field.along!r}")
        lengths = np.minimum(np.where(wrong, 0, steps), field.max_length)
        starts = np.r_[0, np.cumsum(lengths)]
        indices = np.arange(starts[-1]) + np.repeat(offsets[1:] - starts[1:], lengths)
        return pa.ListArray.from_arrays(pa.array(starts.astype(np.int32)), ids.take(pa.array(indices)))

    def _pairs(self, items: pa.Array, field: RawField) -> tuple[pa.Array, np.ndarray, np.ndarray]:
        """Returns ids, float64 weights and which are wrong, from items that are text or {id, weight}.

        A missing item is a missing id of weight 1.
        """
        if is_text(items.type):
            if not field.weight_separator:
                raise UserError(f"column {field.column!r} holds text, so field {field.name!r} needs a weight_separator")
            text = without_markers(items.fill_null(""), field.null)
            return split_pairs(text, field.weight_separator)
        fields = [each.name for each in items.type] if pa.types.is_struct(items.type) else []
        is_pair = {"id", "weight"} <= set(fields)
        found = as_floats(plain_array(pc.struct_field(items, "weight"))) if is_pair else None
        if found is None:
            raise _wrong_type(field.column, pa.list_(items.type), "lists of {id, weight}, maps, or their joined text")
        ids, wrong = self._id_texts(plain_array(pc.struct_field(items, "id")), field.column)
        present = mask(items.is_valid())
        weights = np.where(present, found[0], 1.0)
        wrong = wrong | np.isnan(weights)
        return ids, np.where(wrong, 0.0, weights), wrong

    def _id_texts(self, values: pa.Array, name: str) -> tuple[pa.Array, np.ndarray]:
        """Returns strings, null where missing, and which values are wrong."""
        found = as_id_text(values)
        if found is None:
            raise _wrong_type(name, values.type, "ids: strings, numbers, truth values or times")
        text, wrong, doubts = found
        self.doubts.update({(name, doubt): count for doubt, count in doubts.items()})
        return text, wrong

    def _numbers(self, name: str, null: Collection[str] = ()) -> tuple[np.ndarray, np.ndarray]:
        """Returns float64 [R], NaN where missing or wrong, and bool [R], True where wrong."""
        column = without_nan(self._columns[name], null)
        if is_text(column.type):
            column = without_markers(column.fill_null(""), null)
        found = as_floats(column)
        if found is None:
            raise _wrong_type(name, self._columns[name].type, "numbers, their text or times")
        return found

    def _fail(
        self, wrong: np.ndarray, name: str, values: pa.Array, rule: str, sample_of: np.ndarray | None = None
    ) -> None:
        """Records the samples of wrong values; `sample_of` gives each value's sample where there are several."""
        for index in np.flatnonzero(wrong).tolist():
            sample = index if sample_of is None else int(sample_of[index])
            if sample not in self.problems:
                self.problems[sample] = (name, f"{rule}, got {_quoted(values[index])}")


def _seconds(values: pa.Array, name: str) -> tuple[np.ndarray, np.ndarray]:
    """Returns int64, Unix seconds, and which are missing or wrong, of numbers or times."""
    if pa.types.is_timestamp(values.type):  # nanoseconds have more digits than float64
        values = pc.floor_temporal(values.cast(pa.timestamp(values.type.unit)), unit="second").cast(pa.timestamp("s"))
    seconds = as_floats(values)
    if seconds is None or pa.types.is_boolean(values.type):
        raise _wrong_type(name, values.type, "times")
    return bounded_seconds(seconds[0])


def _ages(times: pa.Array, since: np.ndarray, field: RawField) -> tuple[pa.Array, np.ndarray]:
    """Returns the bits of ages in seconds, strings, null or empty where the time is, and which are wrong."""
    if is_text(times.type) or pa.types.is_null(times.type):
        text = without_markers(times.cast(pa.string()).fill_null(""), field.null)
        missing, (seconds, wrong) = mask(pc.equal(text, "")), as_times(text, "timestamp")
    else:
        missing, (seconds, wrong) = mask(times.is_null()), _seconds(times, field.column)
    bits = np.frexp(np.maximum(since - seconds, 0.0))[1]
    absent = pc.if_else(times.is_null(), pa.scalar(None, pa.string()), "")
    ids = pc.if_else(pa.array(missing), absent, pa.array(bits).cast(pa.string()))
    return ids, (wrong | np.isnan(since)) & ~missing


def split_pairs(text: pa.Array, separator: str) -> tuple[pa.Array, np.ndarray, np.ndarray]:
    """Splits `id:weight` pairs; an empty string is the empty id with weight 1.

    Returns:
        Ids, strings; weights, float64; and bool, True where a pair is invalid.
    """
    has_weight = pc.or_(pc.match_substring(text, separator), pc.equal(text, ""))
    pairs = pc.if_else(pc.and_(has_weight, pc.not_equal(text, "")), text, separator + "1")
    halves = pc.split_pattern(pairs, separator, max_splits=1, reverse=True).flatten()
    values, weights = (halves.take(pa.array(np.arange(part, len(halves), 2))) for part in (0, 1))
    numbers, invalid = as_numbers(weights)
    return values, numbers, ~mask(has_weight) | invalid | mask(pc.equal(weights, ""))


def _with_missing(
    offsets: np.ndarray, ids: pa.Array, weights: np.ndarray | None
) -> tuple[pa.ListArray, np.ndarray | None]:
    """Returns the lists with each empty list replaced by one empty string of weight 1."""
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
        raw: the items as they are given, null or otherwise.
        ids: strings, empty where an item is null, empty or a marker of missing values.
        weights: float32, if weighted.
    """

    offsets: np.ndarray
    raw: pa.Array
    ids: pa.Array
    weights: np.ndarray | None

    @cached_property
    def empty(self) -> np.ndarray:
        """Items that are empty text."""
        if not is_text(self.raw.type):
            return np.zeros(len(self.raw), bool)
        return mask(pc.equal(self.raw, "").fill_null(False))

    @cached_property
    def missing(self) -> np.ndarray:
        """Items without a value."""
        return mask(pc.equal(self.ids, ""))

    @cached_property
    def blank(self) -> np.ndarray:
        """Items without a value that are not null."""
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
        """Repeats values [R] for the items of each list."""
        return np.repeat(values, np.diff(self.offsets))


def _one_array(column: pa.ChunkedArray) -> pa.Array:
    if not column.num_chunks:
        return plain_array(pa.nulls(0, column.type))
    arrays = [plain_array(chunk) for chunk in column.chunks]
    return arrays[0] if len(arrays) == 1 else pa.concat_arrays(arrays)


def _quoted(value: pa.Scalar) -> str:
    """Returns a value as Python shows it, shortened."""
    try:
        text = repr(value.as_py())
    except (ValueError, OverflowError):  # text that is not UTF-8, a time after the year 9999
        text = f"{value.type} {value.value if pa.types.is_timestamp(value.type) else 'that cannot be shown'}"
    return text if len(text) <= LONGEST_QUOTED_VALUE else text[:LONGEST_QUOTED_VALUE] + "..."


def _wrong_type(name: str, kind: pa.DataType, wanted: str) -> UserError:
    return UserError(f"column {name!r} has the type {kind}; it must hold {wanted}")
