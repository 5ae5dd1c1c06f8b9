"""Threads for kernels that numba compiled without the GIL."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import numpy as np
import torch

_LEAST_WORK = 1 << 15
"""Work from which several threads are faster: ids, or missed steps of rows, of about 5 ns each."""


def threads_for(work: int) -> int:
    """Number of threads for some work: that of torch, or one for little work, which ends before another wakes up."""
    return torch.get_num_threads() if work > _LEAST_WORK else 1


def balanced_groups(work: np.ndarray) -> list[np.ndarray]:
    """Splits table numbers into a group of about equal work for each thread: largest table first, to the least load."""
    threads = min(threads_for(int(work.sum())), len(work))
    if threads == 1:
        return [np.arange(len(work))]
    members: list[list[int]] = [[] for _ in range(threads)]
    load = np.zeros(len(members))
    for table in np.argsort(work, kind="stable")[::-1]:
        lightest = int(load.argmin())
        members[lightest].append(int(table))
        load[lightest] += work[table]
    return [np.array(group) for group in members if group]


@cache
def _threads(count: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(count, thread_name_prefix="cowrec-rows")


def in_threads(jobs: Sequence[Callable[[], Any]]) -> list[Any]:
    """Runs each job in its own thread and returns their results."""
    if len(jobs) == 1:
        return [jobs[0]()]
    others = [_threads(len(jobs) - 1).submit(job) for job in jobs[1:]]
    return [jobs[0](), *(other.result() for other in others)]
