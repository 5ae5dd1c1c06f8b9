"""Settings of `prepare`: the `[prepare]` section of a run's configuration."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from datetime import date
from typing import Any, Literal, get_args

import numpy as np

from cowrec.errors import UserError

from ..dataset.schema import SHARD_ROWS, DenseTransform

SplitKind = Literal["random", "order", "time"]
OnBadRow = Literal["error", "skip"]
VALIDATION_FRACTION, MOST_VALIDATION_SAMPLES, LEAST_SAMPLES = 0.1, 200_000, 10_000
"""Default share and largest number of the validation samples, and samples below which there are none by default."""
DEFAULT_TEST_FRACTION = {"criteo": 0.1, "avazu": 0.2, "tabular": 0.1}
MOST_BUCKETS = 2**31 - 3


@dataclass(frozen=True)
class PrepareConfig:
    """Settings of the conversion from raw data to ids and numbers.

    Attributes:
        min_count: ids that occur less often among the training samples share the out-of-vocabulary row of their field.
        max_ids: number of ids with a row of their own in each field, the most frequent ones in training; all others
            share the out-of-vocabulary row. 0: no limit. A field of a schema file may set its own `min_count` and
            `max_ids`.
        hash_buckets: number of embedding rows of each field if a stateless hash replaces the vocabulary; 0: a
            vocabulary.
        raw_ids: whether 64-bit hashes (`vocabulary.raw_ids`) are stored instead of embedding rows. Training then
            assigns rows to them in id tables.
        dense: transform of numbers. "quantile": the normal quantile of the rank of a number among the training samples,
            with mean 0 and deviation 1. Numbers outside the training range have the value at the end of that range. A
            missing value becomes 0, the middle; if 1 % or more are missing, a second field `<name>_missing` is 1 there.
            In all other transforms a missing value is 0 before the transform. "minmax": (x - minimum) / (maximum -
            minimum), which leaves the numbers of a heavy-tailed column nearly equal. "log": log1p(x - minimum), and 0
            below the minimum, for counts and amounts that begin near 0. "buckets": as minmax, and a categorical field
            `<name>_bucket` with the logarithmic bucket of the number, floor(log(x)^2) above 2 and otherwise x rounded
            down, for integers. "none": the number itself. A field of a schema file may set its own `transform`.
        fit_on: samples that the transforms are fitted on: "train", or "all" to reproduce the numbers of papers.
            Vocabularies always use the training samples.
        split: how samples are divided into training, validation and test samples. "random": by number and seed.
            "order": the last samples are test samples, and those before them validation samples. "time": the newest
            samples are test samples, and those before them validation samples, by the time of each sample, in any
            order. Transforms and vocabularies are fitted on the training samples.
        test_fraction: share of the test split; by default 0.1, and 0.2 for Avazu.
        validation_fraction: share of the validation split, whose quality ends the training. By default it is 0.1, but
            at most 200,000 samples. It is 0 by default with fewer than 10,000 samples, with raw_ids, and where the test
            split is given as files, by `test_rows` or by `test_from`.
        test_rows: with split = "order", the number of test samples, in place of `test_fraction`.
        validation_rows: with split = "order", the number of validation samples, in place of `validation_fraction`.
        test_from: with split = "time", the time of the first test sample, in place of `test_fraction`: a date
            (2024-05-01, in UTC), ISO 8601 text or Unix seconds.
        validation_from: with split = "time", the time of the first validation sample, in place of
            `validation_fraction`.
        negative_fraction: share of the negative training samples that is kept, drawn by number and seed. Predictions of
            a model that is trained on them are corrected for the others. The other splits keep all samples.
        seed: seed of the random split and of the negatives to keep.
        on_bad_row: what happens at a record that cannot be read: "error" ends the command, and "skip" leaves the record
            out. By default "error", or with `--like` what that data set was prepared with.
        max_bad_rows: largest number of records that "skip" leaves out.
        shard_rows: number of raw records that become one Parquet file of each split. This is the unit of work, and is
            held in memory.
    """

    min_count: int = 1
    max_ids: int = 0
    hash_buckets: int = 0
    raw_ids: bool = False
    dense: DenseTransform = "quantile"
    fit_on: Literal["train", "all"] = "train"
    split: SplitKind = "random"
    test_fraction: float | None = None
    validation_fraction: float | None = None
    test_rows: int | None = None
    validation_rows: int | None = None
    test_from: str | int | None = None
    validation_from: str | int | None = None
    negative_fraction: float = 1.0
    seed: int = 0
    on_bad_row: OnBadRow | None = None
    max_bad_rows: int = 1000
    shard_rows: int = SHARD_ROWS

    def __post_init__(self) -> None:
        for name in (key.name for key in fields(self)):
            value = getattr(self, name)
            if isinstance(value, (np.generic, date)):  # as code takes them from a DataFrame
                object.__setattr__(self, name, plain_value(value))
        most = {"hash_buckets": MOST_BUCKETS, "seed": 2**63 - 1}
        for name in ("min_count", "shard_rows", "hash_buckets", "max_ids", "seed", "max_bad_rows"):
            least = int(name in ("min_count", "shard_rows"))
            _check_range(name, getattr(self, name), least, most.get(name))
        for name, choices in (
            ("dense", get_args(DenseTransform)),
            ("fit_on", ("train", "all")),
            ("split", get_args(SplitKind)),
            ("on_bad_row", (None, *get_args(OnBadRow))),
        ):
            if (value := getattr(self, name)) not in choices:
                raise UserError(f"{name} must be one of {', '.join(filter(None, choices))}, got {value!r}")
        if self.hash_buckets and self.raw_ids:
            raise UserError("hash_buckets and raw_ids exclude each other; give one of them")
        self.check_vocabulary("", self.min_count > 1, self.max_ids)
        self._check_split()

    def _check_split(self) -> None:
        for suffix, kind in (("rows", "order"), ("from", "time")):
            keys = [f"{split}_{suffix}" for split in ("test", "validation")]
            given = [key for key in keys if getattr(self, key) is not None]
            if given and self.split != kind:
                raise UserError(f'{given[0]} is for split = "{kind}"; with "{self.split}" give fractions')
            fractions = [key for key in ("test_fraction", "validation_fraction") if getattr(self, key) is not None]
            if given and fractions:
                raise UserError(f"{given[0]} and {fractions[0]} exclude each other; give both splits in the same way")
            if given and keys[0] not in given:
                raise UserError(f"{keys[1]} needs {keys[0]}, where the test split begins")
        for key in ("test_rows", "validation_rows"):
            _check_range(key, getattr(self, key) or 0, 0, None)
        for key in ("test_fraction", "validation_fraction"):
            if not 0 <= (getattr(self, key) or 0.0) < 1:
                raise UserError(f"{key} must be in [0, 1), got {getattr(self, key)}")
        test, validation = self.test_fraction or 0.0, self.validation_fraction or 0.0
        if test + validation >= 1:
            raise UserError(f"test_fraction + validation_fraction must be less than 1, got {test} + {validation}")
        if not 0 < self.negative_fraction <= 1:
            raise UserError(f"negative_fraction must be in (0, 1], got {self.negative_fraction}")
        first, following = self.validation_from, self.test_from
        if following is not None:
            first_test = seconds_of("test_from", following)
            if first is not None and seconds_of("validation_from", first) >= first_test:
                raise UserError(f"validation_from must be before test_from, got {first} and {following}")

    def validation_share(self, samples: int) -> float:
        """Returns the share of the validation split of so many samples."""
        if self.validation_fraction is not None:
            return self.validation_fraction
        if samples < LEAST_SAMPLES or self.raw_ids or self.test_rows is not None or self.test_from is not None:
            return 0.0
        return min(VALIDATION_FRACTION, MOST_VALIDATION_SAMPLES / samples)

    def check_vocabulary(self, where: str, min_count: int, max_ids: int) -> None:
        """Raises ValueError if a limit on the ids of a vocabulary is given, where the settings make no vocabulary."""
        if (self.hash_buckets or self.raw_ids) and (min_count or max_ids):
            limit, way = "min_count" if min_count else "max_ids", "raw_ids" if self.raw_ids else "hash_buckets"
            raise UserError(f"{where}{limit} has no effect with {way}, which keeps no vocabulary; give one of them")


def plain_value(value: Any) -> Any:
    """What JSON lacks as it is written there: numpy's numbers as Python's, times and all else as text."""
    return value.item() if isinstance(value, np.generic) and not isinstance(value, np.datetime64) else str(value)


def prepared_with(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the values of `[prepare]` in the settings of a data set, with those that None means."""
    fraction = DEFAULT_TEST_FRACTION.get((settings.get("layout") or {}).get("name", "tabular"))
    meant = dict[str, Any](on_bad_row="error", test_fraction=fraction, validation_rows=0)
    return {key: meant.get(key) if value is None else value for key, value in settings.get("prepare", {}).items()}


def seconds_of(key: str, text: str | int) -> int:
    """Returns the Unix seconds of a time in the configuration. Raises ValueError naming the key."""
    import pyarrow as pa

    from ..raw.times import DATE_DIGITS, UNIX_OR_ISO, RawTime

    seconds, invalid = RawTime((key,)).of_texts(pa.array([str(text)]))
    if invalid[0] or DATE_DIGITS.fullmatch(str(text)):
        raise UserError(f"{key} = {text!r}: {UNIX_OR_ISO}")
    return int(seconds[0])


def _check_range(name: str, value: int, least: int, most: int | None) -> None:
    if value < least or (most is not None and value > most):
        limits = f"at least {least}" if most is None else f"from {least} to {most}"
        raise UserError(f"{name} must be {limits}, got {value}")
