"""Inference of a commented schema file from the first rows of a raw file."""

import csv
import io
import json
import math
import os
import re
import tomllib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace

import pyarrow as pa

from cowrec.errors import UserError

from .dataset.schema import (
    BUCKET_SUFFIX,
    LABEL,
    MISSING_SUFFIX,
    SAMPLE_NUMBER,
    SAMPLE_WEIGHT,
    TIME,
    TRUE_LOGIT,
    WEIGHT_SUFFIX,
)
from .raw.inputs import Source, find_inputs, partition_of
from .raw.layouts import RawKind, RawLabel
from .raw.parsing import require_offsets
from .raw.reading import look, naming_file, open_groups
from .raw.text import BYTE_ORDER_MARK, RawText
from .raw.values import (
    DATE_DIGITS,
    EXACT_INTEGERS,
    LOOKS_MISSING,
    NUMBER_PATTERN,
    as_id_text,
    as_times,
    marker_numbers,
    plain_array,
)

LABEL_NAMES = ("label", "click", "clicked", "is_click", "target", "y", "converted", "conversion", "is_conversion",
               "purchase", "purchased", "buy", "bought", "like", "liked", "response", "class", "rating")  # fmt: skip
POSITIVE = ("yes", "y", "true", "t", "positive", "pos", "click", "clicked", "converted", "conversion", "purchase",
            "purchased", "buy", "bought", "like", "liked", "paid", "won", "success", "accepted",
            "subscribed")  # fmt: skip
NEGATION = r"(no|not|non|un|never)[\s_-]*"
WEIGHT_NAMES = ("weight", "weights", "sample_weight", "sample_weights")
UNSURE_RULE = "  # unsure: which values are positive?"
RESERVED = (LABEL, TIME, TRUE_LOGIT, SAMPLE_WEIGHT, SAMPLE_NUMBER)


def infer_schema(path: str | os.PathLike[str], *, label: str = "") -> str:
    """Returns the text of a schema file for a raw file, from its first rows; comments say what is unsure.

    Args:
        path: text, plain or compressed, Parquet or Arrow.
        label: column of the label; by default one of two values, by its name if there are several.

    Raises:
        ValueError: the file cannot be read, has no such column, or no column looks like a label or a field.
    """
    sample = read_sample(path, label)
    if not sample.rows:
        raise UserError(f"input file {os.fspath(path)} has no samples")
    scope = "" if sample.whole else f" in the first {len(sample.rows):,} rows"
    guesses = {
        name: guess_column(name, values, sample.types.get(name, ""), scope)
        for name, values in zip(sample.columns, zip(*sample.rows, strict=True), strict=True)
        if sample.columns.count(name) == 1 and name
    }
    # Each folder has many rows, so that its value does not identify one.
    given = {name: guess_column(name, [*values] * 3) for name, values in sample.partition.items()}
    guesses |= given if sample.header else {}
    repeated = sorted({name for name in sample.columns if sample.columns.count(name) > 1})
    place = os.fspath(path) + ", whose first line was taken as a sample and not as a header" * (not sample.header)
    chosen, rule, note = _label(guesses, label, repeated, place, scope)
    _leave_out_leaks(guesses, sample, chosen, rule, scope)
    times = [name for name, guess in guesses.items() if guess.is_time and name != chosen]
    time = max(times, key=lambda name: (not guesses[name].missing, bool(TIME_NAME.search(name))), default="")
    markers = sorted({text for guess in guesses.values() for text in guess.null})
    lines = [
        f"# Written by `cowrec schema infer` from the first {len(sample.rows):,} rows of {_comment(sample.path)}.",
        "# Please check each line, above all those that say unsure, then remove or correct what is wrong.",
        *(f"# unsure: {_comment(note)}" for note in sample.notes),
        "",
        f"delimiter = {_toml(sample.delimiter)}",
        f"quote = {_toml(sample.quote)}",
        f"header = {str(sample.header).lower()}",
        *([] if sample.header else [f"columns = [{', '.join(map(_toml, sample.columns))}]"]),
        f"label = {_toml(chosen)}  # {note}",
        *[rule] * bool(rule),
        *_time_lines(time, times, guesses),
        *([f"null = [{', '.join(map(_toml, markers))}]  # unsure: these look like missing values"] if markers else []),
        "",
    ]
    fields, left_out = _field_lines({name: each for name, each in guesses.items() if name not in (chosen, time)})
    if not fields:
        raise UserError(f"{os.fspath(path)}: no column looks like a field; write the schema file by hand")
    left_out += [f"# left out: {_comment(repr(name))}: several columns have this name" for name in repeated if name]
    left_out += ["# left out: a column without a name"] * ("" in sample.columns)
    if not sample.header:
        left_out += [
            f"# left out: {_comment(repr(name))}: of the folder; it needs files with a header" for name in given
        ]
    return "\n".join([*lines, *left_out, *[""] * bool(left_out), "fields = [", *fields, "]", ""])


