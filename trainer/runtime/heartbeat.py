"""Who is alive: each process of a run tells the others every second how far it has come, so that a hang has a name."""

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
    """This process's sign of life. ``step`` is what it tells of its progress; set it as training goes on.

    Args:
        process: this process. Alone it has nobody to tell.
    """

    def __init__(self, process: Process):
        self.step = 0
        self._process = process
        if process.world_size == 1:
            return
        # A connection of its own: one that waits for another process must not hold up the beat.
        store: Any = _get_default_store()
        self._store = dist.PrefixStore("heartbeat", store.clone())
        self._stop = threading.Event()
        self._beat(0)
        self._thread = threading.Thread(target=self._run, name="cowrec-heartbeat", daemon=True)
        self._thread.start()

    @contextmanager
    def names_the_lost(self) -> Iterator[None]:
        """Turns a failure of the communication into :class:`ProcessLost` where processes are silent."""
        try:
            yield
        except NonFiniteLoss:  # all processes end alike
            raise
        except RuntimeError as error:
            lost = self._silent() if self._process.world_size > 1 else []
            if not lost:
                raise
            told = ", ".join(f"rank {rank} (last heard of at step {step:,})" for rank, step in lost)
            raise ProcessLost(
                f"stopped at step {self.step:,}: no sign of life from {told}; it hangs or has ended, so look at its log"
                " and its machine, then go on with --resume"
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
            except RuntimeError:  # the store is gone, and the run with it
                return
            beats += 1

    def _beat(self, count: int) -> None:
        self._store.set(str(self._process.rank), f"{count} {self.step}")

    def _silent(self) -> list[tuple[int, int]]:
        """Ranks that do not beat, and the step each told of last. Clocks of machines differ, so beats are counted."""
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
