"""Reading of Parquet shards into a `SampleBlock`, with checks so that invalid ids never reach a lookup."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import torch

from cowrec.data_pipeline.remote import fetch_missing

from .sample_block import Bags, SampleBlock, id_dtype
from .schema import (
    KEPT_PREFIX,
    SAMPLE_NUMBER,
    SAMPLE_WEIGHT,
    TIME,
    TRUE_LOGIT,
    WEIGHT_SUFFIX,
    Schema,
    SparseField,
)

WEIGHT_LIST = pa.list_(pa.float32())


def shard_path(data_dir: Path, split: str, number: int) -> Path:
    """Returns the path of shard `number` of a split."""
    return data_dir / split / f"{number:05d}.parquet"


def arrow_schema(schema: Schema) -> pa.Schema:
    """Returns the Parquet columns of a data set: those of samples, then dense fields, sparse fields (and weights)."""
    columns = [(name, pa.float32()) for name in schema.label_columns]
    columns += [(SAMPLE_WEIGHT, pa.float32())] if schema.sample_weights else []
    columns += [(TIME, pa.int64())] if schema.timed else []
    columns += [(TRUE_LOGIT, pa.float32())] if schema.true_logits else []
    columns += [(SAMPLE_NUMBER, pa.int64())] if schema.numbered else []
    columns += [(KEPT_PREFIX + name, pa.string()) for name in schema.kept]
    columns += [(field.name, pa.float32()) for field in schema.dense]
    for field in schema.sparse:
        ids = pa.int64() if field.encoding == "raw" else pa.int32()
        columns.append((field.name, ids if field.kind == "categorical" else pa.list_(ids)))
        if field.kind == "weighted":
            columns.append((field.name + WEIGHT_SUFFIX, WEIGHT_LIST))
    return pa.schema([pa.field(name, kind, nullable=False) for name, kind in columns])


def load_shards(data_dir: Path, schema: Schema, split: str, numbers: Sequence[int]) -> SampleBlock:
    """Reads the shards `numbers` of a split, in that order, into one `SampleBlock` on the CPU.

    Raises:
        ValueError: a shard is missing or damaged, differs from the schema in columns, types or size, or has an id
            outside [0, num_embeddings); the message names the file, the column and the value.
        OSError: the data set is a copy of one in an object store, which does not answer.
    """
    sizes = [schema.split(split).shards[number] for number in numbers]
    for number, size in zip(numbers, sizes, strict=True):  # before allocating memory for the sizes in schema.json
        path = shard_path(data_dir, split, number)
        with _opened(path, schema) as file:
            _check_size(path, file.metadata.num_rows, size)
    stops = np.cumsum(sizes, dtype=np.int64).tolist()

    def parts() -> Iterator[tuple[int, SampleBlock]]:
        for number, size, stop in zip(numbers, sizes, stops, strict=True):
            path = shard_path(data_dir, split, number)
            yield stop - size, block_from_table(_read(path, schema, size), schema, path)

    return SampleBlock.assemble(schema, sum(sizes), parts(), torch.device("cpu"))


def read_columns(data_dir: Path, schema: Schema, split: str, names: Sequence[str]) -> pa.Table:
    """Reads columns of a split, without the checks of ids. Raises ValueError: see `shard_columns`."""
    expected = pa.schema([each for each in arrow_schema(schema) if each.name in names])
    return pa.concat_tables([expected.empty_table(), *shard_columns(data_dir, schema, split, names)])


def shard_columns(data_dir: Path, schema: Schema, split: str, names: Sequence[str]) -> Iterator[pa.Table]:
    """Yields columns of each shard of a split in order, without the checks of ids.

    Raises:
        ValueError: a shard is missing or damaged, or differs from the schema in these columns or in size.
    """
    expected = pa.schema([each for each in arrow_schema(schema) if each.name in names])
    for number, size in enumerate(schema.split(split).shards):
        path = shard_path(data_dir, split, number)
        with _opened(path, schema) as file:
            _check_columns(path, file.schema_arrow, expected)
            _check_size(path, file.metadata.num_rows, size)
            yield file.read(columns=expected.names).cast(expected)


def block_from_table(table: pa.Table, schema: Schema, path: Path | str) -> SampleBlock:
    """Converts a table with the columns of `arrow_schema` to a `SampleBlock`; `path` is for messages.

    Raises:
        ValueError: a value is null, or a list of weights differs in length from its list of ids.
    """
    single = [field.name for field in schema.sparse if field.kind == "categorical"]
    labels = _stacked(table, schema.label_columns, np.float32, path)
    return SampleBlock(
        _stacked(table, [field.name for field in schema.dense], np.float32, path),
        labels if len(schema.labels) > 1 else labels[:, 0],
        _stacked(table, single, np.int64 if schema.has_raw_ids else np.int32, path),
        {field.name: _bags(table, field, schema, path) for field in schema.sparse if field.kind != "categorical"},
        _stacked(table, [TIME], np.int64, path)[:, 0] if schema.timed else None,
        _stacked(table, [TRUE_LOGIT], np.float32, path)[:, 0] if schema.true_logits else None,
        _stacked(table, [SAMPLE_WEIGHT], np.float32, path)[:, 0] if schema.sample_weights else None,
    )


def _read(path: Path, schema: Schema, size: int) -> pa.Table:
    expected = arrow_schema(schema)
    with _opened(path, schema) as file:
        _check_columns(path, file.schema_arrow, expected)
        table = file.read(columns=expected.names)
    _check_size(path, table.num_rows, size)
    for field in schema.sparse:
        _check_ids(path, field, table[field.name])
    return table


@contextmanager
def _opened(path: Path, schema: Schema) -> Iterator[pq.ParquetFile]:
    fetch_missing(path.parents[1], f"{path.parent.name}/{path.name}")
    try:
        with pq.ParquetFile(path) as file:
            yield file
    except FileNotFoundError:
        raise ValueError(f"{path} is missing, though {schema.name!r}'s schema.json lists it; prepare again") from None
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is damaged ({error}); prepare the data set again") from error


def _check_size(path: Path, found: int, size: int) -> None:
    if found != size:
        raise ValueError(f"{path} has {found} rows, schema.json has {size}; prepare the data set again")


def _check_columns(path: Path, found: pa.Schema, expected: pa.Schema) -> None:
    for field in expected:
        position = found.get_field_index(field.name)
        if position < 0:
            raise ValueError(f"{path} has no column {field.name!r}, but schema.json does; prepare the data set again")
        kind = found.field(position).type
        # Parquet does not keep the name of a list's inner field, so lists are compared by their value type.
        if pa.types.is_list(kind):
            kind = pa.list_(kind.value_type)
        if kind != field.type:
            raise ValueError(f"{path}, column {field.name!r}: type {kind}, must be {field.type}; prepare it again")


def _check_ids(path: Path, field: SparseField, column: pa.ChunkedArray) -> None:
    """Rejects ids outside their table, which would access foreign memory in FBGEMM; raw ids have no table."""
    if field.encoding == "raw":
        return
    for chunk in column.chunks:
        bounds = pc.min_max(chunk if field.kind == "categorical" else chunk.flatten()).as_py()
        for value in bounds.values():
            if value is not None and not 0 <= value < field.num_embeddings:
                raise ValueError(
                    f"{path}, column {field.name!r}: id {value} is outside [0, {field.num_embeddings}); the file and "
                    "schema.json do not match; prepare the data set again"
                )


def _stacked(table: pa.Table, names: Sequence[str], dtype: type, path: Path | str) -> torch.Tensor:
    """Stacks flat columns: a transposed view, [samples, len(names)], of one copy of Arrow's buffers."""
    columns = np.empty((len(names), table.num_rows), dtype)
    for name, target in zip(names, columns, strict=True):
        column = table[name]
        if column.null_count:
            raise ValueError(f"{path}, column {name!r}: {column.null_count} values are null; prepare it again")
        start = 0
        for chunk in column.chunks:
            target[start : start + len(chunk)] = chunk.to_numpy(zero_copy_only=True)
            start += len(chunk)
    return torch.from_numpy(columns).t()


def _bags(table: pa.Table, field: SparseField, schema: Schema, path: Path | str) -> Bags:
    lists = _lists(table, field.name, path)
    weights = None
    offsets = lists.offsets.to_numpy().astype(np.int64)
    offsets -= offsets[0]
    if field.kind == "weighted":
        weight_lists = _lists(table, field.name + WEIGHT_SUFFIX, path)
        weight_offsets = weight_lists.offsets.to_numpy().astype(np.int64)
        if not np.array_equal(weight_offsets - weight_offsets[0], offsets):
            raise ValueError(f"{path}, column {field.name!r}: a list of weights is not as long as its list of ids")
        weights = torch.from_numpy(weight_lists.flatten().to_numpy().copy())
    values = torch.from_numpy(lists.flatten().to_numpy().copy()).to(id_dtype(schema))
    return Bags(values, torch.from_numpy(offsets), weights)


def _lists(table: pa.Table, name: str, path: Path | str) -> pa.ListArray:
    column = table[name].combine_chunks()
    lists = pa.concat_arrays(column.chunks) if isinstance(column, pa.ChunkedArray) else column
    if lists.null_count or lists.flatten().null_count:
        raise ValueError(f"{path}, column {name!r}: values are null; prepare the data set again")
    return lists
