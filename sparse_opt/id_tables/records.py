"""Memory of the id tables, and the kernels that find, enter and free one id in it; compiled by numba without the GIL.

A *segment* is one table's piece in one shard. It owns a run of records (one a row: what id the row belongs to) and a
run of slots (open addressing with linear probing: which row an id has). Both runs are reserved for the whole capacity
in memory that the system commits page by page as it is written; ``used`` records and ``slots`` slots of them are in
use.

A slot is 0, or a row's number plus one with bits of the id's hash above it, by which nearly every wrong slot is told
without a look at its record. Deletion moves later slots of the cluster back, so there are no tombstones. Free records
form a queue threaded through themselves: the id is the next one's number plus one, ``last_seen`` the batch of the
freeing.
"""

import mmap

import numpy as np
from numba import njit

from cowrec.sparse_opt.kernels.cpu_rows import prefetch

RECORD = np.dtype([("id", "<i8"), ("last_seen", "<u4"), ("count", "<u2"), ("feature", "<u2")])
"""One row: 16 bytes. ``feature`` is the feature's number in its table, or FREE."""
FREE = 0xFFFF
MOST_COUNTED = 0xFFFF
"""Counts of records and of sketches stop here."""

SEGMENT_STATE = (
    *("used", "free", "first_free", "last_free", "fresh", "fresh_batch", "slots", "hand"),
    *("admitted", "refused", "below_threshold", "expired", "evicted", "late", "unknown", "occurrences"),
    *("pane", "noted_0", "noted_1", "noted_2", "noted_3"),
)
SEGMENT = np.dtype([(name, "<i8") for name in SEGMENT_STATE])
"""What changes of a segment. Resident are used - free rows. ``fresh`` is the row that was freed first in batch
``fresh_batch``, the latest in which one was. ``pane``, ``noted_*``: see id_admission.py."""
PLACE = np.dtype(
    [(name, "<i8") for name in ("number", "table", "first_row", "first_record", "first_slot", "first_cell")]
)
"""Where a segment lies: its number among all ranks' and its table, the table's row that its first record stands for,
and its first record, slot and cell in the rank's memory."""
TABLE = np.dtype(
    [
        *((name, "<i8") for name in ("pieces", "first_piece", "capacity", "row_bits", "slots", "slice", "turns")),
        *((name, "<i8") for name in ("least_frequent", "evicts", "expire_after")),
        *((name, "<i8") for name in ("admission", "threshold", "panes", "pane_seconds", "blocks")),
    ]
)
"""What a table's segments share: capacity and slots are those of one segment; the rest is in id_tables.py."""

REST = 4
"""Batches for which a freed row is not given again, because batches that use it may still be under way."""
BLOCK = 32
"""Ids that are looked up at a time, so that what the next ones need is fetched while the first ones wait."""
FIRST_SLOTS = 16
GROWTH, LOAD = 1.25, 0.8

GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_LOW = np.uint64(0xFFFFFFFF)
_32 = np.uint64(32)


def reserved(count: int, dtype: np.dtype) -> np.ndarray:
    """Zeros [count] whose pages are committed when they are written; small pages, so that little else is."""
    if count == 0:
        return np.zeros(0, dtype)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
    return np.frombuffer(mmap.mmap(-1, count * dtype.itemsize, flags=flags), dtype)


@njit(nogil=True, cache=True, inline="always", error_model="numpy")
def mix(state):
    """splitmix64's output function (Steele, Lea, Flood 2014): a bijection of the 64-bit integers."""
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return state ^ (state >> np.uint64(31))


@njit(nogil=True, cache=True, inline="always", error_model="numpy")
def id_hash(id, feature):
    """uint64 of an id and the number of its feature in the table; no seed, so that it lays out every table alike."""
    return mix(np.uint64(id) + (np.uint64(feature) + np.uint64(1)) * GOLDEN)


