"""Counts of a column's distinct numbers, from which quantiles follow: exact, or in bounded memory nearly so.

R numbers added, U distinct ones that are counted apart.
"""

from bisect import bisect_left as bisect

import numpy as np

MOST_VALUES = 1 << 15
_SIGN = np.uint64(1 << 63)


class ValueCounts:
    """Counts distinct finite numbers; merging is exact and does not depend on the order.

    Numbers are counted by their float64 bits. Where more than `most` differ, their lowest bits are ignored, as few as
    leave at most so many: numbers of nearly the same value are then counted together. Can be pickled.

    Args:
        most: largest U.
    """

    def __init__(self, most: int = MOST_VALUES) -> None:
        self._most, self._shift = most, 0
        self._keys, self._counts = np.zeros(0, np.uint64), np.zeros(0, np.int64)

    def add(self, values: np.ndarray) -> None:
        """Counts numbers, float64 [R], all finite."""
        # Bits in the order of the numbers: those of negative ones are reversed. -0.0 + 0.0 is 0.0.
        bits = (values.astype(np.float64) + 0.0).view(np.uint64)
        keys = np.where(bits & _SIGN, ~bits, bits | _SIGN) >> np.uint64(self._shift)
        self._add(*np.unique(keys, return_counts=True))

    def merge(self, other: "ValueCounts") -> None:
        """Adds the counts of another part of the column."""
        shift = max(self._shift, other._shift)
        self._coarsen(shift)
        self._add(other._keys >> np.uint64(shift - other._shift), other._counts)

    @property
    def total(self) -> int:
        """R."""
        return int(self._counts.sum())

    @property
    def counts(self) -> np.ndarray:
        """Occurrences of each of `values`: int64 [U]."""
        return self._counts

    @property
    def values(self) -> np.ndarray:
        """The distinct numbers in order: float64 [U]; where they are rounded, the least of those counted together."""
        keys = self._keys << np.uint64(self._shift)
        return np.where(keys & _SIGN, keys & ~_SIGN, ~keys).view(np.float64)

    def quantile(self, share: float) -> float:
        """Returns the least counted number at or below which there are at least `share` of all, and at least one."""
        below = np.cumsum(self._counts)
        return float(self.values[np.searchsorted(below, max(share * self.total, 1.0) - 1e-9)])

    def _add(self, keys: np.ndarray, counts: np.ndarray) -> None:
        self._set(np.r_[self._keys, keys], np.r_[self._counts, counts])
        if len(self._keys) > self._most:
            apart = self._keys[1:] ^ self._keys[:-1]  # keys that differ in their upper bits stay apart
            bits = bisect(range(64), -self._most, key=lambda bits: -1 - int(np.count_nonzero(apart >> np.uint64(bits))))
            self._coarsen(self._shift + bits)

    def _coarsen(self, shift: int) -> None:
        if shift > self._shift:
            keys = self._keys >> np.uint64(shift - self._shift)
            self._shift = shift
            self._set(keys, self._counts)

    def _set(self, keys: np.ndarray, counts: np.ndarray) -> None:
        self._keys, index = np.unique(keys, return_inverse=True)
        self._counts = np.zeros(len(self._keys), np.int64)
        np.add.at(self._counts, index, counts)
