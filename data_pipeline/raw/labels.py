"""Labels of raw files: which values of a column are positive. R samples."""

from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from cowrec.data_pipeline.dataset.schema import LABEL

from .missing import marker_numbers
from .numbers import as_numbers

LABEL_ADVICE = (
    '. Name the positive values in the schema file, as in positive = ["1"], where all others are negative, or give a'
    " threshold"
)


@dataclass(frozen=True)
class RawLabel:
    """One label of a raw file.

    By default 1, 1.0 and true are positive, 0, 0.0 and false negative, in any notation and case; others are wrong.

    Attributes:
        name: name of the label's task.
        column: raw column; the name by default.
        positive: values that are positive; all others are negative. A number here means that number in any notation.
        threshold: numbers of at least this are positive, other numbers negative.
        null: texts that mean a missing label, as the empty text always does.
    """

    name: str = LABEL
    column: str = ""
    positive: tuple[str, ...] = ()
    threshold: float | None = None
    null: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.positive and self.threshold is not None:
            raise ValueError(f"label {self.name!r}: give positive or threshold, not both")
        if self.threshold is not None and not np.isfinite(self.threshold):
            raise ValueError(f"label {self.name!r}: threshold must be a finite number, got {self.threshold}")
        object.__setattr__(self, "column", self.column or self.name)
        for key in ("positive", "null"):
            object.__setattr__(self, key, tuple(text for text in getattr(self, key) if text))

    @property
    def rule(self) -> str:
        """What a value must be."""
        if self.threshold is not None:
            return "a label with a threshold must be a number"
        return "a label must be 0 or 1"

    def values(self, text: pa.Array) -> tuple[np.ndarray, np.ndarray]:
        """Converts strings [R] without nulls, among which the empty text is a missing label.

        Returns:
            float32 [R]: 0, 1, or NaN where missing or wrong; and bool [R], True where wrong.
        """
        missing = _mask(pc.equal(text, ""))
        if self.positive:
            positive = _mask(pc.is_in(text, pa.array(self.positive, text.type)))
            numbers = marker_numbers(self.positive)
            if numbers:
                positive |= np.isin(as_numbers(text)[0], numbers)
            return np.where(missing, np.nan, positive).astype(np.float32), np.zeros(len(text), bool)
        numbers_found, _ = as_numbers(text)
        if self.threshold is not None:
            wrong = np.isnan(numbers_found) & ~missing
            positive = numbers_found >= self.threshold
        else:
            word = pc.utf8_lower(text) if np.isnan(numbers_found[~missing]).any() else text
            positive = (numbers_found == 1) | _mask(pc.equal(word, "true"))
            wrong = ~(positive | (numbers_found == 0) | _mask(pc.equal(word, "false")) | missing)
        return np.where(missing | wrong, np.nan, positive).astype(np.float32), wrong


def _mask(array: pa.Array) -> np.ndarray:
    return array.to_numpy(zero_copy_only=False)
