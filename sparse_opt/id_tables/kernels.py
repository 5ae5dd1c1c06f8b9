"""Kernels that take a batch's ids through the id tables, segment by segment; compiled by numba without the GIL.

A segment (see id_records.py) sees its ids in the order of the batch and nothing of other segments, so results depend
neither on the number of threads nor on how segments lie on ranks. What happens in a segment, in this order, is told by
:class:`cowrec.sparse_opt.id_tables.tables.IdTables`. Sizes: V ids of the batch, n of them that are looked up.
"""

import numpy as np
from numba import njit

from .admission import COUNT, PROBABILISTIC, drawn, note, note_total
from .records import (
    BLOCK,
    FREE,
    MOST_COUNTED,
    ensure_slots,
    enter,
    find_block,
    free_row,
    id_hash,
    mix,
    piece_of,
    take_row,
    write_record,
)

RESERVED = 2
"""Ids 0 and 1 are the reserved rows of every table, and stay what they are."""
LEAST_ROOM = 64
"""A segment keeps 1 of so many rows free where it evicts."""
PIPELINE = 6
"""And room for the births of so many batches like this one: freed rows rest for four."""
_DIGIT = 12


@njit(nogil=True, cache=True, error_model="numpy")
def spread(ids, splits, feature_table, tables, segments_of, first_segment, hashes, segment_of, rows, counts):
    """Segment of each id, numbered from the rank's first, int32 [V], or -1 where it passes as it is into ``rows``.

    Counts the segments' ids in ``counts`` from [1] on.
    """
    for f in range(len(splits) - 1):
        t, number = feature_table[f, 0], feature_table[f, 1]
        for i in range(splits[f], splits[f + 1]):
            if t < 0 or 0 <= ids[i] < RESERVED:
                rows[i] = ids[i]
                segment_of[i] = -1
                continue
            hashes[i] = id_hash(ids[i], number)
            segment = segments_of[tables[t].first_piece + piece_of(hashes[i], tables[t].pieces)] - first_segment
            segment_of[i] = segment
            counts[segment + 1] += 1


@njit(nogil=True, cache=True, error_model="numpy")
def sort_by_segment(splits, feature_table, hashes, segment_of, begins):
    """The ids by segment, in each in the order of the batch: position int32, hash uint64, number of the feature uint16.

    ``begins`` is int64 [segments + 1].
    """
    n = begins[-1]
    position, hashed, number = np.empty(n, np.int32), np.empty(n, np.uint64), np.empty(n, np.uint16)
    after = begins.copy()
    for f in range(len(splits) - 1):
        for i in range(splits[f], splits[f + 1]):
            segment = segment_of[i]
            if segment >= 0:
                k = after[segment]
                after[segment] = k + 1
                position[k] = i
                hashed[k] = hashes[i]
                number[k] = np.uint16(feature_table[f, 1])
    return position, hashed, number


@njit(nogil=True, cache=True, inline="always", error_model="numpy")
def _is_expired(record, table, clock):
    return table.expire_after > 0 and np.int64(record.last_seen) + table.expire_after < clock


@njit(nogil=True, cache=True, error_model="numpy")
def find_segments(low, high, begins, occurrences, ids, rows, memory, clock):
    """Rows of the ids of segments low..high-1, 0 for those that have none; changes nothing else."""
    segments, places, tables, records, slots, _ = memory
    at, found = np.empty(BLOCK, np.int64), np.empty(BLOCK, np.int64)
    for s in range(low, high):
        place = places[s]
        table, count = tables[place.table], segments[s].slots
        for first in range(begins[s], begins[s + 1], BLOCK):
            last = min(first + BLOCK, begins[s + 1])
            _find(first, last, occurrences, ids, place, count, table.row_bits, slots, records, at, found)
            for k in range(first, last):
                row = found[k - first]
                alive = row >= 0 and not _is_expired(records[place.first_record + row], table, clock)
                rows[occurrences[0][k]] = place.first_row + row if alive else 0


@njit(nogil=True, cache=True, inline="always", error_model="numpy")
def _find(first, last, occurrences, ids, place, count, row_bits, slots, records, at, found):
    if count == 0:
        found[: last - first] = -1
    else:
        find_block(first, last, occurrences, ids, place, count, row_bits, slots, records, at, found)


