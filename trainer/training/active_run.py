"""A run while it trains, over epochs or on a stream: its folder, steps, losses, log, checkpoints, and how it stops."""

import logging
import signal
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from math import isfinite, nan
from multiprocessing import parent_process
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from cowrec.data_pipeline import Batch
from cowrec.files import locked, locked_folder

from ..config.run import RunConfig, prepared_otherwise_warning, to_plain
from ..config.sections import OnNonfinite
from ..measures.clip_metrics import clip_remark
from ..runs.checkpoint import Checkpoints, Progress, WriteFiles
from ..runs.local_copy import RunPlace
from ..runs.metrics_log import TRACKERS, MetricsLog, TrackedRun, Tracking, flattened, require_trackers
from ..runs.run_dir import create_run_dir, require_own, require_shared, require_unused, write_json
from ..runtime.errors import Interrupted, NonFiniteLoss
from ..runtime.processes import Process, on_first
from ..sharded_model.build import SHARDING, describe_sharding, sharding_line
from ..sharded_model.run_plan import RunPlan
from .state import Step, TrainState

MOST_SET_ASIDE = 10
"""Number of batches in a row that may be set aside; more of them are no fault of the data."""
logger = logging.getLogger(__name__)


class ActiveRun:
    """A run with its model: it takes steps, checks their losses, and saves. All processes call together.

    Args:
        on_nonfinite: see :class:`TrainState`.
        reads_ahead: whether several processes may take a batch before the step of the batch before has ended.

    Attributes:
        sharding: see :func:`describe_sharding`.

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
        self._set_aside_in_a_row = 0
        self._losses = LossWatch(process)
        self.checkpoints = Checkpoints(place, config.checkpoint, process)

    @property
    def steps(self) -> int:
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
        """Opens the metrics log; only that of the first process writes, to trackers too."""
        if not self.process.is_first:
            return MetricsLog(None)
        folder, settings = self.place.folder, to_plain(self.config) | {"derived": self.plan.describe()}
        run = TrackedRun(folder, flattened(settings), flattened(self.state.environment))
        trackers = [Tracking(name, TRACKERS[name](), run) for name in dict.fromkeys(self.config.train.trackers)]
        position = {"step": self.steps, "set_aside": self.state.set_aside}
        return MetricsLog(folder, trackers=trackers, max_bytes=max_bytes, may_drop=may_drop, **position)

    def step(self, batches: Iterator[Batch], passes: int = 1) -> Step:
        """Trains on the next batch, or on several that are parts of one, translated by ``state.ids``.

        It waits for the device only where `on_nonfinite` is "skip". Raises NonFiniteLoss if `MOST_SET_ASIDE` batches in
        a row would have made the state non-finite.
        """
        step = self.state.step(batches, passes)
        if step.set_aside:
            self._set_aside_in_a_row += 1
            if self._set_aside_in_a_row == MOST_SET_ASIDE:
                where = f"in {MOST_SET_ASIDE} batches in a row after step {self.steps} ({step.set_aside})"
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
        """Returns the mean loss over all ranks since the last call, after :meth:`require_finite`."""
        self.require_finite(within)
        return self._losses.mean()

    def non_finite(self, where: str) -> NonFiniteLoss:
        self.checkpoints.finish()
        derived, last = self.plan.scaled.hyperparameters, self.checkpoints.latest
        kept = f"the last good checkpoint is {last}" if last else "no checkpoint was saved before"
        set_aside = self.state.set_aside
        skip = "" if set_aside else ', or leave such batches of a stream out: online.on_nonfinite = "skip"'
        return NonFiniteLoss(
            f"the loss {'or a gradient ' * bool(set_aside)}was not finite {where}; {kept}. Look for values that"
            f" are not finite in the data, lower optimizer.dense_lr (scaled to {derived.dense_lr:g}) or"
            f" optimizer.embedding_lr (scaled to {derived.embedding_lr:g}){skip}"
        )

    def interrupted(self) -> Interrupted:
        """Makes the error of a run that was asked to stop and has saved a checkpoint, if it had taken a step."""
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

    def save(self, write_files: WriteFiles | None = None, /, **progress: Any) -> None:
        """Saves a checkpoint with the given fields of :class:`Progress`.

        Raises NonFiniteLoss, and saves nothing, if a weight or moment is not finite.
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
        progress |= {"clip": clip, "set_aside": self.state.set_aside}
        self.state.save(self.checkpoints, Progress(self.steps, **progress), write_files)

    def settings_summary(self) -> str:
        """Describes scaling, clip, derived rates and sharding; on CUDA also why steps are not captured."""
        config, derived, why = self.config, self.plan.scaled.hyperparameters, self.state.why_not_captured
        named = (("weight decay", derived.weight_decay), ("dense weight decay", derived.dense_weight_decay))
        others = "".join(f", {name} {value:g}" for name, value in named if value)
        if (lr_decay := self.plan.schedule.lr_decay) != "none":
            others += f", lr decay {lr_decay}"
        if config.train.average:
            others += ", mean of the weights"
        lines = [
            f"scaling {config.optimizer.scaling}, clip {config.clip.rule}: embedding lr {derived.embedding_lr:g}, dense"
            f" lr {derived.dense_lr:g}, l2 {derived.l2:g}{others}"
        ]
        if why and self.process.device.type == "cuda":
            lines.append(f"steps are not captured as a CUDA graph: {why}")
        if self.process.world_size > 1:
            lines.append(sharding_line(self.sharding))
        return "\n".join(lines)

    def report(self) -> dict[str, Any]:
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

    def say(self, text: str) -> None:
        if self.process.is_first:
            logger.info(text)

    def warn(self, text: str) -> None:
        if self.process.is_first:
            logger.warning(text)


