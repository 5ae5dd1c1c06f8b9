"""Early ends of a run: a request to stop, or a loss that is not finite. All processes see them at the same step."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from math import inf, nan
from types import FrameType

import torch
import torch.distributed as dist
from torch import Tensor

from .processes import Process


class LossWatch:
    """Sum of the losses and first step with a loss that is not finite, on the device, so that no step waits for it."""

    def __init__(self, process: Process):
        self._world_size = process.world_size
        self._sum = torch.zeros((), dtype=torch.float64, device=process.device)
        self._bad = torch.full((), inf, dtype=torch.float64, device=process.device)
        self._count = 0

    def add(self, loss: Tensor, step: int) -> None:
        """Adds this process's loss of a step, a scalar."""
        self._sum += loss
        self._bad = torch.where(torch.isfinite(loss), self._bad, self._bad.clamp_max(step))
        self._count += 1

    def read(self) -> tuple[float, int | None]:
        """(mean loss since the last call, or NaN; first step whose loss was not finite, or None) over all processes.

        Waits for the device. Collective: all processes call it together.
        """
        if self._world_size > 1:
            dist.all_reduce(self._sum)
            dist.all_reduce(self._bad, dist.ReduceOp.MIN)
        total, bad = torch.stack([self._sum, self._bad]).tolist()
        mean = total / self._count / self._world_size if self._count else nan
        self._sum.zero_()
        self._count = 0
        return mean, None if bad == inf else int(bad)


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

    Under torchrun a second signal counts as the first: terminal and torchrun both send Ctrl-C to each process.
    """
    stop = StopRequest(process)

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
