"""A Redis stream as a source of samples: entries whose field `sample` is a JSON object.

Entries are read by their ids, without a consumer group: how far they were read is the stream's own position. So they
must stay until no journal can ask for them again: `XADD ... MAXLEN ~ N` with an N that covers the time between two
snapshots. Entries that Redis trimmed before they were read are gone; that is said and counted (as one `gaps`, since
Redis cannot tell how many entries it was; the one case that looks alike, the last entry read being the last one
trimmed, is counted too). What a Redis that dies loses of the last second was never read, or is known here already; in
the second case `rewound` counts it.
"""

import logging
import time
from collections.abc import Mapping
from typing import Any

from .source import Chunk, Place

BEGINNING = "0-0"
FIELD = b"sample"
FIRST_WAIT, LONGEST_WAIT = 0.05, 5.0
"""Seconds between attempts to reach a server that is away; doubled from one to the next."""
ANSWER_SECONDS = 10.0

logger = logging.getLogger(__name__)


class RedisSource:
    """One stream; a place is the id of the last entry read.

    Args:
        url: of the server, as redis-py takes it.
        stream: the key.

    Raises:
        ValueError: redis-py is not installed.
    """

    def __init__(self, url: str, stream: str) -> None:
        try:
            import redis
        except ImportError:
            raise ValueError(
                "a Redis source needs redis-py, which is not installed: pip install 'cowrec[online]'"
            ) from None
        self._redis, self._stream = redis, stream
        self._client = redis.Redis.from_url(url, socket_timeout=ANSWER_SECONDS, socket_connect_timeout=ANSWER_SECONDS)
        self.ended = False
        self.counters = {"gaps": 0, "rewound": 0, "reconnects": 0}
        self._wait, self._away = FIRST_WAIT, False
        self.seek({})

    def seek(self, places: Mapping[str, Place]) -> None:
        self._last = str(places.get("", BEGINNING))
        self._rewound = False

    def poll(self, max_samples: int, timeout: float) -> Chunk | None:
        deadline = time.monotonic() + timeout
        while True:
            try:
                chunk = self._next(max_samples)
                if self._away:
                    logger.warning("Redis is back; going on after %s", self._last)
                    self._away, self._wait = False, FIRST_WAIT
                left = deadline - time.monotonic()
                if chunk is not None or left <= 0:
                    return chunk
                # Only to be woken: what it returns is read again together with what the stream says of itself.
                self._client.xread(
                    {self._stream: self._last}, 1, block=max(1, int(1000 * min(left, ANSWER_SECONDS / 2)))
                )
            except (self._redis.ConnectionError, self._redis.TimeoutError) as error:
                if not self._try_again(error, deadline):
                    return None

    def read(self, partition: str, start: Place, end: Place) -> Chunk:
        deadline = time.monotonic() + 60
        while True:
            try:
                entries: Any = self._client.xrange(self._stream, f"({start}", end)
                return Chunk(partition, start, end, [_sample(fields) for _, fields in entries])
            except (self._redis.ConnectionError, self._redis.TimeoutError) as error:
                if not self._try_again(error, deadline):
                    raise ValueError(
                        f"entries of {self._stream!r} are needed again, but Redis is away: {error}"
                    ) from error

    def close(self) -> None:
        self._client.close()

    def _next(self, max_samples: int) -> Chunk | None:
        """What there is now. In one transaction, so that nothing is trimmed between the look and the reading."""
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
                "the stream %r ends at %s, but was read up to %s: Redis lost its end, or was emptied; entries with ids "
                "up to the latter will not be read", self._stream, newest, self._last,
            )  # fmt: skip

    def _try_again(self, error: Exception, deadline: float) -> bool:
        """Waits, longer each time; False once the deadline has come."""
        if not self._away:
            logger.warning("Redis is away (%s); trying again", error)
            self._away = True
        self.counters["reconnects"] += 1
        time.sleep(max(0.0, min(self._wait, deadline - time.monotonic())))
        self._wait = min(2 * self._wait, LONGEST_WAIT)
        return time.monotonic() < deadline


def _sample(fields: Mapping[bytes, bytes]) -> bytes:
    """The sample of an entry; of one without it, or that was deleted, text that is no JSON."""
    return (fields or {}).get(FIELD, b"")


def _order(entry: str) -> tuple[int, int]:
    milliseconds, _, number = entry.partition("-")
    return int(milliseconds), int(number)
