"""The encoder: fitted transforms, vocabularies and hashes, applied to R parsed samples or to the values of a few."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, chain
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from cowrec.errors import UserError

from ..dataset.sample_block import Bags, SampleBlock
from ..dataset.schema import (
    BUCKET_SUFFIX,
    KEPT_PREFIX,
    RESERVED_ROWS,
    SAMPLE_NUMBER,
    SAMPLE_WEIGHT,
    TIME,
    VOCABULARY_FOLDER,
    WEIGHT_SUFFIX,
    DenseField,
    Encoding,
    Schema,
    SparseField,
    label_columns,
    vocabulary_file,
)
from ..hashing import bytes_hashes, string_buffers, string_hashes
from ..raw.layouts import FIELD_KINDS, RawField
from ..raw.lists import last_values, weights_of_pairs
from ..raw.parsing import Parsed
from .numbers import Transforms, bucket_ids
from .vocabulary import Vocabulary, hashed_rows, raw_ids_of_hashed


def sparse_field(raw: RawField, encoding: Encoding) -> SparseField:
    """Returns the sparse field of a raw one, or of the buckets of a raw number, before its table is sized."""
    bucketed = bool(raw.numbers)
    return SparseField(
        raw.name + BUCKET_SUFFIX if bucketed else raw.name,
        RESERVED_ROWS,
        FIELD_KINDS[raw.kind].sparse,
        pooling=raw.pooling or "sum",
        encoding=encoding,
        source=raw.name,
        bucketed=bucketed,
        max_length=raw.max_length,
        shares=raw.shares,
        along=raw.along,
    )


def texts_of(field: SparseField, parsed: Parsed) -> pa.Array:
    """Returns the unencoded ids of a field: strings [R], or lists of strings [R]."""
    return bucket_ids(parsed.numbers[field.source]) if field.bucketed else parsed.ids[field.source]


@dataclass(frozen=True)
class Encoder:
    """Fitted transforms and vocabularies. `vocabularies` has each sparse field that shares no other field's."""

    dense: tuple[DenseField, ...]
    sparse: tuple[SparseField, ...]
    vocabularies: "Mapping[str, Vocabulary]"

    @cached_property
    def _transforms(self) -> Transforms:
        return Transforms(self.dense)

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
        encoded = self._transforms.apply(self._transforms.of_columns(parsed.numbers, len(parsed.sample_numbers)))
        columns |= {field.name: pa.array(values) for field, values in zip(self.dense, encoded, strict=True)}
        for sparse in self.sparse:
            columns |= self._ids(sparse, parsed)
        return pa.table(columns)

    def _ids(self, field: SparseField, parsed: Parsed) -> dict[str, pa.Array]:
        text = texts_of(field, parsed)
        if not field.is_list:
            return {field.name: pa.array(self._rows_of_text(field, text))}
        offsets = list_offsets(text)
        columns = {field.name: pa.ListArray.from_arrays(offsets, pa.array(self._rows_of_text(field, text.flatten())))}
        if field.has_weights:
            weights = pa.array(parsed.weights[field.source])
            columns[field.name + WEIGHT_SUFFIX] = pa.ListArray.from_arrays(offsets, weights)
        return columns

    def _rows_of_text(self, field: SparseField, text: pa.Array) -> np.ndarray:
        if field.encoding == "synthetic":
            found: np.ndarray = text.to_numpy()  # the ids are embedding rows already
            return found
        return self.rows(field, string_hashes(text), *string_buffers(text))

    def rows(self, field: SparseField, hashes: np.ndarray, offsets: np.ndarray, data: np.ndarray) -> np.ndarray:
        """Returns rows, int32 [R], or raw ids, int64 [R], of strings as `string_buffers` gives them."""
        if field.encoding == "vocabulary":
            return self.vocabularies[field.vocabulary].rows_of_hashed(hashes, offsets, data)
        found: np.ndarray = (
            hashed_rows(hashes, offsets, field.num_embeddings - RESERVED_ROWS)
            if field.encoding == "hash"
            else raw_ids_of_hashed(hashes, offsets)
        )
        return found

    def encode_few(self, columns: Mapping[str, Sequence[Any]], count: int) -> SampleBlock:
        """Encodes samples to predict as `encode` does. For one sample, Arrow's columns would cost six times as much.

        All numbers form one array, and all ids one array of strings that are hashed together. Labels are NaN, and times
        are unknown. `columns` are the canonical values by raw field (`RawType.canonical`) of `count` samples.

        Raises AttributeError, TypeError, ValueError or OverflowError: a value is wrong; the error does not tell which.
        """
        numbers = self._transforms.of_values(columns, count)
        parts = [self._few_ids(field, columns, numbers) for field in self.sparse]
        all_texts = [text for texts, _, _ in parts for text in texts]
        joined = "".join(all_texts)
        in_bytes = all_texts if joined.isascii() else [text.encode() for text in all_texts]
        data = np.frombuffer(joined.encode(), np.uint8)
        offsets = np.array([0, *accumulate(map(len, in_bytes))], np.int32)
        hashes = bytes_hashes(offsets, data)
        # For all fields at once, since a call for each takes longer than its few ids.
        has_raw_ids = any(field.encoding == "raw" for field in self.sparse)
        ids = raw_ids_of_hashed(hashes, offsets) if has_raw_ids else np.empty(len(hashes), np.int32)
        singles, bags, start = [], {}, 0
        for field, (texts, lengths, weights) in zip(self.sparse, parts, strict=True):
            stop = start + len(texts)
            own = ids[start:stop]
            if field.encoding != "raw":
                own[:] = self.rows(field, hashes[start:stop], offsets[start : stop + 1], data)
            start = stop
            if lengths is None:
                singles.append(own)
            else:
                bags[field.name] = Bags(torch.from_numpy(own), torch.tensor([0, *lengths]).cumsum(0), weights)
        ids = np.concatenate([ids[:0], *singles]) if bags else ids
        return SampleBlock(
            # Contiguous, as networks compiled elsewhere expect.
            torch.from_numpy(np.ascontiguousarray(self._transforms.apply(numbers).T)),
            torch.full((count,), torch.nan),
            torch.from_numpy(ids.reshape(len(singles), count)).t(),
            bags,
        )

    def _few_ids(
        self, field: SparseField, columns: Mapping[str, Sequence[Any]], numbers: np.ndarray
    ) -> tuple[list[str], list[int] | None, torch.Tensor | None]:
        """Returns all ids of a field, their number in each sample, None if always 1, and their weights, if any."""
        values = columns[field.source]
        if field.bucketed:
            return bucket_ids(numbers[self._transforms.numbers.index(field.source)]).to_pylist(), None, None
        if not field.is_list:
            return [value or "" for value in values], None, None
        if field.has_weights:
            lists = [value or [{"id": "", "weight": 1.0}] for value in values]
            pairs = [*chain.from_iterable(lists)]
            weights = torch.from_numpy(weights_of_pairs([pair["weight"] for pair in pairs]))
            return [pair["id"] for pair in pairs], [*map(len, lists)], weights
        if field.is_sequence:
            main = field.along or field.source
            others = [columns[other.source] for other in self.sparse if other.along == main]
            lists = last_values(values, columns[main], others, field.max_length)
        else:
            lists = [value or [""] for value in values]
        return [text or "" for text in chain.from_iterable(lists)], [*map(len, lists)], None

    def save(self, folder: Path) -> None:
        """Writes the vocabularies to `folder/vocabulary/`."""
        (folder / VOCABULARY_FOLDER).mkdir()
        for name, vocabulary in self.vocabularies.items():
            vocabulary.save(vocabulary_file(folder, name))

    @staticmethod
    def load(folder: Path, schema: Schema) -> "Encoder":
        """Loads the encoder of a data set. Raises ValueError if a vocabulary is missing or unlike the schema."""
        vocabularies = {}
        for field in schema.sparse:
            if field.encoding == "vocabulary" and not field.shares:
                path, size = vocabulary_file(folder, field.name), field.num_embeddings - RESERVED_ROWS
                vocabularies[field.name] = Vocabulary.load(path)
                if (found := len(vocabularies[field.name])) != size:
                    raise UserError(f"{path} has {found} ids, schema.json has {size}; the files do not match")
        return Encoder(schema.dense, schema.sparse, vocabularies)


def list_offsets(lists: pa.Array) -> pa.Array:
    """Returns offsets int32 [R + 1] that start at 0, even if the array is a slice of a longer one."""
    offsets = lists.offsets.to_numpy()
    return pa.array(offsets - offsets[0])
