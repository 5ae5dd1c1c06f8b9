"""Dense features: fitting their maps on a stream, applying them, and the integer buckets of Criteo's winners."""

from dataclasses import dataclass
from typing import Literal

import numpy as np
import pyarrow as pa

from cowrec.data_pipeline.dataset.schema import DenseField

DenseTransform = Literal["minmax", "log", "buckets", "none"]


@dataclass
class DenseRange:
    """Running minimum and maximum of a column, missing values counted as 0."""

    minimum: float = np.inf
    maximum: float = -np.inf

    def add(self, values: np.ndarray) -> None:
        """values: float64 [R], NaN where missing."""
        if len(values):
            present = np.nan_to_num(values, nan=0.0)
            self.minimum = min(self.minimum, float(present.min()))
            self.maximum = max(self.maximum, float(present.max()))

    def merge(self, other: "DenseRange") -> None:
        self.minimum = min(self.minimum, other.minimum)
        self.maximum = max(self.maximum, other.maximum)


def fitted(name: str, source: str, transform: DenseTransform, span: DenseRange) -> DenseField:
    """The field with its map; "buckets" scales the number as "minmax" does, and adds ids beside it."""
    return DenseField(name, "minmax" if transform == "buckets" else transform, span.minimum, span.maximum, source)


def transformed(field: DenseField, values: np.ndarray) -> np.ndarray:
    """float32 [R] from raw numbers, float64 [R], NaN where missing.

    Rows that the map was not fitted on may leave [0, 1]; below the fitted minimum the logarithm is 0.
    """
    present = np.nan_to_num(values, nan=0.0)
    if field.transform == "minmax":
        width = field.maximum - field.minimum
        present = (present - field.minimum) / width if width > 0 else np.zeros_like(present)
    elif field.transform == "log":
        present = np.log1p(np.maximum(present - field.minimum, 0.0))
    return present.astype(np.float32)


def bucket_ids(values: np.ndarray) -> pa.Array:
    """Bucket of each number as a string [R], from float64 [R]; empty where missing.

    floor(log(x)^2) above 2, "=x" (x rounded down) otherwise: the two kinds are different ids, as in the reference of
    Criteo's winners (libffm's "3 idiots": `int(log(x)^2)` and `"SP" + x`).
    """
    whole = np.floor(np.nan_to_num(values, nan=0.0))
    large = whole > 2
    # One number for both kinds: a half added to the squares keeps them apart from the values.
    codes = np.where(large, np.floor(np.log(np.where(large, whole, 1.0)) ** 2) + 0.5, whole)
    distinct, place = np.unique(codes, return_inverse=True)
    names = [f"={code:.0f}" if code == np.floor(code) else f"{code - 0.5:.0f}" for code in distinct]
    place = np.where(np.isnan(values), len(names), place)
    return pa.array([*names, ""]).take(pa.array(place))
