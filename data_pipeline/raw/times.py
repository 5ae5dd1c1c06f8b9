"""Times of R raw values as Unix seconds: numbers, ISO 8601, texts of a format, or parts in several columns."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, get_args
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from cowrec.errors import UserError

from .values import UNITS, as_floats, as_id_text, as_numbers, cast_numbers, is_text, mask

TimeUnit = Literal["", "s", "ms", "us", "ns"]
TimePart = Literal["", "hour", "weekday", "day", "month"]
Seconds = tuple[np.ndarray, np.ndarray]
"""int64 [R], Unix seconds, 0 where a value is missing or no time; and bool [R], True there."""

EARLIEST, LATEST = -62_135_596_800, 253_402_300_799
"""Bounds of a valid time: the years 1 to 9999. Present-day Unix milliseconds are beyond them."""
DATE_DIGITS = re.compile(
    r"(19|20)[0-9]{2}(0[1-9]|1[0-2])(0[1-9]|[12][0-9]|3[01])(([01][0-9]|2[0-3])([0-5][0-9]){0,2}([0-9]{3})?)?"
)
"""YYYYMMDD, followed by HH, HHMM, HHMMSS or HHMMSSmmm or not: Unix seconds of August 1970, or of the year 2030 on."""
UNIX_OR_ISO = "a time must be Unix seconds (not milliseconds) or ISO 8601, such as 2014-10-21T07:00:00Z"
_OTHER_FORMS = ' (others: time = {column = "t", unit = "ms"} in the schema file, or format = "%d/%m/%Y")'
UNIT_NAMES = {"s": "seconds", "ms": "milliseconds", "us": "microseconds", "ns": "nanoseconds"}

_DIGITS = {"Y": "4", "y": "2", "m": "1,2", "d": "1,2", "H": "1,2", "I": "1,2", "M": "1,2", "S": "1,2", "f": "1,9"}
"""Directives of `strptime` that stand for digits, and how many there are."""
_WORDS = {"b": "[A-Za-z]{3,9}", "B": "[A-Za-z]{3,9}", "a": "[A-Za-z]{3,9}", "A": "[A-Za-z]{3,9}", "p": "[AaPp][Mm]",
          "z": r"Z|[+-][0-9]{2}:?[0-9]{2}"}  # fmt: skip
_PARTS = ("%Y", "%m", "%d", "%H", "%M", "%S")
_PART_NAMES = ("year", "month", "day", "hour", "minute", "second")
_MONTHS = ("jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec")
WEEKDAYS = ("Mon", "Tue", "Wed", "Thu", "Fri", "Sat", "Sun")

_ISO = r"^[0-9]{4}-[0-9]{2}-[0-9]{2}([T ][0-9]{2}:[0-9]{2}(:[0-9]{2}(\.[0-9]{1,9})?)?)?"
_ZONED = _ISO + r"(Z| UTC|[+-][0-9]{2}(:?[0-9]{2})?)$"
_LOCAL = _ISO + "$"


@dataclass(frozen=True)
class RawTime:
    """How raw columns hold a time.

    Without a unit and a format, a time is Unix seconds, rounded down, or ISO 8601: a date, or a date and time with at
    least hours and minutes. Unit and format do not apply to typed times of Parquet and Arrow.

    Attributes:
        columns: the column, or several, whose texts are joined by a space.
        unit: unit of numbers since 1970: "s", "ms", "us" or "ns".
        format: format of texts, with the directives %Y %y %m %d %H %I %p %M %S %f %b %B %a %A %z of Python's
            `strptime`. For several columns the default is year, month, day, hour, minute and second, as many as there
            are columns; months may be English names.
        zone: time zone, such as "Europe/Berlin", of times that name none; UTC by default.
    """

    columns: tuple[str, ...]
    unit: TimeUnit = ""
    format: str = ""
    zone: str = ""

    def __post_init__(self) -> None:
        if not self.columns or len(set(self.columns)) < len(self.columns) or not all(self.columns):
            raise UserError(f"time: columns must be one or several different names, got {list(self.columns)}")
        if self.unit not in get_args(TimeUnit):
            raise UserError(f'time: unit must be "s", "ms", "us" or "ns", got {self.unit!r}')
        if self.unit and self.format:
            raise UserError("time: give unit or format, not both")
        if len(self.columns) > 1 and self.unit:
            raise UserError(f"time: unit is for one column, got {len(self.columns)}; give a format")
        if len(self.columns) > len(_PARTS) and not self.format:
            raise UserError(f"time: columns without a format are at most {', '.join(_PART_NAMES)}")
        if self.zone:
            try:
                ZoneInfo(self.zone)
            except (ZoneInfoNotFoundError, ValueError, OSError):
                raise UserError(f'time: zone {self.zone!r} is not known; write one such as "Europe/Berlin"') from None
        if self.format:
            _ = self._pattern

    @property
    def name(self) -> str:
        return ", ".join(self.columns)

    @property
    def rule(self) -> str:
        if self.unit:
            return f"a time must be a number of Unix {UNIT_NAMES[self.unit]}"
        if self.format:
            return f"a time must have the format {self.format}"
        if len(self.columns) > 1:
            return f"a time must have numbers for {', '.join(_PART_NAMES[: len(self.columns)])}"
        return UNIX_OR_ISO + _OTHER_FORMS

    def seconds(self, values: Sequence[pa.Array]) -> Seconds | None:
        """Converts the columns' values, plain arrays [R]; None if a column's type holds no times."""
        if len(values) == 1 and not is_text(values[0].type):
            if pa.types.is_timestamp(values[0].type) or pa.types.is_date(values[0].type):
                return self._typed(values[0])
            if not self.format:
                numbers = None if pa.types.is_boolean(values[0].type) else as_floats(values[0])
                return None if numbers is None else bounded_seconds(numbers[0] / UNITS[self.unit or "s"])
        texts = map(as_id_text, values)
        parts = [text[0].fill_null("") for text in texts if text is not None]
        if len(parts) < len(values):
            return None
        return self.of_texts(parts[0] if len(parts) == 1 else pc.binary_join_element_wise(*parts, " "))

    def of_texts(self, text: pa.Array) -> Seconds:
        """Converts strings [R] without nulls; a space joins those of several columns."""
        if self.unit:
            return bounded_seconds(as_numbers(text)[0] / UNITS[self.unit])
        if self.format or len(self.columns) > 1:
            return self._formatted(text)
        numbers = cast_numbers(text)
        if numbers.null_count:
            numbers = pc.coalesce(numbers, self._localized(_parse_iso(text, _LOCAL, zoned=False)))
            numbers = pc.coalesce(numbers, _parse_iso(text, _ZONED, zoned=True))
        return bounded_seconds(numbers.to_numpy(zero_copy_only=False).astype(np.float64))

    def part(self, seconds: np.ndarray, part: TimePart) -> pa.Array:
        """Returns a part of times, int64 [R], in the zone as strings: an hour 0 to 23, a day, a month, or "Mon"."""
        stamps = pa.array(seconds).cast(pa.timestamp("s", self.zone or "UTC"))
        if part == "weekday":
            return pa.array(WEEKDAYS).take(pc.day_of_week(stamps))
        found: pa.Array = {"hour": pc.hour, "day": pc.day, "month": pc.month}[part](stamps)
        return found.cast(pa.string())

    def _typed(self, values: pa.Array) -> Seconds:
        zoned = pa.types.is_timestamp(values.type) and values.type.tz is not None
        if pa.types.is_timestamp(values.type):  # nanoseconds have more digits than float64
            values = pc.floor_temporal(values.cast(pa.timestamp(values.type.unit)), unit="second")
        numbers = values.cast(pa.timestamp("s")).cast(pa.int64()).cast(pa.float64())
        numbers = numbers if zoned else self._localized(numbers)
        return bounded_seconds(numbers.to_numpy(zero_copy_only=False).astype(np.float64))

    def _localized(self, seconds: pa.Array) -> pa.Array:
        """Converts seconds of the zone, float64 [R], to Unix seconds; an hour that occurs twice is the earlier one."""
        if self.zone in ("", "UTC"):
            return seconds
        local = seconds.cast(pa.int64()).cast(pa.timestamp("s"))
        stamps = pc.assume_timezone(local, self.zone, ambiguous="earliest", nonexistent="earliest")
        return stamps.cast(pa.int64()).cast(pa.float64())

    @cached_property
    def _pattern(self) -> str:
        """Regular expression of the format, with a group for each directive."""
        given = self.format or " ".join(_PARTS[: len(self.columns)])
        tokens = re.findall(r"%.|[^%]+|%$", given)
        pattern, seen = "", set[str]()
        for index, token in enumerate(tokens):
            letter = token[1:]
            if token == "%%" or not token.startswith("%"):
                pattern += re.sub(r"([^A-Za-z0-9 ])", r"\\\1", "%" if token == "%%" else token)
                continue
            if letter not in _DIGITS and letter not in _WORDS:
                known = " ".join(f"%{directive}" for directive in (*_DIGITS, *_WORDS))
                raise UserError(f"time: format {given!r} has {token!r}, which is not read; known: {known}")
            if letter in seen:
                raise UserError(f"time: format {given!r} has {token!r} twice")
            seen.add(letter)
            # Digits without anything between are told apart by their number.
            around = tokens[max(0, index - 1) : index + 2]
            beside = {other[1:] for other in around if other.startswith("%")} - {letter}
            width = _DIGITS.get(letter, "").replace("1,2", "2" if beside & _DIGITS.keys() else "1,2")
            month_name = "|[A-Za-z]{3,9}" if letter == "m" and not self.format else ""
            pattern += f"(?P<{letter}>[0-9]{{{width}}}{month_name})" if width else f"(?P<{letter}>{_WORDS[letter]})"
        if not seen & {"Y", "y"}:
            raise UserError(f"time: format {given!r} has no year; add %Y or %y")
        return f"^ *{pattern} *$"

    def _formatted(self, text: pa.Array) -> Seconds:
        extracted = pc.extract_regex(text, self._pattern)
        matched = mask(extracted.is_valid())
        groups = {group.name: extracted.field(group.name) for group in extracted.type}

        def number(letter: str, missing: int) -> np.ndarray:
            if letter not in groups:
                return np.full(len(text), missing)
            digits = pc.if_else(pa.array(matched), groups[letter], str(missing))
            found: np.ndarray = digits.cast(pa.int64()).to_numpy(zero_copy_only=False)
            return found

        year = number("Y", 1970)
        if "y" in groups:  # as POSIX has it
            year = number("y", 70)
            year = year + np.where(year < 69, 2000, 1900)
        month, named = self._months(groups, matched)
        day, minute, second = number("d", 1), number("M", 0), number("S", 0)
        hour = number("I", 12) % 12 if "I" in groups else number("H", 0)
        if "p" in groups:
            hour = hour + 12 * mask(pc.equal(pc.utf8_lower(groups["p"].fill_null("")), "pm"))
        valid = (
            matched & named & (month >= 1) & (month <= 12) & (hour < 24) & (minute < 60) & (second < 60) & (day >= 1)
        )
        valid &= (year >= 1) & ((number("I", 1) >= 1) & (number("I", 1) <= 12))
        months = ((np.where(valid, year, 1970) - 1970) * 12 + np.where(valid, month, 1) - 1).astype("datetime64[M]")
        first, following = (start.astype("datetime64[D]").astype(np.int64) for start in (months, months + 1))
        valid &= day <= following - first
        local = (first + day - 1) * 86400 + hour * 3600 + minute * 60 + second
        local = np.where(valid, local, 0)
        if "z" in groups:
            seconds = local - _offsets(pc.if_else(pa.array(matched), groups["z"], "Z"))
        else:
            seconds = self._localized(pa.array(local.astype(np.float64))).to_numpy(zero_copy_only=False)
        return np.where(valid, seconds, 0).astype(np.int64), ~valid

    def _months(self, groups: dict[str, pa.Array], matched: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns months from 1 on, int64 [R], and bool [R], True where a month is a number or a name."""
        letter = next((letter for letter in "mbB" if letter in groups), "")
        if not letter:
            return np.ones(len(matched), np.int64), np.ones(len(matched), bool)
        text = pc.if_else(pa.array(matched), groups[letter], "1")
        named = pc.index_in(pc.utf8_slice_codeunits(pc.utf8_lower(text), 0, 3), pa.array(_MONTHS))
        digits = cast_numbers(text)
        months = pc.coalesce(digits, pc.add(named, 1).cast(pa.float64()))
        return months.fill_null(1).to_numpy(zero_copy_only=False).astype(np.int64), mask(months.is_valid())


