"""Numbers: counts of a column's values and fitted transforms. R numbers, U distinct, S raw fields, N dense fields."""

from bisect import bisect_left as bisect
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import NormalDist
from typing import Any

import numba
import numpy as np
import pyarrow as pa

from ..dataset.schema import MISSING_SUFFIX, DenseField, DenseTransform
from ..raw.layouts import RawField

MOST_VALUES = 1 << 15
_SIGN = np.uint64(1 << 63)


class ValueCounts:
    """Counts distinct finite numbers by their float64 bits; merging is exact and does not depend on the order.

    If more than `most` numbers differ, as few of the lowest bits are ignored as leave at most so many, and nearly equal
    numbers are counted together. `counts` are the occurrences of each of `values`, int64 [U]. Can be pickled.
    """

    def __init__(self, most: int = MOST_VALUES) -> None:
        self._most, self._shift = most, 0
        self._keys, self.counts = np.zeros(0, np.uint64), np.zeros(0, np.int64)

    def add(self, values: np.ndarray) -> None:
        """Counts finite numbers, float64 [R]."""
        # Bits in the order of the numbers: those of negative ones are reversed. -0.0 + 0.0 is 0.0.
        bits = (values.astype(np.float64) + 0.0).view(np.uint64)
        keys = np.where(bits & _SIGN, ~bits, bits | _SIGN) >> np.uint64(self._shift)
        self._add(*np.unique(keys, return_counts=True))

    def merge(self, other: "ValueCounts") -> None:
        shift = max(self._shift, other._shift)
        self._coarsen(shift)
        self._add(other._keys >> np.uint64(shift - other._shift), other.counts)

    @property
    def total(self) -> int:
        return int(self.counts.sum())

    @property
    def values(self) -> np.ndarray:
        """The distinct numbers in order, float64 [U]; of numbers that are counted together, the least possible one."""
        keys = self._keys << np.uint64(self._shift)
        return np.where(keys & _SIGN, keys & ~_SIGN, ~keys).view(np.float64)

    def _add(self, keys: np.ndarray, counts: np.ndarray) -> None:
        self._set(np.r_[self._keys, keys], np.r_[self.counts, counts])
        if len(self._keys) > self._most:
            apart = self._keys[1:] ^ self._keys[:-1]  # keys that differ in their upper bits stay apart
            bits = bisect(range(64), -self._most, key=lambda bits: -1 - int(np.count_nonzero(apart >> np.uint64(bits))))
            self._coarsen(self._shift + bits)

    def _coarsen(self, shift: int) -> None:
        if shift > self._shift:
            keys = self._keys >> np.uint64(shift - self._shift)
            self._shift = shift
            self._set(keys, self.counts)

    def _set(self, keys: np.ndarray, counts: np.ndarray) -> None:
        self._keys, index = np.unique(keys, return_inverse=True)
        self.counts = np.zeros(len(self._keys), np.int64)
        np.add.at(self.counts, index, counts)


_NORMAL = NormalDist()
_RANKS = np.unique(np.r_[np.arange(1, 192) / 192, [_NORMAL.cdf(score / 8) for score in range(-36, 37)]])
"""Ranks of the knots of a column with more distinct numbers: evenly spaced, and for the tails evenly in score."""
MOST_KNOTS = len(_RANKS) + 2

BOUND = 100.0
"""Largest magnitude of an encoded number. Numbers fitted on are in [0, 1] under "minmax", and the logarithm of float64
numbers of up to 1e43 is below 100."""
LEAST_BOUND_UNSCALED, LARGEST_BOUND_UNSCALED = 1e6, 1e15
"""Limits of the largest magnitude under "none". The square of the second, a gradient's, is far from float32's end."""


@dataclass
class NumberStatistics:
    """What the transform of a column is fitted on.

    Attributes:
        minimum, maximum: range, with missing values taken as 0.
        counts: the numbers that are not missing; None if the transform needs the range alone.
    """

    minimum: float = np.inf
    maximum: float = -np.inf
    counts: ValueCounts | None = field(default_factory=ValueCounts)
    missing: int = 0

    def add(self, values: np.ndarray) -> None:
        """Adds numbers, float64 [R], NaN where missing."""
        is_missing = np.isnan(values)
        self.missing += int(is_missing.sum())
        if len(values):
            present = np.nan_to_num(values, nan=0.0)
            self.minimum = min(self.minimum, float(present.min()))
            self.maximum = max(self.maximum, float(present.max()))
            if self.counts is not None:
                self.counts.add(values[~is_missing])

    def merge(self, other: "NumberStatistics") -> None:
        self.missing += other.missing
        self.minimum = min(self.minimum, other.minimum)
        self.maximum = max(self.maximum, other.maximum)
        if self.counts is not None and other.counts is not None:
            self.counts.merge(other.counts)


