"""Training on a prepared data set, from the configuration of a run to its report."""

import dataclasses
import time
from collections.abc import Callable
from math import nan
from pathlib import Path
from typing import Any

from cowrec.data_pipeline import Schema
from cowrec.data_pipeline.remote import Place
from cowrec.trainer.config.run import RunConfig, load_config, with_defaults
from cowrec.trainer.runs.checkpoint_folder import Progress, best_epoch
from cowrec.trainer.runs.metrics_log import MetricsLog
from cowrec.trainer.runs.remote_run import RunPlace, local_data
from cowrec.trainer.runs.run_dir import CHECKPOINTS, CONFIG, write_report
from cowrec.trainer.runtime.console import ProgressDisplay, Speed
from cowrec.trainer.runtime.processes import on_first, process_group
from cowrec.trainer.runtime.stopping import StopRequest, stop_requests
from cowrec.trainer.sharded_model.run_plan import RunPlan
from cowrec.trainer.sharded_model.sharding import describe_sharding, save_sharding, sharding_table

from .dataloading import Readers, even_slices, keep_resident, open_readers
from .evaluation import EpochQuality
from .saved_run import warm_start
from .trainer import Trainer, require_run_dir

AfterEpoch = Callable[[dict[str, Any]], bool]
"""Takes the measurements after an epoch, as the report lists them, and decides whether the run ends there."""


def train(
    config: RunConfig, data_dir: Place, run_dir: Place, *, resume: bool = False, after_epoch: AfterEpoch | None = None
) -> dict[str, Any]:
    """Trains a model, evaluating and saving after every epoch; returns the report that ``run_dir`` then holds.

    The report's ``samples_per_second`` and ``train_seconds`` cover the training steps only, without evaluations and
    checkpoints and without the run's first step, in which kernels are compiled or loaded. ``wall_seconds`` covers
    everything since the processes joined.

    Args:
        config: of the run.
        data_dir: prepared data set; a path, or a URI, of which a local copy is read (:func:`local_data`).
        run_dir: folder of the run, new or empty unless it is resumed; a path or the URI of a folder in an object store,
            see :class:`RunPlace`.
        resume: continue from the newest checkpoint in that folder, or start if there is none. On the same number of
            processes the weights are bit-identical to those of an uninterrupted run.
        after_epoch: called after each epoch but the last, in a resumed run first for the epoch before; all processes
            must decide alike.

    Raises:
        ValueError: a setting or data set does not work; nothing has been trained.
        NonFiniteLoss: the loss became NaN or infinite; the checkpoints of earlier epochs are kept.
        ProcessLost: another process hangs or has ended.
        Interrupted: the run was asked to stop and has saved a checkpoint.
    """
    started = time.perf_counter()
    data = dataclasses.replace(config.data, dir=str(local_data(data_dir)))
    config = dataclasses.replace(config, data=data)
    place = RunPlace(run_dir, resume=resume)
    with process_group(config.train.device, config.train.timeout_seconds) as process:
        # Read after the first process of the machine, which all wait for here, has copied the run.
        begun = load_config(place.folder / CONFIG) if resume and (place.folder / CONFIG).is_file() else None
        schema = Schema.load(data.dir)
        config = with_defaults(config, schema.split("train").rows, begun)
        require_run_dir(place.folder, config, process, resume)
        plan = RunPlan.of(config, schema.of_batches(), process)
        with open_readers(plan) as readers:
            run = _EpochRun(plan, place.folder, readers, after_epoch)
            run.trainer.checkpoints.place = place
            with run.trainer.running(resume):
                on_first(process, lambda: save_sharding(place.folder, run.sharding))
                report = run.train(resume) | {"wall_seconds": time.perf_counter() - started}
                on_first(process, lambda: write_report(place.folder, report))
                on_first(process, place.push)
        return report


