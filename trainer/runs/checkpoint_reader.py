"""Reading of checkpoints: tensors only, so that a file from an untrusted source runs no code.

Tensors are read as tensors. torch.distributed.checkpoint describes them in a pickle, which is read by an unpickler that
accepts only the classes of such descriptions.
"""

import logging
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata

from cowrec.trainer.runtime.processes import Process, on_first

from .checkpoint_folder import Progress, best_intact, newest_intact, step_intact

logger = logging.getLogger(__name__)


def find_checkpoint(
    folder: Path, process: Process, say: Callable[[str], None], *, best_by: str | None = None, step: int | None = None
) -> tuple[Path, Progress] | None:
    """Newest intact checkpoint of a run, or another one; None where there is none. All processes call together.

    The first process verifies the files for all.

    Args:
        folder: of the run's checkpoints.
        process: this process.
        say: receives a message for each checkpoint that is skipped.
        best_by: "auc" or "logloss": the checkpoint of the best epoch instead of the newest.
        step: the checkpoint of this step.

    Raises:
        ValueError: all checkpoints are damaged, or one is of another format; or that of the step is missing or damaged.
    """
    found: list[tuple[Path, Progress] | None] = [None]

    def look() -> None:
        if step is not None:
            found[0] = step_intact(folder, step)
        else:
            found[0] = best_intact(folder, best_by, say) if best_by else newest_intact(folder, say)

    on_first(process, look)
    dist.broadcast_object_list(found, src=0)
    return found[0]


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


def read_checkpoint(path: Path, state: dict[str, Any]) -> None:
    """Reads a checkpoint into the tensors of ``state``, in place; they may be sharded in any way."""
    reader = _TensorReader(path)
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


class _TensorReader(FileSystemReader):
    """Reads tensors and refuses every other object."""

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
