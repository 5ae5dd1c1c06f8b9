"""TorchRec's pipeline over a TrainTask: what a step of training or evaluation runs through."""

from typing import TypeAlias

from torch import Tensor, nn
from torch.optim import Optimizer
from torchrec.distributed import TrainPipelineBase, TrainPipelineSparseDist

from cowrec.data_pipeline import Batch

from .processes import Process

_Out: TypeAlias = tuple[Tensor, Tensor, Tensor]
Pipeline: TypeAlias = TrainPipelineBase[Batch, _Out] | TrainPipelineSparseDist[Batch, _Out]
"""``progress(batches)`` is a step, and returns (loss, logits [B], label [B]); ``reset()`` goes before new batches."""


def pipeline_of(model: nn.Module, optimizer: Optimizer, process: Process) -> Pipeline:
    """The pipeline that suits the number of processes.

    Among several it exchanges the next batch's ids while this one is computed, for which it asks the device how many
    there are. A process alone has nothing to exchange, and no step of its own waits for the device.
    """
    kind = TrainPipelineSparseDist if process.world_size > 1 else TrainPipelineBase
    return kind(model, optimizer, process.device)
