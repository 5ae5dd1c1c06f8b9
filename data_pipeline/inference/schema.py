"""Inference of a schema file: the label, the time and the fields among the columns of a raw file, and its text."""

import json
import os
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa

from cowrec.errors import UserError
from cowrec.names import hint

from ..dataset.schema import (
    BUCKET_SUFFIX,
    LABEL,
    MISSING_SUFFIX,
    SAMPLE_NUMBER,
    SAMPLE_WEIGHT,
    TIME,
    TRUE_LOGIT,
    WEIGHT_SUFFIX,
)
from ..raw.layouts import FIELD_KINDS, RawLabel
from .columns import (
    FEW_VALUES,
    FREQUENT,
    LABEL_NAMES,
    NEGATION,
    POSITIVE,
    TIME_NAME,
    TOTAL_NAME,
    Column,
    Guess,
    Remark,
    guess_column,
    unsure,
)
from .sample import LONG_TEXT, RawSample, read_sample
from .times import columns_of_time

RESERVED = (LABEL, TIME, TRUE_LOGIT, SAMPLE_WEIGHT, SAMPLE_NUMBER)
ENOUGH = 100
"""Samples of each class from which on no column tells the classes apart by chance."""
WHICH = unsure("which values are positive?")
SHARED = 20
"""Least number of common ids of two columns that are said to have ids of the same things."""
SHOWN_ITEMS = re.compile(r"\S+-[01]( \S+-[01])*")
"""Items that were shown together, each with its label, as in MIND's `behaviors.tsv`: `N3-1 N23-0`."""
NO_IDS = 'training needs a field of ids: make one categorical, or add transform = "buckets"'

Guesses = Mapping[str, Guess]


@dataclass(frozen=True)
class Entry:
    """A line of a schema file: a key with its value, or an entry of `fields`, with remarks."""

    keys: Mapping[str, Any]
    remarks: tuple[Remark, ...] = ()

    @property
    def text(self) -> str:
        return ", ".join(f"{key} = {_toml(value)}" for key, value in self.keys.items())

    @property
    def comment(self) -> str:
        return _comment("; ".join(map(str, self.remarks)))

    @property
    def doubts(self) -> list[str]:
        """The remarks that the reader should check."""
        return [remark.text for remark in self.remarks if remark.unsure]

    def __str__(self) -> str:
        return f"{self.text}  # {self.comment}" if self.remarks else self.text


@dataclass(frozen=True)
class InferredSchema:
    """A guess of what the columns of a raw file hold.

    Attributes:
        rows: number of the first rows that the guess was made from.
        file: keys of the file: delimiter, quote, header and, without a header, columns.
        label: the label's column, or the columns of its count and total.
        rule: which values of the label are positive; None if they are 0 and 1, or rates.
        time: column of the times of samples; None if no column has a time in every row.
        null: texts that seem to mean a missing value, in any field.
        left_out: columns that are no fields, each with the reasons.
        notes: what is unsure about the whole file.
    """

    path: str
    rows: int
    file: tuple[Entry, ...]
    label: Entry
    rule: Entry | None
    time: Entry | None
    null: Entry | None
    fields: tuple[Entry, ...]
    left_out: tuple[Entry, ...]
    notes: tuple[str, ...]

    @property
    def to_check(self) -> tuple[str, ...]:
        """The lines that matter most: notes, label and time, and the columns that are left out."""
        chosen = map(str, filter(None, (self.label, self.rule, self.time)))
        return (*self._note_lines, *chosen, *self._left_out_lines)

    @property
    def doubts(self) -> list[str]:
        """All remarks that the reader should check."""
        entries = [*filter(None, (self.label, self.rule, self.time, self.null)), *self.left_out, *self.fields]
        return [*self.notes, *(doubt for entry in entries for doubt in entry.doubts)]

    @property
    def text(self) -> str:
        """The schema file, TOML with comments."""
        lines = [
            f"# Written by `cowrec schema infer` from the first {self.rows:,} rows of {_comment(self.path)}.",
            "# Please check each line, above all those that say unsure, then remove or correct what is wrong.",
            *self._note_lines,
            "",
            *map(str, filter(None, (*self.file, self.label, self.rule))),
            str(self.time) if self.time else '# time = "..."  # no column holds a time in every row',
            *[str(self.null)] * bool(self.null),
            "",
            *self._left_out_lines,
            *[""] * bool(self._left_out_lines),
            "fields = [",
            *(f"    {{{field.text}}},  # {field.comment}" for field in self.fields),
            "]",
            "",
        ]
        return "\n".join(lines)

    @property
    def _note_lines(self) -> list[str]:
        return [f"# unsure: {_comment(note)}" for note in self.notes]

    @property
    def _left_out_lines(self) -> list[str]:
        return [f"# left out: {_comment(repr(entry.keys['column']))}: {entry.comment}" for entry in self.left_out]


