"""What is suspicious about the values of samples: counted in each block, reported when a pass ends."""

import json
import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ..dataset.schema import OUT_OF_VOCABULARY, RESERVED_ROWS, WINDOW_ROWS, Split
from ..dataset.shards import flat_ids
from ..encoding.encoder import Encoder, texts_of
from ..encoding.numbers import count_bounded
from ..encoding.vocabulary import Vocabulary
from ..raw.columns import EARLY_TIMES, NEGATIVE, WEIGHTLESS
from ..raw.layouts import Layout, RawLabel
from ..raw.parsing import Parsed
from ..raw.values import FRACTIONS, LOOKS_MISSING, ROUNDED, marker_numbers

logger = logging.getLogger(__name__)

Doubts: TypeAlias = Counter[tuple[str, str]]
"""Number of values by column (or field) and doubt."""

POINTED, DECIMALS = "pointed", "decimals"
"""Ids that are whole numbers with ".0", and, beside these in a block, numbers with other decimals."""
BOUNDED = "bounded"
"""Numbers that the transform left beyond its bound."""
UNSEEN, UNLABELLED = "unseen", "unlabelled"
"""Of samples to predict: ids that the vocabulary lacks, and labels that are missing or wrong."""

MESSAGES = {
    UNLABELLED: "column {name!r}: {count:,} samples have no valid label; they are predicted, but not evaluated",
    WEIGHTLESS: "column {name!r}: {count:,} samples have no valid weight; they are predicted, but not evaluated",
    UNSEEN: "field {name!r}: {count:,} of its ids were not seen in training, or too rarely; they share one row",
    EARLY_TIMES: (
        "column {name!r}: {count:,} samples have a time before 1990; check the unit or the format of `time` in the"
        " schema file"
    ),
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
    POINTED: (
        "field {name!r}: {count:,} of its ids are whole numbers that are written as '212.0', as pandas writes them "
        "beside missing ones; 212, in other rows or in a request, is another id. Write the column as integers (pandas: "
        "astype('Int64')) and prepare again"
    ),
}


def doubts_of(encoder: Encoder, parsed: Parsed, encoded: pa.Table, layout: Layout) -> Doubts:
    """Counts what is suspicious about the samples of a block; `encoded` has the columns that the encoder made."""
    found = parsed.doubts + _pointed(encoder, parsed)
    found += {(name, BOUNDED): count for name, count in count_bounded(encoder.dense, encoded).items()}
    if layout.for_prediction:
        found += _unseen(encoder, encoded)
        for label in layout.found_labels:
            found[label.column, UNLABELLED] += int(np.isnan(parsed.labels[label.name]).sum())
    return found


def _pointed(encoder: Encoder, parsed: Parsed) -> Doubts:
    found: Doubts = Counter()
    for field in (field for field in encoder.sparse if not field.bucketed):
        text = flat_ids(texts_of(field, parsed))
        suspects = text.filter(pc.ends_with(text, ".0"))
        if len(suspects):
            found[field.name, POINTED] = _matching(suspects, r"^-?[0-9]+\.0$")
            found[field.name, DECIMALS] = _matching(text, r"^-?[0-9]+\.[0-9]*[1-9]$")
    return +found


def _matching(text: pa.Array, pattern: str) -> int:
    return int(pc.sum(pc.match_substring_regex(text, pattern)).as_py() or 0)


def _unseen(encoder: Encoder, encoded: pa.Table) -> Doubts:
    found: Doubts = Counter()
    for name in encoder.vocabularies:
        rows = encoded[name].combine_chunks()
        flat_rows = rows.flatten() if pa.types.is_list(rows.type) else rows
        found[name, UNSEEN] = int((flat_rows.to_numpy() == OUT_OF_VOCABULARY).sum())
    return +found


def report(doubts: Doubts, layout: Layout) -> None:
    """Warns of what is suspicious about all samples."""
    _report_negatives({key: count for key, count in doubts.items() if key[1].startswith(NEGATIVE)})
    for (name, doubt), count in sorted(doubts.items()):
        # Ids with decimals are no integers. Known ids are written as the vocabulary writes them.
        meant = doubts[name, DECIMALS] or (layout.for_prediction and not doubts[name, UNSEEN])
        if doubt in MESSAGES and not (doubt == POINTED and meant):
            logger.warning(MESSAGES[doubt].format(name=name, count=count))


def _report_negatives(counts: Mapping[tuple[str, str], int]) -> None:
    """Warns of several texts of a label that count as negative, unless all are numbers, as those of a scale are."""
    for name in dict.fromkeys(column for column, _ in counts):
        texts = {doubt.removeprefix(NEGATIVE): count for (column, doubt), count in counts.items() if column == name}
        if len(texts) > max(1, len(marker_numbers([*texts]))):
            logger.warning(
                "column %r: %d texts count as negative: %s; if one of them is positive or means a missing label, add it"
                " to `positive` or `null` in the schema file",
                name, len(texts), ", ".join(f"{text!r} ({count:,} samples)" for text, count in [*texts.items()][:10]),
            )  # fmt: skip


def report_markers(vocabularies: Mapping[str, Vocabulary]) -> None:
    """Warns of ids that programs write for a missing value."""
    texts = sorted({form(text) for text in LOOKS_MISSING for form in (str.lower, str.upper, str.title)})
    for name, vocabulary in vocabularies.items():
        known = vocabulary.rows(pa.array(texts)) != OUT_OF_VOCABULARY
        if found := [text for text, is_known in zip(texts, known, strict=True) if is_known]:
            logger.warning(
                "field %r has the ids %s; if they mean a missing value, set null = %s in the schema file",
                name, ", ".join(found), json.dumps(found),
            )  # fmt: skip


def report_blanks(vocabularies: Mapping[str, Vocabulary]) -> None:
    """Warns of ids that differ from others by spaces at their ends only."""
    for name, vocabulary in vocabularies.items():
        values = vocabulary.values
        spaced = values.filter(pc.or_(pc.starts_with(values, " "), pc.ends_with(values, " ")))
        twice = spaced.filter(pa.array(vocabulary.rows(pc.utf8_trim(spaced, " ")) >= RESERVED_ROWS))
        if len(twice):
            logger.warning(
                "field %r: %s of its ids differ from others by spaces at their ends only, such as %r; remove such"
                " spaces in the files if the ids are the same",
                name, f"{len(twice):,}", twice[0].as_py(),
            )  # fmt: skip


def report_order(shards: Sequence[Split], labels: Sequence[RawLabel]) -> None:
    """Warns of training samples that are sorted by their only label, since windows are not mixed with each other.

    The variance of the shares of positives is above a quarter of that of shards of one class, which no drift reaches.
    """
    rows, weights = np.array([shard.rows for shard in shards]), np.array([shard.total for shard in shards])
    if len(labels) > 1 or rows.sum() <= WINDOW_ROWS or not weights.sum():
        return
    shares = np.array([shard.positives[0] for shard in shards if shard.positives]) / np.where(weights > 0, weights, 1)
    mean = np.average(shares, weights=weights)
    if np.average((shares - mean) ** 2, weights=weights) > mean * (1 - mean) / 4:
        logger.warning(
            "label %r: the files seem to be sorted by it: %.3g %% of the training samples are positive, but from %.3g"
            " to %.3g %% of those in one shard, and training shuffles windows of %s samples only. Shuffle the rows and"
            " prepare again, or train with data.window_rows = %d, which mixes all of them in memory",
            labels[0].column, 100 * mean, 100 * shares.min(), 100 * shares.max(), f"{WINDOW_ROWS:,}", rows.sum(),
        )  # fmt: skip
