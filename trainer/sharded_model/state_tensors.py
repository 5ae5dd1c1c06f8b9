"""Tensors of a training state beside the model's: random generators; and the check that a state to save is finite."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed._shard.sharded_tensor import ShardedTensor

from cowrec.trainer.runtime.processes import Process


def random_state(process: Process) -> dict[str, Any]:
    """State of this process's random generators, keyed by its rank."""
    state = {"cpu": torch.get_rng_state()}
    if process.device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(process.device)
    return {f"random_{process.rank}_of_{process.world_size}": state}


def not_finite(state: Mapping[str, Any], process: Process) -> str:
    """Name of a weight or moment that is not finite on some process; "" if all are finite, on every process.

    Reads all of the state once, and copies none of it. All processes call it together.
    """
    # A float64 sum of float32 numbers is finite only where they are; it needs no mask as large as the table.
    found = next((name for name, each in _floating(state) if not each.sum(dtype=torch.float64).isfinite()), "")
    if process.world_size == 1:
        return found
    names: list[str] = [""] * process.world_size
    dist.all_gather_object(names, found)
    return next(filter(None, names), "")


def _floating(state: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Tensor]]:
    """Names and values of the floating point tensors of a state, of sharded ones this process's shards."""
    for key, value in state.items():
        name = f"{path} {key}".strip()
        if isinstance(value, dict):
            yield from _floating(value, name)
        elif isinstance(value, ShardedTensor):
            yield from ((name, shard.tensor) for shard in value.local_shards())
        elif isinstance(value, Tensor) and value.is_floating_point():
            yield name, value
