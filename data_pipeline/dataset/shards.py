"""Parquet shards: atomic writing, and reading with checks so that invalid ids never reach a lookup."""

import errno
import glob
import logging
import os
import re
import shutil
import threading
from collections.abc import Collection, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import torch

from cowrec.errors import UserError
from cowrec.files import NO_SPACE, locked, space_remedy, sync_folder

from ..parallel import ordered_map
from ..remote import fetch_missing, is_remote
from .sample_block import Bags, SampleBlock, id_dtype
from .schema import (
    KEPT_PREFIX,
    SAMPLE_NUMBER,
    SAMPLE_WEIGHT,
    SCHEMA_FILE,
    TIME,
    TRUE_LOGIT,
    VOCABULARY_FOLDER,
    WEIGHT_SUFFIX,
    Schema,
    SparseField,
    Split,
)

logger = logging.getLogger(__name__)


def shard_path(data_dir: Path, split: str, number: int) -> Path:
    return data_dir / split / f"{number:05d}.parquet"


def arrow_schema(schema: Schema) -> pa.Schema:
    """Returns the Parquet columns of a data set: those of samples, dense fields, sparse fields (and weights)."""
    columns = [(name, pa.float32()) for name in schema.label_columns]
    columns += [(SAMPLE_WEIGHT, pa.float32())] if schema.sample_weights else []
    columns += [(TIME, pa.int64())] if schema.timed else []
    columns += [(TRUE_LOGIT, pa.float32())] if schema.true_logits else []
    columns += [(SAMPLE_NUMBER, pa.int64())] if schema.numbered else []
    columns += [(KEPT_PREFIX + name, pa.string()) for name in schema.kept]
    columns += [(field.name, pa.float32()) for field in schema.dense]
    for field in schema.sparse:
        ids = pa.int64() if field.encoding == "raw" else pa.int32()
        columns.append((field.name, pa.list_(ids) if field.is_list else ids))
        if field.has_weights:
            columns.append((field.name + WEIGHT_SUFFIX, pa.list_(pa.float32())))
    return pa.schema([pa.field(name, kind, nullable=False) for name, kind in columns])


def flat_ids(column: pa.Array | pa.ChunkedArray) -> pa.Array | pa.ChunkedArray:
    """Returns the ids of a column one after another: the column itself, or the items of its lists."""
    return pc.list_flatten(column) if pa.types.is_list(column.type) else column


def load_shards(
    data_dir: Path, schema: Schema, split: str, numbers: Sequence[int], device: torch.device | str = "cpu"
) -> SampleBlock:
    """Reads the shards `numbers` of a split, several at a time, in that order into one `SampleBlock` on `device`.

    Raises ValueError: a shard is missing or damaged, differs from the schema in columns, types or size, or has an id
    outside [0, num_embeddings); OSError: the data set is a copy of one in an object store, which does not answer.
    """
    sizes = {shard_path(data_dir, split, number): schema.split(split).shards[number] for number in numbers}

    def check_size(path: Path) -> None:
        with _opened(path, schema) as file:
            _check_size(path, file.metadata.num_rows, sizes[path])

    def part(path: Path) -> SampleBlock:
        table = _read(path, schema, sizes[path], arrow_schema(schema))
        for field in schema.sparse:
            _check_ids(path, field, table[field.name])
        return block_from_table(table, schema, path)

    for _ in ordered_map(check_size, sizes):  # before allocating memory for the sizes in schema.json
        pass
    with closing(ordered_map(part, sizes)) as parts:
        return SampleBlock.assemble(schema, sum(sizes.values()), parts, device)


def read_columns(data_dir: Path, schema: Schema, split: str, names: Sequence[str]) -> pa.Table:
    """Reads columns of a split, without the checks of ids; see `shard_columns`."""
    expected = pa.schema([column for column in arrow_schema(schema) if column.name in names])
    return pa.concat_tables([expected.empty_table(), *shard_columns(data_dir, schema, split, names)])


