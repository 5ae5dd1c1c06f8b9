"""What a column holds: the first rule that holds decides, of a table of named rules; remarks are a table too."""

import math
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

from ..raw.columns import AROUND_VECTORS
from ..raw.layouts import RawKind
from ..raw.lists import BLANKS, items_of, weights_of
from ..raw.values import EXACT_INTEGERS, LOOKS_MISSING, NUMBER_PATTERN
from .times import TimeForm, form_of

LABEL_NAMES = ("label", "click", "clk", "clicks", "clicked", "is_click", "target", "y", "converted", "conversion",
               "is_conversion", "purchase", "purchased", "buy", "bought", "like", "liked", "response", "class",
               "rating")  # fmt: skip
POSITIVE = ("yes", "y", "true", "t", "positive", "pos", "click", "clicked", "converted", "conversion", "purchase",
            "purchased", "buy", "bought", "like", "liked", "paid", "won", "success", "accepted",
            "subscribed")  # fmt: skip
NEGATION = r"(no|not|non|un|never)[\s_-]*"
WEIGHT_NAMES = ("weight", "weights", "sample_weight", "sample_weights")

ID_NAME = re.compile(
    r"(^|_|\b)(?i:(id|uid|gid|code|zip|zipcode|type|category|cat|gender|key|hash|ip|hour|day|month)s?"
    r"|(user|item|product|movie|ad|campaign|advertiser|device|customer|shop|store|brand|city|country|region|site|app"
    r"|visitor|session|member|client|account|song|artist|book|author|video|publisher|adgroup|segment|seg)(ids?)?)$"
    r"|(?<=[a-z0-9])(Id|ID)s?$"
)
AMOUNT_NAME = re.compile(
    r"(^|_)(num|nb|n|no_of|per|count|total|sum|avg|mean|amount|spend|price|cost|since)_|(hour|day|month)s?$", re.I
)
"""Names of ids that may be amounts: a number of what follows, an amount for each, or a span of time."""
TOTAL_NAME = re.compile(r"(^|_)(imps?|impressions?|exposures?|displays?|shows?)$", re.I)
"""Names of the number of samples that a row of counts stands for."""
TIME_NAME = re.compile(r"(time|date|stamp|^ts$|_at$|^at$)", re.I)

SEPARATORS = "|;,^ "
BRACKETS = ("[]", "{}", "()")
KINDS_IN_BRACKETS: Mapping[RawKind, Callable[[str], Any]] = {"weighted": weights_of, "multi": items_of}
FEW_VALUES = 20
"""An integer column with at most so many distinct numbers is probably one of codes."""
MOST_MISSING = 0.05
"""Largest share of missing values of a column that may hold the times of the samples."""
FREQUENT = 10
"""Samples of an integer from which on it may have an effect that its size does not tell."""
LONG_TEXT = 60
"""Mean length of values from which on a column is probably free text."""
WHOLE = re.compile(r"[+-]?[0-9]+(\.0*)?")
NOTATION = re.compile(r"[+-]?[$€£¥]? ?[+-]?([0-9]{1,3}([., '][0-9]{3})+|[0-9]+)([.,][0-9]+)? ?[%$€£¥]?")
"""Numbers as people write them: with signs of currencies, separators of thousands, a decimal comma."""
VECTORS = "vectors of width "
"""Beginning of what a type says of lists of numbers, before their width."""
DATE_TEXT = re.compile(r"([A-Za-z]{3},? )?[0-9]{1,4}([/.-][0-9]{1,2}[/.-]| ?[A-Z][a-z]{2,8} ?)[0-9]{2,4}")
"""How dates as people write them begin."""


class Remark(NamedTuple):
    """A comment of a schema file; where it is `unsure`, the reader should check what it is about."""

    text: str
    unsure: bool = False

    def __str__(self) -> str:
        return f"unsure: {self.text}" if self.unsure else self.text


def unsure(text: str) -> Remark:
    return Remark(text, unsure=True)


class JoinedList(NamedTuple):
    """How lists are written: keys of the field, and the number of distinct parts."""

    kind: RawKind
    keys: dict[str, Any]
    parts: int
    gain: float


