"""`infer_schema`: a commented schema file, from a sample of a raw file."""

import json
import os
import re
from collections.abc import Mapping, Sequence

import pyarrow as pa

from cowrec.data_pipeline.dataset.schema import LABEL, SAMPLE_NUMBER, SAMPLE_WEIGHT, TIME, TRUE_LOGIT, WEIGHT_SUFFIX
from cowrec.data_pipeline.raw.labels import RawLabel
from cowrec.data_pipeline.raw.missing import marker_numbers

from .column_guess import TIME_NAME, Guess, guess_column
from .sample import RawSample, read_sample

LABEL_NAMES = ("label", "click", "clicked", "is_click", "target", "y", "converted", "conversion", "is_conversion",
               "purchase", "purchased", "buy", "bought", "like", "liked", "response", "class", "rating")  # fmt: skip
POSITIVE = ("1", "yes", "y", "true", "t", "click", "clicked", "positive", "pos", "buy", "like")
RESERVED = (LABEL, TIME, TRUE_LOGIT, SAMPLE_WEIGHT, SAMPLE_NUMBER)


def infer_schema(path: str | os.PathLike[str], *, label: str = "") -> str:
    """Returns the text of a schema file for a raw file, from its first rows; comments say what is unsure.

    Args:
        path: text, plain or compressed, Parquet or Arrow.
        label: column of the label; by default one of two values, by its name if there are several.

    Raises:
        ValueError: the file cannot be read, has no such column, or no column looks like a label or a field.
    """
    sample = read_sample(path)
    guesses = _guesses(sample)
    repeated = sorted({name for name in sample.columns if sample.columns.count(name) > 1})
    chosen, rule, note = _label(guesses, label, repeated, os.fspath(path))
    times = [name for name, guess in guesses.items() if guess.is_time and name != chosen]
    time = max(times, key=lambda name: bool(TIME_NAME.search(name)), default="")
    lines = [
        f"# Written by `cowrec schema infer` from the first {len(sample.rows):,} rows of {_comment(os.fspath(path))}.",
        "# Please check each line, above all those that say unsure, then remove or correct what is wrong.",
        *(f"# unsure: {_comment(note)}" for note in sample.notes),
        "",
        f"delimiter = {_toml(sample.delimiter)}",
        f"quote = {_toml(sample.quote)}",
        f"header = {str(sample.header).lower()}",
        *([] if sample.header else [f"columns = [{', '.join(map(_toml, sample.columns))}]"]),
        f"label = {_toml(chosen)}  # {note}",
        *([f"{rule}  # unsure: which values are positive?"] if rule else []),
        *_time_lines(time, times),
        *_null_lines(guesses),
        "",
    ]
    fields, left_out = _field_lines({name: each for name, each in guesses.items() if name not in (chosen, time)})
    if not fields:
        raise ValueError(f"{os.fspath(path)}: no column looks like a field; write the schema file by hand")
    left_out += [f"# left out: {_comment(repr(name))}: several columns have this name" for name in repeated]
    return "\n".join([*lines, *left_out, *[""] * bool(left_out), "fields = [", *fields, "]", ""])


def _guesses(sample: RawSample) -> dict[str, Guess]:
    """Returns a guess for each column whose name is not repeated."""
    columns = zip(*sample.rows, strict=True) if sample.rows else [()] * len(sample.columns)
    return {
        name: guess_column(name, values)
        for name, values in zip(sample.columns, columns, strict=True)
        if sample.columns.count(name) == 1 and name
    }


