"""Where samples of a stream come from: what every source offers, and which one an address means.

A source hands out chunks of samples that lie next to each other, with the places where each begins and ends, and
reads the same chunk again when asked by these places. It stores nothing of how far it was read: that is the stream's.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol
from urllib.parse import parse_qsl, urlencode, urlsplit, urlunsplit

import pyarrow as pa

Place = Any
"""Where a chunk begins or ends within its partition: plain JSON that only the source understands."""


@dataclass(frozen=True)
class Chunk:
    """Some samples, at least one, in the order of their arrival.

    Attributes:
        partition: of the source; the places of one say nothing about another.
        start, end: where the chunk begins, and where the next one will.
        samples: JSON objects, one each, or a table of raw columns.
        lost: samples that are known to have been between the last chunk and this one, and are gone; -1 where the source
            cannot tell how many.
    """

    partition: str
    start: Place
    end: Place
    samples: Sequence[bytes] | pa.Table
    lost: int = 0

    def __len__(self) -> int:
        return self.samples.num_rows if isinstance(self.samples, pa.Table) else len(self.samples)


class SampleSource(Protocol):
    """Samples without end, or until `ended`.

    Attributes:
        ended: nothing more will come.
        counters: what the source saw that is no chunk, by name.
    """

    ended: bool
    counters: dict[str, int]

    def poll(self, max_samples: int, timeout: float) -> Chunk | None:
        """The next chunk, as soon as there is one; None where nothing came for `timeout` seconds, or at the end."""
        ...

    def read(self, partition: str, start: Place, end: Place) -> Chunk:
        """A chunk that was handed out before, again. `seek` is needed before the next `poll`.

        Raises:
            ValueError: its samples are gone, or cannot be read.
        """
        ...

    def seek(self, places: Mapping[str, Place]) -> None:
        """Goes on from these ends of chunks; partitions that are not named begin at their beginning."""
        ...

    def close(self) -> None: ...


def open_source(address: str, *, damaged: Literal["stop", "skip"] = "stop") -> SampleSource:
    """The source that an address means.

    Args:
        address: a folder, or file:///folder; redis://host:port/db?stream=NAME (rediss:// for TLS);
            kafka://broker[,broker]/topic, further settings of librdkafka after a "?".
        damaged: of a folder, what to do at a file that cannot be read.

    Raises:
        ValueError: an address of another kind, or one that lacks a part; a package that is not installed. OSError: the
            source is not there.
    """
    parts = urlsplit(address)
    if parts.scheme in ("redis", "rediss"):
        options = dict(parse_qsl(parts.query))
        stream = options.pop("stream", "")
        if not stream:
            raise ValueError(f"{address}: which stream? Add ?stream=NAME")
        from .redis_stream import RedisSource

        return RedisSource(urlunsplit(parts._replace(query=urlencode(options))), stream)
    if parts.scheme == "kafka":
        topic = parts.path.strip("/")
        if not parts.netloc or not topic or "/" in topic:
            raise ValueError(f"{address}: must be kafka://broker[,broker]/topic")
        from .kafka_topic import KafkaSource

        return KafkaSource(parts.netloc, topic, dict(parse_qsl(parts.query)))
    if parts.scheme not in ("", "file"):
        raise ValueError(f"{address}: a source is a folder, redis://, or kafka://; got {parts.scheme}://")
    from .directory import DirectorySource

    return DirectorySource(Path(parts.path if parts.scheme else address), damaged)
