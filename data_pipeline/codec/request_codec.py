"""Encoding of samples for a server: equals `SampleCodec.encode` without its cost per column.

All numeric fields form one array and all ids one array of strings, which are hashed together. The arithmetic and the
lookups of ids are the same as in `Encoder`. R samples, N dense fields, F sparse fields.
"""

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import chain
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from cowrec.data_pipeline.dataset.sample_block import Bags, SampleBlock
from cowrec.data_pipeline.dataset.schema import MISSING, RESERVED_ROWS, Schema
from cowrec.data_pipeline.encoding.dense import bound, bounded, bucket_ids, scores
from cowrec.data_pipeline.encoding.encoder import Encoder, hash_bucket_rows, raw_ids_of_hashed
from cowrec.data_pipeline.hashing import bytes_hashes, string_buffers
from cowrec.data_pipeline.raw.columns import MAX_WEIGHT, WEIGHTS_ARE_BOUNDED
from cowrec.data_pipeline.raw.layouts import Layout

from .json_lines import CANONICAL_VALUE, ColumnType, canonical_values, require_columns

Columns = Mapping[str, Sequence[Any]]
"""Canonical values of samples (see `canonical_values`), by raw column."""

_NUMBERS, _TEXTS = {int, float, type(None)}, {str, type(None)}


