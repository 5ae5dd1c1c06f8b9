"""Training on a prepared data set, from the configuration of a run to its report.

:func:`train` opens the run, :class:`_EpochRun` goes through its epochs, and :class:`Trainer`, which training on streams
shares, takes the steps, checks their losses, and saves.
"""

import dataclasses
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from datetime import timedelta
from math import isfinite, isnan, nan
from pathlib import Path
from typing import Any

import numpy as np

from cowrec.data_pipeline import Batch, Reader, Schema
from cowrec.data_pipeline.remote import Place
from cowrec.errors import UserError
from cowrec.files import locked, locked_folder

from ..config.run import (
    RunConfig,
    checked_config,
    few_steps_warning,
    load_config,
    prepared_otherwise_warning,
    to_plain,
    with_defaults,
    with_values,
)
from ..config.sections import OnNonfinite
from ..measures.clip_metrics import clip_remark
from ..measures.quality import auc_remark, calibration_remark, require_distinct_measures
from ..measures.segments import id_count_thirds
from ..runs.checkpoint import Checkpoints, Progress, WriteFiles, best_epoch
from ..runs.metrics_log import MetricsLog
from ..runs.remote_run import RunPlace, local_data
from ..runs.run_dir import (
    CONFIG,
    JOURNAL,
    REPORT,
    create_run_dir,
    require_own,
    require_shared,
    require_unused,
    write_json,
)
from ..runs.trackers import TRACKERS, TrackedRun, Tracking, flattened, require_trackers
from ..runtime.errors import Interrupted, NonFiniteLoss
from ..runtime.processes import Process, on_first, process_group
from ..runtime.stopping import LossWatch, StopRequest, ignoring_sigterm, stop_requests
from ..sharded_model.build import check_batches
from ..sharded_model.check_run import check_run
from ..sharded_model.run_plan import RunPlan
from ..sharded_model.sharding import SHARDING, describe_sharding, sharding_line
from .dataloading import Readers, even_slice, keep_resident, training_readers
from .evaluation import Stop, Stopped, evaluate
from .saved_run import warm_start
from .state import Step, TrainState

AfterEpoch = Callable[[dict[str, Any]], bool]
"""Takes the measurements after an epoch, as the report lists them, and decides whether the run ends there."""
EpochEnd = dict[str, Any]
"""Number of an epoch, from 1, training steps taken until its end, and measures, as report and checkpoints list them."""
MOST_SET_ASIDE = 10
"""Batches in a row that may be set aside; more of them are no fault of the data."""

logger = logging.getLogger(__name__)


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
        ValueError: a setting or data set does not work; nothing has been trained.
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
        run = _EpochRun(plan, place, training_readers(plan), after_epoch)
        with run.trainer.running(resume):
            report = run.train(resume) | {"wall_seconds": time.perf_counter() - started}
            on_first(process, lambda: write_json(place.folder / REPORT, report))
            on_first(process, place.push)
        return report


