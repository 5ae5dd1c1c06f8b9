"""Reading of checkpoints: tensors only, so that a file from an untrusted source runs no code.

Tensors are read as tensors. torch.distributed.checkpoint describes them in a pickle, which is read by an unpickler that
accepts only the classes of such descriptions.
"""

import logging
import pickle
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner
from torch.futures import Future

from cowrec.trainer.runtime.processes import Process, from_first

from .checkpoint_folder import Damaged, Files, Progress, best_intact, check_files, newest_intact, rank_of, step_intact

logger = logging.getLogger(__name__)

Fetch = Callable[[Path, Collection[str]], None]
"""Makes files of a checkpoint present in its folder, if there are such files."""


def all_present(path: Path, names: Collection[str]) -> None:
    """The :data:`Fetch` of a folder that has all files."""


def find_checkpoint(
    folder: Path,
    process: Process,
    say: Callable[[str], None],
    *,
    best_by: str | None = None,
    step: int | None = None,
    fetch: Fetch = all_present,
) -> tuple[Path, Progress] | None:
    """Newest intact checkpoint of a run, or another one; None where there is none. All processes call together.

    Each process verifies a part of the files.

    Args:
        folder: of the run's checkpoints.
        process: this process.
        say: receives a message for each checkpoint that is skipped.
        best_by: "auc" or "logloss": the checkpoint of the best epoch instead of the newest.
        step: the checkpoint of this step.
        fetch: gets the files that this process verifies.

    Raises:
        ValueError: all checkpoints are damaged, or one is of another format; or that of the step is missing or damaged.
        OSError: files cannot be fetched.
    """
    check = _CheckByAll(folder, process, fetch)

    def look() -> tuple[str, Progress] | None:
        with check.leading():
            if step is not None:
                found: tuple[Path, Progress] | None = step_intact(folder, step, check)
            else:
                found = best_intact(folder, best_by, say, check) if best_by else newest_intact(folder, say, check)
        return (found[0].name, found[1]) if found else None

    if not process.is_first:
        check.follow()
    found = from_first(process, look)
    return (folder / found[0], found[1]) if found else None


def choose_checkpoint(
    folder: Path, keep_best: str, checkpoint: str, process: Process, say: Callable[[str], None]
) -> tuple[Path, Progress]:
    """The checkpoint whose weights a command uses, which the first process logs. All processes call together.

    Args:
        folder: of the run's checkpoints.
        keep_best: what the run keeps the best checkpoint by, or "none".
        checkpoint: "latest", "best", or a step; "" for "best" where the run keeps it.
        process: this process.
        say: receives messages.

    Raises:
        ValueError: there is no such checkpoint, or all are damaged.
    """
    if checkpoint not in ("", "latest", "best") and not checkpoint.isdecimal():
        raise ValueError(f'--checkpoint must be "latest", "best" or a step, got {checkpoint!r}')
    if checkpoint == "best" and keep_best == "none":
        raise ValueError(
            f'the run of {folder} keeps no best checkpoint (checkpoint.keep_best = "none"); use --checkpoint latest or'
            " a step"
        )
    is_best = keep_best != "none" and checkpoint in ("", "best")
    step = int(checkpoint) if checkpoint.isdecimal() else None
    found = find_checkpoint(folder, process, say, best_by=keep_best if is_best else None, step=step)
    if found is None:
        raise ValueError(f"no checkpoint in {folder}; train the run first")
    path, progress = found
    if process.is_first:
        after = f", after epoch {progress.epoch}" if progress.epoch and not progress.epoch_step else ""
        logger.info(f"using {path}{after}{f', the best by {keep_best}' if is_best else ''}")
    return found


def checkpoint_keys(path: Path) -> set[str]:
    """Top-level keys of the state that a checkpoint holds."""
    return {key.partition(".")[0] for key in _TensorReader(path).read_metadata().state_dict_metadata}


def read_checkpoint(path: Path, state: dict[str, Any], fetch: Fetch = all_present) -> None:
    """Reads a checkpoint into the tensors of ``state``, in place; they may be sharded in any way.

    ``fetch`` gets the shards that this process reads.
    """
    reader = _TensorReader(path, fetch)
    reader.read_metadata()  # raises its own error first; older libraries would look for another file
    dcp.load(state, storage_reader=reader)


