"""Hashes of ids, which determine an id's segment, slot and bucket; compiled by numba. They must never change."""

import numpy as np

from ...kernels.compiled import compiled
from .memory import RESERVED_ROWS

GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_LOW = np.uint64(0xFFFFFFFF)
_32 = np.uint64(32)


@compiled(inline="always", error_model="numpy")
def mix(state):
    """splitmix64's output function (Steele, Lea, Flood 2014): a bijection of the 64-bit integers."""
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return state ^ (state >> np.uint64(31))


@compiled(inline="always", error_model="numpy")
def id_hash(id, feature):
    """Hash of an id and of its feature's number in the table, uint64."""
    return mix(np.uint64(id) + (np.uint64(feature) + np.uint64(1)) * GOLDEN)


@compiled(inline="always", error_model="numpy")
def scaled(bits, size):
    """32 bits scaled to an integer in [0, size)."""
    return np.int64((bits * np.uint64(size)) >> _32)


@compiled(inline="always", error_model="numpy")
def segment_of(hashed, segments):
    """Segment of its table that an id belongs to, from the upper half of its hash."""
    return scaled(hashed >> _32, segments)


@compiled(inline="always", error_model="numpy")
def home_slot(hashed, slots):
    """First slot to probe, from the lower half of the hash."""
    return scaled(hashed & _LOW, slots)


@compiled(inline="always", error_model="numpy")
def tag_of(hashed, row_bits):
    """Bits of the hash that a slot stores above the row."""
    return np.int64(hashed >> _32) & ((np.int64(1) << (32 - row_bits)) - 1)


@compiled(error_model="numpy")
def hashed_ids(ids: np.ndarray, feature: int) -> np.ndarray:
    """Hash of ids of one feature, given the feature's number in its table: uint64 [n] of int64 [n]."""
    found = np.empty(len(ids), np.uint64)
    for i in range(len(ids)):
        found[i] = id_hash(ids[i], feature)
    return found


def id_bucket_rows(ids: np.ndarray, buckets: int, feature: int) -> np.ndarray:
    """Embedding rows of raw ids, int64 [n]; the reserved ids keep their rows.

    Args:
        buckets: number of rows for the ids; the table has two reserved rows more.
        feature: number of the ids' feature in the table; equal ids of two features get different rows.
    """
    rows = RESERVED_ROWS + (hashed_ids(ids, feature) % np.uint64(buckets)).astype(np.int64)
    return np.where((ids >= 0) & (ids < RESERVED_ROWS), ids, rows)
