"""Calibration of click probabilities: by bins of equal weight, and the expected calibration error.

N samples, K bins.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

BINS = 20


@dataclass(frozen=True)
class CalibrationBins:
    """Samples in bins of ascending predictions; equal predictions are in one bin, so that bins may be fewer.

    Attributes:
        lower, upper: lowest and highest prediction of each bin.
        prediction: mean prediction.
        ctr: mean label.
        weight: sum of the weights of the samples; their number where they have none.
    """

    lower: tuple[float, ...]
    upper: tuple[float, ...]
    prediction: tuple[float, ...]
    ctr: tuple[float, ...]
    weight: tuple[float, ...]

    @property
    def error(self) -> float:
        """Expected calibration error: the weighted mean of ``|prediction - ctr|`` over the bins.

        Source: Guo et al. 2017 (arXiv 1706.04599), equation 3; bins of equal weight instead of equal width, since most
        click probabilities are small.
        """
        rows = zip(self.prediction, self.ctr, self.weight, strict=True)
        return sum(abs(p - y) * w for p, y, w in rows) / sum(self.weight)


def calibration_bins(prediction: Tensor, label: Tensor, weight: Tensor, count: int = BINS) -> CalibrationBins:
    """Puts samples into at most ``count`` bins, each of 1 / count of the weight as nearly as equal predictions allow.

    Args:
        prediction: float64 [N], in ascending order.
        label: 0 or 1, float [N].
        weight: float64 [N], at least 0, not all 0.
        count: most bins.
    """
    kept = weight > 0
    prediction, label, weight = (each[kept] for each in (prediction, label.double(), weight))
    middle = weight.cumsum(0) - weight / 2
    bins = (middle * (count / weight.sum())).long().clamp_max(count - 1)
    first = torch.ones_like(bins, dtype=torch.bool)
    first[1:] = prediction[1:] != prediction[:-1]
    bins = bins[first][first.cumsum(0) - 1]  # of the first of equal predictions
    _, bins, sizes = bins.unique_consecutive(return_inverse=True, return_counts=True)
    stops = sizes.cumsum(0)

    def summed(values: Tensor) -> Tensor:
        return torch.zeros(len(sizes), dtype=torch.float64, device=values.device).index_add_(0, bins, values)

    total = summed(weight)
    columns = (
        prediction[stops - sizes],
        prediction[stops - 1],
        summed(weight * prediction) / total,
        summed(weight * label) / total,
        total,
    )
    return CalibrationBins(*(tuple(each.tolist()) for each in columns))
