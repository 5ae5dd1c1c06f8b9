"""Values of raw columns: numbers, ids, and texts that mean a missing value. R values."""

import re
from collections import Counter
from collections.abc import Collection
from decimal import Decimal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

NUMBER = r"^[+-]?([0-9]+(\.[0-9]*)?|\.[0-9]+)([eE][+-]?[0-9]+)?$"
NUMBER_PATTERN = re.compile(NUMBER)


def cast_numbers(text: pa.Array) -> pa.Array:
    """Converts strings to float64; null where a string is null or no number."""
    try:  # the whole column at once: it is nearly always valid
        return text.cast(pa.float64())
    except pa.ArrowInvalid:
        matched = pc.match_substring_regex(text, NUMBER)
        return pc.if_else(matched, text, pa.scalar(None, text.type)).cast(pa.float64())


def as_numbers(text: pa.Array) -> tuple[np.ndarray, np.ndarray]:
    """Converts strings [R] without nulls: float64 [R], NaN if empty or invalid, and bool [R], True if invalid."""
    present = pc.not_equal(text, "")
    values = cast_numbers(pc.if_else(present, text, pa.scalar(None, text.type))).to_numpy(zero_copy_only=False)
    finite = np.isfinite(values)
    invalid = present.to_numpy(zero_copy_only=False) & ~finite
    return (np.where(finite, values, np.nan) if invalid.any() else values), invalid


THOUSANDS = r"^[+-]?[0-9]{1,3}(\.[0-9]{3})+(,[0-9]+)?$"
"""Numbers with a decimal comma whose points separate thousands."""


def with_points(text: pa.Array) -> pa.Array:
    """Returns numbers with a decimal comma, strings [R], with a point; a number with another point becomes invalid."""
    thousands = pc.match_substring_regex(text, THOUSANDS)
    text = pc.if_else(thousands, pc.replace_substring(text, ".", ""), pc.replace_substring(text, ".", "?"))
    return pc.replace_substring(text, ",", ".")


def with_point(text: str) -> str:
    """Does the same as `with_points` for one string."""
    return text.replace(".", "" if re.fullmatch(THOUSANDS, text) else "?").replace(",", ".")


LOOKS_MISSING = ("na", "n/a", "#n/a", "nan", "null", "none", "nil", "\\n", "-", "?", "undefined", "inf", "-inf")
"""Texts, in lower case, that programs write for a missing value."""


def without_markers(text: pa.Array, markers: Collection[str]) -> pa.Array:
    """Returns strings [R], empty in place of each of `markers`."""
    if not markers:
        return text
    return pc.if_else(pc.is_in(text, pa.array(markers, text.type)), pa.scalar("", text.type), text)


def marker_numbers(markers: Collection[str]) -> list[float]:
    return [float(marker) for marker in markers if NUMBER_PATTERN.fullmatch(marker)]


def without_marker_numbers(values: np.ndarray, markers: Collection[str]) -> np.ndarray:
    """Returns float64 [R], NaN in place of the numbers that are `markers`, in any notation."""
    numbers = marker_numbers(markers)
    return np.where(np.isin(values, numbers), np.nan, values) if numbers else values


def without_nan(values: pa.Array, markers: Collection[str]) -> pa.Array:
    """Returns values [R] of any type, in which NaN, inf and -inf that are markers become null."""
    marked = [float(marker) for marker in markers if marker.lower() in ("nan", "inf", "-inf")]
    if not pa.types.is_floating(values.type) or not marked:
        return values
    return pc.if_else(pc.is_in(values.cast(pa.float64()), pa.array(marked)), pa.scalar(None, values.type), values)


def looks_missing(text: pa.Array) -> np.ndarray:
    """Returns bool [R]: True where a string is probably meant as a missing value."""
    return mask(pc.is_in(pc.utf8_lower(text), pa.array(LOOKS_MISSING, text.type)))


UNITS = {"s": 1.0, "ms": 1e3, "us": 1e6, "ns": 1e9}
EXACT_INTEGERS = {16: 2**11, 32: 2**24, 64: 2**53}
"""Integers of a larger magnitude have lost digits in a floating point number of so many bits."""
FRACTIONS, ROUNDED = "fractions", "rounded"
"""What is suspicious about ids that are floating point numbers."""


def plain_array(values: pa.Array) -> pa.Array:
    """Returns values without dictionaries, extensions, run ends, fixed-size lists and maps; UTF-8 bytes become text."""
    kind = values.type
    if isinstance(values, pa.ExtensionArray):
        return plain_array(values.storage)
    if pa.types.is_dictionary(kind):
        return plain_array(without_views(values.dictionary).take(values.indices))
    if pa.types.is_run_end_encoded(kind):
        return plain_array(pc.run_end_decode(values))
    if pa.types.is_map(kind):
        pair = pa.struct([("id", kind.key_type), ("weight", kind.item_type)])
        return values.cast(pa.list_(pair))
    if pa.types.is_fixed_size_list(kind):
        return values.cast(pa.list_(kind.value_type))
    if pa.types.is_binary(kind) or pa.types.is_string_view(kind) or pa.types.is_binary_view(kind):
        return values.cast(pa.string())
    return values.cast(pa.large_string()) if pa.types.is_large_binary(kind) else values


