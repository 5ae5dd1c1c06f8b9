"""Heartbeats: each process of a run reports its step every second, so that a hung process can be named."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from .errors import NonFiniteLoss, ProcessLost
from .processes import Process

_PERIOD = 1.0
_SILENT_FOR = 4.0


class Heartbeat:
    """The heartbeat of this process. Set ``step``, the progress that it reports, after each step.

    Args:
        process: this process; a run of one process has no heartbeat.
    """

    def __init__(self, process: Process):
        self.step = 0
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

    @contextmanager
    def names_the_lost(self) -> Iterator[None]:
        """Turns a communication failure into :class:`ProcessLost` if processes have stopped sending heartbeats."""
        try:
            yield
        except NonFiniteLoss:  # raised by all processes
            raise
        except RuntimeError as error:
            lost = self._silent() if self._process.world_size > 1 else []
            if not lost:
                raise
            ranks = ", ".join(f"rank {rank} (last heartbeat at step {step:,})" for rank, step in lost)
            raise ProcessLost(
                f"stopped at step {self.step:,}: no heartbeat from {ranks}; it hangs or has ended; check its log and"
                " its machine, then continue with --resume"
            ) from error
        finally:
            self._end()

    def _end(self) -> None:
        if self._process.world_size > 1:
            self._stop.set()
            self._thread.join()

    def _run(self) -> None:
        beats = 1
        while not self._stop.wait(_PERIOD):
            try:
                self._beat(beats)
            except RuntimeError:  # the store has closed, because the run has ended
                return
            beats += 1

    def _beat(self, count: int) -> None:
        self._store.set(str(self._process.rank), f"{count} {self.step}")

    def _silent(self) -> list[tuple[int, int]]:
        """Ranks without a heartbeat and the last step of each. Beats are counted, since clocks of machines differ."""
        try:
            before = self._read()
            time.sleep(_SILENT_FOR)
            now = self._read()
        except RuntimeError:
            return []
        return [(rank, now[rank][1]) for rank in before if now[rank][0] == before[rank][0]]

    def _read(self) -> dict[int, tuple[int, int]]:
        ranks = [rank for rank in range(self._process.world_size) if rank != self._process.rank]
        found = self._store.multi_get([str(rank) for rank in ranks])
        return {rank: (int(each.split()[0]), int(each.split()[1])) for rank, each in zip(ranks, found, strict=True)}
