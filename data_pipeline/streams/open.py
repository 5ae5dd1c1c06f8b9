"""Addresses of streams: opens the source or the sink that an address names; and sending of samples."""

import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol
from urllib.parse import parse_qsl, urlencode, urlunsplit

import pyarrow as pa

from cowrec.data_pipeline.urls import split_url, without_credentials

from .brokers import KafkaSink, KafkaSource, RedisSink, RedisSource
from .directory import DirectorySink, DirectorySource
from .source import SampleSource


class SampleSink(Protocol):
    """Destination of raw samples in time order."""

    def write(self, table: pa.Table) -> None:
        """Sends samples and waits until they are stored. Raises OSError if they cannot be sent."""
        ...


def open_source(address: str, *, damaged: Literal["stop", "skip"] = "stop") -> SampleSource:
    """Opens the source at an address.

    Args:
        address: a folder or file:///folder; redis://host:port/db?stream=NAME (rediss:// for TLS);
            kafka://broker[,broker]/topic, with further librdkafka settings after a "?".
        damaged: what a folder's source does at a file that cannot be read.

    Raises:
        ValueError: the address is of another kind or incomplete, or a package is not installed.
        OSError: the source does not exist or does not answer.
    """
    parsed = _parse(address)
    if parsed.kind == "redis":
        return RedisSource(parsed.server, parsed.name)
    if parsed.kind == "kafka":
        return KafkaSource(parsed.server, parsed.name, parsed.settings)
    return DirectorySource(Path(parsed.name), damaged)


def open_sink(address: str) -> SampleSink:
    """Opens the sink at an address, given as to `open_source`; a folder is created if missing.

    Raises:
        ValueError: the address is of another kind or incomplete, or a package is not installed.
    """
    parsed = _parse(address)
    if parsed.kind == "redis":
        return RedisSink(parsed.server, parsed.name)
    if parsed.kind == "kafka":
        return KafkaSink(parsed.server, parsed.name, parsed.settings)
    return DirectorySink(Path(parsed.name))


def send(tables: Iterable[pa.Table], sink: SampleSink, rate: float = 0.0) -> int:
    """Sends tables at up to `rate` samples per second (0: unlimited). Returns the number of samples sent."""
    start, sent = time.monotonic(), 0
    for table in tables:
        sent += table.num_rows
        if rate:  # a table is sent when its last sample is due
            time.sleep(max(0.0, start + sent / rate - time.monotonic()))
        sink.write(table)
    return sent


@dataclass(frozen=True)
class _Address:
    """Parts of an address: the Redis URL or Kafka brokers, and the name of the folder, Redis key or Kafka topic."""

    kind: Literal["folder", "redis", "kafka"]
    server: str
    name: str
    settings: dict[str, str]


def _parse(address: str) -> _Address:
    parts, shown = split_url(address), without_credentials(address)
    options = dict(parse_qsl(parts.query))
    if parts.scheme in ("redis", "rediss"):
        stream = options.pop("stream", "")
        if not stream:
            raise ValueError(f"{shown}: must name a stream; add ?stream=NAME")
        return _Address("redis", urlunsplit(parts._replace(query=urlencode(options))), stream, {})
    if parts.scheme == "kafka":
        topic = parts.path.strip("/")
        if "@" in parts.netloc:
            raise ValueError(
                f"{shown}: give Kafka's user and password after a ?, as sasl.username=...&sasl.password=..."
            )
        if not parts.netloc or not topic or "/" in topic:
            raise ValueError(f"{shown}: must be kafka://broker[,broker]/topic")
        return _Address("kafka", parts.netloc, topic, options)
    if parts.scheme not in ("", "file"):
        raise ValueError(f"{shown}: must be a folder, redis:// or kafka://, got {parts.scheme}://")
    return _Address("folder", "", parts.path if parts.scheme else address, {})
