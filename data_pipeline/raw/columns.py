"""Raw columns of any Arrow type that can hold their values, checked and converted to the input of an `Encoder`.

Text, JSON and Parquet all become one typed table before. R samples.
"""

import json
import re
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import isfinite
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from cowrec.errors import UserError

from .layouts import RawLabel
from .times import RawTime, TimePart
from .values import (
    NUMBER_PATTERN,
    as_floats,
    as_id_text,
    is_text,
    looks_missing,
    marker_numbers,
    mask,
    plain_array,
    with_point,
    with_points,
    without_marker_numbers,
    without_markers,
    without_nan,
)

LONGEST_QUOTED_VALUE = 60
AROUND_VECTORS = "[](){} \t"
"""What may stand around the numbers of a vector in text."""
WEIGHTLESS = "weightless"
"""Samples to predict whose weight is missing or wrong."""
NEGATIVE = "negative: "
"""Samples with a text that `positive` does not list; the text follows."""
MOST_TEXTS = 100
EARLY, EARLY_TIMES = 631_152_000, "times before 1990"
"""Unix seconds of 1990, and samples with an earlier time."""
MISSING_LABEL = "the label is missing"
MAX_WEIGHT = 1e6
"""Largest magnitude of the weight of a sample or of an id."""
WEIGHTS_ARE_BOUNDED = f"weights must be at most {MAX_WEIGHT:,.0f}, since one sample could end training otherwise"


