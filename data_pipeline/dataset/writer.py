"""Atomic writing of data sets and their Parquet shards."""

import glob
import logging
import os
import shutil
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from cowrec.data_pipeline.files import NO_SPACE, locked

from .schema import SAMPLE_WEIGHT, SCHEMA_FILE, WEIGHT_SUFFIX, Schema, Split
from .shards import arrow_schema, shard_path

SHARD_ROWS = 1 << 18
"""Samples of a Parquet file by default: about 20 MB for Criteo's 39 fields."""

PARTIAL, REPLACED = ".partial-", ".replaced-"
"""Separators between a folder's name and a process id: an incomplete folder, and one that is being replaced."""

logger = logging.getLogger(__name__)


@contextmanager
def new_folder(output: str | os.PathLike[str], *, overwrite: bool = False) -> Iterator[Path]:
    """Creates a folder that becomes `output` at the end of the block, or is removed on an exception.

    It is `<output>.partial-<process id>`, on the same disk. A killed process leaves one behind; the next call for the
    same `output` removes it with a warning.

    Raises:
        ValueError: `output` exists and is not empty (with `overwrite`: and is no data set), or another process is
            writing it.
        OSError: the disk is full; the message names the disk and its free space.
    """
    final = Path(output).absolute()
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
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _clear_leftovers(final: Path) -> None:
    """Removes the folders of killed processes, and restores a data set that one had moved but not replaced."""
    for left in sorted(final.parent.glob(f"{glob.escape(final.name)}{PARTIAL}*")):
        process = left.name.rpartition("-")[2]
        busy = f"{final} is being written by process {process}, in {left}; wait until it is done, or end it"
        with locked(left, busy):
            shutil.rmtree(left)
        logger.warning("process %s ended before %s was complete; removing %s and starting again", process, final, left)
    for old in sorted(final.parent.glob(f"{glob.escape(final.name)}{REPLACED}*")):
        if final.exists():
            shutil.rmtree(old)
        else:
            old.rename(final)


def _check_target(final: Path, overwrite: bool) -> None:
    if final.is_dir() and not any(final.iterdir()):
        return
    if not (final.exists() or final.is_symlink()):
        return
    if not overwrite:
        raise ValueError(f"{final} exists and is not empty; choose another folder or remove it (prepare: --overwrite)")
    if not (final / SCHEMA_FILE).is_file():
        raise ValueError(f"{final} is not a prepared data set, so it is not overwritten; choose another output folder")


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
    shutil.rmtree(old)


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
            f"no space left for {folder} on the disk of {folder.parent}: {free:,} bytes are free after {written:,} "
            "were written. They are removed again; free more space, or choose an output folder on another disk",
        ) from error


@dataclass(frozen=True)
class ShardSize:
    """Size of a shard: samples, samples with label 1 of each label, ids of each list field, sum of sample weights."""

    rows: int
    positives: tuple[int, ...]
    values: dict[str, int]
    weight: float | None = None


def write_shard(path: Path, table: pa.Table, labels: Sequence[str]) -> ShardSize:
    """Writes a Parquet file with the columns of `arrow_schema` atomically; equal samples give equal bytes.

    `labels` are the schema's `label_columns`.
    """
    # One chunk per column: chunk boundaries would otherwise change the pages of the file.
    table = table.combine_chunks()
    partial = path.with_name(f"{path.name}{PARTIAL}{os.getpid()}-{threading.get_ident()}")
    # LZ4 decodes up to three times as fast as zstd, at a third more bytes.
    pq.write_table(table, partial, row_group_size=table.num_rows, compression="lz4", use_dictionary=True)
    partial.replace(path)
    lists = [field.name for field in table.schema if pa.types.is_list(field.type)]
    lists = [name for name in lists if not name.endswith(WEIGHT_SUFFIX)]
    return ShardSize(
        table.num_rows,
        tuple(pc.sum(pc.equal(table[name], 1.0)).as_py() or 0 for name in labels),
        {name: sum(len(chunk.flatten()) for chunk in table[name].chunks) for name in lists},
        float(table[SAMPLE_WEIGHT].to_numpy().sum(dtype=np.float64)) if SAMPLE_WEIGHT in table.column_names else None,
    )


def size_of_split(shards: Sequence[ShardSize], schema: Schema, *, labelled: bool) -> Split:
    """Sums the sizes of shards, in order, to the size of a split; uses only the columns of the schema."""
    lists = [field.name for field in schema.sparse if field.kind != "categorical"]
    positives = tuple(sum(each.positives[task] for each in shards) for task in range(len(schema.labels)))
    return Split(
        sum(each.rows for each in shards),
        positives if labelled else None,
        tuple(each.rows for each in shards),
        {name: sum(each.values[name] for each in shards) for name in lists},
        sum(each.weight or 0.0 for each in shards) if schema.sample_weights else None,
    )


class ShardWriter:
    """Collects the samples of one split and writes them as Parquet files of `shard_rows` samples.

    Args:
        folder: the data set's folder.
        split: name of the split and of its sub-folder.
        schema: dense and sparse fields; its splits are not used.
        shard_rows: samples of each file; the last one may have fewer.
        labelled: False if labels are NaN.
    """

    def __init__(self, folder: Path, split: str, schema: Schema, shard_rows: int, *, labelled: bool = True) -> None:
        self._folder, self._name, self._shard_rows, self._labelled = folder, split, shard_rows, labelled
        self._schema, self._columns = schema, arrow_schema(schema)
        self._waiting: list[pa.Table] = []
        self._waiting_rows = 0
        self._shards: list[ShardSize] = []
        (folder / split).mkdir()

    def write(self, table: pa.Table) -> None:
        """Adds samples; the table has the columns of `arrow_schema`, in any order."""
        table = table.select(self._columns.names).cast(self._columns)
        self._waiting.append(table)
        self._waiting_rows += table.num_rows
        if self._waiting_rows >= self._shard_rows:
            table = pa.concat_tables(self._waiting)
            full = table.num_rows // self._shard_rows * self._shard_rows
            for start in range(0, full, self._shard_rows):
                self._write_shard(table.slice(start, self._shard_rows))
            self._waiting = [table.slice(full)]
            self._waiting_rows = table.num_rows - full

    def close(self) -> Split:
        """Writes the remaining samples. Returns the size of the split."""
        if self._waiting_rows:
            self._write_shard(pa.concat_tables(self._waiting))
        self._waiting, self._waiting_rows = [], 0
        return size_of_split(self._shards, self._schema, labelled=self._labelled)

    def _write_shard(self, table: pa.Table) -> None:
        path = shard_path(self._folder, self._name, len(self._shards))
        self._shards.append(write_shard(path, table, self._schema.label_columns))
