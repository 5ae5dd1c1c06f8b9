"""Bounded prefetching: a thread prepares the next items of an iterator while the consumer processes the current one."""

import threading
from collections import deque
from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from typing import Generic, TypeVar

Item = TypeVar("Item")


class _Channel(Generic[Item]):
    """Queue from one producer to one consumer with at most `capacity` items, which either side may close."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._items: deque[Item] = deque()
        self._changed = threading.Condition()
        self._finished = False
        self._abandoned = False
        self._error: BaseException | None = None

    def put(self, item: Item) -> bool:
        """Adds an item once there is room. Returns False if the consumer has stopped, and so should the producer."""
        with self._changed:
            self._changed.wait_for(lambda: len(self._items) < self._capacity or self._abandoned)
            if self._abandoned:
                return False
            self._items.append(item)
            self._changed.notify_all()
            return True

    def finish(self, error: BaseException | None = None) -> None:
        """Ends the items; `error` is raised in the consumer after the last one."""
        with self._changed:
            self._finished, self._error = True, error
            self._changed.notify_all()

    def abandon(self) -> None:
        """Closes the queue from the consumer's side and drops its items."""
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
    """Yields the items of `make()`, which a thread prepares up to `capacity` items ahead.

    An exception in the thread is raised here after the preceding items. When this generator ends, is closed or is
    deleted, the thread has ended and the generator of `make()` is closed.
    """
    channel: _Channel[Item] = _Channel(capacity)

    def produce() -> None:
        try:
            with closing(make()) as items:
                for item in items:
                    if not channel.put(item):
                        break
        except BaseException as error:  # raised in the consumer, of whatever type it is
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
