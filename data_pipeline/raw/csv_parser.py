"""Blocks of raw text to columns: split into fields by Arrow, checked and converted a column at a time.

R rows of a block that are good.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv

from .bad_rows import BadRow
from .layouts import Layout, RawField
from .line_filter import Screened, screened
from .numbers import as_numbers
from .partitions import Block
from .times import TIME_RULES, as_times

LONGEST_QUOTED_VALUE = 60
PARSE_BYTES = 1 << 19
"""Arrow splits this much at a time: small enough for the processor's cache, which doubles its speed."""


@dataclass(frozen=True)
class Parsed:
    """The good rows of a block.

    Attributes:
        rows: their numbers over all raw files, int64 [R].
        label: float32 [R]; NaN throughout where the files have no label.
        time: int64 [R], Unix seconds; None where the layout names no column of it.
        numbers: float64 [R] of each numeric field, NaN where missing.
        ids: strings [R] of each categorical field, lists of strings [R] of each list field; empty string where missing.
        weights: float32 of each value of each weighted field.
        bad: the other rows.
    """

    rows: np.ndarray
    label: np.ndarray
    time: np.ndarray | None
    numbers: dict[str, np.ndarray]
    ids: dict[str, pa.Array]
    weights: dict[str, np.ndarray]
    bad: list[BadRow]


def parse(block: Block, layout: Layout) -> Parsed:
    """Reads a block whose columns are `layout.columns`. Bad rows are left out and reported, with line and column.

    Raises:
        ValueError: quotes that make lines run into each other, so that rows cannot be told.
    """
    screen = screened(block, layout.quote)
    table, lines, bad = _split(screen, block.path, layout)
    checks = _Checks(block.path, lines, [*screen.bad, *bad])
    label = _label(table, layout, checks)
    time = checks.times(table, layout) if layout.time else None
    numbers = {field.name: checks.numbers(table, field) for field in layout.fields if field.kind == "numeric"}
    lists = {field.name: _Lists(table, field, checks) for field in layout.fields if field.kind in ("multi", "weighted")}
    good = ~checks.is_bad
    if good.all():
        keep: Callable[[Any], Any] = lambda column: column  # noqa: E731
    else:
        mask = pa.array(good)
        keep = lambda column: column.filter(mask) if isinstance(column, pa.Array) else column[good]  # noqa: E731
    ids = {field.name: keep(_column(table, field.column)) for field in layout.fields if field.kind == "categorical"}
    ids |= {name: keep(each.ids) for name, each in lists.items()}
    return Parsed(
        rows=keep(lines) - block.first_line + block.first_row,
        label=keep(label),
        time=None if time is None else keep(time),
        numbers={name: keep(values) for name, values in numbers.items()},
        ids=ids,
        weights={name: each.kept_weights(good) for name, each in lists.items() if each.weights is not None},
        bad=checks.bad,
    )


def _split(screen: Screened, path: str, layout: Layout) -> tuple[pa.Table, np.ndarray, list[BadRow]]:
    """Fields as strings, the line of each row, and the rows with a wrong number of columns."""
    lines = screen.lines
    wanted = [field.column for field in layout.fields]
    wanted += [name for name in (layout.label, layout.time) if name in layout.columns]
    # Columns that nobody wants may have any name, also one that occurs twice.
    names = [name if name in wanted else f"unused {number}" for number, name in enumerate(layout.columns)]
    wrong: list[tuple[int, int]] = []

    def on_invalid(row: pa.csv.InvalidRow) -> str:
        wrong.append((row.number - 1, row.actual_columns))
        return "skip"

    if not screen.data:
        return pa.table({name: pa.array([], pa.string()) for name in wanted}), lines, []
    try:
        table = pa.csv.read_csv(
            pa.BufferReader(screen.data),
            pa.csv.ReadOptions(column_names=names, use_threads=False, block_size=max(PARSE_BYTES, 2 * screen.longest)),
            pa.csv.ParseOptions(
                delimiter=layout.delimiter,
                quote_char=layout.quote or False,
                ignore_empty_lines=False,
                invalid_row_handler=on_invalid,
            ),
            pa.csv.ConvertOptions(
                column_types=dict.fromkeys(wanted, pa.string()),
                include_columns=list(dict.fromkeys(wanted)),
                check_utf8=False,
                strings_can_be_null=False,
            ),
        )
    except pa.ArrowInvalid as error:
        raise ValueError(f"{path}, lines {lines[0]} to {lines[-1]}: {error}") from error
    if table.num_rows + len(wrong) != len(lines):
        raise ValueError(_run_together(table, lines, path))
    bad = [
        BadRow(path, int(lines[row]), "", f"{found} columns, must be {len(names)}" + _delimiter_hint(found, layout))
        for row, found in wrong
    ]
    return table, np.delete(lines, [row for row, _ in wrong]), bad


def _delimiter_hint(found: int, layout: Layout) -> str:
    return f" separated by {layout.delimiter!r}" if found == 1 else ""


