"""Online training: samples from a stream in the order of their time, each predicted before it is trained on.

Every checkpoint holds the stream's position, from which the stream gives the same batches again: a run that was killed
continues bit-identical to an uninterrupted one.
"""

import dataclasses
import time
from contextlib import ExitStack, closing
from functools import partial
from math import nan
from pathlib import Path
from typing import Any

from cowrec.data_pipeline import Position, SampleCodec, SampleSource, SampleStream, Schema, StreamBatch, open_source
from cowrec.data_pipeline.urls import without_credentials
from cowrec.trainer.config.id_table import seconds
from cowrec.trainer.config.run import RunConfig, with_defaults
from cowrec.trainer.runs.checkpoint_folder import checkpoint_name, list_checkpoints
from cowrec.trainer.runs.metrics_log import MetricsLog
from cowrec.trainer.runs.run_dir import CHECKPOINTS, write_report
from cowrec.trainer.runtime.environment import launched_world_size
from cowrec.trainer.runtime.processes import Process, process_group
from cowrec.trainer.runtime.stopping import StopRequest, stop_requests
from cowrec.trainer.sharded_model.id_translation import TranslatedBatch
from cowrec.trainer.training.schedule import Schedule
from cowrec.trainer.training.state import Step
from cowrec.trainer.training.trainer import Trainer, require_run_dir

from .metrics_endpoint import metrics_endpoint
from .progressive import ProgressiveQuality, WindowQuality
from .publication import OnlinePublication
from .quarantine import quarantine
from .stream_report import StreamReport

JOURNAL = "journal"
_POLL_SECONDS = 0.2
"""Longest wait for a batch before publications and snapshots that are due are done."""


def online(
    config: RunConfig,
    data_dir: Path,
    source: str,
    run_dir: Path,
    *,
    publish: str | None = None,
    resume: bool = False,
) -> dict[str, Any]:
    """Trains on a stream until it ends or the run is asked to stop; returns the report that ``run_dir`` then holds.

    Args:
        config: of the run; ``[online]`` holds the settings of the stream.
        data_dir: prepared data set whose fields, scales and vocabularies decode the samples.
        source: of samples, as :func:`open_source` takes it.
        run_dir: folder of the run, new or empty unless it is resumed.
        publish: target of publications, as :func:`open_target` takes it.
        resume: continue from the newest checkpoint in that folder, or start if there is none.

    Raises:
        ValueError: a setting, data set, source or target does not work, or there are several processes.
        NonFiniteLoss: the loss became NaN or infinite; the last checkpoint is kept, and nothing later was published.
        Interrupted: the run was asked to stop and has saved a checkpoint.
    """
    if launched_world_size() > 1:
        raise ValueError("online trains in one process; start it without torchrun")
    if config.train.batch_ramp:
        raise ValueError(
            f"train.batch_ramp = {config.train.batch_ramp} is for the first epoch of a data set, and a stream has none;"
            " add --set train.batch_ramp=0"
        )
    if config.train.accumulation > 1:
        given = f"train.accumulation = {config.train.accumulation}"
        raise ValueError(f"{given} is for data sets, not for streams; add --set train.accumulation=1")
    data = dataclasses.replace(config.data, dir=str(data_dir))
    size = config.train.batch_size or config.optimizer.base_batch_size
    config = dataclasses.replace(config, data=data, train=dataclasses.replace(config.train, batch_size=size))
    config = with_defaults(config, Schema.load(data_dir).split("train").rows)
    with process_group(config.train.device, config.train.timeout_seconds) as process:
        require_run_dir(run_dir, config, process, resume)
        run = _OnlineRun(config, run_dir, process)
        samples = open_source(source, damaged=config.online.damaged_files)  # the stream closes it
        with run.trainer.running(resume):
            run.say(run.summary(source))
            report = run.follow(samples, publish, resume)
            write_report(run_dir, report)
        return report


