"""A Kafka topic of samples: messages that are JSON objects.

All partitions are assigned with explicit offsets from the stream's own position: nothing is committed, and no consumer
group is joined, so that consumers which come and go rebalance nothing here. Partitions that are added to the topic are
noticed and read from their beginning. Messages must be retained while a journal may refer to them, so the topic's
retention must exceed the time between two snapshots. Messages that Kafka deleted before they were read are logged and
counted by their offsets. Offsets without a message, as transactions and compaction leave them, are skipped.
"""

import logging
import time
from collections import deque
from collections.abc import Mapping
from typing import Any

import pyarrow as pa

from .source import Chunk, SourcePosition, json_lines

ANSWER_SECONDS = 10.0
REPLAY_SECONDS = 60.0
PARTITIONS_SECONDS = 30.0
"""Time between two looks for partitions that were added."""
WARNING_SECONDS = 60.0
"""Time between two warnings of the same kind: librdkafka reports every attempt to connect, up to twenty a second."""

logger = logging.getLogger(__name__)


class KafkaSource:
    """One topic; a position is the offset of the next message of a partition.

    Args:
        brokers: host:port, several joined by commas.
        topic: an existing topic.
        settings: librdkafka settings that override the defaults below.

    Raises:
        ValueError: confluent-kafka is not installed, a setting is invalid, or the topic does not exist.
        OSError: no broker answers.
    """

    def __init__(self, brokers: str, topic: str, settings: Mapping[str, str] | None = None) -> None:
        self._kafka, self._topic, self._log = _kafka(), topic, _SeldomLogger()
        self._consumer = self._connected(
            {
                "bootstrap.servers": brokers,
                "group.id": "cowrec",  # required by librdkafka, though no group is used
                "enable.auto.commit": False,
                "enable.auto.offset.store": False,
                "auto.offset.reset": "error",
                "enable.partition.eof": True,
                # A pending fetch blocks all other answers on its connection.
                "fetch.wait.max.ms": 50,
                **(settings or {}),
            }
        )
        try:
            self._partitions = self._partitions_now(ANSWER_SECONDS)
        except self._kafka.KafkaException as error:
            raise OSError(f"no Kafka broker answers at {brokers}: {error}") from error
        if not self._partitions:
            raise ValueError(f"{brokers} has no topic {topic!r}; create it, or correct the address")
        self._looked = time.monotonic()
        self.ended = False
        self.counters = {"lost_messages": 0, "errors": 0}
        self._ready: deque[Chunk] = deque()
        self._lost: dict[int, int] = {}
        self.seek({})

    def seek(self, positions: Mapping[str, SourcePosition]) -> None:
        self._ready.clear()
        self._offsets = {}
        for number in self._partitions:
            position = positions.get(str(number))
            self._offsets[number] = self._bounds(number)[0] if position is None else int(position)
        unknown = sorted(positions.keys() - {str(number) for number in self._partitions})
        if unknown:
            raise ValueError(f"topic {self._topic!r} has no partition {', '.join(unknown)}; is it another topic?")
        self._assign(self._offsets)

    def poll(self, max_samples: int, timeout: float) -> Chunk | None:
        deadline = time.monotonic() + timeout
        while not self._ready:
            if time.monotonic() - self._looked >= PARTITIONS_SECONDS:
                self._add_partitions()
            remaining = deadline - time.monotonic()
            self._gather(self._consumer.consume(max_samples, max(0.0, min(remaining, 0.1))))
            if remaining <= 0:
                break
        return self._ready.popleft() if self._ready else None

    def read(self, partition: str, start: SourcePosition, end: SourcePosition) -> Chunk:
        self._assign({int(partition): int(start)})
        deadline = time.monotonic() + REPLAY_SECONDS
        samples: list[bytes] = []
        while time.monotonic() < deadline:
            for message in self._consumer.consume(max(1, end - start), 0.1):
                error = message.error()
                if error is not None and error.code() in self._no_more:
                    return Chunk(partition, start, end, samples)  # the stream compares the number of samples
                if error is None and message.offset() < end:
                    samples.append(message.value() or b"")
                if error is None and message.offset() >= end - 1:
                    return Chunk(partition, start, end, samples)
        raise ValueError(f"messages of {self._topic!r} must be read again, but Kafka does not answer")

    def close(self) -> None:
        self._consumer.close()

    @property
    def _no_more(self) -> tuple[int, int]:
        return self._kafka.KafkaError._PARTITION_EOF, self._kafka.KafkaError._AUTO_OFFSET_RESET

    def _connected(self, settings: dict[str, Any]) -> Any:
        try:
            return self._kafka.Consumer(settings, logger=self._log)
        except self._kafka.KafkaException as error:
            raise ValueError(f"librdkafka does not accept the settings of the address: {error.args[0].str()}") from None

    def _partitions_now(self, timeout: float) -> list[int]:
        """Numbers of the topic's partitions; none if there is no such topic."""
        found = self._consumer.list_topics(self._topic, timeout=timeout).topics[self._topic]
        return [] if found.error is not None else sorted(found.partitions)

    def _add_partitions(self) -> None:
        """Begins to read partitions that were added to the topic; tries again later if no broker answers."""
        self._looked = time.monotonic()
        try:
            added = [each for each in self._partitions_now(1.0) if each not in self._offsets]
            self._offsets |= {each: self._bounds(each)[0] for each in added}
        except (self._kafka.KafkaException, OSError):
            return
        if added:
            self._partitions = sorted(self._offsets)
            logger.warning("topic %r has new partitions, which are read from their beginning: %s", self._topic, added)
            self._assign(self._offsets)

    def _gather(self, messages: list[Any]) -> None:
        """Groups messages into one chunk per partition."""
        samples: dict[int, list[bytes]] = {}
        ends: dict[int, int] = {}
        out_of_range: set[int] = set()
        for message in messages:
            error = message.error()
            if error is None:
                samples.setdefault(message.partition(), []).append(message.value() or b"")
                ends[message.partition()] = message.offset() + 1
            elif error.code() == self._kafka.KafkaError._AUTO_OFFSET_RESET:
                out_of_range.add(message.partition())
            elif error.code() != self._kafka.KafkaError._PARTITION_EOF:
                self.counters["errors"] += 1
                self._log.log(logging.WARNING, "Kafka: %s", error.str())
        for number, values in samples.items():
            start, self._offsets[number] = self._offsets[number], ends[number]
            lost = self._lost.pop(number, 0)
            self._ready.append(Chunk(str(number), start, ends[number], values, lost))
        for number in out_of_range:
            self._skip_lost(number)
        if out_of_range:
            self._assign(self._offsets)

    def _skip_lost(self, number: int) -> None:
        first, end = self._bounds(number)
        offset = self._offsets[number]
        if offset > end:
            raise ValueError(
                f"partition {number} of {self._topic!r} ends at offset {end}, but was read up to {offset}: the topic "
                "was re-created, or Kafka lost its end; start without the saved position"
            )
        lost = first - offset
        logger.warning("%d messages of %r, partition %d, were deleted before they were read", lost, self._topic, number)
        self.counters["lost_messages"] += lost
        self._lost[number] = self._lost.get(number, 0) + lost
        self._offsets[number] = first

    def _assign(self, offsets: Mapping[int, int]) -> None:
        partition = self._kafka.TopicPartition
        self._consumer.assign([partition(self._topic, number, offset) for number, offset in offsets.items()])

    def _bounds(self, number: int) -> tuple[int, int]:
        try:
            return self._consumer.get_watermark_offsets(
                self._kafka.TopicPartition(self._topic, number), timeout=ANSWER_SECONDS
            )
        except self._kafka.KafkaException as error:
            raise OSError(f"cannot get the offsets of {self._topic!r}: {error}") from error


class KafkaSink:
    """Messages of a Kafka topic, one JSON object each; `settings` are librdkafka's."""

    def __init__(self, brokers: str, topic: str, settings: dict[str, str]) -> None:
        self._topic = topic
        ours = {"bootstrap.servers": brokers, "enable.idempotence": True, "queue.buffering.max.messages": 10_000_000}
        self._producer = _kafka().Producer({**ours, **settings})

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


def _kafka() -> Any:
    try:
        import confluent_kafka
    except ImportError:
        raise ValueError(
            "Kafka requires confluent-kafka, which is not installed: pip install 'cowrec[online]'"
        ) from None
    return confluent_kafka


class _SeldomLogger:
    """Passes messages on, of which warnings and errors that begin with the same argument only now and then."""

    def __init__(self) -> None:
        self._next: dict[object, float] = {}

    def log(self, level: int, text: str, *values: object) -> None:
        now = time.monotonic()
        if level >= logging.WARNING:
            if now < self._next.get(values[0], now):
                return
            self._next[values[0]] = now + WARNING_SECONDS
        logger.log(level, text, *values)
