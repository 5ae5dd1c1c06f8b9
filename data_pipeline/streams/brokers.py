"""Streams at brokers: the entries of a Redis stream, and the messages of a Kafka topic.

Redis: entries whose field `sample` is a JSON object. They are read by their ids from the stream's own position, without
a consumer group, and must be retained while a journal may refer to them: use `XADD ... MAXLEN ~ N` with an N that
covers the time between two snapshots. Entries trimmed before they were read are logged and counted as one gap (`gaps`),
since Redis does not report how many there were. If the last entry read is also the last one trimmed, a gap is counted
though nothing was lost: the two cases look alike. A crash of Redis may lose its last second of entries; if some of them
were already read, `rewound` counts it. A Redis that does not answer, is full, busy, or fails over is waited for, and
each attempt is counted (`reconnects`).

Kafka: messages that are JSON objects. All partitions are assigned with explicit offsets from the stream's own position:
nothing is committed, and no consumer group is joined, so that consumers which come and go rebalance nothing here.
Partitions that are added to the topic are noticed and read from their beginning. A chunk names the partitions that have
not been read to their end, so that a backlog of ordered partitions is trained on in order. The topic's retention must
exceed the time between two snapshots, since a journal may refer to messages. Messages that Kafka deleted before they
were read are logged and counted by their offsets. Offsets without a message are skipped.
"""

import logging
import re
import time
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from cowrec.errors import UserError

from ..redis_client import open_redis, refusal
from .source import Chunk, SourcePosition, count_within

ANSWER_SECONDS = 10.0
BEGINNING = "0-0"
FIELD = b"sample"
MIN_BACKOFF, MAX_BACKOFF = 0.05, 5.0
"""Seconds between attempts to reconnect to Redis; doubled after each attempt."""
REPLAY_SECONDS = 60.0
PARTITIONS_SECONDS = 30.0
"""Time between two looks for partitions that were added."""
MOST_CONSUMED = 100_000
"""Messages that Kafka is asked for at once; librdkafka allows a million, and messages may lack between two offsets."""
PARTITION_BYTES = 1 << 18
"""Messages of a partition that Kafka sends at once; librdkafka would take four times as many, of each one in turn, and
all but those of the last partition wait to be put in order."""
MOST_AHEAD = 1 << 19
"""Messages of others after which no partition waits any longer for one that gives none."""
FIRST_ENTRIES = 64
"""Entries that Redis is asked for after there were none, or after a chunk was too large; doubled for each further poll.
Redis cannot be told how many bytes to send."""
WARNING_SECONDS = 60.0
"""Time between two warnings of the same kind: librdkafka reports every attempt to connect, up to twenty a second."""

logger = logging.getLogger(__name__)


