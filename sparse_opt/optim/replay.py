"""Replay of missed steps: rules that allow it, thresholds of rows at rest, and the learning rates of all steps."""

from collections.abc import Iterable, Sequence
from math import inf, log
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cowrec.errors import UserError

from ..algorithm.adam import AdamConfig, AdamScalars, adam_constants, adam_scalars
from ..algorithm.clip import RowLimit
from ..kernels.layout import RestThresholds, StepScalars
from ..lookups.rules import TableRules

WEIGHT_AT_REST = 1e-11
"""Largest weight at rest under L2, which draws weights to zero; also the largest change by a first moment at rest."""
WEIGHT_AT_REST_WITHOUT_L2 = 1e-20
"""The same without L2: a weight keeps that change, which must therefore be below the weight's last digit."""
SHARE_OF_FLOOR_AT_REST = 1e-6
"""Largest weight at rest as a share of the clip's floor, so that the weight's norm does not affect the limit."""
_RISE = 1000
"""Largest learning rate of a run divided by ``AdamConfig.lr``; times :data:`WEIGHT_AT_REST`, this is below the last
digit of a weight of 0.1."""
_AHEAD = 1024
"""Steps whose scalars are written at a time while the learning rate stays the same."""
_NOTHING = 2.0**-54
"""Largest number whose subtraction from 1 gives 1."""


def require_replayable(rules: TableRules, config: AdamConfig, column_wise: Iterable[str]) -> None:
    """Raises ValueError on all ranks if the rule or one of the ``column_wise`` tables does not allow replay."""
    if rules.scope != "row":
        raise UserError(
            f"clip.rule = {rules.name!r} needs the norm of every row in every step, which absent_rows ="
            ' "replay" does not compute; set it to "lazy" (the rows of the batch alone) or "dense" (all rows)'
        )
    for table in sorted(table for table in column_wise if absent_clip_binds(rules.of(table).limit(1), config)):
        raise UserError(
            f"table {table!r} is sharded column-wise, and an absent row's L2 may exceed its limit alone"
            f" (2 * l2 = {2 * config.l2:g} is not below clip.r), which needs the norm of all its columns in every"
            ' step that it missed; lower l2, shard the table row- or table-wise, or set absent_rows = "dense"'
        )


def absent_clip_binds(limit: RowLimit, config: AdamConfig) -> bool:
    """True if the L2 gradient of an absent row may exceed the row's limit, at least r * ||w|| (one occurrence)."""
    return 2 * config.l2 > 0.999 * limit.r and config.l2 > 0 and limit.floor < inf


def log_beta2(config: AdamConfig) -> float:
    """Logarithm of beta2 in float32, which the kernels use and in which a small beta2 may be 0."""
    beta2 = np.float32(config.betas[1])
    return log(beta2) if beta2 > 0 else -inf


def rest_thresholds(config: AdamConfig, largest_lr_factor: float, limits: Sequence[RowLimit]) -> RestThresholds:
    """Computes thresholds for the rows of a lookup with these limits of its tables and this largest factor of lr."""
    constants = adam_constants(config)
    weight = _weight_at_rest(config, config.lr * largest_lr_factor, [limit.floor for limit in limits])
    # A rate of 0 may be followed by another one, under which moments move weights again.
    return RestThresholds(config.lr or 1.0, weight, weight * constants.eps * constants.one_minus_beta1)


def largest_rate(config: AdamConfig, lr_factors: Iterable[float]) -> float:
    """Computes the largest learning rate of a run under the thresholds of ``config.lr``.

    A row at rest moves by less than :data:`WEIGHT_AT_REST` at ``config.lr``, and by less than float32 shows at the
    returned rate.
    """
    converging = converging_rate(config)
    # In other tables, only weights of zero are at rest.
    factors = [factor for factor in (1.0, *lr_factors) if factor > 0 and config.lr * factor <= converging]
    return min(config.lr * _RISE or inf, *(converging / factor for factor in factors), inf)


def converging_rate(config: AdamConfig) -> float:
    """Computes the largest learning rate under which L2 draws a tiny weight to zero, with a margin.

    Near zero, Adam under L2 is the heavy-ball method on ``l2 * w^2`` with steps of at most ``lr / eps``. Let d be the
    weight decay of a step. The method converges if ``2 * l2 * lr / eps < (2 - d) * (1 + b1) / (1 - b1)``; otherwise, a
    tiny row may grow again once its second moment has decayed. Source: Polyak 1964, with the moment's factor 1 - b1;
    with d, Jury's conditions on ``z^2 - (1 - d + b1 - a) * z + b1 * (1 - d)``, ``a = (1 - b1) * 2 * l2 * lr / eps``.
    """
    if config.l2 == 0:
        return inf
    bound = 0.9 * (1 + config.betas[0]) / (1 - config.betas[0])
    return 2 * bound / (2 * config.l2 / config.eps + bound * config.weight_decay)


