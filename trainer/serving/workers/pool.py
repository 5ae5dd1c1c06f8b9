"""The processes that answer requests, and the versions that they are given."""

import dataclasses
import hashlib
import logging
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from cowrec.trainer.export.manifest import MANIFEST
from cowrec.trainer.runtime.service_log import LogSettings, log_of
from cowrec.trainer.signing import SigningKey

from ..current import Current
from ..inference_network import InferenceNetwork
from ..limits import Limits
from ..served_model import ModelState
from .shared_arrays import Messages

logger = logging.getLogger(__name__)

NUMBER_BYTES = 8
"""Size of what a worker sends: 0 when it is ready for the first state, then the generation whose predecessors it has
no use for any more."""
_ACKNOWLEDGE_SECONDS = 120.0
"""Time after which a worker that still uses an earlier version is killed, since newer ones wait for that."""
_SEND_SECONDS = 10.0
"""Time after which a worker that does not read is killed; nothing else is done meanwhile."""
_STATUS_SECONDS = 0.2
_COMMAND = "import sys; del sys.path[0]; from cowrec.trainer.serving.workers.worker import main; main()"
"""Starts a worker; the current folder is not on its path, where a file could be taken for a package."""
_RESTART_SECONDS = 1.0
_STOP_SECONDS = 15.0


def digest(export_dir: Path) -> str:
    """Hash of an export's manifest; empty if it has none."""
    manifest = export_dir / MANIFEST
    return hashlib.sha256(manifest.read_bytes()).hexdigest() if manifest.exists() else ""


@dataclass(frozen=True)
class Settings:
    """What a worker is told first; see `serve`.

    Attributes:
        manifest: `digest` of the export that the tables were loaded from.
    """

    export_dir: Path
    limits: Limits
    max_age: float | None
    metrics_dir: str
    key: SigningKey | None
    manifest: str
    log: LogSettings = field(default_factory=LogSettings)


@dataclass(frozen=True)
class Status:
    """What a worker reports, but does not know itself.

    Attributes:
        complete: whether all workers have been ready; until then, none says that it is.
        follows: whether a publication is followed.
        applied_time, created_time, caught_up, problem, pinned: see `VersionFollower`.
        counters: see `Service.counters`.
    """

    complete: bool
    follows: bool
    applied_time: float
    created_time: float
    caught_up: bool
    problem: str
    pinned: int
    counters: dict[str, int]


@dataclass
class _Worker:
    process: subprocess.Popen[bytes]
    messages: Messages
    received: bytes = b""
    acknowledged: int | None = None
    """None until it is ready."""
    network: InferenceNetwork | None = field(default=None, repr=False)
    """That of the last state it was sent."""


