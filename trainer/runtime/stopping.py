"""Early ends of a run: a lost process, a request to stop, a loss that is not finite; all processes end together."""

import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from math import isfinite, nan
from multiprocessing import parent_process
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _get_default_store

from .errors import NonFiniteLoss, ProcessLost
from .processes import Process

_PERIOD = 1.0
_SILENT_FOR = 4.0
_ANSWERS_WITHIN = 10.0
"""Seconds in which the store answers; a call waits for ever for a machine that has lost its power or its network."""


class LossWatch:
    """Losses since the last reading, kept on the device, so that no step waits for it."""

    def __init__(self, process: Process):
        self._world_size = process.world_size
        self._losses: list[tuple[int, Tensor]] = []
        self._sum, self._count = 0.0, 0

    def add(self, loss: Tensor, step: int) -> None:
        """Adds this process's loss of a step, a scalar."""
        # A captured step returns its loss in the same memory each time.
        self._losses.append((step, loss.detach().clone()))

    def mean(self) -> float:
        """Mean over all processes of the losses that were checked since the last call, or NaN."""
        mean = self._sum / self._count / self._world_size if self._count else nan
        self._sum, self._count = 0.0, 0
        return mean

    def check(self) -> int | None:
        """The first step whose loss was not finite since the last call, or None, over all processes.

        Waits for the device once. Collective: all processes call it together, after the same steps.
        """
        if not self._losses:
            return None
        steps, losses = [step for step, _ in self._losses], torch.stack([each for _, each in self._losses]).double()
        self._losses = []
        if self._world_size > 1:
            dist.all_reduce(losses)  # a sum is finite only where all its terms are
        values = losses.tolist()
        self._sum, self._count = self._sum + sum(values), self._count + len(values)
        return next((step for step, value in zip(steps, values, strict=True) if not isfinite(value)), None)


class StopRequest:
    """A request to stop by any process, which all of them see after the same step."""

    def __init__(self, process: Process):
        self.wanted = False
        # A separate group on the CPU neither waits for the GPU nor interferes with the model's collectives.
        alone = process.world_size == 1
        self._group: Any = None if alone else dist.new_group(backend="gloo", timeout=process.timeout)
        self._asked: tuple[Any, Tensor] | None = None

    def agreed(self) -> bool:
        """True if a process requested to stop before the previous call; with one process, before this call."""
        if self._group is None:
            return self.wanted
        agreed = False
        if self._asked is not None:
            work, wanted = self._asked
            work.wait()
            agreed = bool(wanted.item())
        # The result is read one step later, so that no process waits for another here.
        wanted = torch.tensor(float(self.wanted))
        self._asked = (dist.all_reduce(wanted, dist.ReduceOp.MAX, group=self._group, async_op=True), wanted)
        return agreed


@contextmanager
def stop_requests(process: Process) -> Iterator[StopRequest]:
    """Turns the first Ctrl-C or SIGTERM into a request; a second one interrupts immediately.

    Only in the main thread; in another one there is no such request. Under torchrun, and in the subprocess of a sweep,
    a second signal counts as the first: a terminal or a scheduler, and the process above, may both send one.
    """
    stop = StopRequest(process)

    def request(number: int, _: FrameType | None) -> None:
        if stop.wanted and not process.launched and parent_process() is None:
            raise KeyboardInterrupt
        stop.wanted = True

    with _handled(request, signal.SIGINT, signal.SIGTERM):
        yield stop


def interrupted_by_sigterm() -> AbstractContextManager[None]:
    """Makes SIGTERM interrupt the block as Ctrl-C does; only in the main thread."""
    return _handled(signal.default_int_handler, signal.SIGTERM)


def ignoring_sigterm() -> AbstractContextManager[None]:
    """Ignores SIGTERM while a failed run finds out why it failed; only in the main thread.

    torchrun sends it when it fails for the same reason, and SIGKILL half a minute later.
    """
    return _handled(signal.SIG_IGN, signal.SIGTERM)


@contextmanager
def _handled(handler: Any, *numbers: signal.Signals) -> Iterator[None]:
    """Handles signals in the block, in the main thread, since Python handles signals there."""
    here = threading.current_thread() is threading.main_thread()
    earlier = {number: signal.signal(number, handler) for number in numbers if here}
    try:
        yield
    finally:
        for number, before in earlier.items():
            signal.signal(number, before)


class Heartbeat:
    """Reports the step of this process to all others every second, so that one that hangs can be named.

    It is the step that :meth:`reached` was last called with. A run of one process has no heartbeat.
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
