"""Online training: samples in the order of their time, each predicted before it is trained on, from a stream.

The stream's position is part of every checkpoint, and the stream gives the same batches again from there, so that a run
that was killed becomes the run that was not.
"""

import dataclasses
import sys
import time
from contextlib import closing
from math import isfinite
from pathlib import Path
from typing import Any

from tqdm import tqdm

from cowrec.data_pipeline import Schema, StreamBatch

from .assembly import derived_hyperparameters, describe, row_ids_of
from .checkpoint import Checkpoints
from .checkpoint_folder import Progress
from .config import RunConfig
from .heartbeat import Heartbeat
from .id_config import seconds
from .learner import Learner
from .online_publication import Publication
from .online_stream import POSITION, open_stream
from .processes import Process, launched_world_size, on_first, process_group
from .progressive import ProgressiveQuality, WindowQuality
from .run_dir import (
    CHECKPOINTS,
    RunLog,
    alone_in,
    create_run_dir,
    require_own,
    require_unused,
    write_report,
)
from .stopping import Interrupted, LossWatch, NonFiniteLoss, StopRequest, stop_requests


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
        with alone_in(run_dir, process):
            on_first(process, check_folder)  # again, for nobody else can fill it now
            create_run_dir(run_dir, config, describe(config))
            try:
                report = run.follow(source, publish, resume)
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
        self.learner = Learner(config, self.schema, process, config.online.warmup_steps)
        self.checkpoints = Checkpoints(run_dir / CHECKPOINTS, config.checkpoint, process, self.say)
        self.quality = ProgressiveQuality(seconds(config.online.window, "online.window"))
        self.losses = LossWatch(process)
        self.step = self.samples = 0
        self.newest = 0
        self.windows: list[WindowQuality] = []
        self.seconds = 0.0

    def follow(self, source: str, publish: str | None, resume: bool) -> dict[str, Any]:
        """The run from its first sample, or from its newest checkpoint, to the end of the stream."""
        self.say(self.summary(source))
        self.checkpoints.clean()
        place = self.resume() if resume else None
        with ExitStack() as opened:
            stream = opened.enter_context(closing(open_stream(source, self.config, self.run_dir, place)))
            publication = None
            if publish:
                publication = opened.enter_context(closing(self.publication(publish)))
            log = opened.enter_context(RunLog(self.run_dir, self.step))
            stop = opened.enter_context(stop_requests(self.process))
            self.train(stream, publication, log, stop)
            if not self.quality.is_empty:
                self.tell(log, self.quality.close())
            self.save(stream.position)
            self.checkpoints.finish()
        return self.report(stream.counters)

    def train(
        self, stream: OnlineStream, publication: OnlinePublication | None, log: RunLog, stop: StopRequest
    ) -> None:
        """Every batch of the stream, or nothing for a moment: then what is due is done."""
        saved = time.monotonic()
        for batch in stream:
            if batch is not None:
                self.take_step(batch, log)
                if publication:
                    publication.mark(self.rows_of(batch))
                if self._logs_now():
                    self.write_metrics(log, stream.counters)
            if publication:
                publication.publish_if_due(self.step, self.newest)
            late = time.monotonic() - saved >= self.config.online.snapshot_seconds
            if (late or stop.wanted) and self.step > self.saved_step:
                self.save(stream.position)
                saved = time.monotonic()
            if stop.wanted:
                self.checkpoints.finish()
                raise Interrupted(f"stopped at step {self.step}; saved {self.checkpoints.latest}")
        if publication:
            self.check_losses()
            publication.publish_if_due(self.step, self.newest, now=True)

    def take_step(self, batch: Batch, log: RunLog) -> None:
        """Predicts a batch, then trains on it."""
        started = time.perf_counter()
        self.dense_optimizer.prepare(self.step)
        self.dense_optimizer.zero_grad()
        batch = batch.to(self.process.device)
        loss, (shown, logits, label) = self.learner.model(batch)
        loss.backward()
        self.dense_optimizer.step()
        self.losses.add(shown, self.step)
        self.step += 1
        self.samples += len(label)
        assert batch.time is not None
        self.newest = max(self.newest, int(batch.time.max()))
        for window in self.quality.add(logits, label, batch.time):
            self.tell(log, window)
        self.seconds += time.perf_counter() - started

    def rows_of(self, batch: Batch) -> KeyedJaggedTensor:
        """The rows that a batch was trained on."""
        ids = row_ids_of(self.learner.model)
        return ids.latest if ids else batch.sparse

    def publish_if_due(self, publication: OnlinePublication, *, now: bool = False) -> None:
        """Publishes what is due; nothing of a model whose loss has not been finite."""
        if now or publication.is_due:
            self.check_losses()
            publication.publish(self.step, self.newest, everything_now=now)

    def resume(self) -> Path | None:
        """Takes over the newest checkpoint of this run, and returns it; None where it has none."""
        progress = self.learner.resume(self.run_dir / CHECKPOINTS, self.checkpoints)
        if progress is None:
            return None
        self.step, self.samples, self.seconds = progress.step, progress.samples, progress.seconds
        self.saved_step = self.step
        place = self.checkpoints.latest
        assert place is not None
        self.quality.load(place)
        self.say(f"going on from {place}: {self.samples:,} samples, step {self.step}")
        return place

    def save(self, position: Position) -> None:
        """Writes a checkpoint that the stream can be taken up at."""
        self.check_losses()
        window = self.quality.freeze()

        def beside(folder: Path) -> None:
            position.save(folder)
            window.save(folder)

        progress = Progress(self.step, samples=self.samples, seconds=self.seconds, clip=self.learner.clip_counts())
        self.learner.save(self.checkpoints, progress, beside)
        self.saved_step = self.step

    def tell(self, log: RunLog, window: WindowQuality) -> None:
        log.write("window", self.step, **dataclasses.asdict(window))
        self.windows.append(window)
        moment = datetime.fromtimestamp(window.start, UTC)
        self.say(
            f"{moment:%Y-%m-%d %H:%M}  {window.samples:,} samples  progressive AUC {window.auc:.4f}  "
            f"logloss {window.logloss:.4f}  calibration {window.calibration:.3f}"
        )

    def write_metrics(self, log: RunLog, stream: Mapping[str, int]) -> None:
        rate = self.samples / self.seconds if self.seconds else nan
        log.write("train", self.step, loss=self.check_losses(), samples_per_second=rate, samples=self.samples)
        log.write("stream", self.step, **stream)
        if self.learner.clip_watch:
            log.write("clip", self.step, **self.learner.clip_watch.read())
        ids = row_ids_of(self.learner.model)
        if ids and ids.tables:
            log.write("ids", self.step, **ids.tables.counters())

    def check_losses(self) -> float:
        """Mean loss since the last check; raises NonFiniteLoss where one was not finite."""
        if not self.losses.count:
            return nan
        mean, bad_step = self.losses.read()
        if bad_step is not None:
            last = self.checkpoints.latest
            raise NonFiniteLoss(
                f"the loss was not finite at step {bad_step + 1}; {f'the last good checkpoint is {last}' if last else 'no'
                ' checkpoint was saved before'}. Look for values that are not finite in the samples, lower"
                " optimizer.dense_lr or optimizer.embedding_lr, or clip with clip.rule"
            )
        return mean
