"""Settings of `prepare`: the `[prepare]` section of a run's configuration."""

from dataclasses import dataclass
from typing import Literal, get_args

from cowrec.data_pipeline.dataset.writer import SHARD_ROWS
from cowrec.data_pipeline.encoding.dense import DenseTransform
from cowrec.data_pipeline.raw.bad_rows import OnBadRow

DEFAULT_TEST_FRACTION = {"criteo": 0.1, "avazu": 0.2, "csv": 0.1}
MOST_BUCKETS = 2**31 - 3


@dataclass(frozen=True)
class PrepareConfig:
    """Settings of the conversion from raw data to ids and floats.

    Attributes:
        min_count: ids seen less often in training share the out-of-vocabulary row of their field.
        hash_buckets: embedding rows per field, chosen by a stateless hash instead of a vocabulary; 0 for a vocabulary.
        raw_ids: store 64-bit hashes (`vocabulary.raw_ids`) instead of embedding rows; training assigns rows to them in
            dynamic id tables.
        dense: "minmax" to [0, 1]; "log", log1p(x - minimum); "buckets", like minmax, with each integer also as a
            categorical field `<name>_bucket`; "none", the number itself. A missing value is 0 before the transform.
        fit_on: samples that the transforms are fitted on: "train", or "all" to reproduce published numbers.
            Vocabularies always use the training samples.
        split: "random" by sample number and seed, or "tail": the last samples are the test split.
        test_fraction: share of the test split if random; 0.1 by default, 0.2 for Avazu.
        test_rows: samples of the test split if "tail".
        seed: seed of the random split.
        on_bad_row: "error" raises at the first bad row, "skip" leaves bad rows out.
        max_bad_rows: largest number of skipped bad rows.
        shard_rows: raw lines that become one Parquet file of each split; the unit of work, which is held in memory.
    """

    min_count: int = 1
    hash_buckets: int = 0
    raw_ids: bool = False
    dense: DenseTransform = "minmax"
    fit_on: Literal["train", "all"] = "train"
    split: Literal["random", "tail"] = "random"
    test_fraction: float | None = None
    test_rows: int | None = None
    seed: int = 0
    on_bad_row: OnBadRow = "error"
    max_bad_rows: int = 1000
    shard_rows: int = SHARD_ROWS

    def __post_init__(self) -> None:
        for name, most in (("min_count", None), ("shard_rows", None)):
            _check_range(name, getattr(self, name), 1, most)
        for name, most in (("hash_buckets", MOST_BUCKETS), ("seed", 2**63 - 1), ("max_bad_rows", None)):
            _check_range(name, getattr(self, name), 0, most)
        for name, choices in (
            ("dense", get_args(DenseTransform)),
            ("fit_on", ("train", "all")),
            ("split", ("random", "tail")),
            ("on_bad_row", get_args(OnBadRow)),
        ):
            if getattr(self, name) not in choices:
                raise ValueError(f"{name} must be one of {', '.join(choices)}, got {getattr(self, name)!r}")
        if self.hash_buckets and self.raw_ids:
            raise ValueError("hash_buckets and raw_ids exclude each other; give one of them")
        if (self.hash_buckets or self.raw_ids) and self.min_count > 1:
            way = "raw_ids" if self.raw_ids else "hash_buckets"
            raise ValueError(f"min_count has no effect with {way}, which keeps no vocabulary; give one of them")
        if self.split == "tail" and (self.test_rows is None or self.test_rows < 0):
            raise ValueError(f'split = "tail" needs test_rows of at least 0, got {self.test_rows}')
        if self.split == "tail" and self.test_fraction is not None:
            raise ValueError('test_fraction is for split = "random"; with "tail" give test_rows only')
        if self.split == "random" and self.test_rows is not None:
            raise ValueError('test_rows is for split = "tail"; with "random" give test_fraction')
        if self.test_fraction is not None and not 0 <= self.test_fraction < 1:
            raise ValueError(f"test_fraction must be in [0, 1), got {self.test_fraction}")


def _check_range(name: str, value: int, least: int, most: int | None) -> None:
    if value < least or (most is not None and value > most):
        limits = f"at least {least}" if most is None else f"from {least} to {most}"
        raise ValueError(f"{name} must be {limits}, got {value}")
