"""Training over the epochs of a prepared data set: the story of a run, from its configuration to its report."""

import dataclasses
import time
from collections.abc import Iterator
from math import isfinite, isnan
from pathlib import Path
from typing import Any

import numpy as np

from cowrec.data_pipeline import Batch, Reader, Schema
from cowrec.data_pipeline.remote import Place
from cowrec.errors import UserError

from ..config.run import RunConfig, checked_config, few_steps_warning, load_config, with_defaults, with_values
from ..measures.quality import require_distinct_measures
from ..measures.segments import id_count_thirds
from ..runs.local_copy import local_data
from ..runs.metrics_log import MetricsLog
from ..runs.run_dir import CONFIG, JOURNAL, REPORT, write_json
from ..runs.run_place import RunPlace
from ..runtime.processes import on_first, process_group
from ..runtime.stopping import StopRequest, stop_requests
from ..sharded_model.build import check_batches
from ..sharded_model.check_run import check_run
from ..sharded_model.run_plan import RunPlan
from .active_run import ActiveRun, require_run_dir
from .dataloading import Readers, even_slice, keep_resident, training_readers
from .epochs import AfterEpoch, EpochEnd, Epochs, Speed
from .evaluation import Stopped, evaluate
from .report import epochs_report, epochs_summary, remarks, without_times
from .state import Step
from .warm_start import warm_start


