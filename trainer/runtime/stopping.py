"""Early ends of a run: a request to stop, or a loss that is not finite. All processes see them at the same step."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from math import isfinite, nan
from types import FrameType

import torch
import torch.distributed as dist
from torch import Tensor

from .processes import Process


class LossWatch:
    """Losses since the last reading, kept on the device, so that no step waits for it.

    A step launches one kernel, which copies its loss. Copies are needed: a captured step returns its loss in the same
    memory each time.
    """

    _BLOCK = 1024

    def __init__(self, process: Process):
        self._world_size, self._device = process.world_size, process.device
        self._blocks: list[Tensor] = []
        self._steps: list[int] = []
        self._sum, self._count = 0.0, 0

    def add(self, loss: Tensor, step: int) -> None:
        """Adds this process's loss of a step, a scalar."""
        position = len(self._steps) % self._BLOCK
        if position == 0:
            self._blocks.append(torch.empty(self._BLOCK, dtype=torch.float64, device=self._device))
        self._blocks[-1][position].copy_(loss)
        self._steps.append(step)

    def read(self) -> tuple[float, int | None]:
        """(mean loss since the last call, or NaN; first step whose loss was not finite, or None) over all processes.

        Waits for the device once. Collective: all processes call it together, after the same steps.
        """
        bad = self.check()
        mean = self._sum / self._count / self._world_size if self._count else nan
        self._sum, self._count = 0.0, 0
        return mean, bad

    def check(self) -> int | None:
        """The first step whose loss was not finite since the last call of this or :meth:`read`; keeps the mean."""
        if not self._steps:
            return None
        steps, losses = self._steps, torch.cat(self._blocks)[: len(self._steps)]
        self._steps, self._blocks = [], []
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
        self._group = None if alone else dist.new_group(backend="gloo", timeout=process.timeout)
        self._asked: tuple[dist.Work, Tensor] | None = None

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

    Only in the main thread, since Python handles signals there; in another one there is no such request.

    Under torchrun a second signal counts as the first: terminal and torchrun both send Ctrl-C to each process.
    """
    stop = StopRequest(process)
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return

    def request(number: int, _: FrameType | None) -> None:
        if stop.wanted and not process.launched:
            raise KeyboardInterrupt
        stop.wanted = True

    earlier = {number: signal.signal(number, request) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for number, handler in earlier.items():
            signal.signal(number, handler)


@contextmanager
def ignoring_sigterm() -> Iterator[None]:
    """Ignores SIGTERM while a failed run finds out why it failed.

    torchrun sends it when it fails for the same reason, and SIGKILL half a minute later. Only in the main thread.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    earlier = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, earlier)
