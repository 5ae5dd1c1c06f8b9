"""Predictions that arrive while a batch is computed go into the next one together: no fixed wait, no lone rows."""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")


class MicroBatcher(Generic[Item, Result]):
    """Calls of one event loop, answered in batches.

    A batch is computed in the event loop's own thread, as soon as the loop has seen what has arrived; what arrives
    meanwhile waits in the sockets for the next one. A thread for it would cost more than it gives: it and the loop take
    the interpreter lock from each other at every operation of a batch.

    Args:
        compute: results of a batch of items, in their order.
        most: items in a batch, at most.
    """

    def __init__(self, compute: Callable[[Sequence[Item]], Sequence[Result]], most: int) -> None:
        self._compute, self._most = compute, most
        self._waiting: deque[tuple[Sequence[Item], asyncio.Future[Sequence[Result]]]] = deque()

    async def results(self, items: Sequence[Item]) -> Sequence[Result]:
        """The results of some items, `most` of them at most; those of one call are computed in one batch.

        Raises:
            What `compute` raised for the batch.
        """
        assert len(items) <= self._most
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Sequence[Result]] = loop.create_future()
        self._waiting.append((items, future))
        if len(self._waiting) == 1:
            loop.call_soon(self._work, loop)
        return await future

    def _work(self, loop: asyncio.AbstractEventLoop) -> None:
        calls, total = [], 0
        while self._waiting and total + len(self._waiting[0][0]) <= self._most:
            calls.append(self._waiting.popleft())
            total += len(calls[-1][0])
        if self._waiting:  # the next batch, after the loop has had its turn
            loop.call_soon(self._work, loop)
        items = [item for each, _ in calls for item in each]
        results: Sequence[Result] = ()
        failure: Exception | None = None
        try:
            results = self._compute(items)
        except Exception as error:
            failure = error
        start = 0
        for each, future in calls:
            if future.done():  # a client that went away has cancelled it
                pass
            elif failure:
                future.set_exception(failure)
            else:
                future.set_result(results[start : start + len(each)])
            start += len(each)