def _run_together(table: pa.Table, lines: np.ndarray, path: str) -> str:
    first = len(lines) - 1
    for column in table.columns:
        broken = np.flatnonzero(pc.match_substring(column, "\n").to_numpy(zero_copy_only=False))
        first = min([first, *broken[:1].tolist()])
    return (
        f"{path}, line {lines[first]} or soon after: a quoted value runs over the end of its line, which is not "
        'supported; replace such newlines in the file, or set quote = "" if quotes have no meaning'
    )


def _column(table: pa.Table, name: str) -> pa.Array:
    column = table[name]
    return column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()


def _label(table: pa.Table, layout: Layout, checks: "_Checks") -> np.ndarray:
    if layout.label not in layout.columns:
        return np.full(table.num_rows, np.nan, np.float32)
    text = _column(table, layout.label)
    positive, negative = _mask(pc.equal(text, "1")), _mask(pc.equal(text, "0"))
    checks.fail(~(positive | negative), layout.label, text, "a label must be 0 or 1")
    return positive.astype(np.float32)


class _Checks:
    """Collects the bad rows of a block, one problem each: the first that is found."""

    def __init__(self, path: str, lines: np.ndarray, bad: list[BadRow]) -> None:
        self._path, self._lines, self.bad = path, lines, bad
        self.is_bad = np.zeros(len(lines), bool)

    def fail(self, wrong: np.ndarray, column: str, text: pa.Array, rule: str, row_of: np.ndarray | None = None) -> None:
        """Marks rows where `wrong` [R]; with `row_of`, `wrong` and `text` are per value and this gives their rows."""
        for position in np.flatnonzero(wrong).tolist():
            row = position if row_of is None else int(row_of[position])
            if not self.is_bad[row]:
                self.is_bad[row] = True
                value = text[position].as_py()
                value = value if len(value) <= LONGEST_QUOTED_VALUE else value[:LONGEST_QUOTED_VALUE] + "..."
                self.bad.append(BadRow(self._path, int(self._lines[row]), column, f"{rule}, got {value!r}"))

    def numbers(self, table: pa.Table, field: RawField) -> np.ndarray:
        """float64 [R], NaN where missing; bad ones are marked."""
        text = _column(table, field.column)
        values, wrong = as_numbers(text)
        self.fail(wrong, field.column, text, "must be a finite number or empty")
        return values

    def times(self, table: pa.Table, layout: Layout) -> np.ndarray:
        """int64 [R]; bad ones, and missing ones, are marked."""
        text = _column(table, layout.time)
        values, wrong = as_times(text, layout.time_format)
        self.fail(wrong, layout.time, text, TIME_RULES[layout.time_format])
        return values


def split_pairs(text: pa.Array, separator: str) -> tuple[pa.Array, np.ndarray, np.ndarray]:
    """Each `id:weight` in two: ids, weights, float64, and which are wrong. An empty one is the empty id of weight 1."""
    has_weight = pc.or_(pc.match_substring(text, separator), pc.equal(text, ""))
    pairs = pc.if_else(pc.and_(has_weight, pc.not_equal(text, "")), text, separator + "1")
    halves = pc.split_pattern(pairs, separator, max_splits=1, reverse=True).flatten()
    values, weights = (halves.take(pa.array(np.arange(part, len(halves), 2))) for part in (0, 1))
    numbers, wrong = as_numbers(weights)
    return values, numbers, ~_mask(has_weight) | wrong | _mask(pc.equal(weights, ""))


class _Lists:
    """A list field of a block: `ids`, lists of strings [R], and for weighted ones `weights` of all their values."""

    def __init__(self, table: pa.Table, field: RawField, checks: _Checks) -> None:
        lists = pc.split_pattern(_column(table, field.column), field.separator)
        self._lengths = pc.list_value_length(lists).to_numpy(zero_copy_only=False)
        self.weights: np.ndarray | None = None
        self.ids = lists
        if field.kind == "weighted":
            values, self.weights = self._split_weights(lists.flatten(), field, checks)
            offsets = np.r_[0, np.cumsum(self._lengths)].astype(np.int32)
            self.ids = pa.ListArray.from_arrays(pa.array(offsets), values)

    def _split_weights(self, text: pa.Array, field: RawField, checks: _Checks) -> tuple[pa.Array, np.ndarray]:
        values, weights, wrong = split_pairs(text, field.weight_separator)
        row_of = np.repeat(np.arange(len(self._lengths)), self._lengths)
        rule = f"must be id{field.weight_separator}weight, joined by {field.separator!r}"
        checks.fail(wrong, field.column, text, rule, row_of)
        return values, weights.astype(np.float32)

    def kept_weights(self, good: np.ndarray) -> np.ndarray:
        assert self.weights is not None
        return self.weights if good.all() else self.weights[np.repeat(good, self._lengths)]


def _mask(array: pa.Array) -> np.ndarray:
    return array.to_numpy(zero_copy_only=False)
