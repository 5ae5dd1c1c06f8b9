"""Open-loop load: latency counts from the moment a request was due, and whatever is not answered is counted."""

import asyncio
import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

ANSWER = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"


@pytest.fixture
def open_loop(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A module of scripts, which is no part of what is installed."""
    monkeypatch.setattr(sys, "path", [str(Path(__file__).resolve().parents[2]), *sys.path])
    return importlib.import_module("scripts.open_loop")


def outcome(open_loop: Any, answers: Callable[[int], bytes | None], *, rate: float, connections: int = 30) -> Any:
    """Of 20 requests to a server that reads the n-th, from 1, and sends what `answers` gives: None: it hangs up.

    Empty bytes are sent for later: all that was held back goes with the next answer.
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
            return await open_loop.open_loop("127.0.0.1", port, [request], rate, 20 / rate, connections)

    return asyncio.run(run())


def test_requests_that_a_stalled_server_holds_up_are_late_from_when_they_were_due(open_loop: Any) -> None:
    """All 20 are answered when the last one is there: the n-th has waited for 20 - n intervals of 10 ms, or longer."""
    for connections in (30, 20):
        found = outcome(open_loop, lambda seen: ANSWER if seen == 20 else b"", rate=100, connections=connections)
        assert (len(found.latencies), found.asked, found.statuses) == (20, 20, {})
        assert (np.sort(found.latencies)[::-1] >= 0.01 * np.arange(19, -1, -1)).all()


def test_a_request_that_finds_no_connection_waits_on_its_own_clock(open_loop: Any) -> None:
    """One connection, answered at once: the same answers, one after the other."""
    found = outcome(open_loop, lambda seen: ANSWER, rate=1000, connections=1)
    assert len(found.latencies) == 20


def test_refusals_and_lost_connections_are_no_latencies(open_loop: Any) -> None:
    busy = b"HTTP/1.1 503 Busy\r\nContent-Length: 0\r\n\r\n"
    found = outcome(open_loop, lambda seen: {3: busy, 5: None}.get(seen, ANSWER), rate=200)
    assert (len(found.latencies), found.statuses) == (18, {503: 1, -1: 1})
