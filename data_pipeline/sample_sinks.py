"""Where samples are sent to: files of a directory, a Redis stream, or a Kafka topic; the counterpart of their sources."""

import json
import os
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Protocol
from urllib.parse import urlsplit, urlunsplit

import pyarrow as pa
import pyarrow.parquet as pq

from .sample_sources import REDIS_FIELD


class Sink(Protocol):
    """Takes tables of raw samples in the order of time."""

    def write(self, table: pa.Table) -> None:
        """Sends samples on; they are out when it returns. Raises OSError where they cannot be sent."""
        ...


def open_sink(url: str) -> Sink:
    """The sink that a URL means: `redis://HOST:PORT/STREAM`, `kafka://HOST:PORT/TOPIC`, or a directory.

    Raises:
        ValueError: another scheme, or no name of a stream or topic.
    """
    parts = urlsplit(url)
    if not parts.scheme:
        return DirectorySink(Path(url))
    name = parts.path.strip("/")
    if parts.scheme not in ("redis", "kafka") or not name:
        raise ValueError(f"{url!r} is no place for samples; name redis://HOST:PORT/STREAM, kafka://HOST:PORT/TOPIC or DIR")
    if parts.scheme == "redis":
        return RedisSink(urlunsplit(parts._replace(path="")), name)
    return KafkaSink(parts.netloc, name)


def send(tables: Iterable[pa.Table], sink: Sink, rate: float = 0.0) -> int:
    """Sends tables on, `rate` samples a second at most (0: as fast as it goes). Returns how many samples."""
    start, sent = time.monotonic(), 0
    for table in tables:
        if rate:
            time.sleep(max(0.0, start + (sent + table.num_rows) / rate - time.monotonic()))
        sink.write(table)
        sent += table.num_rows
    return sent


class DirectorySink:
    """Parquet files, each of which appears whole, named so that their order is the samples'."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._next = 1 + max((int(path.stem) for path in folder.glob("*.parquet") if path.stem.isdecimal()), default=-1)

    def write(self, table: pa.Table) -> None:
        final = self._folder / f"{self._next:012d}.parquet"
        partial = final.with_name(f".{final.name}.partial")
        with partial.open("wb") as file:
            pq.write_table(table, file)
            file.flush()
            os.fsync(file.fileno())
        partial.rename(final)
        self._next += 1


class RedisSink:
    """Entries of a Redis stream, each a sample as a JSON object."""

    def __init__(self, url: str, stream: str) -> None:
        import redis

        self._errors, self._stream = redis.RedisError, stream
        self._client = redis.Redis.from_url(url)

    def write(self, table: pa.Table) -> None:
        try:
            with self._client.pipeline(transaction=False) as pipeline:
                for line in json_lines(table):
                    pipeline.xadd(self._stream, {REDIS_FIELD: line})
                pipeline.execute()
        except self._errors as error:
            raise OSError(f"Redis did not take samples for stream {self._stream!r}: {error}") from error


class KafkaSink:
    """Messages of a Kafka topic, each a sample as a JSON object."""

    def __init__(self, servers: str, topic: str) -> None:
        import confluent_kafka

        self._topic = topic
        self._producer = confluent_kafka.Producer({"bootstrap.servers": servers, "enable.idempotence": True})

    def write(self, table: pa.Table) -> None:
        failures: list[str] = []

        def delivered(error: object, _: object) -> None:
            if error is not None:
                failures.append(str(error))

        for line in json_lines(table):
            while True:
                try:
                    self._producer.produce(self._topic, line, on_delivery=delivered)
                    break
                except BufferError:
                    self._producer.poll(0.1)
        self._producer.flush()
        if failures:
            raise OSError(f"Kafka did not take {len(failures)} samples for topic {self._topic!r}: {failures[0]}")


def json_lines(table: pa.Table) -> list[bytes]:
    """Each row as a JSON object."""
    return [json.dumps(row).encode() for row in table.to_pylist()]
