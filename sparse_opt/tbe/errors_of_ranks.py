"""Refusals that one rank finds by itself and all ranks raise, because the others would wait for it forever."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn

from .discovery import sharded_collections


@contextmanager
def raised_on_all_ranks(model: nn.Module) -> Iterator[None]:
    """Raises a ValueError within it on all ranks that hold the model. They must enter it together.

    Nothing within it may wait for other ranks.
    """
    error: ValueError | None = None
    try:
        yield
    except ValueError as found:
        error = found
    group = next((each._env.process_group for each in sharded_collections(model).values()), None)
    if group is not None and group.size() > 1:
        device = torch.device("cuda", torch.cuda.current_device()) if dist.get_backend(group) == "nccl" else "cpu"
        refusing = torch.tensor(group.rank() + 1 if error else 0, device=device)
        dist.all_reduce(refusing, dist.ReduceOp.MAX, group=group)
        if refusing:
            message = [str(error)]
            source = dist.get_global_rank(group, int(refusing) - 1)
            dist.broadcast_object_list(message, source, group=group)
            error = error or ValueError(f"rank {source}: {message[0]}")
    if error:
        raise error