@dataclass(frozen=True)
class Column:
    """The first values of a column as text, empty where missing, None for lists; `said`, `scope`: see `RawSample`."""

    name: str
    values: Sequence[str | None]
    said: str = ""
    scope: str = ""

    @cached_property
    def markers(self) -> tuple[str, ...]:
        """Texts that seem to mean a missing value."""
        return tuple(sorted({text for text in self.values if text and text.lower() in LOOKS_MISSING}))

    @cached_property
    def known(self) -> list[str]:
        return [text for text in self.values if text and text not in self.markers]

    @cached_property
    def counts(self) -> Counter[str]:
        return Counter(self.known)

    @cached_property
    def distinct(self) -> tuple[str, ...]:
        return tuple(self.counts)

    @property
    def count(self) -> int:
        return len(self.distinct)

    @property
    def rows(self) -> int:
        return len(self.known)

    @property
    def most(self) -> str:
        return max(self.counts, key=self.counts.__getitem__, default="")

    @property
    def missing(self) -> float:
        """Share of missing values; values without text count as present."""
        return 1 - (len(self.known) + self.values.count(None)) / max(len(self.values), 1)

    @cached_property
    def numbers(self) -> list[float]:
        return [float(text) for text in self.distinct if NUMBER_PATTERN.fullmatch(text)]

    @cached_property
    def whole(self) -> list[str]:
        return [text for text in self.distinct if WHOLE.fullmatch(text)]

    @cached_property
    def integers(self) -> bool:
        return len(self.whole) == len(self.distinct)

    @cached_property
    def numeric(self) -> bool:
        """True if all values are finite numbers, and no integers of a type for ids."""
        finite = len(self.numbers) == len(self.distinct) and all(map(math.isfinite, self.numbers))
        return finite and not (self.said == "id" and self.integers)

    @cached_property
    def named_id(self) -> bool:
        return bool(ID_NAME.search(self.name) and not AMOUNT_NAME.search(self.name))

    @cached_property
    def named_time(self) -> bool:
        return bool(TIME_NAME.search(self.name))

    @cached_property
    def too_large(self) -> bool:
        """True if values are integers that float64 cannot hold exactly."""
        return self.integers and max(map(abs, self.numbers)) >= EXACT_INTEGERS[64]

    @property
    def all_different(self) -> bool:
        return len(self.distinct) == len(self.known) > FEW_VALUES

    @property
    def consecutive(self) -> bool:
        numbers = [int(text.partition(".")[0]) for text in self.known]
        return max(numbers) - min(numbers) < 2 * len(numbers)

    @property
    def repeated(self) -> bool:
        """True if values recur; ids that are rare in the first rows of a file may be frequent in all of it."""
        return len(self.distinct) <= (0.9 if self.scope else 0.5) * len(self.known)

    @cached_property
    def odd_numbers(self) -> list[str]:
        """Distinct values that only people read as numbers, if people read nearly all values as numbers."""
        noted = [text for text in self.distinct if NOTATION.fullmatch(text)]
        odd = [text for text in noted if not NUMBER_PATTERN.fullmatch(text)]
        return odd if len(noted) > 0.95 * len(self.distinct) and len(odd) > 0.05 * len(self.distinct) else []

    @cached_property
    def joined(self) -> JoinedList | None:
        """How the values are joined, if they are lists, by the separator that leaves the fewest distinct parts."""
        return max(filter(None, map(self._joined_by, SEPARATORS)), key=lambda lists: lists.gain, default=None)

    @property
    def joined_keys(self) -> Mapping[str, Any]:
        """Keys of a field of joined lists."""
        return self.joined.keys if self.joined else {}

    @cached_property
    def bracketed(self) -> JoinedList | None:
        """How the values are lists or weights in brackets; None if they are not."""
        if not self.known or not all(text.strip()[:1] + text.strip()[-1:] in BRACKETS for text in self.distinct):
            return None
        for kind, read in KINDS_IN_BRACKETS.items():
            try:
                parts = {item for text in self.distinct for item in read(text)}
            except ValueError:
                continue
            if parts:
                return JoinedList(kind, {"brackets": True}, len(parts), 1.0)
        return None

    def parts(self, separator: str) -> frozenset[str]:
        """The distinct ids of lists that are joined in text."""
        return frozenset(part.strip(BLANKS) for text in self.distinct for part in text.split(separator))

    def _joined_by(self, separator: str) -> JoinedList | None:
        several = sum(separator in text for text in self.known)
        parts = Counter(part.strip(BLANKS) for text in self.known for part in text.split(separator))
        if several < 0.2 * len(self.known) or not all(parts):
            return None
        for weight_separator in ":=":
            halves = [part.rpartition(weight_separator) for part in parts]
            ids = {left for left, _, _ in halves}
            weighted = all(left and NUMBER_PATTERN.fullmatch(weight) for left, _, weight in halves)
            if weighted and len(ids) <= 0.5 * len(self.distinct):
                keys = {"separator": separator, "weight_separator": weight_separator}
                return JoinedList("weighted", keys, len(ids), len(self.distinct) / len(ids))
        if len(parts) > 0.5 * len(self.distinct):
            return None
        return JoinedList("multi", {"separator": separator}, len(parts), len(self.distinct) / len(parts))

    @cached_property
    def vector_keys(self) -> Mapping[str, Any]:
        """Keys of a field of vectors, if the values are lists, or text of several numbers with decimals."""
        if self.said.startswith(VECTORS):
            return {"width": int(self.said.removeprefix(VECTORS))}
        for separator in ",|; " if self.said in ("", "id") and self.known else "":
            around = (text.strip(AROUND_VECTORS) for text in self.distinct)
            vectors = [text.split(None if separator == " " else separator) for text in around]
            if len(widths := set(map(len, vectors))) > 1 or widths == {1}:
                continue
            numbers = [number.strip() for vector in vectors for number in vector]
            if all(map(NUMBER_PATTERN.fullmatch, numbers)) and not all(map(WHOLE.fullmatch, numbers)):
                return {"width": widths.pop(), "separator": separator}
        return {}

    @cached_property
    def time_form(self) -> TimeForm | None:
        """How all known values are times; None if they are not."""
        may_be = self.said in ("", "time") or (self.said == "id" and not self.numbers)
        return form_of(self.distinct, named=self.named_time) if may_be else None