@njit(nogil=True, cache=True, error_model="numpy")
def assign_segments(low, high, begins, occurrences, ids, times, rows, births, memory, clock, batch, seed):
    """Takes the batch through segments low..high-1.

    Fills ``rows`` [V], and ``births``: each segment's number of them, and from its begin on their rows in the table and
    the (sorted) places of their ids.
    """
    segments, places, tables, records, slots, cells = memory
    most = 0
    for s in range(low, high):
        most = max(most, begins[s + 1] - begins[s])
    # Absent occurrences and the candidates among them, which are distinct ids.
    absent, candidate_of, old_rows = np.empty(most, np.int64), np.empty(most, np.int64), np.empty(most, np.int64)
    candidates = np.empty((most, 4), np.int64)
    for s in range(low, high):
        segment, place = segments[s], places[s]
        table = tables[place.table]
        if table.expire_after > 0 and (batch + place.number) % table.turns == 0:
            _sweep(segment, place, table, clock, batch, slots, records)
        births[0][s] = 0
        if begins[s] == begins[s + 1]:
            continue
        segment.occurrences += begins[s + 1] - begins[s]
        count = _touch(
            begins[s], begins[s + 1], occurrences, ids, times, rows, segment, place, table, clock, slots, records,
            absent, old_rows,
        )  # fmt: skip
        if count == 0:
            continue
        used = _gather(
            absent[:count], old_rows, occurrences, ids, times, table, segment, clock, candidate_of, candidates
        )
        wanted = _decide(
            candidates[:used], occurrences, segment, place, table, clock, batch, seed, slots, records, cells
        )
        births[0][s] = _give_rows(
            candidates[:used], wanted, occurrences, ids, begins[s], births, segment, place, table, clock, batch, slots,
            records,
        )  # fmt: skip
        for i in range(count):
            row = candidates[candidate_of[i], ROW]
            rows[occurrences[0][absent[i]]] = place.first_row + row if row >= 0 else 0
            segment.unknown += row < 0


@njit(nogil=True, cache=True, error_model="numpy")
def _sweep(segment, place, table, clock, batch, slots, records):
    """Frees the expired among the next ``slice`` records."""
    for _ in range(min(table.slice, segment.used)):
        row = segment.hand if segment.hand < segment.used else 0
        segment.hand = row + 1
        record = records[place.first_record + row]
        if record.feature != FREE and _is_expired(record, table, clock):
            free_row(row, batch, segment, place, table, slots, records)
            segment.expired += 1


@njit(nogil=True, cache=True, error_model="numpy")
def _touch(
    begin, end, occurrences, ids, times, rows, segment, place, table, clock, slots, records, absent, old_rows
):  # fmt: skip
    """Rows of the ids that live, whose records see them; the other occurrences into ``absent``, with expired rows."""
    position = occurrences[0]
    at, found = np.empty(BLOCK, np.int64), np.empty(BLOCK, np.int64)
    count = 0
    for first in range(begin, end, BLOCK):
        last = min(first + BLOCK, end)
        _find(first, last, occurrences, ids, place, segment.slots, table.row_bits, slots, records, at, found)
        for k in range(first, last):
            row = found[k - first]
            if row >= 0:
                record = records[place.first_record + row]
                if not _is_expired(record, table, clock):
                    seen = times[position[k]] if len(times) else clock
                    if seen > record.last_seen:
                        record.last_seen = np.uint32(seen)
                    if record.count < MOST_COUNTED:
                        record.count += np.uint16(1)
                    rows[position[k]] = place.first_row + row
                    continue
            absent[count] = k
            old_rows[count] = row
            count += 1
    return count


FIRST, TIMES, NEWEST, ROW = range(4)
"""Columns of candidates: first occurrence; occurrences that are not late; their newest time; the row, or one below."""
NO_ROW, WANTED = -1, -2


@njit(nogil=True, cache=True, error_model="numpy")
def _gather(absent, old_rows, occurrences, ids, times, table, segment, clock, candidate_of, candidates):
    """The distinct ids among absent occurrences, in the order of the first of each; returns how many they are."""
    position, hashed, number = occurrences
    bits = 4
    while (1 << bits) < 2 * len(absent):
        bits += 1
    known = np.full(1 << bits, -1, np.int32)
    used = 0
    for i in range(len(absent)):
        k = absent[i]
        # Mixed again: the ids of a segment share bits of their hash.
        slot = np.int64(mix(hashed[k]) >> np.uint64(64 - bits))
        while known[slot] >= 0:
            other = candidates[known[slot], FIRST]
            if ids[position[other]] == ids[position[k]] and number[other] == number[k]:
                break
            slot = (slot + 1) & ((1 << bits) - 1)
        c = np.int64(known[slot])
        if c < 0:
            c = used
            known[slot] = c
            candidates[c, FIRST], candidates[c, TIMES], candidates[c, NEWEST] = k, 0, 0
            candidates[c, ROW] = old_rows[i]
            used += 1
        candidate_of[i] = c
        seen = times[position[k]] if len(times) else clock
        if table.expire_after > 0 and seen + table.expire_after < clock:
            segment.late += 1
        else:
            candidates[c, TIMES] += 1
            candidates[c, NEWEST] = max(candidates[c, NEWEST], seen)
    return used


