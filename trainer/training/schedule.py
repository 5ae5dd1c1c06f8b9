"""What changes with the steps of a run: learning rates, by warm-up and decay, and the batch size of a ramp."""

from dataclasses import dataclass, field

from cowrec.sparse_opt import Hyperparameters

from .batch_ramp import BatchRamp

_WARMUP_START = 1e-8


@dataclass(frozen=True)
class Schedule:
    """Learning rates by step, counted from 0, as multiples of those of the step's batch size.

    Warm-up and decay count samples, in steps of the run's own batch size: a step of the ramp counts for its part.

    Attributes:
        warmup_steps: steps over which the network's rate rises linearly from 1e-8, as in the CowClip reference:
            ``1e-8 + (lr - 1e-8) * min(k, W) / W``.
        decay_steps: steps of the whole run, over which both rates fall linearly to 0; 0: they do not fall.
        ramp: batch sizes of the first steps.
    """

    warmup_steps: float = 0
    decay_steps: float = 0
    ramp: BatchRamp = field(default_factory=BatchRamp)

    def embedding_lr(self, values: Hyperparameters, step: int) -> float:
        return values.embedding_lr * self._left(step)

    def dense_lr(self, values: Hyperparameters, step: int) -> float:
        lr = values.dense_lr
        if self.warmup_steps:
            lr = (
                _WARMUP_START
                + (lr - _WARMUP_START) * min(self.ramp.full_steps(step), self.warmup_steps) / self.warmup_steps
            )
        return lr * self._left(step)

    def _left(self, step: int) -> float:
        """Share of the run that lies ahead; 1 without decay."""
        return max(1 - self.ramp.full_steps(step) / self.decay_steps, 0.0) if self.decay_steps else 1.0
