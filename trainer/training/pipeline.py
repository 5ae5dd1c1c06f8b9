"""TorchRec's pipeline over a TrainTask: what a step of training or evaluation runs through."""

from typing import TypeAlias

from torch import Tensor, nn
from torch.optim import Optimizer
from torchrec.distributed import TrainPipelineBase, TrainPipelineSparseDist

from cowrec.data_pipeline import Batch
from cowrec.trainer.runtime.processes import Process
from cowrec.trainer.sharded_model.build import row_ids_of

_Out: TypeAlias = tuple[Tensor, Tensor, Tensor]
Pipeline: TypeAlias = TrainPipelineBase[Batch, _Out] | TrainPipelineSparseDist[Batch, _Out]
"""``progress(batches)`` is a step, and returns (loss, logits [B], label [B]); ``reset()`` goes before new batches."""


def pipeline_of(model: nn.Module, optimizer: Optimizer, process: Process) -> Pipeline:
    """The pipeline that suits the number of processes.

    Among several it exchanges the next batch's ids while this one is computed, for which it asks the device how many
    there are. A process alone has nothing to exchange, and no step of its own waits for the device. Where ids have yet
    to be given rows, the next batch's cannot be exchanged: they may be born in this step.
    """
    ahead = process.world_size > 1 and row_ids_of(model) is None
    kind = TrainPipelineSparseDist if ahead else TrainPipelineBase
    return kind(model, optimizer, process.device)
