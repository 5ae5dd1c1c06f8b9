"""A run while it trains, over epochs or on a stream: its folder, its steps and their losses, its log, checkpoints."""

import logging
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any

from cowrec.data_pipeline import Batch
from cowrec.files import locked, locked_folder

from ..config.run import RunConfig, prepared_otherwise_warning, to_plain
from ..config.sections import OnNonfinite
from ..runs.checkpoint import Checkpoints, Progress, WriteFiles
from ..runs.metrics_log import TRACKERS, MetricsLog, TrackedRun, Tracking, flattened, require_trackers
from ..runs.run_dir import create_run_dir, require_own, require_shared, require_unused, write_json
from ..runs.run_place import RunPlace
from ..runtime.errors import Interrupted, NonFiniteLoss
from ..runtime.processes import Process, on_first
from ..runtime.stopping import LossWatch, ignoring_sigterm
from ..sharded_model.run_plan import RunPlan
from ..sharded_model.sharding import SHARDING, describe_sharding
from .state import Step, TrainState

MOST_SET_ASIDE = 10
"""Batches in a row that may be set aside; more of them are no fault of the data."""

logger = logging.getLogger(__name__)


class ActiveRun:
    """A run with its model: it takes steps, checks their losses, and saves. All processes call together.

    Args:
        on_nonfinite: see :class:`TrainState`.
        reads_ahead: whether several processes may take a batch before the step of the batch before has ended.

    Attributes:
        sharding: see :func:`describe_sharding`.
        set_aside: batches that were not trained on, since the start of the run.

    Raises:
        UserError: see :class:`TrainState`; or the package of a tracker is not installed.
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

    def say(self, text: str) -> None:
        """Logs a line, on the first process."""
        if self.process.is_first:
            logger.info(text)

    def warn(self, text: str) -> None:
        """Logs a warning, on the first process."""
        if self.process.is_first:
            logger.warning(text)


def require_run_dir(run_dir: Path, config: RunConfig, process: Process, resume: bool, *, held: bool = False) -> None:
    """Raises UserError unless the folder is unused or, on resuming, holds a run of this configuration.

    Also if another process is at work there, unless this one has it locked (`held`).
    """

    def check() -> None:
        with nullcontext() if held or not run_dir.is_dir() else locked(run_dir):
            require_own(run_dir, config) if resume else require_unused(run_dir)

    on_first(process, check)
