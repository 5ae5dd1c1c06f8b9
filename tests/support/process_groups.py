"""Processes of a test, and their default process group."""

import multiprocessing
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing


def in_processes(function: Callable[..., None], arguments: tuple[Any, ...], processes: int) -> None:
    """Calls ``function(rank, *arguments)`` in new processes of one thread each; fails if one of them fails.

    They are forked from a server that has imported the libraries, which takes a process longer than most tests. Not
    with a GPU: no process can use it that was forked after FBGEMM has asked for it.
    """
    method = "spawn" if torch.cuda.is_available() else "forkserver"
    multiprocessing.set_forkserver_preload(["cowrec.trainer.training.loop", "torch.distributed.checkpoint"])
    torch.multiprocessing.start_processes(_in_one_thread, (function, *arguments), processes, start_method=method)


def _in_one_thread(rank: int, function: Callable[..., None], *arguments: Any) -> None:
    torch.set_num_threads(1)
    function(rank, *arguments)


@contextmanager
def process_group(rank: int, world_size: int, folder: str, backend: str = "gloo") -> Iterator[None]:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group(backend, init_method=f"file://{folder}/store", rank=rank, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()
    if world_size > 1:
        # Each rank is a process, which ends here: a thread of gloo that releases a Python object during Python's
        # shutdown would abort it.
        sys.stdout.flush()
        os._exit(0)