class SampleColumns:
    """Reads the columns of a table and records the first problem of each sample.

    In the table null is a missing value; a null id with a weight is what `null_items` says, "missing" or "wrong".
    `problems` has the column and what is wrong, by row, and `doubts` the numbers of suspicious ids (see `as_id_text`)
    and labels, by column and doubt. For `decimal` and `for_prediction` see `Layout`.
    """

    def __init__(
        self,
        table: pa.Table,
        null_items: Literal["missing", "wrong"],
        *,
        decimal: str = ".",
        for_prediction: bool = False,
    ) -> None:
        self.arrays = {name: _one_array(table[name]) for name in table.column_names}
        self._decimal = decimal
        self.rows, self.null_items, self._for_prediction = table.num_rows, null_items, for_prediction
        self.problems: dict[int, tuple[str, str]] = {}
        self.doubts: Counter[tuple[str, str]] = Counter()

    @property
    def good(self) -> np.ndarray:
        """Samples without a problem: bool [R]."""
        good = np.ones(self.rows, bool)
        good[list(self.problems)] = False
        return good

    def numbers(self, name: str, null: Collection[str] = ()) -> np.ndarray:
        """Returns float64 [R], NaN where missing or wrong; `null` lists texts that mean a missing value."""
        values, wrong = self._numbers(name, null)
        column = self.arrays[name]
        rule = f"must be a finite number or {'empty' if is_text(column.type) else 'null'}"
        if wrong.any() and is_text(column.type):
            for marker in column.filter(pa.array(wrong & looks_missing(column))).unique().to_pylist():
                hint = f"if this means a missing value, set null = [{json.dumps(marker)}] in the schema file"
                self.fail(wrong & mask(pc.equal(column, marker).fill_null(False)), name, column, f"{rule}; {hint}")
        if wrong.any() and pa.types.is_floating(column.type):
            for marker, is_marker in (("NaN", pc.is_nan), ("inf", pc.is_inf)):
                hint = f'if {marker} means a missing value, set null = ["{marker}"] in the schema file'
                self.fail(wrong & mask(is_marker(column).fill_null(False)), name, column, f"{rule}; {hint}")
        self.fail(wrong, name, column, rule)
        return without_marker_numbers(values, null)

    def vectors(self, name: str, width: int, separator: str, null: Collection[str] = ()) -> np.ndarray:
        """Returns the numbers of vectors, float64 [width, R], NaN where a vector is missing or wrong.

        The column has lists, or text of numbers that `separator` joins, in brackets or not. An empty list and empty
        text are missing vectors, and so are the texts in `null`. A vector must have `width` finite numbers.
        """
        column = lists = self.arrays[name]
        missing = mask(column.is_null())
        if is_text(column.type):
            if not separator:
                raise UserError(f"column {name!r} is text, so its vectors need a separator")
            text = pc.utf8_trim(without_markers(column.cast(pa.string()).fill_null(""), null), AROUND_VECTORS)
            missing = mask(pc.equal(text, ""))
            lists = pc.utf8_split_whitespace(text) if separator.isspace() else pc.split_pattern(text, separator)
        elif pa.types.is_null(column.type):
            lists = column.cast(pa.list_(pa.float64()))
        if not (pa.types.is_list(lists.type) or pa.types.is_large_list(lists.type)):
            raise wrong_type(name, column.type, "lists of numbers or their joined text")
        lengths = pc.list_value_length(lists).fill_null(0).to_numpy(zero_copy_only=False)
        items = plain_array(lists.flatten())
        found = as_floats(pc.utf8_trim_whitespace(items) if is_text(items.type) else items)
        if found is None:
            raise wrong_type(name, column.type, "lists of numbers or their joined text")
        missing = missing | (lengths == 0)
        right = ~missing & (lengths == width)
        vectors = np.full((len(lengths), width), np.nan)
        vectors[right] = found[0][np.repeat(right, lengths)].reshape(-1, width)
        right[right] = np.isfinite(vectors[right]).all(axis=1)
        vectors[~right] = np.nan
        self.fail(~(right | missing), name, column, f"must be a list of {width} finite numbers or null")
        return vectors.T

    def labels(self, label: RawLabel, *, required: bool) -> np.ndarray:
        """Returns float32 [R]: 0, 1, a rate, or NaN where wrong, or missing, which is a problem if `required`."""
        column = self.arrays[label.column]
        if label.is_rate:
            numbers, wrong = self._numbers(label.column, label.null)
            numbers = without_marker_numbers(numbers, label.null)
            if label.of:
                numbers = numbers / self._totals(label)
            wrong = wrong | (numbers < 0) | (numbers > 1)
            return self._labels(label, np.where(wrong, np.nan, numbers).astype(np.float32), wrong, required=required)
        found = as_id_text(without_nan(column, ["NaN"]))
        if found is None:
            raise wrong_type(label.column, column.type, "labels: numbers, truth values or text")
        text = found[0].fill_null("")
        values: np.ndarray
        if label.positive:
            coded = text.dictionary_encode()
            of_texts, indices = label.values(coded.dictionary)[0], mask(coded.indices)
            values, wrong = of_texts[indices], np.zeros(len(text), bool)
            counts = np.bincount(indices, minlength=len(of_texts))
            for index in np.flatnonzero(of_texts == 0)[:MOST_TEXTS].tolist():
                self.doubts[label.column, NEGATIVE + coded.dictionary[index].as_py()] += int(counts[index])
        else:
            values, wrong = label.values(text if label.threshold is None else self._pointed(text))
        return self._labels(label, values, wrong, required=required)

    def _labels(self, label: RawLabel, values: np.ndarray, wrong: np.ndarray, *, required: bool) -> np.ndarray:
        if self._for_prediction:
            return values
        self.fail(wrong, label.column, self.arrays[label.column], label.rule)
        if required:
            self.fail(np.isnan(values), label.column, self.arrays[label.column], MISSING_LABEL)
        return values

    def weights(self, name: str, labels: Sequence[RawLabel]) -> np.ndarray:
        """Returns sample weights, float32 [R]: 1 if `name` is empty, times the totals of labels of counts.

        A missing, negative or very large weight is a problem.
        """
        weights = np.ones(self.rows)
        factors = [(label.of, self._totals(label)) for label in labels if label.of]
        if name:
            values, wrong = self._numbers(name)
            wrong = wrong | ~(values >= 0)
            if not self._for_prediction:
                self.fail(wrong, name, self.arrays[name], "a sample weight must be a finite number of at least 0")
            factors.append((name, np.where(wrong, np.nan, values)))
        for column, values in factors:
            weights = weights * values
            large = weights > MAX_WEIGHT
            if self._for_prediction:
                self.doubts[column, WEIGHTLESS] += int((np.isnan(values) | large).sum())
            else:
                self.fail(large, column, self.arrays[column], WEIGHTS_ARE_BOUNDED)
            weights = np.where(large, np.nan, weights)
        return np.nan_to_num(weights).astype(np.float32)

    def _totals(self, label: RawLabel) -> np.ndarray:
        """Returns the totals of a label of counts, float64 [R], NaN where they are a problem."""
        totals = without_marker_numbers(self._numbers(label.of, label.null)[0], label.null)
        wrong = ~(totals >= 1)
        if not self._for_prediction:
            rule = "the total of a count must be a finite number of at least 1"
            self.fail(wrong, label.of, self.arrays[label.of], rule)
        return np.where(wrong, np.nan, totals)

    def shown(self, name: str) -> pa.Array:
        """Returns values of any type as predictions show them: strings [R], empty where missing."""
        column = self.arrays[name]
        ids = as_id_text(column)  # without exponents
        try:
            return (column.cast(pa.string()) if ids is None else ids[0]).fill_null("")
        except pa.ArrowNotImplementedError:
            raise wrong_type(name, column.type, "values that can be shown as text") from None

    def times(self, time: RawTime) -> np.ndarray:
        """Returns int64 [R], Unix seconds; a missing time is a problem."""
        values, wrong = self._times(time)
        self.fail(wrong, time.name, self._written(time), time.rule)
        if early := int((values[~wrong] < EARLY).sum()):
            self.doubts[time.name, EARLY_TIMES] += early
        return values

    def known_times(self, time: RawTime) -> np.ndarray:
        """Returns float64 [R], Unix seconds; NaN where missing or wrong."""
        values, wrong = self._times(time)
        return np.where(wrong, np.nan, values)

    def parts_of_times(self, time: RawTime, part: TimePart, null: Collection[str]) -> pa.Array:
        """Returns a part of each time, strings [R], empty where it is missing; a wrong time is a problem."""
        values, wrong = self._times(time, null)
        written = self._written(time)
        missing = mask(pc.equal(without_markers(_text(written).fill_null(""), null), ""))
        self.fail(wrong & ~missing, time.name, written, time.rule)
        return pc.if_else(pa.array(wrong), "", time.part(values, part))

    def _times(self, time: RawTime, null: Collection[str] = ()) -> tuple[np.ndarray, np.ndarray]:
        arrays = [without_nan(self.arrays[name], null) for name in time.columns]
        found = time.seconds([without_markers(array, null) if is_text(array.type) else array for array in arrays])
        if found is None:
            types = ", ".join(str(array.type) for array in arrays)
            raise UserError(f"column {time.name!r} has the type {types}; it must hold times")
        return found

    def _written(self, time: RawTime) -> pa.Array:
        """Returns the values of a time as messages show them."""
        arrays = [self.arrays[name] for name in time.columns]
        return arrays[0] if len(arrays) == 1 else pc.binary_join_element_wise(*map(_text, arrays), " ")

    def texts(self, name: str, null: Collection[str] = ()) -> pa.Array:
        """Returns ids, strings [R], empty where missing; `null` lists further texts that mean a missing value."""
        text, wrong = self.id_texts(without_nan(self.arrays[name], null), name)
        self.fail(wrong, name, self.arrays[name], "must be a finite number or null")
        return without_markers(text.fill_null(""), null)

    def row_numbers(self, name: str, missing: int, end: int) -> np.ndarray:
        """Returns rows of an embedding table, int32 [R], from integers or their text; `missing` where null."""
        values = self.numbers(name)
        rows = np.where(np.isnan(values), missing, values)
        self.fail((rows < 0) | (rows >= end) | (rows % 1 != 0), name, self.arrays[name], f"must be in [0, {end})")
        return rows.astype(np.int32)

    def id_texts(self, values: pa.Array, name: str) -> tuple[pa.Array, np.ndarray]:
        """Returns strings, null where missing, and which values are wrong."""
        found = as_id_text(values)
        if found is None:
            raise wrong_type(name, values.type, "ids: strings, numbers, truth values or times")
        text, wrong, doubts = found
        self.doubts.update({(name, doubt): count for doubt, count in doubts.items()})
        return text, wrong

    def _numbers(self, name: str, null: Collection[str] = ()) -> tuple[np.ndarray, np.ndarray]:
        """Returns float64 [R], NaN where missing or wrong, and bool [R], True where wrong."""
        column = without_nan(self.arrays[name], null)
        if is_text(column.type):
            column = self._pointed(without_markers(column.fill_null(""), null))
        found = as_floats(column)
        if found is None:
            raise wrong_type(name, self.arrays[name].type, "numbers, their text or times")
        return found

    def _pointed(self, text: pa.Array) -> pa.Array:
        return with_points(text) if self._decimal == "," else text

    def fail(
        self, wrong: np.ndarray, name: str, values: pa.Array, rule: str, sample_of: np.ndarray | None = None
    ) -> None:
        """Records the samples of wrong values; `sample_of` has the sample of each value if samples have several."""
        for index in np.flatnonzero(wrong).tolist():
            sample = index if sample_of is None else int(sample_of[index])
            if sample not in self.problems:
                self.problems[sample] = (name, f"{rule}, got {_quoted(values[index])}")


