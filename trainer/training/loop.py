"""Training: the story of a run, from a configuration and a prepared data set to a report."""

import dataclasses
import sys
import time
from math import ceil, isfinite, nan
from pathlib import Path
from typing import Any

from tqdm import tqdm

from cowrec.trainer.config.run import RunConfig
from cowrec.trainer.runs.checkpoint import Checkpoints
from cowrec.trainer.runs.checkpoint_folder import Progress
from cowrec.trainer.runs.run_dir import (
    CHECKPOINTS,
    RunLog,
    alone_in,
    create_run_dir,
    require_own,
    require_unused,
    write_report,
)
from cowrec.trainer.runtime.errors import Interrupted, NonFiniteLoss
from cowrec.trainer.runtime.heartbeat import Heartbeat
from cowrec.trainer.runtime.processes import Process, on_first, process_group
from cowrec.trainer.runtime.stopping import LossWatch, StopRequest, stop_requests
from cowrec.trainer.sharded_model.build import derived_hyperparameters, describe
from cowrec.trainer.sharded_model.report import describe_sharding, save_sharding, sharding_table
from cowrec.trainer.sharded_model.tables import table_specs

from .dataloading import even_slices, training_readers
from .evaluation import evaluate
from .pipeline import pipeline_of
from .state import TrainState
from .warm_start import warm_start


def train(config: RunConfig, data_dir: Path, run_dir: Path, *, resume: bool = False) -> dict[str, Any]:
    """Trains a model, evaluating and saving after every epoch; returns the report that ``run_dir`` then holds.

    The report's ``samples_per_second`` and ``train_seconds`` are of the training steps alone, without evaluations and
    checkpoints, and without the run's very first step, in which kernels are compiled or loaded; ``wall_seconds`` is all
    of it, from the joining of the processes on.

    Args:
        config: of the run.
        data_dir: prepared data set.
        run_dir: folder of the run, new or empty, unless it is resumed.
        resume: go on from the newest checkpoint of the run in that folder; start one where there is none. On as many
            processes the weights are then those of a run that was never interrupted, to the last bit.

    Raises:
        ValueError: a setting or data set that does not work; nothing has been trained then.
        NonFiniteLoss: training went astray; the checkpoints of earlier epochs are kept.
        ProcessLost: another process hangs or has ended.
        Interrupted: it was asked to stop, and has saved a checkpoint.
    """
    started = time.perf_counter()
    config = dataclasses.replace(config, data=dataclasses.replace(config.data, dir=str(data_dir)))
    with process_group(config.train.device, config.train.timeout_seconds) as process:

        def check_folder() -> None:
            require_own(run_dir, config) if resume else require_unused(run_dir)

        on_first(process, check_folder)
        run = _Run(config, run_dir, process)
        with alone_in(run_dir, process):
            on_first(process, check_folder)  # again, for nobody else can fill it now
            on_first(process, lambda: create_run_dir(run_dir, config, describe(config)))
            on_first(process, lambda: save_sharding(run_dir, run.sharding))
            try:
                with run.heartbeat.names_the_lost():
                    report = run.train(resume)
            except Exception:
                run.checkpoints.abandon()
                raise
            report |= {"wall_seconds": time.perf_counter() - started}
            on_first(process, lambda: write_report(run_dir, report))
        return report


