"""How a column writes times, if it does: the unit, format or columns that a schema file names."""

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import pyarrow as pa

from ..raw.times import DATE_DIGITS, UNIT_NAMES, RawTime
from ..raw.values import NUMBER_PATTERN, UNITS

_NAMED, _UNNAMED = (10**8, 4.1e9), (10**9, 2.05e9)
"""Unix seconds of times: from 1973 to 2099, and of columns whose name tells no time, from 2001 to 2034."""
_OF_DIGITS = {8: "%Y%m%d", 10: "%Y%m%d%H", 12: "%Y%m%d%H%M", 14: "%Y%m%d%H%M%S", 17: "%Y%m%d%H%M%S%f"}
_HOURS = "%y%m%d%H"
_DATES = (
    "%m/%d/%Y", "%d/%m/%Y", "%d.%m.%Y", "%m.%d.%Y", "%d-%m-%Y", "%m-%d-%Y", "%Y/%m/%d", "%Y.%m.%d", "%m/%d/%y",
    "%d/%m/%y", "%d.%m.%y", "%d-%m-%y", "%d %b %Y", "%d-%b-%Y", "%d-%b-%y", "%b %d, %Y", "%b %d %Y",
)  # fmt: skip
"""Formats of dates, of two that fit the likelier one first."""
_CLOCKS = ("", " %H:%M:%S", " %H:%M", " %H:%M:%S.%f", " %I:%M:%S %p", " %I:%M %p", " %I:%M:%S%p", " %I:%M%p")
_FORMATS = (
    *(date + clock for date in _DATES for clock in _CLOCKS),
    "%d/%b/%Y:%H:%M:%S %z", "%a, %d %b %Y %H:%M:%S %z", "%a %b %d %H:%M:%S %z %Y", "%a %b %d %H:%M:%S %Y",
    "%Y%m%d %H:%M:%S", "%Y%m%dT%H%M%S", "%Y-%m-%d %I:%M %p", "%Y-%m-%d %H:%M:%S %z",
)  # fmt: skip
_PART_NAMES = ("year", "month", "day(_?of_?month)?", "hour", "minute", "second")


class TimeForm(NamedTuple):
    """How a column writes times.

    Attributes:
        keys: `unit` or `format` of a time; none for Unix seconds and ISO 8601.
        parts: parts of the times that tell something.
        said: the form in words.
        other: another form in words that fits all values; empty if there is none.
    """

    keys: Mapping[str, str]
    parts: tuple[str, ...]
    said: str
    other: str = ""

    def of(self, column: str) -> Any:
        return {"column": column, **self.keys} if self.keys else column


def form_of(texts: Sequence[str], *, named: bool) -> TimeForm | None:
    """Returns how all of some distinct texts are times; None if they are not.

    Numbers are times where the column's name tells a time (`named`), or where they can hardly be anything else.
    """
    if len(texts) < 2:
        return None
    numbers = [float(text) for text in texts if NUMBER_PATTERN.fullmatch(text)]
    if len(numbers) == len(texts):
        return _of_numbers(texts, numbers, named)
    if _are(texts, ""):
        return TimeForm({}, _parts(any(":" in text for text in texts)), "ISO 8601")
    fitting = [form for form in _FORMATS if _are(texts[:1], form) and _are(texts, form)]
    if not fitting:
        return None
    return TimeForm({"format": fitting[0]}, _parts(":" in fitting[0]), fitting[0], *fitting[1:2])


def columns_of_time(texts: Mapping[str, Sequence[str]]) -> list[str]:
    """Returns the columns with year, month, day and further parts of a time in every row; none if some row has none."""
    for name in texts:
        found = re.fullmatch(r"(.*?)year", name, re.IGNORECASE)
        parts = list[str]()
        for part in _PART_NAMES if found else ():
            pattern = re.compile(re.escape(found[1]) + part, re.IGNORECASE) if found else None
            fits = [column for column in texts if pattern and pattern.fullmatch(column)]
            if not fits:
                break
            parts.append(fits[0])
        if len(parts) >= 3:
            wrong = RawTime(tuple(parts)).seconds([pa.array(texts[part], pa.string()) for part in parts])
            if wrong is not None and not wrong[1].any():
                return parts
    return []


def _of_numbers(texts: Sequence[str], numbers: Sequence[float], named: bool) -> TimeForm | None:
    least, largest = min(numbers), max(numbers)
    sizes = {len(text) for text in texts}
    low, high = _NAMED if named else _UNNAMED
    fits = {
        unit: f"Unix {UNIT_NAMES[unit]}"
        for unit, scale in UNITS.items()
        if low * scale < least and largest < high * scale and (named or unit != "s")
    }
    if len(sizes) == 1 and all(map(DATE_DIGITS.fullmatch, texts)):
        form = _OF_DIGITS[sizes.pop()]
        if _are(texts, form):
            return TimeForm({"format": form}, _parts("H" in form), _in_letters(form), next(iter(fits.values()), ""))
    elif sizes == {8} and named and _are(texts, _HOURS):
        return TimeForm({"format": _HOURS}, _parts(True), "YYMMDDHH")
    for unit, said in fits.items():
        return TimeForm({} if unit == "s" else {"unit": unit}, _parts(True), said)
    return None


def _are(texts: Sequence[str], form: str) -> bool:
    """Returns whether all texts are times of a format; the empty format means ISO 8601."""
    return not RawTime(("t",), format=form).of_texts(pa.array(texts, pa.string()))[1].any()


def _parts(has_hours: bool) -> tuple[str, ...]:
    return ("hour", "weekday") if has_hours else ("weekday", "month")


def _in_letters(form: str) -> str:
    """Returns a format of digits as people write it, such as YYYYMMDD."""
    letters = {"%Y": "YYYY", "%m": "MM", "%d": "DD", "%H": "HH", "%M": "MM", "%S": "SS", "%f": "mmm"}
    return re.sub("%.", lambda found: letters[found[0]], form)