def _text(values: pa.Array) -> pa.Array:
    if is_text(values.type):
        return values
    found = as_id_text(values)
    return values.cast(pa.string()) if found is None else found[0]


def _one_array(column: pa.ChunkedArray) -> pa.Array:
    if not column.num_chunks:
        return plain_array(pa.nulls(0, column.type))
    arrays = [plain_array(chunk) for chunk in column.chunks]
    return arrays[0] if len(arrays) == 1 else pa.concat_arrays(arrays)


def _quoted(value: pa.Scalar) -> str:
    try:
        text = repr(value.as_py())
    except (ValueError, OverflowError):  # text that is not UTF-8, a time after the year 9999
        text = f"{value.type} {value.value if pa.types.is_timestamp(value.type) else 'that cannot be shown'}"
    return text if len(text) <= LONGEST_QUOTED_VALUE else text[:LONGEST_QUOTED_VALUE] + "..."


def wrong_type(name: str, kind: pa.DataType, wanted: str) -> UserError:
    return UserError(f"column {name!r} has the type {kind}; it must hold {wanted}")


_INT64 = 2.0**63
_SURROGATE = re.compile("[\ud800-\udfff]")


@dataclass(frozen=True)
class ValueType:
    """Keys of a field, see `RawField`, and the decimal sign of the layout, by which single values are read."""

    separator: str = ""
    weight_separator: str = ""
    null: tuple[str, ...] = ()
    brackets: bool = False
    decimal: str = "."

    @cached_property
    def null_numbers(self) -> list[float]:
        return marker_numbers(self.null)