class RedisSource:
    """The stream at a key of the server at a URL (see `open_redis`); a position is the id of the last entry read."""

    def __init__(self, url: str, stream: str) -> None:
        self._client = open_redis(url, socket_timeout=ANSWER_SECONDS, socket_connect_timeout=ANSWER_SECONDS)
        import redis

        self._redis, self._stream = redis, stream
        self._backoff, self._failures = redis.backoff.ExponentialBackoff(MAX_BACKOFF, MIN_BACKOFF), 0
        self.ended = False
        self.counters = {"gaps": 0, "rewound": 0, "reconnects": 0}
        self.seek({})

    def seek(self, positions: Mapping[str, SourcePosition]) -> None:
        self._last = str(positions.get("", BEGINNING))
        if positions.keys() - {""} or not _ENTRY.fullmatch(self._last):
            raise UserError(f"the position {positions} is of another kind of source; start without it")
        self._rewound, self._entries = False, FIRST_ENTRIES

    def poll(self, max_samples: int, timeout: float) -> Chunk | None:
        deadline = time.monotonic() + timeout
        while True:
            waits = False
            try:
                chunk = self._next(max_samples)
                if self._failures:
                    logger.warning("Redis answers again; continuing after %s", self._last)
                    self._failures = 0
                remaining = deadline - time.monotonic()
                if chunk is not None or remaining <= 0:
                    return chunk
                waits = True
                # Only waits for an entry, which `_next` reads.
                self._client.xread(
                    {self._stream: self._last}, 1, block=max(1, int(1000 * min(remaining, ANSWER_SECONDS / 2)))
                )
            except self._redis.RedisError as error:
                if not waits:  # a master that becomes a replica ends waits with an error; what `_next` gets decides
                    self._require_passing(error)
                if not self._retry(error, deadline):
                    return None

    def read(self, partition: str, start: SourcePosition, end: SourcePosition) -> Chunk:
        deadline = time.monotonic() + REPLAY_SECONDS
        while True:
            try:
                entries: Any = self._client.xrange(self._stream, f"({start}", end)
                return Chunk(partition, start, end, [_sample(fields) for _, fields in entries])
            except self._redis.RedisError as error:
                self._require_passing(error)
                if not self._retry(error, deadline):
                    raise UserError(
                        f"entries of {self._stream!r} must be read again, but Redis does not answer: {error}"
                    ) from error

    def close(self) -> None:
        self._client.close()

    def _next(self, max_samples: int) -> Chunk | None:
        """Reads available entries with the last one before them: if that is still there, none was trimmed between.

        A transaction with the state of the stream would be refused by a Redis that is full.
        """
        most = min(max_samples, self._entries)
        found: Any = self._client.xrange(self._stream, self._last, "+", most + 1)
        has_last = bool(found) and found[0][0].decode() == self._last
        entries = found[1:] if has_last else found[:most]
        if not entries:
            self._entries = FIRST_ENTRIES
            if not has_last and self._last != BEGINNING:
                self._check_reach()
            return None
        lost = 0 if has_last or self._last == BEGINNING or not self._is_gap() else -1
        if lost:
            self.counters["gaps"] += 1
            logger.warning("entries of %r after %s were trimmed before they were read", self._stream, self._last)
        samples = [_sample(fields) for _, fields in entries]
        count = count_within(samples)
        self._entries = count if count < len(samples) else min(max_samples, 2 * self._entries)
        start, self._last = self._last, entries[count - 1][0].decode()
        return Chunk("", start, self._last, samples[:count], lost)

    def _is_gap(self) -> bool:
        """Whether the entry that was read last was trimmed, and not deleted alone."""
        first = self._client.xinfo_stream(self._stream)["first-entry"]
        return first is not None and _order(first[0].decode()) > _order(self._last)

    def _check_reach(self) -> None:
        if self._rewound or not self._client.exists(self._stream):
            return
        newest = self._client.xinfo_stream(self._stream)["last-generated-id"].decode()
        if _order(newest) < _order(self._last):
            self._rewound = True
            self.counters["rewound"] += 1
            logger.warning(
                "the stream %r ends at %s, but was read up to %s: Redis lost its end or was emptied; entries with ids "
                "up to the latter will not be read", self._stream, newest, self._last,
            )  # fmt: skip

    def _require_passing(self, error: Exception) -> None:
        """Raises ValueError for an error that another attempt would meet again."""
        errors, remedy = self._redis.exceptions, refusal(error)
        if type(error) is errors.ResponseError:  # of a server that is busy, or of a key that is no stream
            with suppress(errors.RedisError):
                kind = self._client.type(self._stream).decode()
                if kind not in ("stream", "none"):
                    remedy = f"the key is a {kind}; correct ?stream= of the address"
        elif not isinstance(error, errors.ResponseError | errors.ConnectionError | errors.TimeoutError):
            remedy = "correct the address"
        if remedy:
            raise UserError(f"Redis does not give the stream {self._stream!r}: {error}; {remedy}") from error

    def _retry(self, error: Exception, deadline: float) -> bool:
        """Waits with exponential backoff; False once the deadline has passed."""
        if not self._failures:
            logger.warning("Redis does not answer (%s); retrying", error)
        self._failures += 1
        self.counters["reconnects"] += 1
        self._client.connection_pool.disconnect()  # the name of a server that has become a replica may be another's now
        time.sleep(max(0.0, min(self._backoff.compute(self._failures), deadline - time.monotonic())))
        return time.monotonic() < deadline


def _sample(fields: Mapping[bytes, bytes]) -> bytes:
    """Returns the sample of an entry; empty, hence malformed, if it has none or was deleted."""
    return (fields or {}).get(FIELD, b"")


_ENTRY = re.compile("[0-9]+-[0-9]+")


def _order(entry: str) -> tuple[int, int]:
    milliseconds, _, number = entry.partition("-")
    return int(milliseconds), int(number)


