"""Checkpoints of a run: its complete state, written while training continues, found again, and chosen.

step_000001000/  checkpoint.json (the manifest)  .metadata  __0_0.distcp (a shard, of rank 0) ...
step_000002000.partial/  (unfinished)
"""

import json
import logging
import shutil
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from datetime import timedelta
from itertools import zip_longest
from math import isfinite
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharded_tensor import Shard, ShardedTensor
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.staging import AsyncStager

from cowrec.data_pipeline.parallel import available_cores
from cowrec.errors import UserError
from cowrec.files import sync_folder, write_file

from ..config.sections import CheckpointConfig
from ..runtime.processes import Process, from_first, on_first
from .checkpoint_files import (
    FORMAT,
    MANIFEST,
    Damaged,
    Fetch,
    Files,
    TensorReader,
    all_present,
    cause_of,
    checksums,
    damage,
    load_manifest,
    manifest_checksum,
    rank_of,
)
from .local_copy import RunPlace
from .run_dir import CHECKPOINTS

_PREFIX, _PARTIAL, _REPLACED = "step_", ".partial", "replaced.partial"
_LONGEST_SKEW = timedelta(minutes=30)
"""Longest wait of a process that has written its part for those that have not."""
_FILE_BYTES, _MOST_FILES = 1 << 30, 8
"""A process writes one file for so many bytes, at most so many files, in parallel; so are checksums computed."""
_ABANDON_SECONDS = 10.0
"""Longest wait for a checkpoint when the run fails, less than the half minute after which torchrun kills."""

WriteFiles = Callable[[Path], None]
"""Writes further files into the folder of a checkpoint."""
State = dict[str, Any]
"""Nested dictionaries of Tensors and ShardedTensors."""
logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Progress:
    """Progress of a run at a checkpoint.

    Attributes:
        epoch: epochs finished and evaluated.
        epoch_step: steps taken in the current epoch.
        device: kind of device, "cpu" or "cuda"; each has its own order of the samples of an epoch.
        epochs: measurements after each epoch.
        training: for each epoch that has begun, the number of measured steps, their summed loss, and their seconds.
        samples, seconds: samples trained on so far, and the duration of their steps.
        clip: [rows, clipped rows] of each table so far; empty without a clip.
        set_aside: number of batches that would have made the state non-finite, and were not trained on.
    """

    step: int = 0
    epoch: int = 0
    epoch_step: int = 0
    device: str = "cpu"
    epochs: list[dict[str, Any]] = field(default_factory=list)
    training: list[list[float]] = field(default_factory=list)
    samples: int = 0
    seconds: float = 0.0
    clip: dict[str, list[int]] = field(default_factory=dict)
    set_aside: int = 0


def best_epoch(epochs: Sequence[dict[str, Any]], metric: str) -> dict[str, Any] | None:
    """Returns the first epoch with the best finite "auc" or "logloss" of validation samples, else of the test split."""
    sign = 1 if metric == "auc" else -1
    values = [(epoch.get(f"validation_{metric}", epoch.get(metric)), epoch) for epoch in epochs]
    known = [(sign * value, epoch) for value, epoch in values if value is not None and isfinite(value)]
    return max(known, key=lambda pair: pair[0])[1] if known else None


def checkpoint_name(step: int) -> str:
    return f"{_PREFIX}{step:09d}"


def list_checkpoints(folder: Path) -> list[Path]:
    """Lists the finished checkpoints of a run, oldest first, without copies of other names."""
    found = (path for path in folder.glob(f"{_PREFIX}*") if path.name.removeprefix(_PREFIX).isdecimal())
    return sorted(found, key=_step)


def _step(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix(_PREFIX))  # names of 10^9 steps and more are longer


