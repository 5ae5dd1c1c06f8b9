"""Training: the story of a run, from a configuration and a prepared data set to a report."""

import dataclasses
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from math import ceil
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torchrec.distributed import TrainPipelineSparseDist
from tqdm import tqdm

from cowrec.data_pipeline import Reader, Schema, available_bytes, resident_bytes
from cowrec.sparse_opt import Hyperparameters, scale_hyperparameters

from .assembly import build_sharded, dense_parameters, describe, embedding_optimizer
from .checkpoint import run_state, save_checkpoint
from .config import RunConfig
from .evaluation import Quality, evaluate
from .processes import Process, process_group
from .run_dir import CHECKPOINTS, RunLog, create_run_dir, environment, write_report
from .schedule import DenseAdam


class NonFiniteLoss(RuntimeError):
    """The loss became NaN or infinite; the message says where and what is left."""


class Interrupted(KeyboardInterrupt):
    """Ctrl-C or SIGTERM, after a checkpoint was saved; the message names it."""


def train(config: RunConfig, data_dir: Path, run_dir: Path) -> dict[str, Any]:
    """Trains a model, evaluating and saving after every epoch; returns the report that ``run_dir`` then holds.

    Raises:
        ValueError: a setting or data set that does not work; nothing has been trained then.
        NonFiniteLoss: training went astray.
        Interrupted: it was asked to stop.
    """
    with process_group(config.train.device) as process:
        run = _Run(config, data_dir, run_dir, process)
        started = time.time()
        with RunLog(run_dir if process.is_first else None) as log, _stop_requests() as stop:
            for epoch in range(config.train.epochs):
                run.train_epoch(epoch, log, stop)
                run.evaluate(epoch, log)
                run.save(epoch + 1)
        report = run.report(time.time() - started)
        if process.is_first:
            write_report(run_dir, report)
        return report


class _Run:
    """A run in progress: its data, its model, its optimizers and what it has measured."""

    def __init__(self, config: RunConfig, data_dir: Path, run_dir: Path, process: Process):
        self.config, self.run_dir, self.process = config, run_dir, process
        self.schema = Schema.load(data_dir)
        self.train_reader = self._reader(data_dir, "train")
        self.test_reader = self._reader(data_dir, "test")
        self.hyperparameters = derived_hyperparameters(config)
        self.model = build_sharded(config, self.schema, process, self.hyperparameters)
        self.embedding_optimizer = embedding_optimizer(config, self.schema, self.model, self.hyperparameters)
        warmup_steps = ceil(config.optimizer.warmup_epochs * len(self.train_reader))
        self.dense_optimizer = DenseAdam(
            dense_parameters(self.model), config.optimizer, self.hyperparameters.dense_lr, warmup_steps
        )
        self.pipeline = TrainPipelineSparseDist(self.model, self.dense_optimizer, process.device)
        self.step = 0
        self.train_seconds = 0.0
        self.samples = 0
        self.epochs: list[dict[str, Any]] = []
        self.last_checkpoint: Path | None = None
        if process.is_first:
            create_run_dir(run_dir, config, data_dir)
            tqdm.write(_summary(config, self), file=sys.stderr)
        dist.barrier()

    def train_epoch(self, epoch: int, log: RunLog, stop: "_StopRequest") -> None:
        """One pass over the training set. The loop body never waits for the device; every ``log_every`` steps do."""
        batches, every = self.train_reader.epoch(epoch), self.config.train.log_every
        watch = _LossWatch(self.process.device)
        started = time.perf_counter()
        with self._progress(epoch) as bar:
            for index in range(len(self.train_reader)):
                lr = self.dense_optimizer.prepare(self.step)
                loss, _, _ = self.pipeline.progress(batches)
                watch.add(loss, self.step)
                self.step += 1
                if self.step % every and index + 1 < len(self.train_reader):
                    if self.process.world_size == 1 and stop.requested:
                        self._stop(epoch, watch)
                    continue
                mean_loss = self._check(watch, epoch)
                done = min((index + 1) * self.config.train.batch_size, self.train_reader.num_rows)
                rate = done / (time.perf_counter() - started)
                log.write("train", self.step, epoch=epoch, loss=mean_loss, samples_per_second=rate, dense_lr=lr)
                bar.set_postfix(loss=f"{mean_loss:.4f}", refresh=False)
                bar.update(done - bar.n)
                if self._anyone(stop.requested):
                    self._stop(epoch, watch)
        self.train_seconds += time.perf_counter() - started
        self.samples += done

    def evaluate(self, epoch: int, log: RunLog) -> Quality:
        quality = evaluate(self.pipeline, self.test_reader)
        log.write("eval", self.step, epoch=epoch, **dataclasses.asdict(quality))
        self.epochs.append({"epoch": epoch + 1, "step": self.step, **dataclasses.asdict(quality)})
        if self.process.is_first:
            tqdm.write(
                f"epoch {epoch + 1}/{self.config.train.epochs}  step {self.step}  "
                f"test AUC {quality.auc:.4f}  logloss {quality.logloss:.4f}",
                file=sys.stderr,
            )
        return quality

    def save(self, epochs_done: int) -> None:
        state = run_state(
            self.model, self.dense_optimizer, self.embedding_optimizer, step=self.step, epoch=epochs_done
        )
        keep = self.config.train.keep_checkpoints
        self.last_checkpoint = save_checkpoint(self.run_dir / CHECKPOINTS, self.step, state, keep=keep)

    def report(self, wall_seconds: float) -> dict[str, Any]:
        last = self.epochs[-1]
        return {
            "auc": last["auc"],
            "logloss": last["logloss"],
            "samples_per_second": self.samples / self.train_seconds,
            "train_seconds": self.train_seconds,
            "wall_seconds": wall_seconds,
            "steps": self.step,
            "best_possible": dict(self.schema.best) if self.schema.best else None,
            "seed": self.config.train.seed,
            "world_size": self.process.world_size,
            **describe(self.hyperparameters, self.config),
            "model": self.config.model.name,
            "epochs": self.epochs,
            **environment(self.process.device),
        }

    def _reader(self, data_dir: Path, split: str) -> Reader:
        train = split == "train"
        return Reader(
            data_dir,
            split,
            batch_size=self.config.train.batch_size if train else self.config.train.eval_batch_size,
            rank=self.process.rank,
            world_size=self.process.world_size,
            shuffle=train,
            seed=self.config.train.seed,
            drop_last=train and self.config.train.drop_last,
            device=self.process.device,
            resident=train and self._keeps_resident(),
            window_rows=self.config.data.window_rows,
        )

    def _keeps_resident(self) -> bool:
        if self.config.data.resident != "auto":
            return self.config.data.resident == "yes"
        free = available_bytes(self.process.device)
        copies = self.process.local_world_size if self.process.device.type == "cpu" else 1
        return free is not None and copies * resident_bytes(self.schema) <= free // 2

    def _progress(self, epoch: int) -> tqdm:
        return tqdm(
            total=self.train_reader.num_rows,
            desc=f"epoch {epoch + 1}",
            unit=" samples",
            unit_scale=True,
            leave=False,
            disable=not (self.process.is_first and sys.stderr.isatty()),
        )

    def _check(self, watch: "_LossWatch", epoch: int) -> float:
        """Mean loss over all ranks since the last check; raises on all of them where one had a loss that is not finite."""
        mean_loss, bad_step = watch.read(self.process.world_size)
        if bad_step is None:
            return mean_loss
        kept = f"the last good checkpoint is {self.last_checkpoint}" if self.last_checkpoint else "no checkpoint was saved"
        raise NonFiniteLoss(
            f"the loss was not finite at step {bad_step} (epoch {epoch + 1}), after {self.samples} samples of earlier"
            f" epochs; {kept}. Lower optimizer.dense_lr (now {self.hyperparameters.dense_lr:g}) or"
            f" optimizer.embedding_lr (now {self.hyperparameters.embedding_lr:g}), or clip with clip.rule"
        )

    def _anyone(self, flag: bool) -> bool:
        if self.process.world_size == 1:
            return flag
        flags = torch.tensor(float(flag), device=self.process.device)
        dist.all_reduce(flags, dist.ReduceOp.MAX)
        return bool(flags.item())

    def _stop(self, epoch: int, watch: "_LossWatch") -> None:
        self._check(watch, epoch)
        self.save(epoch)
        raise Interrupted(f"stopped at step {self.step}; saved {self.last_checkpoint}")


