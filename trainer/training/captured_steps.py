"""Pipeline of one process on CUDA that launches a whole training step at once, as a captured CUDA graph."""

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn
from torch.profiler import record_function
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from cowrec.data_pipeline import Batch, Schema
from cowrec.sparse_opt import EmbeddingAdam, LookupsHandle
from cowrec.sparse_opt.tbe.discovery import sharded_collections
from cowrec.sparse_opt.tbe.one_process import only_exchanges
from cowrec.trainer.config.run import RunConfig
from cowrec.trainer.runtime.processes import Process
from cowrec.trainer.sharded_model.dense_adam import DenseAdam
from cowrec.trainer.sharded_model.tables import table_specs

from .cuda_graph import Capture, CaptureFailed, CudaGraphCapture, Step
from .sequential_steps import Output, SequentialSteps

WARMUP_STEPS = 3
"""Steps before the capture: they compile kernels, and let libraries choose and allocate what they need."""

_logger = logging.getLogger(__name__)


class CapturedSteps:
    """Takes the training steps of full batches as a CUDA graph, and all other steps one operation after another.

    The first steps, short batches and evaluation run as in :class:`SequentialSteps`, on the same model and optimizers.
    If these steps wait for the device, or the capture fails, so do all later steps, and a warning says why; no step is
    lost or taken twice. Results do not depend on which steps were captured.

    A replayed step copies the batch to fixed memory, launches the graph and copies its results out. All that changes
    from step to step is in tensors that the graph reads: see :meth:`DenseAdam.prepare` and
    :meth:`EmbeddingAdam.prepare_step`.

    Args:
        model: a TrainTask, sharded, on one process; every sample has one id in each field.
        optimizer: of its dense parameters.
        adam: of its tables; ``adam.is_capturable`` holds.
        device: of the model.
        batch_size: samples of a full batch.
        capture: records a step.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: DenseAdam,
        adam: EmbeddingAdam,
        device: torch.device,
        batch_size: int,
        capture: Capture | None = None,
    ) -> None:
        self._model, self._optimizer, self._adam, self._device = model, optimizer, adam, device
        self._batch_size = batch_size
        self._capture = capture or CudaGraphCapture()
        self._sequential = SequentialSteps(model, optimizer, device)
        self._warmup_left, self._failed = WARMUP_STEPS, False
        self._graph: _Graph | None = None

    @property
    def captured(self) -> bool:
        """Whether steps of full batches are taken as a graph by now."""
        return self._graph is not None

    def progress(self, batches: Iterator[Batch]) -> Output:
        """Takes a step on the next batch; raises StopIteration if there is none."""
        with record_function("## load batch ##"):
            batch = next(batches)
        if self._failed or not self._model.training or len(batch.label) != self._batch_size:
            return self._sequential.take(batch)
        if self._warmup_left:
            self._warmup_left -= 1
            output = self._capture.warm_up(partial(self._sequential.take, batch))
            if not self._warmup_left and self._capture.wait:
                self._give_up(self._capture.wait)
            return output
        self._adam.prepare_step()
        addresses = (*self._optimizer.addresses(), *self._adam.addresses())
        if self._graph is None or self._graph.addresses != addresses:
            self._graph = None  # frees its memory before the next capture
            self._graph = self._captured_on(batch, addresses)
            if self._graph is None:
                return self._sequential.take(batch)
        with record_function("## captured step ##"):
            output = self._graph.take(batch)
        self._adam.count_step()
        return output

    def reset(self) -> None:
        """Does nothing, since no batch is read ahead."""

    def _captured_on(self, batch: Batch, addresses: tuple[int, ...]) -> "_Graph | None":
        """Captures the step with the shapes of a batch; None, and a warning, if that fails."""
        inputs = _copied(batch.to(self._device))
        try:
            with self._optimizer.capturing(), self._adam.capturing():
                replay = self._capture.capture(partial(self._sequential.take, inputs))
        except CaptureFailed as error:
            self._give_up(str(error))
            return None
        return _Graph(inputs, replay, addresses)

    def _give_up(self, reason: str) -> None:
        self._failed = True
        _logger.warning("the training step cannot be captured as a CUDA graph, which makes it slower: %s", reason)


@dataclass(frozen=True)
class _Graph:
    """A captured step.

    Attributes:
        inputs: batch that it reads.
        replay: takes the step.
        addresses: of tensors of the optimizers that it reads and writes.
    """

    inputs: Batch
    replay: Step
    addresses: tuple[int, ...]

    def take(self, batch: Batch) -> Output:
        """Takes the step on a batch of the same shapes."""
        for own, given in zip(_read_by_step(self.inputs), _read_by_step(batch), strict=True):
            own.copy_(given, non_blocking=True)
        loss, logits, label = self.replay()
        return loss.clone(), logits.clone(), label.clone()


def why_not_captured(
    config: RunConfig,
    schema: Schema,
    process: Process,
    model: nn.Module,
    optimizer: EmbeddingAdam | LookupsHandle | None,
) -> str:
    """Why the steps of a run cannot be captured as a CUDA graph; "" if they can.

    Args:
        config: of the run.
        schema: of its data.
        process: this process.
        model: a TrainTask, sharded.
        optimizer: of its tables.
    """
    several = [field.name for field in schema.sparse if field.kind != "categorical"]
    if not config.train.cuda_graph:
        return "train.cuda_graph = false"
    if config.train.accumulation > 1:
        return f"train.accumulation = {config.train.accumulation} takes several passes in a step"
    if process.device.type != "cuda":
        return "CUDA graphs exist on CUDA only"
    if process.world_size > 1:
        return "the sizes of the exchange between processes vary"
    if several:
        return f"the number of ids of field {several[0]!r} varies"
    if any(spec.ids.kind == "collisionless" for spec in table_specs(schema, config)):
        return "id tables give ids their rows between steps"
    if config.sharding.memory == "uvm_caching":
        return 'sharding.memory = "uvm_caching" counts its steps on the host'
    if not isinstance(optimizer, EmbeddingAdam):
        return f'optimizer.embedding = "{config.optimizer.embedding}" counts its steps on the host'
    if not optimizer.is_capturable:
        return f'optimizer.absent_rows = "{optimizer.config.absent_rows}" with clip.rule = "{config.clip.rule}"'
    if not all(map(only_exchanges, sharded_collections(model).values())):
        return "column-wise tables are joined by TorchRec"
    return ""


def _copied(batch: Batch) -> Batch:
    """A batch with memory of its own, except for lengths and offsets, which all batches of one id a field share."""
    sparse = KeyedJaggedTensor(
        batch.sparse.keys(),
        batch.sparse.values().clone(),
        lengths=batch.sparse.lengths(),
        offsets=batch.sparse.offsets(),
        stride=batch.sparse.stride(),
        length_per_key=batch.sparse.length_per_key(),
    )
    weight = None if batch.weight is None else batch.weight.clone()
    return Batch(batch.dense.clone(), sparse, batch.label.clone(), batch.global_batch_size, weight=weight)


def _read_by_step(batch: Batch) -> list[torch.Tensor]:
    """The tensors of a batch that a training step reads, except for lengths and offsets."""
    tensors = [batch.dense, batch.label, batch.sparse.values()]
    return tensors if batch.weight is None else [*tensors, batch.weight]
