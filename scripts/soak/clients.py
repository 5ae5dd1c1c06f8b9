"""The clients of the soak: one that asks for predictions, a probe of health, and the readings of memory."""

import http.client
import json
import threading
import time
from collections import Counter
from contextlib import suppress
from typing import Any

from .processes import SERVERS, Cluster, get
from .samples import Producer

PAUSE = 0.2
"""Seconds between two requests for predictions."""
SAMPLES = 4
MEMORY_SECONDS = 5.0
TIMEOUT = 10.0


class Clients:
    """Threads that ask, and count the answers.

    Attributes:
        answers: by server and outcome: "right", "refused" (503), "unreachable", or "wrong: ..." otherwise.
        latencies: seconds of the untouched server's answers to /livez, as (moment, seconds).
        unhealthy: times that it did not answer, or not with 200.
        memory: readings (moment, process, MiB).
    """

    def __init__(self, cluster: Cluster, producer: Producer) -> None:
        self._cluster, self._producer = cluster, producer
        self._stop = threading.Event()
        self.answers = {name: Counter[str]() for name in SERVERS}
        self.latencies: list[tuple[float, float]] = []
        self.unhealthy = 0
        self.memory: list[tuple[float, str, float]] = []
        self._threads = [threading.Thread(target=each, daemon=True) for each in (self._ask, self._probe, self._read)]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def _ask(self) -> None:
        connections = {
            name: http.client.HTTPConnection("127.0.0.1", port, timeout=TIMEOUT)
            for name, port in self._cluster.ports.items()
        }
        while not self._stop.wait(PAUSE):
            for name, connection in connections.items():
                samples = [json.loads(each.content) for each in self._producer.newest[-SAMPLES:]]
                self.answers[name][outcome(connection, samples)] += 1

    def _probe(self) -> None:
        port = self._cluster.health_ports[SERVERS[0]]
        while not self._stop.wait(1.0):
            begun = time.monotonic()
            status, _ = get(port, "/livez", TIMEOUT)
            if status == 200:
                self.latencies.append((time.time(), time.monotonic() - begun))
            else:
                self.unhealthy += 1

    def _read(self) -> None:
        while not self._stop.wait(MEMORY_SECONDS):
            for process in self._cluster.processes:
                size = process.rss_mb()
                if size is not None:
                    self.memory.append((time.time(), process.name, size))


def outcome(connection: http.client.HTTPConnection, samples: list[dict[str, Any]]) -> str:
    """Asks for predictions; returns what became of it."""
    try:
        connection.request("POST", "/predict", json.dumps(samples))
        answer = connection.getresponse()
        content = answer.read()
    except (OSError, http.client.HTTPException) as error:
        connection.close()
        return "wrong: no answer in time" if isinstance(error, TimeoutError) else "unreachable"
    if answer.status == 503:
        return "refused"
    if answer.status != 200:
        return f"wrong: status {answer.status}"
    return "right" if is_right(content, len(samples)) else f"wrong: {content[:100]!r}"


def is_right(content: bytes, count: int) -> bool:
    """True if an answer has that many probabilities, or the one of a single sample."""
    with suppress(ValueError, KeyError, TypeError):
        answer = json.loads(content)
        found = [answer["probability"]] if "probability" in answer else answer["probabilities"]
        return len(found) == count and all(isinstance(each, float) and 0 <= each <= 1 for each in found)
    return False
