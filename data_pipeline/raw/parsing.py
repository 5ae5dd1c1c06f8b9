"""Parsing: the columns of a block of samples, checked, and without the bad rows.

R valid samples of a block."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv

from cowrec.errors import UserError

from .columns import MISSING_LABEL, SampleColumns
from .inputs import Block, Source
from .kinds import read_fields
from .layouts import LABEL_ADVICE, Layout
from .reading import naming_file
from .values import family, mask, plain_array


@dataclass(frozen=True)
class Parsed:
    """The valid samples of a block.

    Attributes:
        sample_numbers: numbers over all raw files, int64 [R].
        labels: by name, float32 [R]; NaN where unknown, as where the files have no label.
        time: int64 [R], Unix seconds; None if the layout has no time column.
        numbers: by numeric field, float64 [R], NaN where missing.
        ids: by field, strings [R] (categorical) or lists of strings [R] (list kinds); an empty string is missing.
        weights: by weighted field, float32 of all its values.
        bad: the invalid samples.
        sample_weights: float32 [R]; None if samples have none.
        kept: by raw column, strings [R].
        doubts: what may be suspicious, see `SampleColumns`, by column and doubt.
    """

    sample_numbers: np.ndarray
    labels: dict[str, np.ndarray]
    time: np.ndarray | None
    numbers: dict[str, np.ndarray]
    ids: dict[str, pa.Array]
    weights: dict[str, np.ndarray]
    bad: "list[BadRow]"
    sample_weights: np.ndarray | None = None
    kept: dict[str, pa.Array] = field(default_factory=dict)
    doubts: Counter[tuple[str, str]] = field(default_factory=Counter)

    def filter(self, good: np.ndarray) -> "Parsed":
        """Returns the samples marked in `good`, bool [R]."""
        if good.all():
            return self
        lengths = {name: mask(pc.list_value_length(self.ids[name])) for name in self.weights}
        return Parsed(
            self.sample_numbers[good],
            {name: values[good] for name, values in self.labels.items()},
            None if self.time is None else self.time[good],
            {name: values[good] for name, values in self.numbers.items()},
            {name: values.filter(pa.array(good)) for name, values in self.ids.items()},
            {name: values[np.repeat(good, lengths[name])] for name, values in self.weights.items()},
            self.bad,
            None if self.sample_weights is None else self.sample_weights[good],
            {name: values.filter(pa.array(good)) for name, values in self.kept.items()},
            self.doubts,
        )


def parse(block: Block, layout: Layout) -> Parsed:
    """Parses a block; bad rows are left out and reported in the result.

    Raises:
        ValueError: a column has a type that cannot hold its values; or a quoted value contains a newline, so that lines
            and samples do not correspond.
    """
    raw = raw_table(block, layout)
    columns = SampleColumns(raw.table, null_items="missing", for_prediction=layout.for_prediction)
    labels = {label.name: np.full(len(raw.places), np.nan, np.float32) for label in layout.labels}
    for label in layout.found_labels:
        labels[label.name] = columns.labels(label, required=len(layout.labels) == 1)
    sample_weights = columns.weights(layout.weight) if layout.has_weights else None
    time = columns.times(layout.time, layout.time_format) if layout.has_times else None
    numbers, ids, weights = read_fields(columns, layout.fields, time=time)
    kept = {name: columns.shown(name) for name in layout.found_keep}
    bad = [
        BadRow(block.source, int(raw.places[row]), column, problem, _advice(column, problem, layout))
        for row, (column, problem) in columns.problems.items()
    ]
    numbered = block.first_sample + raw.places - block.first_place
    parsed = Parsed(numbered, labels, time, numbers, ids, weights, raw.bad + bad, sample_weights, kept, columns.doubts)
    return parsed.filter(columns.good)


def _advice(column: str, problem: str, layout: Layout) -> str:
    # Skipping labels of another notation, such as -1, would drop a class.
    if column not in {label.column for label in layout.labels} or problem.startswith(MISSING_LABEL):
        return SKIP_ADVICE
    return LABEL_ADVICE if layout.name == "tabular" else ""


def check_types(source: Source, schema: pa.Schema | None, layout: Layout) -> None:
    """Raises ValueError if a column of a file has a type that cannot hold its values; text has no `schema`."""
    types = pa.schema([(name, pa.string()) for name in layout.used_columns]) if schema is None else schema
    try:
        parse(Block(source, pa.Table.from_batches([], types), 1, 0, 0), layout)
    except ValueError as error:
        raise UserError(f"{source.path}: {error}") from error


def check_same_types(schemas: Mapping[str, pa.Schema], layout: Layout) -> None:
    """Raises ValueError if a field's column has types in two files, by path, whose values do not mean the same."""
    for each in layout.fields:
        first: dict[str, str] = {}
        for path, schema in schemas.items():
            if each.column in schema.names:
                found = family(schema.field(each.column).type)
                if found != "text":
                    first.setdefault(found, path)
        if each.kind == "numeric" and set(first) in ({"number", "truth value"}, {"date", "time"}):
            continue
        if len(first) > 1:
            (one, path), (other, other_path), *_ = first.items()
            here, there = (schemas[each_path].field(each.column).type for each_path in (path, other_path))
            raise UserError(
                f"{other_path}: column {each.column!r} has the type {there}, but {here} in {path}: a {other} there is "
                f"another value than a {one} here. Cast one of them"
            )