def shard_columns(data_dir: Path, schema: Schema, split: str, names: Sequence[str]) -> Iterator[pa.Table]:
    """Yields columns of each shard of a split in order, without the checks of ids.

    Raises ValueError if a shard is missing or damaged, or differs from the schema in these columns or in size.
    """
    expected = pa.schema([column for column in arrow_schema(schema) if column.name in names])
    for number, size in enumerate(schema.split(split).shards):
        yield _read(shard_path(data_dir, split, number), schema, size, expected).cast(expected)


def block_from_table(table: pa.Table, schema: Schema, path: Path | str) -> SampleBlock:
    """Converts a table with the columns of `arrow_schema`; `path` is for messages.

    Raises ValueError if a value is null, or a list of weights differs in length from its list of ids.
    """
    labels = _stacked(table, schema.label_columns, np.float32, path)
    return SampleBlock(
        _stacked(table, [field.name for field in schema.dense], np.float32, path),
        labels if len(schema.labels) > 1 else labels[:, 0],
        _stacked(table, schema.singles, np.int64 if schema.has_raw_ids else np.int32, path),
        {name: _bags(table, field, schema, path) for name, field in schema.lists.items()},
        _stacked(table, [TIME], np.int64, path)[:, 0] if schema.timed else None,
        _stacked(table, [TRUE_LOGIT], np.float32, path)[:, 0] if schema.true_logits else None,
        _stacked(table, [SAMPLE_WEIGHT], np.float32, path)[:, 0] if schema.sample_weights else None,
    )


def _read(path: Path, schema: Schema, size: int, expected: pa.Schema) -> pa.Table:
    with _opened(path, schema) as file:
        _check_columns(path, file.schema_arrow, expected)
        # A column that is called `a` stands for those called `a.b` as well.
        table = file.read(columns=expected.names).select(expected.names)
    _check_size(path, table.num_rows, size)
    return table


@contextmanager
def _opened(path: Path, schema: Schema) -> Iterator[pq.ParquetFile]:
    fetch_missing(path.parents[1], f"{path.parent.name}/{path.name}")
    try:
        with pq.ParquetFile(path) as file:
            yield file
    except FileNotFoundError:
        raise UserError(f"{path} is missing, though {schema.name!r}'s schema.json lists it; prepare again") from None
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path} is damaged ({error}); prepare the data set again") from error


def _check_size(path: Path, found: int, size: int) -> None:
    if found != size:
        raise UserError(f"{path} has {found} rows, schema.json has {size}; prepare the data set again")


def _check_columns(path: Path, found: pa.Schema, expected: pa.Schema) -> None:
    for field in expected:
        position = found.get_field_index(field.name)
        if position < 0:
            raise UserError(f"{path} has no column {field.name!r}, but schema.json does; prepare the data set again")
        kind = found.field(position).type
        # Parquet does not keep the name of a list's inner field, so lists are compared by their value type.
        if pa.types.is_list(kind):
            kind = pa.list_(kind.value_type)
        if kind != field.type:
            raise UserError(f"{path}, column {field.name!r}: type {kind}, must be {field.type}; prepare it again")


def _check_ids(path: Path, field: SparseField, column: pa.ChunkedArray) -> None:
    """Refuses ids outside their table, with which FBGEMM would access foreign memory; raw ids have no table."""
    if field.encoding == "raw":
        return
    for chunk in column.chunks:
        bounds = pc.min_max(flat_ids(chunk)).as_py()
        for value in bounds.values():
            if value is not None and not 0 <= value < field.num_embeddings:
                raise UserError(
                    f"{path}, column {field.name!r}: id {value} is outside [0, {field.num_embeddings}); the file and "
                    "schema.json do not match; prepare the data set again"
                )


