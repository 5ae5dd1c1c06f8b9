"""The encoder: parsed samples to the columns of a data set, by fitted dense transforms and vocabularies."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa

from cowrec.data_pipeline.dataset.schema import (
    KEPT_PREFIX,
    RESERVED_ROWS,
    SAMPLE_NUMBER,
    SAMPLE_WEIGHT,
    TIME,
    WEIGHT_SUFFIX,
    DenseField,
    Schema,
    SparseField,
    label_columns,
)
from cowrec.data_pipeline.raw.parsing import Parsed

from .dense import bucket_ids, transformed
from .vocabulary import Vocabulary, hashed_rows, raw_ids

VOCABULARY_FOLDER = "vocabulary"


@dataclass(frozen=True)
class Encoder:
    """Fitted transforms and vocabularies of every field.

    Attributes:
        dense, sparse: the fields as the schema describes them.
        vocabularies: by name of the sparse field; only fields encoded by a vocabulary have one.
    """

    dense: tuple[DenseField, ...]
    sparse: tuple[SparseField, ...]
    vocabularies: Mapping[str, Vocabulary]

    def encode(self, parsed: Parsed) -> pa.Table:
        """Encodes all samples of a block to the columns of `arrow_schema`."""
        labels = zip(label_columns(list(parsed.labels)), parsed.labels.values(), strict=True)
        columns: dict[str, pa.Array] = {name: pa.array(values) for name, values in labels}
        columns[SAMPLE_NUMBER] = pa.array(parsed.sample_numbers)
        columns |= {KEPT_PREFIX + name: values for name, values in parsed.kept.items()}
        if parsed.sample_weights is not None:
            columns[SAMPLE_WEIGHT] = pa.array(parsed.sample_weights)
        if parsed.time is not None:
            columns[TIME] = pa.array(parsed.time)
        for dense in self.dense:
            columns[dense.name] = pa.array(transformed(dense, parsed.numbers[dense.source]))
        for sparse in self.sparse:
            columns |= self._ids(sparse, parsed)
        return pa.table(columns)

    def _ids(self, field: SparseField, parsed: Parsed) -> dict[str, pa.Array]:
        text = bucket_ids(parsed.numbers[field.source]) if field.bucketed else parsed.ids[field.source]
        if field.kind == "categorical":
            return {field.name: pa.array(self._rows(field, text))}
        offsets = list_offsets(text)
        columns = {field.name: pa.ListArray.from_arrays(offsets, pa.array(self._rows(field, text.flatten())))}
        if field.kind == "weighted":
            weights = pa.array(parsed.weights[field.source])
            columns[field.name + WEIGHT_SUFFIX] = pa.ListArray.from_arrays(offsets, weights)
        return columns

    def _rows(self, field: SparseField, text: pa.Array) -> np.ndarray:
        if field.encoding == "hash":
            return hashed_rows(text, field.num_embeddings - RESERVED_ROWS)
        if field.encoding == "raw":
            return raw_ids(text)
        if field.encoding == "synthetic":
            return text.to_numpy()  # the ids are embedding rows already
        return self.vocabularies[field.name].rows(text)

    def save(self, folder: Path) -> None:
        """Writes the vocabularies to `folder/vocabulary/`."""
        (folder / VOCABULARY_FOLDER).mkdir()
        for name, vocabulary in self.vocabularies.items():
            vocabulary.save(_file(folder, name))

    @staticmethod
    def load(folder: Path, schema: Schema) -> "Encoder":
        """Loads the encoder of a data set. Raises ValueError if a vocabulary is missing or unlike the schema."""
        vocabularies = {}
        for field in schema.sparse:
            if field.encoding == "vocabulary":
                vocabulary = Vocabulary.load(_file(folder, field.name))
                if len(vocabulary) + RESERVED_ROWS != field.num_embeddings:
                    raise ValueError(
                        f"{_file(folder, field.name)} has {len(vocabulary)} ids, schema.json has "
                        f"{field.num_embeddings - RESERVED_ROWS}; the files do not match"
                    )
                vocabularies[field.name] = vocabulary
        return Encoder(schema.dense, schema.sparse, vocabularies)


def list_offsets(lists: pa.Array) -> pa.Array:
    """Returns offsets int32 [R + 1] that start at 0, even if the array is a slice of a longer one."""
    offsets = lists.offsets.to_numpy()
    return pa.array(offsets - offsets[0])


def _file(folder: Path, field: str) -> Path:
    return folder / VOCABULARY_FOLDER / f"{field}.parquet"