def _label(guesses: Mapping[str, Guess], asked: str, repeated: Sequence[str], path: str) -> tuple[str, str, str]:
    """Returns the column of the label, the line of its rule or "", and a comment."""
    if asked in repeated:
        raise ValueError(f"{path}: several columns are called {asked!r}; rename all but the label's")
    if asked and asked not in guesses:
        raise ValueError(f"{path}: no column {asked!r} for the label among {', '.join(guesses)}")
    complete = {name: each for name, each in guesses.items() if not each.missing and not each.null}
    two_valued = [name for name, each in complete.items() if len(each.distinct) == 2]
    plain = [name for name in two_valued if _rule(guesses[name]) == ""]
    named = [
        name for known in LABEL_NAMES for name in complete if name.lower() == known and _rule(guesses[name]) is not None
    ]
    candidates = [*[name for name in named if name in two_valued], *plain, *named, *two_valued]
    if not asked and not candidates:
        names = ", ".join(map(repr, repeated[:5]))
        remark = f" (those that share a name are left out: {names}; rename them)" if repeated else ""
        raise ValueError(f"{path}: no column looks like a label{remark}; name it with --label COLUMN")
    chosen = asked or candidates[0]
    rule = _rule(guesses[chosen])
    if rule is None:
        raise ValueError(f"column {chosen!r} cannot be the label: its values are neither two nor all numbers")
    others = [name for name in two_valued if name != chosen]
    unsure = f"unsure: {_comment(', '.join(map(repr, others[:5])))} could be it too" if others and not asked else ""
    return chosen, rule, unsure or "all values are 0 or 1" if not rule else unsure or "see the next line"


def _rule(guess: Guess) -> str | None:
    """Returns the line that makes a column a label, "" if it needs none, None if it cannot be one."""
    texts = pa.array(guess.distinct, pa.string())
    if not len(texts) or guess.missing or guess.null:
        return None
    values, wrong = RawLabel().values(texts)
    if not wrong.any():
        return "" if len(set(values.tolist())) == 2 else None
    if len(guess.distinct) == 2:
        chosen = next((text for text in guess.distinct if text.lower() in POSITIVE), max(guess.distinct))
        return f"positive = [{_toml(chosen)}]"
    numbers = sorted(marker_numbers(guess.distinct))
    return f"threshold = {numbers[len(numbers) // 2]!r}" if len(numbers) == len(guess.distinct) else None


def _time_lines(time: str, times: Sequence[str]) -> list[str]:
    if not time:
        return ['# time = "..."  # no column holds a time in every row']
    others = [name for name in times if name != time]
    unsure = f"  # unsure: {_comment(', '.join(map(repr, others)))} could be it too" if others else ""
    return [f"time = {_toml(time)}{unsure}"]


def _null_lines(guesses: Mapping[str, Guess]) -> list[str]:
    markers = sorted({text for guess in guesses.values() for text in guess.null})
    if not markers:
        return []
    return [f"null = [{', '.join(map(_toml, markers))}]  # unsure: these look like missing values"]


def _field_lines(guesses: Mapping[str, Guess]) -> tuple[list[str], list[str]]:
    """Returns the entries of `fields`, and comments on the columns that are left out."""
    fields, left_out, used = [], [], set(RESERVED)
    for column, guess in guesses.items():
        missing = f"; {100 * guess.missing:.3g} % missing" if guess.missing else ""
        if not guess.kind:
            left_out.append(f"# left out: {_comment(repr(column))}: {guess.why}{missing}")
            continue
        name = re.sub(r"[^A-Za-z0-9_-]", "_", column).lstrip("-") or "field"
        name = name + "_" if name.endswith(WEIGHT_SUFFIX) else name
        while name in used or name.startswith(("label_", "kept_")):
            name = f"field_{name}"
        # A numeric field may get a second one, of its buckets.
        used |= {name, f"{name}_bucket", f"{name}{WEIGHT_SUFFIX}"}
        keys = {"name": name, **({} if name == column else {"column": column}), "kind": guess.kind, **guess.keys}
        text = ", ".join(f"{key} = {_toml(value)}" for key, value in keys.items())
        fields.append(f"    {{{text}}},  # {_comment(guess.why)}{missing}")
    return fields, left_out


def _toml(text: str) -> str:
    """Returns a TOML string; TOML takes JSON's escapes, and DEL only as one."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _comment(text: str) -> str:
    """Returns text without what a comment must not have."""
    return re.sub(r"[\x00-\x1f\x7f]", " ", text)