def _stacked(table: pa.Table, names: Sequence[str], dtype: type, path: Path | str) -> torch.Tensor:
    """Stacks flat columns to [samples, columns], a transposed view of one copy of Arrow's buffers."""
    columns = np.empty((len(names), table.num_rows), dtype)
    for name, target in zip(names, columns, strict=True):
        column = table[name]
        if column.null_count:
            raise UserError(f"{path}, column {name!r}: {column.null_count} values are null; prepare it again")
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
    if field.has_weights:
        weight_lists = _lists(table, field.name + WEIGHT_SUFFIX, path)
        weight_offsets = weight_lists.offsets.to_numpy().astype(np.int64)
        if not np.array_equal(weight_offsets - weight_offsets[0], offsets):
            raise UserError(f"{path}, column {field.name!r}: a list of weights is not as long as its list of ids")
        weights = torch.from_numpy(weight_lists.flatten().to_numpy().copy())
    values = torch.from_numpy(lists.flatten().to_numpy().copy()).to(id_dtype(schema))
    return Bags(values, torch.from_numpy(offsets), weights)


def _lists(table: pa.Table, name: str, path: Path | str) -> pa.ListArray:
    column = table[name].combine_chunks()
    lists = pa.concat_arrays(column.chunks) if isinstance(column, pa.ChunkedArray) else column
    if lists.null_count or lists.flatten().null_count:
        raise UserError(f"{path}, column {name!r}: values are null; prepare the data set again")
    return lists


PARTIAL, REPLACED = ".partial-", ".replaced-"
"""Separators between a folder's name and a process id: an incomplete folder, and one that is being replaced."""


@contextmanager
def new_folder(output: str | os.PathLike[str], *, overwrite: bool = False) -> Iterator[Path]:
    """Creates a folder that becomes `output` at the end of the block, or is removed on an exception.

    The folder is `<output>.partial-<process id>`, beside the folder that `output` points to if it is a link. A killed
    process leaves a folder behind; the next call for the same `output` removes it with a warning.

    Raises:
        ValueError: `output` exists and is not empty (with `overwrite`: and is no data set, or has other files too), is
            a mount point, or another process is writing it.
        OSError: the disk is full; the message names the disk and its free space.
    """
    final = Path(os.path.realpath(output))
    if final.is_mount():
        raise UserError(f"{final} is a mount point, which cannot be replaced; name a folder in it: {final / 'data'}")
    _clear_leftovers(final)
    _check_target(final, overwrite)
    final.parent.mkdir(parents=True, exist_ok=True)
    partial = final.with_name(f"{final.name}{PARTIAL}{os.getpid()}")
    try:
        with disk_errors(partial):
            partial.mkdir()
            with locked(partial):
                yield partial
        _check_target(final, overwrite)
        _rename(partial, final)
        sync_folder(final.parent)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _clear_leftovers(final: Path) -> None:
    """Removes the folders of killed processes, and restores a data set that one moved but did not replace."""
    for left in _named_by_process(final, PARTIAL):
        process = left.name.rpartition("-")[2]
        busy = f"{final} is being written by process {process}, in {left}; wait until it is done, or end it"
        with locked(left, busy):
            shutil.rmtree(left)
        logger.warning("process %s ended before %s was complete; removing %s and starting again", process, final, left)
    for old in _named_by_process(final, REPLACED):
        with suppress(ValueError):  # of a folder that is no data set, and so not what a process has moved
            _check_target(old, overwrite=True)
            if final.exists():
                shutil.rmtree(old)
            else:
                old.rename(final)


def _named_by_process(final: Path, separator: str) -> list[Path]:
    found = final.parent.glob(f"{glob.escape(final.name)}{separator}*")
    return sorted(path for path in found if path.name.removeprefix(final.name + separator).isdecimal())


def _check_target(final: Path, overwrite: bool) -> None:
    if final.is_dir() and not any(final.iterdir()):
        return
    if not (final.exists() or final.is_symlink()):
        return
    if not overwrite:
        raise UserError(f"{final} exists and is not empty; choose another folder or remove it (prepare: --overwrite)")
    files = final.rglob("*") if final.is_dir() else ()
    check_replaceable(str(final), {str(path.relative_to(final)) for path in files if not path.is_dir()})


_FILES = re.compile(
    rf"{re.escape(SCHEMA_FILE)}|(train|validation|test)/\d+\.parquet|{VOCABULARY_FOLDER}/[^/]+\.parquet"
)


