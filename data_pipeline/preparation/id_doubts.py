"""Suspicious ids and numbers, which are counted while a data set is written, and reported at the end."""

import logging
from collections import Counter
from typing import TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from cowrec.data_pipeline.dataset.schema import OUT_OF_VOCABULARY
from cowrec.data_pipeline.encoding.dense import count_bounded
from cowrec.data_pipeline.encoding.encoder import Encoder
from cowrec.data_pipeline.raw.arrow_values import FRACTIONS, ROUNDED
from cowrec.data_pipeline.raw.parsing import Parsed

Doubts: TypeAlias = Counter[tuple[str, str]]
"""Number of values by column (or field) and doubt."""

TWINS = "twins"
"""Whole numbers written with ".0", while the same numbers occur without."""

BOUNDED = "bounded"
"""Numbers that the transform left beyond its bound."""

MESSAGES = {
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
}

logger = logging.getLogger(__name__)


def warn_of(doubts: Doubts) -> None:
    """Logs a warning for each column and doubt."""
    for (name, doubt), count in sorted(doubts.items()):
        logger.warning(MESSAGES[doubt].format(name=name, count=count))


def bounded_numbers(encoder: Encoder, encoded: pa.Table) -> Doubts:
    """Counts the `BOUNDED` numbers of each field in the columns that the encoder made of a block."""
    return Counter({(name, BOUNDED): count for name, count in count_bounded(encoder.dense, encoded).items()})


def twin_ids(encoder: Encoder, parsed: Parsed, encoded: pa.Table) -> Doubts:
    """Counts the `TWINS` of each field among the samples of a block and, where there is one, in the vocabulary.

    Args:
        encoder: the encoder of the data set.
        parsed: the samples.
        encoded: the columns that the encoder made of them.
    """
    doubts: Doubts = Counter()
    for field in encoder.sparse:
        if field.bucketed:
            continue
        flat = field.kind == "categorical"
        text = parsed.ids[field.source] if flat else parsed.ids[field.source].flatten()
        suspects = pc.ends_with(text, ".0")
        vocabulary = encoder.vocabularies.get(field.name)
        if vocabulary is not None:
            rows = encoded[field.name] if flat else pc.list_flatten(encoded[field.name])
            suspects = pc.or_(suspects, pa.array(rows.to_numpy() == OUT_OF_VOCABULARY))
        if not pc.any(suspects).as_py():
            continue
        chosen = text.filter(suspects)
        twins = _twins(chosen.filter(pc.match_substring_regex(chosen, r"^-?[0-9]+(\.0)?$")))
        if vocabulary is None:
            count = int(pc.sum(pc.is_in(twins, value_set=text)).as_py() or 0)
        else:
            count = int(np.count_nonzero(vocabulary.rows(twins) != OUT_OF_VOCABULARY))
        doubts[field.name, TWINS] = count
    return +doubts


def _twins(numbers: pa.Array) -> pa.Array:
    """Returns whole numbers with ".0" where they are without, and the other way round."""
    bare = pc.replace_substring_regex(numbers, r"\.0$", "")
    return pc.if_else(pc.ends_with(numbers, ".0"), bare, pc.binary_join_element_wise(numbers, "0", "."))
