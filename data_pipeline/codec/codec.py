"""Raw samples from anywhere, as JSON or Arrow tables, to rows by the maps and ids of a prepared data set.

A sample has the raw columns of the data set's layout, by their names:

* numeric: a number, its text, or null; categorical: a string, an integer or null; multi: a list of those, or its text
  joined by the layout's separator; weighted: a list of {"id": ..., "weight": ...}, or its joined text. Null is missing.
* the label, 0 or 1, and the time under the layout's name for it ("time" where it has none), Unix seconds or ISO 8601
  text: for training only.
* `sample_id`, a string or an integer, by which a sample that comes twice is known; may be absent.

Other columns are left out. An integer is the id that its decimal text is. Synthetic data have their fields for columns
and row numbers for ids. R samples.
"""

import dataclasses
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from cowrec.data_pipeline.dataset.batch import Batch
from cowrec.data_pipeline.dataset.sample_block import SampleBlock
from cowrec.data_pipeline.dataset.schema import LABEL, MISSING, TIME, Schema
from cowrec.data_pipeline.dataset.shards import arrow_schema, block_from_table
from cowrec.data_pipeline.encoding.encoder import Encoder
from cowrec.data_pipeline.raw.csv_parser import Parsed
from cowrec.data_pipeline.raw.layouts import Layout, RawField

from .columns import SampleColumns, require_columns
from .json_lines import Use, UseKind, alike_table, canonical_values, column_of, parsed_lines
from .request_codec import FewSamples

SAMPLE_ID = "sample_id"
FEW = 64
"""Samples up to which going through them one by one is the faster way."""
TIME_COLUMN, ID_COLUMN = "#time", "#sample_id"
"""Beside the columns of a data set, which have no such names."""

_KINDS: Mapping[str, UseKind] = {"numeric": "number", "categorical": "id", "multi": "ids", "weighted": "weighted"}


@dataclass(frozen=True)
class BadSample:
    """A sample that cannot be used: its place among those given, from 0, and what is wrong with it."""

    index: int
    reason: str


@dataclass(frozen=True)
class RawSamples:
    """Samples as columns.

    Attributes:
        table: the raw columns that at least one sample has.
        index: the place of each row among the samples given, int64 [R].
        bad: samples that are no row.
    """

    table: pa.Table
    index: np.ndarray
    bad: tuple[BadSample, ...] = ()


@dataclass(frozen=True)
class Encoded:
    """Samples as rows, in their order.

    Attributes:
        schema: of the rows.
        table: the columns of a data set's files, `TIME_COLUMN` and `ID_COLUMN`.
        timed: the samples' times are known.
        index: the place of each row among the samples given, int64 [R].
        bad: the samples that could not be used, in order.
    """

    schema: Schema
    table: pa.Table
    timed: bool
    index: np.ndarray
    bad: tuple[BadSample, ...]

    @property
    def time(self) -> np.ndarray:
        """int64 [R], Unix seconds; zeros where times are not known."""
        return self.table[TIME_COLUMN].to_numpy()

    @property
    def sample_ids(self) -> pa.ChunkedArray:
        """Strings [R], empty where a sample has none."""
        return self.table[ID_COLUMN]

    @property
    def rows(self) -> SampleBlock:
        """What batches are made of; with times where they are known."""
        return encoded_rows(self.table, self.schema, timed=self.timed)

    @property
    def batch(self) -> Batch:
        """All rows as one batch."""
        return self.rows.batch(self.schema, self.table.num_rows)

    def without(self, wrong: np.ndarray, reason: str) -> "Encoded":
        """The same but for some of the rows, bool [R], which are bad for this reason."""
        if not wrong.any():
            return self
        bad = [*self.bad, *(BadSample(place, reason) for place in self.index[wrong].tolist())]
        kept = tuple(sorted(bad, key=lambda each: each.index))
        return Encoded(self.schema, self.table.filter(pa.array(~wrong)), self.timed, self.index[~wrong], kept)


