"""Open-loop load counts from the scheduled time of a request; the soak of an hour, for seconds, with a few faults."""

import asyncio
import json
import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from scripts import load_test
from trainer_cases import ENVIRONMENT

ANSWER = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"


def outcome(answers: Callable[[int], bytes | None], *, rate: float, connections: int = 30) -> Any:
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
                for transport, bytes_ in held:
                    transport.write(bytes_)
                held.clear()

    async def run() -> Any:
        server = await asyncio.start_server(client, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        request = load_test.request_bytes("/", b"{}")
        async with server:
            return await load_test.open_loop(port, [request], rate, 20 / rate, connections, math.inf)

    return asyncio.run(run())


def test_latency_of_a_stalled_server_starts_at_the_scheduled_time() -> None:
    """All 20 are answered after the last one arrives, so the n-th waits at least 20 - n intervals of 10 ms."""
    for connections in (30, 20):
        found = outcome(lambda seen: ANSWER if seen == 20 else b"", rate=100, connections=connections)
        assert (len(found.latencies), found.scheduled, found.statuses) == (20, 20, {})
        assert (np.sort(found.latencies)[::-1] >= 0.01 * np.arange(19, -1, -1)).all()


@pytest.mark.thorough
def test_kills_lose_nothing_and_every_fault_has_a_line(tmp_path: Path) -> None:
    faults = ["kill_redis", "kill_trainer", "wrong_samples", "duplicate_samples"]
    output, seconds = tmp_path / "soak.jsonl", ("--minutes", "0.08", "--fault-seconds", "1.2", "--quiet-seconds", "5")
    command = [sys.executable, "-m", "scripts.soak", "--output", str(output), *seconds, "--rate", "200"]
    command += ["--faults", ",".join(faults)]
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run(command, cwd=root, env=ENVIRONMENT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    *lines, summary = map(json.loads, output.read_text().splitlines())
    assert sorted(line["fault"] for line in lines) == sorted(faults)
    assert summary["passed"]
    assert summary["expected"]["malformed"] > 10
    assert summary["expected"]["duplicates"] >= 500
    assert summary["counters"]["handed_out"] == summary["expected"]["handed_out"] > 1000
