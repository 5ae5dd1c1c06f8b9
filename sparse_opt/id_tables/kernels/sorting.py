"""Sorting of a batch's ids by segment; compiled by numba without the GIL. Sizes: V ids, n of them with a segment."""

import numpy as np
from numba import njit

from .hashing import id_hash, segment_of
from .memory import RESERVED_ROWS


@njit(nogil=True, cache=True, error_model="numpy")
def segments_of_ids(ids, splits, mapping, first_segment):
    """Segment of each id, int32 [V], numbered from ``first_segment``, -1 for ids that no table translates.

    Also returns the ids' hashes, uint64 [V], and rows, int64 [V], of which those without a segment are set.
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


@njit(nogil=True, cache=True, error_model="numpy")
def sort_by_segment(splits, mapping, segments, hashes, count):
    """Sorts the ids by segment, stably.

    Returns where the ids of each of ``count`` segments begin, int64 [count + 1], and the first three arrays of
    :class:`Occurrences`.
    """
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
