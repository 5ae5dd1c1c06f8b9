"""Learning rates of a run's steps: the warm-up of the network's, and the decay of both."""

from dataclasses import dataclass

from cowrec.sparse_opt import Hyperparameters

_WARMUP_START = 1e-8


@dataclass(frozen=True)
class Schedule:
    """Learning rates by step, counted from 0, as multiples of the run's.

    Attributes:
        warmup_steps: steps over which the network's rate rises linearly from 1e-8, as in the CowClip reference:
            ``1e-8 + (lr - 1e-8) * min(k, W) / W``.
        decay_steps: steps of the whole run, over which both rates fall linearly to 0; 0: they do not fall.
    """

    warmup_steps: int = 0
    decay_steps: int = 0

    def embedding_lr(self, values: Hyperparameters, step: int) -> float:
        return values.embedding_lr * self._left(step)

    def dense_lr(self, values: Hyperparameters, step: int) -> float:
        lr = values.dense_lr
        if self.warmup_steps:
            lr = _WARMUP_START + (lr - _WARMUP_START) * min(step, self.warmup_steps) / self.warmup_steps
        return lr * self._left(step)

    def _left(self, step: int) -> float:
        """Share of the run that lies ahead; 1 without decay."""
        return max(1 - step / self.decay_steps, 0.0) if self.decay_steps else 1.0
