"""The order of an epoch: which shards are in memory together, and in which order their rows are served.

An epoch is a sequence of windows. The shards are permuted, consecutive ones are gathered into a window of about
`window_rows` rows, and the rows of a window are permuted across all its shards. Everything follows from (seed, epoch),
so every rank, and every resumed run, has the same order.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Window:
    """Some shards that are served together.

    Attributes:
        start: position of its first row in the epoch.
        shards: shard numbers, in the order in which their rows are laid out.
        rows: samples in it.
        key: (seed, epoch, number of the window), which seeds the permutation; None where rows keep their order.
    """

    start: int
    shards: tuple[int, ...]
    rows: int
    key: tuple[int, int, int] | None

    @property
    def stop(self) -> int:
        return self.start + self.rows

    def order(self) -> np.ndarray:
        """int64 [rows]: which row of the laid-out window is served at each position."""
        if self.key is None:
            return np.arange(self.rows)
        return _generator(*self.key).permutation(self.rows)


def epoch_windows(shards: Sequence[int], window_rows: int, *, shuffle: bool, seed: int, epoch: int) -> list[Window]:
    """Windows of an epoch over shards of the given sizes; a window closes once it has `window_rows` rows."""
    numbers = np.arange(len(shards))
    if shuffle:
        numbers = _generator(seed, epoch, 0).permutation(numbers)
    windows: list[Window] = []
    start, rows, gathered = 0, 0, []
    for position, number in enumerate(numbers.tolist()):
        gathered.append(number)
        rows += shards[number]
        if rows >= window_rows or position == len(numbers) - 1:
            key = (seed, epoch, len(windows) + 1) if shuffle else None
            windows.append(Window(start, tuple(gathered), rows, key))
            start, rows, gathered = start + rows, 0, []
    return windows


def rank_slice(step: int, batch_size: int, total: int, rank: int, world_size: int) -> tuple[int, int, int]:
    """Positions [start, stop) in the epoch that `rank` takes of global batch `step`, and that batch's size.

    The slices of the ranks are contiguous, cover the batch and differ by at most one row; the last batch may be short.
    """
    first = step * batch_size
    size = min(batch_size, total - first)
    return first + rank * size // world_size, first + (rank + 1) * size // world_size, size


def _generator(seed: int, epoch: int, stream: int) -> np.random.Generator:
    return np.random.Generator(np.random.Philox(np.random.SeedSequence((seed, epoch, stream))))
