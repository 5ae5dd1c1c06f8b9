"""Training: the story of a run, from a configuration and a prepared data set to a report."""

import dataclasses
import sys
import time
from math import ceil, isfinite, nan
from pathlib import Path
from typing import Any

from torchrec.distributed import TrainPipelineSparseDist
from tqdm import tqdm

from cowrec.sparse_opt import EmbeddingAdam

from .assembly import build_sharded, dense_parameters, derived_hyperparameters, describe, embedding_optimizer
from .checkpoint import run_state, save_checkpoint
from .clip_statistics import ClipWatch
from .config import RunConfig
from .evaluation import evaluate
from .processes import Process, on_first, process_group
from .readers import even_slices, training_readers
from .run_dir import CHECKPOINTS, RunLog, create_run_dir, environment, require_unused, write_report
from .schedule import DenseAdam
from .stopping import Interrupted, LossWatch, NonFiniteLoss, StopRequest, stop_requests


def train(config: RunConfig, data_dir: Path, run_dir: Path) -> dict[str, Any]:
    """Trains a model, evaluating and saving after every epoch; returns the report that ``run_dir`` then holds.

    The report's ``samples_per_second`` and ``train_seconds`` are of the training steps alone, without evaluations and
    checkpoints, and without the run's very first step, in which kernels are compiled or loaded; ``wall_seconds`` is all
    of it, from the joining of the processes on.

    Raises:
        ValueError: a setting or data set that does not work; nothing has been trained then.
        NonFiniteLoss: training went astray; the checkpoints of earlier epochs are kept.
        Interrupted: it was asked to stop, and has saved a checkpoint.
    """
    started = time.perf_counter()
    config = dataclasses.replace(config, data=dataclasses.replace(config.data, dir=str(data_dir)))
    with process_group(config.train.device) as process:
        on_first(process, lambda: require_unused(run_dir))
        run = _Run(config, run_dir, process)
        on_first(process, lambda: create_run_dir(run_dir, config, describe(config)))
        run.say(run.summary())
        with RunLog(run_dir if process.is_first else None) as log, stop_requests(process) as stop:
            for epoch in range(config.train.epochs):
                run.train_epoch(epoch, log, stop)
                run.evaluate(epoch, log)
                run.save(epoch + 1)
        report = run.report() | {"wall_seconds": time.perf_counter() - started}
        on_first(process, lambda: write_report(run_dir, report))
        return report


