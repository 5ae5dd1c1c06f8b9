"""Rows of a segment: their records, and the queue of free rows; compiled by numba without the GIL."""

import numpy as np
from numba import njit

from .memory import FREE, MAX_COUNT
from .slots import remove_slot

COOLDOWN = 4
"""Batches for which a freed row is not reused, because batches that refer to it may still be in the pipeline."""


@njit(nogil=True, cache=True, inline="always", error_model="numpy")
def write_record(segment, row, id, feature, last_seen, count):
    record = segment.records[segment.location.first_record + row]
    record.id = id
    record.feature = np.uint16(feature)
    record.last_seen = np.uint32(last_seen)
    record.count = np.uint16(min(count, MAX_COUNT))


@njit(nogil=True, cache=True, error_model="numpy")
def take_row(segment, batch):
    """Row for a new id: the first of the free ones if its cooldown is over, else one never used, else -1."""
    state = segment.state
    if state.free > 0:
        row = state.first_free
        record = segment.records[segment.location.first_record + row]
        if np.int64(record.last_seen) + COOLDOWN <= batch:
            state.first_free = record.id - 1
            state.free -= 1
            return row
    if state.used < segment.table.capacity:
        state.used += 1
        return state.used - 1
    return -1


@njit(nogil=True, cache=True, error_model="numpy")
def free_row(segment, row, batch):
    """Removes a resident id and appends its row to the queue of free rows, where its cooldown begins."""
    state = segment.state
    remove_slot(segment, row)
    write_record(segment, row, 0, FREE, batch, 0)
    if state.free > 0:
        segment.records[segment.location.first_record + state.last_free].id = row + 1
    else:
        state.first_free = row
    state.last_free = row
    state.free += 1
    if state.fresh_batch != batch:
        state.fresh, state.fresh_batch = row, batch


@njit(nogil=True, cache=True, error_model="numpy")
def rows_freed_in(batch, memory):
    """Table and row of all rows freed in the latest batch, int64 [2, n]; none is reused yet, as all are in cooldown."""
    count = 0
    for fill in range(2):
        if fill:
            found = np.empty((2, count), np.int64)
        count = 0
        for s in range(len(memory.states)):
            state, location = memory.states[s], memory.locations[s]
            if state.fresh_batch != batch or state.free == 0:
                continue
            row = state.fresh
            while True:
                if fill:
                    found[0, count], found[1, count] = location.table, location.first_row + row
                count += 1
                if row == state.last_free:
                    break
                row = memory.records[location.first_record + row].id - 1
    return found
