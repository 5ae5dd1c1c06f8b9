"""The passes of `prepare` over the partitions: one fits transforms and vocabularies, one writes the shards."""

import json
import logging
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from cowrec.errors import UserError

from ..dataset.schema import (
    BUCKET_SUFFIX,
    OUT_OF_VOCABULARY,
    RESERVED_ROWS,
    WINDOW_ROWS,
    DenseTransform,
    Encoding,
    Schema,
    SparseField,
    SparseKind,
    Split,
)
from ..dataset.shards import PARTIAL, ShardSize, arrow_schema, shard_path, size_of_split, write_shard
from ..encoding.encoder import Encoder
from ..encoding.numbers import NumberStatistics, ValueCounts, bucket_ids, count_bounded, fitted
from ..encoding.vocabulary import Vocabulary, VocabularyCounter, counted_values
from ..parallel import ordered_map
from ..raw.bad_rows import BadRow, BadRowLedger
from ..raw.columns import NEGATIVE, WEIGHTLESS
from ..raw.inputs import Block, Partition, Report
from ..raw.layouts import Layout, RawField, RawLabel
from ..raw.parsing import Parsed, parse
from ..raw.values import FRACTIONS, LOOKS_MISSING, ROUNDED, marker_numbers
from .config import PrepareConfig
from .engines import Engine
from .splits import SPLITS, TRAIN, SplitRule, TimeOrder

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class FitPlan:
    """Settings of the pass, shared by all partitions."""

    layout: Layout
    config: PrepareConfig
    split: SplitRule


@dataclass
class PartitionStatistics:
    """Statistics of a partition: training samples, also by label and class, their weight, bad rows; of each field."""

    train_samples: int = 0
    classes: Counter[tuple[str, float]] = field(default_factory=Counter)
    weight: float = 0.0
    order: TimeOrder = field(default_factory=TimeOrder)
    bad: list[BadRow] = field(default_factory=list)
    numbers: dict[str, NumberStatistics] = field(default_factory=dict)
    counted: dict[str, pa.Table] = field(default_factory=dict)


def fit(
    engine: Engine, partitions: Sequence[Partition], plan: FitPlan, ledger: BadRowLedger, report: Report
) -> Encoder:
    """Fits dense transforms and vocabularies on all partitions.

    Raises:
        ValueError: a bad row that may not be skipped, or no training sample.
    """
    layout, config = plan.layout, plan.config
    numeric = [each for each in layout.fields if each.kind == "numeric"]
    sparse = sparse_fields(layout, config)
    numbers = _statistics(layout, config)
    counters = {each.vocabulary: VocabularyCounter() for each in sparse if each.encoding == "vocabulary"}
    total = PartitionStatistics()
    with closing(engine.map(measure, plan, partitions)) as results:
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
            report(partition.file_bytes)
    _check_training(total, layout, ledger)
    total.order.report_dates()
    if plan.split.kind == "order":
        total.order.report()
    dense = tuple(
        field for each in numeric for field in fitted(each.name, _transform(each, config), numbers[each.name])
    )
    by_name = {each.name: each for each in layout.fields}

    def finished(each: SparseField) -> Vocabulary:
        raw = by_name[each.source]
        return counters[each.name].finish(raw.min_count or config.min_count, raw.max_ids or config.max_ids)

    counted_fields = [each for each in sparse if each.name in counters]
    vocabularies = {
        each.name: vocabulary
        for each, vocabulary in zip(counted_fields, ordered_map(finished, counted_fields), strict=True)
    }
    _report_markers(vocabularies, layout)
    return Encoder(dense, tuple(_sized(each, vocabularies, config) for each in sparse), vocabularies)


def _check_training(total: PartitionStatistics, layout: Layout, ledger: BadRowLedger) -> None:
    """Raises ValueError if a model cannot learn from the training samples."""
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


