"""Which new ids get a row: all, those counted often enough (a count-min sketch over a window), or by lot.

The sketch of a segment (see id_records.py) has DEPTH rows of W counters. With a window each counter is four, one a
*pane* of a quarter of the window; as time moves on the oldest pane begins anew. Nothing sweeps: a line of 64 bytes
holds the number of the pane that it was last written in beside its counters, and forgets older panes when it is next
written, so the cost of a batch is bounded by its ids. Update is conservative (Estan and Varghese 2002): of an id's
counters in a pane only those below its new estimate are raised.

An id's estimate is the sum over the panes of the smallest of its counters. It is never below the id's occurrences in
the last three quarters of the window before the clock, counted when they arrived (all of them where there is no
window), as long as they are fewer than 65,535, where counters stop; a threshold is at most that, so a stopped counter
admits. It exceeds the id's occurrences in the panes by more than e * N / W with probability exp(-DEPTH) at most, N
being the occurrences that the segment counted in the panes and W its counters a row (Cormode and Muthukrishnan 2005).
"""

import math
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numba import njit

from .records import MOST_COUNTED, mix

DEPTH = 4
PANES = 4
LINE = 32
"""uint16 of a line of memory."""
NONE, COUNT, PROBABILISTIC = range(3)

_ROW_KEY = np.uint64(0xD1B54A32D192ED03)


