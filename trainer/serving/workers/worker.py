"""One worker process of `cowrec serve --workers`; `WorkerPool` starts it."""

import dataclasses
import os
import signal
import socket
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch

from cowrec.trainer.runtime.service_log import open_log

from ..metrics import share_metrics
from ..served_model import ServedModel
from ..server import answer
from ..service import Service
from .fair_server import FairServer
from .pool import NUMBER_BYTES, Settings, Status, digest
from .shared_arrays import Messages

_STOP_SECONDS = 15.0


class _WorkerService(Service):
    """A service whose model has the tables and versions of another process.

    Args:
        settings: from that process.
        messages: connection to it.
    """

    def __init__(self, settings: Settings, messages: Messages) -> None:
        super().__init__(settings.export_dir, limits=settings.limits, key=settings.key)
        self._max_age, self._messages = settings.max_age, messages
        self._counters: dict[str, int] = {}
        self._complete = False
        self._has_loaded = threading.Event()

    def load(self) -> None:
        super().load()
        self._has_loaded.set()

    def _load_model(self, export_dir: Path) -> ServedModel:
        model = self._model = ServedModel.attached(export_dir, self._key)
        first = threading.Event()
        threading.Thread(target=self._receive, args=(model, first), name="cowrec-receive", daemon=True).start()
        first.wait()
        return model

    def not_ready(self) -> str:
        return super().not_ready() or ("" if self._complete else "other workers are still loading")

    def counters(self) -> dict[str, int]:
        return self._counters

    def _receive(self, model: ServedModel, first: threading.Event) -> None:
        """Uses each state as it arrives, until the other process ends; this one then ends too."""
        try:
            self._acknowledge(0)
            network: Any = None
            while True:
                message = self._messages.receive()
                if isinstance(message, Status):
                    self._counters, self._complete = message.counters, message.complete
                    self.following = message if message.follows else None
                else:
                    generation, state, dense = message
                    if dense is not None:
                        network = model.network({name: torch.from_numpy(each) for name, each in dense.items()})
                    model.use(dataclasses.replace(state, network=network))
                    first.set()
                    self._has_loaded.wait()
                    model.wait_for_older()
                    self._acknowledge(generation)
                    del message, state  # the tables are freed when predictions no longer use them
        except (EOFError, OSError):
            pass
        finally:
            first.set()
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(_STOP_SECONDS)
            os._exit(1)

    def _acknowledge(self, generation: int) -> None:
        self._messages.connection.sendall(generation.to_bytes(NUMBER_BYTES, "little"))


def main() -> None:
    """Runs a worker, whose connection to the pool and listening socket are the files given as arguments."""
    connection, listener = (socket.socket(fileno=int(each)) for each in sys.argv[1:])
    messages = Messages(connection)
    settings, name, listens_at_once = messages.receive()
    open_log(settings.log, f"%(asctime)s cowrec: {name}: %(message)s")
    share_metrics(settings.metrics_dir, name)
    if digest(settings.export_dir) != settings.manifest:
        raise ValueError(f"{settings.export_dir} has changed since this server was started; restart the server")
    service = _WorkerService(settings, messages)
    if not listens_at_once:  # others answer meanwhile
        service.load()
        if service.failure:
            raise service.failure
    answer(service, listener, FairServer)
