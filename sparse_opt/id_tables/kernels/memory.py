"""Memory of the id tables: the layout of records, slots and segments, and the tuples that kernels take.

A *segment* is a part of one table. The hash of an id selects its segment. A segment owns three ranges: records, which
hold the id of each row; slots, which hold the row of each id (open addressing with linear probing); and cells of the
sketch that counts absent ids (see sketch.py). The ranges are reserved for the whole capacity, in memory that the system
commits page by page as it is written. ``used`` records and ``slots`` slots are in use.

A slot is 0, or the number of a row plus one, with bits of the id's hash above it. These bits rule out nearly every
wrong slot without a look at its record. Free records are a linked queue: ``id`` is the number of the next free record
plus one, and ``last_seen`` is the batch that freed the record.
"""

import mmap
from typing import NamedTuple

import numpy as np

RESERVED_ROWS = 2
"""Number of rows of OUT_OF_VOCABULARY and MISSING, at the beginning of every table. Ids 0 and 1 are these rows."""

RECORD = np.dtype([("id", "<i8"), ("last_seen", "<u4"), ("count", "<u2"), ("feature", "<u2")])
"""One row: 16 bytes. ``feature`` is the feature's number in its table, or FREE."""
FREE = 0xFFFF
MAX_COUNT = 0xFFFF
"""Largest count of a record and of a sketch's counter."""
PANES = 4
"""Number of parts of an admission window that a sketch counts separately."""
DEPTH = 4
"""Number of rows of a sketch."""
LINE = 32
"""Number of uint16 cells in a line of a sketch's memory."""
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
that was freed in batch ``fresh_batch``, the latest batch that freed rows. The sweep continues at record ``hand``.
``counted`` are the occurrences that the sketch counted in each pane, and ``pane`` is the newest pane."""
SEGMENT_LOCATION = np.dtype(
    [(name, "<i8") for name in ("number", "table", "first_row", "first_record", "first_slot", "first_cell")]
)
"""Location of a segment: its number among the segments of all ranks, its table, the table's row of its first record,
and its first record, slot and cell in the rank's memory."""
TABLE_SETTINGS = np.dtype(
    [
        *((name, "<i8") for name in ("segments", "first_segment", "capacity", "row_bits", "slots")),
        *((name, "<i8") for name in ("sweep_records", "sweep_interval", "least_frequent", "evicts", "expire_after")),
        *((name, "<i8") for name in ("admission", "threshold", "panes", "pane_length", "lines")),
    ]
)
"""Settings of a table's segments, most of them from IdTableConfig. ``capacity``, ``slots`` and ``lines`` (of a row of
the sketch) are those of one segment. Every ``sweep_interval`` batches, a sweep passes ``sweep_records`` records."""


class IdMapping(NamedTuple):
    """Mapping of ids to segments."""

    features: np.ndarray  # table of each feature, or -1, and the feature's number in the table, int64 [F, 2]
    tables: np.ndarray  # TABLE_SETTINGS [T]
    segment_numbers: np.ndarray  # numbers of all tables' segments, int32; a table's begin at ``first_segment``


class Memory(NamedTuple):
    """All segments of a rank, and their memory."""

    states: np.ndarray
    locations: np.ndarray
    tables: np.ndarray
    records: np.ndarray
    slots: np.ndarray
    cells: np.ndarray


class Segment(NamedTuple):
    """One segment: elements of the first three arrays of :class:`Memory`, and the other arrays."""

    state: np.void
    location: np.void
    table: np.void
    records: np.ndarray
    slots: np.ndarray
    cells: np.ndarray


class Occurrences(NamedTuple):
    """Ids of a batch, stably sorted by segment."""

    position: np.ndarray  # position of each id in the batch, int32 [n]
    hash: np.ndarray  # hash of each id, uint64 [n]
    feature: np.ndarray  # number of each id's feature in its table, uint16 [n]
    ids: np.ndarray  # ids in the order of the batch, int64 [V]
    times: np.ndarray  # times in the order of the batch, int64 [V]; empty if samples have no time


class Clock(NamedTuple):
    now: int  # newest sample time, or the number of the batch
    batch: int  # number of the batch
    seed: np.uint64  # seed of probabilistic admission


def lazy_zeros(count: int, dtype: np.dtype) -> np.ndarray:
    """Returns zeros [count] whose pages, which are small, are committed when they are written."""
    if count == 0:
        return np.zeros(0, dtype)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
    return np.frombuffer(mmap.mmap(-1, count * dtype.itemsize, flags=flags), dtype)
