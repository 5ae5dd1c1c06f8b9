"""A data set of numbered samples, and readers of it."""

from dataclasses import replace

import numpy as np
import pyarrow as pa

from cowrec.data_pipeline import DenseField, Reader, Schema, SparseField, Split
from cowrec.data_pipeline.dataset.shards import arrow_schema, shard_path, size_of_split, write_shard


def write_numbered(folder, rows, shard_rows, *, sizes=None, lists=False, labelled=True, columns_of_samples=False):
    """Writes samples r with label r % 2, dense value r and id r; with lists, r % 3 ids, all of them r.

    With columns of samples also a second label, unknown for each third sample, else r % 5 == 0, the weight r / 2, and
    the number 10 r and the kept text "r" of the source. `sizes` are those of the shards in place of `shard_rows`.
    """
    sparse = [SparseField("id", max(rows, 1) + 2)]
    columns = {
        "label": pa.array(np.arange(rows) % 2 if labelled else np.full(rows, np.nan), pa.float32()),
        "number": pa.array(np.arange(rows), pa.float32()),
        "id": pa.array(np.arange(rows), pa.int32()),
    }
    if lists:
        sparse += [SparseField("list", rows + 2, "multi", pooling="mean"), SparseField("pair", rows + 2, "weighted")]
        bags = [[row] * (row % 3) for row in range(rows)]
        columns["list"] = columns["pair"] = pa.array(bags, pa.list_(pa.int32()))
        columns["pair__weight"] = pa.array(bags, pa.list_(pa.float32()))
    schema = Schema("test", (DenseField("number"),), tuple(sparse), {})
    if columns_of_samples:
        schema = replace(schema, labels=("odd", "fifth"), sample_weights=True, numbered=True, kept=("name",))
        columns["label_odd"] = columns.pop("label")
        fifth = np.where(np.arange(rows) % 3 == 2, np.nan, np.arange(rows) % 5 == 0)
        columns["label_fifth"] = pa.array(fifth, pa.float32())
        columns["sample_weight"] = pa.array(np.arange(rows) / 2, pa.float32())
        columns["sample_number"] = pa.array(10 * np.arange(rows))
        columns["kept_name"] = pa.array([str(row) for row in range(rows)])
    (folder / "train").mkdir(parents=True)
    table, shards = pa.table(columns).select(arrow_schema(schema).names).cast(arrow_schema(schema)), []
    sizes = [min(shard_rows, rows - first) for first in range(0, rows, shard_rows)] if sizes is None else sizes
    for number, size in enumerate(sizes):
        first = sum(sizes[:number])
        path = shard_path(folder, "train", number)
        shards.append(write_shard(path, table.slice(first, size), schema.label_columns))
    split = size_of_split(shards, schema, labelled=labelled)
    replace(schema, splits={"train": split, "test": Split()}).save(folder)
    return folder


def make_reader(folder, keyed=False, **options):
    """Opens a reader; a keyed one takes the order of a reader for CUDA, and the same windows of it."""
    reader = Reader(folder, "train", **options)
    reader._keyed_order = keyed
    return reader


def ids(reader, epoch=0, start_step=0):
    return [batch.sparse["id"].values().tolist() for batch in reader.epoch(epoch, start_step)]


def flat(lists):
    return [item for items in lists for item in items]