def without_views(values: pa.Array) -> pa.Array:
    """Returns text from which values can be taken; Arrow cannot take them from views."""
    return values.cast(pa.binary()) if values.type in (pa.string_view(), pa.binary_view()) else values


def as_floats(values: pa.Array) -> tuple[np.ndarray, np.ndarray] | None:
    """Converts numbers, their text, truth values (0 or 1), and times and dates (Unix seconds).

    Returns float64 [R], NaN if missing or wrong, and bool [R], True if wrong; None if the type holds no numbers.
    """
    kind = values.type
    if is_text(kind):
        return as_numbers(values.fill_null(""))
    valid = mask(values.is_valid())
    scale = 1.0
    if pa.types.is_boolean(kind):
        values = values.cast(pa.uint8())
    elif pa.types.is_decimal(kind):
        values = values.cast(pa.string())  # the nearest float64, which Arrow's direct cast can miss
    elif pa.types.is_date(kind):
        values = values.cast(pa.timestamp("s")).cast(pa.int64())
    elif pa.types.is_timestamp(kind):
        values, scale = values.cast(pa.int64()), UNITS[kind.unit]
    elif pa.types.is_float16(kind):
        values = values.cast(pa.float32())
    elif not (pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_null(kind)):
        return None
    numbers = values.cast(pa.float64(), safe=False).to_numpy(zero_copy_only=False)
    wrong = ~np.isfinite(numbers) & valid
    numbers = np.where(wrong, np.nan, numbers) if wrong.any() else numbers
    return (numbers if scale == 1.0 else numbers / scale), wrong


def as_id_text(values: pa.Array) -> tuple[pa.Array, np.ndarray, Counter[str]] | None:
    """Converts ids of any flat type to text; equal ids of different types have equal text.

    A whole number has its decimal digits, whether it is an integer, a float or a decimal. Truth values are "true" and
    "false", dates "2024-01-31", times "2024-01-31 07:00:00" in UTC.

    Returns strings [R], null where missing; bool [R], True where a value cannot be an id; and the numbers of ids that
    are `FRACTIONS`, or that were `ROUNDED` since they are so large. None if the type holds no ids.
    """
    kind = values.type
    if pa.types.is_floating(kind):
        return _float_ids(values)
    if is_text(kind) or pa.types.is_integer(kind) or pa.types.is_boolean(kind) or pa.types.is_null(kind):
        text = values.cast(pa.string())
    elif pa.types.is_date(kind):
        text = values.cast(pa.date32()).cast(pa.string())
    elif pa.types.is_decimal(kind):
        text = _without_zeros(_decimal_text(values))
    elif pa.types.is_timestamp(kind):
        text = _without_zeros(values.cast(pa.timestamp(kind.unit)).cast(pa.string()))
    else:
        return None
    return text, np.zeros(len(values), bool), Counter()


def family(kind: pa.DataType) -> str:
    """Returns "text", "number", "truth value", "date" or "time"; for lists, the family of their ids.

    Text may stand for values of any family. Values of two other families differ.
    """
    if pa.types.is_dictionary(kind) or pa.types.is_nested(kind):
        if pa.types.is_struct(kind):
            return family(kind.field("id").type)
        return family(kind.key_type if pa.types.is_map(kind) else kind.value_type)
    if pa.types.is_boolean(kind):
        return "truth value"
    if pa.types.is_date(kind):
        return "date"
    if pa.types.is_timestamp(kind):
        return "time"
    number = pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_decimal(kind)
    return "number" if number else "text"


def is_text(kind: pa.DataType) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind))


def mask(array: pa.Array) -> np.ndarray:
    """Converts truth values without nulls to bool [R]."""
    found: np.ndarray = array.to_numpy(zero_copy_only=False)
    return found


def _float_ids(values: pa.Array) -> tuple[pa.Array, np.ndarray, Counter[str]]:
    bits = values.type.bit_width
    values = values.cast(pa.float32()) if bits == 16 else values
    numbers = values.cast(pa.float64()).to_numpy(zero_copy_only=False)
    wrong = ~np.isfinite(numbers) & mask(values.is_valid())
    size = np.abs(numbers)
    whole = (numbers == np.floor(numbers)) & (size < 2.0**63)
    digits = pa.array(np.where(whole, numbers, 0.0).astype(np.int64)).cast(pa.string())
    text = pc.if_else(pa.array(whole), digits, values.cast(pa.string()))
    doubts = Counter({FRACTIONS: int((np.isfinite(numbers) & (numbers != np.floor(numbers))).sum())})
    doubts[ROUNDED] = int((np.isfinite(numbers) & (size >= EXACT_INTEGERS[bits])).sum())
    return text, wrong, +doubts


def _decimal_text(values: pa.Array) -> pa.Array:
    """Converts decimals to text without the exponents that Arrow writes for small decimals."""
    text = values.cast(pa.string())
    if not pc.any(pc.match_substring(text, "E")).as_py():
        return text
    coded = text.dictionary_encode()
    return pa.array([f"{Decimal(value):f}" for value in coded.dictionary.to_pylist()], pa.string()).take(coded.indices)


def _without_zeros(text: pa.Array) -> pa.Array:
    """Removes the zeros at the end of fractions, whose number depends on the type's precision."""
    text = pc.replace_substring_regex(text, r"(\.[0-9]*[1-9])0+$", r"\1")
    return pc.replace_substring_regex(text, r"\.0+$", "")