@dataclass(frozen=True)
class Rule:
    """One kind of column.

    Attributes:
        kind: kind of the field; empty for a column that is better left out.
        why: the remark, in which `{c.NAME}` is an attribute of the column.
        unsure: whether the reader should check the remark.
        also_ids: True for integers that may be ids, which get a second field.
    """

    name: str
    holds: Callable[[Column], object]
    kind: RawKind | str
    why: str
    unsure: bool = False
    keys: Callable[[Column], Mapping[str, Any]] = field(default=lambda _: {})
    also_ids: bool = False


LIST_KEYS = {"separator": "|"}
RULES = (
    Rule("vectors", lambda c: c.said.startswith(VECTORS), "vector", "lists of {c.vector_keys[width]} numbers each",
         keys=lambda c: c.vector_keys),
    Rule("lists", lambda c: c.said == "multi", "multi", "lists; separators apply to text only",
         keys=lambda _: LIST_KEYS),
    Rule("weighted lists", lambda c: c.said == "weighted", "weighted", "lists; separators apply to text only",
         keys=lambda _: LIST_KEYS | {"weight_separator": ":"}),
    Rule("type that is not read", lambda c: c.said not in ("", "time", "id"), "", "{c.said}"),
    Rule("bytes", lambda c: c.values and c.values[0] is None, "", "bytes that are not UTF-8"),
    Rule("index", lambda c: re.fullmatch(r"__index_level_[0-9]+__", c.name), "", "the index of a pandas data frame"),
    Rule("times", lambda c: c.time_form and c.missing <= MOST_MISSING, "", "a time"),
    Rule("times of few rows", lambda c: c.time_form or (c.said == "time" and c.count > 1), "",
         "a time that many rows do not have"),
    Rule("no value", lambda c: not c.known, "", "no value at all{c.scope}"),
    Rule("one value", lambda c: len(c.distinct) == 1, "", "one value only{c.scope}"),
    # Numbers.
    Rule("leading zeros", lambda c: c.numeric and any(re.fullmatch(r"0[0-9]+", text) for text in c.distinct),
         "categorical", "digits with leading zeros"),
    Rule("row numbers",
         lambda c: c.numeric and c.integers and c.all_different and (c.named_id or c.too_large or c.consecutive),
         "", "another number in each row, so it identifies the row"),
    Rule("named ids", lambda c: c.numeric and c.integers and c.named_id, "categorical",
         "{c.count} different integers, and the name of an id"),
    Rule("large integers", lambda c: c.numeric and c.too_large, "categorical",
         "integers that are too large for numbers"),
    Rule("weights of samples", lambda c: c.numeric and c.name.lower() in WEIGHT_NAMES, "numeric",
         'weights of the samples? then remove it here, and add weight = "{c.name}" above', unsure=True),
    Rule("codes", lambda c: c.numeric and c.integers and len(c.distinct) <= FEW_VALUES, "categorical",
         "{c.count} different integers, codes or small numbers", unsure=True),
    Rule("decimals", lambda c: c.numeric and not c.integers, "numeric", "numbers with decimals"),
    # "5.0" is another id than "5".
    Rule("numbers or ids",
         lambda c: c.numeric and c.repeated and len({"." in text for text in c.distinct}) == 1 and not c.named_time,
         "numeric", "integers, which may be ids", also_ids=True),
    Rule("integers", lambda c: c.numeric, "numeric", "integers, amounts or ids", unsure=True),
    # Text.
    Rule("other notation", lambda c: c.odd_numbers, "",
         "seem to be numbers, but {c.odd_numbers[0]!r} is not read as one; write them as 1234.5 in the file",
         unsure=True),
    Rule("joined numbers", lambda c: c.vector_keys, "vector", "{c.vector_keys[width]} numbers in each value",
         unsure=True, keys=lambda c: c.vector_keys),
    Rule("weights in brackets", lambda c: c.bracketed and c.bracketed.kind == "weighted", "weighted",
         "{c.bracketed.parts} different ids with numbers", keys=lambda _: {"brackets": True}),
    Rule("lists in brackets", lambda c: c.bracketed, "multi", "lists of {c.bracketed.parts} different ids",
         keys=lambda _: {"brackets": True}),
    Rule("joined weights", lambda c: c.joined and c.joined.kind == "weighted", "weighted",
         "{c.joined.parts} different ids with numbers", keys=lambda c: c.joined_keys),
    Rule("joined lists", lambda c: c.joined, "multi", "{c.joined.parts} different parts in {c.count} values",
         unsure=True, keys=lambda c: c.joined_keys),
    Rule("long text", lambda c: sum(map(len, c.known)) > LONG_TEXT * len(c.known), "",
         "long text, which has few ids in common"),
    Rule("row ids", lambda c: c.all_different, "", "another value in each row, so it identifies the row"),
    Rule("rare ids", lambda c: len(c.distinct) > 0.5 * len(c.known) > FEW_VALUES, "categorical",
         "{c.count} different values in {c.rows} rows", unsure=True),
    Rule("ids", lambda _: True, "categorical", "{c.count} different values"),
)  # fmt: skip
"""What a column may hold; the first rule that holds decides."""