@njit(nogil=True, cache=True, inline="always", error_model="numpy")
def piece_of(hashed, pieces):
    """Piece of its table that an id belongs to, by the upper half of its hash."""
    return np.int64(((hashed >> _32) * np.uint64(pieces)) >> _32)


@njit(nogil=True, cache=True, inline="always", error_model="numpy")
def home_of(hashed, slots):
    """First slot to look at, by the lower half of the hash."""
    return np.int64(((hashed & _LOW) * np.uint64(slots)) >> _32)


@njit(nogil=True, cache=True, inline="always", error_model="numpy")
def tag_of(hashed, row_bits):
    """What stands in a slot above the row."""
    return np.int64(hashed >> _32) & ((np.int64(1) << (32 - row_bits)) - 1)


@njit(nogil=True, cache=True, inline="always", error_model="numpy")
def _next_with_tag(slot, tag, first, count, row_bits, slots):
    """The first slot from ``slot`` on that has the tag, or -1 where an empty one comes before it."""
    while True:
        value = np.int64(slots[first + slot])
        if value == 0:
            return -1
        if value >> row_bits == tag:
            return slot
        slot += 1
        if slot == count:
            slot = 0


@njit(nogil=True, cache=True, error_model="numpy")
def find_block(low, high, occurrences, ids, place, count, row_bits, slots, records, at, rows):
    """Row in its segment, or -1, of each of the sorted occurrences low..high-1, at most BLOCK, into ``rows``."""
    position, hashed, number = occurrences
    first = place.first_slot
    for k in range(low, high):
        at[k - low] = home_of(hashed[k], count)
        prefetch(slots, first + at[k - low])
    mask = (np.int64(1) << row_bits) - 1
    for k in range(low, high):
        slot = _next_with_tag(at[k - low], tag_of(hashed[k], row_bits), first, count, row_bits, slots)
        at[k - low] = slot
        if slot >= 0:
            prefetch(records, place.first_record + (np.int64(slots[first + slot]) & mask) - 1)
    for k in range(low, high):
        slot, id = at[k - low], ids[position[k]]
        row = np.int64(-1)
        while slot >= 0:
            row = (np.int64(slots[first + slot]) & mask) - 1
            record = records[place.first_record + row]
            if record.id == id and record.feature == number[k]:
                break
            row = -1
            after = slot + 1 if slot + 1 < count else 0
            slot = _next_with_tag(after, tag_of(hashed[k], row_bits), first, count, row_bits, slots)
        rows[k - low] = row


@njit(nogil=True, cache=True, inline="always", error_model="numpy")
def _enter_slot(row, hashed, place, count, row_bits, slots):
    slot = home_of(hashed, count)
    while slots[place.first_slot + slot] != 0:
        slot += 1
        if slot == count:
            slot = 0
    slots[place.first_slot + slot] = np.uint32(tag_of(hashed, row_bits) << row_bits | (row + 1))


@njit(nogil=True, cache=True, error_model="numpy")
def fill_slots(segment, place, table, count, slots, records):
    """Makes ``count`` slots the segment's own and enters every resident id, as its records say."""
    for slot in range(place.first_slot, place.first_slot + count):
        slots[slot] = 0
    segment.slots = count
    for row in range(segment.used):
        record = records[place.first_record + row]
        if record.feature != FREE:
            _enter_slot(row, id_hash(record.id, record.feature), place, count, table.row_bits, slots)


@njit(nogil=True, cache=True, error_model="numpy")
def fill_segments(segments, places, tables, records, slots):
    """Makes the slots of all segments anew from their records."""
    for s in range(len(segments)):
        fill_slots(segments[s], places[s], tables[places[s].table], segments[s].slots, slots, records)


@njit(nogil=True, cache=True, error_model="numpy")
def ensure_slots(segment, place, table, resident, slots, records):
    """Makes room in the slots for so many resident ids, by a quarter more slots at least."""
    if resident <= segment.slots * LOAD:
        return
    count = max(np.int64(resident / LOAD) + 1, np.int64(segment.slots * GROWTH) + 1, FIRST_SLOTS)
    fill_slots(segment, place, table, min(count, table.slots), slots, records)