def raw_table(block: Block, layout: Layout) -> "RawTable":
    """Returns the columns of a block that the layout uses, those that the file's path gives included."""
    raw = split_text(block, layout) if isinstance(block.data, bytes) else _readable(block, block.data)
    table = raw.table
    for name, value in block.source.partition:
        if name in layout.used_columns and name not in table.column_names:
            table = table.append_column(name, pa.repeat(pa.scalar(value, pa.string()), len(raw.places)))
    return RawTable(table, raw.places, raw.bad)


def _readable(block: Block, table: pa.Table) -> "RawTable":
    """Returns the rows whose values are valid, which Parquet does not ensure."""
    places = np.arange(block.first_place, block.first_place + block.samples)
    with naming_file(block.source.path):
        table, wrong = unreadable_rows(table)
    bad = [BadRow(block.source, int(places[row]), *found) for row, found in wrong.items()]
    good = np.setdiff1d(np.arange(len(places)), list(wrong))
    return RawTable(table.take(pa.array(good)) if bad else table, places[good], bad)


def unreadable_rows(table: pa.Table) -> tuple[pa.Table, dict[int, tuple[str, str]]]:
    """Returns a table, of which rows can be taken, and by row the column and what is wrong with it.

    Text that is not UTF-8 is, and what else Arrow does not check as it reads, such as the day of a date.

    Raises:
        pyarrow.ArrowInvalid: the table is damaged, so that no row of it can be taken.
    """
    if not _problem(table):
        return table, {}
    require_offsets(table)
    table = pa.table({name: _takeable(table[name]) for name in table.column_names})

    def first(row: int) -> tuple[str, str]:
        columns = ((name, _problem(_copy(table.select([name]), row, row + 1))) for name in table.column_names)
        return next((name, problem) for name, problem in columns if problem)

    return table, {row: first(row) for row in _unreadable(table)}


def require_offsets(table: pa.Table) -> None:
    """Raises ArrowInvalid if values begin or end outside of their data, which an Arrow file without compression may
    have after an interrupted copy, and whose use would crash the process.
    """
    for index, name in enumerate(table.column_names):
        problem = _problem(table.select([index]))
        if "ffset" in problem:
            raise pa.ArrowInvalid(f"column {name}: {problem}")


def _unreadable(table: pa.Table, start: int = 0) -> list[int]:
    """Returns the rows, counted from `start`, that have a problem."""
    if not _problem(table):
        return []
    rows, half = table.num_rows, table.num_rows // 2
    if rows == 1:
        return [start]
    return [*_unreadable(_copy(table, 0, half), start), *_unreadable(_copy(table, half, rows), start + half)]


