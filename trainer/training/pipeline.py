"""Pipelines that take the steps of training and evaluation: of several processes, of one, and captured as CUDA graphs.

``progress(batches)`` takes a step on the next batch and returns (loss, logits [B], label [B]), detached; ``reset()``
comes before new batches. The capture has run on no GPU of this project's tests, which use a stand-in.
"""

import gc
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.profiler import record_function
from torchrec.distributed import TrainPipelineSparseDist
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from cowrec.data_pipeline import Batch
from cowrec.sparse_opt import EmbeddingAdam, LookupsHandle
from cowrec.sparse_opt.kernels.profiling import profiled
from cowrec.sparse_opt.optim.embedding_adam import GraphedSteps
from cowrec.sparse_opt.tbe.collection import only_exchanges
from cowrec.sparse_opt.tbe.inventory import ModelInventory

from ..runtime.processes import Process
from ..sharded_model.dense_adam import DenseAdam
from ..sharded_model.run_plan import RunPlan

WARMUP_STEPS = 3
"""Steps before the capture: they compile kernels, and let libraries choose and allocate what they need."""
_logger = logging.getLogger(__name__)

Output: TypeAlias = tuple[Tensor, Tensor, Tensor]
"""(loss, logits [B], label [B]) of a step, detached."""
Step: TypeAlias = Callable[[], Output]


def pipeline_of(
    model: nn.Module,
    optimizer: DenseAdam | Optimizer,
    process: Process,
    *,
    may_read_ahead: bool = True,
    captured: EmbeddingAdam | None = None,
    batch_size: int = 0,
) -> "Pipeline":
    """Chooses the pipeline for the number of processes.

    Several processes exchange the ids of the next batch while this one is computed. The sizes of that exchange come
    from the device, which the host waits for. A single process has nothing to exchange, its reader already copies the
    next batch to the device, and none of its steps waits for the device. On CUDA its steps may then be captured.

    Args:
        may_read_ahead: False if a batch must not be taken before the step of the batch before has ended, as online or
            with id tables; see :class:`IdTranslation`.
        captured: optimizer of the tables if steps are to be captured; see :func:`why_not_captured`.
        batch_size: as of :class:`CapturedSteps`, if steps are to be captured.
    """
    if process.world_size > 1 and may_read_ahead:
        return TrainPipelineSparseDist(model, cast("Any", optimizer), process.device)
    if captured is not None and isinstance(optimizer, DenseAdam):
        return CapturedSteps(model, optimizer, captured, process.device, batch_size)
    return SequentialSteps(model, optimizer, process.device)


def why_not_captured(plan: RunPlan, model: nn.Module, optimizer: EmbeddingAdam | LookupsHandle | None) -> str:
    """Why the steps of a run cannot be captured as a CUDA graph; "" if they can."""
    config, process = plan.config, plan.process
    several = [field.name for field in plan.schema.sparse if field.kind != "categorical"]
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
    if plan.is_collisionless:
        return "id tables give ids their rows between steps"
    if not isinstance(optimizer, EmbeddingAdam):
        return f'optimizer.embedding = "{config.optimizer.embedding}" counts its steps on the host'
    if not GraphedSteps(optimizer).are_possible:
        return f'optimizer.absent_rows = "{optimizer.config.absent_rows}" with clip.rule = "{config.clip.rule}"'
    if not all(map(only_exchanges, ModelInventory(model).collections.values())):
        return "column-wise tables are joined by TorchRec"
    return ""


class SequentialSteps:
    """Runs each step to its end before it takes the next batch.

    Ranges of torch's profiler are named as in TorchRec's pipelines.
    """

    def __init__(self, model: nn.Module, optimizer: DenseAdam | Optimizer, device: torch.device) -> None:
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


