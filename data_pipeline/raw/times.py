"""Times of samples as text: Unix seconds, ISO 8601, or Avazu's hours. R rows."""

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from .numbers import cast_numbers

EARLIEST, LATEST = -62_135_596_800, 253_402_300_799
"""First and last second of the years 1 and 9999: what a time may be, and what milliseconds of our days are not."""

TIME_RULES = {
    "timestamp": "a time must be Unix seconds (not milliseconds) or ISO 8601, such as 2014-10-21T07:00:00Z",
    "hour": "a time must be YYMMDDHH",
}

_ISO = r"^[0-9]{4}-[0-9]{2}-[0-9]{2}([T ][0-9]{2}:[0-9]{2}(:[0-9]{2}(\.[0-9]{1,9})?)?)?"
_ZONED = _ISO + r"(Z|[+-][0-9]{2}(:?[0-9]{2})?)$"
_LOCAL = _ISO + "$"
_HOUR = r"^[0-9]{8}$"


def as_times(text: pa.Array, time_format: str) -> tuple[np.ndarray, np.ndarray]:
    """Unix seconds of strings without nulls.

    Args:
        text: [R].
        time_format: "timestamp": Unix seconds, rounded down where they have decimals, or ISO 8601 (a date, or date and
            time with hours and minutes at least; UTC where it names no zone). "hour": YYMMDDHH of the years 2000 to
            2099, UTC.

    Returns:
        int64 [R], 0 where wrong; and where they are wrong, bool [R].
    """
    if time_format == "hour":
        whole = pc.utf8_slice_codeunits
        stamps = [whole(text, 0, 2), whole(text, 2, 4), whole(text, 4, 6), whole(text, 6, 8)]
        iso = pc.binary_join_element_wise("20", stamps[0], "-", stamps[1], "-", stamps[2], "T", stamps[3], ":00", "")
        return _seconds(_of_iso(pc.if_else(pc.match_substring_regex(text, _HOUR), iso, ""), _LOCAL, zoned=False))
    numbers = cast_numbers(text)
    if numbers.null_count:
        for pattern, zoned in ((_LOCAL, False), (_ZONED, True)):
            numbers = pc.coalesce(numbers, _of_iso(text, pattern, zoned=zoned))
    return _seconds(numbers)


def bounded_seconds(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """int64 [R] from float64 [R], rounded down, 0 where NaN or no year from 1 to 9999; and where that is, bool [R]."""
    with np.errstate(invalid="ignore"):
        wrong = ~((values >= EARLIEST) & (values < LATEST + 1))
    return np.floor(np.where(wrong, 0.0, values)).astype(np.int64), wrong


def _seconds(numbers: pa.Array) -> tuple[np.ndarray, np.ndarray]:
    return bounded_seconds(numbers.to_numpy(zero_copy_only=False).astype(np.float64))


def _of_iso(text: pa.Array, pattern: str, *, zoned: bool) -> pa.Array:
    """float64 [R], null where the text does not match or is no day of the calendar."""
    kind = pa.timestamp("s", "UTC" if zoned else None)
    whole = pc.replace_substring_regex(text, r"\.[0-9]+", "")
    text = pc.if_else(pc.match_substring_regex(text, pattern), whole, pa.scalar(None, text.type))
    try:
        stamps = text.cast(kind)
    except pa.ArrowInvalid:  # an impossible date: each distinct text by itself
        coded = text.dictionary_encode()
        stamps = pa.array([_stamp(each, kind) for each in coded.dictionary], kind).take(coded.indices)
    return stamps.cast(pa.int64()).cast(pa.float64())


def _stamp(text: pa.Scalar, kind: pa.DataType) -> pa.Scalar | None:
    try:
        return text.cast(kind)
    except pa.ArrowInvalid:
        return None
