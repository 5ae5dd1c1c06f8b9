"""Early ends of a run: a request to stop, a loss that is not finite; all processes end together."""

import signal
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from math import isfinite, nan
from multiprocessing import parent_process
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .processes import Process


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
    """Ignores SIGTERM while a failed run waits for its checkpoint; only in the main thread.

    torchrun sends it when another process fails for the same reason, and SIGKILL half a minute later.
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