class _EpochRun:
    """A run over epochs of a data set: its readers, its trainer, its position and its measurements."""

    def __init__(self, plan: RunPlan, run_dir: Path, readers: Readers, after_epoch: AfterEpoch | None) -> None:
        self.plan, self.after_epoch = plan, after_epoch
        config, process = self.config, self.process = plan.config, plan.process
        self.train_reader, self.validation_reader = readers.train, readers.validation
        self.trainer = Trainer(plan, run_dir, config.train.on_nonfinite)
        keep_resident(self.train_reader, config, process)
        self.state, self.say = self.trainer.state, self.trainer.say
        self.quality = EpochQuality(config, readers, process, self._non_finite)
        self.sharding = describe_sharding(self.state.model)
        self.epoch = self.epoch_step = 0
        self.speed = Speed()
        samples, seconds = self.train_reader.num_rows, config.train.log_seconds
        self.display = ProgressDisplay(process.is_first, config.train.epochs, samples, seconds)
        self.epochs: list[dict[str, Any]] = []

    def train(self, resume: bool) -> dict[str, Any]:
        """Runs from the first step, or from the newest checkpoint, to the report."""
        self.say(self.summary())
        if not (resume and self.resume()) and self.config.train.warm_start:
            warm_start(self.state)
        with self.trainer.open_log() as log, stop_requests(self.process) as stop:
            while self.epoch < self.config.train.epochs and not self.ends_early():
                self.train_epoch(log, stop)
                self.evaluate(log)
                self.save()
            self.trainer.checkpoints.finish()
            quality = self.final_quality(log)
            log.write("report", self.trainer.steps, **quality)
        report = self.report(quality)
        if report["clip_remark"]:
            self.say(report["clip_remark"])
        return report

    def resume(self) -> bool:
        """Continues from the newest checkpoint of the run; False if it has none."""
        progress = self.trainer.resume()
        if progress is None:
            return False
        self._require_same_order(progress)
        self.epoch, self.epoch_step = progress.epoch, progress.epoch_step
        self.epochs = list(progress.epochs)
        self.speed = Speed(progress.samples, progress.seconds)
        self.say(
            f"continuing from {self.trainer.checkpoints.latest}: step {progress.step},"
            f" {self.epoch} of {self.config.train.epochs} epochs done"
        )
        return True

    def _require_same_order(self, progress: Progress) -> None:
        """Raises ValueError in the middle of an epoch whose order of samples this kind of device does not draw."""
        kind = self.process.device.type
        if progress.epoch_step and kind != progress.device:
            raise ValueError(
                f"{self.trainer.checkpoints.latest} is in the middle of an epoch that began on {progress.device}, and"
                f' {kind} has another order of samples; finish the epoch with train.device = "{progress.device}"'
            )

    def train_epoch(self, log: MetricsLog, stop: StopRequest) -> None:
        """Trains to the end of the epoch. Only steps after which metrics are written wait for the device."""
        steps = self.train_reader.steps(self.epoch)
        slices = even_slices(self.train_reader.epoch(self.epoch, self.epoch_step), self.process.world_size)
        batches = self.state.ids.training_batches(slices)
        self.state.pipeline.reset()
        self.speed.start(self._done())
        self.display.start(self.epoch, self._done())
        try:
            while self.epoch_step < steps:
                step = self.trainer.step(batches, self.train_reader.passes(self.epoch, self.epoch_step))
                self.epoch_step += 1
                if step.set_aside:
                    self.report_set_aside(log, step.set_aside)
                stopping, saving = stop.agreed(), not step.set_aside and self._saves_now(steps)
                if not (stopping or saving or self._logs_now(steps)):
                    continue
                done = self._done()
                loss = self.write_metrics(log, done, dense_lr=step.dense_lr, embedding_lr=step.embedding_lr)
                self.display.show(self.trainer.steps, done, loss)
                if stopping or saving:
                    self.save()
                    self.speed.start(done)
                if stopping:
                    raise self.trainer.interrupted()
        finally:
            self.display.end()
        self.epoch, self.epoch_step = self.epoch + 1, 0

    def _done(self) -> int:
        """Samples of the epoch that have been trained on."""
        return self.train_reader.samples_before(self.epoch, self.epoch_step)

    def write_metrics(self, log: MetricsLog, done: int, **rates: float) -> float:
        """Writes the metrics since the last call, ``done`` samples into the epoch; returns the mean loss."""
        loss = self.trainer.checked_loss(within=f" (epoch {self.epoch + 1})")
        rate = self.speed.measure(done, counts=self.trainer.steps > 1)
        values = {"loss": loss, "samples_per_second": rate, **rates}
        log.write("train", self.trainer.steps, epoch=self.epoch, **values)
        self.trainer.write_statistics(log, epoch=self.epoch)
        return loss

    def report_set_aside(self, log: MetricsLog, reason: str) -> None:
        """Logs that the latest batch was not trained on."""
        log.write("set_aside", self.trainer.steps, epoch=self.epoch, batch=self.epoch_step, reason=reason)
        self.trainer.warn(
            f"warning: batch {self.epoch_step} of epoch {self.epoch + 1} is skipped, as it would make the model"
            f" non-finite: {reason}"
        )

    def _logs_now(self, steps: int) -> bool:
        taken = self.trainer.steps
        return taken == 1 or taken % self.config.train.log_every == 0 or self.epoch_step == steps

    def _saves_now(self, steps: int) -> bool:
        every = self.config.checkpoint.every_steps
        return every > 0 and self.trainer.steps % every == 0 and self.epoch_step < steps

    def evaluate(self, log: MetricsLog) -> None:
        """Measures the model after an epoch."""
        values, text = self.quality.measure(self.state)
        regression = self.quality.regression(self.state.tasks) if not self.epochs else ({}, "")
        if regression[0]:
            values["logistic_regression"] = regression[0]
        steps = self.trainer.steps
        log.write("eval", steps, epoch=self.epoch - 1, **values)
        self.epochs.append({"epoch": self.epoch, "step": steps, **values})
        self.say(f"epoch {self.epoch}/{self.config.train.epochs}  step {steps}  {text}")
        if regression[1]:
            self.say(f"one-hot logistic regression  {regression[1]}")

    def _non_finite(self, where: str) -> Exception:
        return self.trainer.non_finite(f"on the {where} after step {self.trainer.steps} (epoch {self.epoch})")

    def ends_early(self) -> bool:
        """True after `train.patience` epochs that were not better than the best one, or where `after_epoch` says so.

        Decided anew in a resumed run.
        """
        patience, best = self.config.train.patience, self.best_epoch()
        if patience and best and self.epoch - best["epoch"] >= patience:
            return True
        return bool(self.after_epoch and self.epochs and self.after_epoch(self.epochs[-1]))

    def best_epoch(self) -> dict[str, Any] | None:
        """The epoch with the best validation quality; without validation samples test quality, if the best is kept."""
        metric = self.config.checkpoint.keep_best
        if metric == "none" and self.quality.tests_each_epoch:
            return None
        return best_epoch(self.epochs, "logloss" if metric == "none" else metric)

    def final_quality(self, log: MetricsLog) -> dict[str, Any]:
        """Measures of the report: those of the best epoch where `checkpoint.keep_best` keeps it, else of the last one.

        With validation samples the test split is measured here for the first time: with the last weights and, if the
        best ones are kept and are others, with these.
        """
        last, best = self.epochs[-1], self.best_epoch()
        chosen = best if best and self.config.checkpoint.keep_best != "none" else last
        tested = {last["step"]: last, chosen["step"]: chosen}
        if not self.quality.tests_each_epoch:
            tested[last["step"]] = last | self._tested(log, last)
            if chosen is not last:
                found = self.state.load_weights(self.trainer.run_dir / CHECKPOINTS, self.trainer.warn).step
                chosen = chosen if found == chosen["step"] else last
                tested[chosen["step"]] = chosen | self._tested(log, chosen)
        values = {key: value for key, value in tested[chosen["step"]].items() if key not in ("step", "rows")}
        others = {} if chosen is last else {"last_epoch": tested[last["step"]]}
        return values | ({"best_epoch": best["epoch"]} if best else {}) | others

    def _tested(self, log: MetricsLog, epoch: dict[str, Any]) -> dict[str, Any]:
        values, text = self.quality.measure_test(self.state)
        log.write("test", self.trainer.steps, epoch=epoch["epoch"] - 1, **values)
        self.say(f"epoch {epoch['epoch']}  step {epoch['step']}  {text}")
        return values

    def save(self) -> None:
        """Saves a checkpoint from which the epoch can be continued."""
        speed = {"samples": self.speed.samples, "seconds": self.speed.seconds}
        position = {"epoch": self.epoch, "epoch_step": self.epoch_step, "device": self.process.device.type}
        self.trainer.save(epochs=list(self.epochs), **position, **speed)

    def report(self, quality: dict[str, Any]) -> dict[str, Any]:
        """Summarizes the run, whose quality is given."""
        schema = self.trainer.schema
        return {
            **quality,
            "logistic_regression": self.epochs[0].get("logistic_regression"),
            "samples_per_second": self.speed.samples / self.speed.seconds if self.speed.seconds else nan,
            "train_seconds": self.speed.seconds,
            "best_possible": dict(schema.best) if schema.best else None,
            "world_size": self.process.world_size,
            "epochs": self.epochs,
            **({"batch_ramp": self.plan.ramp.sizes} if self.config.train.batch_ramp else {}),
            **self.trainer.report(),
        }

    def summary(self) -> str:
        """Describes data, settings and sharding, for the terminal."""
        schema = self.trainer.schema
        table_rows = sum(spec.num_embeddings for spec in self.plan.tables)
        return (
            f"{self.config.model.name} on {schema.name}: {self.train_reader.num_rows:,} training samples, "
            f"{f'{self.validation_reader.num_rows:,} validation samples, ' if self.validation_reader else ''}"
            f"{len(schema.sparse)} fields, {table_rows:,} table rows\n"
            f"batch {self.config.train.batch_size} ({self.plan.epoch_steps} steps an epoch{self._ramp_text()}), "
            f"{self.trainer.describe_settings()}"
            + (f"\n{sharding_table(self.sharding)}" if self.process.world_size > 1 else "")
        )

    def _ramp_text(self) -> str:
        ramp = self.plan.ramp
        sizes, plural = ", ".join(map(str, ramp.sizes)), "s" if ramp.steps_per_size > 1 else ""
        return f"; the first epoch begins with {ramp.steps_per_size} step{plural} each at {sizes}" if sizes else ""
