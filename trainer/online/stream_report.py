"""Reports of what arrived from a stream, also while nothing is trained on."""

import time

from cowrec.data_pipeline import SampleStream
from cowrec.data_pipeline.streams.position import LEFT_OUT
from cowrec.trainer.runs.metrics_log import MetricsLog
from cowrec.trainer.training.trainer import Trainer


class StreamReport:
    """Logs a stream's counters every so often, and warns of samples that were left out.

    Args:
        stream: the stream; None on all processes but the first, which do not report.
        trainer: of the run.
        log: receives the counters.
        seconds: between two reports.
    """

    def __init__(self, stream: SampleStream | None, trainer: Trainer, log: MetricsLog, seconds: float) -> None:
        self._stream, self._trainer, self._log, self._seconds = stream, trainer, log, seconds
        self._reported, self._at = stream.counters if stream else {}, time.monotonic()

    def write_if_due(self) -> None:
        """Reports if it is time."""
        if time.monotonic() - self._at >= self._seconds:
            self.write()

    def write(self) -> None:
        """Reports what arrived since the last call, if anything did."""
        if self._stream is None:
            return
        counters = self._stream.counters
        new = {name: value - self._reported.get(name, 0) for name, value in counters.items()}
        self._reported, self._at = counters, time.monotonic()
        if not any(new.values()):
            return
        trainer = self._trainer
        self._log.write("stream", trainer.steps, **counters, batches_set_aside=trainer.set_aside)
        left_out = ", ".join(f"{new[name]:,} {name}" for name in (*LEFT_OUT, "early") if new[name])
        if left_out:
            trainer.warn(f"warning: of the last {new['samples']:,} samples some were left out or corrected: {left_out}")
