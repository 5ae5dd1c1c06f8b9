"""Lookup and assignment of rows, segment by segment; compiled by numba without the GIL.

A segment processes its ids in the order of the batch, independently of other segments, so results depend neither on the
number of threads nor on the ranks. :class:`cowrec.sparse_opt.id_tables.tables.IdTables` lists the steps of a segment.
Sizes: V ids, n of them with a segment.
"""

from typing import NamedTuple

import numpy as np

from ...kernels.compiled import compiled
from .hashing import id_hash, mix, segment_of
from .memory import ADMIT_BY_COUNT, ADMIT_BY_DRAW, FREE, MAX_COUNT, RESERVED_ROWS
from .sketch import add_to_total, count_id, is_drawn
from .slots import BLOCK, ensure_slots, enter_slot, find_block, free_row, segment_at, take_row, write_record


@compiled(error_model="numpy")
def segments_of_ids(ids, splits, mapping, first_segment):
    """Returns segments, int32 [V], numbered from ``first_segment``, or -1 for ids that no table translates.

    Also returns the ids' hashes, uint64 [V], and rows, int64 [V], which are set for ids without a segment.
    """
    segments, hashes = np.empty(len(ids), np.int32), np.empty(len(ids), np.uint64)
    rows = np.empty(len(ids), np.int64)
    for f in range(len(splits) - 1):
        t, feature = mapping.features[f, 0], mapping.features[f, 1]
        for i in range(splits[f], splits[f + 1]):
            if t < 0 or 0 <= ids[i] < RESERVED_ROWS:
                rows[i] = ids[i]
                segments[i] = -1
                continue
            hashes[i] = id_hash(ids[i], feature)
            table = mapping.tables[t]
            number = table.first_segment + segment_of(hashes[i], table.segments)
            segments[i] = mapping.segment_numbers[number] - first_segment
    return segments, hashes, rows


@compiled(error_model="numpy")
def sort_by_segment(splits, mapping, segments, hashes, count):
    """Returns the begin of each of ``count`` segments, int64 [count + 1], and three arrays of :class:`Occurrences`."""
    begins = np.zeros(count + 1, np.int64)
    for i in range(len(segments)):
        if segments[i] >= 0:
            begins[segments[i] + 1] += 1
    begins = np.cumsum(begins)
    n = begins[-1]
    positions, sorted_hashes = np.empty(n, np.int32), np.empty(n, np.uint64)
    features = np.empty(n, np.uint16)
    after = begins.copy()
    for f in range(len(splits) - 1):
        for i in range(splits[f], splits[f + 1]):
            segment = segments[i]
            if segment >= 0:
                k = after[segment]
                after[segment] = k + 1
                positions[k] = i
                sorted_hashes[k] = hashes[i]
                features[k] = np.uint16(mapping.features[f, 1])
    return begins, positions, sorted_hashes, features


_ROOM_SHARE = 64
"""A segment that evicts keeps one in this number of its rows free."""
_ROOM_BATCHES = 6
"""A segment also keeps the rows of this number of batches like the current one free; the cooldown takes four."""
_DIGIT = 12


@compiled(inline="always", error_model="numpy")
def is_expired(record, table, clock):
    return table.expire_after > 0 and np.int64(record.last_seen) + table.expire_after < clock.now


@compiled(error_model="numpy")
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


@compiled(error_model="numpy")
def make_room(segment, wanted, clock):
    """Evicts ids where too few rows are free: expired, then oldest or least frequent; ties by the lower row."""
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


@compiled(inline="always", error_model="numpy")
def _eviction_key(record, table, clock):
    """Returns the key of a record, 48 bits; records with the smallest keys are evicted first."""
    by_count = table.least_frequent and not is_expired(record, table, clock)
    return (np.int64(record.count) << 32 if by_count else np.int64(0)) | np.int64(record.last_seen)


@compiled(error_model="numpy")
def _eviction_limit(segment, count, clock):
    """Returns the key of the ``count``-th resident record in eviction order, and the number of its equals to evict."""
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


FIRST, TIMES, NEWEST, ROW = range(4)
"""Columns of candidates: first occurrence; occurrences that are not late; their newest time; a row or a value below."""
NO_ROW, WANTED = -1, -2


