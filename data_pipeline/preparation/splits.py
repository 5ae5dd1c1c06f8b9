"""Splits: which samples are for training, validation and testing, by number, order or time. R samples."""

import logging
from dataclasses import dataclass, field
from datetime import UTC, datetime

import numpy as np

from cowrec.errors import UserError

from ..encoding.numbers import ValueCounts
from ..hashing import uniforms
from ..raw.parsing import Parsed
from ..raw.times import DATE_DIGITS, LATEST
from .config import SplitKind

logger = logging.getLogger(__name__)

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
    """Assigns samples to splits, in every pass alike: by number over all raw files, time and label of the sample alone.

    Bad rows have numbers, headers do not.

    Attributes:
        kind: "random", "order" of the numbers, or "time".
        seed: seed of random splits and of the negatives that are kept.
        test_fraction, validation_fraction: for random splits, the probability of a sample to be in them.
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
        splits = np.full(len(parsed.sample_numbers), TRAIN, np.int8)
        if self.kind == "random":
            draws = uniforms(self.seed, parsed.sample_numbers)
            splits[draws < self.test_fraction + self.validation_fraction] = 1
            splits[draws < self.test_fraction] = 2
        else:
            keys = parsed.sample_numbers if self.kind == "order" else parsed.time
            assert keys is not None
            splits[keys >= self.first_validation] = 1
            splits[keys >= self.first_test] = 2
        if self.negative_fraction < 1:
            (label,) = parsed.labels.values()
            left_out = uniforms(self.seed ^ _NEGATIVES, parsed.sample_numbers) >= self.negative_fraction
            splits[(splits == TRAIN) & (label == 0) & left_out] = LEFT_OUT
        return splits

    @property
    def names(self) -> tuple[str, ...]:
        """The splits of the data set: "validation" only if it is asked for."""
        validation = self.validation_fraction or self.first_validation < self.first_test
        return SPLITS if validation else ("train", "test")


EVERYTHING_IS_TEST = SplitRule("order", first_test=0, first_validation=0)


def by_order(samples: int, test: int, validation: int) -> SplitRule:
    """Returns the rule that leaves the last `test` of all samples for testing, and `validation` before them.

    Raises ValueError if no sample is left for training.
    """
    if test + validation >= samples:
        raise UserError(
            f"no training sample: {test + validation:,} of the {samples:,} samples in the files would be for validation"
            " and testing; lower the rows or fractions of these splits"
        )
    return SplitRule("order", first_validation=samples - test - validation, first_test=samples - test)


def by_time(times: ValueCounts, test: float, validation: float) -> SplitRule:
    """Returns the rule that leaves about the newest share `test` of samples for testing, and `validation` before them.

    Samples of one second stay together. Raises ValueError if too few times differ.
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
        raise UserError(f'split = "time": the {times.total:,} samples have {len(values)} different times, too few')
    return int(values[possible[np.argmin(np.abs(from_here[possible] - share * times.total))]])


def iso(seconds: int) -> str:
    return datetime.fromtimestamp(min(seconds, LATEST), UTC).isoformat().replace("+00:00", "Z")


@dataclass
class TimeOrder:
    """The newest training sample and the times of the others, to notice that a split by order leaks the future.

    Attributes:
        newest: Unix seconds of the newest training sample; before all times if there is none.
        oldest: Unix seconds of the oldest other sample; after all times if there is none.
    """

    newest: int = -NEVER
    oldest: int = NEVER
    others: ValueCounts = field(default_factory=lambda: ValueCounts(MOST_TIMES))

    def add(self, time: np.ndarray | None, splits: np.ndarray) -> None:
        """Adds samples: Unix seconds, int64 [R], and indices of splits."""
        if time is not None:
            train = splits == TRAIN
            self.newest = max(self.newest, int(time[train].max(initial=-NEVER)))
            others = time[splits > TRAIN]
            self.oldest = min(self.oldest, int(others.min(initial=NEVER)))
            self.others.add(others)

    def merge(self, other: "TimeOrder") -> None:
        self.newest, self.oldest = max(self.newest, other.newest), min(self.oldest, other.oldest)
        self.others.merge(other.others)

    def report_dates(self) -> None:
        """Warns if times seem to be dates of digits, which are valid Unix seconds too."""
        if DATE_DIGITS.fullmatch(str(self.newest)):
            logger.warning(
                "the newest training sample has the time %d, which is read as Unix seconds: %s; if it means a date,"
                " write it as 2014-10-21",
                self.newest,
                iso(self.newest),
            )

    def report(self) -> None:
        """Warns if samples for validation or testing are older than the newest training sample."""
        if self.oldest < self.newest:
            # ValueCounts may count neighbouring times together, even those on both sides of the newest.
            older = self.others.counts[self.others.values < self.newest].sum() / self.others.total
            logger.warning(
                "the samples are not sorted by time: %.3g %% of those for validation and testing are older than the"
                ' newest training sample, so the model trains on their future; use split = "time", or newer files for'
                " these splits",
                100 * older,
            )
