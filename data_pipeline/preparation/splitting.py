"""Which rows are for training: at random by row number, or by position."""

from dataclasses import dataclass

import numpy as np

from cowrec.data_pipeline.hashing import row_uniforms


@dataclass(frozen=True)
class SplitRule:
    """Tells test rows by their number over all raw files (headers not counted, bad rows counted).

    A decision needs the row's number alone, so every pass over the data, and every run, decides alike.

    Attributes:
        seed: of the random split.
        test_fraction: chance of a row to be a test row.
        first_test_row: rows from this number on are test rows, whatever the chance; None where position does not count.
    """

    seed: int = 0
    test_fraction: float = 0.0
    first_test_row: int | None = None

    def is_test(self, rows: np.ndarray) -> np.ndarray:
        """bool [R] from row numbers, int64 [R]."""
        if self.first_test_row is not None:
            return rows >= self.first_test_row
        return row_uniforms(self.seed, rows) < self.test_fraction


EVERYTHING_IS_TEST = SplitRule(first_test_row=0)
