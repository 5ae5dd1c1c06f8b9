"""The process that starts workers, loads the model for them, and applies versions."""

import math
import signal
import socket
import threading
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FrameType

from cowrec.trainer.signing import SigningKey

from ..limits import Limits
from ..metrics import share_metrics
from ..served_model import ServedModel
from ..service import Service
from .pool import Settings, Status, WorkerPool, digest
from .shared_arrays import allocate


class Supervisor:
    """Runs workers; see `serve` for the arguments.

    Attributes:
        service: of this process, which answers no predictions.
    """

    def __init__(
        self,
        workers: int,
        export_dir: Path,
        follow: str | None,
        limits: Limits | None,
        max_age: float | None,
        *,
        obeys_pin: bool,
        key: SigningKey | None,
    ) -> None:
        self._metrics = TemporaryDirectory(prefix="cowrec-serve-")
        share_metrics(self._metrics.name, "supervisor")
        limits = limits or Limits()
        self._pool = WorkerPool(
            workers, Settings(export_dir, limits, max_age, self._metrics.name, key, digest(export_dir))
        )
        self.service = _PoolService(export_dir, follow, limits, max_age, obeys_pin=obeys_pin, key=key)
        self.service.pool = self._pool

    def run(self, listener: socket.socket) -> None:
        """Returns after SIGTERM.

        Raises:
            KeyboardInterrupt: after SIGINT.
            Exception: what prevents the model from being loaded.
        """
        stopping, received = threading.Event(), list[int]()

        def stop(number: int, _: FrameType | None) -> None:
            received.append(number)
            stopping.set()

        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, stop)
        threading.Thread(target=self._load, args=(stopping,), name="cowrec-load", daemon=True).start()
        try:
            self._pool.run(listener, self._status, stopping)
        finally:
            self._pool.close()
            self.service.close()
            self._metrics.cleanup()
        if self.service.failure:
            raise self.service.failure
        if received[0] == signal.SIGINT:
            raise KeyboardInterrupt

    def _load(self, stopping: threading.Event) -> None:
        self.service.load()
        if self.service.failure:
            stopping.set()

    def _status(self, complete: bool) -> Status:
        counters = self.service.counters() if self.service.loaded else {}
        following = self.service.following
        if following is None:
            return Status(complete, False, math.nan, math.nan, True, "", 0, counters)
        times = following.applied_time, following.created_time
        return Status(complete, True, *times, following.caught_up, following.problem, following.pinned, counters)


class _PoolService(Service):
    """A service whose model is in shared memory, with the versions that workers use."""

    pool: WorkerPool

    def not_ready(self) -> str:
        return super().not_ready() or self.pool.problem

    def _load_model(self, export_dir: Path) -> ServedModel:
        return ServedModel.load(export_dir, self._key, self.pool, allocate)