def measure(plan: FitPlan, number: int, blocks: Sequence[Block]) -> PartitionStatistics:
    """Computes the statistics of one partition."""
    found = PartitionStatistics(numbers=_statistics(plan.layout, plan.config))
    counting = [each for each in sparse_fields(plan.layout, plan.config) if each.encoding == "vocabulary"]
    texts: dict[str, list[pa.Array]] = {each.vocabulary: [] for each in counting}
    numbers: dict[str, list[np.ndarray]] = {name: [np.zeros(0)] for name in found.numbers}
    for block in blocks:
        parsed = parse(block, plan.layout)
        splits = plan.split.split_of(parsed)
        train = splits == TRAIN
        found.order.add(parsed.time, splits)
        found.bad += parsed.bad
        found.train_samples += int(train.sum())
        found.weight += float(
            train.sum() if parsed.sample_weights is None else parsed.sample_weights[train].sum(dtype=np.float64)
        )
        for name, label in parsed.labels.items():
            found.classes += Counter({(name, cls): int((label[train] == cls).sum()) for cls in (0.0, 1.0)})
        fitted_on = train if plan.config.fit_on == "train" else np.ones_like(train)
        for name, values in parsed.numbers.items():
            numbers[name].append(values[fitted_on])
        for each in counting:
            texts[each.vocabulary].append(_training_ids(each, parsed, pa.array(train)))
    for name, parts in numbers.items():
        found.numbers[name].add(np.concatenate(parts))
    found.counted = {name: counted_values(pa.chunked_array(text)) for name, text in texts.items()}
    return found


def sparse_fields(layout: Layout, config: PrepareConfig) -> list[SparseField]:
    """Returns the sparse fields of a layout in order, before their tables are sized; buckets of numbers come first."""
    numeric = [each for each in layout.fields if each.kind == "numeric"]
    fields = [_sparse(each, "categorical", config) for each in numeric if _transform(each, config) == "buckets"]
    return fields + [_sparse(each, each.kind, config) for each in layout.fields if each.kind != "numeric"]


def _transform(raw: RawField, config: PrepareConfig) -> DenseTransform:
    return raw.transform or config.dense


def _statistics(layout: Layout, config: PrepareConfig) -> dict[str, NumberStatistics]:
    return {
        each.name: NumberStatistics(counts=ValueCounts() if _transform(each, config) == "quantile" else None)
        for each in layout.fields
        if each.kind == "numeric"
    }


def _report_markers(vocabularies: dict[str, Vocabulary], layout: Layout) -> None:
    """Warns of ids that programs write for a missing value, and of truth values that are written in several ways."""
    for name, vocabulary in vocabularies.items() if layout.name == "tabular" else ():
        truths = _present(vocabulary, ("true", "false"))
        if len({form for form in FORMS for text in truths if form(text) == text}) > 1:
            logger.warning(
                "field %r has the ids %s, truth values that are written in several ways, as pandas writes them in CSV "
                "and in Parquet; these are different ids. Write them in one way and prepare again",
                name, ", ".join(truths),
            )  # fmt: skip
        if found := _present(vocabulary, LOOKS_MISSING):
            logger.warning(
                "field %r has the ids %s; if they mean a missing value, set null = %s in the schema file",
                name, ", ".join(found), json.dumps(found),
            )  # fmt: skip


FORMS = (str.lower, str.upper, str.title)


def _present(vocabulary: Vocabulary, texts: Collection[str]) -> list[str]:
    """Returns which texts, in lower case, in capitals or with one capital letter, a vocabulary has."""
    ids = sorted({form(text) for text in texts for form in FORMS})
    return [each for each, row in zip(ids, vocabulary.rows(pa.array(ids)), strict=True) if row != OUT_OF_VOCABULARY]


def _sparse(raw: RawField, kind: SparseKind, config: PrepareConfig) -> SparseField:
    config.check_vocabulary(f"field {raw.name!r}: ", 0, raw.max_ids)
    bucketed = raw.kind == "numeric"
    encoding: Encoding = "hash" if config.hash_buckets else "raw" if config.raw_ids else "vocabulary"
    return SparseField(
        raw.name + BUCKET_SUFFIX if bucketed else raw.name,
        RESERVED_ROWS,
        kind,
        pooling=raw.pooling or "sum",
        encoding=encoding,
        source=raw.name,
        bucketed=bucketed,
        max_length=raw.max_length,
        shares=raw.shares,
        along=raw.along,
    )


def _sized(each: SparseField, vocabularies: dict[str, Vocabulary], config: PrepareConfig) -> SparseField:
    if each.encoding == "raw":
        return replace(each, num_embeddings=0)
    ids = config.hash_buckets if each.encoding == "hash" else len(vocabularies[each.vocabulary])
    return replace(each, num_embeddings=ids + RESERVED_ROWS)


def _training_ids(each: SparseField, parsed: Parsed, mask: pa.Array) -> pa.Array:
    text = bucket_ids(parsed.numbers[each.source]) if each.bucketed else parsed.ids[each.source]
    text = text.filter(mask)
    return text if each.kind == "categorical" else text.flatten()


Doubts: TypeAlias = Counter[tuple[str, str]]
"""Number of values by column (or field) and doubt."""

