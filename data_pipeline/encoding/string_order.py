"""The order of many strings, eight bytes at a time: much faster than comparing them, where most are short.

U strings.
"""

import numba
import numpy as np
import pyarrow as pa

from cowrec.data_pipeline.hashing import string_buffers

WORD = 8


def string_order(text: pa.Array, before: np.ndarray) -> np.ndarray:
    """Places of strings, int64 [U], sorted by the numbers `before`, int [U], where these are equal by their bytes."""
    offsets, data = string_buffers(text)
    lengths = np.diff(offsets)
    order = np.arange(len(text))
    # Places in `order` that are still to be settled, and what tells apart those that are settled already.
    open_places, group = order.copy(), before
    reach = WORD
    while len(open_places):
        ids = order[open_places]
        words, ends = _words(offsets, data, ids, reach - WORD), np.minimum(lengths[ids], reach)
        inner = np.lexsort((ends, words, group))
        order[open_places] = ids[inner]
        group, words, ends = group[inner], words[inner], ends[inner]
        same = (group[1:] == group[:-1]) & (words[1:] == words[:-1]) & (ends[1:] == ends[:-1]) & (ends[1:] == reach)
        tied = np.r_[same, False] | np.r_[False, same]
        group = np.cumsum(np.r_[True, ~same])[tied]
        open_places = open_places[tied]
        reach += WORD
    return order


@numba.njit(nogil=True, cache=True)
def _words(offsets: np.ndarray, data: np.ndarray, ids: np.ndarray, skip: int) -> np.ndarray:
    """Bytes skip to skip + 8 of the strings `ids` as numbers that are ordered as they are; zeros beyond the end."""
    words = np.zeros(len(ids), np.uint64)
    for i in range(len(ids)):
        start = offsets[ids[i]] + skip
        for k in range(min(WORD, offsets[ids[i] + 1] - start)):
            words[i] |= np.uint64(data[start + k]) << np.uint64(56 - 8 * k)
    return words
