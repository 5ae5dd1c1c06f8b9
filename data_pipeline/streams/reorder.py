"""Samples that wait until no earlier one can come, in the order of their times; and ids that were seen a short time
ago.

P samples that wait, R samples that arrive.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numba
import numpy as np
import pyarrow as pa

SLACK = 4
"""Arrived samples that are kept for each one that waits, before those that were handed out are let go of."""
FEWEST_KEPT = 1 << 16
FEWEST_AT_ONCE, MOST_PARTS = 1 << 12, 64

_EMPTY = np.zeros(0, np.int64)


@dataclass(frozen=True)
class Waiting:
    """Samples by time, those of equal times by their arrival. Nothing is changed in place, so a copy costs nothing.

    Attributes:
        time: int64 [P], ascending.
        arrival: int64 [P], numbers by arrival.
        tables: the samples as they arrived, and maybe some that were handed out already.
        firsts: number of each table's first sample.
        held: how many of each table's samples still wait.
        arrived: number of the next sample.
    """

    time: np.ndarray = field(default_factory=lambda: _EMPTY)
    arrival: np.ndarray = field(default_factory=lambda: _EMPTY)
    tables: tuple[pa.Table, ...] = ()
    firsts: tuple[int, ...] = ()
    held: tuple[int, ...] = ()
    arrived: int = 0

    def __len__(self) -> int:
        return len(self.time)

    def add(self, table: pa.Table, time: np.ndarray) -> "Waiting":
        """With samples that arrived after all others; their times are int64 [R]."""
        if not len(time):
            return self
        order = np.argsort(time, kind="stable")
        place = np.searchsorted(self.time, time[order], side="right")
        return Waiting(
            np.insert(self.time, place, time[order]),
            np.insert(self.arrival, place, self.arrived + order),
            (*self.tables, table),
            (*self.firsts, self.arrived),
            (*self.held, len(time)),
            self.arrived + len(time),
        )

    def first(self, count: int) -> pa.Table:
        """The first `count` samples, at least one, in order."""
        wanted = self.arrival[:count]
        which = self._table_of(wanted)
        parts, order = [], []
        for number in np.unique(which).tolist():
            places = np.flatnonzero(which == number)
            parts.append(self.tables[number].take(pa.array(wanted[places] - self.firsts[number])))
            order.append(places)
        joined = pa.concat_tables(parts).combine_chunks()
        return joined if len(parts) == 1 else joined.take(pa.array(np.argsort(np.concatenate(order))))

    def without_first(self, count: int) -> "Waiting":
        """What is left then."""
        taken = np.bincount(self._table_of(self.arrival[:count]), minlength=len(self.tables))
        held = (np.asarray(self.held) - taken).tolist()
        kept = [place for place, number in enumerate(held) if number]
        left = Waiting(
            self.time[count:],
            self.arrival[count:],
            tuple(self.tables[place] for place in kept),
            tuple(self.firsts[place] for place in kept),
            tuple(held[place] for place in kept),
            self.arrived,
        )
        rows = sum(table.num_rows for table in left.tables)
        return left.compact() if rows > max(SLACK * len(left), FEWEST_KEPT) else left

    def compact(self) -> "Waiting":
        """The same samples in one table, with nothing beside them."""
        if not len(self):
            return Waiting(arrived=self.arrived)
        order = np.argsort(self.arrival)
        # Numbered anew: what counts is who came first.
        arrival = np.empty_like(order)
        arrival[order] = np.arange(len(order)) + self.arrived
        table = self.first(len(self)).take(pa.array(order))
        return Waiting(self.time, arrival, (table,), (self.arrived,), (len(self),), self.arrived + len(self))

    def _table_of(self, arrival: np.ndarray) -> np.ndarray:
        return np.searchsorted(np.asarray(self.firsts, np.int64), arrival, side="right") - 1


class RecentIds:
    """The last `window` distinct ids, in the order in which each came first since it was last forgotten.

    An id is 64 bits of a hash: of a stream of distinct ids, one in 2^64 / window is taken for another. 0 is no id.

    Args:
        window: how many are remembered; at least 1.
        ids: what is remembered, oldest first, uint64.
    """

    def __init__(self, window: int, ids: np.ndarray) -> None:
        self._window, self._step = window, max(window, FEWEST_AT_ONCE)
        self._count = 0
        self._parts: tuple[np.ndarray, ...] = (ids[-window:],)
        self._size = 1 << (4 * self._step).bit_length()
        self._fill(ids[-window:])

    @property
    def parts(self) -> tuple[np.ndarray, ...]:
        """Arrays, never changed, whose end together is what is remembered: see `joined`."""
        return self._parts

    def seen(self, ids: np.ndarray) -> np.ndarray:
        """Which of these ids, uint64 [R], are remembered, or came earlier among them: bool [R]. The others are, now."""
        return np.concatenate([self._seen(ids[at : at + self._step]) for at in range(0, max(len(ids), 1), self._step)])

    def _seen(self, ids: np.ndarray) -> np.ndarray:
        if self._count + len(ids) > self._size // 2:
            self._fill(self.joined(self._parts, self._window))
        seen, self._count = _look_up(ids, self._ids, self._turns, self._count, self._window)
        new = ids[~seen & (ids != 0)]
        if len(new):
            self._parts = (*self._parts, new)
        if len(self._parts) > MOST_PARTS:
            self._parts = (self.joined(self._parts, self._window),)
        return seen

    @staticmethod
    def joined(parts: Sequence[np.ndarray], window: int) -> np.ndarray:
        """What is remembered, oldest first."""
        return np.concatenate(parts)[-window:]

    def _fill(self, ids: np.ndarray) -> None:
        # Open addressing; the turn in which an id came tells whether it is still within the window.
        self._ids, self._turns = np.zeros(self._size, np.uint64), np.zeros(self._size, np.int64)
        _, self._count = _look_up(ids, self._ids, self._turns, 0, self._window)


@numba.njit(nogil=True, cache=True)
def _look_up(ids: np.ndarray, slots: np.ndarray, turns: np.ndarray, count: int, window: int) -> tuple[np.ndarray, int]:
    mask = np.uint64(len(slots) - 1)
    seen = np.zeros(len(ids), np.bool_)
    for i in range(len(ids)):
        if ids[i] == 0:
            continue
        slot = ids[i] & mask
        while slots[slot] != 0 and slots[slot] != ids[i]:
            slot = (slot + np.uint64(1)) & mask
        if slots[slot] != 0 and turns[slot] > count - window:
            seen[i] = True
        else:
            count += 1
            slots[slot] = ids[i]
            turns[slot] = count
    return seen, count