class NewRowsOfSegments(NamedTuple):
    """Rows that :func:`assign_segments` gave to ids."""

    counts: np.ndarray  # number of each segment's rows, int64 [segments]
    rows: np.ndarray  # rows in the tables, int64 [n]; a segment's rows begin at the index of its first occurrence
    first: np.ndarray  # first occurrence of each row's id, int64 [n]


@compiled(error_model="numpy")
def find_segments(low, high, begins, occurrences, rows, memory, clock):
    """Writes the rows of ids of segments low..high-1 into ``rows``, int64 [V], 0 for unknown ids; changes no table."""
    probes, found = np.empty(BLOCK, np.int64), np.empty(BLOCK, np.int64)
    positions, records = occurrences.position, memory.records
    for s in range(low, high):
        segment = segment_at(memory, s)
        location = segment.location
        for first in range(begins[s], begins[s + 1], BLOCK):
            last = min(first + BLOCK, begins[s + 1])
            find_block(first, last, occurrences, segment, probes, found)
            for k in range(first, last):
                row = found[k - first]
                valid = row >= 0 and not is_expired(records[location.first_record + row], segment.table, clock)
                rows[positions[k]] = location.first_row + row if valid else 0


@compiled(error_model="numpy")
def assign_segments(low, high, begins, occurrences, rows, new_rows, memory, clock):
    """Processes the batch in segments low..high-1; fills ``rows``, int64 [V], and ``new_rows``."""
    longest = 0
    for s in range(low, high):
        longest = max(longest, begins[s + 1] - begins[s])
    # Absent occurrences and the candidates among them, which are distinct ids.
    absent, old_rows = np.empty(longest, np.int64), np.empty(longest, np.int64)
    candidate_of, all_candidates = np.empty(longest, np.int64), np.empty((longest, 4), np.int64)
    for s in range(low, high):
        segment = segment_at(memory, s)
        state, location, table = segment.state, segment.location, segment.table
        if table.expire_after > 0 and (clock.batch + location.number) % table.sweep_interval == 0:
            sweep(segment, clock)
        new_rows.counts[s] = 0
        if begins[s] == begins[s + 1]:
            continue
        state.occurrences += begins[s + 1] - begins[s]
        count = _update_residents(begins[s], begins[s + 1], occurrences, rows, segment, clock, absent, old_rows)
        if count == 0:
            continue
        used = _find_candidates(absent[:count], old_rows, occurrences, segment, clock, candidate_of, all_candidates)
        candidates = all_candidates[:used]
        wanted = _admit(candidates, occurrences, segment, clock)
        new_rows.counts[s] = _give_rows(candidates, wanted, occurrences, begins[s], new_rows, segment, clock)
        for i in range(count):
            row = candidates[candidate_of[i], ROW]
            rows[occurrences.position[absent[i]]] = location.first_row + row if row >= 0 else 0
            state.unknown += row < 0


@compiled(error_model="numpy")
def _update_residents(begin, end, occurrences, rows, segment, clock, absent, old_rows):
    """Writes the rows of resident ids and updates their records; returns the number of the other occurrences.

    The other occurrences are written to ``absent``. ``old_rows`` gets the row of an expired id, or -1.
    """
    positions, times, records = occurrences.position, occurrences.times, segment.records
    first_row, first_record = segment.location.first_row, segment.location.first_record
    probes, found = np.empty(BLOCK, np.int64), np.empty(BLOCK, np.int64)
    count = 0
    for first in range(begin, end, BLOCK):
        last = min(first + BLOCK, end)
        find_block(first, last, occurrences, segment, probes, found)
        for k in range(first, last):
            row = found[k - first]
            if row >= 0:
                record = records[first_record + row]
                if not is_expired(record, segment.table, clock):
                    seen = times[positions[k]] if len(times) else clock.now
                    if seen > record.last_seen:
                        record.last_seen = np.uint32(seen)
                    if record.count < MAX_COUNT:
                        record.count += np.uint16(1)
                    rows[positions[k]] = first_row + row
                    continue
            absent[count] = k
            old_rows[count] = row
            count += 1
    return count


