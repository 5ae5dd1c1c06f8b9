"""Online training: samples in the order of their time, each predicted before it is trained on, from a stream.

The stream's position is part of every checkpoint, and the stream gives the same batches again from there, so that a run
that was killed becomes the run that was not.
"""

import dataclasses
import sys
import time
from contextlib import ExitStack, closing
from datetime import UTC, datetime
from math import nan
from pathlib import Path
from typing import Any

from tqdm import tqdm

from cowrec.data_pipeline import Batch, Position, SampleCodec, SampleSource, SampleStream, Schema, open_source
from cowrec.trainer.config.id_table import seconds
from cowrec.trainer.config.run import RunConfig
from cowrec.trainer.runs.checkpoint import Checkpoints
from cowrec.trainer.runs.checkpoint_folder import Progress, checkpoint_name, list_checkpoints
from cowrec.trainer.runs.run_dir import (
    CHECKPOINTS,
    RunLog,
    alone_in,
    create_run_dir,
    require_own,
    require_unused,
    write_report,
)
from cowrec.trainer.runtime.environment import launched_world_size
from cowrec.trainer.runtime.errors import Interrupted, NonFiniteLoss
from cowrec.trainer.runtime.processes import Process, process_group
from cowrec.trainer.runtime.stopping import LossWatch, StopRequest, stop_requests
from cowrec.trainer.sharded_model.build import derived_hyperparameters, describe, row_ids_of
from cowrec.trainer.training.state import TrainState

from .progressive import ProgressiveQuality, WindowQuality
from .publication import OnlinePublication

