"""Sums of floating-point numbers that are the same in any order and on any number of processes.

N numbers, S sums, E exponents.
"""

from math import nan

import torch
import torch.distributed as dist
from torch import Tensor

_LEAST, _EXPONENTS = -1073, 2098
"""Least exponent of a float64 as :func:`torch.frexp` has it, and how many there are up to 1024."""
_DIGITS, _HALF = 53, 27
"""Binary digits of a float64, and of the lower one of the two parts that are summed."""


class ExactSums:
    """Sums of float64 numbers without rounding, as integers of each exponent; rounded once when they are read.

    Args:
        count: S.
        device: of the numbers.
    """

    def __init__(self, count: int, device: torch.device) -> None:
        self._count = count
        self._parts = torch.zeros(2, count * _EXPONENTS, dtype=torch.int64, device=device)
        self._not_finite = torch.zeros(count, dtype=torch.int64, device=device)

    def add(self, numbers: Tensor, sums: Tensor | None = None) -> None:
        """Adds numbers, float64 [N], N < 2 ** 26, to the sums of these indices, int64 [N]; by default to the first."""
        sums = torch.zeros_like(numbers, dtype=torch.int64) if sums is None else sums
        finite = numbers.isfinite()
        self._not_finite += sums[~finite].bincount(minlength=self._count)
        mantissa, exponent = torch.frexp(torch.where(finite, numbers, 0.0))
        digits = (mantissa * 2.0**_DIGITS).long()
        place = sums * _EXPONENTS + (exponent.long() - _LEAST)
        size = self._count * _EXPONENTS
        # Sums of integers below 2 ** 53 are exact in float64, which bincount adds in.
        for part, own in zip(self._parts, (digits & ((1 << _HALF) - 1), digits >> _HALF), strict=True):
            part += place.bincount(own.double(), minlength=size).long()

    def add_other_processes(self) -> None:
        """Adds the sums of all other processes; all call together."""
        for each in (self._parts, self._not_finite):
            dist.all_reduce(each)

    def floats(self) -> list[float]:
        """The sums, each rounded to the nearest float64; NaN where a number was not finite."""
        lower, upper = self._parts.view(2, self._count, _EXPONENTS).cpu()
        sums = []
        for number, not_finite in enumerate(self._not_finite.tolist()):
            used = (lower[number] | upper[number]).nonzero().flatten().tolist()
            parts = zip(used, lower[number, used].tolist(), upper[number, used].tolist(), strict=True)
            total = sum((low + (high << _HALF)) << exponent for exponent, low, high in parts)
            sums.append(nan if not_finite else total / (1 << (_DIGITS - _LEAST)))
        return sums
