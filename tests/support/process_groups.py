"""Processes of a test, and their default process group."""

import faulthandler
import gc
import multiprocessing
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing

SECONDS_TO_WAIT = 300
"""For another process in a collective operation; before that a process writes where it waits to stderr."""


def in_processes(function: Callable[..., None], arguments: tuple[Any, ...], processes: int) -> None:
    """Calls ``function(rank, *arguments)`` in new processes of one thread each; fails if one of them fails.

    They are forked from a server that has imported the libraries, which takes a process longer than most tests. Not
    with a GPU: no process can use it that was forked after FBGEMM has asked for it.
    """
    torch.multiprocessing.start_processes(
        _in_one_thread, (function, *arguments), processes, start_method=prepared_method()
    )


def start_in_processes(
    function: Callable[..., None], arguments: Sequence[tuple[Any, ...]]
) -> list[multiprocessing.process.BaseProcess]:
    """Starts processes as :func:`in_processes` does, and returns them; each has arguments of its own."""
    context: Any = multiprocessing.get_context(prepared_method())
    processes = [
        context.Process(target=_in_one_thread, args=(rank, function, *own), daemon=True)
        for rank, own in enumerate(arguments)
    ]
    for process in processes:
        process.start()
    return processes


def prepared_method() -> str:
    """Start method of processes, by which they have the libraries at once where that is possible."""
    method = "spawn" if torch.cuda.is_available() else "forkserver"
    multiprocessing.set_forkserver_preload(
        [f"cowrec.trainer.{name}" for name in ("cli.main", "online.loop", "serving.server")]
        + [f"torch.distributed.{name}" for name in ("checkpoint", "run")]
    )
    return method


def _in_one_thread(rank: int, function: Callable[..., None], *arguments: Any) -> None:
    gc.freeze()  # imported modules, through which a search takes longer than most tests
    torch.set_num_threads(1)
    faulthandler.dump_traceback_later(SECONDS_TO_WAIT * 0.8)
    function(rank, *arguments)


@contextmanager
def process_group(rank: int, world_size: int, folder: str, backend: str = "gloo") -> Iterator[None]:
    """Joins the default process group. Several processes meet in ``folder``, each time in another one."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    store = dist.HashStore() if world_size == 1 else dist.FileStore(f"{folder}/store", world_size)
    wait = timedelta(seconds=SECONDS_TO_WAIT)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=wait)
    dist.barrier()  # a process that ended soon would close connections that others still make
    try:
        yield
    finally:
        dist.destroy_process_group()
    if world_size > 1:
        # Each rank is a process, which ends here: a thread of gloo that releases a Python object during Python's
        # shutdown would abort it.
        sys.stdout.flush()
        os._exit(0)