@contextmanager
def readable(path: Path) -> Iterator[None]:
    """Turns any error of decoding or loading into a ValueError that names the checkpoint."""
    try:
        yield
    except (CheckpointException, Exception) as error:  # CheckpointException is not an Exception
        raise ValueError(f"{path} does not fit this run, or is damaged: {cause(error)}") from error


def cause(error: BaseException) -> str:
    """First failure of a rank, without the tracebacks that the library puts into its message."""
    if isinstance(error, CheckpointException):
        error = next(iter(error.failures.values()))[0]
    if isinstance(error, RuntimeError) and "unexpected pos" in str(error):  # what torch's writer makes of it
        return "a file could not be written completely; its disk is probably full"
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"


class _CheckByAll:
    """Check of checkpoints' files, which the first process calls and the others follow: each checks a part of them."""

    def __init__(self, folder: Path, process: Process, fetch: Fetch) -> None:
        self._folder, self._process, self._fetch = folder, process, fetch

    def __call__(self, path: Path, files: Files) -> None:
        """As :func:`check_files`; an OSError of a process is raised before the damage that another one has found."""
        _said((path.name, files))
        errors = [each for each in self._errors(path.name, files) if each]
        for error in sorted(errors, key=lambda each: isinstance(each, Damaged)):
            raise error

    @contextmanager
    def leading(self) -> Iterator[None]:
        """On the first process, around its calls."""
        try:
            yield
        finally:
            _said(None)

    def follow(self) -> None:
        """On the others: checks their parts until the first process ends."""
        while task := _said(None):
            self._errors(*task)

    def _errors(self, name: str, files: Files) -> list[Exception | None]:
        """Checks this process's part; returns the errors of all processes."""
        rank, count, path = self._process.rank, self._process.world_size, self._folder / name
        own = {each: values for each, values in files.items() if (rank_of(each) or 0) % count == rank}
        error: Exception | None = None
        try:
            self._fetch(path, own)
            check_files(path, own)
        except (Damaged, OSError) as failure:
            error = failure
        errors: list[Exception | None] = [None] * count
        dist.all_gather_object(errors, error)
        return errors


def _said(task: tuple[str, Files] | None) -> tuple[str, Files] | None:
    """What the first process says to all."""
    said = [task]
    dist.broadcast_object_list(said, src=0)
    return said[0]


class _TensorReader(FileSystemReader):
    """Reads tensors and refuses every other object."""

    def __init__(self, path: Path, fetch: Fetch = all_present) -> None:
        super().__init__(path)
        self._folder, self._fetch = path, fetch

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        self._fetch(self._folder, {self.storage_data[each.storage_index].relative_path for each in plan.items})
        return super().read_data(plan, planner)

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        with (Path(self.path) / ".metadata").open("rb") as file:
            metadata = _MetadataUnpickler(file).load()
        if not isinstance(metadata, Metadata):
            raise ValueError(f".metadata holds {type(metadata).__name__}, not a description of tensors")
        for key, value in metadata.state_dict_metadata.items():
            if isinstance(value, BytesStorageMetadata):
                raise ValueError(f"{key} is not a tensor; other objects would have to be unpickled and are refused")
        return metadata


_CLASSES = {
    "torch.distributed.checkpoint.metadata": {
        *("Metadata", "MetadataIndex", "StorageMeta", "TensorStorageMetadata", "ChunkStorageMetadata"),
        *("BytesStorageMetadata", "TensorProperties", "_MEM_FORMAT_ENCODING"),
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.serialization": {"_get_layout"},
    "torch": {"Size", *(name for name in dir(torch) if isinstance(getattr(torch, name), torch.dtype))},
    "pathlib": {"PosixPath"},
}
"""Classes that the library's description of tensors consists of."""


class _MetadataUnpickler(pickle.Unpickler):
    """Unpickles :data:`_CLASSES` only."""

    def find_class(self, module: str, name: str) -> Any:
        if name not in _CLASSES.get(module, ()):
            raise pickle.UnpicklingError(f"{module}.{name} is not allowed in a checkpoint")
        return super().find_class(module, name)
