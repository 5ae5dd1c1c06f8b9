"""Measurements of an online run: progressive quality, samples and speed, logged, reported and served to Prometheus."""

import dataclasses
import time
from math import nan
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cowrec.data_pipeline import SampleStream, StreamBatch
from cowrec.data_pipeline.codec.codec import TIME_COLUMN
from cowrec.data_pipeline.dataset.schema import LABEL
from cowrec.trainer.config.id_table import seconds
from cowrec.trainer.runs.metrics_log import MetricsLog
from cowrec.trainer.training.trainer import Trainer

from .progressive import ProgressiveQuality, WindowQuality
from .publication import OnlinePublication


class Measurements:
    """What an online run has measured so far; all but the samples and their speed on the first process.

    Args:
        trainer: of the run.

    Attributes:
        samples: trained on since the start of the run.
        newest_time: newest sample time that was trained on, Unix seconds; 0 before the first sample.
        trained_seconds: time that the steps took.
        reading_seconds: time that :class:`Turns` has counted since the process started.
        quality: of the open window.
        windows: quality of those that were closed since the process started.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self.samples = self.newest_time = 0
        self.trained_seconds = self.reading_seconds = self._seconds_before = 0.0
        self.windows = list[WindowQuality]()
        self.quality = ProgressiveQuality(seconds(trainer.config.online.window, "online.window"))

    @property
    def samples_per_second(self) -> float:
        """Samples per second of the steps, without waiting for the stream; NaN before the first step."""
        return self.samples / self.trained_seconds if self.trained_seconds else nan

    @property
    def reading_share(self) -> float:
        """Share of the busy time since the process started in which the first process read and encoded samples."""
        busy = self.reading_seconds + self.trained_seconds - self._seconds_before
        return self.reading_seconds / busy if busy else nan

    def resume(self, samples: int, trained_seconds: float) -> None:
        """Continues from the counts of a checkpoint."""
        self.samples, self.trained_seconds = samples, trained_seconds
        self._seconds_before = trained_seconds

    def load(self, folder: Path, newest_time: int | None) -> None:
        """Loads the open window of a checkpoint; on the first process."""
        self.quality.load(folder)
        self.newest_time = newest_time or 0

    def add(self, arrived: StreamBatch, logits: Tensor, log: MetricsLog) -> None:
        """Adds the predictions for a batch that was trained on, [B]; on the first process."""
        label, times = (torch.from_numpy(arrived.table[name].to_numpy().copy()) for name in (LABEL, TIME_COLUMN))
        self.newest_time = max(self.newest_time, int(times.max()))
        for window in self.quality.add(logits, label, times):
            self._write_window(log, window)

    def close_window(self, log: MetricsLog) -> None:
        """Closes the open window, if it has samples."""
        if not self.quality.is_empty:
            self._write_window(log, self.quality.close())

    def _write_window(self, log: MetricsLog, window: WindowQuality) -> None:
        """Logs and prints the quality of a window that is complete."""
        log.write("window", self._trainer.steps, **dataclasses.asdict(window))
        self.windows.append(window)
        self._trainer.say(str(window))

    def write(self, log: MetricsLog, stream: SampleStream | None) -> None:
        """Writes the metrics since the last call; all processes call together, the first one with the stream."""
        trainer = self._trainer
        loss, steps, speed = trainer.checked_loss(), trainer.steps, self.samples_per_second
        values = {"loss": loss, "samples_per_second": speed, "reading_share": self.reading_share}
        log.write("train", steps, **values, samples=self.samples)
        if stream:
            log.write("stream", steps, **stream.counters, batches_set_aside=trainer.set_aside)
        trainer.write_statistics(log)

    def readings(
        self, stream: SampleStream, publication: OnlinePublication | None
    ) -> tuple[dict[str, float], dict[str, int]]:
        """Values for the endpoint of metrics, which calls it in another thread."""
        values = {
            "samples": self.samples,
            "steps": self._trainer.steps,
            "batches_set_aside": self._trainer.set_aside,
            "samples_per_second": self.samples_per_second,
            "reading_share": self.reading_share,
            "waiting_samples": len(stream.position.waiting),
        }
        if self.newest_time:
            values["lag_seconds"] = time.time() - self.newest_time
        if self.windows:
            last = self.windows[-1]
            values |= {"window_auc": last.auc, "window_logloss": last.logloss, "window_calibration": last.calibration}
        return values | (publication.readings() if publication else {}), stream.counters

    def report(self, stream: SampleStream | None) -> dict[str, Any]:
        """Entries of the run's report; on the first process."""
        assert stream is not None
        return {
            "samples": self.samples,
            "samples_per_second": self.samples_per_second,
            "reading_share": self.reading_share,
            "windows": [dataclasses.asdict(each) for each in self.windows],
            "stream": stream.counters,
        }
