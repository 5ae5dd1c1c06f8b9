"""The passes of `prepare`: one counts times, one fits transforms and vocabularies, and one encodes and writes samples.

Each pass works on every partition by itself; results are merged in order.
"""

from collections import Counter
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pyarrow as pa

from cowrec.errors import UserError

from ..dataset.schema import RESERVED_ROWS, DenseTransform, Encoding, Schema, SparseField, Split
from ..dataset.shards import PARTIAL, arrow_schema, flat_ids, shard_path, size_of_split, write_shard
from ..encoding.encoder import Encoder, sparse_field, texts_of
from ..encoding.numbers import NumberStatistics, ValueCounts, fitted
from ..encoding.vocabulary import Vocabulary, VocabularyCounter, counted_values
from ..parallel import ordered_map
from ..raw.inputs import Block, Partition, Report
from ..raw.layouts import Layout, RawField
from ..raw.parsing import BadRow, BadRowLedger, counts_text, parse
from .config import PrepareConfig
from .doubts import UNLABELLED, Doubts, doubts_of, report, report_blanks, report_markers, report_order
from .engines import Engine
from .splits import MOST_TIMES, SPLITS, TRAIN, SplitRule, TimeOrder


def count_times(
    engine: Engine, partitions: Sequence[Partition], layout: Layout, ledger: BadRowLedger, progress: Report
) -> ValueCounts:
    """Counts the times of all samples that are not bad, in a pass over the files.

    Raises ValueError at a bad row that may not be skipped, or if no sample has a time.
    """
    times = ValueCounts(MOST_TIMES)
    with closing(engine.map(_partition_times, layout, partitions)) as results:
        for partition, (counted, bad) in zip(partitions, results, strict=True):
            ledger.add(bad)
            times.merge(counted)
            progress(partition.file_bytes)
    if not times.total:
        bad_rows = f"{ledger.by_path.total():,} samples are bad rows: {counts_text(ledger.by_reason)}"
        raise UserError(f'split = "time": no sample has a time that can be read; all {bad_rows}')
    return times


def _partition_times(layout: Layout, number: int, blocks: Sequence[Block]) -> tuple[ValueCounts, list[BadRow]]:
    times, bad = ValueCounts(MOST_TIMES), list[BadRow]()
    for block in blocks:
        parsed = parse(block, layout)
        assert parsed.time is not None
        times.add(parsed.time)
        bad += parsed.bad
    return times, bad


@dataclass(frozen=True)
class FitSettings:
    """Settings of the pass that fits."""

    layout: Layout
    config: PrepareConfig
    split: SplitRule


@dataclass
class PartitionStatistics:
    """Statistics of a partition: training samples, also by label and class, their weight, bad rows, and fields."""

    train_samples: int = 0
    classes: Counter[tuple[str, float]] = field(default_factory=Counter)
    weight: float = 0.0
    order: TimeOrder = field(default_factory=TimeOrder)
    bad: list[BadRow] = field(default_factory=list)
    numbers: dict[str, NumberStatistics] = field(default_factory=dict)
    counted: dict[str, pa.Table] = field(default_factory=dict)