def train(
    config: RunConfig, data_dir: Place, run_dir: Place, *, resume: bool = False, after_epoch: AfterEpoch | None = None
) -> dict[str, Any]:
    """Trains a model, evaluating and saving after every epoch; returns the report that ``run_dir`` then holds.

    The report's ``samples_per_second`` and ``train_seconds`` cover the training steps only, without evaluations and
    checkpoints and without the run's first step, in which kernels are compiled or loaded. ``wall_seconds`` covers
    everything since the processes joined.

    Args:
        data_dir: prepared data set; a path, or a URI, of which a local copy is read (:func:`local_data`).
        run_dir: folder of the run, new or empty unless it is resumed; a path or the URI of a folder in an object store,
            see :class:`RunPlace`.
        resume: continue from the newest checkpoint in that folder, or start if there is none. On the same number of
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
        config = with_defaults(config, schema.split("train").rows, begun)
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


class Trainer:
    """Trains a run over the epochs of a data set. All processes call together.

    Args:
        run: with the model in its initial state.
        after_epoch: as of :class:`Epochs`.

    Attributes:
        epochs, speed: where the run is, and how fast it trains.
        log, stop: the metrics log and the request to stop, while :meth:`train` runs.

    Raises:
        UserError: a batch, or a label's name, that the network or the measures cannot take.
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
        self.run.say(epochs_summary(self.run, self.readers))
        if warning := few_steps_warning(
            self.config, self.plan.train_rows, self.plan.steps, validated=self.readers.validation is not None
        ):
            self.run.warn(warning)
        if any(spec.ids.kind == "collisionless" and spec.ids.window for spec in self.plan.tables):
            self.run.warn(
                "warning: id_table.window has no effect on a data set, whose samples are read in random order: all"
                " occurrences count; on a stream it has one"
            )

    def resume(self) -> bool:
        """Continues from the newest checkpoint of the run; False if it has none."""
        progress = self.run.resume()
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
        done = f"{self.epochs.epoch} of {self.config.train.epochs} epochs done"
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
        """This process's slices of the batches that are left of the epoch, all of one size, with rows as ids."""
        ids, ranks = self.state.ids, self.process.world_size
        for each in self.reader.epoch(self.epochs.epoch, self.epochs.step):
            own = even_slice(each, ranks) if ranks > 1 else each
            yield ids.training(own, in_order=False) if ids.translates else own

    def _samples_done(self) -> int:
        """Samples of the epoch that have been trained on."""
        return self.reader.samples_before(self.epochs.step)

    def _logs_now(self, steps: int) -> bool:
        taken = self.run.steps
        return taken == 1 or taken % self.config.train.log_every == 0 or self.epochs.step == steps

    def _saves_now(self, steps: int) -> bool:
        every = self.config.checkpoint.every_steps
        return every > 0 and self.run.steps % every == 0 and self.epochs.step < steps

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
            self._told, epochs, samples = time.monotonic(), self.config.train.epochs, self.plan.train_rows
            self.run.say(
                f"epoch {epoch + 1}/{epochs}  {done / samples:.1%}  step {self.run.steps:,}  loss {loss:.4f}"
                f"  {rate:,.0f} samples/s{self.speed.time_left((epochs - epoch) * samples - done)}"
            )

    def evaluate(self) -> None:
        """Measures the model after an epoch; a run that is to stop goes on from the epoch's last step.

        With validation samples, these are measured and the test split once, at the end; without them the test split.
        """
        epochs, steps, measured = self.epochs, self.run.steps, self.readers.measured
        try:
            values, text = self.measure(measured)
        except Stopped:
            epochs.reopen(len(self.reader))
            self.save()
            raise
        self.log.write("eval", steps, epoch=epochs.epoch - 1, **without_times(values))
        epochs.ends.append({"epoch": epochs.epoch, "step": steps, **values})
        self.run.say(f"epoch {epochs.epoch}/{self.config.train.epochs}  step {steps}  {text}")
        if metric := epochs.undefined_metric():
            names = "the test split" if measured is self.readers.test else "the validation samples"
            another = ", as by another train.validation_fraction," if self.config.train.validation_fraction else ""
            self.run.warn(
                f"warning: checkpoint.keep_best and train.patience go by {metric}, which {names} leave undefined; while"
                " it is, no epoch is the best one and none ends training early. Measure samples with known labels of"
                f' both classes{another} or set checkpoint.keep_best = "logloss" for those of one'
            )

    def measure(self, reader: Reader) -> tuple[dict[str, Any], str]:
        """Measures of the validation samples or of the test split, and a text for the terminal; raises Stopped."""
        is_test = reader is self.readers.test
        found = evaluate(self.state, reader, self._thirds if is_test else None, self.stop.agreed)
        if not isfinite(found.logloss) and not isnan(found.ctr):  # whose labels are not all unknown
            where = "test split" if is_test else "validation samples"
            raise self.run.non_finite(f"on the {where} after step {self.run.steps} (epoch {self.epochs.epoch})")
        if is_test:
            return found.values(), f"test {found}"
        measured = {key: each for key, each in found.values().items() if key.startswith(("auc", "logloss"))}
        text = f"validation {dataclasses.replace(found, excess_logloss=None)}"
        return {f"validation_{key}": each for key, each in measured.items()}, text

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
        """Measures of the report: those of the best epoch where `checkpoint.keep_best` keeps it, else of the last one.

        With validation samples the test split is measured here for the first time: with the last weights and, if the
        best ones are kept and are others, with these. The best checkpoint may be damaged, or removed before it was to
        be kept; then another one is loaded, as by later commands. Raises Stopped; a resumed run measures again.
        """
        last, best = self.epochs.ends[-1], self.epochs.best()
        chosen = best if best and self.config.checkpoint.keep_best != "none" else last
        is_last, has_validation = chosen is last, self.readers.validation is not None
        if has_validation:
            last = self._tested(last)
        if not is_last:
            folder, fetch = self.run.checkpoints.folder, self.run.checkpoints.fetch
            is_last = self.state.load_weights(folder, fetch=fetch).step != chosen["step"]
        chosen = last if is_last else self._tested(chosen) if has_validation else chosen
        values = {key: value for key, value in chosen.items() if key not in ("step", "rows")}
        others = {} if is_last else {"last_epoch": last}
        return values | ({"best_epoch": best["epoch"]} if best else {}) | others

    def _tested(self, end: EpochEnd) -> EpochEnd:
        """Adds the measures of the test split to those of an epoch, with whose weights the model is."""
        values, text = self.measure(self.readers.test)
        self.log.write("test", self.run.steps, epoch=end["epoch"] - 1, **without_times(values))
        self.run.say(f"epoch {end['epoch']}  step {end['step']}  {text}")
        return end | values

    def report(self, quality: dict[str, Any]) -> dict[str, Any]:
        """Summarizes the run, whose quality is given, and shows the remarks about it."""
        report = epochs_report(self.run, self.epochs, self.speed, quality)
        for remark in remarks(report):
            self.run.say(remark)
        return report