def _copy(table: pa.Table, start: int, stop: int) -> pa.Table:
    """Returns rows of a table; of lists in a slice, the values outside it would be checked as well."""
    return table.take(pa.array(np.arange(start, stop)))


def _problem(table: pa.Table) -> str:
    """Returns what is wrong with a value; empty if nothing is."""
    try:
        table.validate(full=True)
        for chunk in (chunk for column in table.columns for chunk in column.chunks):
            _require_utf8(chunk)
    except pa.ArrowInvalid as error:
        return "not UTF-8; write the column as text in UTF-8" if "UTF8" in str(error) else str(error)
    return ""


def _require_utf8(values: pa.Array) -> None:
    """Raises ArrowInvalid if bytes, at any depth, are not UTF-8."""
    if pa.types.is_dictionary(values.type):
        return _require_utf8(values.dictionary)
    values = plain_array(values)
    if pa.types.is_list(values.type) or pa.types.is_large_list(values.type):
        _require_utf8(values.flatten())
    for each in values.flatten() if pa.types.is_struct(values.type) else ():
        _require_utf8(each)


def _takeable(values: pa.ChunkedArray) -> pa.ChunkedArray:
    """Returns values of which rows can be taken, which Arrow does not do of views and runs, without those of no row."""
    if pa.types.is_run_end_encoded(values.type):
        values = pc.run_end_decode(values)
    for decode in (False, True):  # Arrow does not decode dictionaries of views
        values = values.cast(_takeable_type(values.type, decode=decode))
    return values


def _takeable_type(kind: pa.DataType, *, decode: bool) -> pa.DataType:
    """Returns a type with binary for views, at any depth, and, to `decode` them, the values for dictionaries."""
    inner = partial(_takeable_type, decode=decode)
    if pa.types.is_dictionary(kind):
        return inner(kind.value_type) if decode else pa.dictionary(kind.index_type, inner(kind.value_type))
    if pa.types.is_map(kind):
        return pa.map_(inner(kind.key_type), inner(kind.item_type))
    if pa.types.is_struct(kind):
        return pa.struct([(each.name, inner(each.type)) for each in kind])
    if pa.types.is_list(kind) or pa.types.is_fixed_size_list(kind):
        return pa.list_(inner(kind.value_type))
    if pa.types.is_large_list(kind):
        return pa.large_list(inner(kind.value_type))
    return pa.binary() if kind in (pa.string_view(), pa.binary_view()) else kind


PARSE_BYTES = 1 << 19
"""Bytes that Arrow splits at a time; they fit into the processor's cache, which doubles its speed."""

SEPARATOR = b"\x1f"
"""Takes the place of a delimiter of several bytes: ASCII's unit separator."""


@dataclass(frozen=True)
class RawTable:
    """The samples of a block as typed columns, whose values are not checked yet.

    Attributes:
        table: the columns that the layout uses, R samples.
        places: number of each sample's line or row in its file, int64 [R].
        bad: lines or rows that are no samples.
    """

    table: pa.Table
    places: np.ndarray
    bad: "list[BadRow]"