class RemarkRule(NamedTuple):
    """A further remark: its name, the columns and deciding rules for which it holds, and its text, see `Rule.why`."""

    name: str
    holds: Callable[[Column, Rule], object]
    text: str
    unsure: bool = True


def _has_brackets(c: Column, rule: Rule) -> bool:
    known = c.count and not c.said and not c.bracketed
    return bool(
        rule.kind not in ("", "vector") and known and all(text[0] + text[-1] in BRACKETS for text in c.distinct)
    )


def _has_pointed_ids(c: Column, rule: Rule) -> bool:
    of_ids = rule.also_ids or rule.kind == "categorical"
    return bool(of_ids and c.whole and all(text.endswith(".0") for text in c.whole))


def _has_unread_dates(c: Column, rule: Rule) -> bool:
    return c.named_time and c.count > 1 and not c.time_form and all(DATE_TEXT.match(text) for text in c.distinct)


REMARKS = (
    RemarkRule("order", lambda _, rule: rule.kind == "multi",
               'a history, the oldest first: kind = "sequence", max_length = 50', unsure=False),
    RemarkRule("brackets", _has_brackets,
               "brackets become part of the ids; write them without, or the column as lists of Parquet"),
    RemarkRule("integers with points", _has_pointed_ids,
               "{c.whole[0]} is another id than the same number without a point; write integers (pandas:"
               " astype('Int64'))"),
    RemarkRule("dates that are not read", _has_unread_dates,
               "seem to be times, such as {c.distinct[0]}, not all of one known format; write 2014-10-21T07:00"),
)  # fmt: skip
"""What else is said of a column: each remark that holds."""


@dataclass(frozen=True)
class Guess:
    """What a column probably is: the rule that decided, its results as in `Rule`, and all remarks.

    `is_time` is True if nearly all rows have a time in the column.
    """

    column: Column
    rule: str
    kind: str
    keys: Mapping[str, Any]
    remarks: tuple[Remark, ...]
    also_ids: bool
    is_time: bool


def guess_column(column: Column) -> Guess:
    """Returns the guess of the first rule that holds for a column, with all further remarks that hold."""
    rule = next(rule for rule in RULES if rule.holds(column))
    remarks = [Remark(rule.why.format(c=column), rule.unsure)]
    remarks += [Remark(other.text.format(c=column), other.unsure) for other in REMARKS if other.holds(column, rule)]
    return Guess(column, rule.name, rule.kind, rule.keys(column), tuple(remarks), rule.also_ids, rule.name == "times")