def _label(
    guesses: "Mapping[str, Guess]", asked: str, repeated: Sequence[str], path: str, scope: str
) -> tuple[str, str, str]:
    """Returns the column of the label, the line of its rule or "", and a comment; `scope`: see `guess_column`."""
    if asked in repeated:
        raise UserError(f"{path}: several columns are called {asked!r}; rename all but the label's")
    if asked and asked not in guesses:
        raise UserError(f"{path}: no column {asked!r} for the label among {', '.join(guesses)}")
    two = [name for name, each in guesses.items() if len(each.distinct) == 2]
    two_valued = [name for name in two if not guesses[name].missing and not guesses[name].null]
    plain = [name for name in two_valued if _rule(guesses[name]) == ""]
    named = [
        name for known in LABEL_NAMES for name in guesses if name.lower() == known and _rule(guesses[name]) is not None
    ]
    candidates = [*[name for name in named if name in two], *plain, *named, *two_valued]
    if not asked and not candidates:
        names = ", ".join(map(repr, repeated[:5]))
        remark = f" (those that share a name are left out: {names}; rename them)" if repeated else ""
        could = f"; with two values, and missing ones: {', '.join(map(repr, two[:5]))}" if two else ""
        constant = [name for name, each in guesses.items() if name.lower() in LABEL_NAMES and len(each.distinct) == 1]
        why = scope or ", so nothing can be learned"
        could += f"; {', '.join(map(repr, constant))} has one value only{why}" if constant else ""
        raise UserError(f"{path}: no column looks like a label{remark}; name it with --label COLUMN{could}")
    chosen = asked or candidates[0]
    rule, single = _rule(guesses[chosen], partial=bool(scope)), len(guesses[chosen].distinct) == 1
    if rule is None:
        remedy = "; shuffle the rows, or write the schema file by hand" if scope else ""
        found = ("no value", "one value")[single] + scope + remedy
        problem = (
            "its values are neither two nor all numbers" if len(guesses[chosen].distinct) > 1 else f"it has {found}"
        )
        raise UserError(f"column {chosen!r} cannot be the label: {problem}")
    lacking = _lacking(guesses[chosen])
    others = [name for name in dict.fromkeys([*named, *two_valued]) if name != chosen]
    unsure = f"unsure: {_comment(', '.join(map(repr, others[:5])))} could be it too" if others and not asked else ""
    unsure = f"unsure: one value only{scope}" if single else unsure
    return chosen, rule, (unsure or ("see the next line" if rule else "all values are 0 or 1")) + lacking


def _lacking(guess: "Guess") -> str:
    """A remark on missing values of a label or a time."""
    if not guess.missing:
        return ""
    return f"; {100 * guess.missing:.3g} % of the rows have none, and are bad rows: see prepare.on_bad_row"


