"""Writing a data set so that it appears whole or not at all."""

import errno
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

from cowrec.data_pipeline.files import locked

from .schema import LABEL, SCHEMA_FILE, WEIGHT_SUFFIX, Schema, Split
from .shards import arrow_schema, shard_path

SHARD_ROWS = 1 << 18
"""Rows of a Parquet file by default: some 20 MB for Criteo's 39 fields."""

PARTIAL, REPLACED = ".partial-", ".replaced-"
"""Between a folder's name and a process id: one that is not done yet, one that is being replaced."""

logger = logging.getLogger(__name__)

NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@contextmanager
def new_folder(output: str | os.PathLike[str], *, overwrite: bool = False) -> Iterator[Path]:
    """A folder to fill, which becomes `output` when the block ends well and vanishes when it does not.

    It lies beside `output`, on the same disk, as `<output>.partial-<process id>`. A killed process leaves one behind,
    which the next one that makes `output` removes, with a warning: work begins anew.

    Raises:
        ValueError: `output` exists and is not empty; with `overwrite`, only where it holds no data set. Or another
            process is making it.
        OSError: the disk is full: which one, and how much was free.
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
        _put_in_place(partial, final)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _clear_leftovers(final: Path) -> None:
    """Removes what killed processes left beside `final`, and puts back what one had moved away but not replaced."""
    for left in sorted(final.parent.glob(f"{glob.escape(final.name)}{PARTIAL}*")):
        process = left.name.rpartition("-")[2]
        busy = f"{final} is being made by process {process}, in {left}; wait until it is done, or end it"
        with locked(left, busy):
            shutil.rmtree(left)
        logger.warning("process %s ended before %s was done; its %s is removed, starting anew", process, final, left)
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


def _put_in_place(partial: Path, final: Path) -> None:
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
def disk_errors(place: Path) -> Iterator[None]:
    """Turns "no space left" into a message that says on which disk, how much was free and how much had been needed."""
    try:
        yield
    except OSError as error:
        if error.errno not in NO_SPACE:
            raise
        free = shutil.disk_usage(place.parent).free
        written = sum(path.stat().st_size for path in place.rglob("*") if path.is_file())
        raise OSError(
            error.errno,
            f"no room left for {place} on the disk of {place.parent}: {free:,} bytes are free after {written:,} were "
            "written. They are removed again; free more space than that, or choose an output folder on another disk",
        ) from error


@dataclass(frozen=True)
class ShardSize:
    """What `Split` sums up of a shard: rows, those with label 1 (None where labels are NaN), ids of each list field."""

    rows: int
    positives: int | None
    values: dict[str, int]


def write_shard(path: Path, table: pa.Table, labelled: bool) -> ShardSize:
    """Writes a Parquet file of the columns of `arrow_schema`, whole or not at all; equal rows make equal bytes."""
    # One chunk per column: how rows came together would show in the file's pages.
    table = table.combine_chunks()
    partial = path.with_name(f"{path.name}.partial-{os.getpid()}-{threading.get_ident()}")
    # LZ4, because the reader decodes it up to three times as fast as zstd, for a third more bytes.
    pq.write_table(table, partial, row_group_size=table.num_rows, compression="lz4", use_dictionary=True)
    partial.replace(path)
    lists = [field.name for field in table.schema if pa.types.is_list(field.type)]
    lists = [name for name in lists if not name.endswith(WEIGHT_SUFFIX)]
    return ShardSize(
        table.num_rows,
        int(np.rint(pc.sum(table[LABEL]).as_py())) if labelled else None,
        {name: sum(len(chunk.flatten()) for chunk in table[name].chunks) for name in lists},
    )


def size_of_split(shards: Sequence[ShardSize], schema: Schema, *, labelled: bool) -> Split:
    """The split that shards make up, in their order; of the schema the fields count."""
    lists = [field.name for field in schema.sparse if field.kind != "categorical"]
    return Split(
        sum(each.rows for each in shards),
        sum(each.positives or 0 for each in shards) if labelled else None,
        tuple(each.rows for each in shards),
        {name: sum(each.values[name] for each in shards) for name in lists},
    )


class ShardWriter:
    """Collects rows of one split and writes them as Parquet files of `shard_rows` rows.

    Args:
        folder: the data set's folder.
        split: name of the split, and of its sub-folder.
        schema: dense and sparse fields (its splits are not looked at).
        shard_rows: rows of each file; the last one may have fewer.
        labelled: False where labels are NaN.
    """

    def __init__(self, folder: Path, split: str, schema: Schema, shard_rows: int, *, labelled: bool = True) -> None:
        self._folder, self._name, self._shard_rows, self._labelled = folder, split, shard_rows, labelled
        self._schema, self._columns = schema, arrow_schema(schema)
        self._waiting: list[pa.Table] = []
        self._waiting_rows = 0
        self._shards: list[ShardSize] = []
        (folder / split).mkdir()

    def write(self, table: pa.Table) -> None:
        """Adds rows; the table has the columns of `arrow_schema`, in any order."""
        table = table.select(self._columns.names).cast(self._columns)
        self._waiting.append(table)
        self._waiting_rows += table.num_rows
        if self._waiting_rows >= self._shard_rows:
            table = pa.concat_tables(self._waiting)
            whole = table.num_rows // self._shard_rows * self._shard_rows
            for start in range(0, whole, self._shard_rows):
                self._write_shard(table.slice(start, self._shard_rows))
            self._waiting = [table.slice(whole)]
            self._waiting_rows = table.num_rows - whole

    def close(self) -> Split:
        """Writes what is left. Returns the split's size."""
        if self._waiting_rows:
            self._write_shard(pa.concat_tables(self._waiting))
        self._waiting, self._waiting_rows = [], 0
        return size_of_split(self._shards, self._schema, labelled=self._labelled)

    def _write_shard(self, table: pa.Table) -> None:
        path = shard_path(self._folder, self._name, len(self._shards))
        self._shards.append(write_shard(path, table, self._labelled))