class _EpochRun:
    """A run over epochs of a data set: its readers, its trainer, its position and its measurements."""

    def __init__(self, plan: RunPlan, place: RunPlace, readers: Readers, after_epoch: AfterEpoch | None) -> None:
        self.plan, self.after_epoch = plan, after_epoch
        self.config, self.process = plan.config, plan.process
        (self.reader, self.validation, self.test), self.measured = readers, readers.measured
        self.trainer = Trainer(plan, place)
        keep_resident(readers, plan)
        self.state, self.say = self.trainer.state, self.trainer.say
        require_distinct_measures(plan.schema.labels)
        check_batches(self.state.model, plan)
        self.thirds: np.ndarray | None = None
        if self.config.evaluate.by_id_counts and self.process.is_first:
            self.thirds = id_count_thirds(Path(self.config.data.dir), "test", plan.train_rows)
        self.epoch = self.epoch_step = 0
        self.speed, self.told = Speed(), time.monotonic()
        self.epochs: list[EpochEnd] = []

    def train(self, resume: bool) -> dict[str, Any]:
        """Runs from the first step, or from the newest checkpoint, to the report."""
        self.say(self.summary())
        if warning := few_steps_warning(self.config, self.plan.train_rows, self.plan.steps):
            self.trainer.warn(warning)
        if any(spec.ids.kind == "collisionless" and spec.ids.window for spec in self.plan.tables):
            self.trainer.warn(
                "warning: id_table.window has no effect on a data set, whose samples are read in random order: all"
                " occurrences count; on a stream it has one"
            )
        if not (resume and self.resume()) and self.config.train.warm_start:
            warm_start(self.state, timed=self.plan.schema.timed)
        with self.trainer.open_log() as log, stop_requests(self.process) as stop:
            while self.epoch < self.config.train.epochs and not self.ends_early():
                self.train_epoch(log, stop)
                self.evaluate(log, stop)
                self.save()
            self.trainer.checkpoints.finish()
            try:
                quality = self.final_quality(log, stop.agreed)
            except Stopped:
                raise self.trainer.interrupted() from None
            log.write("report", self.trainer.steps, **quality)
        report = self.report(quality)
        for remark in filter(None, (report[each] for each in ("auc_remark", "clip_remark", "calibration_remark"))):
            self.say(remark)
        return report

    def train_epoch(self, log: MetricsLog, stop: StopRequest) -> None:
        """Trains to the end of the epoch. Only steps after which metrics are written wait for the device."""
        steps = self.reader.steps(self.epoch)
        slices = self.reader.epoch(self.epoch, self.epoch_step)
        ranks, translated = self.process.world_size, self.state.ids.training
        batches = (translated(even_slice(each, ranks), in_order=False) for each in slices)
        self.state.pipeline.reset()
        self.speed.start(self._done())
        while self.epoch_step < steps:
            step = self.trainer.step(batches, self.reader.passes(self.epoch, self.epoch_step))
            self.epoch_step += 1
            stopping, saving = stop.agreed(), self._saves_now(steps)
            if not (stopping or saving or self._logs_now(steps)):
                continue
            done = self._done()
            self.write_metrics(log, done, dense_lr=step.dense_lr, embedding_lr=step.embedding_lr)
            if stopping or saving:
                self.save()
                self.speed.start(done)
            if stopping:
                raise self.trainer.interrupted()
        self.epoch, self.epoch_step = self.epoch + 1, 0

    def _done(self) -> int:
        """Samples of the epoch that have been trained on."""
        return self.reader.samples_before(self.epoch, self.epoch_step)

    def _logs_now(self, steps: int) -> bool:
        taken = self.trainer.steps
        return taken == 1 or taken % self.config.train.log_every == 0 or self.epoch_step == steps

    def _saves_now(self, steps: int) -> bool:
        every = self.config.checkpoint.every_steps
        return every > 0 and self.trainer.steps % every == 0 and self.epoch_step < steps

    def write_metrics(self, log: MetricsLog, done: int, **rates: float) -> None:
        """Writes the metrics since the last call, ``done`` samples into the epoch, and now and then logs a line."""
        loss = self.trainer.checked_loss(within=f" (epoch {self.epoch + 1})")
        rate = self.speed.measure(done, counts=self.trainer.steps > 1)
        values = {"loss": loss, "samples_per_second": rate, **rates}
        log.write("train", self.trainer.steps, epoch=self.epoch, **values)
        self.trainer.write_statistics(log, epoch=self.epoch)
        if 0 < self.config.train.log_seconds <= time.monotonic() - self.told:
            self.told, epochs, samples = time.monotonic(), self.config.train.epochs, self.plan.train_rows
            rest, trained = (epochs - self.epoch) * samples - done, self.speed.samples
            # Unknown in the first step, which compiles kernels.
            left = f"  {timedelta(seconds=round(rest * self.speed.seconds / trained))} left" if trained else ""
            self.say(
                f"epoch {self.epoch + 1}/{epochs}  {done / samples:.1%}  step {self.trainer.steps:,}"
                f"  loss {loss:.4f}  {rate:,.0f} samples/s{left}"
            )

    def evaluate(self, log: MetricsLog, stop: StopRequest) -> None:
        """Measures the model after an epoch; a run that is to stop goes on from the epoch's last step.

        With validation samples, these are measured and the test split once, at the end; without them the test split.
        """
        try:
            values, text = self.measure(self.measured, stop.agreed)
        except Stopped:
            self.epoch -= 1
            self.epoch_step = self.reader.steps(self.epoch)
            self.save()
            raise self.trainer.interrupted() from None
        steps = self.trainer.steps
        log.write("eval", steps, epoch=self.epoch - 1, **values)
        self.epochs.append({"epoch": self.epoch, "step": steps, **values})
        self.say(f"epoch {self.epoch}/{self.config.train.epochs}  step {steps}  {text}")
        metric = self.config.checkpoint.keep_best
        if metric != "none" and best_epoch(self.epochs, metric) is None and len(self.epochs) == 1:
            names = "the test split" if self.measured is self.test else "the validation samples"
            self.trainer.warn(
                f"warning: checkpoint.keep_best and train.patience go by {metric}, which {names} leave undefined; while"
                " it is, no epoch is the best one and none ends training early. Measure samples with known labels of"
                ' both classes, as by another train.validation_fraction, or let keep_best be "logloss" for those of one'
            )

    def measure(self, reader: Reader, stop: Stop | None = None) -> tuple[dict[str, Any], str]:
        """Measures of the validation samples or of the test split, and a text for the terminal; raises Stopped."""
        is_test = reader is self.test
        found = evaluate(self.state, reader, self.thirds if is_test else None, stop)
        if not isfinite(found.logloss) and not isnan(found.ctr):  # whose labels are not all unknown
            where = "test split" if is_test else "validation samples"
            raise self.trainer.non_finite(f"on the {where} after step {self.trainer.steps} (epoch {self.epoch})")
        if is_test:
            return found.values(), f"test {found}"
        measured = {key: each for key, each in found.values().items() if key.startswith(("auc", "logloss"))}
        text = f"validation {dataclasses.replace(found, excess_logloss=None)}"
        return {f"validation_{key}": each for key, each in measured.items()}, text

    def ends_early(self) -> bool:
        """True after `train.patience` epochs that were not better than the best one, or where `after_epoch` says so.

        Decided anew in a resumed run.
        """
        patience, best = self.config.train.patience, self.best_epoch()
        if patience and best and self.epoch - best["epoch"] >= patience:
            return True
        return bool(self.after_epoch and self.epochs and self.after_epoch(self.epochs[-1]))

    def best_epoch(self) -> EpochEnd | None:
        """The epoch with the best validation quality; without validation samples test quality, if the best is kept."""
        metric = self.config.checkpoint.keep_best
        if metric == "none" and self.validation is None:
            return None
        return best_epoch(self.epochs, "logloss" if metric == "none" else metric)

    def save(self) -> None:
        """Saves a checkpoint from which the epoch can be continued."""
        speed = {"samples": self.speed.samples, "seconds": self.speed.seconds}
        position = {"epoch": self.epoch, "epoch_step": self.epoch_step, "device": self.process.device.type}
        self.trainer.save(epochs=list(self.epochs), **position, **speed)

    def resume(self) -> bool:
        """Continues from the newest checkpoint of the run; False if it has none."""
        progress = self.trainer.resume()
        if progress is None:
            return False
        kind, latest = self.process.device.type, self.trainer.checkpoints.latest
        if progress.epoch_step and kind != progress.device:  # each kind of device draws another order
            raise UserError(
                f"{latest} is in the middle of an epoch that began on {progress.device}, and {kind} has another order"
                f' of samples; finish the epoch with train.device = "{progress.device}"'
            )
        self.epoch, self.epoch_step = progress.epoch, progress.epoch_step
        self.epochs = list(progress.epochs)
        self.speed = Speed(progress.samples, progress.seconds)
        epochs = self.config.train.epochs
        self.say(f"continuing from {latest}: step {progress.step}, {self.epoch} of {epochs} epochs done")
        return True

    def final_quality(self, log: MetricsLog, stop: Stop) -> dict[str, Any]:
        """Measures of the report: those of the best epoch where `checkpoint.keep_best` keeps it, else of the last one.

        With validation samples the test split is measured here for the first time: with the last weights and, if the
        best ones are kept and are others, with these. The best checkpoint may be damaged, or removed before it was to
        be kept; then another one is loaded, as by later commands. Raises Stopped; a resumed run measures again.
        """
        last, best = self.epochs[-1], self.best_epoch()
        chosen = best if best and self.config.checkpoint.keep_best != "none" else last
        is_last = chosen is last
        if self.validation is not None:
            last = self._tested(log, last, stop)
        if not is_last:
            folder, fetch = self.trainer.checkpoints.folder, self.trainer.checkpoints.fetch
            is_last = self.state.load_weights(folder, fetch=fetch).step != chosen["step"]
        chosen = last if is_last else chosen if self.validation is None else self._tested(log, chosen, stop)
        values = {key: value for key, value in chosen.items() if key not in ("step", "rows")}
        others = {} if is_last else {"last_epoch": last}
        return values | ({"best_epoch": best["epoch"]} if best else {}) | others

    def _tested(self, log: MetricsLog, end: EpochEnd, stop: Stop) -> EpochEnd:
        """Adds the measures of the test split to those of an epoch, with whose weights the model is."""
        values, text = self.measure(self.test, stop)
        log.write("test", self.trainer.steps, epoch=end["epoch"] - 1, **values)
        self.say(f"epoch {end['epoch']}  step {end['step']}  {text}")
        return end | values

    def report(self, quality: dict[str, Any]) -> dict[str, Any]:
        """Summarizes the run, whose quality is given."""
        best_possible = self.plan.schema.best
        return {
            **quality,
            "auc_remark": auc_remark(quality, self.epochs[: quality["epoch"]]),
            "calibration_remark": calibration_remark(quality) if self.config.train.loss == "bce" else None,
            "samples_per_second": self.speed.samples / self.speed.seconds if self.speed.seconds else nan,
            "train_seconds": self.speed.seconds,
            "best_possible": dict(best_possible) if best_possible else None,
            "world_size": self.process.world_size,
            "epochs": self.epochs,
            **self.trainer.report(),
        }

    def summary(self) -> str:
        """Describes data, settings and sharding, for the terminal."""
        schema = self.plan.schema
        table_rows = sum(spec.num_embeddings for spec in self.plan.tables)
        return (
            f"{self.config.model.name} on {schema.name}: {self.plan.train_rows:,} training samples, "
            f"{f'{self.validation.num_rows:,} validation samples, ' if self.validation else ''}"
            f"{len(schema.sparse)} fields, {table_rows:,} table rows\n"
            f"batch {self.config.train.batch_size} ({self.plan.epoch_steps} steps an epoch), "
            f"{self.trainer.describe_settings()}"
        )


