"""A value that readers use while it is replaced."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Generic, TypeVar

Value = TypeVar("Value")


class Current(Generic[Value]):
    """A value that one thread replaces; readers neither wait nor see another value before they have finished.

    Attributes:
        value: the newest one; absent before the first.
    """

    value: Value

    def __init__(self) -> None:
        self._generation = 0
        self._readers = {0: 0}
        """Readers by generation of their value."""
        self._done = threading.Condition()

    @contextmanager
    def use(self) -> Iterator[Value]:
        """The newest value, until the context is left."""
        with self._done:
            value, generation = self.value, self._generation
            self._readers[generation] += 1
        try:
            yield value
        finally:
            with self._done:
                self._readers[generation] -= 1
                if generation != self._generation and not self._readers[generation]:
                    del self._readers[generation]
                    self._done.notify_all()

    def replace(self, value: Value) -> None:
        with self._done:
            if not self._readers[self._generation]:
                del self._readers[self._generation]
            self.value = value
            self._generation += 1
            self._readers[self._generation] = 0

    def wait_for_older(self) -> None:
        """Waits until nobody uses a value that was replaced."""
        with self._done:
            self._done.wait_for(lambda: len(self._readers) == 1)
