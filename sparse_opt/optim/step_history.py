"""Learning rates and Adam scalars of the steps that an optimizer has taken, for the replay of missed steps."""

import numpy as np
import torch
from torch import Tensor

from cowrec.sparse_opt.algorithm.adam import AdamConfig, adam_scalars
from cowrec.sparse_opt.kernels.layout import Schedule


class StepHistory:
    """Learning rates of the steps so far, and Adam's scalars of these steps on the device.

    Attributes:
        schedule: scalars of the steps.
    """

    def __init__(self, config: AdamConfig, device: torch.device):
        self._config = config
        self._lrs = np.empty(0)
        self._steps = 0
        self.schedule = Schedule(torch.empty(0, device=device), torch.empty(0, device=device))

    @property
    def is_replayed(self) -> bool:
        """True if rows replay these steps."""
        return self._config.absent_rows == "replay"

    @property
    def lrs(self) -> Tensor:
        """Learning rate of each step so far, float64 [steps], on CPU; shares the history's memory."""
        return torch.from_numpy(self._lrs[: self._steps])

    def record(self, step: int, lr: float) -> None:
        """Records step ``step``, from 1, unless another lookup of the same step has done so."""
        if step <= self._steps:
            return
        self._reserve(step)
        self._lrs[step - 1], self._steps = lr, step
        scalars = adam_scalars(self._config, lr, step)
        # fill_ passes the number with the kernel; an assignment may copy it from the host.
        for values, value in zip(self.schedule, scalars, strict=True):
            values[step - 1 : step].fill_(value)

    def replace(self, lrs: np.ndarray) -> None:
        """Sets the learning rates of all steps so far, float64 [steps]."""
        self._steps = len(lrs)
        self._reserve(self._steps)
        self._lrs[: self._steps] = lrs
        scalars = [adam_scalars(self._config, lr, step) for step, lr in enumerate(lrs.tolist(), 1)]
        both = torch.tensor(scalars, dtype=torch.float32).view(-1, 2)
        for values, column in zip(self.schedule, both.unbind(1), strict=True):
            values[: self._steps] = column

    def _reserve(self, steps: int) -> None:
        capacity = len(self._lrs)
        if steps > capacity:
            more = max(steps, 2 * capacity, 1024) - capacity
            self._lrs = np.append(self._lrs, np.empty(more))
            self.schedule = Schedule(*(torch.cat([values, values.new_zeros(more)]) for values in self.schedule))
