"""Texts that mean a missing value: those a schema file lists, and those that look like one. R values."""

from collections.abc import Collection

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from .numbers import NUMBER_PATTERN

LOOKS_MISSING = ("na", "n/a", "#n/a", "nan", "null", "none", "nil", "\\n", "-", "?", "undefined")
"""Texts, in lower case, that programs write for a missing value."""


def without_markers(text: pa.Array, markers: Collection[str]) -> pa.Array:
    """Returns strings [R] in which the empty text takes the place of each text that is one of `markers`."""
    if not markers:
        return text
    return pc.if_else(pc.is_in(text, pa.array(markers, text.type)), pa.scalar("", text.type), text)


def marker_numbers(markers: Collection[str]) -> list[float]:
    """Returns the markers that are numbers."""
    return [float(marker) for marker in markers if NUMBER_PATTERN.fullmatch(marker)]


def without_marker_numbers(values: np.ndarray, markers: Collection[str]) -> np.ndarray:
    """Returns numbers, float64 [R], with NaN in place of those that equal one of `markers`, in any notation."""
    numbers = marker_numbers(markers)
    return np.where(np.isin(values, numbers), np.nan, values) if numbers else values


def without_nan(values: pa.Array, markers: Collection[str]) -> pa.Array:
    """Returns values [R] of any type; in floating point numbers, null takes the place of NaN if that is a marker."""
    if not pa.types.is_floating(values.type) or "nan" not in [marker.lower() for marker in markers]:
        return values
    return pc.if_else(pc.is_nan(values), pa.scalar(None, values.type), values)


def looks_missing(text: pa.Array) -> np.ndarray:
    """Returns bool [R] from strings [R] which may be null: True where one is probably meant as a missing value."""
    known = pc.is_in(pc.utf8_lower(text), pa.array(LOOKS_MISSING, text.type))
    return known.to_numpy(zero_copy_only=False)
