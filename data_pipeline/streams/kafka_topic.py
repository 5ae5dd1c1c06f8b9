"""A Kafka topic as a source of samples: messages that are JSON objects.

All partitions that the topic has when it is opened are assigned with explicit offsets, which are the stream's own
position: nothing is committed, and no consumer group takes part. Messages must stay until no journal can ask for them
again: the topic's retention must cover the time between two snapshots. Messages that Kafka removed before they were
read are gone; that is said, and counted by their offsets.
"""

import logging
import time
from collections import deque
from collections.abc import Mapping
from typing import Any

from .source import Chunk, Place

ANSWER_SECONDS = 10.0
REPLAY_SECONDS = 60.0

logger = logging.getLogger(__name__)


class KafkaSource:
    """One topic; a place is the offset of the next message of a partition.

    Args:
        brokers: host:port, several joined by commas.
        topic: must be there.
        settings: of librdkafka, over ours.

    Raises:
        ValueError: confluent-kafka is not installed, or there is no such topic. OSError: no broker answers.
    """

    def __init__(self, brokers: str, topic: str, settings: Mapping[str, str] | None = None) -> None:
        try:
            import confluent_kafka
        except ImportError:
            raise ValueError(
                "a Kafka source needs confluent-kafka, which is not installed: pip install 'cowrec[online]'"
            ) from None
        self._kafka, self._topic = confluent_kafka, topic
        self._consumer = confluent_kafka.Consumer(
            {
                "bootstrap.servers": brokers,
                "group.id": "cowrec",  # asked for, though no group takes part
                "enable.auto.commit": False,
                "enable.auto.offset.store": False,
                "auto.offset.reset": "error",
                "enable.partition.eof": True,
                # A broker answers nothing else on the connection while a fetch waits.
                "fetch.wait.max.ms": 50,
                **(settings or {}),
            },
            logger=logger,
        )
        try:
            found = self._consumer.list_topics(topic, timeout=ANSWER_SECONDS).topics[topic]
        except confluent_kafka.KafkaException as error:
            raise OSError(f"no Kafka broker answers at {brokers}: {error}") from error
        if found.error is not None or not found.partitions:
            raise ValueError(f"{brokers} has no topic {topic!r}: {found.error}")
        self._partitions = sorted(found.partitions)
        self.ended = False
        self.counters = {"lost_messages": 0, "errors": 0}
        self._waiting: deque[Chunk] = deque()
        self._lost: dict[int, int] = {}
        self.seek({})

    def seek(self, places: Mapping[str, Place]) -> None:
        self._waiting.clear()
        self._offsets = {}
        for number in self._partitions:
            place = places.get(str(number))
            self._offsets[number] = self._bounds(number)[0] if place is None else int(place)
        unknown = sorted(places.keys() - {str(number) for number in self._partitions})
        if unknown:
            raise ValueError(f"topic {self._topic!r} has no partition {', '.join(unknown)}; is it another topic?")
        self._assign(self._offsets)

    def poll(self, max_samples: int, timeout: float) -> Chunk | None:
        deadline = time.monotonic() + timeout
        while not self._waiting:
            left = deadline - time.monotonic()
            self._gather(self._consumer.consume(max_samples, max(0.0, min(left, 0.1))))
            if left <= 0:
                break
        return self._waiting.popleft() if self._waiting else None

    def read(self, partition: str, start: Place, end: Place) -> Chunk:
        self._assign({int(partition): int(start)})
        deadline = time.monotonic() + REPLAY_SECONDS
        samples: list[bytes] = []
        while time.monotonic() < deadline:
            for message in self._consumer.consume(max(1, end - start), 0.1):
                error = message.error()
                if error is not None and error.code() in self._no_more:
                    return Chunk(partition, start, end, samples)  # the stream sees that samples are missing
                if error is None and message.offset() < end:
                    samples.append(message.value() or b"")
                if error is None and message.offset() >= end - 1:
                    return Chunk(partition, start, end, samples)
        raise ValueError(f"messages of {self._topic!r} are needed again, but Kafka does not answer")

    def close(self) -> None:
        self._consumer.close()

    @property
    def _no_more(self) -> tuple[int, int]:
        return self._kafka.KafkaError._PARTITION_EOF, self._kafka.KafkaError._AUTO_OFFSET_RESET

    def _gather(self, messages: list[Any]) -> None:
        """Messages to chunks, one for each partition that has some."""
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
                logger.warning("Kafka: %s", error)
        for number, values in samples.items():
            start, self._offsets[number] = self._offsets[number], ends[number]
            lost = self._lost.pop(number, 0)
            self._waiting.append(Chunk(str(number), start, ends[number], values, lost))
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
                "was made anew; start without the earlier position"
            )
        lost = first - offset
        logger.warning("%d messages of %r, partition %d, were removed before they were read", lost, self._topic, number)
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
            raise OSError(f"Kafka does not tell the offsets of {self._topic!r}: {error}") from error