def _weight_at_rest(config: AdamConfig, lr: float, floors: Sequence[float]) -> float:
    """Computes the largest weight at rest; 0 if a weight may grow again."""
    if config.l2 == 0:
        return WEIGHT_AT_REST_WITHOUT_L2
    if lr > converging_rate(config):
        return 0.0
    return min(WEIGHT_AT_REST, *(SHARE_OF_FLOOR_AT_REST * floor for floor in floors))


class StepHistory:
    """Learning rates of all steps so far, and Adam's scalars of these and of coming steps on the device."""

    def __init__(self, config: AdamConfig, device: torch.device):
        self._config = config
        self._lrs = np.empty(0)
        self._steps = 0
        self._scheduled, self._scheduled_lr = 0, config.lr
        self.step_scalars = StepScalars(
            *(torch.zeros(2 * _AHEAD, dtype=torch.float32, device=device) for _ in StepScalars._fields)
        )

    @property
    def is_replayed(self) -> bool:
        return self._config.absent_rows == "replay"

    def scalars(self, step: int, lr: Any) -> AdamScalars:
        """Computes Adam's scalars of step ``step``, from 1, at one rate or an array of rates."""
        return adam_scalars(self._config, lr, step)

    @property
    def lrs(self) -> Tensor:
        """Learning rates of all steps so far, float64 [steps], on CPU, in the history's memory."""
        return torch.from_numpy(self._lrs[: self._steps])

    def prepare(self, step: int, lr: float) -> None:
        """Writes the scalars of step ``step``, from 1, and of later steps, without waiting for the device."""
        if lr == self._scheduled_lr and step <= self._scheduled:
            return
        # A rate that has changed may change again in the next step.
        count = _AHEAD if lr == self._scheduled_lr else 1
        self._scheduled, self._scheduled_lr = step - 1 + count, lr
        self._reserve(self._scheduled)
        if count == 1:
            # fill_ passes the number with the kernel; an assignment may copy it from the host.
            for values, value in zip(self.step_scalars, self.scalars(step, lr), strict=True):
                values[step - 1 : step].fill_(value)
        else:
            self._write(step, np.full(count, lr))

    def record(self, step: int, lr: float) -> None:
        """Records the learning rate of step ``step``, from 1, unless another lookup of the same step has done so."""
        if step <= self._steps:
            return
        if step > len(self._lrs):
            self._lrs = np.append(self._lrs, np.zeros(max(step, len(self._lrs), 1024)))
        self._lrs[step - 1], self._steps = lr, step

    def forget_after(self, step: int) -> None:
        self._steps = min(self._steps, step)

    def return_to(self, step: int) -> None:
        """Forgets the scalars of steps after ``step``, whose learning rates may change."""
        self._scheduled = min(self._scheduled, step)

    def restart(self, steps: int) -> None:
        """Begins after step ``steps``, when no row is behind."""
        self._lrs, self._steps = np.zeros(steps), steps
        self._scheduled = steps
        self._reserve(steps)

    def replace(self, lrs: np.ndarray) -> None:
        """Sets the learning rates of all steps so far, float64 [steps]."""
        self._lrs, self._steps = np.array(lrs, np.float64), len(lrs)
        self._scheduled = len(lrs)
        self._reserve(self._scheduled)
        self._write(1, self._lrs)

    def _write(self, first: int, lrs: np.ndarray) -> None:
        columns = np.empty((len(StepScalars._fields), len(lrs)), np.float32)
        for number, lr in enumerate(lrs.tolist()):
            if max(self._config.betas) ** (first + number) < _NOTHING:
                # Powers in numpy may be rounded otherwise; but here all corrections are 1, to the last bit.
                for column, rest in zip(columns, self.scalars(first + number, lrs[number:]), strict=True):
                    column[number:] = rest
                break
            columns[:, number] = self.scalars(first + number, lr)
        both = torch.from_numpy(columns)
        if self.step_scalars.step_sizes.is_cuda:
            both = both.pin_memory()
        for values, written in zip(self.step_scalars, both, strict=True):
            values[first - 1 : first - 1 + len(lrs)].copy_(written, non_blocking=True)

    def _reserve(self, steps: int) -> None:
        capacity = len(self.step_scalars.step_sizes)
        if steps > capacity:
            more = max(steps, 2 * capacity) - capacity
            self.step_scalars = StepScalars(
                *(torch.cat([values, values.new_zeros(more)]) for values in self.step_scalars)
            )
