"""Checkpoints: the whole state of a run through torch.distributed.checkpoint, written beside and then renamed."""

import shutil
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.optim import Optimizer
from torchrec.distributed import DistributedModelParallel

from cowrec.sparse_opt import EmbeddingAdam

_PREFIX = "step_"


def save_checkpoint(folder: Path, step: int, state: dict[str, Any], *, keep: int) -> Path:
    """Writes ``folder/step_N``; it appears whole or not at all, and the oldest beyond ``keep`` go. All ranks call."""
    final = folder / f"{_PREFIX}{step:09d}"
    partial = folder / f"{final.name}.partial"
    if dist.get_rank() == 0:
        shutil.rmtree(partial, ignore_errors=True)
        folder.mkdir(parents=True, exist_ok=True)
    dist.barrier()
    dcp.save(state, checkpoint_id=partial)
    if dist.get_rank() == 0:
        shutil.rmtree(final, ignore_errors=True)
        partial.rename(final)
        for old in list_checkpoints(folder)[:-keep]:
            shutil.rmtree(old)
    dist.barrier()
    return final


def list_checkpoints(folder: Path) -> list[Path]:
    """The complete checkpoints of a run, oldest first."""
    return sorted(each for each in folder.glob(f"{_PREFIX}*") if each.suffix != ".partial")


def load_model(folder: Path, model: nn.Module, replayed: EmbeddingAdam | None = None) -> Path:
    """Loads the newest checkpoint's weights into a sharded model in place; returns its path. All ranks call.

    Args:
        folder: of a run's checkpoints.
        model: with tables like the run's.
        replayed: the tables' optimizer where rows of the checkpoint may be behind; it then brings them up to date.

    Raises:
        ValueError: there is no checkpoint, it is damaged, or it does not fit the model.
    """
    found = list_checkpoints(folder)
    if not found:
        raise ValueError(f"no checkpoint in {folder}; train the run first")
    try:
        if replayed:
            _load_behind(found[-1], model, replayed)
        else:
            state = {"model": model.state_dict()}
            dcp.load(state, checkpoint_id=found[-1])
            model.load_state_dict(state["model"])
    # Damaged files raise whatever their decoder does, and CheckpointException is not an Exception.
    except (CheckpointException, Exception) as error:
        raise ValueError(
            f"{found[-1]} is damaged or of another model ({_cause(error)}); remove it to use the checkpoint before it"
        ) from error
    return found[-1]


def _load_behind(checkpoint: Path, model: nn.Module, replayed: EmbeddingAdam) -> None:
    """Weights as they were stored, and how far each row had come."""
    progress = {"progress": {"step": torch.tensor(0)}}
    dcp.load(progress, checkpoint_id=checkpoint)
    replayed.steps = int(progress["progress"]["step"])
    with replayed.as_stored():
        state = {"model": model.state_dict(), "embedding_optimizer": replayed.state_dict()}
        dcp.load(state, checkpoint_id=checkpoint)
        model.load_state_dict(state["model"])
        replayed.load_state_dict(state["embedding_optimizer"])


def run_state(
    model: DistributedModelParallel,
    dense_optimizer: Optimizer,
    embedding_optimizer: EmbeddingAdam | None,
    *,
    step: int,
    epoch: int,
) -> dict[str, Any]:
    """Everything a checkpoint holds: weights, moments of both optimizers, and the place in the data.

    Rows that are behind stay so, and the embedding optimizer's state says how far they are.
    """
    with embedding_optimizer.as_stored() if embedding_optimizer else nullcontext():
        weights = model.state_dict()
        embedding = embedding_optimizer.state_dict() if embedding_optimizer else model.fused_optimizer.state_dict()
    return {
        "model": weights,
        "embedding_optimizer": embedding,
        "dense_optimizer": dense_optimizer.state_dict(),
        "progress": {"step": torch.tensor(step), "epoch": torch.tensor(epoch)},
    }


def _cause(error: BaseException) -> str:
    """The first failure of a rank, without the tracebacks that the library puts into its message."""
    if isinstance(error, CheckpointException):
        error = next(iter(error.failures.values()))[0]
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