def infer_schema(
    path: str | os.PathLike[str], *, label: str = "", positive: Sequence[str] = (), delimiter: str = ""
) -> InferredSchema:
    """Guesses the columns of a raw file from its first rows.

    Args:
        path: text or JSON lines, plain or compressed, Parquet or Arrow.
        label: column of the label; by default one of two values, by its name if there are several.
        positive: values of that column that are positive.
        delimiter: of text; by default the one of the common delimiters that divides the lines alike.

    Raises ValueError: the file cannot be read, has no such column, or no column looks like a label or a field.
    """
    if positive and not label:
        raise UserError(f"positive = {[*positive]} needs the label whose values these are; name its column (--label)")
    sample = read_sample(path, label, delimiter)
    place = os.fspath(path)
    if not sample.rows:
        raise UserError(f"input file {place} has no samples")
    guesses = _guesses(sample)
    repeated = sorted({name for name in sample.columns if sample.columns.count(name) > 1})
    where = place if sample.header else f"{place}, whose first line was taken as a sample and not as a header"
    found = _Labels(guesses, sample.scope, repeated, where).of(label, positive)
    of_label = found.columns
    guesses = _without_leaks(guesses, sample, found)
    times = [name for name, guess in guesses.items() if guess.is_time and name not in of_label]
    time = max(times, key=lambda name: (not guesses[name].column.missing, bool(TIME_NAME.search(name))), default="")
    markers = sorted({text for guess in guesses.values() for text in guess.column.markers})
    fields, left_out = _fields({name: guess for name, guess in guesses.items() if name not in (*of_label, time)})
    of_time = _time(time, times, guesses) if time else _time_of_parts(sample, of_label)
    if not fields:
        raise UserError(f"{place}: no column looks like a field; write the schema file by hand")
    left_out += [_left_out(name, "several columns have this name") for name in repeated if name]
    left_out += [_left_out("", "a column without a name")] * ("" in sample.columns)
    if not sample.header:
        left_out += [_left_out(name, "of the folder; it needs files with a header") for name in sample.partition]
    no_ids = all(FIELD_KINDS[field.keys["kind"]].is_of_numbers for field in fields)
    of_text = {"delimiter": sample.delimiter, "quote": sample.quote, "header": sample.header}
    of_file: dict[str, Any] = of_text if sample.is_text else {}
    of_file |= {"encoding": sample.encoding} if sample.encoding else {}
    of_file |= {"decimal": sample.decimal} if sample.decimal != "." else {}
    of_file |= {} if sample.header else {"columns": list(sample.columns)}
    return InferredSchema(
        path=sample.path,
        rows=sample.rows,
        file=tuple(Entry({key: value}) for key, value in of_file.items()),
        label=Entry({"label": found.label}, found.remarks),
        rule=found.rule if found.rule.keys else None,
        time=of_time,
        null=Entry({"null": markers}, (unsure("these look like missing values"),)) if markers else None,
        fields=tuple(fields),
        left_out=tuple(left_out),
        notes=(*sample.notes, *[NO_IDS] * no_ids),
    )


