"""The present time of a stream, from the times of its samples, of which some may come from a wrong clock.

The present is the newest time seen that is no outlier: later than the median of the last `WINDOW` times by more than
`SPREADS` times their median absolute deviation, and by more than a slack. This withstands outliers as long as they are
fewer than half of these samples (F. R. Hampel, "The influence curve and its role in robust estimation", 1974). If the
present itself becomes an outlier, because a wrong clock came first or was in the majority for a while, it goes back.
R arriving samples.
"""

from typing import NamedTuple

import numba
import numpy as np

WINDOW = 256
SPREADS = 6
SLACK_SECONDS = 60
"""Smallest slack: ordered samples of a busy stream have almost no deviation."""
MIN_SAMPLES = 8
"""Number of samples from which outliers can be told."""

_NO_TIME = -(1 << 62)


class Followed(NamedTuple):
    """A stream's present as samples arrive.

    Attributes:
        time: times of the samples, int64 [R]; of an early one the present.
        early: samples whose times are outliers ahead of the present: bool [R].
        newest: the present after each sample, int64 [R].
        latest: the times of the last `WINDOW` samples, by arrival, int64: with the present the state for the next ones.
    """

    time: np.ndarray
    early: np.ndarray
    newest: np.ndarray
    latest: np.ndarray


def follow(times: np.ndarray, latest: np.ndarray, newest: int | None, lateness: int) -> Followed:
    """Moves the present over arriving samples. The result does not depend on how polls divide the samples.

    Args:
        times: of the samples, by arrival, Unix seconds, int64 [R].
        latest: see `Followed`, after the samples before.
        newest: the present then; None before the first sample.
        lateness: seconds; times that are ahead by less are no outliers.
    """
    start, slack = _NO_TIME if newest is None else newest, max(lateness, SLACK_SECONDS)
    # Some arrays are read-only. The loop would be compiled for each kind while it trains, which takes seconds.
    times, latest = (np.require(each, np.int64, ["C", "W"]) for each in (times, latest))
    return Followed(*_follow(times, latest, start, slack), np.concatenate([latest, times])[-WINDOW:])


@numba.njit(nogil=True, cache=True)
def _follow(
    times: np.ndarray, latest: np.ndarray, newest: int, slack: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    both = np.concatenate((latest, times))
    ordered = np.empty(WINDOW + 1, np.int64)
    ordered[: len(latest)] = np.sort(latest)
    count, first = len(latest), len(latest)
    time, early, present = times.copy(), np.zeros(len(times), np.bool_), np.empty(len(times), np.int64)
    for i in range(len(times)):
        if count == WINDOW:  # the oldest leaves
            at = np.searchsorted(ordered[:count], both[first + i - WINDOW])
            ordered[at : count - 1] = ordered[at + 1 : count].copy()
            count -= 1
        at = np.searchsorted(ordered[:count], times[i])
        ordered[at + 1 : count + 1] = ordered[at:count].copy()
        ordered[at] = times[i]
        count += 1
        if count >= MIN_SAMPLES:
            end = _end_of_the_plausible(ordered[:count], slack)
            if newest > end:
                newest = ordered[np.searchsorted(ordered[:count], end, side="right") - 1]
            if times[i] > end:
                early[i], time[i] = True, newest
        newest = max(newest, time[i])
        present[i] = newest
    return time, early, present


@numba.njit(nogil=True, cache=True)
def _end_of_the_plausible(ordered: np.ndarray, slack: int) -> int:
    """The latest time that is no outlier among times in ascending order."""
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
