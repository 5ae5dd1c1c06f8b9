"""Learning rates and Adam scalars of the steps that an optimizer has taken, for the replay of missed steps."""

import numpy as np
import torch
from torch import Tensor

from cowrec.sparse_opt.algorithm.adam import AdamConfig, AdamScalars, BetaHistory, adam_scalars
from cowrec.sparse_opt.kernels.layout import Schedule

_AHEAD = 1024
"""Steps whose scalars are written at a time while the learning rate stays the same."""


class StepHistory:
    """Learning rates of the steps so far, and Adam's scalars of these and the coming steps on the device.

    Attributes:
        schedule: scalars of the steps. Grows by new tensors.
    """

    def __init__(self, config: AdamConfig, device: torch.device):
        self._config, self._betas = config, BetaHistory(config.betas)
        self._lrs = np.empty(0)
        self._steps = 0
        self._scheduled, self._scheduled_lr = 0, config.lr
        self.schedule = Schedule(*(torch.empty(0, device=device) for _ in Schedule._fields))

    @property
    def is_replayed(self) -> bool:
        """True if rows replay these steps."""
        return self._config.absent_rows == "replay"

    def reconfigure(self, config: AdamConfig, after: int) -> None:
        """Changes the settings of the steps after step ``after``. No row may be behind it."""
        self._config, self._betas = config, self._betas.changed(config.betas, after)
        self.return_to(after)

    def scalars(self, step: int, lr: float) -> AdamScalars:
        """Adam's scalars of step ``step``, from 1, which has the current settings."""
        return adam_scalars(self._config, lr, step, self._betas)

    @property
    def lrs(self) -> Tensor:
        """Learning rate of each step so far, float64 [steps], on CPU; shares the history's memory."""
        return torch.from_numpy(self._lrs[: self._steps])

    def lr_of(self, step: int) -> float:
        """Learning rate of a step that was recorded, from 1."""
        return float(self._lrs[step - 1])

    def prepare(self, step: int, lr: float) -> None:
        """Writes the scalars of step ``step``, from 1, and of steps after it, unless that is done.

        Does not wait for the device.
        """
        if lr == self._scheduled_lr and step <= self._scheduled:
            return
        # A rate that has changed may change in every step.
        count = _AHEAD if lr == self._scheduled_lr else 1
        self._scheduled, self._scheduled_lr = step - 1 + count, lr
        self._reserve(self._scheduled)
        if count == 1:
            # fill_ passes the number with the kernel; an assignment may copy it from the host.
            for values, value in zip(self.schedule, self.scalars(step, lr), strict=True):
                values[step - 1 : step].fill_(value)
        else:
            self._write(step, [lr] * count)

    def record(self, step: int, lr: float) -> None:
        """Records the learning rate of step ``step``, from 1, unless another lookup of the same step has done so."""
        if step <= self._steps:
            return
        if step > len(self._lrs):
            self._lrs = np.append(self._lrs, np.zeros(max(step, len(self._lrs), 1024)))
        self._lrs[step - 1], self._steps = lr, step

    def forget_after(self, step: int) -> None:
        """Takes back the record of steps after ``step``."""
        self._steps = min(self._steps, step)

    def return_to(self, step: int) -> None:
        """Makes step ``step`` the latest that has been scheduled: those after it may have other learning rates."""
        self._scheduled = min(self._scheduled, step)

    def restart(self, steps: int) -> None:
        """Begins after step ``steps``; no row may be behind it."""
        self._lrs, self._steps = np.zeros(steps), steps
        self._scheduled = steps
        self._reserve(steps)

    def replace(self, lrs: np.ndarray) -> None:
        """Sets the learning rates of all steps so far, float64 [steps]."""
        self._lrs, self._steps = np.array(lrs, np.float64), len(lrs)
        self._scheduled = len(lrs)
        self._reserve(self._scheduled)
        first = self._betas.since  # no row is behind the steps with other settings, which none takes again
        self._write(first + 1, lrs[first:].tolist())

    def _write(self, first: int, lrs: list[float]) -> None:
        scalars = [self.scalars(step, lr) for step, lr in enumerate(lrs, first)]
        both = torch.tensor(scalars, dtype=torch.float32).view(-1, len(Schedule._fields)).t().contiguous()
        if self.schedule.step_sizes.is_cuda:
            both = both.pin_memory()
        for values, column in zip(self.schedule, both, strict=True):
            values[first - 1 : first - 1 + len(lrs)].copy_(column, non_blocking=True)

    def _reserve(self, steps: int) -> None:
        capacity = len(self.schedule.step_sizes)
        if steps > capacity:
            more = max(steps, 2 * capacity, 2 * _AHEAD) - capacity
            self.schedule = Schedule(*(torch.cat([values, values.new_zeros(more)]) for values in self.schedule))
