"""What a command shows while it works: the log of cowrec, a line each, and progress bars on a terminal.

As a library cowrec logs to the logger ``cowrec`` and shows nothing but warnings.
"""

import logging
import sys
import time
from collections.abc import Iterable
from math import isfinite

from tqdm import tqdm

logger = logging.getLogger("cowrec")

TIME_FORM = "%Y-%m-%d %H:%M:%S"


class _AboveBars(logging.Handler):
    """Prints records to stderr, above progress bars."""

    def emit(self, record: logging.LogRecord) -> None:
        tqdm.write(self.format(record), file=sys.stderr)
        sys.stderr.flush()


_HANDLER = _AboveBars()
_shown: list[logging.Handler] = []


def show_log(form: str = "%(message)s") -> None:
    """Shows what cowrec logs, from now on.

    Args:
        form: of a line, as of ``logging.Formatter``.
    """
    show_lines(logging.Formatter(form, TIME_FORM))


def show_lines(formatter: logging.Formatter, handler: logging.Handler = _HANDLER, *, libraries: bool = False) -> None:
    """Shows what cowrec logs, from now on and in place of what an earlier call has set up.

    Args:
        formatter: of a line.
        handler: receives the lines, by default standard error.
        libraries: also show the warnings of libraries in this way.
    """
    hide_log()
    handler.setFormatter(formatter)
    logger.setLevel(logging.INFO)
    logger.addHandler(handler)
    logger.propagate = False  # a library may set up the root logger
    if libraries:
        logging.getLogger().addHandler(handler)
    _shown.append(handler)


def hide_log() -> None:
    """Ends :func:`show_log` and :func:`show_lines`."""
    for handler in _shown:
        logger.removeHandler(handler)
        logging.getLogger().removeHandler(handler)
        handler.close()
    _shown.clear()
    logger.setLevel(logging.NOTSET)
    logger.propagate = True


def is_log_shown() -> bool:
    return bool(_shown)


class Speed:
    """Sums samples and seconds of training steps, leaving out evaluations and checkpoints."""

    def __init__(self, samples: int = 0, seconds: float = 0.0) -> None:
        self.samples, self.seconds = samples, seconds
        self.start(0)

    def start(self, done: int) -> None:
        """Starts the clock, ``done`` samples into the epoch."""
        self._done, self._since = done, time.perf_counter()

    def measure(self, done: int, *, counts: bool) -> float:
        """Samples per second since the last call, ``done`` samples into the epoch; added to the sums if it counts."""
        now = time.perf_counter()
        samples, seconds = done - self._done, now - self._since
        self._done, self._since = done, now
        if counts:
            self.samples += samples
            self.seconds += seconds
        return samples / seconds


class ProgressDisplay:
    """The progress of a run: a bar for each epoch on a terminal, elsewhere a line in the log now and then.

    Args:
        first: whether this process is the one that shows it.
        epochs: of the run.
        epoch_samples: of an epoch.
        seconds: between two lines; 0 for none.
    """

    def __init__(self, first: bool, epochs: int, epoch_samples: int, seconds: float) -> None:
        self._epochs, self._samples, self._seconds = epochs, epoch_samples, seconds
        self._has_bars = first and is_log_shown() and sys.stderr.isatty()
        self._has_lines = first and not self._has_bars and seconds > 0
        self._losses: list[tuple[float, int]] = []
        self._bar: tqdm | None = None

    def start(self, epoch: int, done: int) -> None:
        """Begins epoch ``epoch``, counted from 0, ``done`` samples into it."""
        self._epoch, self._done, self._since = epoch, done, time.perf_counter()
        self._losses = []
        if not self._has_bars:  # a bar that is switched off would start a thread too
            return
        self._bar = tqdm(
            total=self._samples,
            initial=done,
            desc=f"epoch {epoch + 1}",
            unit=" samples",
            unit_scale=True,
            leave=False,
        )

    def show(self, step: int, done: int, loss: float) -> None:
        """Shows that step ``step`` of the run ends ``done`` samples into the epoch.

        Args:
            step: counted from 1.
            done: samples of the epoch.
            loss: mean loss since the last call.
        """
        if self._bar is not None:
            self._bar.set_postfix(loss=f"{loss:.4f}", refresh=False)
            self._bar.update(done - self._bar.n)
        self._losses.append((loss, done - self._done - sum(samples for _, samples in self._losses)))
        now = time.perf_counter()
        if not self._has_lines or now - self._since < self._seconds:
            return
        rate = (done - self._done) / (now - self._since)
        left = ((self._epochs - self._epoch) * self._samples - done) / rate
        logger.info(
            f"epoch {self._epoch + 1}/{self._epochs}  {done / self._samples:.1%}  step {step:,}"
            f"  loss {_mean(self._losses):.4f}  {rate:,.0f} samples/s  {_duration(left)} left"
        )
        self._done, self._since, self._losses = done, now, []

    def end(self) -> None:
        """Ends an epoch's bar."""
        if self._bar is not None:
            self._bar.close()


def _mean(weighted: Iterable[tuple[float, int]]) -> float:
    pairs = list(weighted)
    return sum(value * weight for value, weight in pairs) / sum(weight for _, weight in pairs)


def _duration(seconds: float) -> str:
    """Hours, minutes and seconds; "?" where they are not known."""
    if not isfinite(seconds):
        return "?"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}"
