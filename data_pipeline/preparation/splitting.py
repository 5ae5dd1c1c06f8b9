"""The train/test split: random by sample number, or by position."""

from dataclasses import dataclass

import numpy as np

from cowrec.data_pipeline.hashing import uniforms


@dataclass(frozen=True)
class SplitRule:
    """Assigns samples to the test split by their number over all raw files (bad rows count, headers do not).

    A decision depends on the sample's number alone, so every pass over the data, and every run, decides the same.

    Attributes:
        seed: seed of the random split.
        test_fraction: probability of a sample to be in the test split.
        first_test_sample: if given, samples from this number on are the test split, and the split is not random.
    """

    seed: int = 0
    test_fraction: float = 0.0
    first_test_sample: int | None = None

    def is_test(self, numbers: np.ndarray) -> np.ndarray:
        """Returns bool [R] from sample numbers, int64 [R]: True for the test split."""
        if self.first_test_sample is not None:
            return numbers >= self.first_test_sample
        return uniforms(self.seed, numbers) < self.test_fraction


EVERYTHING_IS_TEST = SplitRule(first_test_sample=0)
