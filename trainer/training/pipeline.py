"""Pipelines that take the steps of training and evaluation, for one process and for several."""

from collections.abc import Iterator
from typing import TypeAlias

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.profiler import record_function
from torchrec.distributed import TrainPipelineSparseDist

from cowrec.data_pipeline import Batch
from cowrec.trainer.runtime.processes import Process

_Out: TypeAlias = tuple[Tensor, Tensor, Tensor]


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

    def progress(self, batches: Iterator[Batch]) -> _Out:
        """Takes a step on the next batch; raises StopIteration if there is none."""
        with record_function("## load batch ##"):
            batch = next(batches).to(self._device, non_blocking=True)
        if self._model.training:
            with record_function("## zero_grad ##"):
                self._optimizer.zero_grad()
        with record_function("## forward ##"):
            loss, output = self._model(batch)
        if self._model.training:
            with record_function("## backward ##"):
                loss.backward()
            with record_function("## optimizer ##"):
                self._optimizer.step()
        result: _Out = output
        return result

    def reset(self) -> None:
        """Does nothing, since no batch is read ahead."""


Pipeline: TypeAlias = SequentialSteps | TrainPipelineSparseDist[Batch, _Out]
"""``progress(batches)`` takes a step and returns (loss, logits [B], label [B]); call ``reset()`` before new batches."""


def pipeline_of(model: nn.Module, optimizer: Optimizer, process: Process, *, may_read_ahead: bool = True) -> Pipeline:
    """Chooses the pipeline for the number of processes.

    Several processes exchange the ids of the next batch while this one is computed. The sizes of that exchange come
    from the device, which the host waits for. A single process has nothing to exchange, its reader already copies the
    next batch to the device, and none of its steps waits for the device.

    Args:
        model: a TrainTask, sharded.
        optimizer: of its dense parameters.
        process: this process.
        may_read_ahead: False if a batch must not be taken before the step of the batch before has ended, as with id
            tables; see :class:`IdTranslation`.
    """
    if process.world_size > 1 and may_read_ahead:
        return TrainPipelineSparseDist(model, optimizer, process.device)
    return SequentialSteps(model, optimizer, process.device)
