"""Calibration of click probabilities: by bins of equal weight, and the expected calibration error.

U blocks of samples with equal predictions.
"""

from dataclasses import dataclass
from math import inf

import torch
import torch.distributed as dist
from torch import Tensor

from .exact_sums import ExactSums

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


class BinnedSamples:
    """Puts blocks of equal scores into at most ``BINS`` bins of equal weight, as nearly as the blocks allow.

    Args:
        total: weight of all samples, in units of ``unit``.
        unit: of the weights.
        device: of the blocks.
    """

    def __init__(self, total: int, unit: float, device: torch.device) -> None:
        self._total, self._unit = total, unit
        self._sums = ExactSums(BINS, device)
        self._weights = torch.zeros(2, BINS, dtype=torch.int64, device=device)
        self._ends = torch.full((2, BINS), inf, dtype=torch.float64, device=device)

    def add(self, prediction: Tensor, clicks: Tensor, weight: Tensor, below: Tensor) -> None:
        """Adds blocks.

        Args:
            prediction: of each block, float64 [U], in ascending order.
            clicks: weight of its samples that were clicked, int64 [U].
            weight: of all its samples, int64 [U], above 0.
            below: weight of all samples of lower scores, int64 [U].
        """
        bins = ((below.double() + weight.double() / 2) * (BINS / self._total)).long().clamp_max(BINS - 1)
        self._sums.add(prediction * weight.double(), bins)
        for sums, own in zip(self._weights, (weight, clicks), strict=True):
            sums.index_add_(0, bins, own)
        for ends, own in zip(self._ends, (prediction, -prediction), strict=True):
            ends.scatter_reduce_(0, bins, own, "amin")

    def add_other_processes(self) -> None:
        """Adds the blocks of all other processes; all call together."""
        self._sums.add_other_processes()
        dist.all_reduce(self._weights)
        dist.all_reduce(self._ends, dist.ReduceOp.MIN)

    def bins(self) -> CalibrationBins:
        """The bins that have samples."""
        sums = self._sums.floats()
        rows = [
            (lower, -upper, total / weight, clicks / weight, weight * self._unit)
            for lower, upper, total, weight, clicks in zip(
                *self._ends.tolist(), sums, *self._weights.tolist(), strict=True
            )
            if weight
        ]
        return CalibrationBins(*zip(*rows, strict=True))
