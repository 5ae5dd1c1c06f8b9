"""What changes with the steps of a run: learning rates, by warm-up and decay, and the batch size of a ramp."""

from dataclasses import dataclass, field
from math import ceil, cos, floor, pi

from cowrec.sparse_opt import Hyperparameters
from cowrec.trainer.config.optimizer import LrDecay, OptimizerConfig

from .batch_ramp import BatchRamp

_WARMUP_START = 1e-8


@dataclass(frozen=True)
class Schedule:
    """Learning rates by step, counted from 0, as multiples of those of the step's batch size.

    Warm-up and decay count samples, in steps of the run's own batch size: a step of the ramp counts for its part.

    Attributes:
        warmup_steps: steps over which the network's rate rises linearly from 1e-8, as in the CowClip reference:
            ``1e-8 + (lr - 1e-8) * min(k, W) / W``.
        embedding_warmup_steps: the same for the tables' rate.
        decay: how both rates fall.
        decay_steps: T: steps of the whole run for "linear", ``1 - k / T``, and for "cosine",
            ``(1 + cos(pi * k / T)) / 2`` (arXiv 1608.03983, equation 5, without restarts); steps between two falls for
            "step".
        decay_factor: of each fall of "step": ``factor ** floor(k / T)``.
        ramp: batch sizes of the first steps.
    """

    warmup_steps: float = 0
    embedding_warmup_steps: float = 0
    decay: LrDecay = "none"
    decay_steps: float = 1
    decay_factor: float = 1.0
    ramp: BatchRamp = field(default_factory=BatchRamp)

    @classmethod
    def of_epochs(cls, config: OptimizerConfig, epoch_steps: int, total_steps: int, ramp: BatchRamp) -> "Schedule":
        """The schedule of a run over epochs.

        Args:
            config: of the run.
            epoch_steps: steps of an epoch at the run's own batch size.
            total_steps: steps of the run, those of the ramp included.
            ramp: of the run.
        """
        steps = config.lr_decay_epochs * epoch_steps if config.lr_decay == "step" else ramp.full_steps(total_steps)
        return cls(
            warmup_steps=ceil(config.warmup_epochs * epoch_steps),
            embedding_warmup_steps=ceil(config.embedding_warmup_epochs * epoch_steps),
            decay=config.lr_decay,
            decay_steps=steps,
            decay_factor=config.lr_decay_factor,
            ramp=ramp,
        )

    @property
    def changes_embedding_lr(self) -> bool:
        """Whether the tables' rate depends on the step."""
        return self.decay != "none" or self.embedding_warmup_steps > 0

    def embedding_lr(self, values: Hyperparameters, step: int) -> float:
        return self._rate(values.embedding_lr, self.embedding_warmup_steps, step)

    def dense_lr(self, values: Hyperparameters, step: int) -> float:
        return self._rate(values.dense_lr, self.warmup_steps, step)

    def _rate(self, lr: float, warmup_steps: float, step: int) -> float:
        done = self.ramp.full_steps(step)
        if warmup_steps:
            start = min(_WARMUP_START, lr)  # a rate of 0 stays 0
            lr = start + (lr - start) * min(done, warmup_steps) / warmup_steps
        return lr * self._left(done)

    def _left(self, done: float) -> float:
        """Share of the rate that the decay has left after as many steps."""
        if self.decay == "none":
            return 1.0
        if self.decay == "step":
            return self.decay_factor ** floor(
                done / self.decay_steps + 1e-9
            )  # 0.7 epochs of 10 steps are 7.000000000000001
        share = min(done / self.decay_steps, 1.0)
        return 1 - share if self.decay == "linear" else (1 + cos(pi * share)) / 2