@dataclass(frozen=True)
class Admission:
    """When an id that is absent gets a row of its own; until then it uses the out-of-vocabulary row.

    Attributes:
        kind: "none" admits at once; "count" at the ``threshold``-th occurrence within ``window``, see this file's head
            for what is guaranteed; "probabilistic" admits at each occurrence with p = 1 - 0.05^(1/threshold), so that
            after ``threshold`` occurrences 95 % of ids are in (Monolith, arXiv 2209.07663). Occurrences in one batch
            count together.
        threshold: occurrences, 1 to 65,535.
        window: of "count", in seconds of sample time (or batches, where samples have no time): occurrences that arrived
            more than this before the clock no longer count, those of its last three quarters surely do. 0: all count.
        counters: of "count", uint16 cells of the table; the memory is twice as many bytes. e * N / W in this file's
            head is to stay well below the threshold (``filter_excess`` of the counters tells): without a window W is a
            quarter of the cells, with one 7/128.
    """

    kind: Literal["none", "count", "probabilistic"] = "none"
    threshold: int = 1
    window: int = field(default=0, kw_only=True)
    counters: int = field(default=0, kw_only=True)

    def __post_init__(self) -> None:
        if self.kind not in ("none", "count", "probabilistic"):
            raise ValueError(f'admission.kind must be "none", "count" or "probabilistic", got {self.kind!r}')
        if not 1 <= self.threshold <= MOST_COUNTED:
            raise ValueError(
                f"admission.threshold must be in [1, {MOST_COUNTED}], where the counters stop, got {self.threshold}"
            )
        if self.kind != "count" and (self.window or self.counters):
            raise ValueError(f'admission.window and counters belong to kind "count", got kind {self.kind!r}')
        if self.window < 0:
            raise ValueError(f"admission.window must be >= 0 (0: occurrences count for ever), got {self.window}")
        if self.kind == "count" and self.counters < LINE * DEPTH:
            raise ValueError(
                f"admission.counters must be at least {LINE * DEPTH}, got {self.counters}; take some times as many as"
                " different ids occur in the window"
            )

    @property
    def panes(self) -> int:
        return PANES if self.window else 1

    @property
    def pane_length(self) -> int:
        """Of each pane in units of the clock; 0 without a window."""
        return -(-self.window // PANES)

    def lines(self, pieces: int) -> int:
        """Lines in a row of the sketch of each of a table's segments."""
        return max(1, self.counters // (pieces * DEPTH * LINE)) if self.kind == "count" else 0

    def excess_bound(self, noted: float, lines: int) -> float:
        """e * N / W, which one id's estimate exceeds by with probability exp(-DEPTH) at most; 0 for other kinds."""
        return math.e * noted / (lines * _counters_of_line(self.panes)) if lines else 0.0


@njit(nogil=True, cache=True, inline="always", error_model="numpy")
def _counters_of_line(panes):
    # With panes the line's first 8 bytes hold the pane's number.
    return LINE if panes == 1 else LINE // panes - 1


@njit(nogil=True, cache=True, error_model="numpy")
def note(hashed, count, table, place, pane, cells):
    """Counts ``count`` occurrences of an id in a segment's sketch; returns the estimate with them.

    ``pane`` is the current pane's number, which never falls.
    """
    panes, of_line = table.panes, _counters_of_line(table.panes)
    width = np.uint64(table.blocks * of_line)
    places = np.empty(DEPTH, np.int64)
    for d in range(DEPTH):
        # The upper half of a mixed word, scaled to [0, width).
        drawn = mix(hashed + np.uint64(d + 1) * _ROW_KEY) >> np.uint64(32)
        column = np.int64((drawn * width) >> np.uint64(32))
        line = place.first_cell + (d * table.blocks + column // of_line) * LINE
        if panes > 1:
            _forget(line, pane, panes, cells)
        places[d] = line + (panes if panes > 1 else 0) + column % of_line * panes
    estimate = 0
    for p in range(panes):
        least = np.int64(MOST_COUNTED)
        for d in range(DEPTH):
            least = min(least, np.int64(cells[places[d] + p]))
        if p == pane % panes:
            least = min(least + count, MOST_COUNTED)
            for d in range(DEPTH):
                if cells[places[d] + p] < least:
                    cells[places[d] + p] = np.uint16(least)
        estimate += least
    return estimate


@njit(nogil=True, cache=True, inline="always", error_model="numpy")
def _forget(line, pane, panes, cells):
    """Clears a line's counters of panes that began since it was last written."""
    written = np.int64(cells[line]) | np.int64(cells[line + 1]) << 16
    if written == pane:
        return
    for p in range(max(written + 1, pane - panes + 1), pane + 1):
        for at in range(line + panes + p % panes, line + LINE, panes):
            cells[at] = 0
    cells[line] = np.uint16(pane & 0xFFFF)
    cells[line + 1] = np.uint16(pane >> 16)


@njit(nogil=True, cache=True, error_model="numpy")
def note_total(segment, count, pane, panes):
    """Adds to the occurrences that a segment counted in the current pane; forgets panes as the lines do."""
    for p in range(max(segment.pane + 1, pane - panes + 1), pane + 1):
        _add_noted(segment, p % panes, -1)
    segment.pane = max(segment.pane, pane)
    _add_noted(segment, pane % panes, count)


@njit(nogil=True, cache=True, inline="always", error_model="numpy")
def _add_noted(segment, p, count):
    """Adds to a pane's occurrences; -1 clears them."""
    if p == 0:
        segment.noted_0 = segment.noted_0 + count if count >= 0 else 0
    elif p == 1:
        segment.noted_1 = segment.noted_1 + count if count >= 0 else 0
    elif p == 2:
        segment.noted_2 = segment.noted_2 + count if count >= 0 else 0
    else:
        segment.noted_3 = segment.noted_3 + count if count >= 0 else 0


@njit(nogil=True, cache=True, error_model="numpy")
def drawn(hashed, count, threshold, seed, batch):
    """Whether an id with so many occurrences in a batch is admitted by lot; the same on every rank and replay."""
    bits = mix(mix(hashed ^ mix(np.uint64(seed))) + np.uint64(batch) * _ROW_KEY)
    uniform = np.float64(bits >> np.uint64(11)) * (1.0 / 9007199254740992.0)
    return uniform < 1.0 - 0.05 ** (count / threshold)