@njit(nogil=True, cache=True, error_model="numpy")
def take_row(segment, place, table, batch, records):
    """A row for a new id: of those freed the first one if it has rested, else one never used, else -1."""
    if segment.free > 0:
        row = segment.first_free
        record = records[place.first_record + row]
        if np.int64(record.last_seen) + REST <= batch:
            segment.first_free = record.id - 1
            segment.free -= 1
            return row
    if segment.used < table.capacity:
        segment.used += 1
        return segment.used - 1
    return -1


@njit(nogil=True, cache=True, error_model="numpy")
def enter(row, id, feature, hashed, last_seen, count, segment, place, table, slots, records):
    """Gives a row to an id; there is room in the slots."""
    write_record(records, place.first_record + row, id, feature, last_seen, count)
    _enter_slot(row, hashed, place, segment.slots, table.row_bits, slots)


@njit(nogil=True, cache=True, inline="always", error_model="numpy")
def write_record(records, at, id, feature, last_seen, count):
    record = records[at]
    record.id = id
    record.feature = np.uint16(feature)
    record.last_seen = np.uint32(last_seen)
    record.count = np.uint16(min(count, MOST_COUNTED))


@njit(nogil=True, cache=True, error_model="numpy")
def free_row(row, batch, segment, place, table, slots, records):
    """Takes a resident id's row from it and lets the row rest at the end of the queue."""
    record = records[place.first_record + row]
    _remove_slot(row, id_hash(record.id, record.feature), segment, place, table, slots, records)
    write_record(records, place.first_record + row, 0, FREE, batch, 0)
    if segment.free > 0:
        records[place.first_record + segment.last_free].id = row + 1
    else:
        segment.first_free = row
    segment.last_free = row
    segment.free += 1
    if segment.fresh_batch != batch:
        segment.fresh, segment.fresh_batch = row, batch


@njit(nogil=True, cache=True, error_model="numpy")
def freed_in(batch, segments, places, records):
    """Table and row of all that were freed in the latest batch, int64 [2, n]; they rest, so that none is given yet."""
    count = 0
    for fill in range(2):
        if fill:
            found = np.empty((2, count), np.int64)
        count = 0
        for s in range(len(segments)):
            if segments[s].fresh_batch != batch or segments[s].free == 0:
                continue
            row = segments[s].fresh
            while True:
                if fill:
                    found[0, count], found[1, count] = places[s].table, places[s].first_row + row
                count += 1
                if row == segments[s].last_free:
                    break
                row = records[places[s].first_record + row].id - 1
    return found


@njit(nogil=True, cache=True, error_model="numpy")
def hashed_ids(ids, feature):
    """Hash of ids of one feature, by its number in its table: uint64 [n] of int64 [n]. It must never change."""
    found = np.empty(len(ids), np.uint64)
    for i in range(len(ids)):
        found[i] = id_hash(ids[i], feature)
    return found


@njit(nogil=True, cache=True, error_model="numpy")
def _remove_slot(row, hashed, segment, place, table, slots, records):
    """Empties a row's slot; later ones of the cluster move back where their home allows it."""
    first, count = place.first_slot, segment.slots
    mask = (np.int64(1) << table.row_bits) - 1
    hole = home_of(hashed, count)
    while np.int64(slots[first + hole]) & mask != row + 1:
        hole = hole + 1 if hole + 1 < count else 0
    slot = hole
    while True:
        slot = slot + 1 if slot + 1 < count else 0
        value = slots[first + slot]
        if value == 0:
            break
        record = records[place.first_record + (np.int64(value) & mask) - 1]
        home = home_of(id_hash(record.id, record.feature), count)
        stays = hole < home <= slot if hole < slot else home > hole or home <= slot
        if not stays:
            slots[first + hole] = value
            hole = slot
    slots[first + hole] = 0