class Speed:
    """Sums samples and seconds of training steps, leaving out evaluations and checkpoints."""

    def __init__(self, samples: int = 0, seconds: float = 0.0) -> None:
        self.samples, self.seconds = samples, seconds
        self.start(0)

    def start(self, done: int) -> None:
        """Starts the clock, ``done`` samples into the epoch."""
        self._done, self._since = done, time.perf_counter()

    def measure(self, done: int, *, counts: bool) -> float:
        """Samples per second since the last call, ``done`` samples into the epoch; added to the sums if it counts."""
        now = time.perf_counter()
        samples, seconds = done - self._done, now - self._since
        self._done, self._since = done, now
        if counts:
            self.samples += samples
            self.seconds += seconds
        return samples / seconds


class Trainer:
    """Trains a model step by step and keeps its losses, statistics and checkpoints. All processes call together.

    Args:
        on_nonfinite: see :class:`TrainState`.
        reads_ahead: whether several processes may take a batch before the step of the batch before has ended.

    Attributes:
        sharding: see :func:`describe_sharding`.
        set_aside: batches that were not trained on, since the start of the run.

    Raises:
        ValueError: see :class:`TrainState`; or the package of a tracker is not installed.
    """

    def __init__(
        self, plan: RunPlan, place: RunPlace, on_nonfinite: OnNonfinite = "stop", *, reads_ahead: bool = True
    ) -> None:
        self.plan, self.place = plan, place
        self.config, self.process = config, process = plan.config, plan.process
        on_first(process, lambda: require_trackers(config.train.trackers))
        self.state = TrainState(plan, on_nonfinite, reads_ahead=reads_ahead)
        self.sharding = describe_sharding(self.state.model, plan.bags)
        self.set_aside = self._set_aside_in_a_row = 0
        self._set_aside_for = ""
        self._losses = LossWatch(process)
        self.checkpoints = Checkpoints(place, config.checkpoint, process)

    @property
    def steps(self) -> int:
        """Training steps taken."""
        return self.state.steps

    @contextmanager
    def running(self, resume: bool) -> Iterator[None]:
        """Locks and fills the run's folder while the run is in progress; after an error waits for a checkpoint."""
        folder = self.place.folder
        with ExitStack() as held:
            on_first(self.process, lambda: held.enter_context(locked_folder(folder)))
            if self.place.is_shared:
                require_shared(folder, self.process)
            # Checked again: only from here on can no other process fill the folder.
            require_run_dir(folder, self.config, self.process, resume, held=True)
            on_first(self.process, lambda: create_run_dir(folder, self.config, self.plan.describe()))
            on_first(self.process, lambda: write_json(folder / SHARDING, self.sharding))
            if warning := prepared_otherwise_warning(self.config, self.plan.schema.settings):
                self.warn(warning)
            self.checkpoints.clean()
            try:
                yield
            except Exception:
                with ignoring_sigterm():
                    self.checkpoints.abandon()
                raise

    def open_log(self, max_bytes: int = 0, *, may_drop: bool = False) -> MetricsLog:
        """Opens the metrics log, see there; it writes, and trackers follow it, on the first process only."""
        if not self.process.is_first:
            return MetricsLog(None)
        folder, settings = self.place.folder, to_plain(self.config) | {"derived": self.plan.describe()}
        run = TrackedRun(folder, flattened(settings), flattened(self.state.environment))
        trackers = [Tracking(name, TRACKERS[name](), run) for name in dict.fromkeys(self.config.train.trackers)]
        position = {"step": self.steps, "set_aside": self.set_aside}
        return MetricsLog(folder, trackers=trackers, max_bytes=max_bytes, may_drop=may_drop, **position)

    def step(self, batches: Iterator[Batch], passes: int = 1) -> Step:
        """Trains on the next batch, or on several that are parts of one; does not wait for the device unless
        `on_nonfinite` is "skip".

        ``state.ids`` has translated them.

        Raises:
            NonFiniteLoss: `MOST_SET_ASIDE` batches in a row would have made the state non-finite.
        """
        step = self.state.step(batches, passes)
        if step.set_aside:
            self.set_aside += 1
            self._set_aside_in_a_row += 1
            self._set_aside_for = f" ({step.set_aside})"
            if self._set_aside_in_a_row == MOST_SET_ASIDE:
                where = f"in {MOST_SET_ASIDE} batches in a row after step {self.steps}{self._set_aside_for}"
                raise self.non_finite(where)
        else:
            self._set_aside_in_a_row = 0
            self._losses.add(step.loss, self.steps - 1)
        return step

    def require_finite(self, within: str = "") -> None:
        """Raises NonFiniteLoss on all ranks if a loss was not finite; its message has the step, then ``within``."""
        bad_step = self._losses.check()
        if bad_step is not None:
            raise self.non_finite(f"at step {bad_step + 1}{within}")

    def checked_loss(self, within: str = "") -> float:
        """Mean loss over all ranks since the last call, after :meth:`require_finite`."""
        self.require_finite(within)
        return self._losses.mean()

    def non_finite(self, where: str) -> NonFiniteLoss:
        """Error for a loss that was not finite."""
        self.checkpoints.finish()
        derived, last = self.plan.scaled.hyperparameters, self.checkpoints.latest
        kept = f"the last good checkpoint is {last}" if last else "no checkpoint was saved before"
        skip = "" if self.set_aside else ', or leave such batches of a stream out: online.on_nonfinite = "skip"'
        return NonFiniteLoss(
            f"the loss {'or a gradient ' * bool(self.set_aside)}was not finite {where}; {kept}. Look for values that"
            f" are not finite in the data, lower optimizer.dense_lr (scaled to {derived.dense_lr:g}) or"
            f" optimizer.embedding_lr (scaled to {derived.embedding_lr:g}){skip}"
        )

    def interrupted(self) -> Interrupted:
        """Error for a run that was asked to stop and has saved a checkpoint, if it had taken a step."""
        self.checkpoints.finish()
        nothing = "no checkpoint could be saved" if self.steps else "nothing was trained on yet"
        saved = f"saved {self.checkpoints.latest}" if self.checkpoints.latest else nothing
        resume = f"to continue, add --run-dir {self.place.name} --resume to the command"
        return Interrupted(f"stopped at step {self.steps}; {saved}; {resume}")

    def write_statistics(self, log: MetricsLog, **labels: Any) -> None:
        """Writes the readings of the clip and of the id tables, where there are any."""
        if self.state.clip_watch:
            log.write("clip", self.steps, **labels, **self.state.clip_watch.read())
        if self.state.id_tables:
            log.write("ids", self.steps, **labels, **self.state.id_tables.counters())

    def resume(self) -> Progress | None:
        """Loads the newest checkpoint of the run; None if it has none."""
        progress = self.state.resume(self.checkpoints)
        self.set_aside = progress.set_aside if progress else 0
        return progress

    def save(self, write_files: WriteFiles | None = None, /, **progress: Any) -> None:
        """Saves a checkpoint with the given fields of :class:`Progress`.

        Raises:
            NonFiniteLoss: a weight or moment is not finite; nothing is saved.
        """
        if name := self.state.not_finite():
            self.checkpoints.finish()
            last = self.checkpoints.latest
            raise NonFiniteLoss(
                f"after step {self.steps} {name} has numbers that are not finite, and no checkpoint is written;"
                f" {f'the last one is {last}' if last else 'none was saved before'}. Look for very large values in the"
                " data, or lower the learning rates"
            )
        clip = self.state.clip_watch.counts() if self.state.clip_watch else {}
        progress |= {"clip": clip, "set_aside": self.set_aside}
        self.state.save(self.checkpoints, Progress(self.steps, **progress), write_files)

    def report(self) -> dict[str, Any]:
        """Entries that every report has."""
        statistics = self.state.clip_watch.total() if self.state.clip_watch else None
        return {
            "steps": self.steps,
            "clip_statistics": statistics,
            "clip_remark": clip_remark(statistics),
            "cuda_graph": self.state.captured,
            "seed": self.config.train.seed,
            **self.plan.describe(),
            **self.state.environment,
        }

    def describe_settings(self) -> str:
        """Scaling, clip, derived rates and sharding, for the terminal; on CUDA also why steps are not captured."""
        derived, why = self.plan.scaled.hyperparameters, self.state.why_not_captured
        uncaptured = (
            f"\nsteps are not captured as a CUDA graph: {why}" if why and self.process.device.type == "cuda" else ""
        )
        beta1, beta2 = derived.betas
        decays = (("weight decay", derived.weight_decay), ("dense weight decay", derived.dense_weight_decay))
        decay = "".join(f", {name} {value:g}" for name, value in decays if value)
        falls = self.plan.schedule.decay
        decay += f", lr decay {falls}" if falls != "none" else ""
        return (
            f"scaling {self.config.optimizer.scaling}, clip {self.config.clip.rule}: embedding lr"
            f" {derived.embedding_lr:g}, dense lr {derived.dense_lr:g}, l2 {derived.l2:g}{decay}, betas {beta1:g} and"
            f" {beta2:g}, eps {derived.eps:g}{uncaptured}"
            + (f"\n{sharding_line(self.sharding)}" if self.process.world_size > 1 else "")
        )

    def say(self, text: str) -> None:
        """Logs a line, on the first process."""
        if self.process.is_first:
            logger.info(text)

    def warn(self, text: str) -> None:
        """Logs a warning, on the first process."""
        if self.process.is_first:
            logger.warning(text)


def require_run_dir(run_dir: Path, config: RunConfig, process: Process, resume: bool, *, held: bool = False) -> None:
    """Raises ValueError unless the folder is unused or, on resuming, holds a run of this configuration.

    Also if another process is at work there, unless this one has it locked (`held`).
    """

    def check() -> None:
        with nullcontext() if held or not run_dir.is_dir() else locked(run_dir):
            require_own(run_dir, config) if resume else require_unused(run_dir)

    on_first(process, check)