def fit(
    engine: Engine, partitions: Sequence[Partition], settings: FitSettings, ledger: BadRowLedger, progress: Report
) -> Encoder:
    """Fits dense transforms and vocabularies on all partitions.

    Raises ValueError at a bad row that may not be skipped, or if a model cannot learn from the training samples.
    """
    layout, config = settings.layout, settings.config
    sparse = sparse_fields(layout, config)
    numbers = _statistics(layout, config)
    counters = {name: VocabularyCounter() for name in _counted(sparse)}
    total = PartitionStatistics()
    with closing(engine.map(measure, settings, partitions)) as results:
        for partition, found in zip(partitions, results, strict=True):
            ledger.add(found.bad)
            total.train_samples += found.train_samples
            total.classes += found.classes
            total.weight += found.weight
            total.order.merge(found.order)
            for name, statistics in found.numbers.items():
                numbers[name].merge(statistics)
            for name, counted in found.counted.items():
                counters[name].add(counted)
            progress(partition.file_bytes)
    _check_training(total, layout, ledger)
    total.order.report_dates()
    if settings.split.kind == "order":
        total.order.report()
    dense = tuple(number for raw in layout.fields for number in fitted(raw, _transform(raw, config), numbers))
    by_name = {raw.name: raw for raw in layout.fields}
    sources = {ids.name: by_name[ids.source] for ids in sparse}

    def finished(name: str) -> Vocabulary:
        raw = sources[name]
        return counters[name].finish(raw.min_count or config.min_count, raw.max_ids or config.max_ids)

    vocabularies = dict(zip(counters, ordered_map(finished, counters), strict=True))
    if layout.name == "tabular":
        report_markers(vocabularies)
        report_blanks(vocabularies)
    return Encoder(dense, tuple(_sized(ids, vocabularies, config) for ids in sparse), vocabularies)


def _check_training(total: PartitionStatistics, layout: Layout, ledger: BadRowLedger) -> None:
    bad = f"; {ledger.by_path.total():,} bad rows were left out" if ledger.by_path else ""
    if not total.train_samples:
        raise UserError(
            f"no training sample: all samples are in other splits or bad rows{bad}; lower test_fraction or"
            " test_rows, or choose a later test_from"
        )
    for label in layout.labels:
        negative, positive = total.classes[label.name, 0.0], total.classes[label.name, 1.0]
        if not (negative and positive):
            raise UserError(
                f"label {label.column!r}: the training samples are of one class, {positive:,} positive and"
                f" {negative:,} negative{bad}; nothing can be learned from them. Check the label's column and, in the"
                " schema file, its positive values or threshold"
            )
    if not total.weight:
        raise UserError(f"column {layout.weight!r}: all {total.train_samples:,} training samples have weight 0")


def measure(settings: FitSettings, number: int, blocks: Sequence[Block]) -> PartitionStatistics:
    """Computes the statistics of one partition."""
    found = PartitionStatistics(numbers=_statistics(settings.layout, settings.config))
    sparse = sparse_fields(settings.layout, settings.config)
    texts: dict[str, list[pa.Array]] = {name: [] for name in _counted(sparse)}
    numbers: dict[str, list[np.ndarray]] = {name: [np.zeros(0)] for name in found.numbers}
    for block in blocks:
        parsed = parse(block, settings.layout)
        splits = settings.split.split_of(parsed)
        train = splits == TRAIN
        found.order.add(parsed.time, splits)
        found.bad += parsed.bad
        found.train_samples += int(train.sum())
        found.weight += float(
            train.sum() if parsed.sample_weights is None else parsed.sample_weights[train].sum(dtype=np.float64)
        )
        for name, label in parsed.labels.items():
            own = label[train]  # of rates, most are of both classes
            found.classes += Counter({(name, 0.0): int((own < 1).sum()), (name, 1.0): int((own > 0).sum())})
        fitted_on = train if settings.config.fit_on == "train" else np.ones_like(train)
        for name, values in parsed.numbers.items():
            numbers[name].append(values[fitted_on])
        for ids in sparse if texts else ():
            texts[ids.vocabulary].append(flat_ids(texts_of(ids, parsed).filter(pa.array(train))))
    for name, parts in numbers.items():
        found.numbers[name].add(np.concatenate(parts))
    found.counted = {name: counted_values(pa.chunked_array(text)) for name, text in texts.items()}
    return found


def _counted(sparse: Sequence[SparseField]) -> list[str]:
    return list(dict.fromkeys(ids.vocabulary for ids in sparse if ids.encoding == "vocabulary"))