TWINS = "twins"
"""Whole numbers written with ".0", while the same numbers occur without."""

POINTED, DECIMALS = "pointed", "decimals"
"""Whole numbers written with ".0", of a block whose numbers are all written so; and of one that has others as well."""

BOUNDED = "bounded"
"""Numbers that the transform left beyond its bound."""

UNSEEN, UNLABELLED = "unseen", "unlabelled"
"""Of samples to predict: ids that the vocabulary lacks, and labels that are missing or wrong."""

MESSAGES = {
    UNLABELLED: "column {name!r}: {count:,} samples have no valid label; they are predicted, but not evaluated",
    WEIGHTLESS: "column {name!r}: {count:,} samples have no valid weight; they are predicted, but not evaluated",
    UNSEEN: "field {name!r}: {count:,} of its ids were not seen in training, or too rarely; they share one row",
    BOUNDED: (
        "field {name!r}: {count:,} of its numbers are so far from those that the transform was fitted on, or so large "
        "without a transform, that they are bounded; one of them could end training otherwise. Correct them, or set "
        'transform = "quantile"'
    ),
    FRACTIONS: (
        "column {name!r}: {count:,} of its ids are no whole numbers, and became ids like '0.5'. If it holds amounts, "
        "make it a numeric field; if it holds codes, write it as integers or strings"
    ),
    ROUNDED: (
        "column {name!r}: {count:,} of its ids are floating point numbers too large to be exact, so that different ids "
        "may have become one; write it as integers or strings"
    ),
    TWINS: (
        "field {name!r}: {count:,} values are the id of a whole number as '212.0', while others are as '212' (or the "
        "other way round in the data of the vocabulary); these are different ids. Write the column as integers "
        "(pandas: astype('Int64')) and prepare again"
    ),
    POINTED: (
        "field {name!r}: {count:,} values, and all that are whole numbers, are written as '212.0', as pandas writes "
        "them beside missing ones; a request with 212 has another id. Write the column as integers (pandas: "
        "astype('Int64')) and prepare again"
    ),
}


def twin_ids(encoder: Encoder, parsed: Parsed, encoded: pa.Table) -> Doubts:
    """Counts the `TWINS` of each field among the samples of a block and, where there is one, in the vocabulary.

    Also counts the `POINTED` or `DECIMALS` of the block.

    `encoded` are the columns that the encoder made of them.
    """
    doubts: Doubts = Counter()
    for each in encoder.sparse:
        if each.bucketed:
            continue
        flat = each.kind == "categorical"
        text = parsed.ids[each.source] if flat else parsed.ids[each.source].flatten()
        suspects = pc.ends_with(text, ".0")
        doubts += _pointed(each.name, text, text.filter(suspects))
        vocabulary = encoder.vocabularies.get(each.vocabulary)
        if vocabulary is not None:
            rows = encoded[each.name] if flat else pc.list_flatten(encoded[each.name])
            suspects = pc.or_(suspects, pa.array(rows.to_numpy() == OUT_OF_VOCABULARY))
        if not pc.any(suspects).as_py():
            continue
        chosen = text.filter(suspects)
        twins = _twins(chosen.filter(pc.match_substring_regex(chosen, r"^-?[0-9]+(\.0)?$")))
        if vocabulary is None:
            count = int(pc.sum(pc.is_in(twins, value_set=text)).as_py() or 0)
        else:
            count = int(np.count_nonzero(vocabulary.rows(twins) != OUT_OF_VOCABULARY))
        doubts[each.name, TWINS] = count
    return +doubts


def _pointed(name: str, text: pa.Array, suspects: pa.Array) -> Doubts:
    """Counts the `POINTED` or `DECIMALS` of a field; `suspects` are the ids that end with ".0"."""
    count = int(pc.sum(pc.match_substring_regex(suspects, r"^-?[0-9]+\.0$")).as_py() or 0)
    if not count:
        return Counter()
    numbers = int(pc.sum(pc.match_substring_regex(text, r"^-?[0-9]+(\.[0-9]+)?$")).as_py())
    return Counter({(name, POINTED if numbers == count else DECIMALS): count})


def _unseen(encoder: Encoder, encoded: pa.Table) -> Doubts:
    """Counts the `UNSEEN` of each field with a vocabulary."""
    rows = {name: encoded[name].combine_chunks() for name in encoder.vocabularies}
    flat = {name: each.flatten() if pa.types.is_list(each.type) else each for name, each in rows.items()}
    return +Counter({(name, UNSEEN): int((each.to_numpy() == OUT_OF_VOCABULARY).sum()) for name, each in flat.items()})