OFTEN_MISSING = 0.01
"""Share of missing values from which on "quantile" also tells where they are, which the middle does not."""


def fitted(raw: RawField, transform: DenseTransform, statistics: Mapping[str, NumberStatistics]) -> list[DenseField]:
    """Returns the dense fields of the numbers of a raw field; `statistics` are by name of the number."""
    found = [field for number in raw.numbers for field in _fitted(number, transform, statistics[number])]
    if raw.kind != "vector":
        return found
    return [replace(field, source=raw.name, element=element) for element, field in enumerate(found)]


def _fitted(name: str, transform: DenseTransform, statistics: NumberStatistics) -> list[DenseField]:
    """Returns the field with its transform, and under "quantile", if values are often missing, one that tells where."""
    knots, levels = normal_scores(statistics.counts) if statistics.counts is not None else ([], [])
    kept = "minmax" if transform == "buckets" else transform
    number = DenseField(name, kept, statistics.minimum, statistics.maximum, name, tuple(knots), tuple(levels))
    present = statistics.counts.total if statistics.counts is not None else 0
    if not present or statistics.missing / (present + statistics.missing) < OFTEN_MISSING:
        return [number]
    return [number, DenseField(name + MISSING_SUFFIX, "missing", source=name)]


def normal_scores(counts: ValueCounts) -> tuple[list[float], list[float]]:
    """Returns up to `MOST_KNOTS` numbers of a column, in order, and the normal quantile of the mid-rank of each.

    The mid-rank of x is the share of numbers below x and half of those equal to x. The scores have the standard normal
    distribution, up to ties, whatever the distribution of the column. Source: van der Waerden scores.
    """
    if not counts.total:
        return [], []
    values = counts.values
    ranks = (np.cumsum(counts.counts) - counts.counts / 2) / counts.total
    chosen = np.arange(len(values))
    if len(values) > MOST_KNOTS:
        last = len(values) - 1
        chosen = np.unique(np.r_[0, np.searchsorted(ranks, _RANKS).clip(max=last), last])
    return values[chosen].tolist(), [_NORMAL.inv_cdf(rank) for rank in ranks[chosen].tolist()]


_KINDS = ("none", "minmax", "missing", "log", "quantile")
_MINMAX, _MISSING, _LOG, _QUANTILE = range(1, len(_KINDS))
"""Numbers of the kinds of transforms; numpy computes those after _MISSING."""


class Transforms:
    """The transforms of all dense fields, applied together, so that a sample costs hardly more than a field.

    A number outside of the fitted range leaves [0, 1] under "minmax". It has the normal score of the nearer end of the
    range under "quantile", and the logarithm 0 below the range under "log". No result is beyond `bound`. `numbers` has
    the names of the rows that `apply` takes.
    """

    def __init__(self, fields: Sequence[DenseField]) -> None:
        self._fields = fields
        self._single = list(dict.fromkeys(dense.source for dense in fields if dense.element is None))
        of_vectors = [dense for dense in fields if dense.element is not None]
        self._widths = Counter(dense.source for dense in of_vectors)
        self.numbers = [*self._single, *(dense.name for dense in of_vectors)]
        places = {name: place for place, name in enumerate(self.numbers)}
        names = [dense.source if dense.element is None else dense.name for dense in fields]
        self._source = np.array([places[name] for name in names], np.int64)
        self._kind = np.array([_KINDS.index(dense.transform) for dense in fields], np.int64)
        ranges = [(dense.minimum, dense.maximum - dense.minimum, bound(dense)) for dense in fields]
        self._range = np.array(ranges, np.float64).reshape(-1, 3)
        self._logs, self._quantiles = (np.flatnonzero(self._kind == kind).tolist() for kind in (_LOG, _QUANTILE))

    def of_columns(self, columns: Mapping[str, np.ndarray], count: int) -> np.ndarray:
        """Returns raw numbers, float64 [S, R], from those of `count` samples, as `Parsed.numbers` has them."""
        return np.array([columns[name] for name in self.numbers], np.float64).reshape(len(self.numbers), count)

    def of_values(self, columns: Mapping[str, Sequence[Any]], count: int) -> np.ndarray:
        """Returns raw numbers, float64 [S, R], from canonical values of `count` samples by raw field.

        Raises TypeError, ValueError or OverflowError if a value is wrong.
        """
        raw = [columns[name] for name in self._single]
        numbers = np.array(raw, np.float64).reshape(len(raw), count)  # None became NaN
        for name, width in self._widths.items():
            vectors = [[np.nan] * width if vector is None else vector for vector in columns[name]]
            numbers = np.concatenate([numbers, np.array(vectors, np.float64).reshape(count, width).T])
        if not np.isfinite(numbers).all():
            missing = sum(width * columns[name].count(None) for name, width in self._widths.items())
            missing += sum(values.count(None) for values in raw)
            if np.isfinite(numbers).sum() + missing < numbers.size:
                raise ValueError("a number is not finite")
        return numbers

    def apply(self, numbers: np.ndarray) -> np.ndarray:
        """Returns float32 [N, R] from raw numbers, float64 [S, R], NaN where missing."""
        given = numbers
        if self._logs or self._quantiles:  # by numpy, so that their bits depend on one library alone
            given = np.zeros((len(self._fields), numbers.shape[1]))
            with np.errstate(over="ignore", invalid="ignore"):  # the range of a column may be wider than float64
                raw = numbers[self._source[self._logs]]
                raw = np.where(np.isnan(raw), 0.0, raw) - self._range[self._logs, :1]
                given[self._logs] = np.log1p(np.maximum(raw, 0.0))
            for index in self._quantiles:
                given[index] = _scores(self._fields[index], numbers[self._source[index]])
        return _transformed(numbers, given, self._source, self._kind, self._range)


