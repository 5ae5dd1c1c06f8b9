"""Checkpoints: the complete state of a run, written through torch.distributed.checkpoint while training continues."""

import shutil
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed._shard.sharded_tensor import Shard, ShardedTensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.staging import AsyncStager

from cowrec.trainer.config.sections import CheckpointConfig
from cowrec.trainer.runtime.processes import Process, on_first

from .checkpoint_folder import Files, Progress, remove_unfinished, seal, unfinished
from .checkpoint_reader import cause, find_checkpoint, read_checkpoint
from .remote_run import RunPlace
from .run_dir import CHECKPOINTS

_LONGEST_SKEW = timedelta(minutes=30)
"""Longest wait of a process that has written its part for those that have not; see `Heartbeat.lost`."""
_ABANDON_SECONDS = 10.0
"""Longest wait for a checkpoint when the run fails; a process that hangs or has ended never completes its part.

With the search for lost processes it is less than the half minute after which torchrun kills.
"""

WriteFiles = Callable[[Path], None]
"""Writes further files into the folder of a checkpoint."""
State = dict[str, Any]
"""Nested dictionaries of Tensors and ShardedTensors."""


class Checkpoints:
    """Writer of a run's checkpoints. All processes make the same calls together.

    Args:
        place: of the run, to which checkpoints are uploaded while training continues.
        config: which checkpoints are kept.
        process: this process.
        say: receives a warning when a checkpoint could not be written.
        lost: returns which processes are lost, see `Heartbeat.lost`; asked where the others keep this one waiting.

    Attributes:
        folder: local folder of the checkpoints.
        latest: the newest checkpoint known to be complete.
    """

    def __init__(
        self,
        place: RunPlace,
        config: CheckpointConfig,
        process: Process,
        say: Callable[[str], None],
        lost: Callable[[], str] = lambda: "",
    ):
        self.latest: Path | None = None
        self.folder = place.folder / CHECKPOINTS
        self._place, self._config, self._process, self._say, self._lost = place, config, process, say, lost
        # The writing threads need their own group: their collectives must not interleave with the model's.
        alone = process.world_size == 1
        self._group = None if alone else dist.new_group(backend="gloo", timeout=max(process.timeout, _LONGEST_SKEW))
        self._pending: tuple[int, Future[Path | None]] | None = None
        self._failure: str | None = None

    def clean(self) -> None:
        """Removes unfinished checkpoints of a killed process; call it while holding the run's folder."""
        on_first(self._process, lambda: remove_unfinished(self.folder))

    def find(self) -> tuple[Path, Progress] | None:
        """The newest intact checkpoint, from which the run continues; None where there is none.

        Raises:
            ValueError: all checkpoints are damaged, or one is of another format.
        """
        found = find_checkpoint(self.folder, self._process, self._say, fetch=self._place.fetch)
        if found:
            self.latest = found[0]
        return found

    def read(self, path: Path, state: State) -> None:
        """Reads a checkpoint into the tensors of a state, as :func:`read_checkpoint`."""
        read_checkpoint(path, state, self._place.fetch)

    def save(
        self, state: State, progress: Progress, about: dict[str, Any], write_files: WriteFiles | None = None
    ) -> None:
        """Writes ``folder/step_N``, which appears complete or not at all; returns once the state has been copied.

        If it cannot be written, a warning is given, earlier checkpoints stay and the run continues; see
        :meth:`finish`.

        Args:
            state: tensors to save.
            progress: of the run.
            about: further entries of the manifest.
            write_files: called later, on the first process, while training continues.
        """
        self._settle()
        partial = unfinished(self.folder, progress.step)
        written: Future[Any] = dcp.async_save(  # type: ignore[assignment]
            state, checkpoint_id=partial, process_group=self._group, async_stager=_CpuStager()
        )
        sealed: Future[Path | None] = Future()
        self._pending = progress.step, sealed

        def finish(done: Future[Any]) -> None:
            try:
                done.result()
                elsewhere = self._upload_shards(partial)
                if not self._process.is_first:
                    sealed.set_result(None)
                    return
                if write_files:
                    write_files(partial)
                path = seal(partial, progress, about, self._config, elsewhere)
                self._place.push()
                sealed.set_result(path)
            except BaseException as error:  # CheckpointException is not an Exception; the waiter needs every error
                shutil.rmtree(partial, ignore_errors=True)
                sealed.set_exception(error)

        written.add_done_callback(finish)

    def _upload_shards(self, partial: Path) -> Files:
        """Uploads this process's shards if hosts share no folder; returns those of all, on the first process."""
        if self._place.is_shared:
            return {}
        uploaded: Files | OSError
        try:
            uploaded = self._place.upload_shards(partial, self._process.rank)
        except OSError as error:
            uploaded = error
        of_all: list[Files | OSError] = [uploaded] * self._process.world_size
        dist.gather_object(uploaded, of_all if self._process.is_first else None, group=self._group)
        found: dict[str, Sequence[Any]] = {}
        for each in of_all:
            if isinstance(each, OSError):
                raise each
            found |= each
        return found

    def finish(self) -> None:
        """Waits for the checkpoint that is being written.

        Raises:
            ValueError: it could not be written.
        """
        self._settle()

        def check() -> None:
            if self._failure:
                raise ValueError(f"{self._failure}; free disk space or repair the folder, then train with --resume")

        on_first(self._process, check)

    def abandon(self) -> None:
        """Waits briefly for the checkpoint that is being written, when the run ends in an error."""
        if self._pending:
            with suppress(CheckpointException, Exception):
                self._pending[1].result(_ABANDON_SECONDS)

    def _settle(self) -> None:
        if self._pending is None:
            return
        step, sealed = self._pending
        self._pending = self._failure = None
        try:
            while not wait([sealed], self._process.timeout.total_seconds()).done:
                if lost := self._lost():
                    raise RuntimeError(f"the checkpoint of step {step} could not be written: {lost}")
            self.latest = sealed.result() or self.latest
        except RuntimeError:  # the processes cannot communicate; an error of one of them is a CheckpointException
            raise
        except (CheckpointException, Exception) as error:
            last = f"the last good checkpoint is {self.latest}" if self.latest else "there is no earlier one"
            self._failure = f"the checkpoint of step {step} could not be written ({cause(error)}); {last}"
            self._say(f"warning: {self._failure}")


class _CpuStager(AsyncStager):
    """Copies a state to the CPU before training continues; the library's own stager does not handle ShardedTensor."""

    _synchronize_after_execute = False

    def stage(self, state_dict: State) -> State:
        return {key: _cpu_copy(value) for key, value in state_dict.items()}

    def synchronize_staging(self) -> None:
        pass

    def close(self) -> None:
        pass


def _cpu_copy(value: Any) -> Any:
    """Copies the tensors of nested dictionaries to the CPU."""
    if isinstance(value, dict):
        return {key: _cpu_copy(each) for key, each in value.items()}
    if isinstance(value, ShardedTensor):
        shards = [Shard(_cpu_copy(shard.tensor), shard.metadata) for shard in value.local_shards()]
        return ShardedTensor._init_from_local_shards_and_global_metadata(
            shards, value.metadata(), process_group=value._process_group
        )
    assert isinstance(value, Tensor)
    return value.detach().to("cpu", copy=True)