@njit(nogil=True, cache=True, error_model="numpy")
def _decide(candidates, occurrences, segment, place, table, clock, batch, seed, slots, records, cells):
    """Marks the candidates that are to have a new row (WANTED), and frees expired rows of those that are not admitted.

    Admitted ids with an expired row keep it. Returns how many rows are wanted.
    """
    hashed = occurrences[1]
    pane = clock // table.pane_seconds if table.pane_seconds > 0 else np.int64(0)
    wanted = 0
    for c in range(len(candidates)):
        count, hash_of = candidates[c, TIMES], hashed[candidates[c, FIRST]]
        if count == 0:
            candidates[c, ROW] = NO_ROW
            continue
        admitted = True
        if table.admission == COUNT:
            admitted = note(hash_of, count, table, place, pane, cells) >= table.threshold
            note_total(segment, count, pane, table.panes)
        elif table.admission == PROBABILISTIC:
            admitted = drawn(hash_of, count, table.threshold, seed, batch)
        row = candidates[c, ROW]
        segment.expired += row >= 0
        if admitted and row < 0:
            candidates[c, ROW] = WANTED
            wanted += 1
        elif not admitted:
            segment.below_threshold += 1
            candidates[c, ROW] = NO_ROW
            if row >= 0:
                free_row(row, batch, segment, place, table, slots, records)
    return wanted


@njit(nogil=True, cache=True, error_model="numpy")
def _give_rows(
    candidates, wanted, occurrences, ids, begin, births, segment, place, table, clock, batch, slots, records
):  # fmt: skip
    """Rows of the admitted candidates and their births, in the order of the candidates; returns how many are born."""
    position, hashed, number = occurrences
    for c in range(len(candidates)):
        # Before room is made, so that an id of this batch does not count as old.
        if candidates[c, ROW] >= 0:
            first = candidates[c, FIRST]
            at = place.first_record + candidates[c, ROW]
            write_record(records, at, ids[position[first]], number[first], candidates[c, NEWEST], candidates[c, TIMES])
    if table.evicts and wanted > 0:
        _make_room(wanted, segment, place, table, clock, batch, slots, records)
    resident = segment.used - segment.free
    ensure_slots(segment, place, table, min(resident + wanted, table.capacity), slots, records)
    born = 0
    for c in range(len(candidates)):
        row, first = candidates[c, ROW], candidates[c, FIRST]
        if row == WANTED:
            row = take_row(segment, place, table, batch, records)
            candidates[c, ROW] = row
            if row < 0:
                segment.refused += 1
                continue
            enter(
                row, ids[position[first]], number[first], hashed[first], candidates[c, NEWEST], candidates[c, TIMES],
                segment, place, table, slots, records,
            )  # fmt: skip
        if row >= 0:
            births[1][begin + born] = place.first_row + row
            births[2][begin + born] = first
            born += 1
    segment.admitted += born
    return born


@njit(nogil=True, cache=True, error_model="numpy")
def _make_room(wanted, segment, place, table, clock, batch, slots, records):
    """Evicts the oldest (or least frequent, then oldest; then those in the lowest rows) where too few rows are free.

    The dead that no sweep has met yet go first.
    """
    room = table.capacity - (segment.used - segment.free)
    least = max(table.capacity // LEAST_ROOM, min(PIPELINE * wanted, table.capacity // 4), 1)
    if room >= least:
        return
    count = min(least - room + table.capacity // LEAST_ROOM, segment.used - segment.free)
    highest, ties = _smallest(count, segment.used, place.first_record, table, clock, records)
    for row in range(segment.used):
        record = records[place.first_record + row]
        key = _age(record, table, clock)
        if record.feature == FREE or key > highest or (key == highest and ties == 0):
            continue
        ties -= key == highest
        free_row(row, batch, segment, place, table, slots, records)
    segment.evicted += count


@njit(nogil=True, cache=True, inline="always", error_model="numpy")
def _age(record, table, clock):
    """Orders records by who goes first; 48 bits."""
    by_count = table.least_frequent and not _is_expired(record, table, clock)
    return (np.int64(record.count) << 32 if by_count else np.int64(0)) | np.int64(record.last_seen)


@njit(nogil=True, cache=True, error_model="numpy")
def _smallest(count, used, first_record, table, clock, records):
    """The key of the ``count``-th resident record in the order of going, and how many with that key go.

    A radix select: one pass over the records for each digit.
    """
    prefix, left = np.int64(0), count
    histogram = np.empty(1 << _DIGIT, np.int64)
    for shift in range(48 - _DIGIT, -1, -_DIGIT):
        histogram[:] = 0
        for row in range(used):
            record = records[first_record + row]
            key = _age(record, table, clock)
            if record.feature != FREE and key >> (shift + _DIGIT) == prefix:
                histogram[(key >> shift) & ((1 << _DIGIT) - 1)] += 1
        digit = 0
        while histogram[digit] < left:
            left -= histogram[digit]
            digit += 1
        prefix = prefix << _DIGIT | digit
    return prefix, left


@njit(nogil=True, cache=True, error_model="numpy")
def births_of(begins, births, occurrences, ids, places, total):
    """Table, row, id and number of the feature of all births, int64 [4, total], segment by segment."""
    position, _, number = occurrences
    result = np.empty((4, total), np.int64)
    done = 0
    for s in range(len(places)):
        for b in range(begins[s], begins[s] + births[0][s]):
            first = births[2][b]
            result[0, done], result[1, done] = places[s].table, births[1][b]
            result[2, done], result[3, done] = ids[position[first]], number[first]
            done += 1
    return result