def _guesses(sample: RawSample) -> dict[str, Guess]:
    guesses = {
        name: guess_column(Column(name, values, sample.types.get(name, ""), sample.scope))
        for name, values in zip(sample.columns, sample.values, strict=True)
        if sample.columns.count(name) == 1 and name
    }
    if sample.header:
        # Each folder has many rows, so that its value does not identify one.
        guesses |= {name: guess_column(Column(name, [*values] * 3)) for name, values in sample.partition.items()}
    return guesses


def _left_out(column: str, why: str) -> Entry:
    return Entry({"column": column}, (Remark(why),))


def _lacking(column: Column) -> tuple[Remark, ...]:
    if not column.missing:
        return ()
    share = f"{100 * column.missing:.3g} % of the rows have none"
    return (Remark(f"{share}, and are bad rows: see prepare.on_bad_row"),)


def _could_be(names: Sequence[str]) -> tuple[Remark, ...]:
    return (unsure(f"{', '.join(map(repr, names))} could be it too"),) if names else ()


def _time(time: str, times: Sequence[str], guesses: Guesses) -> Entry:
    form, column = guesses[time].column.time_form, guesses[time].column
    assert form is not None
    said = [unsure(f"{form.said}; {form.other} fits all values too")] if form.other else []
    said = said or [Remark(form.said)] * bool(form.keys)
    others = [name for name in times if name != time]
    return Entry({"time": form.of(time)}, (*said, *_could_be(others), *_lacking(column)))


def _time_of_parts(sample: RawSample, of_label: Sequence[str]) -> Entry | None:
    """Returns the entry of columns that hold year, month, day and further parts; None if there are none."""
    columns = zip(sample.columns, sample.values, strict=True)
    found = columns_of_time({name: [text or "" for text in texts] for name, texts in columns if name not in of_label})
    return Entry({"time": {"columns": found}}, (Remark("parts of a time"),)) if found else None


@dataclass(frozen=True)
class FoundLabel:
    """A label, as a schema file has it, with remarks on the choice.

    Attributes:
        columns: the label's column, and the column of totals if the label counts.
        label: the column, or a table that names it.
        rule: see `label_rule`.
    """

    columns: tuple[str, ...]
    label: str | Mapping[str, str]
    rule: Entry
    remarks: tuple[Remark, ...]