class RequestEncoder:
    """Encodes samples for prediction.

    Args:
        schema: schema of the data set.
        types: of the raw columns.
        layout: layout of its raw columns.
        encoder: encoder of the data set.
    """

    def __init__(self, schema: Schema, types: Mapping[str, ColumnType], layout: Layout, encoder: Encoder) -> None:
        self._schema, self._types, self._encoder = schema, types, encoder
        self._column = {field.name: field.column for field in layout.fields}
        numeric = [field.name for field in layout.fields if field.kind == "numeric"]
        self._numeric = {name: index for index, name in enumerate(numeric)}
        self._dense = np.array([self._numeric[field.source] for field in encoder.dense], np.int64)
        low = np.array([[field.minimum] for field in encoder.dense]).reshape(-1, 1)
        width = np.array([[field.maximum - field.minimum] for field in encoder.dense]).reshape(-1, 1)
        transforms = np.array([[field.transform] for field in encoder.dense]).reshape(-1, 1)
        self._low, self._width = low, np.where(width > 0, width, 1.0)
        self._minmax, self._log, self._flat = transforms == "minmax", transforms == "log", width <= 0
        self._bound = np.array([[bound(field)] for field in encoder.dense]).reshape(-1, 1)
        self._quantile = [index for index, field in enumerate(encoder.dense) if field.transform == "quantile"]

    def encode(self, samples: Sequence[Mapping[str, Any]]) -> tuple[SampleBlock, dict[int, str]]:
        """Encodes the good ones; returns the problems of the others too, by index, in order.

        Raises:
            ValueError: no sample has some column.
        """
        with suppress(KeyError, TypeError, ValueError, OverflowError):  # what is wrong is found sample by sample
            columns = {name: [sample[name] for sample in samples] for name in self._types}
            return self._encoded({name: _canonical(values, self._types[name]) for name, values in columns.items()}), {}
        good, problems = [], {}
        present: set[str] | None = None
        for number, sample in enumerate(samples):
            try:
                values = canonical_values(sample, self._types)
            except ValueError as error:
                problems[number] = str(error)
                continue
            present = (present or set()) | (sample.keys() & self._types.keys())
            if problem := self._problem(values):
                problems[number] = problem
            else:
                good.append(values)
        if present is not None:
            require_columns(self._types, present)
        return self._encoded({name: [values[name] for values in good] for name in self._types}), problems

    def _problem(self, sample: Mapping[str, Any]) -> str:
        """Returns an error that canonical types do not rule out; empty if there is none."""
        for name in self._numeric:
            value = sample[self._column[name]]
            if value is not None and not math.isfinite(value):
                return f"column {self._column[name]}: must be a finite number or null, got {value}"
        for field in self._encoder.sparse:
            value = sample[self._column[field.source]]
            weights = [abs(each["weight"]) for each in value or ()] if field.kind == "weighted" else []
            if not all(map(math.isfinite, weights)):
                return f"column {self._column[field.source]}: weights must be finite numbers"
            if weights and max(weights) > MAX_WEIGHT:
                return f"column {self._column[field.source]}: {WEIGHTS_ARE_BOUNDED}, got {max(weights):g}"
        return ""

    def _encoded(self, columns: Columns) -> SampleBlock:
        """The samples; labels are NaN, times are unknown.

        Raises:
            ValueError: one has a problem, or a text is not UTF-8; it is not told which one.
            OverflowError: a number is too large.
        """
        raw = [columns[self._column[name]] for name in self._numeric]
        samples = len(columns[next(iter(columns))])
        numbers = np.array(raw, np.float64).reshape(len(raw), samples)  # None became NaN
        if np.isfinite(numbers).sum() + sum(each.count(None) for each in raw) < numbers.size:
            raise ValueError("a number is not finite")
        texts, lengths, weights = self._texts(columns, numbers)
        ids = self._ids(texts, [samples if each is None else sum(each) for each in lengths])
        singles, bags, start = [], {}, 0
        for field, counts in zip(self._encoder.sparse, lengths, strict=True):
            if counts is None:
                stop = start + samples
                singles.append(ids[start:stop])
            else:
                stop = start + sum(counts)
                values = weights.get(field.name)
                bags[field.name] = Bags(
                    torch.from_numpy(ids[start:stop]),
                    torch.tensor([0, *counts]).cumsum(0),
                    None if values is None else torch.from_numpy(values.astype(np.float32)),
                )
            start = stop
        table = np.array(singles, ids.dtype).reshape(len(singles), samples)
        return SampleBlock(
            torch.from_numpy(self._transformed(numbers)).t().contiguous(),  # as networks compiled elsewhere expect
            torch.full((samples,), math.nan),
            torch.from_numpy(table).t(),
            bags,
        )

    def _transformed(self, numbers: np.ndarray) -> np.ndarray:
        """Applies `dense.transformed` to all fields at once: float32 [N, R]."""
        raw = numbers[self._dense]
        present = np.where(np.isnan(raw), 0.0, raw)
        with np.errstate(over="ignore", invalid="ignore"):
            above = present - self._low
            logs = np.log1p(np.maximum(above, 0.0)) if self._log.any() else above
            scaled = np.where(self._flat, 0.0, above / self._width)
        result = np.where(self._minmax, scaled, np.where(self._log, logs, present))
        for index in self._quantile:
            result[index] = scores(self._encoder.dense[index], raw[index])
        return bounded(result, self._bound)

    def _texts(
        self, columns: Columns, numbers: np.ndarray
    ) -> tuple[list[str], list[list[int] | None], dict[str, np.ndarray]]:
        """Returns all ids by field, their number by field and sample, and the weights of weighted fields.

        The number is None for a field of one id each.
        """
        texts: list[str] = []
        lengths: list[list[int] | None] = []
        weights: dict[str, np.ndarray] = {}
        for field in self._encoder.sparse:
            values = columns[self._column[field.source]]
            if field.bucketed:
                texts += bucket_ids(numbers[self._numeric[field.source]]).to_pylist()
                lengths.append(None)
            elif field.kind == "categorical":
                texts += [value or "" for value in values]
                lengths.append(None)
            elif field.kind == "multi":
                lists = [value or [""] for value in values]
                texts += chain.from_iterable(lists)
                lengths.append([len(each) for each in lists])
            else:
                pairs = [value or [{"id": "", "weight": 1.0}] for value in values]
                texts += [pair["id"] for each in pairs for pair in each]
                given = np.array([pair["weight"] for each in pairs for pair in each], np.float64)
                if not (np.abs(given) <= MAX_WEIGHT).all():
                    raise ValueError(WEIGHTS_ARE_BOUNDED)
                weights[field.name] = given
                lengths.append([len(each) for each in pairs])
        return texts, lengths, weights

    def _ids(self, texts: list[str], counts: list[int]) -> np.ndarray:
        """Returns the rows or raw ids of texts, `counts` [F] of each field: int32, or int64 if some are raw."""
        offsets, data = string_buffers(pa.array(texts, pa.string()))
        hashes = bytes_hashes(offsets, data)
        ids = raw_ids_of_hashed(hashes) if self._schema.has_raw_ids else np.empty(len(texts), np.int32)
        start = 0
        for field, count in zip(self._encoder.sparse, counts, strict=True):
            stop = start + count
            if field.encoding == "vocabulary":
                vocabulary = self._encoder.vocabularies[field.name]
                ids[start:stop] = vocabulary.rows_of_hashed(hashes[start:stop], offsets[start : stop + 1], data)
            elif field.encoding == "hash":
                ids[start:stop] = hash_bucket_rows(hashes[start:stop], field.num_embeddings - RESERVED_ROWS)
            start = stop
        ids[offsets[1:] == offsets[:-1]] = MISSING
        return ids


def _canonical(values: Sequence[Any], column: ColumnType) -> Sequence[Any]:
    """Converts a column's values as `canonical_values` does; fast where they need no conversion.

    Unlike there, texts may have surrogates, which Arrow refuses.

    Raises:
        ValueError: a value has the wrong type for the column.
    """
    types = {*map(type, values)}
    if types <= _NUMBERS and column.kind == "number":
        nulls = column.null_numbers
        return [None if value is not None and float(value) in nulls else value for value in values] if nulls else values
    if types <= _TEXTS and column.kind == "id":
        return ["" if value in column.null else value for value in values] if column.null else values
    return [None if value is None else CANONICAL_VALUE[column.kind](value, column) for value in values]
