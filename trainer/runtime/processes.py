"""The processes of a run: their group, which torchrun launches or which has one process, and what they exchange."""

import ctypes
import itertools
import logging
import os
import select
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor

from cowrec.errors import UserError

from .environment import launched_rank, launched_world_size, quiet_libraries

T = TypeVar("T")
CHUNK = 1 << 20
"""Columns that are sent at a time, which bounds what the receiver holds."""
logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Process:
    """One process of a run.

    Attributes:
        rank, world_size: as in torch.distributed.
        local_world_size: processes on this machine.
        launched: torchrun started this process and forwards its signals; its end counts as SIGTERM.
        timeout: longest wait for another process.
    """

    rank: int
    world_size: int
    local_world_size: int
    launched: bool
    device: torch.device
    timeout: timedelta = timedelta(minutes=10)

    @property
    def is_first(self) -> bool:
        return self.rank == 0


@contextmanager
def process_group(device: str, timeout_seconds: float = 600.0) -> Iterator[Process]:
    """Joins the process group (nccl on CUDA, gloo on CPU); leaves it at the end, unless an error occurs.

    ``device`` is "cpu", "cuda" or "auto". A process that keeps others waiting for ``timeout_seconds`` counts as hung.

    Raises UserError: this process has no GPU for "cuda", processes cannot connect, or a group exists already.
    """
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    kind = device if device != "auto" else ("cuda" if torch.cuda.is_available() else "cpu")
    if kind == "cuda" and not torch.cuda.is_available():
        raise UserError('train.device = "cuda" but torch sees no GPU; set train.device = "cpu" or check the driver')
    if kind == "cuda" and local_rank >= torch.cuda.device_count():
        raise UserError(
            f"process {local_rank} of this machine has no GPU, there are {torch.cuda.device_count()};"
            " start at most one process per GPU with --nproc-per-node"
        )
    own_device = torch.device("cuda", local_rank) if kind == "cuda" else torch.device("cpu")
    if kind == "cuda":
        torch.cuda.set_device(own_device)
    else:
        _keep_freed_memory()
    launched = "RANK" in os.environ and "WORLD_SIZE" in os.environ
    rank, world_size = (launched_rank(), launched_world_size()) if launched else (0, 1)
    local_world_size = int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
    process = Process(rank, world_size, local_world_size, launched, own_device, timedelta(seconds=timeout_seconds))
    if launched:
        _end_with_launcher()
    with quiet_libraries(), _loopback() if local_world_size == world_size else nullcontext():
        hook = sys.excepthook  # torch wraps it at each joining
        _join(process)
        try:
            yield process
        except BaseException:
            # Closing the group would wait for processes that in turn wait for this one.
            if process.world_size == 1:
                dist.destroy_process_group()
            raise
        finally:
            sys.excepthook = hook
        dist.destroy_process_group()


def on_first(process: Process, action: Callable[[], object]) -> None:
    """Runs ``action`` on the first process while the others wait; if it fails, all of them raise its error."""

    def run() -> None:
        action()

    from_first(process, run)


def from_first(process: Process, action: Callable[[], T]) -> T:
    """Runs ``action`` as :func:`on_first` does; returns its result, copied, on all processes."""
    outcome: list[Any] = [None, None]
    if process.is_first:
        try:
            outcome[0] = action()
        except (ValueError, OSError) as error:
            outcome[1] = error
    dist.broadcast_object_list(outcome, src=0)
    result, failure = outcome
    if failure is not None:
        raise failure
    return cast("T", result)


def gathered(values: Tensor, process: Process, group: dist.ProcessGroup | None = None) -> Tensor:
    """Joins the values of all processes, [n, ...] where n may differ, by rank on the first one; returns them there.

    The others get their own values. All processes call together.
    """
    if process.world_size == 1:
        return values
    counts = values.new_empty(process.world_size, dtype=torch.int64)
    dist.all_gather_into_tensor(counts, counts.new_tensor([len(values)]), group=group)
    sizes = counts.tolist()
    padded = values.new_zeros(max(sizes), *values.shape[1:])
    padded[: len(values)] = values
    parts = [torch.empty_like(padded) for _ in sizes] if process.is_first else None
    dist.gather(padded, parts, 0, group=group)
    return torch.cat([part[:n] for part, n in zip(parts, sizes, strict=True)]) if parts else values


