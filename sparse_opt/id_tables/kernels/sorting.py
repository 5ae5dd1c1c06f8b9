"""Sorting of a batch's ids by segment; compiled by numba without the GIL. Sizes: V ids, n of them with a segment."""

import numpy as np
from numba import njit

from .hashing import id_hash, segment_of
from .memory import RESERVED_ROWS


@njit(nogil=True, cache=True, error_model="numpy")
def find_segments_of_ids(
    ids, splits, feature_table, tables, segment_numbers, first_segment, hashes, segments, rows, counts
):
    """Finds each id's segment, numbered from the rank's first; see :class:`IdLayout` for the first arguments.

    Writes ``segments``, int32 [V], with -1 for ids that no table translates, which are copied to ``rows``; ``hashes``,
    uint64 [V]; and the number of each segment's ids into ``counts`` from [1] on.
    """
    for f in range(len(splits) - 1):
        t, feature = feature_table[f, 0], feature_table[f, 1]
        for i in range(splits[f], splits[f + 1]):
            if t < 0 or 0 <= ids[i] < RESERVED_ROWS:
                rows[i] = ids[i]
                segments[i] = -1
                continue
            hashes[i] = id_hash(ids[i], feature)
            number = tables[t].first_segment + segment_of(hashes[i], tables[t].segments)
            segment = segment_numbers[number] - first_segment
            segments[i] = segment
            counts[segment + 1] += 1


@njit(nogil=True, cache=True, error_model="numpy")
def sort_by_segment(splits, feature_table, hashes, segments, begins):
    """Sorts the ids by segment, stably: the first three arrays of :class:`Occurrences`.

    ``begins`` is where each segment's ids begin, int64 [segments + 1].
    """
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
                features[k] = np.uint16(feature_table[f, 1])
    return positions, sorted_hashes, features
