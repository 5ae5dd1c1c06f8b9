"""Predictions of samples with their labels: what quality is measured of, collected over all processes.

R samples, B of them in a batch, T tasks.
"""

from collections.abc import Sequence
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


class SampleCollector:
    """Collects the samples of a split batch by batch; keeps 16 bytes of each, on every process in the end."""

    def __init__(self) -> None:
        self._positions: list[Tensor] = []
        self._samples: list[Samples] = []

    def add(self, positions: slice, samples: Samples) -> None:
        """Adds this process's samples of a batch, at their positions in the split; does not wait for the device."""
        self._positions.append(torch.arange(positions.start, positions.stop, device=samples.label.device))
        self._samples.append(samples)

    def samples(self) -> Samples:
        """The samples of all processes, in the order of their positions; all processes call together."""
        positions = _gathered(self._positions)
        columns: list[Any] = [None if each[0] is None else _gathered(each) for each in zip(*self._samples, strict=True)]
        return Samples(*columns).where(positions.argsort())


def _gathered(parts: Sequence[Tensor]) -> Tensor:
    own = torch.cat(list(parts))
    return own if dist.get_world_size() == 1 else torch.cat(gather_all_tensors(own))
