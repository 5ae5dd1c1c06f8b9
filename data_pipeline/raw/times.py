"""Conversion of sample times in text: Unix seconds, ISO 8601, or Avazu's hours. R samples."""

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from .numbers import cast_numbers

EARLIEST, LATEST = -62_135_596_800, 253_402_300_799
"""Bounds of a valid time: the years 1 to 9999. Present-day Unix milliseconds are beyond them."""

TIME_RULES = {
    "timestamp": "a time must be Unix seconds (not milliseconds) or ISO 8601, such as 2014-10-21T07:00:00Z",
    "hour": "a time must be YYMMDDHH",
}

_ISO = r"^[0-9]{4}-[0-9]{2}-[0-9]{2}([T ][0-9]{2}:[0-9]{2}(:[0-9]{2}(\.[0-9]{1,9})?)?)?"
_ZONED = _ISO + r"(Z|[+-][0-9]{2}(:?[0-9]{2})?)$"
_LOCAL = _ISO + "$"
_HOUR = r"^[0-9]{8}$"


def as_times(text: pa.Array, time_format: str) -> tuple[np.ndarray, np.ndarray]:
    """Converts strings to Unix seconds.

    Args:
        text: [R], without nulls.
        time_format: "timestamp": Unix seconds, rounded down, or ISO 8601 (a date, or a date and time with at least
            hours and minutes; UTC unless it names a zone). "hour": YYMMDDHH in the years 2000 to 2099, UTC.

    Returns:
        int64 [R], 0 where invalid; and bool [R], True where invalid.
    """
    if time_format == "hour":
        year, month, day, hour = (pc.utf8_slice_codeunits(text, start, start + 2) for start in (0, 2, 4, 6))
        iso = pc.binary_join_element_wise("20", year, "-", month, "-", day, "T", hour, ":00", "")
        return _seconds(_parse_iso(pc.if_else(pc.match_substring_regex(text, _HOUR), iso, ""), _LOCAL, zoned=False))
    numbers = cast_numbers(text)
    if numbers.null_count:
        for pattern, zoned in ((_LOCAL, False), (_ZONED, True)):
            numbers = pc.coalesce(numbers, _parse_iso(text, pattern, zoned=zoned))
    return _seconds(numbers)


def bounded_seconds(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Rounds float64 [R] down to int64 [R], 0 where NaN or outside the years 1 to 9999; and bool [R], True there."""
    with np.errstate(invalid="ignore"):
        invalid = ~((values >= EARLIEST) & (values < LATEST + 1))
    return np.floor(np.where(invalid, 0.0, values)).astype(np.int64), invalid


def _seconds(numbers: pa.Array) -> tuple[np.ndarray, np.ndarray]:
    return bounded_seconds(numbers.to_numpy(zero_copy_only=False).astype(np.float64))


def _parse_iso(text: pa.Array, pattern: str, *, zoned: bool) -> pa.Array:
    """Converts ISO 8601 to float64 [R]; null where the text does not match or is no day of the calendar."""
    kind = pa.timestamp("s", "UTC" if zoned else None)
    seconds = pc.replace_substring_regex(text, r"\.[0-9]+", "")
    text = pc.if_else(pc.match_substring_regex(text, pattern), seconds, pa.scalar(None, text.type))
    try:
        stamps = text.cast(kind)
    except pa.ArrowInvalid:  # an impossible date: converts each distinct text separately
        coded = text.dictionary_encode()
        stamps = pa.array([_stamp(each, kind) for each in coded.dictionary], kind).take(coded.indices)
    return stamps.cast(pa.int64()).cast(pa.float64())


def _stamp(text: pa.Scalar, kind: pa.DataType) -> pa.Scalar | None:
    try:
        return text.cast(kind)
    except pa.ArrowInvalid:
        return None
