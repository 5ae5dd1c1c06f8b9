"""Arrow arrays of any type as numbers or as the text of ids. R values."""

from collections import Counter
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from .numbers import as_numbers

UNITS = {"s": 1.0, "ms": 1e3, "us": 1e6, "ns": 1e9}
EXACT_INTEGERS = {16: 2**11, 32: 2**24, 64: 2**53}
"""Integers of a larger magnitude have lost digits in a floating point number of so many bits."""
FRACTIONS, ROUNDED = "fractions", "rounded"
"""What is suspicious about ids that are floating point numbers."""


@dataclass(frozen=True)
class IdText:
    """Ids as text.

    Attributes:
        text: strings [R], null where missing.
        wrong: bool [R], True where a value cannot be an id.
        doubts: how many ids are `FRACTIONS` (no whole number), or so large that they were `ROUNDED`.
    """

    text: pa.Array
    wrong: np.ndarray
    doubts: Counter[str] = field(default_factory=Counter)


def plain_array(values: pa.Array) -> pa.Array:
    """Returns an array whose type is neither a dictionary, an extension nor one of several kinds of lists or text.

    Lists, also of fixed size, and maps become `list` or `large_list`; bytes become text if they are UTF-8.
    """
    kind = values.type
    if isinstance(values, pa.ExtensionArray):
        return plain_array(values.storage)
    if pa.types.is_dictionary(kind):
        return plain_array(values.cast(kind.value_type))
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


def as_floats(values: pa.Array) -> tuple[np.ndarray, np.ndarray] | None:
    """Converts numbers, their text, truth values (0 or 1), and times and dates (Unix seconds).

    Returns:
        float64 [R], NaN where missing or wrong, and bool [R], True where wrong; None if the type holds no numbers.
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


def as_id_text(values: pa.Array) -> IdText | None:
    """Converts ids of any flat type to text, so that equal ids have equal text whatever their type is.

    An integer has its decimal digits, and so has a float or decimal that is a whole number. Truth values are "true" and
    "false", dates "2024-01-31", times "2024-01-31 07:00:00" in UTC.

    Returns:
        None if the type holds no ids.
    """
    kind = values.type
    fine = np.zeros(len(values), bool)
    if is_text(kind) or pa.types.is_integer(kind) or pa.types.is_boolean(kind) or pa.types.is_null(kind):
        return IdText(values.cast(pa.string()), fine)
    if pa.types.is_floating(kind):
        return _float_ids(values)
    if pa.types.is_date(kind):
        return IdText(values.cast(pa.date32()).cast(pa.string()), fine)
    if pa.types.is_decimal(kind):
        return IdText(_without_zeros(values.cast(pa.string())), fine)
    if pa.types.is_timestamp(kind):
        return IdText(_without_zeros(values.cast(pa.timestamp(kind.unit)).cast(pa.string())), fine)
    return None


def family(kind: pa.DataType) -> str:
    """Returns what values of a type are: "text", "number", "truth value", "date" or "time"; of lists, their ids.

    Values of two families do not mean the same, except that text may stand for any.
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
    """Returns whether a type is that of strings."""
    return pa.types.is_string(kind) or pa.types.is_large_string(kind)


def mask(array: pa.Array) -> np.ndarray:
    """Converts truth values without nulls to bool [R]."""
    return array.to_numpy(zero_copy_only=False)


def _float_ids(values: pa.Array) -> IdText:
    bits = values.type.bit_width
    values = values.cast(pa.float32()) if bits == 16 else values
    numbers = values.cast(pa.float64()).to_numpy(zero_copy_only=False)
    wrong = ~np.isfinite(numbers) & mask(values.is_valid())
    size = np.abs(numbers)
    whole = (numbers == np.floor(numbers)) & (size < 2.0**63)
    digits = pa.array(np.where(whole, numbers, 0.0).astype(np.int64)).cast(pa.string())
    text = pc.if_else(pa.array(whole), digits, values.cast(pa.string()))
    doubts = Counter({FRACTIONS: int((np.isfinite(numbers) & ~whole).sum())})
    doubts[ROUNDED] = int((np.isfinite(numbers) & (size >= EXACT_INTEGERS[bits])).sum())
    return IdText(text, wrong, +doubts)


def _without_zeros(text: pa.Array) -> pa.Array:
    """Removes zeros at the end of a fraction, which depend on the type's precision, and a point before nothing."""
    text = pc.replace_substring_regex(text, r"(\.[0-9]*[1-9])0+$", r"\1")
    return pc.replace_substring_regex(text, r"\.0+$", "")