JOURNAL = "journal"
_POLL = 0.2
"""Seconds without a batch after which what is due otherwise is done."""


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
        config: of the run; ``[online]`` says what a stream needs beside.
        data_dir: prepared data set whose fields, scales and vocabularies the samples are read with.
        source: of samples, as :func:`open_source` takes it.
        run_dir: folder of the run, new or empty, unless it is resumed.
        publish: target of publications, as :func:`open_target` takes it.
        resume: go on from the newest checkpoint of the run in that folder; start one where there is none.

    Raises:
        ValueError: a setting, data set, source or target that does not work, or several processes.
        NonFiniteLoss: training went astray; the last checkpoint is kept, and nothing of it was published.
        Interrupted: it was asked to stop, and has saved a checkpoint.
    """
    if launched_world_size() > 1:
        raise ValueError("online trains in one process; start it without torchrun")
    config = dataclasses.replace(config, data=dataclasses.replace(config.data, dir=str(data_dir)))
    with process_group(config.train.device, config.train.timeout_seconds) as process:

        def check_folder() -> None:
            require_own(run_dir, config) if resume else require_unused(run_dir)

        check_folder()
        run = _OnlineRun(config, run_dir, process)
        samples = open_source(source)  # the stream closes it
        with alone_in(run_dir, process):
            check_folder()  # again, for nobody else can fill it now
            create_run_dir(run_dir, config, describe(config))
            run.say(run.summary(source))
            try:
                report = run.follow(samples, publish, resume)
            except Exception:
                run.checkpoints.abandon()
                raise
            write_report(run_dir, report)
        return report


class _OnlineRun:
    """A run in progress: its model, its place in the stream and what it has measured."""

    def __init__(self, config: RunConfig, run_dir: Path, process: Process):
        self.config, self.run_dir, self.process = config, run_dir, process
        self.schema = Schema.load(config.data.dir)
        self.state = TrainState(config, self.schema, process, config.online.warmup_steps)
        self.checkpoints = Checkpoints(run_dir / CHECKPOINTS, config.checkpoint, process, self.say)
        self.quality = ProgressiveQuality(seconds(config.online.window, "online.window"))
        self.losses = LossWatch(process)
        self.step = self.saved_step = self.samples = self.newest = 0
        self.trained_seconds = 0.0
        self.windows: list[WindowQuality] = []
        self.entries: dict[str, int] = {}  # of the journal, at which each checkpoint begins
        self.journal_begin = 0

    def follow(self, source: SampleSource, publish: str | None, resume: bool) -> dict[str, Any]:
        """The run from its first sample, or from its newest checkpoint, to the end of the stream."""
        self.checkpoints.clean()
        position = self.resume() if resume else None
        with ExitStack() as opened:
            stream = opened.enter_context(closing(self.open_stream(source, position)))
            publication = None
            if publish:
                about = (self.config, self.schema, self.state, self.run_dir, self.say)
                publication = opened.enter_context(closing(OnlinePublication(publish, *about)))
            log = opened.enter_context(RunLog(self.run_dir, self.step))
            stop = opened.enter_context(stop_requests(self.process))
            self.train(stream, publication, log, stop)
            self.save(stream)
            self.checkpoints.finish()
        return self.report(stream)

    def train(
        self, stream: SampleStream, publication: OnlinePublication | None, log: RunLog, stop: StopRequest
    ) -> None:
        """Every batch of the stream; what is due otherwise is done after each, and while none comes."""
        saved = time.monotonic()
        while not (stream.ended or stop.wanted):
            arrived = stream.next_batch(_POLL)
            if arrived is not None:
                self.take_step(arrived.batch, log)
                if publication:
                    publication.mark(self.rows_of(arrived.batch))
                if self.step == 1 or self.step % self.config.train.log_every == 0:
                    self.write_metrics(log, stream)
            if publication and publication.is_due:
                self.publish(publication)
            if time.monotonic() - saved >= self.config.online.snapshot_seconds and self.step > self.saved_step:
                self.save(stream)
                saved = time.monotonic()
        if stop.wanted:
            self.save(stream)
            self.checkpoints.finish()
            raise Interrupted(f"stopped at step {self.step}; saved {self.checkpoints.latest}")
        if not self.quality.is_empty:
            self.tell(log, self.quality.close())
        self.write_metrics(log, stream)
        if publication:
            self.publish(publication, with_dense=True)

    def take_step(self, batch: Batch, log: RunLog) -> None:
        """Predicts a batch, then trains on it."""
        started = time.perf_counter()
        optimizer = self.state.dense_optimizer
        optimizer.prepare(self.step)
        optimizer.zero_grad()
        loss, (shown, logits, label) = self.state.model(batch.to(self.process.device))
        loss.backward()
        optimizer.step()
        self.losses.add(shown, self.step)
        self.step += 1
        self.samples += len(label)
        assert batch.time is not None
        self.newest = max(self.newest, int(batch.time.max()))
        for window in self.quality.add(logits, label, batch.time):
            self.tell(log, window)
        self.trained_seconds += time.perf_counter() - started

    def rows_of(self, batch: Batch) -> Any:
        """The rows that a batch was trained on, as the KeyedJaggedTensor that was looked up."""
        ids = row_ids_of(self.state.model)
        return ids.latest if ids else batch.sparse

    def publish(self, publication: OnlinePublication, *, with_dense: bool = False) -> None:
        """Publishes what is due; nothing of a model whose loss has not been finite."""
        self.checked_loss()
        publication.publish(self.step, self.newest or None, with_dense=with_dense)

    def open_stream(self, source: SampleSource, position: Position | None) -> SampleStream:
        online = self.config.online
        return SampleStream(
            source,
            SampleCodec.load(self.config.data.dir),
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
        """Takes over the newest checkpoint of this run and returns its place in the stream; None where it has none."""
        progress = self.state.resume(self.run_dir / CHECKPOINTS, self.checkpoints)
        if progress is None:
            return None
        self.step = self.saved_step = progress.step
        self.samples, self.trained_seconds = progress.samples, progress.seconds
        place = self.checkpoints.latest
        assert place is not None
        self.quality.load(place)
        position = Position.load(place)
        # Of damaged ones, which are passed over, the journal's entries are kept too.
        self.entries = {each.name: 0 for each in list_checkpoints(place.parent)} | {place.name: position.entry}
        self.newest = position.newest or 0
        self.say(f"going on from {place}: step {self.step}, {self.samples:,} samples")
        return position

    def save(self, stream: SampleStream) -> None:
        """Writes a checkpoint from which the stream can be gone on with."""
        if self.step == self.saved_step:
            return
        self.checked_loss()
        position, window, folder = stream.position, self.quality.freeze(), self.run_dir / CHECKPOINTS

        def beside(partial: Path) -> None:
            position.save(partial)
            window.save(partial)

        progress = Progress(
            self.step, samples=self.samples, seconds=self.trained_seconds, clip=self.state.clip_counts()
        )
        self.state.save(self.checkpoints, progress, beside)
        self.saved_step = self.step
        self.entries[checkpoint_name(self.step)] = position.entry
        oldest = min((self.entries[each.name] for each in list_checkpoints(folder)), default=0)
        if oldest > self.journal_begin:
            stream.trim(Position(entry=oldest))
            self.journal_begin = oldest

    def tell(self, log: RunLog, window: WindowQuality) -> None:
        log.write("window", self.step, **dataclasses.asdict(window))
        self.windows.append(window)
        self.say(
            f"{datetime.fromtimestamp(window.start, UTC):%Y-%m-%d %H:%M}  {window.samples:,} samples  progressive AUC"
            f" {window.auc:.4f}  logloss {window.logloss:.4f}  calibration {window.calibration:.3f}"
        )

    def write_metrics(self, log: RunLog, stream: SampleStream) -> None:
        rate = self.samples / self.trained_seconds if self.trained_seconds else nan
        log.write("train", self.step, loss=self.checked_loss(), samples_per_second=rate, samples=self.samples)
        log.write("stream", self.step, **stream.counters)
        if self.state.clip_watch:
            log.write("clip", self.step, **self.state.clip_watch.read())
        if self.state.id_tables:
            log.write("ids", self.step, **self.state.id_tables.counters())

    def checked_loss(self) -> float:
        """Mean loss since the last check; raises NonFiniteLoss where one was not finite."""
        mean, bad_step = self.losses.read()
        if bad_step is not None:
            self.checkpoints.finish()
            last = self.checkpoints.latest
            kept = f"the last good checkpoint is {last}" if last else "no checkpoint was saved before"
            raise NonFiniteLoss(
                f"the loss was not finite at step {bad_step + 1}; {kept}. Look for values that are not finite in the"
                " samples, lower optimizer.dense_lr or optimizer.embedding_lr, or clip with clip.rule"
            )
        return mean

    def report(self, stream: SampleStream) -> dict[str, Any]:
        return {
            "samples": self.samples,
            "steps": self.step,
            "samples_per_second": self.samples / self.trained_seconds if self.trained_seconds else nan,
            "windows": [dataclasses.asdict(each) for each in self.windows],
            "stream": stream.counters,
            "id_tables": self.state.id_tables.counters() if self.state.id_tables else None,
            "clip_statistics": self.state.clip_watch.total() if self.state.clip_watch else None,
            "seed": self.config.train.seed,
            **describe(self.config),
            **self.state.environment,
        }

    def summary(self, source: str) -> str:
        derived = derived_hyperparameters(self.config)
        return (
            f"{self.config.model.name} on {self.schema.name}, following {source}\n"
            f"batch {self.config.train.batch_size}, scaling {self.config.optimizer.scaling}, clip"
            f" {self.config.clip.rule}: embedding lr {derived.embedding_lr:g}, dense lr {derived.dense_lr:g},"
            f" l2 {derived.l2:g}"
        )

    def say(self, text: str) -> None:
        tqdm.write(text, file=sys.stderr)
