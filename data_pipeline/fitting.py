"""The first pass: counts ids and finds the range of numbers, block by block."""

from collections.abc import Callable, Iterable
from contextlib import closing
from dataclasses import dataclass, field, replace

import numpy as np
import pyarrow as pa

from .bad_rows import BadRow, BadRowLedger
from .dense import DenseRange, bucket_ids, fitted
from .encoding import Encoder
from .layouts import Layout, RawField
from .parallel import ordered_map
from .parsing import Parsed, parse
from .prepare_config import PrepareConfig
from .schema import RESERVED_ROWS, SparseField, SparseKind
from .sources import Block
from .splitting import SplitRule
from .vocabulary import Vocabulary, VocabularyCounter, counted_values

BUCKET_SUFFIX = "_bucket"


@dataclass
class _Seen:
    """What a block adds: ranges of the numeric fields, counted ids of the sparse ones, rows of each split."""

    file_bytes: int = 0
    train_rows: int = 0
    bad: list[BadRow] = field(default_factory=list)
    ranges: dict[str, DenseRange] = field(default_factory=dict)
    counted: dict[str, pa.Table] = field(default_factory=dict)


def fit(
    blocks: Iterable[Block],
    layout: Layout,
    config: PrepareConfig,
    split: SplitRule,
    ledger: BadRowLedger,
    progress: Callable[[int], None],
) -> Encoder:
    """Fits dense maps and vocabularies on all blocks.

    Raises:
        ValueError: a bad row that may not be skipped, or no training row at all.
    """
    numeric = [each for each in layout.fields if each.kind == "numeric"]
    sparse = sparse_fields(layout, config)
    ranges = {each.name: DenseRange() for each in numeric}
    counters = {each.name: VocabularyCounter() for each in sparse if each.encoding == "vocabulary"}
    train_rows = 0
    with closing(ordered_map(lambda block: _see(block, layout, config, split, sparse), blocks)) as results:
        for seen in results:
            ledger.add(seen.bad)
            train_rows += seen.train_rows
            for name, span in seen.ranges.items():
                ranges[name].merge(span)
            for name, counted in seen.counted.items():
                counters[name].add(counted)
            progress(seen.file_bytes)
    if not train_rows:
        raise ValueError("no training row: all rows are test rows or bad; lower test_fraction or test_rows")
    vocabularies = dict(
        zip(counters, ordered_map(lambda counter: counter.finish(config.min_count), counters.values()), strict=True)
    )
    return Encoder(
        tuple(fitted(each.name, each.name, config.dense, ranges[each.name]) for each in numeric),
        tuple(_sized(each, vocabularies, config) for each in sparse),
        vocabularies,
    )


def sparse_fields(layout: Layout, config: PrepareConfig) -> list[SparseField]:
    """The sparse fields of a layout in order, their tables not yet sized; buckets of numbers come first."""
    fields = []
    if config.dense == "buckets":
        fields += [_sparse(each, "categorical", config) for each in layout.fields if each.kind == "numeric"]
    return fields + [_sparse(each, each.kind, config) for each in layout.fields if each.kind != "numeric"]


def _sparse(raw: RawField, kind: SparseKind, config: PrepareConfig) -> SparseField:
    bucketed = raw.kind == "numeric"
    return SparseField(
        raw.name + BUCKET_SUFFIX if bucketed else raw.name,
        RESERVED_ROWS,
        kind,
        pooling=raw.pooling or "sum",
        encoding="hash" if config.hash_buckets else "vocabulary",
        source=raw.name,
        bucketed=bucketed,
    )


def _sized(each: SparseField, vocabularies: dict[str, Vocabulary], config: PrepareConfig) -> SparseField:
    ids = config.hash_buckets if each.encoding == "hash" else len(vocabularies[each.name])
    return replace(each, num_embeddings=ids + RESERVED_ROWS)


def _see(block: Block, layout: Layout, config: PrepareConfig, split: SplitRule, sparse: list[SparseField]) -> _Seen:
    parsed = parse(block, layout)
    train = ~split.is_test(parsed.rows)
    seen = _Seen(block.file_bytes, int(train.sum()), parsed.bad)
    fitted_rows = train if config.fit_on == "train" else np.ones_like(train)
    for name, values in parsed.numbers.items():
        seen.ranges[name] = DenseRange()
        seen.ranges[name].add(values[fitted_rows])
    mask = pa.array(train)
    for each in sparse:
        if each.encoding == "vocabulary":
            seen.counted[each.name] = counted_values(_training_ids(each, parsed, mask))
    return seen


def _training_ids(each: SparseField, parsed: Parsed, mask: pa.Array) -> pa.Array:
    text = bucket_ids(parsed.numbers[each.source]) if each.bucketed else parsed.ids[each.source]
    text = text.filter(mask)
    return text if each.kind == "categorical" else text.flatten()
