"""Addresses of streams: opens the source or the sink that an address names; and sending of samples."""

import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Literal, Protocol
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
    source: SampleSource = _opened(address, RedisSource, KafkaSource, lambda folder: DirectorySource(folder, damaged))
    return source


def open_sink(address: str) -> SampleSink:
    """Opens the sink at an address, given as to `open_source`, with its errors; a folder is created if missing."""
    sink: SampleSink = _opened(address, RedisSink, KafkaSink, DirectorySink)
    return sink


def send(tables: Iterable[pa.Table], sink: SampleSink, rate: float = 0.0) -> int:
    """Sends tables at up to `rate` samples per second (0: unlimited). Returns the number of samples sent."""
    start, sent = time.monotonic(), 0
    for table in tables:
        sent += table.num_rows
        if rate:  # a table is sent when its last sample is due
            time.sleep(max(0.0, start + sent / rate - time.monotonic()))
        sink.write(table)
    return sent


def _opened(
    address: str,
    redis: Callable[[str, str], Any],
    kafka: Callable[[str, str, dict[str, str]], Any],
    folder: Callable[[Path], Any],
) -> Any:
    """Calls what opens an address of its kind, with the URL or brokers and the name of the key, topic or folder."""
    parts, shown = split_url(address), without_credentials(address)
    options = dict(parse_qsl(parts.query))
    if parts.scheme in ("redis", "rediss"):
        stream = options.pop("stream", "")
        if not stream:
            raise ValueError(f"{shown}: must name a stream; add ?stream=NAME")
        return redis(urlunsplit(parts._replace(query=urlencode(options))), stream)
    if parts.scheme == "kafka":
        topic = parts.path.strip("/")
        if "@" in parts.netloc:
            raise ValueError(
                f"{shown}: give Kafka's user and password after a ?, as sasl.username=...&sasl.password=..."
            )
        if not parts.netloc or not topic or "/" in topic:
            raise ValueError(f"{shown}: must be kafka://broker[,broker]/topic")
        return kafka(parts.netloc, topic, options)
    if parts.scheme not in ("", "file"):
        raise ValueError(f"{shown}: must be a folder, redis:// or kafka://, got {parts.scheme}://")
    return folder(Path(parts.path if parts.scheme else address))
