"""Where samples are sent to: a folder, a Redis stream or a Kafka topic, by the address that `open_source` reads."""

import json
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Protocol
from urllib.parse import parse_qsl, urlencode, urlsplit, urlunsplit

import pyarrow as pa
import pyarrow.parquet as pq

from cowrec.data_pipeline.files import replacing

from .directory import END
from .redis_stream import FIELD


class SampleSink(Protocol):
    """Takes raw samples in the order of time."""

    def write(self, table: pa.Table) -> None:
        """Sends samples; when it returns they are there. Raises OSError where they cannot be sent."""
        ...


def open_sink(address: str) -> SampleSink:
    """The sink that an address means: a folder, redis://host:port/db?stream=NAME, or kafka://broker[,broker]/topic.

    Raises:
        ValueError: an address of another kind, or one that lacks a part; a package that is not installed.
    """
    parts = urlsplit(address)
    options = dict(parse_qsl(parts.query))
    if parts.scheme in ("redis", "rediss"):
        stream = options.pop("stream", "")
        if not stream:
            raise ValueError(f"{address}: which stream? Add ?stream=NAME")
        return RedisSink(urlunsplit(parts._replace(query=urlencode(options))), stream)
    if parts.scheme == "kafka":
        topic = parts.path.strip("/")
        if not parts.netloc or not topic or "/" in topic:
            raise ValueError(f"{address}: must be kafka://broker[,broker]/topic")
        return KafkaSink(parts.netloc, topic, options)
    if parts.scheme not in ("", "file"):
        raise ValueError(f"{address}: samples go to a folder, redis://, or kafka://; got {parts.scheme}://")
    return DirectorySink(Path(parts.path if parts.scheme else address))


def send(tables: Iterable[pa.Table], sink: SampleSink, rate: float = 0.0) -> int:
    """Sends tables, `rate` samples a second at most (0: as fast as it goes). Returns how many samples it were."""
    start, sent = time.monotonic(), 0
    for table in tables:
        sent += table.num_rows
        if rate:  # a table goes when its last sample is due
            time.sleep(max(0.0, start + sent / rate - time.monotonic()))
        sink.write(table)
    return sent


class DirectorySink:
    """Parquet files, each of which appears whole, with names in the order of the samples; goes on after those there."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._next = 1 + max((int(path.stem) for path in folder.glob("*.parquet") if path.stem.isdecimal()), default=-1)

    def write(self, table: pa.Table) -> None:
        with replacing(self._folder / f"{self._next:012d}.parquet") as file:
            pq.write_table(table, file)
        self._next += 1

    def end(self) -> None:
        """Says that no more files will come."""
        (self._folder / END).touch()


class RedisSink:
    """Entries of a Redis stream, a JSON object each."""

    def __init__(self, url: str, stream: str) -> None:
        try:
            import redis
        except ImportError:
            raise ValueError("Redis needs redis-py, which is not installed: pip install 'cowrec[online]'") from None
        self._error, self._stream = redis.RedisError, stream
        self._client = redis.Redis.from_url(url)

    def write(self, table: pa.Table) -> None:
        try:
            with self._client.pipeline(transaction=False) as pipeline:
                for line in json_lines(table):
                    pipeline.xadd(self._stream, {FIELD: line})
                pipeline.execute()
        except self._error as error:
            raise OSError(f"Redis did not take samples for {self._stream!r}: {error}") from error


class KafkaSink:
    """Messages of a Kafka topic, a JSON object each. `settings` are librdkafka's."""

    def __init__(self, brokers: str, topic: str, settings: dict[str, str]) -> None:
        try:
            import confluent_kafka
        except ImportError:
            raise ValueError(
                "Kafka needs confluent-kafka, which is not installed: pip install 'cowrec[online]'"
            ) from None
        self._topic = topic
        ours = {"bootstrap.servers": brokers, "enable.idempotence": True, "queue.buffering.max.messages": 10_000_000}
        self._producer = confluent_kafka.Producer({**ours, **settings})

    def write(self, table: pa.Table) -> None:
        failures: list[str] = []

        def told(error: object, _: object) -> None:
            if error is not None:
                failures.append(str(error))

        for line in json_lines(table):
            self._producer.produce(self._topic, line, on_delivery=told)
            self._producer.poll(0)
        self._producer.flush()
        if failures:
            raise OSError(f"Kafka did not take {len(failures)} samples for {self._topic!r}: {failures[0]}")


def json_lines(table: pa.Table) -> list[bytes]:
    """Each row as a JSON object."""
    return [json.dumps(row).encode() for row in table.to_pylist()]