def derived_hyperparameters(config: RunConfig) -> Hyperparameters:
    """The run's learning rates and L2: the base values, scaled by the rule to its batch size."""
    optimizer = config.optimizer
    base = Hyperparameters(optimizer.embedding_lr, optimizer.dense_lr, optimizer.l2)
    return scale_hyperparameters(
        base,
        base_batch_size=optimizer.base_batch_size,
        batch_size=config.train.batch_size,
        rule=optimizer.scaling,
    )


class _LossWatch:
    """Sums losses and remembers the first that was not finite, on the device, so that no step waits for it."""

    def __init__(self, device: torch.device):
        self._sum = torch.zeros((), dtype=torch.float64, device=device)
        self._bad = torch.full((), float("inf"), dtype=torch.float64, device=device)
        self._count = 0

    def add(self, loss: Tensor, step: int) -> None:
        self._sum += loss
        self._bad = torch.where(torch.isfinite(loss), self._bad, self._bad.clamp_max(step))
        self._count += 1

    def read(self, world_size: int) -> tuple[float, int | None]:
        """(mean loss, first step with a bad one) over all ranks; starts a new mean. Waits for the device."""
        if world_size > 1:
            dist.all_reduce(self._sum)
            dist.all_reduce(self._bad, dist.ReduceOp.MIN)
        total, bad = torch.stack([self._sum, self._bad]).tolist()
        mean = total / max(self._count, 1) / world_size
        self._sum.zero_()
        self._count = 0
        return mean, None if bad == float("inf") else int(bad)


class _StopRequest:
    requested = False


@contextmanager
def _stop_requests() -> Iterator[_StopRequest]:
    """Turns the first Ctrl-C or SIGTERM into a request; a second one interrupts at once."""
    stop = _StopRequest()

    def request(number: int, _: FrameType | None) -> None:
        if stop.requested:
            raise KeyboardInterrupt
        stop.requested = True

    earlier = {number: signal.signal(number, request) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for number, handler in earlier.items():
            signal.signal(number, handler)


def _summary(config: RunConfig, run: _Run) -> str:
    derived = run.hyperparameters
    return (
        f"{config.model.name} on {run.schema.name}: {run.train_reader.num_rows:,} training rows, "
        f"{len(run.schema.sparse)} fields, {sum(field.num_embeddings for field in run.schema.sparse):,} table rows\n"
        f"batch {config.train.batch_size} ({len(run.train_reader)} steps an epoch), scaling {config.optimizer.scaling}, "
        f"clip {config.clip.rule}: embedding lr {derived.embedding_lr:g}, dense lr {derived.dense_lr:g}, "
        f"l2 {derived.l2:g}"
    )