class Checkpoints:
    """Writer of a run's checkpoints. All processes make the same calls together.

    Attributes:
        fetch: gets files of them that this host lacks.
        latest: the newest checkpoint known to be complete.
        failures: checkpoints that could not be written, since the process started.
        sealed_at: when one was last complete, or the start, by the monotonic clock.
    """

    def __init__(self, place: RunPlace, config: CheckpointConfig, process: Process):
        self.latest: Path | None = None
        self.folder, self.fetch = place.folder / CHECKPOINTS, place.fetch
        self._place, self._config, self._process = place, config, process
        # The writing threads need their own group on the CPU: their collectives must not interleave with the model's.
        own = process.world_size > 1 or process.device.type == "cuda"
        self._group: Any = dist.new_group(backend="gloo", timeout=max(process.timeout, _LONGEST_SKEW)) if own else None
        self._pending: tuple[int, Future[Path | None]] | None = None
        self._failure: str | None = None
        self._remedy = ""
        self.failures, self.sealed_at = 0, time.monotonic()

    def clean(self) -> None:
        """Removes unfinished checkpoints of a killed process; one that lacks its name alone gets it.

        Call it while holding the run's folder.
        """

        def remove() -> None:
            for partial in self.folder.glob(f"{_PREFIX}*{_PARTIAL}"):
                if isinstance(_manifest_or_error(partial), dict) and not partial.with_suffix("").exists():
                    partial.rename(partial.with_suffix(""))
                else:
                    shutil.rmtree(partial)
            shutil.rmtree(self.folder / _REPLACED, ignore_errors=True)

        on_first(self._process, remove)

    def find(self) -> tuple[Path, Progress] | None:
        """Finds the newest intact checkpoint, from which the run continues; see :func:`find_checkpoint`."""
        found = find_checkpoint(self.folder, self._process, fetch=self.fetch)
        if found:
            self.latest = found[0]
        return found

    def save(
        self, state: State, progress: Progress, about: dict[str, Any], write_files: WriteFiles | None = None
    ) -> None:
        """Writes ``folder/step_N``, which appears complete or not at all; returns once the state has been copied.

        If it cannot be written, a warning is given, earlier checkpoints stay and the run continues until
        :meth:`finish`. ``write_files`` is called on the first process while training continues.
        """
        self._settle()
        partial = self.folder / f"{checkpoint_name(progress.step)}{_PARTIAL}"
        # The staged state is on the CPU. A copy ahead would wait for a stream of the GPU, which the capture of a graph
        # forbids.
        files = min(available_cores(), _MOST_FILES, 1 + _local_bytes(state) // _FILE_BYTES)
        writer = FileSystemWriter(partial, thread_count=files, per_thread_copy_ahead=0)
        written: Future[Any] = dcp.async_save(  # type: ignore[assignment]
            state, storage_writer=writer, process_group=self._group, async_stager=_CpuStager()
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
                path = _seal(partial, progress, about, self._config, elsewhere)
                try:
                    self._place.push()
                except Exception as error:
                    raise _NotUploaded(path) from error
                self.sealed_at = time.monotonic()
                sealed.set_result(path)
            except BaseException as error:  # CheckpointException is not an Exception; the waiter needs every error
                shutil.rmtree(partial, ignore_errors=True)
                self.failures += 1
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
        for files in of_all:
            if isinstance(files, OSError):
                raise files
            found |= files
        return found

    def finish(self) -> None:
        """Waits for the checkpoint that is being written. Raises UserError if it could not be."""
        self._settle()

        def check() -> None:
            if self._failure:
                raise UserError(f"{self._failure}; {self._remedy}")

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
            self.latest = sealed.result() or self.latest
        except RuntimeError:  # the processes cannot communicate; an error of one of them is a CheckpointException
            raise
        except _NotUploaded as error:
            self.latest = error.path
            why = f"could not be uploaded ({cause_of(error.__cause__ or error)})"
            self._failure = f"the checkpoint of step {step} is complete in {self.latest}, but {why}"
            self._remedy = "when the object store answers, train with --resume on this machine"
            logger.warning(f"warning: {self._failure}")
        except (CheckpointException, Exception) as error:
            self._remedy = "free disk space or repair the folder, then train with --resume"
            last = f"the last good checkpoint is {self.latest}" if self.latest else "there is no earlier one"
            self._failure = f"the checkpoint of step {step} could not be written ({cause_of(error)}); {last}"
            if self._process.is_first:
                logger.warning(f"warning: {self._failure}")


class _NotUploaded(Exception):
    """Raised for a checkpoint ``path`` that is complete in the local copy of a run's folder alone."""

    def __init__(self, path: Path) -> None:
        super().__init__(str(path))
        self.path = path


class _CpuStager(AsyncStager):
    """Copies a state to the CPU before training continues; the library's own stager does not handle ShardedTensor."""

    _synchronize_after_execute = False

    def stage(self, state_dict: State) -> State:
        return dict(copied(state_dict, on_cpu=True))

    def synchronize_staging(self) -> None:
        pass

    def close(self) -> None:
        pass


def _local_bytes(value: Any) -> int:
    """Counts the bytes of this process's part of the tensors of nested dictionaries."""
    if isinstance(value, dict):
        return sum(map(_local_bytes, value.values()))
    if isinstance(value, ShardedTensor):
        return sum(shard.tensor.nbytes for shard in value.local_shards())
    return int(value.nbytes)


def copied(value: Any, *, on_cpu: bool = False) -> Any:
    """Copies the tensors of nested dictionaries, to their own devices or to the CPU."""
    if isinstance(value, dict):
        return {key: copied(entry, on_cpu=on_cpu) for key, entry in value.items()}
    if isinstance(value, ShardedTensor):
        whole = value.metadata()
        if on_cpu:
            whole = replace(whole, shards_metadata=[_placed_on_cpu(shard) for shard in whole.shards_metadata])
        shards = [
            Shard(copied(shard.tensor, on_cpu=on_cpu), _placed_on_cpu(shard.metadata) if on_cpu else shard.metadata)
            for shard in value.local_shards()
        ]
        return ShardedTensor._init_from_local_shards_and_global_metadata(
            shards, whole, process_group=value._process_group
        )
    assert isinstance(value, Tensor)
    return value.detach().to("cpu" if on_cpu else value.device, copy=True)


def _placed_on_cpu(shard: ShardMetadata) -> ShardMetadata:
    assert shard.placement is not None
    return replace(shard, placement=torch.distributed._remote_device(f"rank:{shard.placement.rank()}/cpu"))


def _seal(partial: Path, progress: Progress, about: dict[str, Any], keep: CheckpointConfig, elsewhere: Files) -> Path:
    """Adds a manifest with checksums, gives the folder its final name and removes checkpoints that are not kept."""
    files = {**checksums(partial, partial.iterdir()), **elsewhere}
    written = {place.relative_path for place in TensorReader(partial).read_metadata().storage_data.values()}
    if lacking := sorted(written - files.keys()):
        raise OSError(f"{partial} lacks {', '.join(lacking)}, which other processes wrote or something removed")
    manifest = {"format": FORMAT, "progress": asdict(progress), **about, "files": files}
    manifest["sha256"] = manifest_checksum(manifest)
    write_file(partial / MANIFEST, json.dumps(manifest, indent=1).encode())
    final = partial.with_suffix("")
    if final.exists():
        final.rename(final.parent / _REPLACED)
    partial.rename(final)
    sync_folder(final.parent)
    shutil.rmtree(final.parent / _REPLACED, ignore_errors=True)
    _prune(final, progress, keep)
    return final


def _prune(newest: Path, progress: Progress, keep: CheckpointConfig) -> None:
    """Removes all checkpoints before the one just written but the newest ones and the one after the best epoch.

    Checkpoints of later steps are damaged: the run did not continue from them, so that they do not count.
    """
    found = [path for path in list_checkpoints(newest.parent) if _step(path) <= _step(newest)]
    kept = set(found[-keep.keep_last :])
    best = best_epoch(progress.epochs, keep.keep_best) if keep.keep_best != "none" else None
    kept |= {newest.parent / checkpoint_name(best["step"])} if best else set()
    for path in found:
        if path not in kept:
            try:
                path.unlink() if path.is_symlink() else shutil.rmtree(path)
            except OSError as error:  # the new checkpoint is complete nevertheless
                logger.warning(f"warning: {path} is no longer needed but cannot be removed ({error}); remove it")


def find_checkpoint(
    folder: Path,
    process: Process,
    *,
    best_by: str | None = None,
    step: int | None = None,
    fetch: Fetch = all_present,
) -> tuple[Path, Progress] | None:
    """Finds the newest intact checkpoint of a run, or that of a step; None where there is none.

    All processes call together, and each verifies a part of the files. The first one warns of skipped checkpoints. With
    ``best_by``, "auc" or "logloss", the checkpoint after the best epoch is tried first.

    Raises:
        UserError: all checkpoints are damaged, or one is of another format; or that of the step is missing or damaged.
        OSError: files cannot be fetched.
    """
    manifests = from_first(process, lambda: {path.name: _manifest_or_error(path) for path in list_checkpoints(folder)})

    def intact(name: str) -> tuple[Path, Progress]:
        path, manifest = folder / name, manifests[name]
        if isinstance(manifest, ValueError):
            raise manifest
        errors: list[Exception | None] = [None] * process.world_size
        dist.all_gather_object(errors, _error_of_part(path, manifest["files"], process, fetch))
        for error in sorted(filter(None, errors), key=lambda error: isinstance(error, Damaged)):
            raise error
        return path, Progress(**manifest["progress"])

    if step is not None:
        if checkpoint_name(step) not in manifests:
            steps = ", ".join(str(int(name.removeprefix(_PREFIX))) for name in manifests)
            raise UserError(f"{folder} has no checkpoint of step {step}; it has those of steps {steps or 'none'}")
        return intact(checkpoint_name(step))
    order = list(reversed(manifests))
    newest = next((manifest for name in order if isinstance(manifest := manifests[name], dict)), None)
    best = best_epoch(newest["progress"]["epochs"], best_by) if newest and best_by else None
    if best:
        name = checkpoint_name(best["step"])
        manifests.setdefault(name, Damaged(f"{folder / name}, the checkpoint of the best epoch, is missing"))
        order = list(dict.fromkeys([name, *order]))
    damaged = list[Damaged]()
    for name, following in zip_longest(order, order[1:]):
        try:
            return intact(name)
        except Damaged as error:
            damaged.append(error)
            if following and process.is_first:
                logger.warning(f"{error}; taking {folder / following} instead")
    if damaged:
        raise UserError(f"no checkpoint of {folder} can be used: {'; '.join(map(str, damaged))}")
    return None


def _manifest_or_error(path: Path) -> dict[str, Any] | ValueError:
    try:
        return load_manifest(path)
    except ValueError as error:
        return error


def _error_of_part(path: Path, files: Files, process: Process, fetch: Fetch) -> Exception | None:
    """Fetches and checks this process's part of a checkpoint's files; returns its error."""
    count = process.world_size
    own = {name: values for name, values in files.items() if (rank_of(name) or 0) % count == process.rank}
    try:
        fetch(path, own)
        found = damage(path, own)
    except OSError as error:
        return error
    return Damaged(f"{path} is damaged: {found}") if found else None


def choose_checkpoint(
    folder: Path, keep_best: str, checkpoint: str, process: Process, fetch: Fetch = all_present
) -> tuple[Path, Progress]:
    """Chooses the checkpoint whose weights a command uses; the first process logs it. All processes call together.

    ``checkpoint`` is "latest", "best" or a step; "" means "best" where the run keeps it (``keep_best``).

    Raises UserError: there is no such checkpoint, no best epoch, or all are damaged.
    """
    checkpoint = str(checkpoint)  # in Python, a step is a number
    if checkpoint not in ("", "latest", "best") and not checkpoint.isdecimal():
        raise UserError(f'--checkpoint must be "latest", "best" or a step, got {checkpoint!r}')
    if checkpoint == "best" and keep_best == "none":
        raise UserError(
            f'the run of {folder} keeps no best checkpoint (checkpoint.keep_best = "none"); use --checkpoint latest or'
            " a step"
        )
    is_best = keep_best != "none" and checkpoint in ("", "best")
    step = int(checkpoint) if checkpoint.isdecimal() else None
    found = find_checkpoint(folder, process, best_by=keep_best if is_best else None, step=step, fetch=fetch)
    if found is None:
        raise UserError(f"no checkpoint in {folder}; train the run first")
    path, progress = found
    best = best_epoch(progress.epochs, keep_best) if is_best else None
    if checkpoint == "best" and best is None:
        raise UserError(
            f"the run of {folder} has measured no epoch yet that could be the best; use --checkpoint latest or a step"
        )
    if process.is_first:
        after = f", after epoch {progress.epoch}" if progress.epoch and not progress.epoch_step else ""
        best_by = f", the best by {keep_best}" if best and best["step"] == progress.step else ""
        logger.info(f"using {path}{after}{best_by}")
    return found
