"""The process group of a run: torchrun's where it launched us, otherwise a group of one. One code path for both."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class Process:
    """This process among the run's.

    Attributes:
        rank, world_size: as in torch.distributed.
        local_world_size: processes on this machine.
        device: where this process trains.
    """

    rank: int
    world_size: int
    local_world_size: int
    device: torch.device

    @property
    def is_first(self) -> bool:
        return self.rank == 0


@contextmanager
def process_group(device: str) -> Iterator[Process]:
    """Joins the process group (nccl on CUDA, gloo on CPU) and leaves it at the end.

    Args:
        device: "cpu", "cuda" or "auto".

    Raises:
        ValueError: "cuda" without a GPU that torch can use.
    """
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError('train.device = "cuda" but torch sees no GPU; set train.device = "cpu" or check the driver')
    kind = device if device != "auto" else ("cuda" if torch.cuda.is_available() else "cpu")
    launched = "RANK" in os.environ and "WORLD_SIZE" in os.environ
    rank = int(os.environ["RANK"]) if launched else 0
    world_size = int(os.environ["WORLD_SIZE"]) if launched else 1
    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    place = torch.device("cuda", local_rank) if kind == "cuda" else torch.device("cpu")
    if kind == "cuda":
        torch.cuda.set_device(place)
    backend = "nccl" if kind == "cuda" else "gloo"
    if launched:
        dist.init_process_group(backend)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield Process(rank, world_size, int(os.environ.get("LOCAL_WORLD_SIZE", world_size)), place)
    finally:
        dist.destroy_process_group()
