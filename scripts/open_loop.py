"""HTTP load: an open loop sends requests on schedule, answered or not, a closed one when a connection is free.

In an open loop, latency starts at the scheduled time of a request, so a stalled server cannot hide its latency by
delaying clients (coordinated omission).
"""

import asyncio
import math
import time
from collections import deque
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field
from typing import cast

import uvloop

DRAIN_SECONDS = 5.0
"""Maximum wait for answers after the scheduled time of the last request."""


@dataclass
class Outcome:
    """Outcome of the requests at one rate.

    Attributes:
        latencies: seconds of requests answered with status 200, in order of the answers.
        statuses: counts of other statuses; -1 for a lost connection, -2 for a request that waited too long for one.
        scheduled: scheduled requests.
        seconds: time from the first request to the last answer.
        client_cpu: share of a core that the client used; near 1 it, and not the server, is what is measured.
    """

    latencies: list[float] = field(default_factory=list)
    statuses: dict[int, int] = field(default_factory=dict)
    scheduled: int = 0
    seconds: float = 0.0
    client_cpu: float = 0.0


def request_bytes(path: str, body: bytes) -> bytes:
    """Builds a POST request with a JSON body, for a keep-alive connection."""
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


def run_loop(loop: Coroutine[None, None, Outcome]) -> Outcome:
    """Runs one of the loops below."""
    start, cpu = time.perf_counter(), time.process_time()
    outcome = uvloop.run(loop)
    outcome.client_cpu = (time.process_time() - cpu) / (time.perf_counter() - start)
    return outcome


async def closed_loop(host: str, port: int, requests: Sequence[bytes], count: int, connections: int) -> Outcome:
    """Sends ``count`` requests round-robin, each as soon as a connection is free; see `open_loop`."""
    pool = await _connected(host, port, connections, math.inf)
    start = time.perf_counter()
    for index in range(count):
        pool.send(None, requests[index % len(requests)])
    await pool.finished(start, count, 60.0)
    return pool.outcome


async def open_loop(
    host: str,
    port: int,
    requests: Sequence[bytes],
    rate: float,
    seconds: float,
    connections: int,
    patience: float = math.inf,
) -> Outcome:
    """Sends requests round-robin at a constant rate.

    Args:
        host, port: address of the server.
        requests: complete HTTP requests.
        rate: requests per second.
        seconds: duration.
        connections: maximum open connections; a request waits for a free one, which counts as latency.
        patience: seconds that it waits before it is given up.
    """
    pool = await _connected(host, port, connections, patience)
    start = time.perf_counter() + 0.05
    total = round(rate * seconds)
    sent = 0
    while sent < total:
        due = min(total, int((time.perf_counter() - start) * rate) + 1)
        while sent < due:
            pool.send(start + sent / rate, requests[sent % len(requests)])
            sent += 1
        await asyncio.sleep(max(0.0, start + sent / rate - time.perf_counter()))
    await pool.finished(start, total)
    return pool.outcome


async def _connected(host: str, port: int, connections: int, patience: float) -> "_Pool":
    pool = _Pool(patience)
    for _ in range(connections):
        await asyncio.get_running_loop().create_connection(lambda: _Connection(pool), host, port)
    return pool


class _Pool:
    """Pool of connections and queue of requests that wait for one."""

    def __init__(self, patience: float) -> None:
        self.outcome, self._patience = Outcome(), patience
        self.last_answer = time.perf_counter()
        self.unanswered = 0
        self._free: list[_Connection] = []
        self._all: list[_Connection] = []
        self._waiting: deque[tuple[float | None, bytes]] = deque()

    def send(self, due: float | None, request: bytes) -> None:
        """Sends a request, scheduled for ``due`` or for the time at which a connection is free."""
        self.unanswered += 1
        if self._free:
            self._free.pop().send(due, request)
        else:
            self._waiting.append((due, request))

    def add(self, connection: "_Connection") -> None:
        self._all.append(connection)
        self._free.append(connection)

    def lost(self, connection: "_Connection") -> None:
        """Removes an idle connection that the server closed."""
        if connection in self._free:
            self._free.remove(connection)

    def answered(self, connection: "_Connection", due: float, status: int) -> None:
        self.last_answer = time.perf_counter()
        self.unanswered -= 1
        if status == 200:
            self.outcome.latencies.append(self.last_answer - due)
        else:
            self.outcome.statuses[status] = self.outcome.statuses.get(status, 0) + 1
        if status < 0:
            return
        while self._waiting and self.last_answer - (self._waiting[0][0] or math.inf) > self._patience:
            self._waiting.popleft()
            self.unanswered -= 1
            self.outcome.statuses[-2] = self.outcome.statuses.get(-2, 0) + 1
        if self._waiting:
            connection.send(*self._waiting.popleft())
        else:
            self._free.append(connection)

    async def finished(self, start: float, total: int, wait: float = DRAIN_SECONDS) -> None:
        """Waits for the answers and closes the connections."""
        deadline = time.perf_counter() + wait
        while self.unanswered and time.perf_counter() < deadline:
            await asyncio.sleep(0.01)
        self.outcome.scheduled, self.outcome.seconds = total, self.last_answer - start
        for connection in self._all:
            connection.transport.abort()


class _Connection(asyncio.Protocol):
    """Connection with one request in flight."""

    transport: asyncio.Transport

    def __init__(self, pool: _Pool) -> None:
        self._pool, self._received, self._due = pool, b"", -1.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self._pool.add(self)

    def send(self, due: float | None, request: bytes) -> None:
        self._due = time.perf_counter() if due is None else due
        self.transport.write(request)

    def data_received(self, data: bytes) -> None:
        self._received += data
        head, found, body = self._received.partition(b"\r\n\r\n")
        if not found:
            return
        length = int(head.lower().partition(b"content-length:")[2].partition(b"\r\n")[0])
        if len(body) >= length:
            due, self._due, self._received = self._due, -1.0, b""
            self._pool.answered(self, due, int(head[9:12]))

    def connection_lost(self, exc: Exception | None) -> None:
        if self._due >= 0:
            self._pool.answered(self, self._due, -1)
        else:
            self._pool.lost(self)