def _twins(numbers: pa.Array) -> pa.Array:
    """Returns whole numbers with ".0" where they are without, and the other way round."""
    bare = pc.replace_substring_regex(numbers, r"\.0$", "")
    return pc.if_else(pc.ends_with(numbers, ".0"), bare, pc.binary_join_element_wise(numbers, "0", "."))


@dataclass(frozen=True)
class WritePlan:
    """Settings of the pass, shared by all partitions; all workers can access `folder`. `schema` is without splits."""

    folder: Path
    layout: Layout
    encoder: Encoder
    split: SplitRule
    schema: Schema


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
    _report_negatives({key: doubts.pop(key) for key in [*doubts] if key[1].startswith(NEGATIVE)})
    mixed = {name for name, doubt in doubts if doubt in (DECIMALS, TWINS)}
    for (name, doubt), count in sorted(doubts.items()):
        if doubt == DECIMALS or (doubt == POINTED and (name in mixed or plan.layout.for_prediction)):
            continue
        logger.warning(MESSAGES[doubt].format(name=name, count=count))
    _report_order(shards[SPLITS[TRAIN]], plan.layout.labels)
    for unfinished in plan.folder.glob(f"*/*{PARTIAL}*"):  # of a worker that was lost
        unfinished.unlink()
    rows = sum(size.rows for sizes in shards.values() for size in sizes)
    labelled = any(doubts[label.column, UNLABELLED] < rows for label in plan.layout.found_labels)
    return {name: size_of_split(sizes, plan.schema, labelled=labelled) for name, sizes in shards.items()}


def _report_order(shards: Sequence[ShardSize], labels: Sequence[RawLabel]) -> None:
    """Warns of training samples that are sorted by their only label: windows are not mixed with each other.

    The shares of positives differ by more than half of what they do between shards of one class, as no drift does.
    """
    rows = np.array([each.rows for each in shards])
    if len(labels) > 1 or rows.sum() <= WINDOW_ROWS:
        return
    shares = np.array([each.positives[0] for each in shards]) / rows
    mean = np.average(shares, weights=rows)
    if np.average((shares - mean) ** 2, weights=rows) > mean * (1 - mean) / 4:
        logger.warning(
            "label %r: the files seem to be sorted by it: %.3g %% of the training samples are positive, but from %.3g"
            " to %.3g %% of those in one shard, and training shuffles windows of %s samples only. Shuffle the rows and"
            " prepare again, or train with data.window_rows = %d, which mixes all of them in memory",
            labels[0].column, 100 * mean, 100 * shares.min(), 100 * shares.max(), f"{WINDOW_ROWS:,}", rows.sum(),
        )  # fmt: skip


def _report_negatives(counts: Mapping[tuple[str, str], int]) -> None:
    """Warns of several texts of a label, and not only numbers, such as those of a scale, that count as negative."""
    for name in dict.fromkeys(column for column, _ in counts):
        texts = {doubt.removeprefix(NEGATIVE): count for (column, doubt), count in counts.items() if column == name}
        if len(texts) > max(1, len(marker_numbers([*texts]))):
            logger.warning(
                "column %r: %d texts count as negative: %s; if one of them is positive or means a missing label, add it"
                " to `positive` or `null` in the schema file",
                name, len(texts), ", ".join(f"{text!r} ({count:,} samples)" for text, count in [*texts.items()][:10]),
            )  # fmt: skip


def write_partition(plan: WritePlan, number: int, blocks: Sequence[Block]) -> Written:
    """Writes shard `number` of each split that the partition has samples of, each file atomically."""
    columns = arrow_schema(plan.schema)
    parts: dict[str, list[pa.Table]] = {name: [] for name in SPLITS}
    bad: list[BadRow] = []
    doubts: Doubts = Counter()
    for block in blocks:
        parsed = parse(block, plan.layout)
        bad += parsed.bad
        table = plan.encoder.encode(parsed).select(columns.names).cast(columns)
        doubts += parsed.doubts + twin_ids(plan.encoder, parsed, table)
        doubts += {(name, BOUNDED): count for name, count in count_bounded(plan.encoder.dense, table).items()}
        if plan.layout.for_prediction:
            doubts += _unseen(plan.encoder, table)
            unknown = {each.column: np.isnan(parsed.labels[each.name]) for each in plan.layout.found_labels}
            doubts += Counter({(name, UNLABELLED): int(each.sum()) for name, each in unknown.items()})
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