@dataclass(frozen=True)
class _Labels:
    """The choice of a label among guesses; each of `repeated` names several columns, and `place` names the file."""

    guesses: Guesses
    scope: str
    repeated: Sequence[str]
    place: str

    def of(self, asked: str, positive: Sequence[str] = ()) -> FoundLabel:
        """Returns the label that is asked for, with its positive values if given, or the likeliest one."""
        if asked in self.repeated:
            raise UserError(f"{self.place}: several columns are called {asked!r}; rename all but the label's")
        if asked and asked not in self.guesses:
            raise UserError(f"{self.place}: no column {asked!r} for the label among {', '.join(self.guesses)}")
        chosen, others = (asked, []) if asked else self._likeliest()
        column = self.guesses[chosen].column
        rule = _rule_of(column, positive) if positive else label_rule(column, partial=bool(self.scope))
        if rule is None:
            raise UserError(f"column {chosen!r} cannot be the label: {self._problem(column)}")
        label: str | Mapping[str, str] = chosen
        said = Remark("see the next line" if rule.keys else "all values are 0 or 1")
        total = self._total_of(column) if "threshold" in rule.keys else ""
        if "kind" in rule.keys:
            label, said, rule = {"column": chosen, **rule.keys}, rule.remarks[0], Entry({})
        elif total:
            said, rule = unsure(f"is {chosen!r} the number of positives of {total!r}?"), Entry({})
            label = {"count": chosen, "of": total}
        remarks: tuple[Remark, ...] = (said,)
        if column.count == 1:
            remarks = (unsure(f"one value only{self.scope}"),)
        elif others:
            remarks = (*_could_be(others[:5]), *remarks[not said.unsure :])
        return FoundLabel((chosen, *[total] * bool(total)), label, rule, remarks + _lacking(column))

    def _likeliest(self) -> tuple[str, list[str]]:
        """Returns the likeliest label and the other columns that could be it. Raises ValueError if none is likeliest.

        Columns with a name of labels precede those of two values that words or numbers tell apart, and these all others
        of two values.
        """
        columns = {name: guess.column for name, guess in self.guesses.items()}
        rules = {name: rule for name, column in columns.items() if (rule := label_rule(column)) is not None}
        two = [name for name, column in columns.items() if column.count == 2 and not _is_denial(name, columns)]
        complete = [name for name in two if not columns[name].missing]
        flags = [name for name in complete if name in rules and not rules[name].doubts]
        named = [name for known in LABEL_NAMES for name in rules if name.lower() == known]
        sure = [name for name in named if name in two]
        sure += [name for name in named if name not in sure and columns[name].numeric and self._total_of(columns[name])]
        candidates = [*sure, *flags, *named, *complete]
        if not candidates:
            raise UserError(self._none_found(two))
        if not sure and len(likely := flags or ([] if named else complete)) > 1:
            raise UserError(
                f"{self.place}: several columns could be the label: {', '.join(map(repr, likely[:5]))}; name it with"
                f" --label, such as --label {likely[0]}"
            )
        chosen, rivals = candidates[0], named if sure else [*named, *complete]
        return chosen, [name for name in dict.fromkeys(rivals) if name != chosen]

    def _total_of(self, counts: Column) -> str:
        """Returns the column of totals of which the label counts a part in each row; empty if there is none."""
        for name, totals in ((name, guess.column) for name, guess in self.guesses.items() if TOTAL_NAME.search(name)):
            if name == counts.name or totals.missing or not totals.numeric or len(totals.values) != len(counts.values):
                continue
            rows = zip(counts.values, totals.values, strict=True)
            pairs = [(float(part), float(of)) for part, of in rows if part and of and part not in counts.markers]
            if all(0 <= part <= of >= 1 for part, of in pairs):
                return name
        return ""

    def _none_found(self, two: Sequence[str]) -> str:
        names = ", ".join(map(repr, self.repeated[:5]))
        remark = f" (those that share a name are left out: {names}; rename them)" if self.repeated else ""
        could = f"; with two values, and missing ones: {', '.join(map(repr, two[:5]))}" if two else ""
        known = [name for name in self.guesses if name.lower() in LABEL_NAMES]
        constant = [name for name in known if self.guesses[name].column.count == 1]
        why = self.scope or ", so nothing can be learned"
        for name, guess in self.guesses.items():
            if all(map(SHOWN_ITEMS.fullmatch, guess.column.counts)):
                shown = next(iter(guess.column.counts))[:LONG_TEXT]
                return (
                    f"{self.place}: no column looks like a label, but {name!r} has several items with a label each,"
                    f" such as {shown!r}; write a row for each item, with its label"
                )
        could += f"; {', '.join(map(repr, constant))} has one value only{why}" if constant else ""
        return f"{self.place}: no column looks like a label{remark}; name it with --label COLUMN{could}"

    def _problem(self, column: Column) -> str:
        if column.count > 1:
            texts = [text for text, _ in column.counts.most_common(8)]
            shown = ", ".join(map(repr, texts)) + ", ..." * (column.count > len(texts))
            likely = next((text for text in texts if text.strip().lower() in POSITIVE), texts[-1])
            return (
                f"its values are neither two nor all numbers: {shown}; say which are positive, as in --positive"
                f" {shlex.quote(likely)}, which may be repeated"
            )
        remedy = "; shuffle the rows, or write the schema file by hand" if self.scope else ""
        return f"it has {('no value', 'one value')[column.count]}{self.scope}{remedy}"


