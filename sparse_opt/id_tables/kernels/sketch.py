"""Admission of absent ids: a count-min sketch that counts them over a window, or a random draw.

The sketch of a segment (see memory.py) has DEPTH rows of W counters. With a window, a counter has four numbers, one for
each *pane* of a quarter of the window, and the oldest pane restarts from zero as time moves on. No sweep is needed: a
line of 64 bytes stores the number of the pane in which it was last written beside its counters, and older panes are
cleared when the line is next written. The cost of a batch is therefore bounded by its ids. The update is conservative
(Estan and Varghese 2002): among an id's counters in a pane, only those below the new estimate are raised.

An id's estimate is the sum over the panes of the smallest counter. The estimate is never below the number of the id's
occurrences, with a window those in its last three quarters. Counters saturate at 65,535, the largest threshold, so that
a saturated counter admits. The estimate exceeds the id's occurrences in the panes by more than e * N / W with
probability exp(-DEPTH) at most, where N is the number of occurrences that the segment counted in the panes and W the
number of counters in a row (Cormode and Muthukrishnan 2005).
"""

import numpy as np

from ...kernels.compiled import compiled
from .hashing import mix, scaled
from .memory import DEPTH, LINE, MAX_COUNT

_ROW_KEY = np.uint64(0xD1B54A32D192ED03)


@compiled(inline="always", error_model="numpy")
def counters_per_line(panes):
    """Number of counters in a line; with panes, the first 8 bytes of a line store the number of a pane."""
    return LINE if panes == 1 else LINE // panes - 1


@compiled(error_model="numpy")
def count_id(segment, hashed, count, pane):
    """Adds ``count`` occurrences of an id to a segment's sketch in the current pane; returns its new estimate."""
    cells, lines, panes = segment.cells, segment.table.lines, segment.table.panes
    per_line = counters_per_line(panes)
    offsets = np.empty(DEPTH, np.int64)
    for d in range(DEPTH):
        column = scaled(mix(hashed + np.uint64(d + 1) * _ROW_KEY) >> np.uint64(32), lines * per_line)
        line = segment.location.first_cell + (d * lines + column // per_line) * LINE
        if panes > 1:
            _clear_old_panes(line, pane, panes, cells)
        offsets[d] = line + (panes if panes > 1 else 0) + column % per_line * panes
    estimate = 0
    for p in range(panes):
        smallest = np.int64(MAX_COUNT)
        for d in range(DEPTH):
            smallest = min(smallest, np.int64(cells[offsets[d] + p]))
        if p == pane % panes:
            smallest = min(smallest + count, MAX_COUNT)
            for d in range(DEPTH):
                if cells[offsets[d] + p] < smallest:
                    cells[offsets[d] + p] = np.uint16(smallest)
        estimate += smallest
    return estimate


@compiled(inline="always", error_model="numpy")
def _clear_old_panes(line, pane, panes, cells):
    """Clears a line's counters of panes that began after the line was last written."""
    written = np.int64(cells[line]) | np.int64(cells[line + 1]) << 16
    if written == pane:
        return
    for p in range(max(written + 1, pane - panes + 1), pane + 1):
        for cell in range(line + panes + p % panes, line + LINE, panes):
            cells[cell] = 0
    cells[line] = np.uint16(pane & 0xFFFF)
    cells[line + 1] = np.uint16(pane >> 16)


@compiled(error_model="numpy")
def add_to_total(state, count, pane, panes):
    """Adds to the occurrences that a segment counted in the current pane, and clears old panes."""
    for p in range(max(state.pane + 1, pane - panes + 1), pane + 1):
        state.counted[p % panes] = 0
    state.pane = max(state.pane, pane)
    state.counted[pane % panes] += count


@compiled(error_model="numpy")
def is_drawn(hashed, count, threshold, clock):
    """Draws whether an id with ``count`` occurrences in a batch is admitted; every rank draws the same."""
    bits = mix(mix(hashed ^ mix(np.uint64(clock.seed))) + np.uint64(clock.batch) * _ROW_KEY)
    uniform = np.float64(bits >> np.uint64(11)) * (1.0 / 9007199254740992.0)
    return uniform < 1.0 - 0.05 ** (count / threshold)
