"""Training over the epochs of a prepared data set: the story of a run, from its configuration to its report."""

import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from functools import partial
from math import isfinite, isnan, nan
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from cowrec.data_pipeline import Batch, Reader, Schema, available_bytes
from cowrec.data_pipeline.remote import Place
from cowrec.errors import UserError

from ..config.run import (
    FEW_STEPS,
    RunConfig,
    checked_config,
    few_steps_warning,
    load_config,
    with_defaults,
    with_values,
)
from ..measures.quality import auc_remark, calibration_remark, curve_remark, require_distinct_measures
from ..measures.segments import id_count_thirds
from ..runs.checkpoint import Progress, best_epoch
from ..runs.local_copy import RunPlace, local_data
from ..runs.metrics_log import MetricsLog
from ..runs.run_dir import CONFIG, JOURNAL, REPORT, write_json
from ..runtime.processes import on_first, process_group
from ..sharded_model.build import check_batches
from ..sharded_model.check_run import check_run
from ..sharded_model.run_plan import RunPlan
from ..sharded_model.step import even_slice
from .active_run import ActiveRun, StopRequest, require_run_dir, stop_requests
from .evaluation import Stopped, evaluate
from .state import Step
from .warm_start import warm_start
from .weight_average import STATES

EpochEnd = dict[str, Any]
"""Number of an epoch, from 1, training steps taken until its end, and measures, as report and checkpoints list them."""
AfterEpoch = Callable[[EpochEnd], bool]
"""Decides by the measures after an epoch whether the run ends there."""


def train(
    config: RunConfig, data_dir: Place, run_dir: Place, *, resume: bool = False, after_epoch: AfterEpoch | None = None
) -> dict[str, Any]:
    """Trains a model, evaluating and saving after every epoch; returns the report that ``run_dir`` then holds.

    The report's ``samples_per_second`` and ``train_seconds`` cover the training steps only, without the run's first
    step, in which kernels are compiled. ``wall_seconds`` covers everything since the processes joined.

    Args:
        data_dir: prepared data set, a path or a URI.
        run_dir: folder of the run, new or empty unless it is resumed; a path or the URI of a folder in an object store.
        resume: whether to continue from the newest checkpoint in that folder, if there is one. On the same number of
            processes the weights are bit-identical to those of an uninterrupted run.
        after_epoch: called after each epoch but the last, in a resumed run first for the epoch before; all processes
            must decide alike.

    Raises:
        UserError: a setting or data set does not work; nothing has been trained.
        NonFiniteLoss: the loss became NaN or infinite; the checkpoints of earlier epochs are kept.
        Interrupted: the run was asked to stop and has saved a checkpoint.
    """
    started = time.perf_counter()
    config = with_values(checked_config(config), data={"dir": str(local_data(data_dir))})
    place = RunPlace(run_dir, resume=resume)
    with process_group(config.train.device, config.train.timeout_seconds) as process:
        # Both are read after the first process of the machine, which all wait for here, has copied the run.
        if (place.folder / JOURNAL).exists():
            raise UserError(
                f"{run_dir} is a run that follows a stream, and could not go on with it after training on a data set;"
                " continue it with cowrec online --resume, or start another run with train.warm_start = its folder"
            )
        begun = load_config(place.folder / CONFIG) if resume and (place.folder / CONFIG).is_file() else None
        schema = Schema.load(config.data.dir)
        config = with_defaults(config, schema.split("train").rows, begun, validated="validation" in schema.splits)
        check_run(config, schema, process)
        require_run_dir(place.folder, config, process, resume)
        plan = RunPlan.of(config, schema.of_batches(), process)
        readers, run = training_readers(plan), ActiveRun(plan, place)
        trainer = Trainer(run, readers, after_epoch)
        with run.running(resume):
            report = trainer.train(resume) | {"wall_seconds": time.perf_counter() - started}
            on_first(process, lambda: write_json(place.folder / REPORT, report))
            on_first(process, place.push)
        return report


class Readers(NamedTuple):
    """Readers of a training run: of the training samples, shuffled, of the validation samples, and of the test split.

    Validation samples are the split "validation" or the last samples of the training split; None without either.
    """

    train: Reader
    validation: Reader | None
    test: Reader

    @property
    def measured(self) -> Reader:
        return self.test if self.validation is None else self.validation