def split_text(block: Block, layout: Layout) -> RawTable:
    """Splits a block of text into strings; an empty one is a missing value.

    Raises:
        ValueError: a quoted value contains a newline, so that lines and samples do not correspond.
    """
    data, lines, longest, bad = filter_lines(block, layout.quote)
    path, columns = block.source.path, layout.columns_in(block.source)
    wanted = [name for name in layout.used_columns if name in columns]
    # Unused columns may have any name, even a repeated one.
    names = [name if name in wanted else f"unused {number}" for number, name in enumerate(columns)]
    wrong: list[tuple[int, int]] = []

    def on_invalid(row: pa.csv.InvalidRow) -> str:
        wrong.append((row.number - 1, row.actual_columns))
        return "skip"

    if not data:
        return RawTable(pa.table({name: pa.array([], pa.string()) for name in wanted}), lines, bad)
    delimiter = layout.delimiter
    if len(delimiter.encode()) > 1:  # which Arrow does not support
        if SEPARATOR in data:
            raise UserError(f"{path}, lines {lines[0]} to {lines[-1]}: the byte 0x1f is in the text; remove it")
        data, delimiter = data.replace(delimiter.encode(), SEPARATOR), SEPARATOR.decode()
    try:
        table = pa.csv.read_csv(
            pa.BufferReader(data),
            pa.csv.ReadOptions(column_names=names, use_threads=False, block_size=max(PARSE_BYTES, 2 * longest)),
            pa.csv.ParseOptions(
                delimiter=delimiter,
                quote_char=layout.quote or False,
                ignore_empty_lines=False,
                invalid_row_handler=on_invalid,
            ),
            pa.csv.ConvertOptions(
                column_types=dict.fromkeys(wanted, pa.string()),
                include_columns=wanted,
                check_utf8=False,
                strings_can_be_null=False,
            ),
        )
    except pa.ArrowInvalid as error:
        raise UserError(f"{path}, lines {lines[0]} to {lines[-1]}: {error}") from error
    if table.num_rows + len(wrong) != len(lines):
        raise UserError(_multiline_message(table, lines, path))
    hint = f" separated by {layout.delimiter!r}"
    bad += [
        BadRow(block.source, int(lines[row]), "", f"{found} columns, must be {len(names)}{hint if found == 1 else ''}")
        for row, found in wrong
    ]
    return RawTable(table, np.delete(lines, [row for row, _ in wrong]), bad)


def _multiline_message(table: pa.Table, lines: np.ndarray, path: str) -> str:
    first = len(lines) - 1
    for column in table.columns:
        broken = np.flatnonzero(pc.match_substring(column, "\n").to_numpy(zero_copy_only=False))
        first = min([first, *broken[:1].tolist()])
    return (
        f"{path}, line {lines[first]} or soon after: a quoted value contains a newline, which is not "
        'supported; replace such newlines in the file, or set quote = "" if quotes have no meaning'
    )


NEWLINE, RETURN = 10, 13


def filter_lines(block: Block, quote: str) -> "tuple[bytes, np.ndarray, int, list[BadRow]]":
    """Removes lines that are empty, not UTF-8, contain a lone carriage return or, given a `quote`, unbalanced quotes.

    A line with unbalanced quotes is nearly always half of a record with a newline inside quotes. Such records are not
    supported: files are split into blocks at newlines, which keeps line numbers exact.

    Returns:
        The text of the remaining lines, their numbers in the file, int64, an upper bound of the bytes of a line, and
        the removed lines.
    """
    assert isinstance(block.data, bytes)
    text = np.frombuffer(block.data, np.uint8)
    ends = np.flatnonzero(text == NEWLINE)
    problems: dict[int, str] = {}
    if quote:
        per_line = np.bincount(np.searchsorted(ends, np.flatnonzero(text == ord(quote))), minlength=len(ends))
        for line in np.flatnonzero(per_line % 2).tolist():
            problems[line] = (
                f"unbalanced quote {quote}; a newline inside quotes is not supported: replace it in the file, or set "
                'quote = "" in the schema file if quotes have no meaning'
            )
    returns = np.flatnonzero(text == RETURN)
    # Each line ends with a newline, so a byte follows each carriage return.
    for line in np.searchsorted(ends, returns[text[returns + 1] != NEWLINE]).tolist():
        problems[line] = "a carriage return inside the line; convert the file's line endings to newlines"
    starts = np.r_[0, ends[:-1] + 1]
    for line in np.flatnonzero((ends == starts) | ((ends == starts + 1) & (text[starts] == RETURN))).tolist():
        problems[line] = "the line is empty; remove it, or skip it as a bad row"
    for line, byte in _not_utf8(block.data, ends):
        problems[line] = f"not UTF-8 (byte 0x{byte:02x}); convert the file to UTF-8 first"
    lines = np.arange(block.first_place, block.first_place + len(ends))
    longest = int((ends - starts).max(initial=0)) + 1
    if not problems:
        return block.data, lines, longest, []
    bad = np.asarray(sorted(problems))
    kept_from, kept_to = np.r_[0, ends[bad] + 1], np.r_[starts[bad], len(text)]
    data = b"".join(block.data[start:stop] for start, stop in zip(kept_from, kept_to, strict=True))
    rows = [BadRow(block.source, int(lines[line]), "", problems[line]) for line in bad.tolist()]
    return data, np.delete(lines, bad), longest, rows