class Peers:
    """Exchange on the CPU, in a gloo group of all processes, apart from the model's own communication.

    All processes call each method together. A process alone exchanges nothing.
    """

    def __init__(self, process: Process) -> None:
        self._process, self.rank, self.count = process, process.rank, process.world_size
        self._group: Any = None if self.count == 1 else dist.new_group(backend="gloo", timeout=process.timeout)

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def scattered(self, parts: list[Any] | None) -> Any:
        """Returns this process's part, copied, of a list that the first process has; the others pass None."""
        if parts is not None and self.count == 1:
            return parts[0]
        own: list[Any] = [None]
        dist.scatter_object_list(own, parts, 0, group=self._group)
        return own[0]

    def joined(self, values: Tensor) -> Tensor:
        """Sums float32 values of one shape, each of which is 0 on all processes but one, bit for bit.

        Returns the sum on the first process, and [0, ...] on the others.
        """
        if self.count > 1:
            dist.reduce(values.view(torch.int32), 0, group=self._group)
        return values if self.is_first else values[:0]

    def gathered(self, values: Tensor) -> Tensor:
        return gathered(values, self._process, self._group)

    def all_columns(self, own: Tensor) -> Iterator[Tensor]:
        """Yields the columns of all processes, by rank, in chunks int64 [k, n]; ``own`` is int64 [k, m]."""
        if self.count == 1:
            yield own
            return
        counts = torch.empty(self.count, dtype=torch.int64)
        dist.all_gather_into_tensor(counts, torch.tensor([own.shape[1]]), group=self._group)
        for rank, count in enumerate(counts.tolist()):
            for first in range(0, count, CHUNK):
                size = min(CHUNK, count - first)
                chunk = torch.empty(len(own), size, dtype=torch.int64)
                if rank == self.rank:
                    chunk.copy_(own[:, first : first + size])
                dist.broadcast(chunk, rank, group=self._group)
                yield chunk

    def columns_on_first(self, own: Tensor) -> Tensor:
        """Joins the columns of all processes, int64 [k, n], as :func:`gathered` does rows."""
        return self.gathered(own.T).T


def _keep_freed_memory() -> None:
    """Makes glibc keep large freed blocks: by default it maps every new large tensor, with a page fault per 4 KiB.

    It saved up to a third of the step's time at batches of 32K and above.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, 1 << 30)
        mallopt(_M_TRIM_THRESHOLD, -1)  # never


# From glibc's malloc.h, whose values are part of its binary interface.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3


def _store_of_next_group(process: Process) -> dist.Store:
    """Returns the part of the launched processes' store for the next group that they join.

    torchrun keeps one store over its restarts, which still has the addresses of killed processes. On one machine the
    count of restarts separates them. Several machines count differently: there TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
    must request a new store for each attempt.
    """
    of_one_machine = process.local_world_size == process.world_size
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT") if of_one_machine else None
    return dist.PrefixStore(f"attempt_{attempt}/group_{next(_groups)}", _launched_store(process.timeout))


@cache
def _launched_store(timeout: timedelta) -> dist.Store:
    """Opens torchrun's store, or rank 0's, which stays open for processes that connect later."""
    store: dist.Store = next(dist.rendezvous("env://", timeout=timeout))[0]
    return store


def _join(process: Process) -> None:
    if dist.is_initialized():
        raise UserError(
            "this process has a process group already, of another run or of your program; call"
            " torch.distributed.destroy_process_group() first, or use another process"
        )
    on_cuda = process.device.type == "cuda"
    backend = "nccl" if on_cuda else "gloo"
    try:
        dist.init_process_group(
            backend,
            store=_store_of_next_group(process) if process.launched else dist.HashStore(),
            rank=process.rank,
            world_size=process.world_size,
            timeout=process.timeout,
            device_id=process.device if on_cuda else None,
        )
        if process.world_size > 1 and not on_cuda:
            # A process that ends at once, as after a refusal, would take rank 0's store from those that still connect.
            dist.barrier()
    except RuntimeError as error:
        first_line = str(error).partition("\n")[0]
        raise UserError(
            f"the processes cannot connect over {backend}: {first_line}; set GLOO_SOCKET_IFNAME (and"
            " NCCL_SOCKET_IFNAME) to the network interface that they share; `ip addr` lists them"
        ) from error


@contextmanager
def _loopback() -> Iterator[None]:
    """Makes gloo use the loopback interface: one machine then needs no network and no resolvable host name."""
    names = {name for _, name in socket.if_nameindex()} & {"lo", "lo0"}
    if _GLOO_INTERFACE in os.environ or not names:
        yield
        return
    os.environ[_GLOO_INTERFACE] = names.pop()
    try:
        yield
    finally:
        del os.environ[_GLOO_INTERFACE]


_GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"
_groups = itertools.count()
"""Numbers of the groups that this process has joined."""


@cache
def _end_with_launcher() -> None:
    """Sends SIGTERM to this process once the process that launched it has ended, even by a kill; on Linux alone.

    A run whose torchrun was killed would otherwise go on unattended, and keep its folder from the run that replaces it.
    """
    try:
        launcher = os.pidfd_open(os.getppid())
    except (AttributeError, OSError):  # not Linux, or the launcher is outside this container
        return

    def watch() -> None:
        select.select([launcher], [], [])
        logger.warning("the process that launched this one has ended; stopping")
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, name="cowrec-launcher", daemon=True).start()