class Trainer:
    """Trains a run over the epochs of a data set. All processes call together.

    Attributes:
        epochs, speed: where the run is, and how fast it trains.
        log, stop: the metrics log and the request to stop, while :meth:`train` runs.

    Raises:
        UserError: the network cannot take one of the batches.
    """

    log: MetricsLog
    stop: StopRequest

    def __init__(self, run: ActiveRun, readers: Readers, after_epoch: AfterEpoch | None = None) -> None:
        self.run, self.readers, self.reader = run, readers, readers.train
        self.plan, self.config, self.process, self.state = run.plan, run.config, run.process, run.state
        keep_resident(readers, self.plan)
        require_distinct_measures(self.plan.schema.labels)
        check_batches(self.state.model, self.plan)
        self.epochs = Epochs(self.config, has_validation=readers.validation is not None, after_epoch=after_epoch)
        self.speed, self._told = Speed(), time.monotonic()
        self._thirds: np.ndarray | None = None
        if self.config.evaluate.by_id_counts and self.process.is_first:
            self._thirds = id_count_thirds(Path(self.config.data.dir), "test", self.plan.train_rows)

    def train(self, resume: bool) -> dict[str, Any]:
        """Runs from the first step, or from the newest checkpoint, to the report."""
        self.introduce()
        if not (resume and self.resume()) and self.config.train.warm_start:
            warm_start(self.state, timed=self.plan.schema.timed)
        with self.run.open_log() as self.log, stop_requests(self.process) as self.stop:
            try:
                while self.epochs.are_left():
                    self.train_epoch()
                    self.evaluate()
                    self.save()
                self.run.checkpoints.finish()
                quality = self.final_quality()
            except Stopped:
                raise self.run.interrupted() from None
            self.log.write("report", self.run.steps, **without_times(quality))
        return self.report(quality)

    def introduce(self) -> None:
        """Describes the run, and warns of settings without the effect that they promise."""
        plan, validation = self.plan, self.readers.validation
        validation_samples = f"{validation.num_rows:,} validation samples, " if validation else ""
        self.run.say(
            f"{self.config.model.name} on {plan.schema.name}: {plan.train_rows:,} training samples, "
            f"{validation_samples}{len(plan.schema.sparse)} fields,"
            f" {sum(spec.num_embeddings for spec in plan.tables):,} table rows\n"
            f"batch {self.config.train.batch_size} ({plan.epoch_steps} steps an epoch), {self.run.settings_summary()}"
        )
        if patience := self.config.train.patience:
            waits = f", for {patience} epochs" if patience > 1 else ""
            self.run.say(f"until the validation {self.config.checkpoint.keep_best} is no better than before{waits}")
        if warning := few_steps_warning(self.config, plan.train_rows, plan.steps, validated=validation is not None):
            self.run.warn(warning)
        if any(spec.ids.kind == "collisionless" and spec.ids.window for spec in self.plan.tables):
            self.run.warn(
                "warning: id_table.window has no effect on a data set, whose samples are read in random order: all"
                " occurrences count; on a stream it has one"
            )

    def resume(self) -> bool:
        progress = self.state.resume(self.run.checkpoints)
        if progress is None:
            return False
        kind, latest = self.process.device.type, self.run.checkpoints.latest
        if progress.epoch_step and kind != progress.device:  # each kind of device draws another order
            raise UserError(
                f"{latest} is in the middle of an epoch that began on {progress.device}, and {kind} has another order"
                f' of samples; finish the epoch with train.device = "{progress.device}"'
            )
        self.epochs.resume(progress)
        self.speed = Speed(progress.samples, progress.seconds)
        done = f"{self.epochs.epoch}{self.epochs.of_all(' of ')} epochs done"
        self.run.say(f"continuing from {latest}: step {progress.step}, {done}")
        return True

    def train_epoch(self) -> None:
        """Trains to the end of the epoch. Only steps after which metrics are written wait for the device."""
        epochs, steps = self.epochs, len(self.reader)
        batches, accumulates = self.batches(), self.config.train.accumulation > 1
        self.state.pipeline.reset()
        self.speed.start(self._samples_done())
        while epochs.step < steps:
            passes = self.reader.passes(epochs.step) if accumulates else 1
            step = self.run.step(batches, passes)
            epochs.step += 1
            if self.state.average and self._averages_now(steps):
                self.state.average.add()
            stopping, saving = self.stop.agreed(), self._saves_now(steps)
            if stopping or saving or self._logs_now(steps):
                self.write_metrics(step)
            if stopping or saving:
                self.save()
                self.speed.start(self._samples_done())
            if stopping:
                raise self.run.interrupted()
        epochs.end()

    def batches(self) -> Iterator[Batch]:
        """Yields this process's slices of the batches that are left of the epoch, all of one size, with rows as ids."""
        ids, ranks = self.state.ids, self.process.world_size
        for batch in self.reader.epoch(self.epochs.epoch, self.epochs.step):
            own = even_slice(batch, ranks) if ranks > 1 else batch
            yield ids.training(own, in_order=False) if ids.translates else own

    def _samples_done(self) -> int:
        return self.reader.samples_before(self.epochs.step)

    def _logs_now(self, steps: int) -> bool:
        taken = self.run.steps
        return taken == 1 or taken % self.config.train.log_every == 0 or self.epochs.step == steps

    def _saves_now(self, steps: int) -> bool:
        every = self.config.checkpoint.every_steps
        return every > 0 and self.run.steps % every == 0 and self.epochs.step < steps

    def _averages_now(self, steps: int) -> bool:
        """Tells whether one of the STATES equal parts of the epoch has ended."""
        taken = self.epochs.step
        return taken * STATES // steps > (taken - 1) * STATES // steps

    def write_metrics(self, step: Step) -> None:
        """Writes the metrics since the last call, and now and then logs a line; ``step`` is the latest one."""
        epoch, done = self.epochs.epoch, self._samples_done()
        loss = self.run.checked_loss(within=f" (epoch {epoch + 1})")
        rate, seconds = self.speed.measure(done, counts=self.run.steps > 1)
        self.epochs.add_training(loss, seconds)
        values = {"loss": loss, "samples_per_second": rate, "dense_lr": step.dense_lr}
        self.log.write("train", self.run.steps, epoch=epoch, **values, embedding_lr=step.embedding_lr)
        self.run.write_statistics(self.log, epoch=epoch)
        if 0 < self.config.train.log_seconds <= time.monotonic() - self._told:
            self._told, samples = time.monotonic(), self.plan.train_rows
            # Where the validation quality ends the run, only the end of the epoch is known.
            epochs, end = (1, " of the epoch") if self.config.train.patience else (self.config.train.epochs - epoch, "")
            self.run.say(
                f"epoch {epoch + 1}{self.epochs.of_all('/')}  {done / samples:.1%}  step {self.run.steps:,}"
                f"  loss {loss:.4f}  {rate:,.0f} samples/s{self.speed.time_left(epochs * samples - done, end)}"
            )

    def evaluate(self) -> None:
        """Measures the model after an epoch, with validation samples if there are any, else with the test split.

        A run that is to stop meanwhile goes on from the epoch's last step.
        """
        epochs, steps, measured = self.epochs, self.run.steps, self.readers.measured
        try:
            with self.state.with_kept_weights():
                values, text = self.measure(measured)
        except Stopped:
            epochs.reopen(len(self.reader))
            self.save()
            raise
        self.log.write("eval", steps, epoch=epochs.epoch - 1, **without_times(values))
        epochs.ends.append({"epoch": epochs.epoch, "step": steps, **values})
        self.run.say(f"epoch {epochs.epoch}{epochs.of_all('/')}  step {steps}  {text}")
        if metric := epochs.undefined_metric():
            names = "the test split" if measured is self.readers.test else "the validation samples"
            another = ", as by another train.validation_fraction," if self.config.train.validation_fraction else ""
            self.run.warn(
                f"warning: checkpoint.keep_best and train.patience go by {metric}, which {names} leave undefined; while"
                " it is, no epoch is the best one and none ends training early. Measure samples with known labels of"
                f' both classes{another} or set checkpoint.keep_best = "logloss" for those of one'
            )

    def measure(self, reader: Reader) -> tuple[dict[str, Any], str]:
        """Measures validation samples or the test split; returns measures and a text for the terminal."""
        is_test = reader is self.readers.test
        found = evaluate(self.state, reader, self._thirds if is_test else None, self.stop.agreed)
        if not isfinite(found.logloss) and not isnan(found.ctr):  # whose labels are not all unknown
            where = "test split" if is_test else "validation samples"
            raise self.run.non_finite(f"on the {where} after step {self.run.steps} (epoch {self.epochs.epoch})")
        if is_test:
            return found.values(), f"test {found}"
        values = found.values().items()
        measured = {f"validation_{key}": value for key, value in values if key.startswith(("auc", "logloss"))}
        return measured, f"validation {dataclasses.replace(found, excess_logloss=None)}"

    def save(self) -> None:
        """Saves a checkpoint from which the epoch can be continued."""
        self.run.save(
            epoch=self.epochs.epoch,
            epoch_step=self.epochs.step,
            device=self.process.device.type,
            epochs=list(self.epochs.ends),
            training=list(self.epochs.training),
            samples=self.speed.samples,
            seconds=self.speed.seconds,
        )

    def final_quality(self) -> dict[str, Any]:
        """Returns the measures of the best epoch where `checkpoint.keep_best` keeps it, else of the last one.

        With validation samples the test split is measured here for the first time: with the last weights and with the
        best ones that are kept. If the best checkpoint is damaged, another one is loaded, as by later commands. Raises
        Stopped; a resumed run measures again.
        """
        last, best = self.epochs.ends[-1], self.epochs.best()
        chosen = best if best and self.config.checkpoint.keep_best != "none" else last
        is_last, has_validation = chosen is last, self.readers.validation is not None
        if has_validation:
            with self.state.with_kept_weights():
                last = self._tested(last)
        if not is_last:
            folder, fetch = self.run.checkpoints.folder, self.run.checkpoints.fetch
            is_last = self.state.load_weights(folder, fetch=fetch).step != chosen["step"]
        chosen = last if is_last else self._tested(chosen) if has_validation else chosen
        values = {key: value for key, value in chosen.items() if key not in ("step", "rows")}
        others = {} if is_last else {"last_epoch": last}
        return values | ({"best_epoch": best["epoch"]} if best else {}) | others

    def _tested(self, end: EpochEnd) -> EpochEnd:
        """Adds the measures of the test split to those of the epoch whose weights the model has."""
        values, text = self.measure(self.readers.test)
        self.log.write("test", self.run.steps, epoch=end["epoch"] - 1, **without_times(values))
        self.run.say(f"epoch {end['epoch']}  step {end['step']}  {text}")
        return end | values

    def report(self, quality: dict[str, Any]) -> dict[str, Any]:
        """Summarizes the run, whose quality is given, and shows the remarks about it."""
        best_possible, speed = self.plan.schema.best, self.speed
        training = self.epochs.training_report()
        report = {
            **quality,
            "auc_remark": auc_remark(quality, self.epochs.ends[: quality["epoch"]]),
            "curve_remark": self._curve_remark([epoch["loss"] for epoch in training]),
            "calibration_remark": calibration_remark(quality) if self.config.train.loss == "bce" else None,
            "samples_per_second": speed.samples / speed.seconds if speed.seconds else nan,
            "train_seconds": speed.seconds,
            "best_possible": dict(best_possible) if best_possible else None,
            "world_size": self.process.world_size,
            "epochs": list(map(without_times, self.epochs.ends)),
            "training": training,
            **self.run.report(),
        }
        for remark in remarks(report):
            self.run.say(remark)
        return report

    def _curve_remark(self, losses: Sequence[float]) -> str | None:
        """Returns :func:`curve_remark`; None where the mean loss of the epochs is no logloss."""
        if self.config.train.loss != "bce" or len(self.plan.schema.labels) > 1:
            return None
        most = self.config.train.epochs
        return curve_remark(self.epochs.ends, losses, few_steps=FEW_STEPS, most_epochs=most)