def bounded_seconds(values: np.ndarray) -> Seconds:
    """Rounds float64 [R] down; NaN and numbers outside the years 1 to 9999 are invalid."""
    with np.errstate(invalid="ignore"):
        invalid = ~((values >= EARLIEST) & (values < LATEST + 1))
    return np.floor(np.where(invalid, 0.0, values)).astype(np.int64), invalid


def _offsets(text: pa.Array) -> np.ndarray:
    """Returns the seconds of offsets from UTC such as +02:00 and Z, int64 [R]."""
    digits = pc.replace_substring(text, ":", "")
    digits = pc.if_else(pc.equal(digits, "Z"), "0000", pc.utf8_ltrim(digits, "+"))
    signed = digits.cast(pa.int64()).to_numpy(zero_copy_only=False)
    found: np.ndarray = np.sign(signed) * (np.abs(signed) // 100 * 3600 + np.abs(signed) % 100 * 60)
    return found


def _parse_iso(text: pa.Array, pattern: str, *, zoned: bool) -> pa.Array:
    """Converts ISO 8601 to float64 [R]; null where the text does not match or is no day of the calendar."""
    kind = pa.timestamp("s", "UTC" if zoned else None)
    seconds = pc.replace_substring_regex(pc.replace_substring_regex(text, r"\.[0-9]+", ""), " UTC$", "Z")
    text = pc.if_else(pc.match_substring_regex(text, pattern), seconds, pa.scalar(None, text.type))
    try:
        stamps = text.cast(kind)
    except pa.ArrowInvalid:  # an impossible date: converts each distinct text separately
        coded = text.dictionary_encode()
        stamps = pa.array([_stamp(distinct, kind) for distinct in coded.dictionary], kind).take(coded.indices)
    return stamps.cast(pa.int64()).cast(pa.float64())


def _stamp(text: pa.Scalar, kind: pa.DataType) -> pa.Scalar | None:
    try:
        return text.cast(kind)
    except pa.ArrowInvalid:
        return None
