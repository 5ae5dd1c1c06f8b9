"""How often the ids of samples occur in the training split. R samples of a split."""

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ..dataset.schema import Schema
from ..dataset.shards import flat_ids, read_columns

ONE = 1 << 32
"""Unit of the logarithms: as integers, their sums do not depend on the order of the fields."""


def log_id_counts(
    data_dir: str | os.PathLike[str], split: str, fields: Sequence[str], train_rows: int | None = None
) -> np.ndarray:
    """Sums log(1 + occurrences in training) of the ids of each sample over fields, in units of 1 / `ONE`: int64 [R].

    A list adds the mean over its ids, and an empty list adds 0. Only the first `train_rows` training samples count, by
    default all. Memory grows with one column of the training split and with its distinct ids.
    """
    schema = Schema.load(data_dir)
    total = np.zeros(schema.split(split).rows, np.int64)
    for name in fields:
        trained = read_columns(Path(data_dir), schema, "train", [name])[name].slice(0, train_rows)
        found = pc.value_counts(flat_ids(trained))
        column = read_columns(Path(data_dir), schema, split, [name])[name]
        known = pc.index_in(flat_ids(column), value_set=found.field("values"))
        place = known.fill_null(len(found)).to_numpy()
        counts = np.append(found.field("counts").to_numpy(), 0)
        logs = np.rint(np.log1p(counts) * ONE).astype(np.int64)[place]
        total += logs if not pa.types.is_list(column.type) else _means(logs, pc.list_value_length(column).to_numpy())
    return total


def _means(values: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Returns the mean of each list, rounded down; 0 for an empty list."""
    stops = np.cumsum(lengths)
    sums = np.concatenate([[0], np.cumsum(values)])
    found: np.ndarray = (sums[stops] - sums[stops - lengths]) // np.maximum(lengths, 1)
    return found