class WorkerPool(Current[ModelState]):
    """Workers that accept requests on one socket; each state that replaces the current one is sent to all.

    A worker that ends is started again and receives the current state. All end with this process, since each has a
    connection to it.

    Args:
        count: of workers.
        settings: what each worker is told first, with its name, and whether it listens before it is ready.
    """

    def __init__(self, count: int, settings: Settings) -> None:
        super().__init__()
        self._settings = settings
        self._sending = threading.RLock()
        self._selector = selectors.DefaultSelector()
        self._workers: dict[int, _Worker | None] = dict.fromkeys(range(count))
        self._start_at = dict.fromkeys(range(count), 0.0)
        self._status: Status | None = None  # that was sent last
        self._complete = False

    @property
    def problem(self) -> str:
        """Why workers cannot answer; empty if they can."""
        if not self._complete:
            return "workers are still loading"
        return "" if any(each.acknowledged for each in self._ready()) else "all workers have ended and start again"

    def run(self, listener: socket.socket, read_status: Callable[[bool], Status], stopping: threading.Event) -> None:
        """Starts workers, and those that have ended again, until ``stopping`` is set.

        Args:
            listener: socket on which they listen.
            read_status: returns what they are told whenever it has changed, from whether they are complete.
            stopping: see above.
        """
        self._status = read_status(False)
        while not stopping.is_set():
            for number, worker in self._workers.items():
                if worker is None and time.monotonic() >= self._start_at[number]:
                    try:
                        self._start(number, listener)
                    except OSError as error:  # of memory, processes or files there are too few at the moment
                        logger.warning("worker %d cannot be started: %s; it is tried again", number, error)
                        self._start_at[number] = time.monotonic() + _RESTART_SECONDS
            for key, _ in self._selector.select(_STATUS_SECONDS):
                self._read(key.data)
            self._complete = self._complete or all(each and each.acknowledged for each in self._workers.values())
            status = read_status(self._complete)
            if repr(status) != repr(self._status):  # NaN, an unknown time, differs from itself
                self._status = status
                for worker in self._ready():
                    self._send(worker, status)

    def close(self) -> None:
        """Ends the workers; they finish their requests."""
        workers = [each for each in self._workers.values() if each]
        for worker in workers:
            if not worker.acknowledged:  # it waits for its first state
                with suppress(OSError):
                    worker.messages.connection.shutdown(socket.SHUT_RDWR)
            worker.process.terminate()
        deadline = time.monotonic() + _STOP_SECONDS
        for worker in workers:
            try:
                worker.process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                worker.process.kill()
                worker.process.wait()
        with self._done:
            self._workers = dict.fromkeys(self._workers)
            self._done.notify_all()

    def replace(self, value: ModelState) -> None:
        with self._sending:
            super().replace(value)
            for worker in self._ready():
                self._send_state(worker)

    def wait_for_older(self) -> None:
        super().wait_for_older()
        with self._done:
            if self._done.wait_for(lambda: not self._behind(), _ACKNOWLEDGE_SECONDS):
                return
            for worker in self._behind():
                logger.warning("a worker (process %d) does not answer; it is killed", worker.process.pid)
                worker.process.kill()
            self._done.wait_for(lambda: not self._behind())

    def _behind(self) -> list[_Worker]:
        """Workers that may use an earlier state."""
        return [each for each in self._ready() if (each.acknowledged or 0) < self._generation]

    def _ready(self) -> list[_Worker]:
        return [each for each in self._workers.values() if each and each.acknowledged is not None]

    def _start(self, number: int, listener: socket.socket) -> None:
        ours, theirs = socket.socketpair()
        files = [theirs.fileno(), listener.fileno()]
        command = [sys.executable, "-c", _COMMAND, *map(str, files)]
        # In a session of its own, so that Ctrl+C in a terminal reaches this process alone, which ends them in order.
        process = subprocess.Popen(command, pass_fds=files, start_new_session=True)
        theirs.close()
        ours.settimeout(_SEND_SECONDS)
        worker = _Worker(process, Messages(ours))
        self._workers[number] = worker
        self._selector.register(ours, selectors.EVENT_READ, number)
        name = f"worker{number}"
        settings = dataclasses.replace(self._settings, log=log_of(name))
        self._send(worker, (settings, name, not self._complete))

    def _read(self, number: int) -> None:
        worker = self._workers[number]
        assert worker is not None
        try:
            received = worker.messages.connection.recv(1 << 12)
        except OSError:
            received = b""
        if not received:
            self._ended(number, worker)
            return
        worker.received += received
        while len(worker.received) >= NUMBER_BYTES:
            generation = int.from_bytes(worker.received[:NUMBER_BYTES], "little")
            worker.received = worker.received[NUMBER_BYTES:]
            with self._sending:
                with self._done:
                    worker.acknowledged = generation
                    self._done.notify_all()
                if not generation:
                    self._send(worker, self._status)
                    if hasattr(self, "value"):
                        self._send_state(worker)

    def _ended(self, number: int, worker: _Worker) -> None:
        self._selector.unregister(worker.messages.connection)
        worker.process.kill()  # if it has only closed its connection
        code = worker.process.wait()
        logger.warning(
            "worker %d (process %d) has ended, %s; it is started again",
            number,
            worker.process.pid,
            f"killed by {signal.Signals(-code).name}" if code < 0 else f"with code {code}",
        )
        with self._sending, self._done:
            worker.messages.connection.close()
            self._workers[number] = None
            self._start_at[number] = time.monotonic() + (_RESTART_SECONDS if worker.acknowledged is None else 0)
            self._done.notify_all()

    def _send_state(self, worker: _Worker) -> None:
        network, worker.network = worker.network, self.value.network
        dense = None
        if worker.network is not network:
            dense = {name: each.numpy() for name, each in worker.network.weights().items()}
        self._send(worker, (self._generation, dataclasses.replace(self.value, network=cast(Any, None)), dense))

    def _send(self, worker: _Worker, message: Any) -> None:
        with self._sending:
            try:
                worker.messages.send(message)
            except OSError:  # it has ended, or does not read: `_read` finds its end
                worker.process.kill()
