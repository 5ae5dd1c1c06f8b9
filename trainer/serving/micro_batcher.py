"""Micro-batching: requests that arrive while a batch is computed are computed together next, without a fixed wait."""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")


class MicroBatcher(Generic[Item, Result]):
    """Answers the calls of one event loop in batches.

    A batch is computed in the event loop's own thread, as soon as the loop has read what has arrived; later requests
    wait in the sockets for the next batch. A separate thread would cost more than it saves: it and the loop would
    compete for the interpreter lock at every operation of a batch.

    Args:
        compute: computes the results of a batch of items, in their order.
        max_items: items in a batch at most.
    """

    def __init__(self, compute: Callable[[Sequence[Item]], Sequence[Result]], max_items: int) -> None:
        self._compute, self._max_items = compute, max_items
        self._queue: deque[tuple[Sequence[Item], asyncio.Future[Sequence[Result]]]] = deque()

    async def results(self, items: Sequence[Item]) -> Sequence[Result]:
        """Results of up to ``max_items`` items, which are computed in one batch.

        Raises:
            Exception: whatever ``compute`` raised for the batch.
        """
        assert len(items) <= self._max_items
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Sequence[Result]] = loop.create_future()
        self._queue.append((items, future))
        if len(self._queue) == 1:
            loop.call_soon(self._run_batch, loop)
        return await future

    def _run_batch(self, loop: asyncio.AbstractEventLoop) -> None:
        calls, total = [], 0
        while self._queue and total + len(self._queue[0][0]) <= self._max_items:
            calls.append(self._queue.popleft())
            total += len(calls[-1][0])
        if self._queue:  # the next batch, after the loop has handled other events
            loop.call_soon(self._run_batch, loop)
        items = [item for each, _ in calls for item in each]
        results: Sequence[Result] = ()
        failure: Exception | None = None
        try:
            results = self._compute(items)
        except Exception as error:
            failure = error
        start = 0
        for each, future in calls:
            if future.done():  # cancelled, as the client has disconnected
                pass
            elif failure:
                future.set_exception(failure)
            else:
                future.set_result(results[start : start + len(each)])
            start += len(each)
