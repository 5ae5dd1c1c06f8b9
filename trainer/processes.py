"""The process group of a run: torchrun's where it launched us, otherwise a group of one. One code path for both."""

import ctypes
import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class Process:
    """This process among the run's.

    Attributes:
        rank, world_size: as in torch.distributed.
        local_world_size: processes on this machine.
        launched: torchrun started this process, and will pass on every signal that it gets itself.
        device: where this process trains.
    """

    rank: int
    world_size: int
    local_world_size: int
    launched: bool
    device: torch.device

    @property
    def is_first(self) -> bool:
        return self.rank == 0


def launched_rank() -> int:
    """This process's rank as torchrun announced it, 0 without torchrun; known before any group is joined."""
    return int(os.environ.get("RANK", "0"))


def launched_world_size() -> int:
    """The run's processes as torchrun announced them, 1 without torchrun."""
    return int(os.environ.get("WORLD_SIZE", "1"))


@contextmanager
def process_group(device: str) -> Iterator[Process]:
    """Joins the process group (nccl on CUDA, gloo on CPU) and leaves it where no error ends it.

    Args:
        device: "cpu", "cuda" or "auto".

    Raises:
        ValueError: "cuda" without a GPU for this process, or processes that do not find each other.
    """
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    kind = device if device != "auto" else ("cuda" if torch.cuda.is_available() else "cpu")
    if kind == "cuda" and not torch.cuda.is_available():
        raise ValueError('train.device = "cuda" but torch sees no GPU; set train.device = "cpu" or check the driver')
    if kind == "cuda" and local_rank >= torch.cuda.device_count():
        raise ValueError(
            f"process {local_rank} of this machine has no GPU, there are {torch.cuda.device_count()};"
            " start at most one process for each with --nproc-per-node"
        )
    place = torch.device("cuda", local_rank) if kind == "cuda" else torch.device("cpu")
    if kind == "cuda":
        torch.cuda.set_device(place)
    launched = "RANK" in os.environ and "WORLD_SIZE" in os.environ
    rank, world_size = (launched_rank(), launched_world_size()) if launched else (0, 1)
    local_world_size = int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
    if local_world_size == world_size:
        _meet_on_loopback()
    if kind == "cpu":
        _keep_freed_memory()
    _join(kind, place, None if launched else dist.HashStore())
    process = Process(rank, world_size, local_world_size, launched, place)
    try:
        yield process
    except BaseException:
        # Other processes may be waiting in the group for this one, which closing it would then wait for.
        if process.world_size == 1:
            dist.destroy_process_group()
        raise
    dist.destroy_process_group()


def on_first(process: Process, action: Callable[[], None]) -> None:
    """Runs ``action`` on the first process while the others wait; where it fails, all of them raise its error."""
    failure: list[Exception | None] = [None]
    if process.is_first:
        try:
            action()
        except (ValueError, OSError) as error:
            failure = [error]
    dist.broadcast_object_list(failure, src=0)
    if failure[0] is not None:
        raise failure[0]


def _keep_freed_memory() -> None:
    """Has glibc keep large freed blocks: by default each large tensor is mapped anew, at a page fault per 4 KiB.

    Seen to save up to a third of the step at batches of 32K and above. Elsewhere than on glibc nothing happens.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, 1 << 30)
        mallopt(_M_TRIM_THRESHOLD, (1 << 31) - 1)


# From glibc's malloc.h, whose values are part of its binary interface.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3


def _join(kind: str, device: torch.device, store: dist.Store | None) -> None:
    backend = "nccl" if kind == "cuda" else "gloo"
    alone: dict[str, Any] = {} if store is None else {"store": store, "rank": 0, "world_size": 1}
    try:
        dist.init_process_group(backend, device_id=device if kind == "cuda" else None, **alone)
    except RuntimeError as error:
        first_line = str(error).partition("\n")[0]
        raise ValueError(
            f"the processes cannot join over {backend}: {first_line}; name the network interface that they share with"
            " GLOO_SOCKET_IFNAME (and NCCL_SOCKET_IFNAME), as `ip addr` lists it"
        ) from error


def _meet_on_loopback() -> None:
    """Processes of one machine need no network, and no host name that resolves: gloo would look for both."""
    for _, name in socket.if_nameindex():
        if name in ("lo", "lo0"):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
