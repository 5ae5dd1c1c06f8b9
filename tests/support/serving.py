"""Servers of predictions for tests: `cowrec serve` as a process, and in a thread with other limits."""

import atexit
import contextlib
import csv
import functools
import http.client
import json
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from prometheus_client.parser import text_string_to_metric_families

from commands.forked_commands import Forked
from cowrec.trainer.export.export import export_run
from cowrec.trainer.serving.server import http_server, service_app
from cowrec.trainer.serving.service import Limits, Service
from trained_runs import make_folder, predicted, run
from trainer_cases import ENVIRONMENT, TRAIN_ROWS, free_port

DEADLINE = 600
GOOD = {"price": 3, "city": "city1", "tags": ["t1", "t2"], "history": [{"id": "h1", "weight": 0.5}]}


@functools.cache
def served_folder() -> Path:
    """A folder with data, a run of one epoch and its export, one for all tests of this process."""
    folder = make_folder(Path(tempfile.mkdtemp(prefix="cowrec-served-")))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    run(folder, folder / "run", "train.epochs=1")
    export_run(folder / "run", folder / "export")
    return folder


def raw_samples(folder: Path) -> list[dict[str, Any]]:
    """Raw samples of the test split, as text."""
    with (folder / "raw.csv").open() as file:
        rows = list(csv.DictReader(file))[TRAIN_ROWS:]
    return [{key: value or None for key, value in row.items() if key != "click"} for row in rows]


@functools.cache
def predictions(folder: Path, run: str) -> np.ndarray:
    """Predictions of `cowrec predict` for the test split, with a run of the folder."""
    return predicted(folder / run, folder / "data")


class Client:
    """Requests to a server; ``stop`` asks it to end as a signal does, if it is a thread."""

    stop: Callable[[], None]

    def __init__(self, port: int) -> None:
        self.port = port

    def ask(self, method: str, path: str, body: Any = None, port: int | None = None) -> tuple[int, Any]:
        """Status and content of a response; bytes are sent unchanged, other bodies as JSON."""
        connection = http.client.HTTPConnection("127.0.0.1", port or self.port, timeout=DEADLINE)
        try:
            sent = body if isinstance(body, bytes | None) else json.dumps(body).encode()
            connection.request(method, path, sent)
            answer = connection.getresponse()
            content = answer.read()
            is_json = answer.headers.get_content_type() == "application/json"
            return answer.status, json.loads(content) if is_json else content.decode()
        finally:
            connection.close()

    def predict(self, body: Any) -> tuple[int, Any]:
        return self.ask("POST", "/predict", body)

    def health(self) -> dict[str, Any]:
        content: dict[str, Any] = self.ask("GET", "/readyz")[1]
        return content

    def metrics(self) -> dict[str, float]:
        """Samples by name and labels, such as 'cowrec_rejected_requests_total{reason=bad_json}'."""
        found = {}
        for family in text_string_to_metric_families(self.ask("GET", "/metrics")[1]):
            for sample in family.samples:
                labels = ",".join(f"{key}={value}" for key, value in sorted(sample.labels.items()))
                found[sample.name + (f"{{{labels}}}" if labels else "")] = sample.value
        return found

    def require_alive(self) -> None:
        """Raises AssertionError if the server has ended."""

    def wait_for(self, key: str, value: Any) -> dict[str, Any]:
        """Waits until `key` of the health has that value; returns the health. A version must be able to predict."""
        deadline, health = time.monotonic() + DEADLINE, {}
        while time.monotonic() < deadline:
            self.require_alive()
            with contextlib.suppress(OSError):
                health = self.health()
                if health.get(key) == value and (key != "version" or health["status"] != "waiting"):
                    return health
            time.sleep(0.02)
        raise AssertionError(f"{key} did not become {value!r} in {DEADLINE:g} s: {health}")


class Serving(Client):
    """The process of the command, and requests to it; ``imports`` its libraries as the command that users start."""

    process: Forked | subprocess.Popen[str]

    def __init__(self, export_dir: Path, *options: str, port: int | None = None, imports: bool = False) -> None:
        super().__init__(port or free_port())
        # A busy machine is not what is tested: a request may wait as long as the test does.
        command = ["serve", str(export_dir), "--port", str(self.port), "--timeout-ms", f"{1000 * DEADLINE:g}", *options]
        if imports:
            launched = [sys.executable, "-m", "cowrec.trainer", *command]
            self.process = subprocess.Popen(launched, env=ENVIRONMENT, stderr=subprocess.PIPE, text=True)
        else:
            self.process = Forked(*command)

    def require_alive(self) -> None:
        assert self.process.poll() is None, self.process.communicate()[1]

    def send(self, number: signal.Signals) -> tuple[int, str]:
        """Sends a signal that ends it; returns its exit code and stderr."""
        self.process.send_signal(number)
        stderr = self.process.communicate(timeout=DEADLINE)[1]
        return self.process.returncode, stderr


@contextmanager
def serving(
    export_dir: Path, *options: str, port: int | None = None, status: str = "ok", imports: bool = False
) -> Iterator[Serving]:
    """Starts a service and waits until it has a status; kills it at the end if it still runs."""
    server = Serving(export_dir, *options, port=port, imports=imports)
    try:
        server.wait_for("status", status)
        yield server
    finally:
        server.process.kill()
        server.process.wait()


@contextmanager
def serving_here(
    export_dir: Path, limits: Limits, follow: str | None = None, *, drain_seconds: float = 0.0, access_log: bool = False
) -> Iterator[tuple[Client, Service]]:
    """Serves in a thread of this process, with limits that the command has no flags for."""
    service = Service(export_dir, follow, limits)
    app = service_app(service, lambda: setattr(server, "should_exit", bool(service.failure)), access_log=access_log)
    server = http_server(app, service, drain_seconds)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=server.run, args=([listener],))
        thread.start()
        client = Client(listener.getsockname()[1])
        client.stop = lambda: setattr(server, "should_exit", True)
        try:
            client.wait_for("status", "ok")
            yield client, service
        finally:
            client.stop()
            thread.join(600)
            assert not thread.is_alive()


def unfinished(server: Client) -> tuple[socket.socket, bytes]:
    """A request of which part of the body was sent, and the remainder."""
    body = json.dumps(GOOD).encode()
    connection = socket.create_connection(("127.0.0.1", server.port), timeout=30)
    connection.sendall(b"POST /predict HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body) + body[:9])
    return connection, body[9:]
