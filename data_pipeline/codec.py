"""Codec of raw samples: encodes JSON or Arrow samples with the maps and vocabularies of a prepared data set.

A sample has the columns of the data set's layout, as `raw.kinds.KINDS` describes their values; null is missing. Label,
weight and time (Unix seconds or ISO 8601 text, by default in the column "time") are for training only, except that ages
need the time. The optional column `sample_id`, a string or an integer, identifies repeated samples. Other columns are
ignored. Samples of synthetic data sets have a column for each field, and row numbers as ids. R samples.
"""

import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import torch

from cowrec.errors import UserError

from .dataset.sample_block import SampleBlock
from .dataset.schema import LABEL, SAMPLE_WEIGHT, TIME, Schema
from .dataset.shards import arrow_schema, block_from_table
from .encoding.encoder import Encoder
from .raw.columns import SampleColumns
from .raw.json_lines import (
    canonical_table,
    given_columns,
    long_texts,
    parsed_lines,
    require_columns,
    to_array,
    uniform_table,
    value_of,
)
from .raw.kinds import RawType, column_types, read_fields
from .raw.layouts import Layout, RawField, RawLabel
from .raw.parsing import Parsed
from .raw.tables import flattened, unreadable_rows, without_rows
from .raw.times import RawTime

if TYPE_CHECKING:
    from .dataset.batch import Batch

SAMPLE_ID = "sample_id"
TIME_COLUMN, ID_COLUMN = "#time", "#sample_id"
"""Columns of encoded samples in addition to those of the data set; the names do not clash."""


@dataclass(frozen=True)
class BadSample:
    """A malformed sample: its index among the given samples and the reason."""

    index: int
    reason: str


@dataclass(frozen=True)
class RawSamples:
    """Raw columns of the good samples, the `index` of each row among the given samples, int64 [R], and the bad ones."""

    table: pa.Table
    index: np.ndarray
    bad: tuple[BadSample, ...] = ()


@dataclass(frozen=True)
class Encoded:
    """Encoded samples, in their order.

    Attributes:
        table: the columns of a data set's files, `TIME_COLUMN` and `ID_COLUMN`.
        timed: whether the times of samples are known.
        index: index of each table row among the given samples, int64 [R].
        bad: malformed samples, in order.
    """

    schema: Schema
    table: pa.Table
    timed: bool
    index: np.ndarray
    bad: tuple[BadSample, ...]

    @property
    def time(self) -> np.ndarray:
        """int64 [R], Unix seconds; zeros if times are unknown."""
        found: np.ndarray = self.table[TIME_COLUMN].to_numpy()
        return found

    @property
    def sample_ids(self) -> pa.ChunkedArray:
        """Strings [R], empty for a sample without an id."""
        return self.table[ID_COLUMN]

    @property
    def block(self) -> SampleBlock:
        return sample_block(self.table, self.schema, timed=self.timed)

    @property
    def batch(self) -> "Batch":
        return self.block.batch(self.schema, self.table.num_rows)

    def without(self, wrong: np.ndarray, reason: str) -> "Encoded":
        """Returns the samples but those marked `wrong`, bool [R], which become bad for the reason."""
        if not wrong.any():
            return self
        bad = [*self.bad, *(BadSample(index, reason) for index in self.index[wrong].tolist())]
        kept = tuple(sorted(bad, key=lambda sample: sample.index))
        return Encoded(self.schema, self.table.filter(pa.array(~wrong)), self.timed, self.index[~wrong], kept)


def sample_block(table: pa.Table, schema: Schema, *, timed: bool = True) -> SampleBlock:
    """Converts the columns of `Encoded.table` to tensors."""
    weighted = SAMPLE_WEIGHT in table.column_names
    block = block_from_table(table, _features(schema, weighted=weighted), "samples")
    return replace(block, time=torch.from_numpy(table[TIME_COLUMN].to_numpy().copy())) if timed else block


def _features(schema: Schema, *, weighted: bool) -> Schema:
    """Returns the schema without the columns that samples of a stream or request lack, or have by other names."""
    return replace(schema.of_batches(), timed=False, sample_weights=weighted, labels=(LABEL,))


