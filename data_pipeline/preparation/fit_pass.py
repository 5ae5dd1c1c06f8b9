"""The first pass of `prepare`: counts ids and finds the range of numbers, partition by partition."""

from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace

import numpy as np
import pyarrow as pa

from cowrec.data_pipeline.dataset.schema import RESERVED_ROWS, Encoding, SparseField, SparseKind
from cowrec.data_pipeline.encoding.dense import DenseRange, bucket_ids, fitted
from cowrec.data_pipeline.encoding.encoder import Encoder
from cowrec.data_pipeline.encoding.vocabulary import Vocabulary, VocabularyCounter, counted_values
from cowrec.data_pipeline.parallel import ordered_map
from cowrec.data_pipeline.raw.bad_rows import BadRow, BadRowLedger
from cowrec.data_pipeline.raw.csv_parser import Parsed, parse
from cowrec.data_pipeline.raw.layouts import Layout, RawField
from cowrec.data_pipeline.raw.partitions import Block, Partition, Report

from .config import PrepareConfig
from .engine import Engine
from .splitting import SplitRule

BUCKET_SUFFIX = "_bucket"


@dataclass(frozen=True)
class FitPlan:
    """Settings of the pass, shared by all partitions."""

    layout: Layout
    config: PrepareConfig
    split: SplitRule


@dataclass
class PartitionStatistics:
    """Statistics of a partition: training samples, bad rows, ranges of numeric fields, id counts of sparse fields."""

    train_samples: int = 0
    bad: list[BadRow] = field(default_factory=list)
    ranges: dict[str, DenseRange] = field(default_factory=dict)
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
    ranges = {each.name: DenseRange() for each in numeric}
    counters = {each.name: VocabularyCounter() for each in sparse if each.encoding == "vocabulary"}
    train_samples = 0
    with closing(engine.map(measure, plan, partitions)) as results:
        for partition, found in zip(partitions, results, strict=True):
            ledger.add(found.bad)
            train_samples += found.train_samples
            for name, span in found.ranges.items():
                ranges[name].merge(span)
            for name, counted in found.counted.items():
                counters[name].add(counted)
            report(partition.file_bytes)
    if not train_samples:
        raise ValueError(
            "no training sample: all samples are test samples or bad rows; lower test_fraction or test_rows"
        )
    vocabularies = dict(
        zip(counters, ordered_map(lambda counter: counter.finish(config.min_count), counters.values()), strict=True)
    )
    return Encoder(
        tuple(fitted(each.name, each.name, config.dense, ranges[each.name]) for each in numeric),
        tuple(_sized(each, vocabularies, config) for each in sparse),
        vocabularies,
    )


def measure(plan: FitPlan, number: int, blocks: Sequence[Block]) -> PartitionStatistics:
    """Computes the statistics of one partition."""
    found = PartitionStatistics()
    counting = [each for each in sparse_fields(plan.layout, plan.config) if each.encoding == "vocabulary"]
    texts: dict[str, list[pa.Array]] = {each.name: [] for each in counting}
    for block in blocks:
        parsed = parse(block, plan.layout)
        train = ~plan.split.is_test(parsed.sample_numbers)
        found.bad += parsed.bad
        found.train_samples += int(train.sum())
        fitted_on = train if plan.config.fit_on == "train" else np.ones_like(train)
        for name, values in parsed.numbers.items():
            found.ranges.setdefault(name, DenseRange()).add(values[fitted_on])
        for each in counting:
            texts[each.name].append(_training_ids(each, parsed, pa.array(train)))
    found.counted = {name: counted_values(pa.chunked_array(text)) for name, text in texts.items()}
    return found


def sparse_fields(layout: Layout, config: PrepareConfig) -> list[SparseField]:
    """Returns the sparse fields of a layout in order, before their tables are sized; buckets of numbers come first."""
    fields = []
    if config.dense == "buckets":
        fields += [_sparse(each, "categorical", config) for each in layout.fields if each.kind == "numeric"]
    return fields + [_sparse(each, each.kind, config) for each in layout.fields if each.kind != "numeric"]


def _sparse(raw: RawField, kind: SparseKind, config: PrepareConfig) -> SparseField:
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
    )


def _sized(each: SparseField, vocabularies: dict[str, Vocabulary], config: PrepareConfig) -> SparseField:
    if each.encoding == "raw":
        return replace(each, num_embeddings=0)
    ids = config.hash_buckets if each.encoding == "hash" else len(vocabularies[each.name])
    return replace(each, num_embeddings=ids + RESERVED_ROWS)


def _training_ids(each: SparseField, parsed: Parsed, mask: pa.Array) -> pa.Array:
    text = bucket_ids(parsed.numbers[each.source]) if each.bucketed else parsed.ids[each.source]
    text = text.filter(mask)
    return text if each.kind == "categorical" else text.flatten()
