"""The second pass of `prepare`: writes each partition as a shard of every split that it has samples of."""

from collections import Counter
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa

from cowrec.data_pipeline.dataset.schema import Schema, Split
from cowrec.data_pipeline.dataset.shards import arrow_schema, shard_path
from cowrec.data_pipeline.dataset.writer import PARTIAL, ShardSize, size_of_split, write_shard
from cowrec.data_pipeline.encoding.encoder import Encoder
from cowrec.data_pipeline.raw.bad_rows import BadRow, BadRowLedger
from cowrec.data_pipeline.raw.layouts import Layout
from cowrec.data_pipeline.raw.parsing import parse
from cowrec.data_pipeline.raw_files.segments import Block, Partition, Report

from .engine import Engine
from .id_doubts import Doubts, bounded_numbers, twin_ids, warn_of
from .splitting import SPLITS, SplitRule


@dataclass(frozen=True)
class WritePlan:
    """Settings of the pass, shared by all partitions; all workers can access `folder`."""

    folder: Path
    layout: Layout
    encoder: Encoder
    split: SplitRule


@dataclass(frozen=True)
class Written:
    """Shards written for a partition, by split, its bad rows, and what is suspicious about its values."""

    shards: dict[str, ShardSize]
    bad: list[BadRow]
    doubts: Doubts


def write_splits(
    engine: Engine, partitions: Sequence[Partition], plan: WritePlan, ledger: BadRowLedger, report: Report
) -> dict[str, Split]:
    """Encodes all partitions into `plan.folder`. Returns the size of each split.

    Raises:
        ValueError: a bad row that may not be skipped. OSError: the disk is full.
    """
    shards: dict[str, list[ShardSize]] = {name: [] for name in plan.split.names}
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
            report(partition.file_bytes)
    warn_of(doubts)
    for unfinished in plan.folder.glob(f"*/*{PARTIAL}*"):  # of a worker that was lost
        unfinished.unlink()
    return {
        name: size_of_split(sizes, _fields(plan), labelled=_labelled(plan.layout)) for name, sizes in shards.items()
    }


def write_partition(plan: WritePlan, number: int, blocks: Sequence[Block]) -> Written:
    """Writes shard `number` of each split that the partition has samples of, each file atomically."""
    columns = arrow_schema(_fields(plan))
    parts: dict[str, list[pa.Table]] = {name: [] for name in SPLITS}
    bad: list[BadRow] = []
    doubts: Doubts = Counter()
    for block in blocks:
        parsed = parse(block, plan.layout)
        bad += parsed.bad
        table = plan.encoder.encode(parsed).select(columns.names).cast(columns)
        doubts += parsed.doubts + twin_ids(plan.encoder, parsed, table) + bounded_numbers(plan.encoder, table)
        splits = plan.split.split_of(parsed)
        for index, name in enumerate(SPLITS):
            chosen = splits == index
            if chosen.any():
                parts[name].append(table if chosen.all() else table.take(pa.array(np.flatnonzero(chosen))))
    return Written(
        {
            name: write_shard(
                shard_path(plan.folder, name, number), pa.concat_tables(tables), _fields(plan).label_columns
            )
            for name, tables in parts.items()
            if tables
        },
        bad,
        doubts,
    )


def prepared_schema(layout: Layout, encoder: Encoder) -> Schema:
    """Returns the schema of a data set without splits."""
    return Schema(
        layout.name,
        encoder.dense,
        encoder.sparse,
        {},
        timed=bool(layout.time),
        labels=tuple(label.name for label in layout.labels),
        sample_weights=layout.has_weights,
        numbered=True,
        kept=layout.found_keep,
    )


def _fields(plan: WritePlan) -> Schema:
    return prepared_schema(plan.layout, plan.encoder)


def _labelled(layout: Layout) -> bool:
    return bool(layout.found_labels)