@compiled(error_model="numpy")
def _find_candidates(absent, old_rows, occurrences, segment, clock, candidate_of, candidates):
    """Finds the distinct ids among absent occurrences, by their first occurrences; returns the number of ids."""
    positions, ids, times = occurrences.position, occurrences.ids, occurrences.times
    hashes, features, expire_after = occurrences.hash, occurrences.feature, segment.table.expire_after
    bits = 4
    while (1 << bits) < 2 * len(absent):
        bits += 1
    known = np.full(1 << bits, -1, np.int32)
    used = 0
    for i in range(len(absent)):
        k = absent[i]
        # Mixed again: the ids of a segment share bits of their hash.
        slot = np.int64(mix(hashes[k]) >> np.uint64(64 - bits))
        while known[slot] >= 0:
            other = candidates[known[slot], FIRST]
            if ids[positions[other]] == ids[positions[k]] and features[other] == features[k]:
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
        seen = times[positions[k]] if len(times) else clock.now
        if expire_after > 0 and seen + expire_after < clock.now:
            segment.state.late += 1
        else:
            candidates[c, TIMES] += 1
            candidates[c, NEWEST] = max(candidates[c, NEWEST], seen)
    return used


@compiled(error_model="numpy")
def _admit(candidates, occurrences, segment, clock):
    """Marks candidates that get a new row as WANTED and returns their number; frees rows of candidates not admitted."""
    state, table = segment.state, segment.table
    pane = max(clock.now // table.pane_length, state.pane) if table.pane_length > 0 else np.int64(0)
    wanted = 0
    for c in range(len(candidates)):
        count, hashed = candidates[c, TIMES], occurrences.hash[candidates[c, FIRST]]
        if count == 0:
            candidates[c, ROW] = NO_ROW
            continue
        admitted = True
        if table.admission == ADMIT_BY_COUNT:
            admitted = count_id(segment, hashed, count, pane) >= table.threshold
            add_to_total(state, count, pane, table.panes)
        elif table.admission == ADMIT_BY_DRAW:
            admitted = is_drawn(hashed, count, table.threshold, clock)
        row = candidates[c, ROW]
        state.expired += row >= 0
        if admitted and row < 0:
            candidates[c, ROW] = WANTED
            wanted += 1
        elif not admitted:
            state.below_threshold += 1
            candidates[c, ROW] = NO_ROW
            if row >= 0:
                free_row(segment, row, clock.batch)
    return wanted


@compiled(error_model="numpy")
def _give_rows(candidates, wanted, occurrences, begin, new_rows, segment, clock):
    """Gives rows to the admitted candidates, in their order; returns the number of given rows."""
    positions, ids, features = occurrences.position, occurrences.ids, occurrences.feature
    state, table = segment.state, segment.table
    for c in range(len(candidates)):
        # Before room is made, so that no id of this batch counts as old.
        row, first = candidates[c, ROW], candidates[c, FIRST]
        if row >= 0:
            write_record(
                segment, row, ids[positions[first]], features[first], candidates[c, NEWEST], candidates[c, TIMES]
            )
    if table.evicts and wanted > 0:
        make_room(segment, wanted, clock)
    ensure_slots(segment, min(state.used - state.free + wanted, table.capacity))
    given = 0
    for c in range(len(candidates)):
        row, first = candidates[c, ROW], candidates[c, FIRST]
        if row == WANTED:
            row = take_row(segment, clock.batch)
            candidates[c, ROW] = row
            if row < 0:
                state.refused += 1
                continue
            write_record(
                segment, row, ids[positions[first]], features[first], candidates[c, NEWEST], candidates[c, TIMES]
            )
            enter_slot(segment, row, occurrences.hash[first])
        if row >= 0:
            new_rows.rows[begin + given] = segment.location.first_row + row
            new_rows.first[begin + given] = first
            given += 1
    state.admitted += given
    return given


@compiled(error_model="numpy")
def collect_new_rows(begins, new_rows, occurrences, locations):
    """Returns table, row, id and number of the feature of all new rows, int64 [4, n], segment by segment."""
    result = np.empty((4, new_rows.counts.sum()), np.int64)
    done = 0
    for s in range(len(locations)):
        for k in range(begins[s], begins[s] + new_rows.counts[s]):
            first = new_rows.first[k]
            result[0, done], result[1, done] = locations[s].table, new_rows.rows[k]
            result[2, done], result[3, done] = occurrences.ids[occurrences.position[first]], occurrences.feature[first]
            done += 1
    return result
