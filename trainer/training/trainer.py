"""The core that training on a data set and online training share: steps, loss checks, statistics and checkpoints."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from cowrec.data_pipeline import Batch
from cowrec.trainer.config.run import RunConfig, to_plain
from cowrec.trainer.config.sections import OnNonfinite
from cowrec.trainer.measures.clip_metrics import clip_remark
from cowrec.trainer.runs.checkpoint import Checkpoints, WriteFiles
from cowrec.trainer.runs.checkpoint_folder import Progress
from cowrec.trainer.runs.metrics_log import MetricsLog
from cowrec.trainer.runs.run_dir import CHECKPOINTS, create_run_dir, hold_run_dir, require_own, require_unused
from cowrec.trainer.runs.trackers import TRACKERS, TrackedRun, Tracking, flattened, require_trackers
from cowrec.trainer.runtime.errors import Interrupted, NonFiniteLoss
from cowrec.trainer.runtime.heartbeat import Heartbeat
from cowrec.trainer.runtime.processes import Process, on_first
from cowrec.trainer.runtime.stopping import LossWatch, ignoring_sigterm
from cowrec.trainer.sharded_model.run_plan import RunPlan

from .state import Step, TrainState

MOST_SET_ASIDE = 10
"""Batches in a row that may be set aside; more of them are no fault of the data."""

logger = logging.getLogger(__name__)


class Trainer:
    """Trains a model step by step and keeps its losses, statistics and checkpoints. All processes call together.

    Args:
        plan: of the run.
        run_dir: folder of the run.
        on_nonfinite: what is done about a batch that would make the state non-finite.
        reads_ahead: whether several processes may take a batch before the step of the batch before has ended.

    Attributes:
        state: what training changes.
        checkpoints: of the run.
        set_aside: batches that were not trained on, since the start of the run.

    Raises:
        ValueError: see :class:`TrainState`; or the package of a tracker is not installed.
    """

    def __init__(
        self,
        plan: RunPlan,
        run_dir: Path,
        on_nonfinite: OnNonfinite,
        *,
        reads_ahead: bool = True,
    ) -> None:
        self.plan, self.run_dir = plan, run_dir
        config, _, process = self.config, self.schema, self.process = plan.config, plan.schema, plan.process
        on_first(process, lambda: require_trackers(config.train.trackers))
        self.state = TrainState(plan, on_nonfinite, reads_ahead=reads_ahead)
        self.set_aside = self._set_aside_in_a_row = 0
        self.checkpoints = Checkpoints(run_dir / CHECKPOINTS, config.checkpoint, process, self.warn)
        self._heartbeat = Heartbeat(process)
        self.checkpoints.lost = self._heartbeat.lost
        self._losses = LossWatch(process)

    @property
    def steps(self) -> int:
        """Training steps taken."""
        return self.state.steps

    @contextmanager
    def running(self, resume: bool) -> Iterator[None]:
        """Locks and fills the run's folder while the run is in progress; after an error waits for a checkpoint."""
        with hold_run_dir(self.run_dir, self.process):
            # Checked again: only from here on can no other process fill the folder.
            require_run_dir(self.run_dir, self.config, self.process, resume)
            on_first(self.process, lambda: create_run_dir(self.run_dir, self.config, self.plan.describe()))
            self.checkpoints.clean()
            try:
                with self._heartbeat.names_the_lost():
                    yield
            except Exception:
                with ignoring_sigterm():
                    self.checkpoints.abandon()
                raise

    def open_log(self, max_bytes: int = 0) -> MetricsLog:
        """Opens the metrics log, see there; it writes, and trackers follow it, on the first process only."""
        if not self.process.is_first:
            return MetricsLog(None)
        settings = to_plain(self.config) | {"derived": self.plan.describe()}
        run = TrackedRun(self.run_dir, flattened(settings), flattened(self.state.environment))
        trackers = [Tracking(name, TRACKERS[name](), run) for name in dict.fromkeys(self.config.train.trackers)]
        return MetricsLog(self.run_dir, self.steps, trackers, max_bytes=max_bytes)

    def step(self, batches: Iterator[Batch], passes: int = 1) -> Step:
        """Trains on the next batch, or on several that are parts of one; does not wait for the device unless
        `on_nonfinite` is "skip".

        ``state.ids`` has translated them.

        Raises:
            NonFiniteLoss: `MOST_SET_ASIDE` batches in a row would have made the state non-finite.
        """
        step = self.state.step(batches, passes)
        if step.set_aside:
            self._count_set_aside(step.set_aside)
        else:
            self._set_aside_in_a_row = 0
            self._losses.add(step.loss, self.steps - 1)
        self._heartbeat.step = self.steps
        return step

    def _count_set_aside(self, reason: str) -> None:
        self.set_aside += 1
        self._set_aside_in_a_row += 1
        if self._set_aside_in_a_row == MOST_SET_ASIDE:
            raise self.non_finite(f"in {MOST_SET_ASIDE} batches in a row after step {self.steps} ({reason})")

    def require_finite(self) -> None:
        """Raises NonFiniteLoss, on all ranks, if a loss since the last reading was not finite; keeps the mean."""
        bad_step = self._losses.check()
        if bad_step is not None:
            raise self.non_finite(f"at step {bad_step + 1}")

    def checked_loss(self, within: str = "") -> float:
        """Mean loss over all ranks since the last check.

        Args:
            within: addition to the step in the message of an error.

        Raises:
            NonFiniteLoss: a loss was not finite; on all ranks.
        """
        mean, bad_step = self._losses.read()
        if bad_step is not None:
            raise self.non_finite(f"at step {bad_step + 1}{within}")
        return mean

    def non_finite(self, where: str) -> NonFiniteLoss:
        """Error for a loss that was not finite."""
        self.checkpoints.finish()
        derived, last = self.plan.full.hyperparameters, self.checkpoints.latest
        kept = f"the last good checkpoint is {last}" if last else "no checkpoint was saved before"
        return NonFiniteLoss(
            f"the loss was not finite {where}; {kept}. Look for values that are not finite in the data, lower"
            f" optimizer.dense_lr (scaled to {derived.dense_lr:g}) or optimizer.embedding_lr (scaled to"
            f' {derived.embedding_lr:g}), or leave such batches out: on_nonfinite = "skip" in [train] or [online]'
        )

    def interrupted(self) -> Interrupted:
        """Error for a run that was asked to stop and has saved a checkpoint."""
        self.checkpoints.finish()
        place = self.checkpoints.place.name if self.checkpoints.place else self.run_dir
        return Interrupted(
            f"stopped at step {self.steps}; saved {self.checkpoints.latest}; to continue, add --run-dir {place}"
            " --resume to the command"
        )

    def write_statistics(self, log: MetricsLog, **labels: Any) -> None:
        """Writes the readings of the clip and of the id tables, where there are any."""
        if self.state.clip_watch:
            log.write("clip", self.steps, **labels, **self.state.clip_watch.read())
        if self.state.ratio_histogram:
            self.state.ratio_histogram.add()
        if self.state.id_tables:
            log.write("ids", self.steps, **labels, **self.state.id_tables.counters())

    def resume(self) -> Progress | None:
        """Loads the newest checkpoint of the run; None if it has none."""
        progress = self.state.resume(self.run_dir / CHECKPOINTS, self.checkpoints)
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
            "batches_set_aside": self.set_aside,
            "clip_statistics": statistics,
            "clip_remark": clip_remark(statistics),
            "clip_histogram": self.state.ratio_histogram.total() if self.state.ratio_histogram else None,
            "cuda_graph": self.state.captured,
            "seed": self.config.train.seed,
            **self.plan.describe(),
            **self.state.environment,
        }

    def describe_settings(self) -> str:
        """Batch size, scaling, clip and derived rates, for the terminal; on CUDA also why steps are not captured."""
        derived, why = self.plan.full.hyperparameters, self.state.why_not_captured
        uncaptured = (
            f"\nsteps are not captured as a CUDA graph: {why}" if why and self.process.device.type == "cuda" else ""
        )
        beta1, beta2 = derived.betas
        decays = (("weight decay", derived.weight_decay), ("dense weight decay", derived.dense_weight_decay))
        decay = "".join(f", {name} {value:g}" for name, value in decays if value)
        return (
            f"scaling {self.config.optimizer.scaling}, clip {self.config.clip.rule}: embedding lr"
            f" {derived.embedding_lr:g}, dense lr {derived.dense_lr:g}, l2 {derived.l2:g}{decay}, betas {beta1:g} and"
            f" {beta2:g}, eps {derived.eps:g}{uncaptured}"
        )

    def say(self, text: str) -> None:
        """Logs a line, on the first process."""
        if self.process.is_first:
            logger.info(text)

    def warn(self, text: str) -> None:
        """Logs a warning, on the first process."""
        if self.process.is_first:
            logger.warning(text)


def require_run_dir(run_dir: Path, config: RunConfig, process: Process, resume: bool) -> None:
    """Raises ValueError unless the folder is unused or, on resuming, holds a run of this configuration."""
    on_first(process, lambda: require_own(run_dir, config) if resume else require_unused(run_dir))