def without_times(values: Mapping[str, Any]) -> dict[str, Any]:
    """Leaves out the many measures by time, which only the report has."""
    return {
        key: without_times(value) if key == "last_epoch" else value
        for key, value in values.items()
        if key != "over_time"
    }


def remarks(report: Mapping[str, Any]) -> list[str]:
    """Returns the remarks for the terminal. A clip without effect is worth a remark where epochs overfit."""
    shown = [report["curve_remark"], report["auc_remark"], report["clip_remark"] if report["auc_remark"] else None]
    return [remark for remark in (*shown, report["calibration_remark"]) if remark]


class Epochs:
    """The position of a run in its epochs, and the measures after each.

    Attributes:
        epoch: number of epochs trained to their end, which is the index of the current one.
        step: number of steps taken in the current epoch.
        ends: measures after each epoch.
        training: for each epoch that has begun, the number of measured steps, the sum of their losses, and their
            seconds.
    """

    def __init__(self, config: RunConfig, *, has_validation: bool, after_epoch: AfterEpoch | None = None) -> None:
        self._config, self._has_validation, self._after_epoch = config, has_validation, after_epoch
        self.epoch = self.step = 0
        self.ends: list[EpochEnd] = []
        self.training: list[list[float]] = []

    def are_left(self) -> bool:
        """Tells whether the run goes on, decided anew in a resumed run.

        It ends after `train.epochs`, after `train.patience` epochs without a better one, or where `after_epoch` says
        so.
        """
        if self.epoch >= self._config.train.epochs:
            return False
        patience, best = self._config.train.patience, self.best()
        if patience and best and self.epoch - best["epoch"] >= patience:
            return False
        return not (self._after_epoch and self.ends and self._after_epoch(self.ends[-1]))

    def of_all(self, sign: str) -> str:
        """Returns the sign and the number of epochs of the run; "" where the validation quality decides on it."""
        return "" if self._config.train.patience else f"{sign}{self._config.train.epochs}"

    def end(self) -> None:
        self.epoch, self.step = self.epoch + 1, 0

    def reopen(self, steps: int) -> None:
        """Goes back to the last step of the epoch that has ended, which is still to be measured."""
        self.epoch, self.step = self.epoch - 1, steps

    def resume(self, progress: Progress) -> None:
        self.epoch, self.step, self.ends = progress.epoch, progress.epoch_step, list(progress.epochs)
        self.training = [list(epoch) for epoch in progress.training]

    def add_training(self, loss: float, seconds: float) -> None:
        """Adds the steps since the last call, whose mean loss is given."""
        if len(self.training) == self.epoch:
            self.training.append([0, 0.0, 0.0])
        steps = self.step - self.training[-1][0]
        own = (steps, steps * loss, seconds)
        self.training[-1] = [before + now for before, now in zip(self.training[-1], own, strict=True)]

    def training_report(self) -> list[dict[str, float]]:
        """Returns the mean training loss of each epoch's steps, and their seconds."""
        return [
            {"epoch": number, "loss": loss / steps, "seconds": seconds}
            for number, (steps, loss, seconds) in enumerate(self.training, 1)
        ]

    def best(self) -> EpochEnd | None:
        """Returns the epoch with the best validation quality; without it test quality, if the best is kept."""
        metric = self._config.checkpoint.keep_best
        if metric == "none" and not self._has_validation:
            return None
        return best_epoch(self.ends, "logloss" if metric == "none" else metric)

    def undefined_metric(self) -> str:
        """Returns the metric of `checkpoint.keep_best` if the first epoch had no value of it, else ""."""
        metric = self._config.checkpoint.keep_best
        return metric if metric != "none" and len(self.ends) == 1 and best_epoch(self.ends, metric) is None else ""