UNMARKED = ValueType()


class WrongValue(ValueError):
    """Raised for a single value that is not of its column's kind."""


def number_value(value: Any, kind: ValueType) -> float | None:
    if isinstance(value, str) and (not value or value in kind.null):
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        raise WrongValue
    if isinstance(value, str) and kind.decimal == ",":
        value = with_point(value)
    if isinstance(value, str) and not NUMBER_PATTERN.fullmatch(value):
        raise WrongValue
    try:
        number = float(value)
    except OverflowError:
        return float("inf")
    return None if number in kind.null_numbers else number


def vector_value(value: Any, kind: ValueType) -> list[float | None] | None:
    if isinstance(value, str):
        text = "" if value in kind.null else value.strip(AROUND_VECTORS)
        value = text.split(None if kind.separator.isspace() else kind.separator or None) if text else []
        if len(value) > 1 and not kind.separator:
            raise WrongValue
        value = [number.strip() for number in value]
    if not isinstance(value, list):
        raise WrongValue
    return [number_value(number, UNMARKED) for number in value] or None


def time_value(value: Any, kind: ValueType) -> float | str | None:
    return text_value(value, kind) if isinstance(value, str) else number_value(value, kind)


def text_value(value: Any, _: ValueType) -> str:
    if isinstance(value, str) and not _SURROGATE.search(value):
        return value
    if not isinstance(value, int) or isinstance(value, bool):
        raise WrongValue
    return str(value)


def label_value(value: Any, kind: ValueType) -> str | None:
    if isinstance(value, bool):
        return "true" if value else "false"
    if value != value:  # NaN, a missing label in Parquet, too
        return None
    return repr(value) if isinstance(value, float) else text_value(value, kind)


def id_value(value: Any, kind: ValueType) -> str:
    """Returns the id that the same value has in Parquet; a missing value becomes the empty text."""
    text = _id_text(value, kind)
    return "" if text in kind.null else text


def _id_text(value: Any, kind: ValueType) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if _is_fraction(value):
        return _fractions([value])[value]
    return str(int(value)) if isinstance(value, float) and isfinite(value) else text_value(value, kind)


def id_values(values: Sequence[Any], kind: ValueType) -> list[str]:
    """Converts values to ids; all fractions are converted at once, which is much faster than one by one."""
    texts = _fractions(fractions) if (fractions := list(filter(_is_fraction, values))) else {}
    return [_id_text(texts.get(value, value) if isinstance(value, float) else value, kind) for value in values]


def _is_fraction(value: Any) -> bool:
    return isinstance(value, float) and isfinite(value) and not (value.is_integer() and abs(value) < _INT64)


def _fractions(values: list[float]) -> dict[float, str]:
    return dict(zip(values, pa.array(values).cast(pa.string()).to_pylist(), strict=True))