def check_replaceable(place: str, names: Collection[str]) -> None:
    """Raises ValueError unless all files in a folder are those of a data set.

    An interrupted upload to an object store lacks the schema, which is the last file.
    """
    partial = is_remote(place) and all(map(_FILES.fullmatch, names))
    if SCHEMA_FILE not in names and not partial:
        raise UserError(f"{place} is not a prepared data set, so it is not overwritten; choose another output folder")
    if others := sorted(name for name in names if not _FILES.fullmatch(name)):
        shown = ", ".join(others[:5]) + ", ..." * (len(others) > 5)
        raise UserError(
            f"{place} is not overwritten, since {len(others)} files in it are not a data set's: {shown}; move them"
            " or choose another output folder"
        )


def _rename(partial: Path, final: Path) -> None:
    """Renames a complete folder, replacing an existing data set."""
    if not final.exists():
        partial.rename(final)
        return
    old = final.with_name(f"{final.name}{REPLACED}{os.getpid()}")
    final.rename(old)
    try:
        partial.rename(final)
    except OSError:
        old.rename(final)
        raise
    old.rename(partial)  # which is removed next; a part of it, which a kill leaves, could not be restored


@contextmanager
def disk_errors(folder: Path) -> Iterator[None]:
    """Adds the disk, its free space and the bytes written to errors about a full disk."""
    try:
        yield
    except OSError as error:
        if error.errno not in NO_SPACE:
            raise
        free = shutil.disk_usage(folder.parent).free
        written = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
        raise OSError(
            error.errno,
            f"{'a file is too large' if error.errno == errno.EFBIG else 'no space left'} for {folder} on the disk of "
            f"{folder.parent}: {free:,} bytes are free after {written:,} were written. They are removed again; "
            f"{space_remedy(error)}, or choose an output folder on another disk",
        ) from error


def write_shard(path: Path, table: pa.Table, labels: Sequence[str]) -> Split:
    """Writes a Parquet file with the columns of `arrow_schema` atomically; equal samples give equal bytes.

    `labels` are the schema's `label_columns`. Returns the size of the shard.
    """
    # One chunk per column: chunk boundaries would otherwise change the pages of the file.
    table = table.combine_chunks()
    partial = path.with_name(f"{path.name}{PARTIAL}{os.getpid()}-{threading.get_ident()}")
    # LZ4 decodes up to three times as fast as zstd, at a third more bytes.
    pq.write_table(table, partial, row_group_size=table.num_rows, compression="lz4", use_dictionary=True)
    partial.replace(path)
    lists = [field.name for field in table.schema if pa.types.is_list(field.type)]
    lists = [name for name in lists if not name.endswith(WEIGHT_SUFFIX)]
    weight = table[SAMPLE_WEIGHT].to_numpy() if SAMPLE_WEIGHT in table.column_names else None
    return Split(
        table.num_rows,
        tuple(_positives(table[name].to_numpy(), weight) for name in labels),
        (table.num_rows,),
        {name: sum(len(chunk.flatten()) for chunk in table[name].chunks) for name in lists},
        None if weight is None else float(weight.sum(dtype=np.float64)),
    )


def _positives(label: np.ndarray, weight: np.ndarray | None) -> int | float:
    """Returns the sum of the known labels, float32 [R], times their weights; an int if it is a whole number."""
    weighted = np.nan_to_num(label, nan=0.0).astype(np.float64) * (1.0 if weight is None else weight)
    found = float(weighted.sum())
    return int(found) if found.is_integer() else found


def size_of_split(shards: Sequence[Split], schema: Schema, *, labelled: bool) -> Split:
    """Returns the size of a split from those of its shards, in order."""
    positives = [shard.positives or () for shard in shards]
    return Split(
        sum(shard.rows for shard in shards),
        tuple(sum(own[task] for own in positives) for task in range(len(schema.labels))) if labelled else None,
        tuple(shard.rows for shard in shards),
        {name: sum(shard.values[name] for shard in shards) for name in schema.lists},
        sum(shard.weight or 0.0 for shard in shards) if schema.sample_weights else None,
    )
