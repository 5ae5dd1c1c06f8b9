"""Parsing: the columns of a block of samples, checked, and without the bad rows.

R valid samples of a block."""

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from cowrec.errors import UserError

from .bad_rows import SKIP_ADVICE, BadRow
from .columns import MISSING_LABEL, SampleColumns
from .delimited import RawTable, split_text
from .inputs import Block, Source
from .json_lines import read_json
from .kinds import column_types, read_fields
from .layouts import LABEL_ADVICE, Layout
from .reading import naming_file
from .validity import unreadable_rows, without_rows
from .values import family, mask


@dataclass(frozen=True)
class Parsed:
    """The valid samples of a block.

    Attributes:
        sample_numbers: numbers over all raw files, int64 [R].
        labels: by name, float32 [R], from 0 to 1; NaN where unknown, as where the files have no label.
        time: int64 [R], Unix seconds; None if the layout has no time column.
        numbers: by numeric field, float64 [R], NaN where missing.
        ids: by field, strings [R] (categorical) or lists of strings [R] (list kinds); an empty string is missing.
        weights: by weighted field, float32 of all its values.
        bad: the invalid samples, in their order.
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
    null_items: Literal["missing", "wrong"] = "wrong" if block.source.format == "json" else "missing"
    columns = SampleColumns(raw.table, null_items, decimal=layout.decimal, for_prediction=layout.for_prediction)
    labels = {label.name: np.full(len(raw.places), np.nan, np.float32) for label in layout.labels}
    for label in layout.found_labels:
        labels[label.name] = columns.labels(label, required=len(layout.labels) == 1)
    sample_weights = columns.weights(layout.found_weight, layout.found_labels) if layout.has_weights else None
    time = columns.times(layout.time) if layout.time and layout.has_times else None
    numbers, ids, weights = read_fields(columns, layout.fields, time=time)
    kept = {name: columns.shown(name) for name in layout.found_keep}
    bad = [
        BadRow(block.source, int(raw.places[row]), column, problem, _advice(column, problem, layout))
        for row, (column, problem) in columns.problems.items()
    ]
    bad = sorted([*raw.bad, *bad], key=lambda row: row.number)
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
    """Raises ValueError if a column of a file has a type that cannot hold its values; text has no `schema`."""
    types = pa.schema([(name, pa.string()) for name in layout.used_columns]) if schema is None else schema
    if source.format == "json":
        types = pa.schema([(name, kind.arrow) for name, kind in column_types(layout).items()])
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


def raw_table(block: Block, layout: Layout) -> RawTable:
    """Returns the columns of a block that the layout uses, those that the file's path gives included."""
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
    """Returns the rows whose values are valid, which Parquet does not ensure."""
    places = np.arange(block.first_place, block.first_place + block.samples)
    with naming_file(block.source.path):
        wrong = unreadable_rows(table)
    bad = [BadRow(block.source, int(places[row]), *found) for row, found in wrong.items()]
    return RawTable(without_rows(table, wrong) if bad else table, np.delete(places, list(wrong)), bad)
