"""Where a run is in the epochs of its data set, what it measured after each, and how fast it trains."""

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from ..config.run import RunConfig
from ..runs.checkpoint import Progress, best_epoch

EpochEnd = dict[str, Any]
"""Number of an epoch, from 1, training steps taken until its end, and measures, as report and checkpoints list them."""
AfterEpoch = Callable[[EpochEnd], bool]
"""Takes the measures after an epoch and decides whether the run ends there."""


class Epochs:
    """The position of a run in its epochs, and the measures after each.

    Args:
        has_validation: whether validation samples are measured after each epoch, rather than the test split.
        after_epoch: called after each epoch but the last, in a resumed run first for the epoch before; all processes
            must decide alike.

    Attributes:
        epoch: epochs trained to their end, which is the number of the current one, from 0.
        step: steps taken in the current epoch.
        ends: the measures after each epoch.
        training: of each epoch that has begun, the steps measured, the sum of their losses, and their seconds.
    """

    def __init__(self, config: RunConfig, *, has_validation: bool, after_epoch: AfterEpoch | None = None) -> None:
        self._config, self._has_validation, self._after_epoch = config, has_validation, after_epoch
        self.epoch = self.step = 0
        self.ends: list[EpochEnd] = []
        self.training: list[list[float]] = []

    def are_left(self) -> bool:
        """Whether the run goes on, decided anew in a resumed run.

        It ends after `train.epochs`, after `train.patience` epochs that were not better than the best one, or where
        `after_epoch` says so.
        """
        if self.epoch >= self._config.train.epochs:
            return False
        patience, best = self._config.train.patience, self.best()
        if patience and best and self.epoch - best["epoch"] >= patience:
            return False
        return not (self._after_epoch and self.ends and self._after_epoch(self.ends[-1]))

    def end(self) -> None:
        """Goes on to the next epoch."""
        self.epoch, self.step = self.epoch + 1, 0

    def reopen(self, steps: int) -> None:
        """Goes back to the last of the steps of the epoch that has ended, which is still to be measured."""
        self.epoch, self.step = self.epoch - 1, steps

    def resume(self, progress: Progress) -> None:
        """Goes to the position of a checkpoint."""
        self.epoch, self.step, self.ends = progress.epoch, progress.epoch_step, list(progress.epochs)
        self.training = [list(epoch) for epoch in progress.training]

    def add_training(self, loss: float, seconds: float) -> None:
        """Adds the steps since the last call, in which the mean loss was `loss`."""
        if len(self.training) == self.epoch:
            self.training.append([0, 0.0, 0.0])
        steps = self.step - self.training[-1][0]
        own = (steps, steps * loss, seconds)
        self.training[-1] = [before + now for before, now in zip(self.training[-1], own, strict=True)]

    def training_report(self) -> list[dict[str, float]]:
        """The mean training loss of each epoch's steps, as the model was in each of them, and the seconds they took."""
        return [
            {"epoch": number, "loss": loss / steps, "seconds": seconds}
            for number, (steps, loss, seconds) in enumerate(self.training, 1)
        ]

    def best(self) -> EpochEnd | None:
        """The epoch with the best validation quality; without validation samples test quality, if the best is kept."""
        metric = self._config.checkpoint.keep_best
        if metric == "none" and not self._has_validation:
            return None
        return best_epoch(self.ends, "logloss" if metric == "none" else metric)

    def undefined_metric(self) -> str:
        """The metric of `checkpoint.keep_best` where the first epoch had no value of it; "" in all other cases."""
        metric = self._config.checkpoint.keep_best
        return metric if metric != "none" and len(self.ends) == 1 and best_epoch(self.ends, metric) is None else ""


class Speed:
    """Sums samples and seconds of training steps, leaving out evaluations and checkpoints."""

    def __init__(self, samples: int = 0, seconds: float = 0.0) -> None:
        self.samples, self.seconds = samples, seconds
        self.start(0)

    def start(self, done: int) -> None:
        """Starts the clock, ``done`` samples into the epoch."""
        self._done, self._since = done, time.perf_counter()

    def measure(self, done: int, *, counts: bool) -> tuple[float, float]:
        """Samples per second, and seconds, since the last call; added to the sums if they count.

        ``done`` are the samples of the epoch that have been trained on.
        """
        now = time.perf_counter()
        samples, seconds = done - self._done, now - self._since
        self._done, self._since = done, now
        if counts:
            self.samples += samples
            self.seconds += seconds
        return samples / seconds, seconds

    def time_left(self, samples: int) -> str:
        """How long so many samples take, for the terminal; unknown in the first step, which compiles kernels."""
        return f"  {timedelta(seconds=round(samples * self.seconds / self.samples))} left" if self.samples else ""
