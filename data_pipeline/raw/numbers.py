"""Numbers as text: the pattern that is accepted, and the conversion of a column."""

import re

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

NUMBER = r"^[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?$"
NUMBER_PATTERN = re.compile(NUMBER)


def cast_numbers(text: pa.Array) -> pa.Array:
    """Converts strings to float64; null where a string is null or no number."""
    try:  # the whole column at once: it is nearly always valid
        return text.cast(pa.float64())
    except pa.ArrowInvalid:
        matched = pc.match_substring_regex(text, NUMBER)
        return pc.if_else(matched, text, pa.scalar(None, text.type)).cast(pa.float64())


def as_numbers(text: pa.Array) -> tuple[np.ndarray, np.ndarray]:
    """Converts strings [R] without nulls to finite numbers.

    Returns:
        float64 [R], NaN where a string is empty or invalid; and bool [R], True where it is invalid.
    """
    present = pc.not_equal(text, "")
    values = cast_numbers(pc.if_else(present, text, pa.scalar(None, text.type))).to_numpy(zero_copy_only=False)
    finite = np.isfinite(values)
    invalid = present.to_numpy(zero_copy_only=False) & ~finite
    return (np.where(finite, values, np.nan) if invalid.any() else values), invalid
