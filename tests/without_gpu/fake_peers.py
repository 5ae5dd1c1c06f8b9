"""Stubs for what one process of several learns from the others, where all are fake."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torchrec.distributed import collective_utils, dist_data
from torchrec.distributed.planner import planners
from torchrec.sparse import jagged_tensor

from cowrec.trainer.training import state
from cowrec.trainer.training.pipeline import SequentialSteps
from device_watch import site

_IDS_OF_A_KEY = 256


@contextmanager
def sizes_of_peers(waits: list[str]) -> Iterator[None]:
    """Makes peers that do as this process does; appends what reads sizes from the device to ``waits``.

    TorchRec's pipeline, which overlaps the exchange of ids with the step before, needs streams. The pipeline of one
    process replaces it; it makes the same calls one after the other.
    """
    connect = dist_data.KJTAllToAllSplitsAwaitable.__init__

    def exchange(self: Any, *arguments: Any, **settings: Any) -> None:
        connect(self, *arguments, **settings)
        kept = [*(splits[self._pg.rank()] for splits in self._input_splits), self._input.stride()]

        def receive() -> list[list[int]]:
            waits.append("sizes that the peers send")
            return [[size] * self._workers for size in kept]

        self._splits_awaitable._wait_impl = receive

    def read(tensor: Tensor) -> Tensor:
        waits.append(site(outside="torchrec.sparse."))
        return torch.full(tensor.shape, _IDS_OF_A_KEY)

    def invoke(pg: Any, rank: int, func: Callable[..., Any], *arguments: Any, **settings: Any) -> Any:
        return func(*arguments, **settings)

    def pipeline(model: Any, optimizer: Any, process: Any, **_: Any) -> SequentialSteps:
        return SequentialSteps(model, optimizer, process.device)

    with ExitStack() as stack:
        stack.enter_context(patch.object(dist_data.KJTAllToAllSplitsAwaitable, "__init__", exchange))
        for module in (dist_data, jagged_tensor):
            stack.enter_context(patch.object(module, "_cuda_to_cpu_safe", read, create=True))
        stack.enter_context(patch.object(FakeTensor, "tolist", lambda tensor: read(tensor).tolist()))
        # What one process computes for all: every process computes it, for a broadcast brings nothing.
        for module in (collective_utils, planners):
            stack.enter_context(patch.object(module, "invoke_on_rank_and_broadcast_result", invoke))
        stack.enter_context(patch.object(state, "pipeline_of", pipeline))
        yield