class CapturedSteps(SequentialSteps):
    """Takes the training steps of full batches as a CUDA graph, and all other steps one operation after another.

    The first steps, short batches and evaluation run as in :class:`SequentialSteps`, on the same model and optimizers.
    If the capture fails, so do all later steps, and a warning says why; no step is lost or taken twice. Results do not
    depend on which steps were captured.

    A replayed step copies the batch to fixed memory, launches the graph and copies its results out. All that changes
    from step to step is in tensors that the graph reads: see :meth:`DenseAdam.prepare` and
    :meth:`GraphedSteps.prepare`.

    Args:
        model: a TrainTask, sharded, on one process; every sample has one id in each field.
        adam: of its tables; a graph can repeat its steps.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: DenseAdam,
        adam: EmbeddingAdam,
        device: torch.device,
        batch_size: int,
        capture: "CudaGraphCapture | None" = None,
    ) -> None:
        super().__init__(model, optimizer, device)
        self._dense, self._adam, self._batch_size = optimizer, GraphedSteps(adam), batch_size
        self._capture = capture or CudaGraphCapture()
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
            return self.take(batch)
        self._adam.prepare()
        if self._warmup_left:
            self._warmup_left -= 1
            return self._capture.warm_up(partial(self.take, batch))
        addresses = (*self._dense.addresses(), *self._adam.addresses())
        if self._graph is not None and self._graph.addresses != addresses:
            self._graph = None  # frees its memory before the next capture
            return self._capture.warm_up(partial(self.take, batch))
        if self._graph is None:
            self._graph = self._captured_on(batch, addresses)
            if self._graph is None:
                return self.take(batch)
        with record_function("## captured step ##"):
            output = self._graph.take(batch)
        self._adam.count()
        return output

    def _captured_on(self, batch: Batch, addresses: tuple[int, ...]) -> "_Graph | None":
        """Captures the step with the shapes of a batch; None, and a warning, if that fails."""
        inputs = _copied(batch.to(self._device))
        try:
            with self._adam.capturing():
                replay = self._capture.capture(partial(self.take, inputs))
        except CaptureFailed as error:
            self._failed = True
            _logger.warning("the training step cannot be captured as a CUDA graph, which makes it slower: %s", error)
            return None
        return _Graph(inputs, replay, addresses, self._adam.read_by_graph())


@dataclass(frozen=True)
class _Graph:
    """A captured step.

    Attributes:
        addresses: of tensors of the optimizers that it reads and writes.
        held: tensors that it reads and that may be replaced elsewhere.
    """

    inputs: Batch
    replay: Step
    addresses: tuple[int, ...]
    held: tuple[Tensor, ...]

    def take(self, batch: Batch) -> Output:
        """Takes the step on a batch of the same shapes."""
        for own, given in zip(_read_by_step(self.inputs), _read_by_step(batch), strict=True):
            own.copy_(given, non_blocking=True)
        loss, logits, label = self.replay()
        return loss.clone(), logits.clone(), label.clone()


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


class CaptureFailed(RuntimeError):
    """A step could not be captured. It has not been taken, and can be taken without a graph."""


class CudaGraphCapture:
    """Records steps as CUDA graphs, after warm-up steps on the same stream, as torch demands."""

    def __init__(self) -> None:
        self._stream = torch.cuda.Stream()

    def warm_up(self, step: Step) -> Output:
        """Takes a step, as preparation of the capture."""
        current = torch.cuda.current_stream()
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            output = step()
        current.wait_stream(self._stream)
        return output

    def capture(self, step: Step) -> Step:
        """Records a step without taking it; returns a function that takes it and returns the same tensors each time.

        Raises:
            CaptureFailed: the step cannot be recorded.
        """
        gc.collect()  # what is left of earlier steps' backward passes would bring their streams into the capture
        graph, stream, cause = torch.cuda.CUDAGraph(), torch.cuda.current_stream(), None
        try:
            # Not "global": the reader's thread may allocate page-locked memory meanwhile.
            with torch.cuda.graph(graph, stream=self._stream, capture_error_mode="thread_local"):
                mode = torch.cuda.get_sync_debug_mode()
                # A wait then raises an error before it can invalidate the capture, which torch below 2.13 does not
                # recover from entirely (pytorch's pull request 180395).
                torch.cuda.set_sync_debug_mode("error")
                try:
                    output = step()
                except Exception as error:
                    cause = error  # the end of the capture may raise an error of its own
                    raise
                finally:
                    torch.cuda.set_sync_debug_mode(mode)
        except Exception as error:
            torch.cuda.set_stream(stream)  # a failed capture leaves its own
            why = str(cause or error).strip().partition("\n")[0] or type(cause or error).__name__
            raise CaptureFailed(why) from (cause or error)

        def replay() -> Output:
            graph.replay()
            return output

        return replay


Pipeline: TypeAlias = SequentialSteps | TrainPipelineSparseDist[Batch, Output]
