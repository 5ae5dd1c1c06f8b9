"""The splits of a data set: by random numbers, by the order of samples, or by their times. R samples."""

from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Literal

import numpy as np
import pyarrow as pa

from cowrec.data_pipeline.encoding.dense import ValueCounts
from cowrec.data_pipeline.hashing import uniforms
from cowrec.data_pipeline.raw.parsing import Parsed
from cowrec.data_pipeline.raw.times import LATEST, TIME_RULES, as_times

SplitKind = Literal["random", "order", "time"]
SPLITS = ("train", "validation", "test")
TRAIN, LEFT_OUT = 0, -1
_NEGATIVES = 0x6E65676174697665
"""Makes the draws of negatives independent of those of the random split."""
NEVER = LATEST + 1
"""First time of a split without samples."""
MOST_TIMES = 1 << 20
"""Distinct times that are counted apart, to divide samples by time."""


@dataclass(frozen=True)
class SplitRule:
    """Assigns samples to splits.

    A decision depends on the sample alone: on its number over all raw files (bad rows count, headers do not), its time
    and its label. So every pass over the data, and every run, decides the same.

    Attributes:
        kind: "random", "order" of the numbers, or "time".
        seed: seed of random splits.
        test_fraction, validation_fraction: of random splits, the probability of a sample to be in them.
        first_validation, first_test: otherwise the number or time, Unix seconds, from which on samples are in them.
        negative_fraction: share of the negative training samples that are kept.
    """

    kind: SplitKind = "random"
    seed: int = 0
    test_fraction: float = 0.0
    validation_fraction: float = 0.0
    first_validation: int = NEVER
    first_test: int = NEVER
    negative_fraction: float = 1.0

    def split_of(self, parsed: Parsed) -> np.ndarray:
        """Returns the index in `SPLITS` of each sample's split, int8 [R]; `LEFT_OUT` for one in none."""
        splits = self._places(parsed)
        if self.negative_fraction < 1:
            (label,) = parsed.labels.values()
            left_out = uniforms(self.seed ^ _NEGATIVES, parsed.sample_numbers) >= self.negative_fraction
            splits[(splits == TRAIN) & (label == 0) & left_out] = LEFT_OUT
        return splits

    def _places(self, parsed: Parsed) -> np.ndarray:
        splits = np.full(len(parsed.sample_numbers), TRAIN, np.int8)
        if self.kind == "random":
            draws = uniforms(self.seed, parsed.sample_numbers)
            splits[draws < self.test_fraction + self.validation_fraction] = 1
            splits[draws < self.test_fraction] = 2
            return splits
        keys = parsed.sample_numbers if self.kind == "order" else parsed.time
        assert keys is not None
        splits[keys >= self.first_validation] = 1
        splits[keys >= self.first_test] = 2
        return splits

    @property
    def names(self) -> tuple[str, ...]:
        """The splits of the data set: "validation" only if it is asked for."""
        validation = self.validation_fraction or self.first_validation < self.first_test
        return SPLITS if validation else ("train", "test")


EVERYTHING_IS_TEST = SplitRule("order", first_test=0, first_validation=0)


def by_order(samples: int, test: int, validation: int) -> SplitRule:
    """Returns the rule that leaves the last `test` of all samples for testing, and `validation` before them.

    Raises:
        ValueError: no sample is left for training.
    """
    if test + validation >= samples:
        raise ValueError(
            f"test_rows and validation_rows must be less than the {samples:,} samples in the files, got"
            f" {test + validation:,}"
        )
    return SplitRule("order", first_validation=samples - test - validation, first_test=samples - test)


def by_time(times: ValueCounts, test: float, validation: float) -> SplitRule:
    """Returns the rule that leaves as nearly as possible the newest share `test` of samples for testing, and
    `validation` before them. Samples of one second stay together.

    Raises:
        ValueError: too few different times.
    """
    first_test = _newest(times, test, NEVER) if test else NEVER
    first_validation = _newest(times, test + validation, first_test) if validation else first_test
    return SplitRule("time", first_test=first_test, first_validation=first_validation)


def _newest(times: ValueCounts, share: float, end: int) -> int:
    """Returns the time before `end`, and after the earliest one, from which on `share` of all samples are nearest."""
    values = times.values
    from_here = np.cumsum(times.counts[::-1])[::-1]
    possible = np.flatnonzero((values < end) & (values > values[0]))
    if not len(possible):
        raise ValueError(
            f'split = "time": the {times.total:,} samples have {len(values)} different times, too few for these splits'
        )
    return int(values[possible[np.argmin(np.abs(from_here[possible] - share * times.total))]])


def seconds_of(key: str, text: str | int) -> int:
    """Returns the Unix seconds of a time in the configuration. Raises ValueError naming the key."""
    seconds, invalid = as_times(pa.array([str(text)]), "timestamp")
    if invalid[0]:
        raise ValueError(f"{key} = {text!r}: {TIME_RULES['timestamp']}")
    return int(seconds[0])


def iso(seconds: int) -> str:
    """Returns a time as ISO 8601 text in UTC."""
    return datetime.fromtimestamp(min(seconds, LATEST), UTC).isoformat().replace("+00:00", "Z")
