"""Interface of a source of samples: what `SampleStream` requires of a folder, a Kafka topic or a Redis stream.

A source returns chunks of consecutive samples with the positions where each chunk starts and ends, and reads the same
chunk again when given these positions. It does not record how far it was read: `SampleStream` does.
"""

from collections.abc import Collection, Mapping, Sequence
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
        lost: samples before this chunk that the source deleted before they were read; -1 if it cannot tell how many.
        behind: partitions that have more samples to read, for which the stream's present waits; perhaps this one too.
        forgotten: partitions that are never read again, whose positions need not be kept.
    """

    partition: str
    start: SourcePosition
    end: SourcePosition
    samples: Sequence[bytes] | pa.Table
    lost: int = 0
    behind: Sequence[str] = ()
    forgotten: Collection[str] = ()

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
    """Endless samples, or samples until `ended`; `counters` counts other events than chunks by name."""

    ended: bool
    counters: dict[str, int]

    def poll(self, max_samples: int, timeout: float) -> Chunk | None:
        """Returns the next chunk, of at most CHUNK_BYTES or one sample; None after `timeout` seconds, or at the end."""
        ...

    def read(self, partition: str, start: SourcePosition, end: SourcePosition) -> Chunk:
        """Reads an earlier chunk again, with those samples that are still there; call `seek` before the next `poll`.

        Raises ValueError if the samples cannot be read.
        """
        ...

    def seek(self, positions: Mapping[str, SourcePosition]) -> None:
        """Continues from these chunk ends, by partition; partitions without one start at their beginning."""
        ...

    def close(self) -> None: ...