class _Run:
    """A run in progress: its data, its model, its optimizers and what it has measured."""

    def __init__(self, config: RunConfig, run_dir: Path, process: Process):
        self.config, self.run_dir, self.process = config, run_dir, process
        self.train_reader, self.test_reader = training_readers(config, Path(config.data.dir), process)
        self.schema = self.train_reader.schema
        warmup = ceil(config.optimizer.warmup_epochs * len(self.train_reader))
        self.state = TrainState(config, self.schema, process, warmup)
        self.model, self.dense_optimizer = self.state.model, self.state.dense_optimizer
        self.clip_watch = self.state.clip_watch
        self.sharding = describe_sharding(self.model)
        self.pipeline = pipeline_of(self.model, self.dense_optimizer, process)
        self.checkpoints = Checkpoints(run_dir / CHECKPOINTS, config.checkpoint, process, self.say)
        self.heartbeat = Heartbeat(process)
        self.step = self.epoch = self.epoch_step = 0
        self.speed = _Speed()
        self.epochs: list[dict[str, Any]] = []

    def train(self, resume: bool) -> dict[str, Any]:
        """The run from its first step, or from its newest checkpoint, to its report."""
        self.say(self.summary())
        self.checkpoints.clean()
        if not (resume and self.resume()) and self.config.train.warm_start:
            warm_start(self.config, self.run_dir, self.schema, self.model, self.process)
        with RunLog(self.run_dir if self.process.is_first else None, self.step) as log:
            with stop_requests(self.process) as stop:
                while self.epoch < self.config.train.epochs:
                    self.train_epoch(log, stop)
                    self.evaluate(log)
                    self.save()
            self.checkpoints.finish()
        return self.report()

    def resume(self) -> bool:
        """Takes over the newest checkpoint of this run; False where it has none."""
        progress = self.state.resume(self.run_dir / CHECKPOINTS, self.checkpoints)
        if progress is None:
            return False
        self.step, self.epoch, self.epoch_step = progress.step, progress.epoch, progress.epoch_step
        self.epochs = list(progress.epochs)
        self.speed = _Speed(progress.samples, progress.seconds)
        self.say(
            f"going on from {self.checkpoints.latest}: step {self.step},"
            f" {self.epoch} of {self.config.train.epochs} epochs done"
        )
        return True

    def train_epoch(self, log: RunLog, stop: StopRequest) -> None:
        """The rest of an epoch. No step waits for the device but those after which metrics are written."""
        steps, size, epoch = len(self.train_reader), self.config.train.batch_size, self.epoch
        batches = even_slices(self.train_reader.epoch(epoch, self.epoch_step), self.process.world_size)
        self.pipeline.reset()
        watch = LossWatch(self.process)
        self.speed.start(self.epoch_step * size)
        with self._bar() as bar:
            while self.epoch_step < steps:
                lr = self.dense_optimizer.prepare(self.step)
                loss, _, _ = self.pipeline.progress(batches)
                watch.add(loss, self.step)
                self.step += 1
                self.epoch_step += 1
                self.heartbeat.step = self.step
                stopping, saving = stop.agreed(), self._saves_now(steps)
                if not (stopping or saving or self._logs_now(steps)):
                    continue
                mean_loss = self._checked_loss(watch)
                done = min(self.epoch_step * size, self.train_reader.num_rows)
                rate = self.speed.measure(done, counts=self.step > 1)
                log.write("train", self.step, epoch=epoch, loss=mean_loss, samples_per_second=rate, dense_lr=lr)
                if self.clip_watch:
                    log.write("clip", self.step, epoch=epoch, **self.clip_watch.read())
                if ids := self.state.id_tables:
                    log.write("ids", self.step, epoch=epoch, **ids.counters())
                bar.set_postfix(loss=f"{mean_loss:.4f}", refresh=False)
                bar.update(done - bar.n)
                if stopping or saving:
                    self.save()
                    self.speed.start(done)
                if stopping:
                    self.checkpoints.finish()
                    raise Interrupted(f"stopped at step {self.step}; saved {self.checkpoints.latest}")
        self.epoch, self.epoch_step = epoch + 1, 0

    def _logs_now(self, steps: int) -> bool:
        return self.step == 1 or self.step % self.config.train.log_every == 0 or self.epoch_step == steps

    def _saves_now(self, steps: int) -> bool:
        every = self.config.checkpoint.every_steps
        return every > 0 and self.step % every == 0 and self.epoch_step < steps

    def evaluate(self, log: RunLog) -> None:
        """Measures the test split after an epoch."""
        quality = evaluate(self.model, self.pipeline, self.test_reader)
        if not isfinite(quality.logloss):
            raise self._non_finite(f"on the test split after step {self.step}")
        log.write("eval", self.step, epoch=self.epoch - 1, **dataclasses.asdict(quality))
        self.epochs.append({"epoch": self.epoch, "step": self.step, **dataclasses.asdict(quality)})
        self.say(
            f"epoch {self.epoch}/{self.config.train.epochs}  step {self.step}  "
            f"test AUC {quality.auc:.4f}  logloss {quality.logloss:.4f}"
        )

    def save(self) -> None:
        speed = (self.speed.samples, self.speed.seconds)
        place = (self.step, self.epoch, self.epoch_step)
        progress = Progress(*place, list(self.epochs), *speed, self.state.clip_counts())
        self.state.save(self.checkpoints, progress)

    def report(self) -> dict[str, Any]:
        last = self.epochs[-1]
        return {
            "auc": last["auc"],
            "logloss": last["logloss"],
            "samples_per_second": self.speed.samples / self.speed.seconds if self.speed.seconds else nan,
            "train_seconds": self.speed.seconds,
            "steps": self.step,
            "clip_statistics": self.clip_watch.total() if self.clip_watch else None,
            "best_possible": dict(self.schema.best) if self.schema.best else None,
            "seed": self.config.train.seed,
            "world_size": self.process.world_size,
            **describe(self.config),
            "epochs": self.epochs,
            **self.state.environment,
        }

    def summary(self) -> str:
        derived = derived_hyperparameters(self.config)
        table_rows = sum(spec.num_embeddings for spec in table_specs(self.schema, self.config.id_table))
        return (
            f"{self.config.model.name} on {self.schema.name}: {self.train_reader.num_rows:,} training rows, "
            f"{len(self.schema.sparse)} fields, {table_rows:,} table rows\n"
            f"batch {self.config.train.batch_size} ({len(self.train_reader)} steps an epoch), "
            f"scaling {self.config.optimizer.scaling}, clip {self.config.clip.rule}: "
            f"embedding lr {derived.embedding_lr:g}, dense lr {derived.dense_lr:g}, l2 {derived.l2:g}"
            + (f"\n{sharding_table(self.sharding)}" if self.process.world_size > 1 else "")
        )

    def say(self, text: str) -> None:
        if self.process.is_first:
            tqdm.write(text, file=sys.stderr)

    def _bar(self) -> tqdm:
        return tqdm(
            total=self.train_reader.num_rows,
            initial=min(self.epoch_step * self.config.train.batch_size, self.train_reader.num_rows),
            desc=f"epoch {self.epoch + 1}",
            unit=" samples",
            unit_scale=True,
            leave=False,
            disable=not (self.process.is_first and sys.stderr.isatty()),
        )

    def _checked_loss(self, watch: LossWatch) -> float:
        """Mean loss over all ranks since the last check; raises on all of them where one had a loss not finite."""
        mean_loss, bad_step = watch.read()
        if bad_step is not None:
            raise self._non_finite(f"at step {bad_step + 1}")
        return mean_loss

    def _non_finite(self, place: str) -> NonFiniteLoss:
        self.checkpoints.finish()
        derived, last = derived_hyperparameters(self.config), self.checkpoints.latest
        kept = f"the last good checkpoint is {last}" if last else "no checkpoint was saved before"
        return NonFiniteLoss(
            f"the loss was not finite {place} (epoch {len(self.epochs) + 1}); {kept}. Look for values that are not"
            f" finite in the data, lower optimizer.dense_lr (now {derived.dense_lr:g}) or optimizer.embedding_lr (now"
            f" {derived.embedding_lr:g}), or clip with clip.rule"
        )


class _Speed:
    """Samples and seconds of training steps, added up over stretches of an epoch."""

    def __init__(self, samples: int = 0, seconds: float = 0.0) -> None:
        self.samples, self.seconds = samples, seconds
        self.start(0)

    def start(self, done: int) -> None:
        """The clock runs from now on; ``done`` samples of the epoch's are done already."""
        self._done, self._since = done, time.perf_counter()

    def measure(self, done: int, *, counts: bool) -> float:
        """Samples per second since the last call, where ``done`` of the epoch's are done; adds them up if it counts."""
        now = time.perf_counter()
        samples, seconds = done - self._done, now - self._since
        self._done, self._since = done, now
        if counts:
            self.samples += samples
            self.seconds += seconds
        return samples / seconds
