"""Parsing: the columns of a block of samples, checked, and without the bad rows.

R valid samples of a block.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from cowrec.data_pipeline.raw_files.segments import Block, Source

from .arrow_values import family, mask
from .bad_rows import SKIP_ADVICE, BadRow
from .columns import MISSING_LABEL, SampleColumns
from .labels import LABEL_ADVICE
from .layouts import Layout
from .split_text import RawTable, split_text


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
        doubts: what is suspicious about ids, see `IdText`, by column and doubt.
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
    columns = SampleColumns(raw.table, null_items="missing")
    labels = {label.name: np.full(len(raw.places), np.nan, np.float32) for label in layout.labels}
    for label in layout.found_labels:
        labels[label.name] = columns.labels(label, required=len(layout.labels) == 1)
    sample_weights = columns.weights(layout.weight) if layout.has_weights else None
    time = columns.times(layout.time, layout.time_format) if layout.time else None
    numeric = [each for each in layout.fields if each.kind == "numeric"]
    numbers = {each.name: columns.numbers(each.column, each.null) for each in numeric}
    ids: dict[str, pa.Array] = {}
    weights: dict[str, np.ndarray] = {}
    for each in layout.fields:
        if each.kind == "categorical":
            ids[each.name] = columns.texts(each.column, each.null)
        elif each.kind != "numeric":
            ids[each.name], pair_weights = columns.lists(each)
            if pair_weights is not None:
                weights[each.name] = pair_weights
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
        parse(Block(source, types.empty_table(), 1, 0, 0), layout)
    except ValueError as error:
        raise ValueError(f"{source.path}: {error}") from error


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
            raise ValueError(
                f"{other_path}: column {each.column!r} has the type {there}, but {here} in {path}: a {other} there is "
                f"another value than a {one} here. Cast one of them"
            )


def raw_table(block: Block, layout: Layout) -> RawTable:
    """Returns the columns of a block that the layout uses, those that the file's path gives included."""
    raw = split_text(block, layout) if isinstance(block.data, bytes) else _readable(block, block.data)
    table = raw.table
    for name, value in block.source.partition:
        if name in layout.used_columns and name not in table.column_names:
            table = table.append_column(name, pa.repeat(pa.scalar(value, pa.string()), len(raw.places)))
    return RawTable(table, raw.places, raw.bad)


def _readable(block: Block, table: pa.Table) -> RawTable:
    """Returns the rows whose text is UTF-8, which Parquet does not ensure."""
    places = np.arange(block.first_place, block.first_place + block.samples)
    bad: list[BadRow] = []
    if _is_readable(table):
        return RawTable(table, places, bad)
    start, good = 0, np.ones(len(places), bool)
    while not _is_readable(rest := _copy(table, start, len(places))):
        low, high = 0, rest.num_rows  # the first `low` rows are readable, the first `high` rows are not
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if _is_readable(_copy(rest, low, middle)) else (low, middle)
        row = start + low
        column = next(name for name in rest.column_names if not _is_readable(_copy(rest.select([name]), low, high)))
        bad.append(BadRow(block.source, int(places[row]), column, "not UTF-8; write the column as text in UTF-8"))
        good[row] = False
        start = row + 1
    return RawTable(table.filter(pa.array(good)), places[good], bad)


def _copy(table: pa.Table, start: int, stop: int) -> pa.Table:
    """Returns rows of a table; of lists in a slice, the values outside it would be checked as well."""
    return table.take(pa.array(np.arange(start, stop)))


def _is_readable(table: pa.Table) -> bool:
    try:
        table.validate(full=True)
        for column in table.columns:
            if pa.types.is_binary(column.type) or pa.types.is_large_binary(column.type):
                column.cast(pa.large_string())
    except pa.ArrowInvalid:
        return False
    return True
