"""A Redis stream of samples: entries whose field `sample` is a JSON object.

Entries are read by their ids from the stream's own position, without a consumer group. They must be retained while a
journal may refer to them: use `XADD ... MAXLEN ~ N` with an N that covers the time between two snapshots. Entries
trimmed before they were read are logged and counted as one gap (`gaps`), since Redis does not report how many there
were. If the last entry read is also the last one trimmed, a gap is counted though nothing was lost: the two cases look
alike. A crash of Redis may lose its last second of entries; if some of them were already read, `rewound` counts it.
"""

import logging
import time
from collections.abc import Mapping
from typing import Any

import pyarrow as pa

from cowrec.data_pipeline.urls import open_redis

from .source import Chunk, SourcePosition, json_lines

BEGINNING = "0-0"
FIELD = b"sample"
MIN_BACKOFF, MAX_BACKOFF = 0.05, 5.0
"""Seconds between attempts to reconnect; doubled after each attempt."""
ANSWER_SECONDS = 10.0

logger = logging.getLogger(__name__)


class RedisSource:
    """One stream; a position is the id of the last entry read.

    Args:
        url: URL of the server, as redis-py takes it.
        stream: key of the stream.

    Raises:
        ValueError: redis-py is not installed, or the URL is not valid.
    """

    def __init__(self, url: str, stream: str) -> None:
        self._client = open_redis(url, socket_timeout=ANSWER_SECONDS, socket_connect_timeout=ANSWER_SECONDS)
        import redis

        self._redis, self._stream = redis, stream
        self.ended = False
        self.counters = {"gaps": 0, "rewound": 0, "reconnects": 0}
        self._backoff, self._disconnected = MIN_BACKOFF, False
        self.seek({})

    def seek(self, positions: Mapping[str, SourcePosition]) -> None:
        self._last = str(positions.get("", BEGINNING))
        self._rewound = False

    def poll(self, max_samples: int, timeout: float) -> Chunk | None:
        deadline = time.monotonic() + timeout
        while True:
            try:
                chunk = self._next(max_samples)
                if self._disconnected:
                    logger.warning("Redis answers again; continuing after %s", self._last)
                    self._disconnected, self._backoff = False, MIN_BACKOFF
                remaining = deadline - time.monotonic()
                if chunk is not None or remaining <= 0:
                    return chunk
                # Only waits for an entry: `_next` reads it again together with the state of the stream.
                self._client.xread(
                    {self._stream: self._last}, 1, block=max(1, int(1000 * min(remaining, ANSWER_SECONDS / 2)))
                )
            except (self._redis.ConnectionError, self._redis.TimeoutError) as error:
                if not self._retry(error, deadline):
                    return None

    def read(self, partition: str, start: SourcePosition, end: SourcePosition) -> Chunk:
        deadline = time.monotonic() + 60
        while True:
            try:
                entries: Any = self._client.xrange(self._stream, f"({start}", end)
                return Chunk(partition, start, end, [_sample(fields) for _, fields in entries])
            except (self._redis.ConnectionError, self._redis.TimeoutError) as error:
                if not self._retry(error, deadline):
                    raise ValueError(
                        f"entries of {self._stream!r} must be read again, but Redis does not answer: {error}"
                    ) from error

    def close(self) -> None:
        self._client.close()

    def _next(self, max_samples: int) -> Chunk | None:
        """Reads available entries, in one transaction with the check for a gap so that none is trimmed between."""
        with self._client.pipeline(transaction=True) as pipeline:
            pipeline.xinfo_stream(self._stream)
            pipeline.xread({self._stream: self._last}, max_samples)
            about, found = pipeline.execute(raise_on_error=False)
        for answer in (about, found):
            if isinstance(answer, Exception) and "no such key" not in str(answer):
                raise answer
        if not isinstance(about, Exception):
            self._check_reach(about)
        if not found or isinstance(found, Exception):
            return None
        ((_, entries),) = found.items() if isinstance(found, dict) else found
        entries = entries[0] if isinstance(found, dict) else entries
        lost = -1 if self._is_gap(about) else 0
        if lost:
            self.counters["gaps"] += 1
            logger.warning("entries of %r after %s were trimmed before they were read", self._stream, self._last)
        start, self._last = self._last, entries[-1][0].decode()
        return Chunk("", start, self._last, [_sample(fields) for _, fields in entries], lost)

    def _is_gap(self, about: Mapping[str, Any]) -> bool:
        first = about["first-entry"]
        return self._last != BEGINNING and first is not None and _order(first[0].decode()) > _order(self._last)

    def _check_reach(self, about: Mapping[str, Any]) -> None:
        newest = about["last-generated-id"].decode()
        if _order(newest) < _order(self._last) and not self._rewound:
            self._rewound = True
            self.counters["rewound"] += 1
            logger.warning(
                "the stream %r ends at %s, but was read up to %s: Redis lost its end or was emptied; entries with ids "
                "up to the latter will not be read", self._stream, newest, self._last,
            )  # fmt: skip

    def _retry(self, error: Exception, deadline: float) -> bool:
        """Waits with exponential backoff; False once the deadline has passed."""
        if not self._disconnected:
            logger.warning("Redis does not answer (%s); retrying", error)
            self._disconnected = True
        self.counters["reconnects"] += 1
        time.sleep(max(0.0, min(self._backoff, deadline - time.monotonic())))
        self._backoff = min(2 * self._backoff, MAX_BACKOFF)
        return time.monotonic() < deadline


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


def _sample(fields: Mapping[bytes, bytes]) -> bytes:
    """Returns the sample of an entry; empty, hence malformed, if it has none or was deleted."""
    return (fields or {}).get(FIELD, b"")


def _order(entry: str) -> tuple[int, int]:
    milliseconds, _, number = entry.partition("-")
    return int(milliseconds), int(number)
