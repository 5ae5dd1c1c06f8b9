"""Parsing: the columns of a block of samples, checked, and the bad rows, which are counted or end the work."""

import dataclasses
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from cowrec.errors import UserError

from .columns import MISSING_LABEL, SampleColumns
from .delimited import RawTable, split_text
from .inputs import Block, Source
from .json_lines import read_json
from .kinds import column_types, read_fields
from .layouts import LABEL_ADVICE, Layout
from .reading import naming_file
from .tables import unreadable_rows, without_rows
from .values import family, mask

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
    """Counts bad rows; raises an error at the first one, or under "skip" at the first above `max_bad_rows` in all.

    `by_path` and `by_reason` are the numbers of skipped rows by file, and by what is wrong.
    """

    def __init__(self, on_bad_row: Literal["error", "skip"], max_bad_rows: int) -> None:
        self._skip, self._most = on_bad_row == "skip", max_bad_rows
        self.by_path: Counter[str] = Counter()
        self.by_reason: Counter[str] = Counter()

    def add(self, bad: Sequence[BadRow]) -> None:
        """Adds the bad rows of a partition, in order. Raises ValueError naming the first, or that above the limit."""
        if not bad:
            return
        if not self._skip:
            raise UserError(f"{bad[0]}{bad[0].advice}")
        allowed = self._most - self.by_path.total()
        self.by_path.update(row.source.path for row in bad)
        self.by_reason.update(row.reason for row in bad)
        if len(bad) > allowed:
            raise UserError(
                f"more than prepare.max_bad_rows = {self._most} bad rows: {self.by_path.total():,} so far"
                f" ({counts_text(self.by_reason)}); one of them: {bad[max(allowed, 0)]}"
            )


def counts_text(by_reason: Mapping[str, int]) -> str:
    """Returns the numbers of bad rows by reason as text, the most frequent first."""
    ordered = sorted(by_reason.items(), key=lambda item: -item[1])
    return "; ".join(f"{count:,}: {reason}" for reason, count in ordered[:10])


@dataclass(frozen=True)
class Parsed:
    """The R valid samples of a block.

    Attributes:
        sample_numbers: numbers over all raw files, int64 [R].
        labels: by name, float32 [R], from 0 to 1; NaN where unknown, as where the files have no label.
        time: int64 [R], Unix seconds; None if the layout has no time column.
        numbers: by numeric field, float64 [R], NaN where missing.
        ids: by field, strings [R] (categorical) or lists of strings [R] (list kinds); an empty string is missing.
        weights: by weighted field, float32 of all its values.
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
    bad: list[BadRow]
    sample_weights: np.ndarray | None = None
    kept: dict[str, pa.Array] = dataclasses.field(default_factory=dict)
    doubts: Counter[tuple[str, str]] = dataclasses.field(default_factory=Counter)

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
    """Parses a block; bad rows are left out and listed in the result.

    Raises ValueError if a column has a type that cannot hold its values, or a quoted value contains a newline.
    """
    raw = raw_table(block, layout)
    null_items: Literal["missing", "wrong"] = "wrong" if block.source.format == "json" else "missing"
    columns = SampleColumns(raw.table, null_items, decimal=layout.decimal, for_prediction=layout.for_prediction)
    labels = {label.name: np.full(len(raw.places), np.nan, np.float32) for label in layout.labels}
    for label in layout.found_labels:
        labels[label.name] = columns.labels(label, required=len(layout.labels) == 1)
    sample_weights = columns.weights(layout.weight, layout.found_labels) if layout.has_weights else None
    time = columns.times(layout.time) if layout.time else None
    numbers, ids, weights = read_fields(columns, layout.fields, time=time)
    kept = {name: columns.shown(name) for name in layout.keep}
    bad = [BadRow(block.source, number, *problem) for number, problem in raw.bad.items()]
    bad += [
        BadRow(block.source, int(raw.places[row]), column, problem, _advice(column, problem, layout))
        for row, (column, problem) in columns.problems.items()
    ]
    bad.sort(key=lambda row: row.number)
    numbered = block.first_sample + raw.places - block.first_place
    parsed = Parsed(numbered, labels, time, numbers, ids, weights, bad, sample_weights, kept, columns.doubts)
    return parsed.filter(columns.good)


def _advice(column: str, problem: str, layout: Layout) -> str:
    # Skipping labels of another notation, such as -1, would drop a class.
    of_classes = {label.column for label in layout.labels if not label.is_rate}
    if column not in of_classes or problem.startswith(MISSING_LABEL):
        return SKIP_ADVICE
    return LABEL_ADVICE.format(json.dumps(column)) if layout.name == "tabular" else ""


def check_types(source: Source, schema: pa.Schema | None, layout: Layout) -> None:
    """Raises ValueError if a column has a type that cannot hold its values; the `schema` of text is None."""
    types = pa.schema([(name, pa.string()) for name in layout.used_columns]) if schema is None else schema
    if source.format == "json":
        types = pa.schema([(name, kind.arrow) for name, kind in column_types(layout, types.names).items()])
    try:
        parse(Block(source, pa.Table.from_batches([], types), 1, 0, 0), layout)
    except ValueError as error:
        raise UserError(f"{source.path}: {error}") from error


def check_same_types(schemas: Mapping[str, pa.Schema], layout: Layout) -> None:
    """Raises ValueError if the values of a field differ in `family` between files; `schemas` are by path."""
    for field in layout.fields:
        first: dict[str, str] = {}
        for path, schema in schemas.items():
            if field.column in schema.names:
                found = family(schema.field(field.column).type)
                if found != "text":
                    first.setdefault(found, path)
        if field.kind == "numeric" and set(first) in ({"number", "truth value"}, {"date", "time"}):
            continue
        if len(first) > 1:
            (one, path), (other, other_path), *_ = first.items()
            here, there = (schemas[file].field(field.column).type for file in (path, other_path))
            raise UserError(
                f"{other_path}: column {field.column!r} has the type {there}, but {here} in {path}: a {other} there is "
                f"another value than a {one} here. Cast one of them"
            )


def raw_table(block: Block, layout: Layout) -> RawTable:
    """Returns the columns of a block that the layout uses, and those that the path of the file gives."""
    if not isinstance(block.data, bytes):
        raw = _readable(block, block.data)
    else:
        raw = read_json(block, layout) if block.source.format == "json" else split_text(block, layout)
    table = raw.table
    for name, value in block.source.partition:
        if name in layout.used_columns and name not in table.column_names:
            table = table.append_column(name, pa.repeat(pa.scalar(value, pa.string()), len(raw.places)))
    return RawTable(table, raw.places, raw.bad)


def _readable(block: Block, table: pa.Table) -> RawTable:
    """Returns the rows whose values are valid; Parquet does not ensure valid values."""
    places = np.arange(block.first_place, block.first_place + block.samples)
    with naming_file(block.source.path):
        wrong = unreadable_rows(table)
    bad = {int(places[row]): found for row, found in wrong.items()}
    return RawTable(without_rows(table, wrong) if bad else table, np.delete(places, list(wrong)), bad)
