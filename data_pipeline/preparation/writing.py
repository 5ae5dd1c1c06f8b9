"""The pass of `prepare` that encodes all samples and writes the shards."""

from collections import Counter
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa

from ..dataset.schema import Schema, Split
from ..dataset.shards import PARTIAL, arrow_schema, shard_path, size_of_split, write_shard
from ..encoding.encoder import Encoder
from ..raw.inputs import Block, Partition, Report
from ..raw.layouts import Layout
from ..raw.parsing import BadRow, BadRowLedger, parse
from .doubts import UNLABELLED, Doubts, doubts_of, report, report_order
from .engines import Engine
from .splits import SPLITS, TRAIN, SplitRule


@dataclass(frozen=True)
class WritePlan:
    """Settings of the pass; all workers can access `folder`, and `schema` has no splits yet."""

    folder: Path
    layout: Layout
    encoder: Encoder
    split: SplitRule
    schema: Schema


@dataclass(frozen=True)
class Written:
    """The sizes of a partition's shards by split, its bad rows, and what is suspicious about its values."""

    shards: dict[str, Split]
    bad: list[BadRow]
    doubts: Doubts


def write_splits(
    engine: Engine, partitions: Sequence[Partition], plan: WritePlan, ledger: BadRowLedger, progress: Report
) -> dict[str, Split]:
    """Encodes all partitions into `plan.folder`, and returns the size of each split.

    Raises ValueError at a bad row that may not be skipped, and OSError if the disk is full.
    """
    shards: dict[str, list[Split]] = {name: [] for name in plan.split.names}
    doubts: Doubts = Counter()
    for name in shards:
        (plan.folder / name).mkdir()
    with closing(engine.map(write_partition, plan, partitions)) as results:
        for partition, written in zip(partitions, results, strict=True):
            ledger.add(written.bad)
            doubts += written.doubts
            for name, size in written.shards.items():
                # Partitions without samples of a split leave no gap; results come in order, so the name is free.
                final = shard_path(plan.folder, name, len(shards[name]))
                shard_path(plan.folder, name, partition.number).rename(final)
                shards[name].append(size)
            progress(partition.file_bytes)
    report(doubts, plan.layout)
    report_order(shards[SPLITS[TRAIN]], plan.layout.labels)
    for unfinished in plan.folder.glob(f"*/*{PARTIAL}*"):  # of a worker that was lost
        unfinished.unlink()
    rows = sum(size.rows for sizes in shards.values() for size in sizes)
    labelled = any(doubts[label.column, UNLABELLED] < rows for label in plan.layout.found_labels)
    return {name: size_of_split(sizes, plan.schema, labelled=labelled) for name, sizes in shards.items()}


def write_partition(plan: WritePlan, number: int, blocks: Sequence[Block]) -> Written:
    """Writes shard `number` of each split that the partition has samples of."""
    columns = arrow_schema(plan.schema)
    parts: dict[str, list[pa.Table]] = {name: [] for name in SPLITS}
    bad: list[BadRow] = []
    doubts: Doubts = Counter()
    for block in blocks:
        parsed = parse(block, plan.layout)
        bad += parsed.bad
        table = plan.encoder.encode(parsed).select(columns.names).cast(columns)
        doubts += doubts_of(plan.encoder, parsed, table, plan.layout)
        splits = plan.split.split_of(parsed)
        for index, name in enumerate(SPLITS):
            chosen = splits == index
            if chosen.any():
                parts[name].append(table if chosen.all() else table.take(pa.array(np.flatnonzero(chosen))))
    labels = plan.schema.label_columns
    shards = {
        name: write_shard(shard_path(plan.folder, name, number), pa.concat_tables(tables), labels)
        for name, tables in parts.items()
        if tables
    }
    return Written(shards, bad, doubts)


def prepared_schema(layout: Layout, encoder: Encoder) -> Schema:
    """Returns the schema of a data set without splits."""
    return Schema(
        layout.name,
        encoder.dense,
        encoder.sparse,
        {},
        timed=layout.has_times,
        labels=tuple(label.name for label in layout.labels),
        sample_weights=layout.has_weights,
        numbered=True,
        kept=layout.found_keep,
    )
