"""Expiry and eviction of resident ids; compiled by numba without the GIL."""

import numpy as np
from numba import njit

from .memory import FREE
from .rows import free_row

_ROOM_SHARE = 64
"""A segment that evicts keeps one in so many of its rows free."""
_ROOM_BATCHES = 6
"""It also keeps as many rows free as so many batches like the current one need; freed rows cool down for four."""
_DIGIT = 12


@njit(nogil=True, cache=True, inline="always", error_model="numpy")
def is_expired(record, table, clock):
    return table.expire_after > 0 and np.int64(record.last_seen) + table.expire_after < clock.now


@njit(nogil=True, cache=True, error_model="numpy")
def sweep(segment, clock):
    """Frees the expired ids among the next ``sweep_records`` records."""
    state = segment.state
    for _ in range(min(segment.table.sweep_records, state.used)):
        row = state.hand if state.hand < state.used else 0
        state.hand = row + 1
        record = segment.records[segment.location.first_record + row]
        if record.feature != FREE and is_expired(record, segment.table, clock):
            free_row(segment, row, clock.batch)
            state.expired += 1


@njit(nogil=True, cache=True, error_model="numpy")
def make_room(segment, wanted, clock):
    """Evicts the oldest (or least frequent, then oldest) ids where too few rows are free; ties by the lower row.

    Expired ids that no sweep has reached yet are evicted first.
    """
    state, capacity = segment.state, segment.table.capacity
    room = capacity - (state.used - state.free)
    required = max(capacity // _ROOM_SHARE, min(_ROOM_BATCHES * wanted, capacity // 4), 1)
    if room >= required:
        return
    count = min(required - room + capacity // _ROOM_SHARE, state.used - state.free)
    highest, ties = _eviction_limit(segment, count, clock)
    for row in range(state.used):
        record = segment.records[segment.location.first_record + row]
        key = _eviction_key(record, segment.table, clock)
        if record.feature == FREE or key > highest or (key == highest and ties == 0):
            continue
        ties -= key == highest
        free_row(segment, row, clock.batch)
    state.evicted += count


@njit(nogil=True, cache=True, inline="always", error_model="numpy")
def _eviction_key(record, table, clock):
    """Order in which records are evicted, the smallest first; 48 bits."""
    by_count = table.least_frequent and not is_expired(record, table, clock)
    return (np.int64(record.count) << 32 if by_count else np.int64(0)) | np.int64(record.last_seen)


@njit(nogil=True, cache=True, error_model="numpy")
def _eviction_limit(segment, count, clock):
    """Key of the ``count``-th resident record in eviction order, and how many records with that key are evicted.

    A radix select: one pass over the records for each digit.
    """
    prefix, left = np.int64(0), count
    histogram = np.empty(1 << _DIGIT, np.int64)
    records, first = segment.records, segment.location.first_record
    for shift in range(48 - _DIGIT, -1, -_DIGIT):
        histogram[:] = 0
        for row in range(segment.state.used):
            record = records[first + row]
            key = _eviction_key(record, segment.table, clock)
            if record.feature != FREE and key >> (shift + _DIGIT) == prefix:
                histogram[(key >> shift) & ((1 << _DIGIT) - 1)] += 1
        digit = 0
        while histogram[digit] < left:
            left -= histogram[digit]
            digit += 1
        prefix = prefix << _DIGIT | digit
    return prefix, left