class KafkaSource:
    """One topic; a position is the offset of the next message of a partition.

    Args:
        brokers: host:port, several joined by commas.
        settings: librdkafka settings that override the defaults below.

    Raises ValueError: confluent-kafka is not installed, a setting is invalid, or there is no such topic; OSError: no
    answer.
    """

    def __init__(self, brokers: str, topic: str, settings: Mapping[str, str] | None = None) -> None:
        try:
            import confluent_kafka
        except ImportError:
            raise UserError(
                "Kafka requires confluent-kafka, which is not installed: pip install 'cowrec[online]'"
            ) from None
        self._kafka: Any = confluent_kafka
        self._topic, self._log = topic, _SeldomLogger()
        ours = {
            "bootstrap.servers": brokers,
            "group.id": "cowrec",  # required by librdkafka, though no group is used
            "enable.auto.commit": False,
            "enable.auto.offset.store": False,
            "auto.offset.reset": "error",
            "enable.partition.eof": True,
            # A pending fetch blocks all other answers on its connection.
            "fetch.wait.max.ms": 50,
            "fetch.message.max.bytes": PARTITION_BYTES,
        }
        given = dict(settings or {})
        for name in ("auto.offset.reset", "enable.partition.eof"):  # else lost messages and ends would pass unnoticed
            if name in {each.removeprefix("topic.") for each in given}:
                raise UserError(f"{name} of the address must be {str(ours[name]).lower()}, as it is; leave it out")
        try:
            self._consumer = self._kafka.Consumer(ours | given, logger=self._log)
        except self._kafka.KafkaException as error:
            raise UserError(f"librdkafka does not accept the settings of the address: {error.args[0].str()}") from None
        except (TypeError, AttributeError) as error:  # of a name that means a function
            raise UserError(f"the address has settings that are none of text: {error}; leave them out") from None
        try:
            self._partitions = self._partitions_now(ANSWER_SECONDS)
        except self._kafka.KafkaException as error:
            raise OSError(f"no Kafka broker answers at {brokers}: {error}") from error
        if not self._partitions:
            raise UserError(f"{brokers} has no topic {topic!r}; create it, or correct the address")
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
        self._at_end: set[int] = set()
        self._given, self._given_at = 0, dict[int, int]()  # messages, and those until the latest of each partition
        unknown = sorted(positions.keys() - {str(number) for number in self._partitions})
        if unknown:
            raise UserError(f"topic {self._topic!r} has no partition {', '.join(unknown)}; is it another topic?")
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
        oldest = max(int(start), self._bounds(int(partition))[0])
        if oldest >= end:
            return Chunk(partition, start, end, [])
        self._assign({int(partition): oldest})
        deadline = time.monotonic() + REPLAY_SECONDS
        samples: list[bytes] = []
        no_more = self._kafka.KafkaError._PARTITION_EOF, self._kafka.KafkaError._AUTO_OFFSET_RESET
        while time.monotonic() < deadline:
            for message in self._consumer.consume(min(max(1, end - start), MOST_CONSUMED), 0.1):
                error = message.error()
                if error is not None and error.code() in no_more:
                    return Chunk(partition, start, end, samples)  # the stream compares the number of samples
                if error is None and message.offset() < end:
                    samples.append(message.value() or b"")
                if error is None and message.offset() >= end - 1:
                    return Chunk(partition, start, end, samples)
        raise UserError(f"messages of {self._topic!r} must be read again, but Kafka does not answer")

    def close(self) -> None:
        self._consumer.close()

    def _partitions_now(self, timeout: float) -> list[int]:
        """Numbers of the topic's partitions; none if there is no such topic."""
        found = self._consumer.list_topics(self._topic, timeout=timeout).topics[self._topic]
        if found.error is not None and found.error.code() == self._kafka.KafkaError.TOPIC_AUTHORIZATION_FAILED:
            raise UserError(f"Kafka does not give topic {self._topic!r}: {found.error.str()}; grant its user access")
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
        """Groups messages into chunks of one partition each."""
        found: dict[int, list[Any]] = {}
        out_of_range, at_end = set[int](), set[int]()
        for message in messages:
            error = message.error()
            if error is None:
                found.setdefault(message.partition(), []).append(message)
                at_end.discard(message.partition())
            elif error.code() == self._kafka.KafkaError._AUTO_OFFSET_RESET:
                out_of_range.add(message.partition())
            elif error.code() == self._kafka.KafkaError._PARTITION_EOF:
                at_end.add(message.partition())
            else:
                self.counters["errors"] += 1
                self._log.log(logging.WARNING, "Kafka: %s", error.str())
        self._given += sum(map(len, found.values()))
        self._given_at |= dict.fromkeys(found, self._given)
        self._at_end = (self._at_end - found.keys()) | at_end
        patient = self._given - MOST_AHEAD
        unread = {each for each in self._offsets if each not in self._at_end and self._given_at.get(each, 0) >= patient}
        for place, (number, each) in enumerate(found.items(), 1):
            samples = [message.value() or b"" for message in each]
            begin, after = 0, [*found][place:]
            while begin < len(each):
                stop = begin + count_within(samples[begin:])
                start, self._offsets[number] = self._offsets[number], each[stop - 1].offset() + 1
                lost, rest = self._lost.pop(number, 0), [number] * (stop < len(each))
                behind = [str(one) for one in sorted(unread.union(after, rest))]
                self._ready.append(Chunk(str(number), start, self._offsets[number], samples[begin:stop], lost, behind))
                begin = stop
        for number in out_of_range:
            self._skip_lost(number)
        if out_of_range:
            self._assign(self._offsets)

    def _skip_lost(self, number: int) -> None:
        first, end = self._bounds(number)
        offset = self._offsets[number]
        if offset > end:
            raise UserError(
                f"partition {number} of {self._topic!r} ends at offset {end}, but was read up to {offset}: the topic "
                "was re-created, or Kafka lost its end; start without the saved position"
            )
        if first <= offset:  # an election lost the log's end, and other messages have its offsets since
            text = "partition %d of %r lost messages after they had been read; going on at offset %d"
            self._log.log(logging.WARNING, text, number, self._topic, offset)
            return
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
            partition = self._kafka.TopicPartition(self._topic, number)
            first, end = self._consumer.get_watermark_offsets(partition, timeout=ANSWER_SECONDS)
        except self._kafka.KafkaException as error:
            raise OSError(f"cannot get the offsets of {self._topic!r}: {error}") from error
        return first, end


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
