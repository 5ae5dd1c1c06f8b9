"""Work in threads ahead of its consumer: an ordered parallel map, and prefetching. Both hold few results at a time."""

import os
from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from typing import Any, TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")


def available_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def ordered_map(work: Callable[[Item], Result], items: Iterable[Item]) -> Generator[Result, None, None]:
    """Yields `work(item)` in the order of the items, computed by a thread per core, at most 8.

    The work should release the interpreter lock, as Arrow, NumPy and compiled loops do. At most threads + 1 results
    exist at a time. An exception is raised at the turn of its item, after the work that has started.
    """
    workers = min(available_cores(), 8)
    with ThreadPoolExecutor(workers, thread_name_prefix="cowrec-data") as pool:
        yield from in_order(lambda item: pool.submit(work, item), items, workers)


def in_order(submit: Callable[[Item], Any], items: Iterable[Item], most: int) -> Generator[Any, None, None]:
    """Yields the results of the futures `submit(item)`, in order; at most `most` + 1 exist at a time."""
    pending: deque[Any] = deque()
    try:
        for item in items:
            pending.append(submit(item))
            if len(pending) > most:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    finally:
        for future in pending:
            future.cancel()


def prefetched(make: Callable[[], Generator[Item, None, None]], capacity: int = 2) -> Generator[Item, None, None]:
    """Yields the items of `make()`. A thread prepares the next item and `capacity` more ahead.

    An exception in the thread is raised here after the preceding items. When this generator ends, is closed or is
    deleted, the thread has ended and the generator of `make()` is closed.
    """
    end = object()
    with closing(make()) as items, ThreadPoolExecutor(1, thread_name_prefix="cowrec-reader") as thread:
        pending: deque[Future[Any]] = deque(thread.submit(next, items, end) for _ in range(capacity + 1))
        try:
            while (item := pending.popleft().result()) is not end:
                pending.append(thread.submit(next, items, end))
                yield item
        finally:
            for future in pending:
                future.cancel()