def require_run_dir(run_dir: Path, config: RunConfig, process: Process, resume: bool, *, held: bool = False) -> None:
    """Raises UserError unless the folder is unused or, on resuming, holds a run of this configuration.

    It also does if another process is at work there, unless this one has the folder locked (`held`).
    """

    def check() -> None:
        with nullcontext() if held or not run_dir.is_dir() else locked(run_dir):
            require_own(run_dir, config) if resume else require_unused(run_dir)

    on_first(process, check)


class LossWatch:
    """Losses since the last reading, kept on the device, so that no step waits for it."""

    def __init__(self, process: Process):
        self._world_size = process.world_size
        self._losses: list[tuple[int, Tensor]] = []
        self._sum, self._count = 0.0, 0

    def add(self, loss: Tensor, step: int) -> None:
        """Adds this process's loss of a step, a scalar."""
        # A captured step returns its loss in the same memory each time.
        self._losses.append((step, loss.detach().clone()))

    def mean(self) -> float:
        """Returns the mean over all processes of the losses that were checked since the last call, or NaN."""
        mean = self._sum / self._count / self._world_size if self._count else nan
        self._sum, self._count = 0.0, 0
        return mean

    def check(self) -> int | None:
        """Returns the first step since the last call whose loss was not finite on some process, or None.

        It waits for the device once. All processes call together, after the same steps.
        """
        if not self._losses:
            return None
        steps, losses = [step for step, _ in self._losses], torch.stack([loss for _, loss in self._losses]).double()
        self._losses = []
        if self._world_size > 1:
            dist.all_reduce(losses)  # a sum is finite only where all its terms are
        values = losses.tolist()
        self._sum, self._count = self._sum + sum(values), self._count + len(values)
        return next((step for step, value in zip(steps, values, strict=True) if not isfinite(value)), None)


class StopRequest:
    """A request to stop by any process, which all processes see after the same step."""

    def __init__(self, process: Process):
        self.wanted = False
        # A separate group on the CPU neither waits for the GPU nor interferes with the model's collectives.
        alone = process.world_size == 1
        self._group: Any = None if alone else dist.new_group(backend="gloo", timeout=process.timeout)
        self._asked: tuple[Any, Tensor] | None = None

    def agreed(self) -> bool:
        """Tells whether a process requested to stop before the previous call; with one process, before this call."""
        if self._group is None:
            return self.wanted
        agreed = False
        if self._asked is not None:
            work, wanted = self._asked
            work.wait()
            agreed = bool(wanted.item())
        # The result is read one step later, so that no process waits for another here.
        wanted = torch.tensor(float(self.wanted))
        self._asked = (dist.all_reduce(wanted, dist.ReduceOp.MAX, group=self._group, async_op=True), wanted)
        return agreed


@contextmanager
def stop_requests(process: Process) -> Iterator[StopRequest]:
    """Turns the first Ctrl-C or SIGTERM in the main thread into a request; a second one interrupts immediately.

    Under torchrun, and in the subprocess of a sweep, a second signal has no effect: a terminal or a scheduler, and the
    parent process, may both send one.
    """
    stop = StopRequest(process)

    def request(number: int, _: FrameType | None) -> None:
        if stop.wanted and not process.launched and parent_process() is None:
            raise KeyboardInterrupt
        stop.wanted = True

    with _handled(request, signal.SIGINT, signal.SIGTERM):
        yield stop


def interrupted_by_sigterm() -> AbstractContextManager[None]:
    """Makes SIGTERM interrupt the block as Ctrl-C does, in the main thread."""
    return _handled(signal.default_int_handler, signal.SIGTERM)


def ignoring_sigterm() -> AbstractContextManager[None]:
    """Ignores SIGTERM while a failed run waits for its checkpoint: torchrun sends it when another process fails."""
    return _handled(signal.SIG_IGN, signal.SIGTERM)


@contextmanager
def _handled(handler: Any, *numbers: signal.Signals) -> Iterator[None]:
    """Handles signals in the block, if it runs in the main thread; Python handles signals there alone."""
    here = threading.current_thread() is threading.main_thread()
    earlier = {number: signal.signal(number, handler) for number in numbers if here}
    try:
        yield
    finally:
        for number, before in earlier.items():
            signal.signal(number, before)