class _OnlineRun:
    """A run over a stream: its trainer, its position in the stream and its measurements."""

    def __init__(self, config: RunConfig, run_dir: Path, process: Process) -> None:
        self.config, self.run_dir, self.process = config, run_dir, process
        self.codec = SampleCodec.load(config.data.dir)
        self.codec.require_trainable()
        schedule, online = Schedule(config.online.warmup_steps), config.online
        self.trainer = Trainer(config, self.codec.schema, run_dir, process, schedule, online.on_nonfinite)
        self.state, self.say = self.trainer.state, self.trainer.say
        self.quality = ProgressiveQuality(seconds(config.online.window, "online.window"))
        self.saved_step = self.samples = self.newest_time = 0
        self.trained_seconds, self.windows = 0.0, list[WindowQuality]()
        self.journal_entries: dict[str, int] = {}  # first entry that each checkpoint needs, by its name
        self.journal_begin = 0

    def follow(self, source: SampleSource, publish: str | None, resume: bool) -> dict[str, Any]:
        """Runs from the first sample, or from the newest checkpoint, to the end of the stream."""
        position = self.resume() if resume else None
        with ExitStack() as opened:
            stream = opened.enter_context(closing(self.open_stream(source, position)))
            publication = None
            if publish:
                arguments = (self.config, self.trainer.schema, self.state, self.run_dir, self.trainer.warn)
                publication = opened.enter_context(closing(OnlinePublication(publish, *arguments)))
            online = self.config.online
            if online.metrics_port:
                read = partial(self.readings, stream, publication)
                opened.enter_context(metrics_endpoint(online.metrics_host, online.metrics_port, read))
            log = opened.enter_context(self.trainer.open_log())
            stop = opened.enter_context(stop_requests(self.process))
            self.train(stream, publication, log, stop)
            self.save(stream)
            self.trainer.checkpoints.finish()
        return self.report(stream)

    def train(
        self, stream: SampleStream, publication: OnlinePublication | None, log: MetricsLog, stop: StopRequest
    ) -> None:
        """Trains on every batch of the stream; publishes and saves when due, also while no batch comes."""
        saved = time.monotonic()
        report = StreamReport(stream, self.trainer, log, self.config.online.report_seconds)
        while not (stream.ended or stop.wanted):
            arrived = stream.next_batch(_POLL_SECONDS)
            if arrived is not None:
                translated = self.step(arrived, log)
                if publication:
                    publication.mark(translated.batch.sparse)
                if self.trainer.steps == 1 or self.trainer.steps % self.config.train.log_every == 0:
                    self.write_metrics(log, stream)
            if publication and publication.is_due:
                self.publish(publication)
            report.write_if_due()
            overdue = time.monotonic() - saved >= self.config.online.snapshot_seconds
            if overdue and self.trainer.steps > self.saved_step:
                self.save(stream)
                saved = time.monotonic()
        if stop.wanted:
            self.save(stream)
            raise self.trainer.interrupted()
        if not self.quality.is_empty:
            self.write_window(log, self.quality.close())
        report.write()
        self.write_metrics(log, stream)
        if publication:
            self.publish(publication, with_dense=True)

    def step(self, arrived: StreamBatch, log: MetricsLog) -> TranslatedBatch:
        """Trains on a batch; the logits of the step, from the weights before its update, are its predictions.

        A batch that would make the model non-finite changes the id tables only.
        """
        started, batch = time.perf_counter(), arrived.batch
        translated = self.state.ids.training(batch)
        step = self.trainer.step(iter((translated.batch,)))
        if step.set_aside:
            self.set_aside(arrived, step, log)
            return translated
        self.samples += len(step.label)
        assert batch.time is not None
        self.newest_time = max(self.newest_time, int(batch.time.max()))
        for window in self.quality.add(step.logits, step.label, batch.time):
            self.write_window(log, window)
        self.trained_seconds += time.perf_counter() - started
        return translated

    def set_aside(self, arrived: StreamBatch, step: Step, log: MetricsLog) -> None:
        """Keeps the samples of a batch that was not trained on, and says so."""
        try:
            kept = f"its samples are in {quarantine(self.run_dir, arrived, step.logits, step.set_aside)}"
        except OSError as error:
            kept = f"its samples could not be saved: {error}"
        batch, samples = arrived.end.counters["batches"], len(step.label)
        log.write("set_aside", self.trainer.steps, batch=batch, samples=samples, reason=step.set_aside)
        self.trainer.warn(
            f"warning: batch {batch} ({samples:,} samples) is set aside, as it would make the model non-finite:"
            f" {step.set_aside}; {kept}"
        )

    def publish(self, publication: OnlinePublication, *, with_dense: bool = False) -> None:
        """Publishes what is due, after checking that the losses were finite."""
        self.trainer.require_finite()
        publication.publish(self.trainer.steps, self.newest_time or None, with_dense=with_dense)

    def open_stream(self, source: SampleSource, position: Position | None) -> SampleStream:
        """Opens the stream at a position, at its beginning if None."""
        online = self.config.online
        return SampleStream(
            source,
            self.codec,
            batch_size=self.config.train.batch_size,
            lateness_seconds=seconds(online.lateness, "online.lateness"),
            late=online.late,
            duplicates_window=online.duplicates_window,
            max_wait_seconds=online.max_wait_seconds,
            ahead_seconds=seconds(online.ahead, "online.ahead"),
            most_waiting=max(online.most_waiting, self.config.train.batch_size),
            journal=self.run_dir / JOURNAL,
            position=position,
        )

    def resume(self) -> Position | None:
        """Loads the newest checkpoint of the run and returns its position in the stream; None if there is none."""
        progress = self.trainer.resume()
        if progress is None:
            return None
        self.saved_step = progress.step
        self.samples, self.trained_seconds = progress.samples, progress.seconds
        path = self.trainer.checkpoints.latest
        assert path is not None
        self.quality.load(path)
        position = Position.load(path)
        # Entries of damaged checkpoints, which were skipped, are kept too.
        self.journal_entries = {each.name: 0 for each in list_checkpoints(path.parent)} | {path.name: position.entry}
        self.newest_time = position.newest or 0
        self.say(f"continuing from {path}: step {progress.step}, {self.samples:,} samples")
        return position

    def save(self, stream: SampleStream) -> None:
        """Saves a checkpoint from which the stream can be continued, unless the last one is of this step."""
        if self.trainer.steps == self.saved_step:
            return
        self.trainer.require_finite()
        position, window, folder = stream.position, self.quality.freeze(), self.run_dir / CHECKPOINTS

        def write_files(partial: Path) -> None:
            position.save(partial)
            window.save(partial)

        self.trainer.save(write_files, samples=self.samples, seconds=self.trained_seconds)
        self.saved_step = self.trainer.steps
        self.journal_entries[checkpoint_name(self.saved_step)] = position.entry
        oldest = min((self.journal_entries[each.name] for each in list_checkpoints(folder)), default=0)
        if oldest > self.journal_begin:
            stream.trim(Position(entry=oldest))
            self.journal_begin = oldest

    def write_window(self, log: MetricsLog, window: WindowQuality) -> None:
        """Logs and prints the quality of a window that is complete."""
        log.write("window", self.trainer.steps, **dataclasses.asdict(window))
        self.windows.append(window)
        self.say(str(window))

    def write_metrics(self, log: MetricsLog, stream: SampleStream) -> None:
        """Writes the metrics since the last call."""
        loss, steps = self.trainer.checked_loss(), self.trainer.steps
        log.write("train", steps, loss=loss, samples_per_second=self.samples_per_second, samples=self.samples)
        log.write("stream", steps, **stream.counters, batches_set_aside=self.trainer.set_aside)
        self.trainer.write_statistics(log)

    def readings(
        self, stream: SampleStream, publication: OnlinePublication | None
    ) -> tuple[dict[str, float], dict[str, int]]:
        """Values for the endpoint of metrics, which calls it in another thread."""
        values = {
            "samples": self.samples,
            "steps": self.trainer.steps,
            "batches_set_aside": self.trainer.set_aside,
            "samples_per_second": self.samples_per_second,
            "waiting_samples": len(stream.position.waiting),
        }
        if self.newest_time:
            values["lag_seconds"] = time.time() - self.newest_time
        if self.windows:
            last = self.windows[-1]
            values |= {"window_auc": last.auc, "window_logloss": last.logloss, "window_calibration": last.calibration}
        return values | (publication.readings() if publication else {}), stream.counters

    @property
    def samples_per_second(self) -> float:
        """Samples per second of the steps, without waiting for the stream; NaN before the first step."""
        return self.samples / self.trained_seconds if self.trained_seconds else nan

    def report(self, stream: SampleStream) -> dict[str, Any]:
        """Summarizes the run."""
        return {
            "samples": self.samples,
            "samples_per_second": self.samples_per_second,
            "windows": [dataclasses.asdict(each) for each in self.windows],
            "stream": stream.counters,
            "id_tables": self.state.id_tables.counters() if self.state.id_tables else None,
            **self.trainer.report(),
        }

    def summary(self, source: str) -> str:
        """Describes source and settings, for the terminal."""
        return (
            f"{self.config.model.name} on {self.trainer.schema.name}, following {without_credentials(source)}\n"
            f"batch {self.config.train.batch_size}, {self.trainer.describe_settings()}"
        )
