"""Hashing of raw ids into a fixed number of embedding rows: ids may share a row, and nothing is stored."""

import numpy as np
from numba import njit

from .kernels.hashing import id_hash
from .kernels.memory import RESERVED_ROWS


@njit(nogil=True, cache=True, error_model="numpy")
def hashed_ids(ids: np.ndarray, feature: int) -> np.ndarray:
    """Hash of the ids of one feature, given its number in its table: uint64 [n] of int64 [n]. It must never change."""
    found = np.empty(len(ids), np.uint64)
    for i in range(len(ids)):
        found[i] = id_hash(ids[i], feature)
    return found


def id_bucket_rows(ids: np.ndarray, buckets: int, feature: int) -> np.ndarray:
    """Embedding rows of raw ids; the reserved ids keep their rows.

    Args:
        ids: int64 [n].
        buckets: rows that the ids are hashed into; the table has two reserved rows more.
        feature: number of the ids' feature in the table; equal ids of two features get different rows.

    Returns:
        int64 [n].
    """
    rows = RESERVED_ROWS + (hashed_ids(ids, feature) % np.uint64(buckets)).astype(np.int64)
    return np.where((ids >= 0) & (ids < RESERVED_ROWS), ids, rows)
