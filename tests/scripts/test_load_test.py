"""Open-loop load: latency starts at the scheduled time of a request, and unanswered requests are counted."""

import asyncio
import importlib
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

ANSWER = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"


@pytest.fixture
def open_loop(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Module of scripts, which is not installed."""
    monkeypatch.setattr(sys, "path", [str(Path(__file__).resolve().parents[2]), *sys.path])
    return importlib.import_module("scripts.load_test")


def outcome(open_loop: Any, answers: Callable[[int], bytes | None], *, rate: float, connections: int = 30) -> Any:
    """Sends 20 requests to a server that answers the n-th, from 1, with `answers(n)`; None closes the connection.

    Empty bytes delay the answer: all delayed answers are sent with the next one.
    """
    seen = 0
    held: list[tuple[asyncio.StreamWriter, bytes]] = []

    async def client(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal seen
        while await reader.read(1000):
            seen += 1
            answer = answers(seen)
            if answer is None:
                writer.close()
                return
            held.append((writer, answer or ANSWER))
            if answer:
                for each, bytes_ in held:
                    each.write(bytes_)
                held.clear()

    async def run() -> Any:
        server = await asyncio.start_server(client, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        request = open_loop.request_bytes("/", b"{}")
        async with server:
            return await open_loop.open_loop(port, [request], rate, 20 / rate, connections, math.inf)

    return asyncio.run(run())


def test_latency_of_a_stalled_server_starts_at_the_scheduled_time(open_loop: Any) -> None:
    """All 20 are answered after the last one arrives, so the n-th waits at least 20 - n intervals of 10 ms."""
    for connections in (30, 20):
        found = outcome(open_loop, lambda seen: ANSWER if seen == 20 else b"", rate=100, connections=connections)
        assert (len(found.latencies), found.scheduled, found.statuses) == (20, 20, {})
        assert (np.sort(found.latencies)[::-1] >= 0.01 * np.arange(19, -1, -1)).all()