def _rule_of(column: Column, positive: Sequence[str]) -> Entry:
    """Returns the rule of the given positive values. Raises ValueError unless rows have all of these and another."""
    texts = pa.array(column.distinct, pa.string())
    for value in positive:
        if not np.nansum(RawLabel(positive=(value,)).values(texts)[0]):
            frequent = [text for text, _ in column.counts.most_common(20)]
            raise UserError(f"column {column.name!r} has no row whose value is {value!r}; {hint(value, frequent)}")
    others = texts.filter(pa.array(RawLabel(positive=tuple(positive)).values(texts)[0] == 0)).to_pylist()
    if not others:
        raise UserError(f"column {column.name!r} has no value besides the positive ones; name fewer of them")
    shown = ", ".join(map(repr, others[:8])) + ", ..." * (len(others) > 8)
    return Entry({"positive": [*positive]}, (Remark(f"the others are negative: {shown}"),))


def _is_denial(name: str, columns: Iterable[str]) -> bool:
    """Returns whether the name of a column denies another name, as `nonclk` denies `clk`."""
    return any(re.fullmatch(NEGATION + re.escape(other), name, re.IGNORECASE) for other in columns)


def label_rule(column: Column, *, partial: bool = False) -> Entry | None:
    """Returns which values of a column are positive, without keys if they are 0 and 1; None if it cannot be a label.

    If the values are `partial`, later rows may have the other one of 0 and 1.
    """
    if not column.count:
        return None
    values, wrong = RawLabel().values(pa.array(column.distinct, pa.string()))
    if not wrong.any():
        return Entry({}) if partial or len(set(values.tolist())) == 2 else None
    numbers = sorted(column.numbers)
    if column.count == 2:
        known = _positive(column.distinct) if len(numbers) < 2 else None
        largest = max(column.distinct, key=float) if len(numbers) == 2 else max(column.distinct)
        sure = known is not None or numbers == [-1.0, 1.0]
        return Entry({"positive": [largest if known is None else known]}, () if sure else (WHICH,))
    if len(numbers) < column.count:
        return None
    if numbers[0] >= 0 and numbers[-1] <= 1:
        return Entry({"kind": "rate"}, (Remark("shares of positives; for classes give threshold"),))
    above, missing = [number for number in numbers if number > 0], numbers == [-1, 0, 1]
    counts = all(number.is_integer() for number in numbers) and float(column.most) == 0
    threshold = above[0] if above and (counts or missing) else numbers[len(numbers) // 2]
    remark = unsure(f"{WHICH.text} Is -1 a missing label?") if missing else WHICH
    return Entry({"threshold": threshold}, (remark,))


def _positive(texts: Sequence[str]) -> str | None:
    """Returns the positive one of two texts: one that the other denies, or a known word; None if neither is."""
    words = {text: text.strip().lower() for text in texts}
    for text, other in (texts, texts[::-1]):
        if re.fullmatch(NEGATION + re.escape(words[text]), words[other]):
            return text
    named = [text for text in texts if words[text] in POSITIVE]
    return named[0] if len(named) == 1 else None


def _without_leaks(guesses: Guesses, sample: RawSample, label: FoundLabel) -> dict[str, Guess]:
    """Leaves out columns each of whose few values occurs with one class of the label, if classes have many samples."""
    columns = dict(zip(sample.columns, sample.values, strict=True))
    texts = pa.array([text or "" for text in columns.get(label.columns[0], ())], pa.string())
    keys: dict[str, Any] = {"threshold": label.rule.keys.get("threshold")}
    keys["positive"] = tuple(label.rule.keys.get("positive", ()))
    classes = RawLabel(**keys, null=guesses[label.columns[0]].column.markers).values(texts)[0].tolist()
    if min(classes.count(0.0), classes.count(1.0)) < ENOUGH:
        return dict(guesses)

    def tells(name: str, guess: Guess) -> bool:
        if name not in columns or name in label.columns or guess.is_time or guess.column.count > FEW_VALUES:
            return False
        pairs = {(text, cls) for text, cls in zip(columns[name], classes, strict=True) if cls in (0, 1)}
        return len(pairs) == len({text for text, _ in pairs})

    leak = (Remark(f"it says what the label is{sample.scope}"),)
    return {
        name: replace(guess, kind="", remarks=leak, also_ids=False) if tells(name, guess) else guess
        for name, guess in guesses.items()
    }


def _fields(guesses: Guesses) -> tuple[list[Entry], list[Entry]]:
    """Returns the entries of `fields`, and the columns that are left out."""
    fields, left_out, used = list[Entry](), list[Entry](), set(RESERVED)
    for column, guess in guesses.items():
        missing = guess.column.missing
        remarks = (*guess.remarks, *[Remark(f"{100 * missing:.3g} % missing")] * bool(missing))
        if guess.is_time and guess.column.time_form:
            form = guess.column.time_form
            for part in form.parts:
                name = _unused(f"{column}_{part}", used, guesses)
                keys = {"name": name, "column": column, "kind": "categorical", "part": part, **form.keys}
                fields.append(Entry(keys, (Remark(f"the {part} of a time: {form.said}"),)))
            continue
        if not guess.kind:
            left_out.append(Entry({"column": column}, remarks))
            continue
        name = column + "_" * column.endswith(WEIGHT_SUFFIX)
        while name in used or name.startswith(("label_", "kept_")):
            name = f"field_{name}"
        # A numeric field may get a second one, of its buckets, or of where it has no value.
        used |= {name, f"{name}{BUCKET_SUFFIX}", f"{name}{MISSING_SUFFIX}", f"{name}{WEIGHT_SUFFIX}"}
        renamed = {} if name == column else {"column": column}
        fields.append(Entry({"name": name, **renamed, "kind": guess.kind, **guess.keys}, remarks))
        if guess.also_ids:
            name = _unused(f"{name}_id", used, guesses)
            of_ids = {"name": name, "column": column, "kind": "categorical", "min_count": FREQUENT}
            fields.append(Entry(of_ids, (Remark("the same integers as ids; remove the field that is wrong"),)))
    return [_with_shared_ids(field, fields, guesses) for field in fields], left_out


def _with_shared_ids(field: Entry, fields: Sequence[Entry], guesses: Guesses) -> Entry:
    """Returns a field of lists with a remark on the field of single ids that has the same ids, if there is one."""
    keys = field.keys
    if keys["kind"] != "multi" or "separator" not in keys or "brackets" in keys:
        return field
    ids = guesses[keys.get("column", keys["name"])].column.parts(keys["separator"])
    for other in fields:
        if other.keys["kind"] != "categorical" or "part" in other.keys:
            continue
        others = guesses[other.keys.get("column", other.keys["name"])].column.counts.keys()
        if len(ids & others) >= max(SHARED, 0.5 * len(ids), 0.5 * len(others)):
            name = other.keys["name"]
            same = unsure(
                f'has ids of {name!r}: shares = {_toml(name)} gives both one table, and kind = "sequence" is for a'
                " history, whose order counts"
            )
            return replace(field, remarks=(*field.remarks, same))
    return field


def _unused(name: str, used: set[str], guesses: Guesses) -> str:
    """Returns a name for a further field of a column, which it adds to those that are used."""
    while name in used or name in guesses:
        name += "_"
    used.add(name)
    return name


def _toml(value: object) -> str:
    """Returns a TOML value; TOML takes JSON's escapes, and DEL only as one."""
    if isinstance(value, dict):
        return f"{{{', '.join(f'{key} = {_toml(inner)}' for key, inner in value.items())}}}"
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def _comment(text: str) -> str:
    """Returns text without the characters that a comment must not have."""
    return re.sub(r"[\x00-\x1f\x7f]", " ", text)