def encoded_rows(table: pa.Table, schema: Schema, *, timed: bool = True) -> SampleBlock:
    """Rows from the columns of `Encoded.table`."""
    rows = block_from_table(table, dataclasses.replace(schema, timed=False), "samples")
    return dataclasses.replace(rows, time=torch.from_numpy(table[TIME_COLUMN].to_numpy().copy())) if timed else rows


class SampleCodec:
    """Encodes raw samples as `prepare` encoded the data set: by the same code, maps and vocabularies.

    Args:
        schema: of the data set.
        layout: of its raw files.
        encoder: that made it.

    Attributes:
        schema: of the rows.
        columns: names of the raw columns that every sample must have (null where a value is missing).
    """

    def __init__(self, schema: Schema, layout: Layout, encoder: Encoder) -> None:
        self.schema, self._layout, self._encoder = schema, layout, encoder
        self._time = layout.time or TIME
        uses: dict[str, Use] = {}
        for field in layout.fields:
            uses[field.column] = Use(_KINDS[field.kind], field.separator, field.weight_separator)
        self.columns, self._features = tuple(uses), dict(uses)
        synthetic = any(field.encoding == "synthetic" for field in schema.sparse)
        self._few = None if synthetic else FewSamples(schema, layout, encoder)
        uses.setdefault(SAMPLE_ID, Use("id"))
        uses.setdefault(self._time, Use("time" if layout.time_format == "timestamp" else "id"))
        uses.setdefault(layout.label, Use("number"))
        self._uses = uses

    @staticmethod
    def load(folder: str | os.PathLike[str]) -> "SampleCodec":
        """From the folder of a data set, a run or an export: any that has schema.json and vocabulary/.

        Raises:
            ValueError: a folder that has none, or a vocabulary that is missing or damaged.
        """
        schema = Schema.load(folder)
        if schema.name == "synthetic":
            dense = tuple(dataclasses.replace(each, source=each.name) for each in schema.dense)
            sparse = tuple(dataclasses.replace(each, source=each.name) for each in schema.sparse)
            fields = [RawField(each.name, "numeric") for each in dense]
            fields += [RawField(each.name, "categorical") for each in sparse]
            layout = Layout("synthetic", ",", "", True, (), LABEL, tuple(fields))
            return SampleCodec(schema, layout, Encoder(dense, sparse, {}))
        if "layout" not in schema.settings:
            raise ValueError(
                f"{folder}: schema.json does not say what the raw columns were; prepare the data set again"
            )
        return SampleCodec(schema, Layout.from_json(schema.settings["layout"]), Encoder.load(Path(folder), schema))

    def from_json(self, lines: Sequence[bytes], *, training: bool = True) -> RawSamples:
        """Columns of JSON objects, one a line or message, UTF-8. A malformed one is named, and loses no other."""
        table = alike_table(lines, self._uses_for(training)) if lines else None
        if table is not None:
            return RawSamples(table, np.arange(len(lines)))
        return self.from_objects(parsed_lines(lines), training=training)

    def from_objects(self, samples: Iterable[Any], *, training: bool = True) -> RawSamples:
        """Columns of samples that are dictionaries already, of the values that JSON has."""
        uses = self._uses_for(training)
        good, index, bad = [], [], []
        present: set[str] = set()
        for place, sample in enumerate(samples):
            try:
                good.append(canonical_values(sample, uses))
            except ValueError as error:
                bad.append(BadSample(place, str(error)))
                continue
            index.append(place)
            present |= sample.keys()
        # Where no sample can be read none has a column: that is no other mistake.
        columns = {
            name: column_of([each[name] for each in good], use)
            for name, use in uses.items()
            if name in present or not good
        }
        return RawSamples(pa.table(columns), np.asarray(index, np.int64), tuple(bad))

    def from_table(self, table: pa.Table) -> RawSamples:
        """Columns of an Arrow table: of a Parquet or Arrow file, say."""
        known = [name for name in self._uses if name in table.column_names]
        return RawSamples(table.select(known), np.arange(table.num_rows))

    def encode(self, samples: RawSamples, *, training: bool = True) -> Encoded:
        """Rows of all samples that are good.

        Args:
            samples: as columns.
            training: labels and times are needed; otherwise neither is looked at, and labels are NaN.

        Raises:
            ValueError: a column that no sample has, or that holds another type; with its name.
        """
        require_columns(self.columns, samples.table.column_names)
        columns, count = SampleColumns(samples.table), samples.table.num_rows
        label, time = np.full(count, np.nan, np.float32), np.zeros(count, np.int64)
        if training:
            require_columns([self._layout.label, self._time], samples.table.column_names)
            label = columns.labels(self._layout.label)
            time = columns.times(self._time, self._layout.time_format)
        has_ids = SAMPLE_ID in samples.table.column_names
        sample_ids = columns.texts(SAMPLE_ID) if has_ids else pa.nulls(count, pa.string()).fill_null("")
        parsed = self._parsed(columns, samples.index, label)
        wanted = arrow_schema(dataclasses.replace(self.schema, timed=False))
        table = self._encoder.encode(parsed).select(wanted.names).cast(wanted)
        table = table.append_column(TIME_COLUMN, pa.array(time)).append_column(ID_COLUMN, sample_ids)
        good = columns.good
        if columns.reasons:
            table = table.filter(pa.array(good))
        bad = [BadSample(int(samples.index[row]), reason) for row, reason in columns.reasons.items()]
        bad = sorted([*samples.bad, *bad], key=lambda each: each.index)
        return Encoded(self.schema, table, training, samples.index[good], tuple(bad))

    def prediction_rows(self, samples: Sequence[Mapping[str, Any]]) -> tuple[SampleBlock, tuple[BadSample, ...]]:
        """Rows of the good ones of samples that are dictionaries, and the others: a server's way, fast for a few, too.

        The same as `encode(from_objects(samples, training=False), training=False)`.

        Raises:
            ValueError: as `encode`.
        """
        if self._few is None or len(samples) > FEW:
            encoded = self.encode(self.from_objects(samples, training=False), training=False)
            return encoded.rows, encoded.bad
        good, bad = [], []
        present: set[str] | None = None
        for place, sample in enumerate(samples):
            try:
                values = canonical_values(sample, self._features)
            except ValueError as error:
                bad.append(BadSample(place, str(error)))
                continue
            present = {*sample, *(present or ())}
            problem = self._few.problem(values)
            if problem:
                bad.append(BadSample(place, problem))
            else:
                good.append(values)
        if present is not None:
            require_columns(self.columns, present)
        return self._few.rows(good), tuple(bad)

    def _uses_for(self, training: bool) -> Mapping[str, Use]:
        return self._uses if training else self._features

    def _parsed(self, columns: SampleColumns, index: np.ndarray, label: np.ndarray) -> Parsed:
        numbers: dict[str, np.ndarray] = {}
        ids: dict[str, pa.Array] = {}
        weights: dict[str, np.ndarray] = {}
        tables = {field.name: field.num_embeddings for field in self.schema.sparse if field.encoding == "synthetic"}
        for field in self._layout.fields:
            if field.kind == "numeric":
                numbers[field.name] = columns.numbers(field.column)
            elif field.name in tables:
                ids[field.name] = pa.array(columns.row_numbers(field.column, MISSING, tables[field.name]))
            elif field.kind == "categorical":
                ids[field.name] = columns.texts(field.column)
            else:
                ids[field.name], pair_weights = columns.lists(field.column, self._uses[field.column])
                if pair_weights is not None:
                    weights[field.name] = pair_weights
        return Parsed(index, label, None, numbers, ids, weights, [])
