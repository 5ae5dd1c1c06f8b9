"""What a column of text probably holds."""

import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import quantiles

import pyarrow as pa

from cowrec.data_pipeline.raw.layouts import RawKind
from cowrec.data_pipeline.raw.missing import LOOKS_MISSING
from cowrec.data_pipeline.raw.numbers import NUMBER_PATTERN
from cowrec.data_pipeline.raw.times import as_times

SEPARATORS = "|;,^ "
FEW_VALUES = 20
"""An integer column with at most so many distinct numbers is probably one of codes."""
LONG_TEXT = 60
"""Mean length of values from which on a column is probably free text."""
ID_NAME = re.compile(
    r"(^|_|\b)(id|uid|gid|code|zip|zipcode|type|category|cat|gender|key|hash|ip|hour|day|month)s?$", re.I
)
TIME_NAME = re.compile(r"(time|date|stamp|^ts$|_at$|^at$)", re.I)


@dataclass
class Guess:
    """A guess about a column.

    Attributes:
        kind: of a field; "time" for text that is always a time; "" for a column that is better left out.
        keys: further keys of the field.
        null: texts in it that seem to mean a missing value.
        why: what speaks for the guess, or what is unsure.
        distinct: its distinct values, the missing ones aside.
        missing: share of missing values.
        is_time: True if all values are valid times.
    """

    kind: RawKind | str = ""
    keys: dict[str, str] = field(default_factory=dict)
    null: tuple[str, ...] = ()
    why: str = ""
    distinct: tuple[str, ...] = ()
    missing: float = 0.0
    is_time: bool = False


def guess_column(name: str, values: Sequence[str | None]) -> Guess:
    """Guesses what the values of a column are."""
    if values and values[0] is None:
        return Guess("multi", {"separator": "|"}, why="lists; the separator applies to text only")
    texts = [value or "" for value in values]
    markers = tuple(sorted({text for text in texts if text and text.lower() in LOOKS_MISSING}))
    known = [text for text in texts if text and text not in markers]
    distinct = tuple(dict.fromkeys(known))
    guess = Guess(null=markers, distinct=distinct, missing=1 - len(known) / max(len(texts), 1))
    if len(distinct) < 2:
        guess.why = "one value only" if distinct else "no value at all"
        return guess
    if all(NUMBER_PATTERN.fullmatch(text) and math.isfinite(float(text)) for text in distinct):
        _guess_number(guess, name, known)
    else:
        _guess_text(guess, known)
    # A number is a valid time too: of Unix seconds.
    numbers = any(NUMBER_PATTERN.fullmatch(text) for text in distinct)
    if not guess.missing and (not numbers or (TIME_NAME.search(name) and _lately(distinct))):
        guess.is_time = not as_times(pa.array(list(distinct), pa.string()), "timestamp")[1].any()
    return guess


def _guess_number(guess: Guess, name: str, known: Sequence[str]) -> None:
    distinct, rows = guess.distinct, len(known)
    integers = all(text.lstrip("+-").isdecimal() for text in distinct)
    if any(re.fullmatch(r"0[0-9]+", text) for text in distinct):
        guess.kind, guess.why = "categorical", "digits with leading zeros"
    elif integers and len(distinct) == rows > FEW_VALUES and (ID_NAME.search(name) or _consecutive(known)):
        guess.kind, guess.why = "", "another number in each row, so it identifies the row"
    elif integers and ID_NAME.search(name):
        guess.kind, guess.why = "categorical", f"{len(distinct)} different integers, and the name of an id"
    elif integers and len(distinct) <= FEW_VALUES:
        guess.kind, guess.why = "categorical", f"unsure: {len(distinct)} different integers, codes or small numbers"
    else:
        guess.kind, guess.why = "numeric", "unsure: integers, amounts or ids" if integers else "numbers with decimals"
        if _heavy_tailed([float(text) for text in known]):
            guess.why += '; heavy tail: the default transform "quantile", "log" or "buckets" suit, "minmax" does not'


def _lately(distinct: Sequence[str]) -> bool:
    """True for numbers that are Unix seconds of the years from 1973 on."""
    return all(NUMBER_PATTERN.fullmatch(text) and float(text) > 10**8 for text in distinct)


def _consecutive(known: Sequence[str]) -> bool:
    numbers = [int(text) for text in known]
    return max(numbers) - min(numbers) < 2 * len(numbers)


def _heavy_tailed(numbers: Sequence[float]) -> bool:
    parts = quantiles(numbers, n=20)
    return parts[-1] - parts[0] < 0.1 * (max(numbers) - min(numbers))


def _guess_text(guess: Guess, known: Sequence[str]) -> None:
    distinct = guess.distinct
    found = [each for each in (_as_list(separator, known, distinct) for separator in SEPARATORS) if each]
    if found:
        _, guess.kind, guess.keys, guess.why = max(found, key=lambda each: each[0])
    elif sum(map(len, known)) > LONG_TEXT * len(known):
        guess.kind, guess.why = "", "long text, which has few ids in common"
    elif len(distinct) == len(known) > FEW_VALUES:
        guess.kind, guess.why = "", "another value in each row, so it identifies the row"
    else:
        guess.kind, guess.why = "categorical", f"{len(distinct)} different values"
        if len(distinct) > 0.5 * len(known) > FEW_VALUES:
            guess.why = f"unsure: {len(distinct)} different values in {len(known)} rows"
    if guess.null:
        guess.why += f"; unsure: {', '.join(map(repr, guess.null))} may be a missing value"


def _as_list(
    separator: str, known: Sequence[str], distinct: Sequence[str]
) -> tuple[float, RawKind, dict[str, str], str] | None:
    """Returns how much shorter a list of the distinct parts is, and the field, if values look joined by a separator."""
    several = sum(separator in text for text in known)
    parts = Counter(part for text in known for part in text.split(separator))
    if several < 0.2 * len(known) or len(parts) > 0.5 * len(distinct) or not all(parts):
        return None
    gain = len(distinct) / len(parts)
    for weight_separator in ":=":
        halves = [part.rpartition(weight_separator) for part in parts]
        if all(left and NUMBER_PATTERN.fullmatch(weight) for left, _, weight in halves):
            keys = {"separator": separator, "weight_separator": weight_separator}
            return gain, "weighted", keys, f"{len({left for left, _, _ in halves})} different ids with numbers"
    return gain, "multi", {"separator": separator}, f"unsure: {len(parts)} different parts in {len(distinct)} values"
