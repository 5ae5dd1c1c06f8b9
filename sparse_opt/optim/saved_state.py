"""State of EmbeddingAdam as tensors for torch.distributed.checkpoint."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torchrec.distributed.embeddingbag import ShardedEmbeddingBagCollection

from cowrec.sparse_opt.tbe.column_shards import copy_from_first_shards
from cowrec.sparse_opt.tbe.sharded_state import sharded_like_weights

from .lookup_adam import LookupAdam
from .step_history import StepHistory


def optimizer_state(
    lookups: Sequence[LookupAdam], collections: Sequence[ShardedEmbeddingBagCollection], history: StepHistory
) -> dict[str, Any]:
    """Collects the state that :meth:`EmbeddingAdam.state_dict` returns. All ranks must call together.

    Args:
        lookups: lookups of this rank.
        collections: all collections of the model, whose state_dict must not change rows meanwhile.
        history: the optimizer's steps; used where rows are replayed.

    Raises:
        ValueError: lookups that are replayed have not taken the same steps.
    """
    steps, lrs = _agreed_steps(lookups, history)
    tbes = [adam.lookup for adam in lookups]
    state: dict[str, Any] = {"step": torch.tensor(steps)}
    if history.is_replayed:
        if any(adam.step != steps for adam in lookups):
            raise ValueError(
                f"lookups have taken {[adam.step for adam in lookups]} of {steps} steps; rows can only be"
                " replayed where every table takes part in every training step"
            )
        state["lrs"] = lrs
        last_steps = [adam.replay.last_step for adam in lookups if adam.replay]
        per_row = sharded_like_weights(collections, tbes, last_steps, torch.int32, per_row=True)
        state |= {f"{table}.last_step": value for table, value in per_row.items()}
    for moment in ("exp_avg", "exp_avg_sq"):
        flats = [getattr(adam, moment) for adam in lookups]
        moments = sharded_like_weights(collections, tbes, flats, torch.float32)
        state |= {f"{table}.{moment}": value for table, value in moments.items()}
    return state


def load_optimizer_state(
    own: Mapping[str, Any],
    given: Mapping[str, Any],
    lookups: Sequence[LookupAdam],
    history: StepHistory,
    column_ranks: Mapping[str, Sequence[int]],
) -> None:
    """Copies a state into :func:`optimizer_state`'s tensors, which are the optimizer's memory, and sets its steps.

    Args:
        own: state of the optimizer.
        given: state to load, with the same sharding.
        lookups, history: the optimizer's.
        column_ranks: ranks of each table's column shards.

    Raises:
        ValueError: a table or moment is missing.
    """
    missing = sorted(own.keys() - given.keys())
    if missing:
        raise ValueError(f"the optimizer's state has no {missing[0]!r}; it is of another model or absent_rows")
    for key, value in own.items():
        if isinstance(value, ShardedTensor):
            for shard, given_shard in zip(value.local_shards(), given[key].local_shards(), strict=True):
                shard.tensor.copy_(given_shard.tensor)
        elif "." in key:
            value.copy_(given[key])
    for adam in lookups:
        adam.step = int(given["step"])
    if "lrs" in own:
        history.replace(given["lrs"].numpy())
        last_steps = [
            (shard, adam.replay.last_step_of(table))
            for adam in lookups
            for table, shard in enumerate(adam.lookup.shards)
            if adam.replay
        ]
        copy_from_first_shards(column_ranks, last_steps)


def _agreed_steps(lookups: Sequence[LookupAdam], history: StepHistory) -> tuple[int, Tensor]:
    """Steps taken and their learning rates (float64 [steps]), also on ranks that hold no table and took none."""
    taken = max((adam.step for adam in lookups), default=0)
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return taken, history.lrs.clone()
    device = history.schedule.step_sizes.device
    steps = torch.tensor(taken, device=device)
    dist.all_reduce(steps, dist.ReduceOp.MAX)
    lrs = torch.full((int(steps),), -1.0, dtype=torch.float64, device=device)
    lrs[: len(history.lrs)] = history.lrs.to(device)
    dist.all_reduce(lrs, dist.ReduceOp.MAX)
    return int(steps), lrs.cpu()
