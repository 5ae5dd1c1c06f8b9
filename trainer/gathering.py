"""Predictions that arrive while a batch is computed go into the next one together: no fixed wait, no lone rows."""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Generic, TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")


class Gathering(Generic[Item, Result]):
    """Calls of one event loop, answered in batches by one thread.

    An item that comes while the thread is idle is computed at once; those that come meanwhile wait for the batch under
    way, and no longer, unless more than `most` wait.

    Args:
        compute: results of a batch of items, in their order; called in the thread.
        most: items in a batch, at most.
    """

    def __init__(self, compute: Callable[[Sequence[Item]], Sequence[Result]], most: int) -> None:
        self._compute, self._most = compute, most
        self._waiting: deque[tuple[Sequence[Item], asyncio.Future[Sequence[Result]]]] = deque()
        self._task: asyncio.Task[None] | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="cowrec-predict")

    async def results(self, items: Sequence[Item]) -> Sequence[Result]:
        """The results of some items, `most` of them at most; those of one call are computed in one batch.

        Raises:
            What `compute` raised for the batch.
        """
        assert len(items) <= self._most
        future: asyncio.Future[Sequence[Result]] = asyncio.get_running_loop().create_future()
        self._waiting.append((items, future))
        if self._task is None:
            self._task = asyncio.create_task(self._work())
        return await future

    def close(self) -> None:
        """Waits for the batch under way."""
        self._thread.shutdown()

    async def _work(self) -> None:
        loop = asyncio.get_running_loop()
        while self._waiting:
            calls, total = [self._waiting.popleft()], 0
            total = len(calls[0][0])
            while self._waiting and total + len(self._waiting[0][0]) <= self._most:
                calls.append(self._waiting.popleft())
                total += len(calls[-1][0])
            items = [item for each, _ in calls for item in each]
            try:
                results = await loop.run_in_executor(self._thread, self._compute, items)
            except Exception as error:
                for _, future in calls:
                    if not future.done():
                        future.set_exception(error)
                continue
            start = 0
            for each, future in calls:
                if not future.done():  # a client that went away has cancelled it
                    future.set_result(results[start : start + len(each)])
                start += len(each)
        self._task = None
