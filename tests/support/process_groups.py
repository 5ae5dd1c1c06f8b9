"""The default process group of a test's processes."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist


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
