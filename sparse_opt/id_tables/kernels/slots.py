"""Rows of a segment: the hash table from ids to rows, their records, and the queue of free rows."""

import numpy as np

from ...kernels.compiled import compiled
from ...kernels.numba_rows import prefetch
from .hashing import home_slot, id_hash, tag_of
from .memory import FREE, MAX_COUNT, MAX_LOAD, Segment

BLOCK = 32
"""Ids that are looked up together: memory of later ids is prefetched while earlier ids are looked up."""
MIN_SLOTS = 16
GROWTH = 1.25


@compiled(inline="always", error_model="numpy")
def segment_at(memory, s):
    location = memory.locations[s]
    table = memory.tables[location.table]
    return Segment(memory.states[s], location, table, memory.records, memory.slots, memory.cells)


@compiled(inline="always", error_model="numpy")
def _next_with_tag(slot, tag, first, count, row_bits, slots):
    """Returns the first slot from ``slot`` on that has the tag, or -1 if an empty slot comes first."""
    while True:
        value = np.int64(slots[first + slot])
        if value == 0:
            return -1
        if value >> row_bits == tag:
            return slot
        slot += 1
        if slot == count:
            slot = 0


@compiled(error_model="numpy")
def find_block(low, high, occurrences, segment, probes, rows):
    """Writes the rows of the occurrences low..high-1, at most BLOCK, into ``rows``, int64 [BLOCK], or -1."""
    count, row_bits = segment.state.slots, segment.table.row_bits
    if count == 0:
        rows[: high - low] = -1
        return
    first, first_record = segment.location.first_slot, segment.location.first_record
    slots, records, hashes = segment.slots, segment.records, occurrences.hash
    positions, features, ids = occurrences.position, occurrences.feature, occurrences.ids
    for k in range(low, high):
        probes[k - low] = home_slot(hashes[k], count)
        prefetch(slots, first + probes[k - low])
    mask = (np.int64(1) << row_bits) - 1
    for k in range(low, high):
        slot = _next_with_tag(probes[k - low], tag_of(hashes[k], row_bits), first, count, row_bits, slots)
        probes[k - low] = slot
        if slot >= 0:
            prefetch(records, first_record + (np.int64(slots[first + slot]) & mask) - 1)
    for k in range(low, high):
        slot, id = probes[k - low], ids[positions[k]]
        row = np.int64(-1)
        while slot >= 0:
            row = (np.int64(slots[first + slot]) & mask) - 1
            record = records[first_record + row]
            if record.id == id and record.feature == features[k]:
                break
            row = -1
            after = slot + 1 if slot + 1 < count else 0
            slot = _next_with_tag(after, tag_of(hashes[k], row_bits), first, count, row_bits, slots)
        rows[k - low] = row


@compiled(inline="always", error_model="numpy")
def enter_slot(segment, row, hashed):
    """Enters the row of an absent id; there must be an empty slot."""
    first, count, row_bits = segment.location.first_slot, segment.state.slots, segment.table.row_bits
    slots = segment.slots
    slot = home_slot(hashed, count)
    while slots[first + slot] != 0:
        slot += 1
        if slot == count:
            slot = 0
    slots[first + slot] = np.uint32(tag_of(hashed, row_bits) << row_bits | (row + 1))


@compiled(error_model="numpy")
def remove_slot(segment, row):
    """Empties the slot of a resident row; later slots of the cluster move back if their home slot allows it."""
    first, count, first_record = segment.location.first_slot, segment.state.slots, segment.location.first_record
    slots, records = segment.slots, segment.records
    mask = (np.int64(1) << segment.table.row_bits) - 1
    record = records[first_record + row]
    hole = home_slot(id_hash(record.id, record.feature), count)
    while np.int64(slots[first + hole]) & mask != row + 1:
        hole = hole + 1 if hole + 1 < count else 0
    slot = hole
    while True:
        slot = slot + 1 if slot + 1 < count else 0
        value = slots[first + slot]
        if value == 0:
            break
        record = records[first_record + (np.int64(value) & mask) - 1]
        home = home_slot(id_hash(record.id, record.feature), count)
        stays = hole < home <= slot if hole < slot else home > hole or home <= slot
        if not stays:
            slots[first + hole] = value
            hole = slot
    slots[first + hole] = 0


@compiled(error_model="numpy")
def _rebuild(segment, count):
    """Resizes the segment to ``count`` slots and enters all resident ids."""
    slots, records = segment.slots, segment.records
    for slot in range(segment.location.first_slot, segment.location.first_slot + count):
        slots[slot] = 0
    segment.state.slots = count
    for row in range(segment.state.used):
        record = records[segment.location.first_record + row]
        if record.feature != FREE:
            enter_slot(segment, row, id_hash(record.id, record.feature))


@compiled(error_model="numpy")
def rebuild_segments(memory):
    for s in range(len(memory.states)):
        _rebuild(segment_at(memory, s), memory.states[s].slots)


@compiled(error_model="numpy")
def ensure_slots(segment, resident):
    """Grows the slots, by at least a quarter, if they are too few for ``resident`` ids."""
    slots = segment.state.slots
    if resident <= slots * MAX_LOAD:
        return
    count = max(np.int64(resident / MAX_LOAD) + 1, np.int64(slots * GROWTH) + 1, MIN_SLOTS)
    _rebuild(segment, min(count, segment.table.slots))


COOLDOWN = 4
"""Number of batches before a freed row is reused, because batches in the pipeline may still refer to it."""


@compiled(inline="always", error_model="numpy")
def write_record(segment, row, id, feature, last_seen, count):
    record = segment.records[segment.location.first_record + row]
    record.id = id
    record.feature = np.uint16(feature)
    record.last_seen = np.uint32(last_seen)
    record.count = np.uint16(min(count, MAX_COUNT))


@compiled(error_model="numpy")
def take_row(segment, batch):
    """Returns a row for a new id: the first free row if its cooldown is over, else an unused row, else -1."""
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


@compiled(error_model="numpy")
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


@compiled(error_model="numpy")
def rows_freed_in(batch, memory):
    """Returns table and row of all rows that were freed in the latest batch, int64 [2, n]; all are in cooldown."""
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
