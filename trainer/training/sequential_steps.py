"""Pipeline of one process that takes each step to its end, one operation after another."""

from collections.abc import Iterator
from typing import TypeAlias

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from cowrec.data_pipeline import Batch
from cowrec.sparse_opt.kernels.profiling import profiled

Output: TypeAlias = tuple[Tensor, Tensor, Tensor]
"""(loss, logits [B], label [B]) of a step, detached."""


class SequentialSteps:
    """Runs each step to its end before it takes the next batch.

    Ranges of torch's profiler are named as in TorchRec's pipelines.

    Args:
        model: a TrainTask, sharded.
        optimizer: of its dense parameters; used in training mode only.
        device: of the model.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer, device: torch.device) -> None:
        self._model, self._optimizer, self._device = model, optimizer, device

    def progress(self, batches: Iterator[Batch]) -> Output:
        """Takes a step on the next batch; raises StopIteration if there is none."""
        with profiled("## load batch ##"):
            batch = next(batches)
        return self.take(batch)

    def take(self, batch: Batch) -> Output:
        """Takes a step on a batch."""
        with profiled("## load batch ##"):
            if batch.dense.device != self._device:
                batch = batch.to(self._device, non_blocking=True)
        if self._model.training:
            with profiled("## zero_grad ##"):
                self._optimizer.zero_grad()
        with profiled("## forward ##"):
            loss, output = self._model(batch)
        if self._model.training:
            with profiled("## backward ##"):
                loss.backward()
            with profiled("## optimizer ##"):
                self._optimizer.step()
        result: Output = output
        return result

    def reset(self) -> None:
        """Does nothing, since no batch is read ahead."""
