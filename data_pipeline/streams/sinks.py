"""Sinks of samples: a folder, a Redis stream or a Kafka topic, written so that the matching source can read them."""

import json
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Protocol

import pyarrow as pa
import pyarrow.parquet as pq

from cowrec.data_pipeline.files import replacing
from cowrec.data_pipeline.urls import open_redis

from .directory import END
from .redis_stream import FIELD


class SampleSink(Protocol):
    """Destination of raw samples in time order."""

    def write(self, table: pa.Table) -> None:
        """Sends samples and waits until they are stored. Raises OSError if they cannot be sent."""
        ...


def send(tables: Iterable[pa.Table], sink: SampleSink, rate: float = 0.0) -> int:
    """Sends tables at up to `rate` samples per second (0: unlimited). Returns the number of samples sent."""
    start, sent = time.monotonic(), 0
    for table in tables:
        sent += table.num_rows
        if rate:  # a table is sent when its last sample is due
            time.sleep(max(0.0, start + sent / rate - time.monotonic()))
        sink.write(table)
    return sent


class DirectorySink:
    """Parquet files named in the order of the samples, each renamed into the folder when complete.

    Numbers continue after those of files already in the folder.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._next = 1 + max((int(path.stem) for path in folder.glob("*.parquet") if path.stem.isdecimal()), default=-1)

    def write(self, table: pa.Table) -> None:
        with replacing(self._folder / f"{self._next:012d}.parquet") as file:
            pq.write_table(table, file)
        self._next += 1

    def end(self) -> None:
        """Marks the end of the stream: no more files will come."""
        (self._folder / END).touch()


class RedisSink:
    """Entries of a Redis stream, one JSON object each."""

    def __init__(self, url: str, stream: str) -> None:
        self._client = open_redis(url)
        import redis

        self._error, self._stream = redis.RedisError, stream

    def write(self, table: pa.Table) -> None:
        try:
            with self._client.pipeline(transaction=False) as pipeline:
                for line in json_lines(table):
                    pipeline.xadd(self._stream, {FIELD: line})
                pipeline.execute()
        except self._error as error:
            raise OSError(f"Redis did not accept samples for {self._stream!r}: {error}") from error


class KafkaSink:
    """Messages of a Kafka topic, one JSON object each; `settings` are librdkafka's."""

    def __init__(self, brokers: str, topic: str, settings: dict[str, str]) -> None:
        try:
            import confluent_kafka
        except ImportError:
            raise ValueError(
                "Kafka requires confluent-kafka, which is not installed: pip install 'cowrec[online]'"
            ) from None
        self._topic = topic
        ours = {"bootstrap.servers": brokers, "enable.idempotence": True, "queue.buffering.max.messages": 10_000_000}
        self._producer = confluent_kafka.Producer({**ours, **settings})

    def write(self, table: pa.Table) -> None:
        failures: list[str] = []

        def delivered(error: object, _: object) -> None:
            if error is not None:
                failures.append(str(error))

        for line in json_lines(table):
            self._producer.produce(self._topic, line, on_delivery=delivered)
            self._producer.poll(0)
        self._producer.flush()
        if failures:
            raise OSError(f"Kafka did not accept {len(failures)} samples for {self._topic!r}: {failures[0]}")


def json_lines(table: pa.Table) -> list[bytes]:
    """Encodes each row as a JSON object."""
    return [json.dumps(row).encode() for row in table.to_pylist()]
