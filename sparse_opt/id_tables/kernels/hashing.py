"""Hashes of ids, which determine an id's segment and its slot; compiled by numba. They must never change."""

import numpy as np
from numba import njit

GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_LOW = np.uint64(0xFFFFFFFF)
_32 = np.uint64(32)


@njit(nogil=True, cache=True, inline="always", error_model="numpy")
def mix(state):
    """splitmix64's output function (Steele, Lea, Flood 2014): a bijection of the 64-bit integers."""
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return state ^ (state >> np.uint64(31))


@njit(nogil=True, cache=True, inline="always", error_model="numpy")
def id_hash(id, feature):
    """Hash of an id and of its feature's number in the table, uint64; without a seed, so all tables have one layout."""
    return mix(np.uint64(id) + (np.uint64(feature) + np.uint64(1)) * GOLDEN)


@njit(nogil=True, cache=True, inline="always", error_model="numpy")
def scaled(bits, size):
    """32 bits scaled to an integer in [0, size)."""
    return np.int64((bits * np.uint64(size)) >> _32)


@njit(nogil=True, cache=True, inline="always", error_model="numpy")
def segment_of(hashed, segments):
    """Segment of its table that an id belongs to, from the upper half of its hash."""
    return scaled(hashed >> _32, segments)


@njit(nogil=True, cache=True, inline="always", error_model="numpy")
def home_slot(hashed, slots):
    """First slot to probe, from the lower half of the hash."""
    return scaled(hashed & _LOW, slots)


@njit(nogil=True, cache=True, inline="always", error_model="numpy")
def tag_of(hashed, row_bits):
    """Bits of the hash that a slot stores above the row."""
    return np.int64(hashed >> _32) & ((np.int64(1) << (32 - row_bits)) - 1)
