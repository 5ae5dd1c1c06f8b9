"""Batch ramp: the growing batch sizes of a run's first steps."""

from dataclasses import dataclass
from functools import cached_property

from cowrec.trainer.config.run import RunConfig


@dataclass(frozen=True)
class BatchRamp:
    """Batch sizes of a run's first steps: some steps at each size, then the run's own size to the end.

    Without sizes, which is the default, there is no ramp.

    Attributes:
        steps_per_size: steps at each size.
        sizes: global batch sizes, ascending.
        batch_size: of all later steps.
    """

    steps_per_size: int = 0
    sizes: tuple[int, ...] = ()
    batch_size: int = 1

    @classmethod
    def of(cls, config: RunConfig) -> "BatchRamp":
        """The ramp of a run: `train.batch_ramp` steps each at the base batch size and its doubles below the run's."""
        steps, base, batch_size = config.train.batch_ramp, config.optimizer.base_batch_size, config.train.batch_size
        doublings = range(batch_size.bit_length()) if steps else ()
        return cls(steps, tuple(base << each for each in doublings if base << each < batch_size), batch_size)

    @cached_property
    def steps(self) -> int:
        """Steps of the ramp."""
        return self.steps_per_size * len(self.sizes)

    @property
    def first_batches(self) -> tuple[int, ...]:
        """Batch size of each of its steps."""
        return tuple(size for size in self.sizes for _ in range(self.steps_per_size))

    @cached_property
    def samples(self) -> int:
        """Samples of its steps."""
        return self.steps_per_size * sum(self.sizes)

    @property
    def stages(self) -> dict[int, int]:
        """First step, from 0, and batch size of each stage, that after the ramp included; empty without a ramp."""
        sizes = (*self.sizes, self.batch_size) if self.sizes else ()
        return {number * self.steps_per_size: size for number, size in enumerate(sizes)}

    def full_steps(self, step: int) -> float:
        """Steps of the run's own batch size that have as many samples as the first ``step`` steps."""
        if step >= self.steps:
            return step - self.steps + self.samples / self.batch_size
        return sum(self.first_batches[:step]) / self.batch_size
