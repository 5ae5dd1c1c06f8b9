"""Choice of the pipeline that takes the steps of training and evaluation, for one process and for several."""

from typing import TypeAlias

from torch import nn
from torch.optim import Optimizer
from torchrec.distributed import TrainPipelineSparseDist

from cowrec.data_pipeline import Batch
from cowrec.sparse_opt import EmbeddingAdam
from cowrec.trainer.runtime.processes import Process
from cowrec.trainer.sharded_model.dense_adam import DenseAdam

from .captured_steps import CapturedSteps
from .sequential_steps import Output, SequentialSteps

Pipeline: TypeAlias = SequentialSteps | CapturedSteps | TrainPipelineSparseDist[Batch, Output]
"""``progress(batches)`` takes a step and returns (loss, logits [B], label [B]); call ``reset()`` before new batches."""


def pipeline_of(
    model: nn.Module,
    optimizer: Optimizer,
    process: Process,
    *,
    may_read_ahead: bool = True,
    captured: EmbeddingAdam | None = None,
    batch_size: int = 0,
) -> Pipeline:
    """Chooses the pipeline for the number of processes.

    Several processes exchange the ids of the next batch while this one is computed. The sizes of that exchange come
    from the device, which the host waits for. A single process has nothing to exchange, its reader already copies the
    next batch to the device, and none of its steps waits for the device. On CUDA its steps may then be captured.

    Args:
        model: a TrainTask, sharded.
        optimizer: of its dense parameters.
        process: this process.
        may_read_ahead: False if a batch must not be taken before the step of the batch before has ended, as with id
            tables; see :class:`IdTranslation`.
        captured: optimizer of the tables if steps are to be captured; see :func:`why_not_captured`.
        batch_size: samples of a full batch, if steps are to be captured.
    """
    if process.world_size > 1 and may_read_ahead:
        return TrainPipelineSparseDist(model, optimizer, process.device)
    if captured is not None and isinstance(optimizer, DenseAdam):
        return CapturedSteps(model, optimizer, captured, process.device, batch_size)
    return SequentialSteps(model, optimizer, process.device)
