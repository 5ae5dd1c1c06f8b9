"""The parser of raw text: Arrow splits a block into columns, which are checked and converted one at a time.

R valid samples of a block.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv

from .bad_rows import BadRow
from .layouts import Layout, RawField
from .line_filter import FilteredLines, filter_lines
from .numbers import as_numbers
from .partitions import Block
from .times import TIME_RULES, as_times

LONGEST_QUOTED_VALUE = 60
PARSE_BYTES = 1 << 19
"""Bytes that Arrow splits at a time; they fit into the processor's cache, which doubles its speed."""


@dataclass(frozen=True)
class Parsed:
    """The valid samples of a block.

    Attributes:
        sample_numbers: numbers over all raw files, int64 [R].
        label: float32 [R]; all NaN if the files have no label.
        time: int64 [R], Unix seconds; None if the layout has no time column.
        numbers: by numeric field, float64 [R], NaN where missing.
        ids: by field, strings [R] (categorical) or lists of strings [R] (list kinds); an empty string is missing.
        weights: by weighted field, float32 of all its values.
        bad: the invalid lines.
    """

    sample_numbers: np.ndarray
    label: np.ndarray
    time: np.ndarray | None
    numbers: dict[str, np.ndarray]
    ids: dict[str, pa.Array]
    weights: dict[str, np.ndarray]
    bad: list[BadRow]


def parse(block: Block, layout: Layout) -> Parsed:
    """Parses a block whose columns are `layout.columns`; bad rows are left out and reported in the result.

    Raises:
        ValueError: a quoted value contains a newline, so that lines and samples do not correspond.
    """
    filtered = filter_lines(block, layout.quote)
    table, lines, bad = _split(filtered, block.path, layout)
    checks = _Checks(block.path, lines, [*filtered.bad, *bad])
    label = _label(table, layout, checks)
    time = checks.times(table, layout) if layout.time else None
    numbers = {field.name: checks.numbers(table, field) for field in layout.fields if field.kind == "numeric"}
    lists = {field.name: _Lists(table, field, checks) for field in layout.fields if field.kind in ("multi", "weighted")}
    good = ~checks.is_bad
    mask = None if good.all() else pa.array(good)

    def keep(column: Any) -> Any:
        if mask is None:
            return column
        return column.filter(mask) if isinstance(column, pa.Array) else column[good]

    ids = {field.name: keep(_column(table, field.column)) for field in layout.fields if field.kind == "categorical"}
    ids |= {name: keep(each.ids) for name, each in lists.items()}
    return Parsed(
        sample_numbers=keep(lines) - block.first_line + block.first_sample,
        label=keep(label),
        time=None if time is None else keep(time),
        numbers={name: keep(values) for name, values in numbers.items()},
        ids=ids,
        weights={name: each.kept_weights(good) for name, each in lists.items() if each.weights is not None},
        bad=checks.bad,
    )


