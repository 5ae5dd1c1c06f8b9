"""Memory of the id tables: the layout of records, slots and segments, and the tuples that kernels take.

A *segment* is a part of one table: an id belongs to the segment that its hash selects. It owns a range of records (one
a row: the id that the row belongs to), a range of slots (open addressing with linear probing: the row of an id) and a
range of cells (the sketch that counts absent ids, see sketch.py). All ranges are reserved for the whole capacity in
memory that the system commits page by page as it is written; ``used`` records and ``slots`` slots of them are in use.

A slot is 0, or a row's number plus one with bits of the id's hash above it, which rule out nearly every wrong slot
without reading its record. Free records form a queue that is linked through the records themselves: ``id`` is the next
one's number plus one, ``last_seen`` the batch that freed it.
"""

import mmap
from typing import NamedTuple

import numpy as np

RESERVED_ROWS = 2
"""Rows of OUT_OF_VOCABULARY and MISSING, the first ones of every table. Ids 0 and 1 pass through to them unchanged."""

RECORD = np.dtype([("id", "<i8"), ("last_seen", "<u4"), ("count", "<u2"), ("feature", "<u2")])
"""One row: 16 bytes. ``feature`` is the feature's number in its table, or FREE."""
FREE = 0xFFFF
MAX_COUNT = 0xFFFF
"""Largest count of a record and of a sketch's counter; counts saturate here."""
PANES = 4
"""Parts of an admission window that a sketch counts separately."""
DEPTH = 4
"""Rows of a sketch."""
LINE = 32
"""uint16 cells in a line of a sketch's memory."""
MAX_LOAD = 0.8
"""Largest share of a segment's slots that is in use."""
ADMIT_ALL, ADMIT_BY_COUNT, ADMIT_BY_DRAW = range(3)
"""Values of a table's ``admission``."""

COUNTERS = ("admitted", "refused", "below_threshold", "expired", "evicted", "late", "unknown", "occurrences")
SEGMENT_STATE = np.dtype(
    [
        *((name, "<i8") for name in ("used", "free", "first_free", "last_free", "fresh", "fresh_batch")),
        *((name, "<i8") for name in ("slots", "hand", *COUNTERS, "pane")),
        ("counted", "<i8", (PANES,)),
    ]
)
"""Changing state of a segment, saved in checkpoints. ``used`` - ``free`` rows are resident. ``fresh`` is the first row
freed in batch ``fresh_batch``, the latest batch that freed one. The sweep continues at record ``hand``. ``counted`` are
the occurrences that the sketch counted in each pane, ``pane`` the newest of them."""
SEGMENT_LOCATION = np.dtype(
    [(name, "<i8") for name in ("number", "table", "first_row", "first_record", "first_slot", "first_cell")]
)
"""Location of a segment: its number among those of all ranks, its table, the table's row of its first record, and its
first record, slot and cell in the rank's memory."""
TABLE_SETTINGS = np.dtype(
    [
        *((name, "<i8") for name in ("segments", "first_segment", "capacity", "row_bits", "slots")),
        *((name, "<i8") for name in ("sweep_records", "sweep_interval", "least_frequent", "evicts", "expire_after")),
        *((name, "<i8") for name in ("admission", "threshold", "panes", "pane_length", "lines")),
    ]
)
"""Settings that a table's segments share, most of them of its IdTableConfig. ``capacity``, ``slots`` and ``lines`` (of
a row of the sketch) are those of one segment; every ``sweep_interval`` batches it is swept by ``sweep_records``."""


class IdMapping(NamedTuple):
    """Mapping of ids to segments."""

    features: np.ndarray  # table of each feature, -1 if none serves it, and its number in that, int64 [F, 2]
    tables: np.ndarray  # TABLE_SETTINGS [T]
    segment_numbers: np.ndarray  # of each table's segments among all, int32; a table's begin at its ``first_segment``


class Memory(NamedTuple):
    """All segments of a rank, and the memory that they share."""

    states: np.ndarray
    locations: np.ndarray
    tables: np.ndarray
    records: np.ndarray
    slots: np.ndarray
    cells: np.ndarray


class Segment(NamedTuple):
    """One segment: its elements of the first three arrays of :class:`Memory`, and the other arrays."""

    state: np.void
    location: np.void
    table: np.void
    records: np.ndarray
    slots: np.ndarray
    cells: np.ndarray


class Occurrences(NamedTuple):
    """Ids of a batch, stably sorted by segment."""

    position: np.ndarray  # in the batch, int32 [n]
    hash: np.ndarray  # of the id, uint64 [n]
    feature: np.ndarray  # number of the feature in its table, uint16 [n]
    ids: np.ndarray  # of the batch in its own order, int64 [V]
    times: np.ndarray  # likewise, empty where samples have no time


class Clock(NamedTuple):
    now: int  # newest sample time, or the number of the batch
    batch: int  # number of the batch
    seed: np.uint64  # of probabilistic admission


def lazy_zeros(count: int, dtype: np.dtype) -> np.ndarray:
    """Zeros [count] whose pages are committed when they are written; in small pages, so that little else is."""
    if count == 0:
        return np.zeros(0, dtype)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
    return np.frombuffer(mmap.mmap(-1, count * dtype.itemsize, flags=flags), dtype)
