"""Micro-batching: requests that arrive while a batch is computed are computed together next, without a fixed wait."""

import asyncio
import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")
Done = Callable[[Sequence[Result] | Exception], None]
_Call = tuple[Sequence[Item], float, Done[Result]]

_SMOOTHING = 0.2
"""Weight of the last batch in the mean time for an item."""


class Late(Exception):
    """Raised for a call that was due before its batch began."""


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
        self._queue: deque[_Call[Item, Result]] = deque()
        self._waiting = 0  # items in the queue
        self._item_seconds = self._busy_since = 0.0

    @property
    def expected_wait(self) -> float:
        """Seconds until the items that wait now are computed, by the time that the last batches took for an item.

        This is the time from the arrival of requests to their answers, so it includes their HTTP and JSON.
        """
        return self._waiting * self._item_seconds

    def submit(self, items: Sequence[Item], done: Done[Result], due: float = math.inf, since: float = 0.0) -> None:
        """Computes the results of up to ``max_items`` items in one batch, later.

        Args:
            items: as above.
            done: called with the results, in the event loop: or with Late, or whatever ``compute`` raised for the
                batch. It raises nothing.
            due: time, of `time.monotonic`, at which the batch must have begun.
            since: time since which the items are handled, at most that of one read of a socket; by default now.
        """
        assert len(items) <= self._max_items
        if not self._queue:
            self._busy_since = max(self._busy_since, since) if since else time.monotonic()
            loop = asyncio.get_running_loop()
            loop.call_soon(self._run_batch, loop)
        self._queue.append((items, due, done))
        self._waiting += len(items)

    def _run_batch(self, loop: asyncio.AbstractEventLoop) -> None:
        calls: list[tuple[Sequence[Item], Done[Result]]] = []
        late: list[Done[Result]] = []
        total, now = 0, time.monotonic()
        while self._queue and total + len(self._queue[0][0]) <= self._max_items:
            items, due, done = self._queue.popleft()
            self._waiting -= len(items)
            if due >= now:
                calls.append((items, done))
                total += len(items)
            else:
                late.append(done)
        if self._queue:  # the next batch, after the loop has handled other events
            loop.call_soon(self._run_batch, loop)
        for done in late:
            done(Late())
        if calls:
            self._answer(calls)
            since, self._busy_since = self._busy_since, time.monotonic()
            self._item_seconds += _SMOOTHING * ((self._busy_since - since) / max(total, 1) - self._item_seconds)

    def _answer(self, calls: Sequence[tuple[Sequence[Item], Done[Result]]]) -> None:
        results: Sequence[Result] = ()
        failure: Exception | None = None
        try:
            results = self._compute([item for each, _ in calls for item in each])
        except Exception as error:
            failure = error
        start = 0
        for each, done in calls:
            done(failure or results[start : start + len(each)])
            start += len(each)