def _rule(guess: "Guess", *, partial: bool = False) -> str | None:
    """Returns the line that makes a column a label, with a remark, "" if it needs none, None if it cannot be one.

    Where the values are `partial`, 0 or 1 may follow the other one.
    """
    texts = pa.array(guess.distinct, pa.string())
    if not len(texts):
        return None
    values, wrong = RawLabel().values(texts)
    if not wrong.any():
        return "" if partial or len(set(values.tolist())) == 2 else None
    numbers = sorted(marker_numbers(guess.distinct))
    if len(guess.distinct) == 2:
        known = _positive(guess.distinct) if len(numbers) < 2 else None
        largest = max(guess.distinct, key=float) if len(numbers) == 2 else max(guess.distinct)
        sure = known is not None or numbers == [-1.0, 1.0]
        return f"positive = [{_toml(largest if known is None else known)}]{UNSURE_RULE * (not sure)}"
    if len(numbers) < len(guess.distinct):
        return None
    above, missing = [each for each in numbers if each > 0], numbers == [-1, 0, 1]
    counts = all(each.is_integer() for each in numbers) and float(guess.most) == 0
    threshold = above[0] if above and (counts or missing) else numbers[len(numbers) // 2]
    return f"threshold = {threshold!r}{UNSURE_RULE}{' Is -1 a missing label?' * missing}"


def _leave_out_leaks(guesses: "Mapping[str, Guess]", sample: "RawSample", chosen: str, rule: str, scope: str) -> None:
    """Leaves out columns of few values, each of which has one class of the label only, and many samples of each."""
    columns = dict(zip(sample.columns, zip(*sample.rows, strict=True), strict=True))
    texts = pa.array([text or "" for text in columns.get(chosen, ())], pa.string())
    classes = RawLabel(**tomllib.loads(rule), null=guesses[chosen].null).values(texts)[0].tolist()
    if min(classes.count(0.0), classes.count(1.0)) < ENOUGH:
        return
    for name, guess in guesses.items():
        if name in columns and name != chosen and not guess.is_time and len(guess.distinct) <= FEW_VALUES:
            pairs = {(text, label) for text, label in zip(columns[name], classes, strict=True) if label in (0, 1)}
            if len(pairs) == len({text for text, _ in pairs}):
                guess.kind, guess.why = "", f"it says what the label is{scope}"


def _positive(texts: Sequence[str]) -> str | None:
    """Returns which of two texts is positive, if words say so: one that the other denies, or one that is known."""
    words = {text: text.strip().lower() for text in texts}
    for text, other in (texts, texts[::-1]):
        if re.fullmatch(NEGATION + re.escape(words[text]), words[other]):
            return text
    named = [text for text in texts if words[text] in POSITIVE]
    return named[0] if len(named) == 1 else None


def _time_lines(time: str, times: Sequence[str], guesses: "Mapping[str, Guess]") -> list[str]:
    if not time:
        return ['# time = "..."  # no column holds a time in every row']
    others = [name for name in times if name != time]
    unsure = f"unsure: {_comment(', '.join(map(repr, others)))} could be it too" if others else ""
    remark = (unsure + _lacking(guesses[time])).removeprefix("; ")
    return [f"time = {_toml(time)}{remark and '  # ' + remark}"]


def _field_lines(guesses: "Mapping[str, Guess]") -> tuple[list[str], list[str]]:
    """Returns the entries of `fields`, and comments on the columns that are left out."""
    fields, left_out, used = [], [], set(RESERVED)
    for column, guess in guesses.items():
        missing = f"; {100 * guess.missing:.3g} % missing" if guess.missing else ""
        if not guess.kind:
            left_out.append(f"# left out: {_comment(repr(column))}: {guess.why}{missing}")
            continue
        name = column + "_" * column.endswith(WEIGHT_SUFFIX)
        while name in used or name.startswith(("label_", "kept_")):
            name = f"field_{name}"
        # A numeric field may get a second one, of its buckets, or of where it has no value.
        used |= {name, f"{name}{BUCKET_SUFFIX}", f"{name}{MISSING_SUFFIX}", f"{name}{WEIGHT_SUFFIX}"}
        keys = {"name": name, **({} if name == column else {"column": column}), "kind": guess.kind, **guess.keys}
        text = ", ".join(f"{key} = {_toml(value)}" for key, value in keys.items())
        fields.append(f"    {{{text}}},  # {_comment(guess.why)}{missing}")
        if guess.also_ids:
            name = f"{name}_id"
            while name in used or name in guesses:
                name += "_"
            used.add(name)
            text = f'name = {_toml(name)}, column = {_toml(column)}, kind = "categorical", min_count = {FREQUENT}'
            fields.append(f"    {{{text}}},  # the same integers as ids; remove the field that is wrong")
    if not any(guess.also_ids or guess.kind not in ("", "numeric") for guess in guesses.values()):
        left_out.append('# unsure: training needs a field of ids: make one categorical, or add transform = "buckets"')
    return fields, left_out


def _toml(text: str) -> str:
    """Returns a TOML string; TOML takes JSON's escapes, and DEL only as one."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _comment(text: str) -> str:
    """Returns text without what a comment must not have."""
    return re.sub(r"[\x00-\x1f\x7f]", " ", text)


SAMPLE_BYTES = 8 << 20
SAMPLE_ROWS = 50_000
DELIMITERS = ",\t;|"
PROBED_LINES = 200


@dataclass(frozen=True)
class RawSample:
    """The first rows of a file.

    Attributes:
        columns: names, possibly repeated; invented if the file has no header.
        rows: values as text, empty where null; None for a list.
        delimiter, quote, header: as in a schema file; of Parquet and Arrow files the defaults.
        notes: what is unsure.
        types: what the types of columns say: "time", "id", a kind of lists, or a type that has neither numbers nor ids.
        path: the file, the first one of a folder.
        whole: True if these are all rows of the only file.
        partition: further columns that the folders of all files give, with a value of each file, see `partition_of`.
    """

    columns: tuple[str, ...]
    rows: list[tuple[str | None, ...]]
    delimiter: str = ","
    quote: str = '"'
    header: bool = True
    notes: tuple[str, ...] = ()
    types: Mapping[str, str] = field(default_factory=dict)
    path: str = ""
    whole: bool = True
    partition: Mapping[str, list[str]] = field(default_factory=dict)


def read_sample(path: str | os.PathLike[str], label: str = "") -> RawSample:
    """Reads the first rows of a file, or of the first one of a folder; a first line with the label's name is a header.

    Raises ValueError if the file cannot be read, or is text without columns.
    """
    files = find_inputs([os.fspath(path)])
    source, types = look(files[0])
    found = _text_sample(source.path, label) if types is None else _table_sample(source, types, label)
    values = [dict(partition_of(file)) for file in files]
    partition = {name: [each.get(name) or "" for each in values] for name in values[0] if name not in found.columns}
    return replace(found, path=source.path, whole=found.whole and len(files) == 1, partition=partition)


def _table_sample(source: Source, types: pa.Schema, label: str) -> RawSample:
    batches, rows = list[pa.RecordBatch](), 0
    with naming_file(source.path), closing(open_groups(source.path, source.format)) as file:
        for batch in file.iter_batches(SAMPLE_ROWS):  # an Arrow file may have batches of a few rows
            require_offsets(pa.Table.from_batches([batch]))
            batches.append(batch)
            if (rows := rows + batch.num_rows) > SAMPLE_ROWS:
                break
    table = pa.Table.from_batches(batches, batches[0].schema if batches else types).slice(0, SAMPLE_ROWS)
    columns = [_texts(column) for column in table.columns]
    said = {each.name: _said(each.type) for each in types}
    # Text beside numbers is no number. Where no field is one, whoever wrote the file may have kept no types.
    of_fields = [each.type for each in types if each.name != label and each.name.lower() not in LABEL_NAMES]
    keeps_types = any(map(_is_number, of_fields))
    by_pandas = (types.pandas_metadata or {}).get("columns", ())  # Parquet keeps categories of text alone
    categories = {each.get("field_name") for each in by_pandas if each.get("pandas_type") == "categorical"}
    for each in types:
        if each.name in categories or pa.types.is_dictionary(each.type) or (keeps_types and _is_text(each.type)):
            said[each.name] = said[each.name] or "id"
    return RawSample(tuple(table.column_names), list(zip(*columns, strict=True)), types=said, whole=rows <= SAMPLE_ROWS)


def _is_number(kind: pa.DataType) -> bool:
    return bool(pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_decimal(kind))


def _is_text(kind: pa.DataType) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind))


def _said(kind: pa.DataType) -> str:
    """What a type says of its values, see `RawSample`; "" if only these do."""
    if pa.types.is_timestamp(kind) or pa.types.is_date(kind):
        return "time"
    if pa.types.is_map(kind) and _are_ids(kind.key_type) and _is_number(kind.item_type):
        return "weighted"
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        types = {each.name: each.type for each in kind.value_type} if pa.types.is_struct(kind.value_type) else {}
        if {"id", "weight"} <= types.keys() and _are_ids(types["id"]) and _is_number(types["weight"]):
            return "weighted"
        if not types and _are_ids(kind.value_type):
            return "multi"
    return "" if _are_ids(kind) else f"values of the type {kind}, which are not read"


def _are_ids(kind: pa.DataType) -> bool:
    return as_id_text(plain_array(pa.nulls(0, kind))) is not None


def _texts(column: pa.ChunkedArray) -> list[str | None]:
    """Values as text; None where they have none, such as lists and bytes that are no UTF-8."""
    try:
        found = [_text(plain_array(chunk)).to_pylist() for chunk in column.chunks]
        return ["" if value is None else value for values in found for value in values]
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
        return [None] * len(column)


def _text(values: pa.Array) -> pa.Array:
    """Values as text: numbers without exponents, where they are whole, as in the ids that they become."""
    ids = as_id_text(values) if _is_number(values.type) else None
    return values.cast(pa.string()) if ids is None else ids[0]


@contextmanager
def _values_of_any_length() -> Iterator[None]:
    """Lifts the limit of Python's reader of CSV."""
    limit = csv.field_size_limit(SAMPLE_BYTES)
    try:
        yield
    finally:
        csv.field_size_limit(limit)


@_values_of_any_length()
def _text_sample(path: str, label: str) -> RawSample:
    with closing(RawText(path)) as text:
        data = text.read(SAMPLE_BYTES)
        complete = len(data) < SAMPLE_BYTES
    data = data.removeprefix(BYTE_ORDER_MARK)
    data = data if complete or b"\n" not in data else data[: data.rfind(b"\n") + 1]
    lines = [line.removesuffix("\r") for line in data.decode(errors="replace").split("\n") if line.strip("\r")]
    if not lines:
        raise UserError(f"input file {path} has no samples")
    if re.match(rb'\s*(\[\s*)?{\s*"', data):
        raise UserError(f"{path} is JSON, which is not read; write it as Parquet or CSV first")
    notes = _encoding_notes(data, path)
    if "\r" in lines[0]:
        raise UserError(f"{path}, line 1: a carriage return inside the line; convert its line endings to newlines")
    odd = sum(line.count('"') % 2 for line in lines)
    quote = "" if odd > len(lines) / 100 else '"'
    if odd:
        _refuse_newlines(lines, path)
        meaning = "so quotes seem to have no meaning" if not quote else "which `prepare` reports as bad lines"
        notes.append(f"{odd} lines of the sample have an odd number of quotes, {meaning}")
    delimiter, width = _delimiter(lines[:PROBED_LINES], quote, path)
    quote = "" if len(delimiter) > 1 else quote
    if quote and (escaped := sum('\\"' in line for line in lines)):
        notes.append(f"{escaped} lines of the sample have {ESCAPED}")
    rows = [row for row in _split(lines[: SAMPLE_ROWS + 1], delimiter, quote) if len(row) == width]
    if (first := len(_split(lines[:1], delimiter, quote)[0])) != width:
        raise UserError(f"{path}, line 1: {first} columns, but {width} in most lines; remove what is above the table")
    wrong = min(len(lines), SAMPLE_ROWS + 1) - len(rows)
    if wrong:
        notes.append(f"{wrong} lines of the sample do not have {width} columns; `prepare` reports them as bad lines")
    header, sure = (True, True) if label and label in rows[0] else _header(rows)
    if not sure:
        notes.append(f"the first line {'looks like a header' if header else 'looks like a sample'}, but check `header`")
    columns = rows[0] if header else tuple(f"column{number}" for number in range(1, width + 1))
    whole = complete and len(lines) <= SAMPLE_ROWS + 1
    return RawSample(columns, [*rows[header:]], delimiter, quote, header, tuple(notes), whole=whole)


def _encoding_notes(data: bytes, path: str) -> list[str]:
    """A note on lines that are not UTF-8. Raises ValueError if that is the first one, which may be a header."""
    try:
        data.decode()
    except UnicodeDecodeError as error:
        number = data.count(b"\n", 0, error.start) + 1
        problem = f"line {number}: not UTF-8 (byte 0x{data[error.start]:02x})"
        if number == 1:
            raise UserError(f"{path}, {problem}; convert the file to UTF-8 first") from error
        return [f"{problem}; `prepare` refuses such lines, convert the file to UTF-8 first"]
    return []


def _refuse_newlines(lines: Sequence[str], path: str) -> None:
    """Raises ValueError if the lines are the parts of records with newlines inside quotes, by any delimiter."""
    for delimiter in DELIMITERS:
        records = list(csv.reader(io.StringIO("\n".join(lines)), delimiter=delimiter))[:-1]  # the last may be cut
        broken = next((value for record in records for value in record if "\n" in value), "")
        if broken and len({len(record) for record in records} - {1}) == 1 < len(records[0]):
            if '\\"' in broken:
                raise UserError(f"{path}: quotes within quotes are written as {ESCAPED}")
            raise UserError(
                f"{path}: a quoted value contains a newline ({broken[:LONG_TEXT]!r}), which is not supported; replace"
                " such newlines in the file, or write it as Parquet"
            )


def _split(lines: Sequence[str], delimiter: str, quote: str) -> list[tuple[str, ...]]:
    def split(line: str) -> Sequence[str]:
        quoted = quote and quote in line
        return next(csv.reader([line], delimiter=delimiter, quotechar=quote), []) if quoted else line.split(delimiter)

    return [tuple(split(line)) for line in lines]


def _delimiter(lines: Sequence[str], quote: str, path: str) -> tuple[str, int]:
    """Returns the delimiter that divides most lines alike, into most columns, and their number."""
    spaced = [] if quote and any(quote in line for line in lines) else [", ", "; "]  # quotes need a single character
    widths = {each: Counter(map(len, _split(lines, each, quote))).most_common(1)[0] for each in [*spaced, *DELIMITERS]}
    delimiter, (width, _) = max(widths.items(), key=lambda each: (each[1][0] > 1, each[1][1], each[1][0]))
    if width == 1:
        raise UserError(
            f"{path}: no delimiter found among {DELIMITERS!r}; write the schema file by hand; if it has no"
            " samples, name the files that do"
        )
    return delimiter, width


def _header(rows: Sequence[Sequence[str]]) -> tuple[bool, bool]:
    """Returns whether the first row is a header, and whether that is sure."""
    # Names may be empty: pandas writes none for the index, and a delimiter at the end of lines gives an empty column.
    first, others = [name for name in rows[0] if name], rows[1 : PROBED_LINES + 1]
    named = [not NUMBER_PATTERN.fullmatch(text) and text.lower() not in LOOKS_MISSING for text in first]
    if not any(named) or (not others and not all(named)):
        return False, True
    if not others:
        return len(set(first)) == len(first), False
    columns = [column for name, column in zip(rows[0], zip(*others, strict=True), strict=True) if name]
    numbers = [any(column) and all(NUMBER_PATTERN.fullmatch(text) or not text for text in column) for column in columns]
    above = {name for name, number, is_name in zip(first, numbers, named, strict=True) if number and is_name}
    known = any(ID_NAME.search(name) or TIME_NAME.search(name) or name.lower() in LABEL_NAMES for name in above)
    # One unknown word above numbers may be a value, and so may few among many words, such as hexadecimal ids.
    if known or (len(above) > 1 and 2 * len(above) >= sum(named)):
        return True, all(named)
    if 2 * sum(named) < len(first):
        return False, True
    if above:
        # A name may be a number, such as a year, but none of its own column's values.
        numeric = [each for each in zip(first, columns, named, strict=True) if not each[2]]
        return not any(name in column for name, column, _ in numeric), all(named)
    if not all(named) or len(set(first)) < len(first):
        return False, True
    return not any(name in column for name, column in zip(first, columns, strict=True)), False


ORDERED = '; a history, the oldest first: kind = "sequence", max_length = 50'
"""What to do where the order of lists counts, which their values do not show."""
ESCAPED = '\\", which CSV does not know; write the file with such quotes twice, "" (Spark: escape = "\\"")'
SEPARATORS = "|;,^ "
SPACED = (", ", "; ")
ENOUGH = 100
"""Samples of each class from which on a column that tells them apart is no chance."""
FEW_VALUES = 20
"""An integer column with at most so many distinct numbers is probably one of codes."""
MOST_MISSING = 0.05
"""Share of missing values up to which a column of times may be those of the samples."""
FREQUENT = 10
"""Samples of an integer from which on it may have an effect that its size does not tell."""
LONG_TEXT = 60
"""Mean length of values from which on a column is probably free text."""
ID_NAME = re.compile(
    r"(^|_|\b)(?i:(id|uid|gid|code|zip|zipcode|type|category|cat|gender|key|hash|ip|hour|day|month)s?"
    r"|(user|item|product|movie|ad|campaign|advertiser|device|customer|shop|store|brand|city|country|region|site|app"
    r"|visitor|session|member|client|account|song|artist|book|author|video|publisher|adgroup|segment|seg)(ids?)?)$"
    r"|(?<=[a-z0-9])(Id|ID)s?$"
)
AMOUNT_NAME = re.compile(
    r"(^|_)(num|nb|n|no_of|per|count|total|sum|avg|mean|amount|spend|price|cost|since)_|(hour|day|month)s?$", re.I
)
"""Of a number of what follows, of an amount for each, or of a span of time: names of ids that may be amounts."""
WHOLE = re.compile(r"[+-]?[0-9]+(\.0*)?")
NOTATION = re.compile(r"[+-]?[$€£¥]? ?[+-]?([0-9]{1,3}([., '][0-9]{3})+|[0-9]+)([.,][0-9]+)? ?[%$€£¥]?")
"""Numbers as people write them: with signs of currencies, separators of thousands, a decimal comma."""
TIME_NAME = re.compile(r"(time|date|stamp|^ts$|_at$|^at$)", re.I)

DATE_TEXT = re.compile(r"([A-Za-z]{3},? )?[0-9]{1,4}([/.-][0-9]{1,2}[/.-]| ?[A-Z][a-z]{2,8} ?)[0-9]{2,4}")
"""How dates as people write them begin."""


@dataclass
class Guess:
    """A guess about a column.

    Attributes:
        kind: of a field; "time" for text that is always a time; "" for a column that is better left out.
        keys: further keys of the field.
        null: texts in it that seem to mean a missing value.
        also_ids: True for a numeric field whose integers may be ids, which get a second field.
        why: what speaks for the guess, or what is unsure.
        distinct: its distinct values, the missing ones aside.
        most: the most frequent one.
        missing: share of missing values.
        is_time: True if all values, or those that are not missing in a column of times, are valid times.
    """

    kind: RawKind | str = ""
    keys: dict[str, str] = field(default_factory=dict)
    null: tuple[str, ...] = ()
    also_ids: bool = False
    why: str = ""
    distinct: tuple[str, ...] = ()
    most: str = ""
    missing: float = 0.0
    is_time: bool = False


def guess_column(name: str, values: Sequence[str | None], said: str = "", scope: str = "") -> Guess:
    """Guesses what the values of a column are; `said`: what its type says, see `RawSample`; `scope`: where they are."""
    if said in ("multi", "weighted"):
        keys = {"separator": "|"} | ({"weight_separator": ":"} if said == "weighted" else {})
        return Guess(said, keys, why="lists; separators apply to text only" + ORDERED * (said == "multi"))
    if said not in ("", "time", "id") or (values and values[0] is None):
        return Guess(why=said or "bytes that are not UTF-8")
    texts = [value or "" for value in values]
    markers = tuple(sorted({text for text in texts if text and text.lower() in LOOKS_MISSING}))
    known = [text for text in texts if text and text not in markers]
    counts = Counter(known)
    distinct, most = tuple(counts), max(counts, key=counts.__getitem__, default="")
    guess = Guess(null=markers, distinct=distinct, most=most, missing=1 - len(known) / max(len(texts), 1))
    if re.fullmatch(r"__index_level_[0-9]+__", name):
        guess.why = "the index of a pandas data frame"
        return guess
    if said == "time":
        guess.is_time = bool(distinct) and guess.missing <= MOST_MISSING
        guess.why = "a time" if guess.is_time else "a time that many rows do not have"
        return guess
    if len(distinct) < 2:
        guess.why = ("one value only" if distinct else "no value at all") + scope
        return guess
    is_number = all(NUMBER_PATTERN.fullmatch(text) and math.isfinite(float(text)) for text in distinct)
    if is_number and not (said == "id" and all(WHOLE.fullmatch(text) for text in distinct)):
        _guess_number(guess, name, known, whole=not scope)
    else:
        _guess_text(guess, known)
    whole = [text for text in distinct if WHOLE.fullmatch(text)]
    if (guess.also_ids or guess.kind == "categorical") and whole and all(text.endswith(".0") for text in whole):
        guess.why += (
            f"; unsure: {whole[0]} is another id than {whole[0][:-2]}; write integers (pandas: astype('Int64'))"
        )
    # A number is a valid time too: of Unix seconds.
    numbers = [float(text) for text in distinct if NUMBER_PATTERN.fullmatch(text)]
    dated, named = all(DATE_DIGITS.fullmatch(text) for text in distinct), TIME_NAME.search(name)
    if named and (dated or (all(DATE_TEXT.match(text) for text in distinct) and not _are_times(distinct))):
        guess.why += f"; unsure: seem to be times, but {distinct[0]} is not read as one; write it as 2014-10-21T07:00"
    if named and numbers and len(numbers) == len(distinct) and min(numbers) > 10**11 and max(numbers) < 4.1e12:
        guess.why += "; unsure: seem to be Unix milliseconds; write seconds, if these are the times of the samples"
    # Unix seconds of the years from 1973 to 2099.
    lately = len(numbers) == len(distinct) and min(numbers) > 10**8 and max(numbers) < 4.1e9 and not dated
    if guess.missing <= MOST_MISSING and (not numbers or (named and lately)):
        guess.is_time = _are_times(distinct)
    return guess


def _are_times(texts: Sequence[str]) -> bool:
    return not as_times(pa.array(list(texts), pa.string()), "timestamp")[1].any()


def _guess_number(guess: Guess, name: str, known: Sequence[str], *, whole: bool) -> None:
    distinct, rows = guess.distinct, len(known)
    integers = all(WHOLE.fullmatch(text) for text in distinct)
    is_id = ID_NAME.search(name) and not AMOUNT_NAME.search(name)
    too_large = integers and max(abs(float(text)) for text in distinct) >= EXACT_INTEGERS[64]
    if any(re.fullmatch(r"0[0-9]+", text) for text in distinct):
        guess.kind, guess.why = "categorical", "digits with leading zeros"
    elif integers and len(distinct) == rows > FEW_VALUES and (is_id or too_large or _consecutive(known)):
        guess.kind, guess.why = "", "another number in each row, so it identifies the row"
    elif integers and is_id:
        guess.kind, guess.why = "categorical", f"{len(distinct)} different integers, and the name of an id"
    elif too_large:
        guess.kind, guess.why = "categorical", "integers that are too large for numbers"
    elif name.lower() in WEIGHT_NAMES:
        guess.kind = "numeric"
        guess.why = f'unsure: weights of the samples? then remove it here, and add weight = "{name}" above'
    elif integers and len(distinct) <= FEW_VALUES:
        guess.kind, guess.why = "categorical", f"unsure: {len(distinct)} different integers, codes or small numbers"
    elif not integers:
        guess.kind, guess.why = "numeric", "numbers with decimals"
    else:
        # In the first rows of a file, ids may be rare that are frequent in all of it. "5.0" is another id than "5".
        repeated = len(distinct) <= (0.5 if whole else 0.9) * rows
        alike = len({"." in text for text in distinct}) == 1
        guess.also_ids = repeated and alike and not TIME_NAME.search(name)
        guess.kind = "numeric"
        guess.why = "integers, which may be ids" if guess.also_ids else "unsure: integers, amounts or ids"


def _consecutive(known: Sequence[str]) -> bool:
    numbers = [int(text.partition(".")[0]) for text in known]
    return max(numbers) - min(numbers) < 2 * len(numbers)


def _guess_text(guess: Guess, known: Sequence[str]) -> None:
    distinct = guess.distinct
    noted = [text for text in distinct if NOTATION.fullmatch(text)]
    odd = [text for text in noted if not NUMBER_PATTERN.fullmatch(text)]
    if len(noted) > 0.95 * len(distinct) and len(odd) > 0.05 * len(distinct):
        guess.why = f"unsure: seem to be numbers, but {odd[0]!r} is not read as one; write them as 1234.5 in the file"
        return
    spaced = [each for each in SPACED if all(text.count(each) == text.count(each[0]) for text in distinct)]
    found = [each for each in (_as_list(separator, known, distinct) for separator in spaced) if each]
    found = found or [each for each in (_as_list(separator, known, distinct) for separator in SEPARATORS) if each]
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
    if guess.kind and all(text.startswith("[") and text.endswith("]") for text in distinct):
        guess.why += "; unsure: brackets become part of the ids; write them without, or the column as lists of Parquet"
    if guess.null:
        guess.why += f"; unsure: {', '.join(map(repr, guess.null))} may be a missing value"


def _as_list(
    separator: str, known: Sequence[str], distinct: Sequence[str]
) -> tuple[float, RawKind, dict[str, str], str] | None:
    """Returns how much shorter a list of the distinct parts is, and the field, if values look joined by a separator."""
    several = sum(separator in text for text in known)
    parts = Counter(part for text in known for part in text.split(separator))
    if several < 0.2 * len(known) or not all(parts):
        return None
    for weight_separator in ":=":
        halves = [part.rpartition(weight_separator) for part in parts]
        ids = {left for left, _, _ in halves}
        weighted = all(left and NUMBER_PATTERN.fullmatch(weight) for left, _, weight in halves)
        if weighted and len(ids) <= 0.5 * len(distinct):
            keys = {"separator": separator, "weight_separator": weight_separator}
            return len(distinct) / len(ids), "weighted", keys, f"{len(ids)} different ids with numbers"
    if len(parts) > 0.5 * len(distinct):
        return None
    gain = len(distinct) / len(parts)
    odd = next((part for part in parts if part != part.strip()), "")
    blanks = f"; unsure: blanks become part of the ids, as in {odd!r}" if odd else ""
    why = f"unsure: {len(parts)} different parts in {len(distinct)} values{blanks}{ORDERED}"
    return gain, "multi", {"separator": separator}, why