class _Run:
    """A run in progress: its data, its model, its optimizers and what it has measured."""

    def __init__(self, config: RunConfig, run_dir: Path, process: Process):
        self.config, self.run_dir, self.process = config, run_dir, process
        self.train_reader, self.test_reader = training_readers(config, Path(config.data.dir), process)
        self.schema = self.train_reader.schema
        self.model = build_sharded(config, self.schema, process)
        self.embedding_optimizer = embedding_optimizer(config, self.schema, self.model)
        self.clip_watch: ClipWatch | None = None
        if self.embedding_optimizer is not None and config.clip.rule != "none":
            fields = [field.name for field in self.schema.sparse]
            self.clip_watch = ClipWatch(self.embedding_optimizer.stats, fields, process)
        self.dense_optimizer = DenseAdam(
            dense_parameters(self.model),
            config.optimizer,
            derived_hyperparameters(config).dense_lr,
            warmup_steps=ceil(config.optimizer.warmup_epochs * len(self.train_reader)),
        )
        self.pipeline = TrainPipelineSparseDist(self.model, self.dense_optimizer, process.device)
        self.step = 0
        self.speed = _Speed()
        self.epochs: list[dict[str, Any]] = []
        self.last_checkpoint: Path | None = None

    def train_epoch(self, epoch: int, log: RunLog, stop: StopRequest) -> None:
        """One pass over the training set. No step waits for the device but those after which metrics are written."""
        steps, every, size = len(self.train_reader), self.config.train.log_every, self.config.train.batch_size
        batches = even_slices(self.train_reader.epoch(epoch), self.process.world_size)
        watch = LossWatch(self.process)
        self.speed.start()
        with self._bar(epoch) as bar:
            for index in range(1, steps + 1):
                lr = self.dense_optimizer.prepare(self.step)
                loss, _, _ = self.pipeline.progress(batches)
                watch.add(loss, self.step)
                self.step += 1
                stopping = stop.agreed()
                if not (stopping or self.step == 1 or self.step % every == 0 or index == steps):
                    continue
                mean_loss = self._checked_loss(watch, epoch)
                done = min(index * size, self.train_reader.num_rows)
                rate = self.speed.measure(done, counts=self.step > 1)
                log.write("train", self.step, epoch=epoch, loss=mean_loss, samples_per_second=rate, dense_lr=lr)
                if self.clip_watch:
                    log.write("clip", self.step, epoch=epoch, **self.clip_watch.read())
                bar.set_postfix(loss=f"{mean_loss:.4f}", refresh=False)
                bar.update(done - bar.n)
                if stopping:
                    self.save(epoch)
                    raise Interrupted(f"stopped at step {self.step}; saved {self.last_checkpoint}")

    def evaluate(self, epoch: int, log: RunLog) -> None:
        """Measures the test split after an epoch (from 0)."""
        quality = evaluate(self.model, self.pipeline, self.test_reader)
        if not isfinite(quality.logloss):
            raise self._non_finite(f"on the test split after step {self.step}", epoch)
        log.write("eval", self.step, epoch=epoch, **dataclasses.asdict(quality))
        self.epochs.append({"epoch": epoch + 1, "step": self.step, **dataclasses.asdict(quality)})
        self.say(
            f"epoch {epoch + 1}/{self.config.train.epochs}  step {self.step}  "
            f"test AUC {quality.auc:.4f}  logloss {quality.logloss:.4f}"
        )

    def save(self, epochs_done: int) -> None:
        adam = self.embedding_optimizer if isinstance(self.embedding_optimizer, EmbeddingAdam) else None
        state = run_state(self.model, self.dense_optimizer, adam, step=self.step, epoch=epochs_done)
        keep = self.config.train.keep_checkpoints
        self.last_checkpoint = save_checkpoint(self.run_dir / CHECKPOINTS, self.step, state, keep=keep)

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
            **environment(self.process.device),
        }

    def summary(self) -> str:
        derived = derived_hyperparameters(self.config)
        table_rows = sum(field.num_embeddings for field in self.schema.sparse)
        return (
            f"{self.config.model.name} on {self.schema.name}: {self.train_reader.num_rows:,} training rows, "
            f"{len(self.schema.sparse)} fields, {table_rows:,} table rows\n"
            f"batch {self.config.train.batch_size} ({len(self.train_reader)} steps an epoch), "
            f"scaling {self.config.optimizer.scaling}, clip {self.config.clip.rule}: "
            f"embedding lr {derived.embedding_lr:g}, dense lr {derived.dense_lr:g}, l2 {derived.l2:g}"
        )

    def say(self, text: str) -> None:
        if self.process.is_first:
            tqdm.write(text, file=sys.stderr)

    def _bar(self, epoch: int) -> tqdm:
        return tqdm(
            total=self.train_reader.num_rows,
            desc=f"epoch {epoch + 1}",
            unit=" samples",
            unit_scale=True,
            leave=False,
            disable=not (self.process.is_first and sys.stderr.isatty()),
        )

    def _checked_loss(self, watch: LossWatch, epoch: int) -> float:
        """Mean loss over all ranks since the last check; raises on all of them where one had a loss not finite."""
        mean_loss, bad_step = watch.read()
        if bad_step is not None:
            raise self._non_finite(f"at step {bad_step + 1}", epoch)
        return mean_loss

    def _non_finite(self, place: str, epoch: int) -> NonFiniteLoss:
        derived, last = derived_hyperparameters(self.config), self.last_checkpoint
        kept = f"the last good checkpoint is {last}" if last else "no checkpoint was saved before"
        return NonFiniteLoss(
            f"the loss was not finite {place} (epoch {epoch + 1}); {kept}. Look for values that are not finite in the"
            f" data, lower optimizer.dense_lr (now {derived.dense_lr:g}) or optimizer.embedding_lr (now"
            f" {derived.embedding_lr:g}), or clip with clip.rule"
        )


class _Speed:
    """Samples and seconds of training steps, added up over stretches of an epoch."""

    def __init__(self) -> None:
        self.samples = 0
        self.seconds = 0.0
        self.start()

    def start(self) -> None:
        """An epoch's first step begins now."""
        self._done, self._since = 0, time.perf_counter()

    def measure(self, done: int, *, counts: bool) -> float:
        """Samples per second since the last call, where ``done`` of the epoch's are done; adds them up if it counts."""
        now = time.perf_counter()
        samples, seconds = done - self._done, now - self._since
        self._done, self._since = done, now
        if counts:
            self.samples += samples
            self.seconds += seconds
        return samples / seconds
