"""Order of samples by time: the present, P waiting and R arriving samples, and repeated sample ids."""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import pyarrow as pa

MAX_OVERHEAD = 4
"""Stored samples per waiting sample above which samples already returned are freed."""
MIN_COMPACTED_ROWS = 1 << 16
MAX_PARTS = 64
"""Arrays of one column, or of ids, which are joined beyond that: each costs time, and more memory than a sample."""


@dataclass(frozen=True)
class ReorderBuffer:
    """Immutable buffer of waiting samples ordered by time, then by arrival.

    Attributes:
        time: int64 [P], ascending.
        row: int64 [P], row of each sample in `table`.
        table: the samples as they arrived; may include some already returned.
    """

    time: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    row: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    table: pa.Table = field(default_factory=lambda: pa.table({}))

    def __len__(self) -> int:
        return len(self.time)

    def add(self, table: pa.Table, time: np.ndarray) -> "ReorderBuffer":
        """Returns a buffer with samples that arrived after all others; `time` int64 [R]."""
        if not len(time):
            return self
        order = np.argsort(time, kind="stable")
        index = np.searchsorted(self.time, time[order], side="right")
        joined = pa.concat_tables([self.table, table]) if len(self) else table
        return ReorderBuffer(
            np.insert(self.time, index, time[order]),
            np.insert(self.row, index, self.table.num_rows + order),
            joined.combine_chunks() if joined.column(0).num_chunks > MAX_PARTS else joined,
        )

    def first(self, count: int) -> pa.Table:
        """Returns the first `count` samples, at least one, in order."""
        rows = self.row[:count]
        start = rows.min()
        return self.table.slice(start, rows.max() - start + 1).take(pa.array(rows - start)).combine_chunks()

    def without_first(self, count: int) -> "ReorderBuffer":
        """Returns a buffer without the first `count` samples."""
        if count == len(self):
            return ReorderBuffer()
        row = self.row[count:]
        start = row.min()  # earlier rows are freed
        result = ReorderBuffer(self.time[count:], row - start, self.table.slice(start))
        return result.compact() if result.table.num_rows > max(MAX_OVERHEAD * len(row), MIN_COMPACTED_ROWS) else result

    def compact(self) -> "ReorderBuffer":
        """Returns a buffer that stores only the waiting samples."""
        if not len(self):
            return self
        order = np.argsort(self.row)
        row = np.empty_like(order)
        row[order] = np.arange(len(order))
        return ReorderBuffer(self.time, row, self.table.take(pa.array(self.row[order])).combine_chunks())


class RecentIds:
    """Set of the last `window` distinct ids, by the order in which they entered the window.

    An id is a 64-bit hash, so one in 2^64 / window distinct ids collides with another. 0 is no id. At the start `ids`,
    uint64, are remembered, oldest first; `parts` are immutable arrays whose concatenation ends with the remembered ids.
    """

    def __init__(self, window: int, ids: np.ndarray) -> None:
        self._window = window
        self._ids = OrderedDict.fromkeys(ids[-window:].tolist())
        self.parts: tuple[np.ndarray, ...] = (ids[-window:],)

    def seen(self, ids: np.ndarray) -> np.ndarray:
        """Returns bool [R]: whether each id, uint64 [R], is in the window or earlier in `ids`; remembers the others."""
        seen = np.zeros(len(ids), bool)
        for index, each in enumerate(ids.tolist()):
            if each in self._ids:
                seen[index] = True
            elif each:
                self._ids[each] = None
                if len(self._ids) > self._window:
                    self._ids.popitem(last=False)
        new = ids[~seen & (ids != 0)]
        self.parts = (*self.parts, new) if len(new) else self.parts
        if len(self.parts) > MAX_PARTS:
            self.parts = (np.concatenate(self.parts)[-self._window :],)
        return seen


_NO_TIME = -(1 << 62)


class Followed(NamedTuple):
    """Times of a stream as samples of one partition arrive.

    Attributes:
        present: the stream's present after each sample, int64 [R].
        after: the present for what comes next; None if there is none yet.
        newest: the newest time of the partition; None if it has given no sample with a time.
    """

    present: np.ndarray
    after: int | None
    newest: int | None


def follow(
    times: np.ndarray,
    present: int | None,
    newest: int | None,
    *,
    behind: Sequence[int | None] = (),
    others: Sequence[int | None] = (),
    has_backlog: bool = False,
) -> Followed:
    """Moves the present of a stream over samples of a partition. The result does not depend on how polls divide them.

    The present is the newest time seen. While partitions have more samples to read, whose times may be far apart, it
    is the earliest of the newest times of these partitions (the low watermark of several inputs: T. Akidau et al.,
    "MillWheel", VLDB 2013). The present never goes back.

    Args:
        times: times of the samples, by arrival, Unix seconds, int64 [R].
        present: the stream's present before; None before the first sample.
        newest: newest time of their partition before; None if it has given no sample.
        behind: newest times of other partitions that have more samples to read.
        others: newest times of all other partitions.
        has_backlog: whether this partition or another has more samples to read.
    """
    own = np.maximum.accumulate(np.r_[_time(newest), times])
    least = min(map(_time, behind), default=-_NO_TIME)
    presents = np.maximum.accumulate(np.r_[_time(present), np.minimum(own[1:], least)])
    after = int(presents[-1])
    if not has_backlog and len(times):  # partitions that were read before, as far as their times, are behind no more
        after = max(after, *map(_time, others), _NO_TIME)
    return Followed(presents[1:], _known(after), _known(int(own[-1])))


def _time(newest: int | None) -> int:
    return _NO_TIME if newest is None else newest


def _known(time: int) -> int | None:
    return None if time == _NO_TIME else time