def sparse_fields(layout: Layout, config: PrepareConfig) -> list[SparseField]:
    """Returns the sparse fields of a layout in order, before their tables are sized; buckets of numbers come first."""
    encoding: Encoding = "hash" if config.hash_buckets else "raw" if config.raw_ids else "vocabulary"
    buckets = [raw for raw in layout.fields if raw.numbers and _transform(raw, config) == "buckets"]
    of_ids = [raw for raw in layout.fields if not raw.numbers]
    for raw in of_ids:
        config.check_vocabulary(f"field {raw.name!r}: ", 0, raw.max_ids)
    return [sparse_field(raw, encoding) for raw in (*buckets, *of_ids)]


def _transform(raw: RawField, config: PrepareConfig) -> DenseTransform:
    return raw.transform or config.dense


def _statistics(layout: Layout, config: PrepareConfig) -> dict[str, NumberStatistics]:
    return {
        number: NumberStatistics(counts=ValueCounts() if _transform(raw, config) == "quantile" else None)
        for raw in layout.fields
        for number in raw.numbers
    }


def _sized(ids: SparseField, vocabularies: dict[str, Vocabulary], config: PrepareConfig) -> SparseField:
    if ids.encoding == "raw":
        return replace(ids, num_embeddings=0)
    own = config.hash_buckets if ids.encoding == "hash" else len(vocabularies[ids.vocabulary])
    return replace(ids, num_embeddings=own + RESERVED_ROWS)


@dataclass(frozen=True)
class WriteSettings:
    """Settings of the pass that writes; all workers can access `folder`, and `schema` has no splits yet."""

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
    engine: Engine, partitions: Sequence[Partition], settings: WriteSettings, ledger: BadRowLedger, progress: Report
) -> dict[str, Split]:
    """Encodes all partitions into `settings.folder`, and returns the size of each split.

    Raises ValueError at a bad row that may not be skipped, and OSError if the disk is full.
    """
    shards: dict[str, list[Split]] = {name: [] for name in settings.split.names}
    doubts: Doubts = Counter()
    for name in shards:
        (settings.folder / name).mkdir()
    with closing(engine.map(write_partition, settings, partitions)) as results:
        for partition, written in zip(partitions, results, strict=True):
            ledger.add(written.bad)
            doubts += written.doubts
            for name, size in written.shards.items():
                # Partitions without samples of a split leave no gap; results come in order, so the name is free.
                final = shard_path(settings.folder, name, len(shards[name]))
                shard_path(settings.folder, name, partition.number).rename(final)
                shards[name].append(size)
            progress(partition.file_bytes)
    report(doubts, settings.layout)
    report_order(shards[SPLITS[TRAIN]], settings.layout.labels)
    for unfinished in settings.folder.glob(f"*/*{PARTIAL}*"):  # of a worker that was lost
        unfinished.unlink()
    rows = sum(size.rows for sizes in shards.values() for size in sizes)
    labelled = any(doubts[label.column, UNLABELLED] < rows for label in settings.layout.found_labels)
    return {name: size_of_split(sizes, settings.schema, labelled=labelled) for name, sizes in shards.items()}


def write_partition(settings: WriteSettings, number: int, blocks: Sequence[Block]) -> Written:
    """Writes shard `number` of each split that the partition has samples of."""
    columns = arrow_schema(settings.schema)
    parts: dict[str, list[pa.Table]] = {name: [] for name in SPLITS}
    bad: list[BadRow] = []
    doubts: Doubts = Counter()
    for block in blocks:
        parsed = parse(block, settings.layout)
        bad += parsed.bad
        table = settings.encoder.encode(parsed).select(columns.names).cast(columns)
        doubts += doubts_of(settings.encoder, parsed, table, settings.layout)
        splits = settings.split.split_of(parsed)
        for index, name in enumerate(SPLITS):
            chosen = splits == index
            if chosen.any():
                parts[name].append(table if chosen.all() else table.take(pa.array(np.flatnonzero(chosen))))
    labels = settings.schema.label_columns
    shards = {
        name: write_shard(shard_path(settings.folder, name, number), pa.concat_tables(tables), labels)
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
        timed=layout.time is not None,
        labels=tuple(label.name for label in layout.labels),
        sample_weights=layout.has_weights,
        numbered=True,
        kept=layout.keep,
    )