def _split(filtered: FilteredLines, path: str, layout: Layout) -> tuple[pa.Table, np.ndarray, list[BadRow]]:
    """Returns the columns as strings, line numbers, and the lines with a wrong number of columns."""
    lines = filtered.lines
    wanted = [field.column for field in layout.fields]
    wanted += [name for name in (layout.label, layout.time) if name in layout.columns]
    # Unused columns may have any name, even a repeated one.
    names = [name if name in wanted else f"unused {number}" for number, name in enumerate(layout.columns)]
    wrong: list[tuple[int, int]] = []

    def on_invalid(row: pa.csv.InvalidRow) -> str:
        wrong.append((row.number - 1, row.actual_columns))
        return "skip"

    if not filtered.data:
        return pa.table({name: pa.array([], pa.string()) for name in wanted}), lines, []
    try:
        table = pa.csv.read_csv(
            pa.BufferReader(filtered.data),
            pa.csv.ReadOptions(
                column_names=names, use_threads=False, block_size=max(PARSE_BYTES, 2 * filtered.longest)
            ),
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
        raise ValueError(_multiline_message(table, lines, path))
    hint = f" separated by {layout.delimiter!r}"
    bad = [
        BadRow(path, int(lines[row]), "", f"{found} columns, must be {len(names)}{hint if found == 1 else ''}")
        for row, found in wrong
    ]
    return table, np.delete(lines, [row for row, _ in wrong]), bad


def _multiline_message(table: pa.Table, lines: np.ndarray, path: str) -> str:
    first = len(lines) - 1
    for column in table.columns:
        broken = np.flatnonzero(pc.match_substring(column, "\n").to_numpy(zero_copy_only=False))
        first = min([first, *broken[:1].tolist()])
    return (
        f"{path}, line {lines[first]} or soon after: a quoted value contains a newline, which is not "
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
    """Collects the bad rows of a block, each with the first problem found."""

    def __init__(self, path: str, lines: np.ndarray, bad: list[BadRow]) -> None:
        self._path, self._lines, self.bad = path, lines, bad
        self.is_bad = np.zeros(len(lines), bool)

    def fail(
        self, invalid: np.ndarray, column: str, text: pa.Array, rule: str, sample_of: np.ndarray | None = None
    ) -> None:
        """Marks the samples of invalid values; `sample_of` gives each value's sample where there are several."""
        for index in np.flatnonzero(invalid).tolist():
            sample = index if sample_of is None else int(sample_of[index])
            if not self.is_bad[sample]:
                self.is_bad[sample] = True
                value = text[index].as_py()
                value = value if len(value) <= LONGEST_QUOTED_VALUE else value[:LONGEST_QUOTED_VALUE] + "..."
                self.bad.append(BadRow(self._path, int(self._lines[sample]), column, f"{rule}, got {value!r}"))

    def numbers(self, table: pa.Table, field: RawField) -> np.ndarray:
        """Converts a column to float64, NaN where missing; marks invalid values."""
        text = _column(table, field.column)
        values, invalid = as_numbers(text)
        self.fail(invalid, field.column, text, "must be a finite number or empty")
        return values

    def times(self, table: pa.Table, layout: Layout) -> np.ndarray:
        """Converts the time column to int64; marks missing and invalid values."""
        text = _column(table, layout.time)
        values, invalid = as_times(text, layout.time_format)
        self.fail(invalid, layout.time, text, TIME_RULES[layout.time_format])
        return values


def split_pairs(text: pa.Array, separator: str) -> tuple[pa.Array, np.ndarray, np.ndarray]:
    """Splits `id:weight` pairs; an empty string is the empty id with weight 1.

    Returns:
        Ids, strings; weights, float64; and bool, True where a pair is invalid.
    """
    has_weight = pc.or_(pc.match_substring(text, separator), pc.equal(text, ""))
    pairs = pc.if_else(pc.and_(has_weight, pc.not_equal(text, "")), text, separator + "1")
    halves = pc.split_pattern(pairs, separator, max_splits=1, reverse=True).flatten()
    values, weights = (halves.take(pa.array(np.arange(part, len(halves), 2))) for part in (0, 1))
    numbers, invalid = as_numbers(weights)
    return values, numbers, ~_mask(has_weight) | invalid | _mask(pc.equal(weights, ""))


class _Lists:
    """A list field of a block: `ids`, lists of strings, and for a weighted field the `weights` of all its values."""

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
        values, weights, invalid = split_pairs(text, field.weight_separator)
        sample_of = np.repeat(np.arange(len(self._lengths)), self._lengths)
        rule = f"must be id{field.weight_separator}weight, joined by {field.separator!r}"
        checks.fail(invalid, field.column, text, rule, sample_of)
        return values, weights.astype(np.float32)

    def kept_weights(self, good: np.ndarray) -> np.ndarray:
        """Returns the weights of the samples marked in `good`, bool."""
        assert self.weights is not None
        return self.weights if good.all() else self.weights[np.repeat(good, self._lengths)]


def _mask(array: pa.Array) -> np.ndarray:
    return array.to_numpy(zero_copy_only=False)
