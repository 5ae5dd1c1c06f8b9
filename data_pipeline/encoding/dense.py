"""Dense features: fitting and applying their transforms, and the logarithmic buckets of integer columns."""

from dataclasses import dataclass
from typing import Literal

import numpy as np
import pyarrow as pa

from cowrec.data_pipeline.dataset.schema import DenseField

DenseTransform = Literal["minmax", "log", "buckets", "none"]


@dataclass
class DenseRange:
    """Running minimum and maximum of a column, with missing values taken as 0."""

    minimum: float = np.inf
    maximum: float = -np.inf

    def add(self, values: np.ndarray) -> None:
        """Extends the range to `values`, float64 [R], NaN where missing."""
        if len(values):
            present = np.nan_to_num(values, nan=0.0)
            self.minimum = min(self.minimum, float(present.min()))
            self.maximum = max(self.maximum, float(present.max()))

    def merge(self, other: "DenseRange") -> None:
        """Extends the range to that of another part of the column."""
        self.minimum = min(self.minimum, other.minimum)
        self.maximum = max(self.maximum, other.maximum)


def fitted(name: str, source: str, transform: DenseTransform, span: DenseRange) -> DenseField:
    """Returns the field with its transform; "buckets" scales numbers like "minmax" and adds ids in another field."""
    return DenseField(name, "minmax" if transform == "buckets" else transform, span.minimum, span.maximum, source)


def transformed(field: DenseField, values: np.ndarray) -> np.ndarray:
    """Applies a field's transform: float32 [R] from raw numbers, float64 [R], NaN where missing.

    Samples that the transform was not fitted on may leave [0, 1]; below the fitted minimum the logarithm is 0.
    """
    present = np.nan_to_num(values, nan=0.0)
    if field.transform == "minmax":
        width = field.maximum - field.minimum
        present = (present - field.minimum) / width if width > 0 else np.zeros_like(present)
    elif field.transform == "log":
        present = np.log1p(np.maximum(present - field.minimum, 0.0))
    return present.astype(np.float32)


def bucket_ids(values: np.ndarray) -> pa.Array:
    """Returns the bucket of each number as a string [R], from float64 [R]; empty where missing.

    The bucket is floor(log(x)^2) above 2, and "=x" (x rounded down) otherwise. The two kinds are different ids, as in
    the winning solution of Criteo's Kaggle challenge (libffm's "3 idiots": `int(log(x)^2)` and `"SP" + x`).
    """
    rounded = np.floor(np.nan_to_num(values, nan=0.0)) + 0.0  # -0.0 is 0
    large = rounded > 2
    # One number codes both kinds: 0.5 added to the squares separates them from the values.
    codes = np.where(large, np.floor(np.log(np.where(large, rounded, 1.0)) ** 2) + 0.5, rounded)
    distinct, index = np.unique(codes, return_inverse=True)
    names = [f"={code:.0f}" if code == np.floor(code) else f"{code - 0.5:.0f}" for code in distinct]
    index = np.where(np.isnan(values), len(names), index)
    return pa.array([*names, ""]).take(pa.array(index))
