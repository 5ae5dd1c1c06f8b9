"""Interface of a source of samples: what `SampleStream` requires of a folder, a Kafka topic or a Redis stream.

A source returns chunks of consecutive samples with the positions where each chunk starts and ends, and reads the same
chunk again when given these positions. It does not record how far it was read: `SampleStream` does.
"""

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from typing import Any, Protocol

import pyarrow as pa

CHUNK_BYTES = 1 << 25
"""Size of a chunk's samples at most, unless a single one is larger; decoded they take several times as much."""

SourcePosition = Any
"""Start or end of a chunk within its partition: plain JSON that only the source interprets."""


@dataclass(frozen=True)
class Chunk:
    """One or more samples in the order of their arrival.

    Attributes:
        partition: partition of the source; positions of different partitions are unrelated.
        start, end: positions of the first sample and after the last one.
        samples: JSON objects, one each, or a table of raw columns.
        lost: samples between the previous chunk and this one that the source deleted before they were read; -1 if the
            source cannot tell how many.
        behind: partitions that have more samples to read, for which the stream's present waits; perhaps this one too.
    """

    partition: str
    start: SourcePosition
    end: SourcePosition
    samples: Sequence[bytes] | pa.Table
    lost: int = 0
    behind: Sequence[str] = ()

    def __len__(self) -> int:
        return self.samples.num_rows if isinstance(self.samples, pa.Table) else len(self.samples)


def count_within(samples: Sequence[bytes]) -> int:
    """How many of the first samples have CHUNK_BYTES together, at least one."""
    size = 0
    for index, sample in enumerate(samples):
        size += len(sample)
        if size > CHUNK_BYTES:
            return max(1, index)
    return len(samples)


class SampleSource(Protocol):
    """Endless samples, or samples until `ended`.

    Attributes:
        ended: no more samples will come.
        counters: counts of events other than chunks, by name.
    """

    ended: bool
    counters: dict[str, int]

    def poll(self, max_samples: int, timeout: float) -> Chunk | None:
        """Returns the next chunk, of at most CHUNK_BYTES or a single sample, as soon as there is one; None after
        `timeout` seconds without one, or at the end."""
        ...

    def read(self, partition: str, start: SourcePosition, end: SourcePosition) -> Chunk:
        """Reads an earlier chunk again. Call `seek` before the next `poll`.

        Raises:
            ValueError: the samples were deleted or cannot be read.
        """
        ...

    def seek(self, positions: Mapping[str, SourcePosition]) -> None:
        """Continues from these chunk ends, by partition; partitions without one start at their beginning."""
        ...

    def close(self) -> None: ...


LONGEST_READ = 5.0
"""Seconds after which `read` gives up waiting."""


class StillBlocked(Exception):
    """Error for a call that has not returned yet; the same call again waits for it."""


class PatientSource:
    """A source whose `poll` and `read` return in time: calls that may block without end run in a thread.

    A file on a network that does not answer, or a FIFO without a writer, blocks whoever opens it. A process that waits
    in such a call can neither save its state nor end.

    Only one call runs at a time. `seek` takes effect with the next poll; `close` abandons a call that blocks.
    """

    def __init__(self, source: SampleSource) -> None:
        self._source = source
        self._running: Future[Any] | None = None
        self._seek_to: Mapping[str, SourcePosition] | None = None
        self._is_stale = False

    @property
    def ended(self) -> bool:
        return self._running is None and self._seek_to is None and self._source.ended

    @property
    def counters(self) -> dict[str, int]:
        return self._source.counters

    def seek(self, positions: Mapping[str, SourcePosition]) -> None:
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