@numba.njit(nogil=True, cache=True)
def _transformed(
    numbers: np.ndarray, given: np.ndarray, sources: np.ndarray, kinds: np.ndarray, ranges: np.ndarray
) -> np.ndarray:
    """Applies all transforms but those of numpy, which are `given`: float32 [N, R] from float64 [S, R].

    `ranges` has the minimum, the width and the bound of each field, [N, 3].
    """
    out = np.empty((len(sources), numbers.shape[1]), np.float32)
    for n in range(len(sources)):
        kind, low, width, most = kinds[n], ranges[n, 0], ranges[n, 1], ranges[n, 2]
        for r in range(numbers.shape[1]):
            raw = numbers[sources[n], r]
            number = 0.0 if np.isnan(raw) else raw
            if kind == _MINMAX:
                number = (number - low) / width if width > 0 else 0.0
            elif kind == _MISSING:
                number = 1.0 if np.isnan(raw) else 0.0
            elif kind > _MISSING:
                number = given[n, r]
            out[n, r] = 0.0 if np.isnan(number) else min(max(number, -most), most)
    return out


def bound(field: DenseField) -> float:
    """Returns the largest magnitude of encoded numbers, a float32 number, so that one number cannot end training.

    Under "none" the bound is ten times the largest magnitude that the transform was fitted on, within limits.
    """
    if field.transform != "none":
        return BOUND
    fitted_on = max(abs(field.minimum), abs(field.maximum))
    return float(np.float32(min(max(10 * fitted_on, LEAST_BOUND_UNSCALED), LARGEST_BOUND_UNSCALED)))


def count_bounded(fields: Iterable[DenseField], encoded: pa.Table) -> Counter[str]:
    """Returns how many numbers of each field are at its `bound`, without zeros."""
    columns = ((field, encoded[field.name].to_numpy()) for field in fields)
    return +Counter({field.name: int((np.abs(values) >= bound(field)).sum()) for field, values in columns})


def _scores(field: DenseField, values: np.ndarray) -> np.ndarray:
    """Interpolates normal scores: float64 [R] from raw numbers, 0 where missing."""
    if not field.knots:
        return np.zeros(len(values))
    return np.where(np.isnan(values), 0.0, np.interp(values, field.knots, field.levels))


def bucket_ids(values: np.ndarray) -> pa.Array:
    """Returns the bucket of each number as a string [R], from float64 [R]; empty where missing.

    The bucket is floor(log(x)^2) above 2, and "=x" (x rounded down) otherwise. Source: the winning solution of Criteo's
    Kaggle challenge (libffm's "3 idiots"), `int(log(x)^2)` and `"SP" + x`.
    """
    rounded = np.floor(np.nan_to_num(values, nan=0.0)) + 0.0  # -0.0 is 0
    large = rounded > 2
    # One number codes both kinds: 0.5 added to the squares separates them from the values.
    codes = np.where(large, np.floor(np.log(np.where(large, rounded, 1.0)) ** 2) + 0.5, rounded)
    distinct, index = np.unique(codes, return_inverse=True)
    names = [f"={code:.0f}" if code == np.floor(code) else f"{code - 0.5:.0f}" for code in distinct]
    index = np.where(np.isnan(values), len(names), index)
    return pa.array([*names, ""]).take(pa.array(index))
