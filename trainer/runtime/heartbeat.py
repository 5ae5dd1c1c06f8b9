"""Heartbeats: each process of a run reports its step every second, so that a hung process can be named."""

import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from .errors import NonFiniteLoss, ProcessLost
from .processes import Process
from .stopping import ignoring_sigterm

_PERIOD = 1.0
_SILENT_FOR = 4.0
_ANSWERS_WITHIN = 10.0
"""Seconds in which the store answers; a call waits for ever for a machine that has lost its power or its network."""


class Heartbeat:
    """The heartbeat of this process; it reports the step that :meth:`reached` was last called with.

    Args:
        process: this process; a run of one process has no heartbeat.
    """

    def __init__(self, process: Process):
        self._step = 0
        self._process = process
        if process.world_size == 1:
            return
        # A separate connection, since one that waits for another process would delay the heartbeat.
        store: Any = _get_default_store()
        self._store = dist.PrefixStore("heartbeat", store.clone())
        self._stop = threading.Event()
        self._beat(0)
        self._thread = threading.Thread(target=self._run, name="cowrec-heartbeat", daemon=True)
        self._thread.start()

    def reached(self, step: int) -> None:
        """Notes that a step has been taken."""
        self._step = step

    @contextmanager
    def names_the_lost(self) -> Iterator[None]:
        """Turns a communication failure into :class:`ProcessLost` if processes have stopped sending heartbeats."""
        try:
            yield
        except NonFiniteLoss:  # raised by all processes
            raise
        except RuntimeError as error:
            with ignoring_sigterm():
                lost = self.lost()
            if not lost:
                raise
            raise ProcessLost(
                f"stopped at step {self._step:,}: {lost}; check its log and its machine, then continue with --resume"
            ) from error
        finally:
            self._end()

    def _end(self) -> None:
        if self._process.world_size > 1:
            self._stop.set()
            self._thread.join(_PERIOD)  # it may wait for a machine that no longer answers

    def lost(self) -> str:
        """Which processes have stopped sending heartbeats, which takes seconds to find out; empty if none has."""
        if self._process.world_size == 1:
            return ""
        found: list[str] = []
        reading = threading.Thread(target=lambda: found.append(self._silent()), name="cowrec-lost", daemon=True)
        reading.start()
        reading.join(_SILENT_FOR + _ANSWERS_WITHIN)
        return found[0] if found else f"the machine of rank 0{_named(_first_machine())} does not answer"

    def _run(self) -> None:
        beats = 1
        while not self._stop.wait(_PERIOD):
            try:
                self._beat(beats)
            except RuntimeError:  # the store has closed, because the run has ended
                return
            beats += 1

    def _beat(self, count: int) -> None:
        self._store.set(str(self._process.rank), f"{count} {self._step} {socket.gethostname()}")

    def _silent(self) -> str:
        """What :meth:`lost` returns, from the store. Beats are counted, since clocks of machines differ."""
        try:
            before = self._read()
            time.sleep(_SILENT_FOR)
            now = self._read()
        except RuntimeError:
            return f"rank 0{_named(_first_machine())} has ended, or its machine does not answer"
        lost = [
            f"rank {rank}{_named(host)} (last heartbeat at step {int(step):,})"
            for rank, (count, step, host) in now.items()
            if count == before[rank][0]
        ]
        return f"no heartbeat from {', '.join(lost)}; it hangs or has ended" if lost else ""

    def _read(self) -> dict[int, list[str]]:
        """Beats, step and host of every other rank."""
        ranks = [rank for rank in range(self._process.world_size) if rank != self._process.rank]
        found = self._store.multi_get([str(rank) for rank in ranks])
        return {rank: each.decode().split(maxsplit=2) for rank, each in zip(ranks, found, strict=True)}


def _first_machine() -> str:
    return os.environ.get("MASTER_ADDR", "")


def _named(host: str) -> str:
    return f" on {host}" if host else ""
