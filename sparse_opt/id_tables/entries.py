"""Rows of id tables with their ids, as IdTables returns them."""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class NewRows:
    """Rows that a batch gave to new ids, each int64 [n], the same on every rank.

    Attributes:
        table: number of the table, in the order of ``tables``.
        row: in the embedding table.
        id: the id that the row belongs to now.
        feature: the feature's number in ``IdTableConfig.features``.
    """

    table: np.ndarray
    row: np.ndarray
    id: np.ndarray
    feature: np.ndarray


@dataclass(frozen=True)
class Entries:
    """Ids of a table that are not expired, segment by segment.

    Attributes:
        id: int64 [n].
        feature: the feature's number in ``IdTableConfig.features``, int64 [n].
        row: in the embedding table, int64 [n].
        last_seen: newest sample time (or batch number) of an occurrence, int64 [n].
        count: occurrences since the id got its row, at most 65,535, int64 [n].
    """

    id: np.ndarray
    feature: np.ndarray
    row: np.ndarray
    last_seen: np.ndarray
    count: np.ndarray