class SampleCodec:
    """Encodes raw samples exactly as `prepare` encoded the data set, with the same maps and vocabularies.

    Attributes:
        columns: names of the required raw columns; a missing value is null.
        source_columns: raw column of each source of the encoded fields.
        together: groups of raw columns that must be in one part of a request, such as ages and the time.
    """

    def __init__(self, schema: Schema, layout: Layout, encoder: Encoder) -> None:
        self.schema, self._layout, self._encoder = schema, layout, encoder
        self._time = layout.time or RawTime((TIME,))
        self.source_columns = {field.name: field.column for field in layout.fields}
        along = [field for field in layout.fields if field.along]
        self.together = [{field.column, self.source_columns[field.along]} for field in along]
        self.together += [{field.column, *self._time.columns} for field in layout.ages]
        self._fields = dict[tuple[str, RawType], list[str]]()
        of_columns = dict[str, set[RawType]]()
        for field in layout.fields:
            kind = RawType.of(field, layout.decimal)
            self._fields.setdefault((field.column, kind), []).append(field.name)
            of_columns.setdefault(field.column, set()).add(kind)
        for_training = [*layout.label_columns, *self._time.columns, *[layout.weight] * bool(layout.weight)]
        self.columns = tuple(layout.needed_columns)
        self._features = column_types(layout, self.columns, self._time)
        self._types = {SAMPLE_ID: RawType("id")} | column_types(layout, [*self.columns, *for_training], self._time)
        # A number and an id of one value are the same in a request as in a column; a list and another kind are not.
        mixed_lists = any({kind.kind for kind in own} - {"number", "id"} for own in of_columns.values() if len(own) > 1)
        row_numbers = any(field.encoding == "synthetic" for field in schema.sparse)
        self._in_columns = mixed_lists or bool(layout.ages) or row_numbers or any(field.part for field in layout.fields)

    @staticmethod
    def load(folder: str | os.PathLike[str]) -> "SampleCodec":
        """Loads the codec from the folder of a data set, a run or an export, with schema.json and vocabulary/.

        Raises ValueError if the folder has no schema, or a vocabulary is missing or damaged.
        """
        schema = Schema.load(folder)
        if schema.name == "synthetic":
            dense = tuple(replace(field, source=field.name) for field in schema.dense)
            sparse = tuple(replace(field, source=field.name) for field in schema.sparse)
            fields = [RawField(field.name, "numeric") for field in dense]
            fields += [RawField(field.name, "categorical") for field in sparse]
            layout = Layout("synthetic", ",", "", True, (), (RawLabel(),), tuple(fields))
            return SampleCodec(schema, layout, Encoder(dense, sparse, {}))
        if "layout" not in schema.settings:
            raise UserError(f"{folder}: schema.json does not list the raw columns; prepare the data set again")
        return SampleCodec(schema, Layout.from_json(schema.settings["layout"]), Encoder.load(Path(folder), schema))

    def require_trainable(self) -> None:
        """Raises ValueError if a model of the data set cannot be trained on a stream."""
        schema = self.schema
        if len(schema.labels) > 1:
            raise UserError(f"training on a stream takes one label; the data set has {', '.join(schema.labels)}")
        if schema.negative_fraction < 1:
            given = "prepare.negative_fraction = 1"
            raise UserError(f"training on a stream takes all samples; prepare the data with {given}")

    def from_json(self, lines: Sequence[bytes], *, training: bool = True) -> RawSamples:
        """Parses lines of a JSON object each; a malformed line does not affect others. `training`: see `encode`."""
        table = uniform_table(lines, self._types_for(training)) if lines else None
        if table is not None:
            return RawSamples(table, np.arange(len(lines)))
        return self.from_objects(parsed_lines(lines), training=training)

    def from_objects(self, samples: Iterable[Any], *, training: bool = True) -> RawSamples:
        """Converts dictionaries of JSON values; `training`: see `encode`."""
        table, index, wrong = canonical_table(samples, self._types_for(training))
        return RawSamples(table, index, tuple(BadSample(row, reason) for row, reason in wrong.items()))

    def from_table(self, table: pa.Table) -> RawSamples:
        """Selects the known columns of an Arrow table. Raises ValueError if several have the name of a known one."""
        table = flattened(table)
        for name in self._types:
            if table.column_names.count(name) > 1:
                raise UserError(f"several columns have the name {name!r}; keep one of them, or rename the others")
        table = table.select([name for name in self._types if name in table.column_names])
        unreadable = {row: f"column {name}: {problem}" for row, (name, problem) in unreadable_rows(table).items()}
        found = long_texts(table) | unreadable
        kept = np.delete(np.arange(table.num_rows), list(found))
        bad = tuple(BadSample(row, reason) for row, reason in found.items())
        return RawSamples(without_rows(table, found) if found else table, kept, bad)

    def with_absent_columns(self, samples: RawSamples) -> tuple[RawSamples, list[str]]:
        """Adds the columns of features that no sample has, with nulls, and returns their names.

        Samples without a value in any column of features become bad.
        """
        table = samples.table
        absent = [name for name in self.columns if name not in table.column_names]
        for name in absent:
            table = table.append_column(name, to_array([None] * table.num_rows, self._types[name]))
        given = np.zeros(table.num_rows, bool)
        for name in self.columns:
            given |= table[name].is_valid().to_numpy()
        reason = "it has a value in no column of the features"
        bad = [*samples.bad, *(BadSample(row, reason) for row in samples.index[~given].tolist())]
        return RawSamples(table.filter(pa.array(given)), samples.index[given], tuple(bad)), absent

    def encode(self, samples: RawSamples, *, training: bool = True) -> Encoded:
        """Encodes all good samples.

        `training` requires labels, times, and weights if the data set has weights. Otherwise labels are NaN, and times
        are read for ages only. Raises ValueError if no sample has a required column, or a column has a wrong type.
        """
        require_columns(self.columns, samples.table.column_names)
        columns = SampleColumns(samples.table, null_items="wrong", decimal=self._layout.decimal)
        count = samples.table.num_rows
        label, time = np.full(count, np.nan, np.float32), np.zeros(count, np.int64)
        since: np.ndarray | None = None
        raw_label, weight = self._layout.labels[0], None
        if training:
            self.require_trainable()
            of_weight = [self._layout.weight] * bool(self._layout.weight)
            require_columns([*raw_label.columns, *of_weight, *self._time.columns], samples.table.column_names)
            label = columns.labels(raw_label, required=True)
            time = since = columns.times(self._time)
            if self.schema.sample_weights:
                weight = columns.weights(self._layout.weight, [raw_label])
        elif self._layout.ages:
            since = columns.known_times(self._time)
        has_ids = SAMPLE_ID in samples.table.column_names
        sample_ids = columns.texts(SAMPLE_ID) if has_ids else pa.nulls(count, pa.string()).fill_null("")
        rows = {field.name: field.num_embeddings for field in self.schema.sparse if field.encoding == "synthetic"}
        numbers, ids, weights = read_fields(columns, self._layout.fields, rows, since)
        parsed = Parsed(samples.index, {LABEL: label}, None, numbers, ids, weights, [], weight)
        wanted = arrow_schema(_features(self.schema, weighted=weight is not None))
        table = self._encoder.encode(parsed).select(wanted.names).cast(wanted)
        table = table.append_column(TIME_COLUMN, pa.array(time)).append_column(ID_COLUMN, sample_ids)
        good = columns.good
        table = table.filter(pa.array(good)) if columns.problems else table
        problems = columns.problems.items()
        bad = [BadSample(int(samples.index[row]), f"column {name}: {problem}") for row, (name, problem) in problems]
        bad = sorted([*samples.bad, *bad], key=lambda sample: sample.index)
        return Encoded(self.schema, table, training, samples.index[good], tuple(bad))

    def encode_request(self, samples: Sequence[Mapping[str, Any]]) -> tuple[SampleBlock, tuple[BadSample, ...]]:
        """Encodes samples for prediction, and returns the good ones and the bad ones.

        Equals `encode(from_objects(samples, training=False), training=False)`, and is faster if all samples are good.
        """
        if not self._in_columns:
            # What is wrong is found in columns.
            with suppress(AttributeError, TypeError, ValueError, OverflowError):
                return self._encoder.encode_few(self._canonical(samples), len(samples)), ()
        encoded = self.encode(self.from_objects(samples, training=False), training=False)
        block = encoded.block
        return replace(block, dense=block.dense.contiguous()), encoded.bad  # as networks compiled elsewhere expect

    def _canonical(self, samples: Sequence[Mapping[str, Any]]) -> dict[str, Sequence[Any]]:
        """Returns the canonical values of samples by raw field. Raises ValueError if a value is of another kind."""
        found: dict[str, Sequence[Any]] = {}
        for (column, kind), names in self._fields.items():
            try:
                values = [*map(itemgetter(column), samples)]
            except KeyError:
                values = [value_of(sample, column) for sample in samples]
            if values.count(None) == len(values) and not any(given_columns(sample, [column]) for sample in samples):
                raise UserError(f"no sample has the column {column!r}")
            canonical = kind.canonical(values)
            for name in names:
                found[name] = canonical
        return found

    def _types_for(self, training: bool) -> Mapping[str, RawType]:
        return self._types if training else self._features
