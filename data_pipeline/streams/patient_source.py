"""A source that nobody has to wait for: calls that may block without end run in a thread.

A file on a network that does not answer, or a FIFO without a writer, blocks whoever opens it. A process that waits in
such a call can neither save its state nor end.
"""

import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from typing import Any

from .source import Chunk, SampleSource, SourcePosition

LONGEST_READ = 5.0
"""Seconds after which `read` gives up waiting."""


class StillBlocked(Exception):
    """Error for a call that has not returned yet; the same call again waits for it."""


class PatientSource:
    """A source whose `poll` and `read` return in time, whatever the source does.

    Only one call runs at a time. `seek` takes effect with the next poll; `close` abandons a call that blocks.

    Args:
        source: the source.
    """

    def __init__(self, source: SampleSource) -> None:
        self._source = source
        self._running: Future[Any] | None = None
        self._seek_to: Mapping[str, SourcePosition] | None = None
        self._is_stale = False

    @property
    def ended(self) -> bool:
        """See `SampleSource`."""
        return self._running is None and self._seek_to is None and self._source.ended

    @property
    def counters(self) -> dict[str, int]:
        """See `SampleSource`."""
        return self._source.counters

    def seek(self, positions: Mapping[str, SourcePosition]) -> None:
        """See `SampleSource`."""
        self._seek_to, self._is_stale = positions, self._running is not None

    def poll(self, max_samples: int, timeout: float) -> Chunk | None:
        """See `SampleSource`. Without a timeout it blocks as the source does."""

        def work() -> Chunk | None:
            if self._seek_to is not None:
                self._source.seek(self._seek_to)
                self._seek_to = None
            return self._source.poll(max_samples, timeout)

        try:
            chunk: Chunk | None = self._result(work, timeout) if timeout > 0 or self._running else work()
        except StillBlocked:
            return None
        if self._is_stale:  # of a poll before the seek
            self._is_stale = False
            return None
        return chunk

    def read(self, partition: str, start: SourcePosition, end: SourcePosition) -> Chunk:
        """See `SampleSource`.

        Raises:
            StillBlocked: the source has not returned yet.
        """
        chunk: Chunk = self._result(lambda: self._source.read(partition, start, end), LONGEST_READ)
        return chunk

    def close(self) -> None:
        """Closes the source, unless a call of it blocks."""
        if self._running is None or self._running.done():
            self._source.close()

    def _result(self, work: Callable[[], Any], seconds: float) -> Any:
        """Runs `work`, or waits for what runs already; raises its error, or `StillBlocked` after `seconds`."""
        if self._running is None:
            self._running = Future()
            threading.Thread(target=_run, args=(work, self._running), name="source", daemon=True).start()
        if not wait([self._running], max(0.0, seconds)).done:
            raise StillBlocked
        running, self._running = self._running, None
        return running.result()


def _run(work: Callable[[], Any], result: "Future[Any]") -> None:
    try:
        result.set_result(work())
    except BaseException as error:
        result.set_exception(error)
