"""Encoding of a few samples for a server: equals `SampleCodec.encode` without its cost per column.

All numeric fields form one array and all ids one array of strings, which are hashed together. The arithmetic and the
lookups of ids are the same as in `Encoder`. R samples, N dense fields, F sparse fields.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from cowrec.data_pipeline.dataset.sample_block import Bags, SampleBlock
from cowrec.data_pipeline.dataset.schema import MISSING, RESERVED_ROWS, Schema
from cowrec.data_pipeline.encoding.dense import bound, bounded, bucket_ids, scores
from cowrec.data_pipeline.encoding.encoder import Encoder
from cowrec.data_pipeline.encoding.vocabulary import hash_bucket_rows, raw_ids
from cowrec.data_pipeline.hashing import string_buffers, string_hashes
from cowrec.data_pipeline.raw.columns import MAX_WEIGHT, WEIGHTS_ARE_BOUNDED
from cowrec.data_pipeline.raw.layouts import Layout

Values = Mapping[str, Any]
"""Canonical values of a sample, by raw column."""


class RequestEncoder:
    """Encodes canonical values (see `canonical_values`) for prediction.

    Args:
        schema: schema of the data set.
        layout: layout of its raw columns.
        encoder: encoder of the data set.
    """

    def __init__(self, schema: Schema, layout: Layout, encoder: Encoder) -> None:
        self._schema, self._encoder = schema, encoder
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
        self._singles = sum(field.kind == "categorical" for field in encoder.sparse)

    def problem(self, sample: Values) -> str:
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

    def encode(self, samples: Sequence[Values]) -> SampleBlock:
        """Encodes samples without a problem; labels are NaN, times are unknown."""
        columns = [self._column[name] for name in self._numeric]
        numbers = np.array([[sample[name] for sample in samples] for name in columns], np.float64)
        numbers = numbers.reshape(len(columns), len(samples))  # None became NaN
        texts, lengths, weights = self._texts(samples, numbers)
        ids = self._ids(texts, [sum(each) for each in lengths])
        singles, bags, start = [], {}, 0
        for field, counts in zip(self._encoder.sparse, lengths, strict=True):
            stop = start + sum(counts)
            if field.kind == "categorical":
                singles.append(ids[start:stop])
            else:
                offsets = torch.tensor([0, *counts]).cumsum(0)
                values = weights.get(field.name)
                bags[field.name] = Bags(
                    torch.from_numpy(ids[start:stop]),
                    offsets,
                    None if values is None else torch.from_numpy(np.array(values).astype(np.float32)),
                )
            start = stop
        table = np.array(singles, ids.dtype).reshape(self._singles, len(samples))
        return SampleBlock(
            torch.from_numpy(self._transformed(numbers)).t(),
            torch.full((len(samples),), math.nan),
            torch.from_numpy(table).t(),
            bags,
        )

    def _transformed(self, numbers: np.ndarray) -> np.ndarray:
        """Applies `dense.transformed` to all fields at once: float32 [N, R]."""
        present = np.nan_to_num(numbers[self._dense], nan=0.0)
        with np.errstate(over="ignore", invalid="ignore"):
            above = present - self._low
            logs = np.log1p(np.maximum(above, 0.0)) if self._log.any() else above
            scaled = np.where(self._flat, 0.0, above / self._width)
        result = np.where(self._minmax, scaled, np.where(self._log, logs, present))
        for index in self._quantile:
            result[index] = scores(self._encoder.dense[index], numbers[self._dense[index]])
        return bounded(result, self._bound)

    def _texts(
        self, samples: Sequence[Values], numbers: np.ndarray
    ) -> tuple[list[str], list[list[int]], dict[str, list[float]]]:
        """Returns all ids by field, their number by field and sample, and the weights of weighted fields."""
        texts: list[str] = []
        lengths: list[list[int]] = []
        weights: dict[str, list[float]] = {}
        ones = [1] * len(samples)
        for field in self._encoder.sparse:
            column = self._column[field.source]
            if field.bucketed:
                texts += bucket_ids(numbers[self._numeric[field.source]]).to_pylist()
                lengths.append(ones)
            elif field.kind == "categorical":
                texts += [sample[column] or "" for sample in samples]
                lengths.append(ones)
            elif field.kind == "multi":
                lists = [sample[column] or [""] for sample in samples]
                texts += [text for each in lists for text in each]
                lengths.append([len(each) for each in lists])
            else:
                pairs = [sample[column] or [{"id": "", "weight": 1.0}] for sample in samples]
                texts += [pair["id"] for each in pairs for pair in each]
                weights[field.name] = [pair["weight"] for each in pairs for pair in each]
                lengths.append([len(each) for each in pairs])
        return texts, lengths, weights

    def _ids(self, texts: list[str], counts: list[int]) -> np.ndarray:
        """Returns the rows or raw ids of texts, `counts` [F] of each field: int32, or int64 if some are raw."""
        array = pa.array(texts, pa.string())
        offsets, data = string_buffers(array)
        hashes = string_hashes(array)
        ids = raw_ids(array) if self._schema.has_raw_ids else np.empty(len(texts), np.int32)
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
