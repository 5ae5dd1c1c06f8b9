"""Predictions of samples with their labels: what quality is measured of, collected over all processes.

R samples, B of them in a batch, T tasks.
"""

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torchmetrics.utilities.distributed import gather_all_tensors


class Samples(NamedTuple):
    """Predictions of samples and what they are compared with, on one device.

    Attributes:
        logits: float [R], or [R, T] of T > 1 tasks.
        label: float32, of the same shape; NaN where unknown.
        weight: of samples, float32 [R]; None where all have the same.
        true_logit: logit of the true click probability, float32 [R]; None where it is unknown.
    """

    logits: Tensor
    label: Tensor
    weight: Tensor | None = None
    true_logit: Tensor | None = None

    def where(self, chosen: Tensor) -> "Samples":
        """Those of the chosen samples: bool [R], or indices."""
        weight, true_logit = (None if each is None else each[chosen] for each in (self.weight, self.true_logit))
        return Samples(self.logits[chosen], self.label[chosen], weight, true_logit)

    def weights(self) -> Tensor:
        """The weights in float64 [R]; ones where samples have none."""
        return torch.ones_like(self.label, dtype=torch.float64) if self.weight is None else self.weight.double()


class CollectedSamples:
    """Samples of a split that this process has predicted, batch by batch: 8 bytes of each, 12 with weights.

    Args:
        count: of samples that will be added.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._positions: list[slice] = []
        self._columns: list[Tensor | None] = []
        self._filled = 0

    def add(self, positions: slice, samples: Samples) -> None:
        """Adds the samples of a batch, at their positions in the split; does not wait for the device."""
        if not self._positions:
            self._columns = [None if each is None else each.new_empty(self._count, *each.shape[1:]) for each in samples]
        self._positions.append(positions)
        stop = self._filled + positions.stop - positions.start
        for column, added in zip(self._columns, samples, strict=True):
            if column is not None and added is not None:
                column[self._filled : stop] = added
        self._filled = stop

    @property
    def own(self) -> Samples:
        """The samples of this process, in the order in which they were added."""
        columns: list[Any] = [None if each is None else each[: self._filled] for each in self._columns]
        return Samples(*columns)

    @property
    def positions(self) -> Tensor:
        """Positions of these samples in the split, int64."""
        device = self.own.label.device
        return torch.cat([torch.arange(each.start, each.stop, device=device) for each in self._positions])

    def of_all_processes(self) -> Samples:
        """The samples of all processes in the order of their positions, 16 bytes of each on every process; all call."""
        if dist.get_world_size() == 1:
            return self.own
        columns: list[Any] = [None if each is None else torch.cat(gather_all_tensors(each)) for each in self.own]
        return Samples(*columns).where(torch.cat(gather_all_tensors(self.positions)).argsort())