class Speed:
    """Sums samples and seconds of training steps, leaving out evaluations and checkpoints."""

    def __init__(self, samples: int = 0, seconds: float = 0.0) -> None:
        self.samples, self.seconds = samples, seconds
        self.start(0)

    def start(self, done: int) -> None:
        """Starts the clock, ``done`` samples into the epoch."""
        self._done, self._since = done, time.perf_counter()

    def measure(self, done: int, *, counts: bool) -> tuple[float, float]:
        """Returns samples per second and seconds since the last call, which enter the sums if they count."""
        now = time.perf_counter()
        samples, seconds = done - self._done, now - self._since
        self._done, self._since = done, now
        if counts:
            self.samples += samples
            self.seconds += seconds
        return samples / seconds, seconds

    def time_left(self, samples: int, end: str) -> str:
        """Says how long so many samples take; "" in the first step, which compiles kernels."""
        return f"  {timedelta(seconds=round(samples * self.seconds / self.samples))} left{end}" if self.samples else ""


def training_readers(plan: RunPlan) -> Readers:
    config, schema, process = plan.config, plan.schema, plan.process
    data_dir = Path(config.data.dir)
    has_split = "validation" in schema.splits
    reader = partial(Reader, data_dir, rank=process.rank, world_size=process.world_size, device=process.device)
    rows = schema.split("train").rows
    validation_rows = rows - plan.train_rows
    train = reader(
        "train",
        rows=range(plan.train_rows),
        batch_size=config.train.batch_size,
        passes=config.train.accumulation,
        shuffle=True,
        seed=config.train.seed,
        window_rows=config.data.window_rows,
    )
    evaluation = partial(reader, batch_size=config.train.eval_batch_size, true_logits=True)
    validation = None
    if has_split:
        validation = evaluation("validation")
    elif validation_rows:
        validation = evaluation("train", rows=range(plan.train_rows, rows))
    return Readers(train, validation, evaluation("test"))


def keep_resident(readers: Readers, plan: RunPlan) -> None:
    """Keeps on the device the training samples, then the samples that are measured after each epoch.

    Call it once the model is built: samples are kept if they take at most half of the memory that is left; the other
    half is for the steps. `data.resident` = "yes" keeps the training samples in any case. Raises UserError if they do
    not fit then.
    """
    config, process = plan.config, plan.process
    if config.data.resident == "no":
        return
    copies = process.local_world_size if process.device.type == "cpu" else 1
    for reader in (readers.train, readers.measured):
        free = available_bytes(process.device)
        fits = free is not None and copies * reader.resident_bytes <= free // 2
        if fits or (reader is readers.train and config.data.resident == "yes"):
            reader.make_resident()
