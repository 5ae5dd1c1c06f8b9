"""An ordered parallel map with a bounded number of pending items."""

import os
from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")


def available_cores() -> int:
    """Returns the number of cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def ordered_map(work: Callable[[Item], Result], items: Iterable[Item]) -> Generator[Result, None, None]:
    """Yields `work(item)` in the order of the items, computed by a thread per core, at most 8.

    For work that releases the interpreter lock (Arrow, NumPy, compiled loops). At most threads + 1 results exist at a
    time. An exception is raised at its item's turn, after waiting for the work already started.
    """
    workers = min(available_cores(), 8)
    with ThreadPoolExecutor(workers, thread_name_prefix="cowrec-data") as pool:
        pending: deque[Future[Result]] = deque()
        try:
            for item in items:
                pending.append(pool.submit(work, item))
                if len(pending) > workers:
                    yield pending.popleft().result()
            while pending:
                yield pending.popleft().result()
        finally:
            for future in pending:
                future.cancel()
