"""Order of samples by time: the stream's present, the waiting samples, and repeated sample ids.

P waiting samples, R arriving samples.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numba
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


WINDOW = 256
SPREADS = 6
SLACK_SECONDS = 60
"""Smallest slack: ordered samples of a busy stream have almost no deviation."""
MIN_SAMPLES = 8
"""Number of samples from which outliers can be told."""

_NO_TIME = -(1 << 62)


NO_TIMES = np.zeros(0, np.int64)


class Clock(NamedTuple):
    """Times of one partition of a source.

    Attributes:
        newest: the newest time seen that is no outlier, Unix seconds; None before the first sample.
        latest: the times of the last `WINDOW` samples, by arrival, int64.
    """

    newest: int | None = None
    latest: np.ndarray = NO_TIMES


class Followed(NamedTuple):
    """Times as samples arrive.

    Attributes:
        time: times of the samples, int64 [R]; of an early one the newest time before it.
        early: samples whose times are outliers ahead of the others: bool [R].
        present: the stream's present after each sample, int64 [R].
        after: the present for what comes next; None if there is none yet.
        latest: the times of the last `WINDOW` samples of all partitions, by arrival, int64.
        clock: of the partition after the last one.
    """

    time: np.ndarray
    early: np.ndarray
    present: np.ndarray
    after: int | None
    latest: np.ndarray
    clock: Clock


def follow(
    times: np.ndarray,
    latest: np.ndarray,
    present: int | None,
    lateness: int,
    clock: Clock,
    *,
    behind: Sequence[Clock] = (),
    others: Sequence[Clock] = (),
    has_backlog: bool = False,
) -> Followed:
    """Moves the present of a stream over samples of a partition. The result does not depend on how polls divide them.

    The present is the newest time seen that is no outlier: later than the median of the last `WINDOW` times by more
    than `SPREADS` times their median absolute deviation, and by more than a slack. This withstands outliers as long as
    they are fewer than half of these samples (F. R. Hampel, "The influence curve and its role in robust estimation",
    1974). If the present itself becomes an outlier, because a wrong clock came first or was in the majority for a
    while, it goes back.

    While partitions have more samples to read, whose times may be far apart, outliers are those among the times of the
    partition, and the present waits: it is the earliest of the newest times of these partitions, but goes back only if
    it is ahead of the newest times of all (the low watermark of several inputs: T. Akidau et al., "MillWheel", VLDB
    2013).

    Args:
        times: of the samples, by arrival, Unix seconds, int64 [R].
        latest: see `Followed`, after the samples before.
        present: the stream's then; None before the first sample.
        lateness: seconds; times that are ahead by less are no outliers.
        clock: of their partition before.
        behind: clocks of other partitions that have more samples to read.
        others: clocks of all other partitions.
        has_backlog: whether this partition or another has more samples to read.
    """
    start, now, slack = _time(clock.newest), _time(present), max(lateness, SLACK_SECONDS)
    least = min((_time(each.newest) for each in behind), default=-_NO_TIME)
    most = max((_time(each.newest) for each in others), default=_NO_TIME)
    # Some arrays are read-only. The loop would be compiled for each kind while it trains, which takes seconds.
    times, latest, own = (np.require(each, np.int64, ["C", "W"]) for each in (times, latest, clock.latest))
    time, early, presents, *ends = _follow(times, latest, own, start, slack, now, least, most, has_backlog)
    newest, after = (None if each == _NO_TIME else int(each) for each in ends)
    all_latest, own_latest = (np.concatenate([each, times])[-WINDOW:] for each in (latest, own))
    return Followed(time, early, presents, after, all_latest, Clock(newest, own_latest))


def _time(newest: int | None) -> int:
    return _NO_TIME if newest is None else newest


@numba.njit(nogil=True, cache=True)
def _follow(
    times: np.ndarray,
    latest: np.ndarray,
    own: np.ndarray,
    newest: int,
    slack: int,
    now: int,
    least: int,
    most: int,
    has_backlog: bool,
) -> tuple[np.ndarray, np.ndarray, np.ndarray, int, int]:
    of_all, of_own = np.concatenate((latest, times)), np.concatenate((own, times))
    all_ordered, own_ordered = np.empty(WINDOW + 1, np.int64), np.empty(WINDOW + 1, np.int64)
    all_ordered[: len(latest)], own_ordered[: len(own)] = np.sort(latest), np.sort(own)
    count, own_count = len(latest), len(own)
    time, early, present = times.copy(), np.zeros(len(times), np.bool_), np.empty(len(times), np.int64)
    for i in range(len(times)):
        count = _insert(all_ordered, count, of_all, len(latest) + i)
        own_count = _insert(own_ordered, own_count, of_own, len(own) + i)
        newest = _plausible(newest, own_ordered[:own_count], slack)
        if has_backlog:
            if times[i] > _end_of_the_plausible(own_ordered[:own_count], slack):
                early[i], time[i] = True, newest
        else:
            now = _plausible(now, all_ordered[:count], slack)
            if times[i] > _end_of_the_plausible(all_ordered[:count], slack):
                early[i], time[i] = True, now
        newest = max(newest, time[i])
        now = min(max(now, min(newest, least)), max(newest, most))
        present[i] = now
    if not has_backlog and len(times):  # partitions that were read before, as far as their times, are behind no more
        now = _plausible(max(now, newest, most), all_ordered[:count], slack)
    return time, early, present, newest, now


@numba.njit(nogil=True, cache=True)
def _insert(ordered: np.ndarray, count: int, times: np.ndarray, place: int) -> int:
    """Adds a time to the `count` ordered ones, in place of the oldest if there are `WINDOW`; returns their number."""
    if count == WINDOW:
        at = np.searchsorted(ordered[:count], times[place - WINDOW])
        ordered[at : count - 1] = ordered[at + 1 : count].copy()
        count -= 1
    at = np.searchsorted(ordered[:count], times[place])
    ordered[at + 1 : count + 1] = ordered[at:count].copy()
    ordered[at] = times[place]
    return count + 1


@numba.njit(nogil=True, cache=True)
def _plausible(newest: int, ordered: np.ndarray, slack: int) -> int:
    """The newest time, or the last one among ordered times that is no outlier if it is one."""
    end = _end_of_the_plausible(ordered, slack)
    return newest if newest <= end else int(ordered[np.searchsorted(ordered, end, side="right") - 1])


@numba.njit(nogil=True, cache=True)
def _end_of_the_plausible(ordered: np.ndarray, slack: int) -> int:
    """The latest time that is no outlier among times in ascending order; of few, none is one."""
    if len(ordered) < MIN_SAMPLES:
        return -_NO_TIME
    middle = (len(ordered) - 1) // 2
    below, above, deviation = middle, middle + 1, 0
    for _ in range(middle + 1):  # the smallest deviations lie around the median
        if below >= 0 and (
            above == len(ordered) or ordered[middle] - ordered[below] <= ordered[above] - ordered[middle]
        ):
            deviation = ordered[middle] - ordered[below]
            below -= 1
        else:
            deviation = ordered[above] - ordered[middle]
            above += 1
    return int(ordered[middle] + max(SPREADS * deviation, slack))