def _not_utf8(data: bytes, ends: np.ndarray) -> list[tuple[int, int]]:
    """Returns (line index, first invalid byte) of lines that are not UTF-8."""
    found: list[tuple[int, int]] = []
    if data.isascii():
        return found
    try:
        str(memoryview(data), "utf-8")
        return found
    except UnicodeDecodeError:
        pass
    starts = np.r_[0, ends[:-1] + 1]
    for line in np.unique(np.searchsorted(ends, np.flatnonzero(np.frombuffer(data, np.uint8) >= 0x80))).tolist():
        text = data[starts[line] : ends[line]]
        try:
            text.decode()
        except UnicodeDecodeError as error:
            found.append((line, text[error.start]))
    return found


SKIP_ADVICE = '. To skip and count bad rows, set prepare.on_bad_row = "skip" (--set prepare.on_bad_row=skip)'


@dataclass(frozen=True)
class BadRow:
    """One sample of a raw file that cannot be used.

    Attributes:
        number: number of its line in the file, from 1, counting the header; in Parquet and Arrow files of its row.
        column: raw column, or empty if the line as a whole is invalid.
        problem: what is wrong, with the value and what was expected.
        advice: what else to do than to correct the file; may be empty.
    """

    source: Source
    number: int
    column: str
    problem: str
    advice: str = SKIP_ADVICE

    def __str__(self) -> str:
        column = f", column {self.column}" if self.column else ""
        return f"{self.source.path}, {self.source.place} {self.number}{column}: {self.problem}"

    @property
    def reason(self) -> str:
        """What is wrong without the value, to count rows by."""
        return (f"column {self.column}: " if self.column else "") + self.problem.partition(", got ")[0]


class BadRowLedger:
    """Counts bad rows and raises an error at the first one, or at the first above a limit.

    Args:
        on_bad_row: "error" raises at the first bad row, "skip" leaves bad rows out.
        max_bad_rows: largest number of skipped rows over all files.

    Attributes:
        by_path, by_reason: skipped rows by file, and by what is wrong.
    """

    def __init__(self, on_bad_row: Literal["error", "skip"], max_bad_rows: int) -> None:
        self._skip = on_bad_row == "skip"
        self._most = max_bad_rows
        self.by_path: Counter[str] = Counter()
        self.by_reason: Counter[str] = Counter()

    def add(self, bad: Sequence[BadRow]) -> None:
        """Adds the bad rows of a block. Raises ValueError naming the first one, or the first above the limit."""
        if not bad:
            return
        ordered = sorted(bad, key=lambda row: row.number)
        if not self._skip:
            raise UserError(f"{ordered[0]}{ordered[0].advice}")
        allowed = self._most - self.by_path.total()
        self.by_path.update(row.source.path for row in ordered)
        self.by_reason.update(row.reason for row in ordered)
        if len(ordered) > allowed:
            raise UserError(
                f"more than prepare.max_bad_rows = {self._most} bad rows: {self.by_path.total():,} so far"
                f" ({counts_text(self.by_reason)}); one of them: {ordered[max(allowed, 0)]}"
            )


def counts_text(by_reason: Mapping[str, int]) -> str:
    """The numbers of bad rows by reason, the most frequent first, as text."""
    ordered = sorted(by_reason.items(), key=lambda each: -each[1])
    return "; ".join(f"{count:,}: {reason}" for reason, count in ordered[:10])
