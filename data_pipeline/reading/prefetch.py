"""A bounded look-ahead: a thread prepares the next items of an iterator while the consumer works on this one."""

import threading
from collections import deque
from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from typing import Generic, TypeVar

Item = TypeVar("Item")


class _Channel(Generic[Item]):
    """Hands items from one producer to one consumer, at most `capacity` waiting; either side may end it."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._items: deque[Item] = deque()
        self._changed = threading.Condition()
        self._finished = False
        self._abandoned = False
        self._error: BaseException | None = None

    def put(self, item: Item) -> bool:
        """Waits for room. False once the consumer is gone: the producer should stop."""
        with self._changed:
            self._changed.wait_for(lambda: len(self._items) < self._capacity or self._abandoned)
            if self._abandoned:
                return False
            self._items.append(item)
            self._changed.notify_all()
            return True

    def finish(self, error: BaseException | None = None) -> None:
        with self._changed:
            self._finished, self._error = True, error
            self._changed.notify_all()

    def abandon(self) -> None:
        with self._changed:
            self._abandoned = True
            self._items.clear()
            self._changed.notify_all()

    def __iter__(self) -> Iterator[Item]:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: bool(self._items) or self._finished)
                if not self._items:
                    if self._error is not None:
                        raise self._error
                    return
                item = self._items.popleft()
                self._changed.notify_all()
            yield item


def prefetched(make: Callable[[], Generator[Item, None, None]], capacity: int = 2) -> Generator[Item, None, None]:
    """Yields what `make()` yields, prepared up to `capacity` items ahead by a thread.

    An exception in the thread is raised here, after the items before it. The thread is gone, and the generator it ran
    is closed, once this one has ended, been closed or been dropped.
    """
    channel: _Channel[Item] = _Channel(capacity)

    def produce() -> None:
        try:
            with closing(make()) as items:
                for item in items:
                    if not channel.put(item):
                        break
        except BaseException as error:  # whatever it is, it belongs to the consumer
            channel.finish(error)
        else:
            channel.finish()

    thread = threading.Thread(target=produce, name="cowrec-reader", daemon=True)
    thread.start()
    try:
        yield from channel
    finally:
        channel.abandon()
        thread.join()
