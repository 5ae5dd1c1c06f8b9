"""A training step: model and loss, the network's optimizer, and the pipelines. B samples of this process, T tasks."""

import dataclasses
import gc
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from math import inf, sqrt
from typing import Any, TypeAlias, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.profiler import record_function
from torchrec.distributed import TrainPipelineSparseDist
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from cowrec.data_pipeline import Batch
from cowrec.models import l2_kernels
from cowrec.models.losses import Loss, bce
from cowrec.sparse_opt import EmbeddingAdam, Hyperparameters, LookupsHandle
from cowrec.sparse_opt.kernels.profiling import profiled
from cowrec.sparse_opt.optim.embedding_adam import GraphedSteps
from cowrec.sparse_opt.tbe.collection import only_exchanges
from cowrec.sparse_opt.tbe.inventory import ModelInventory

from ..runtime.processes import Process
from .run_plan import RunPlan

WARMUP_STEPS = 3
"""Steps before the capture: they compile kernels, and let libraries choose and allocate what they need."""
_logger = logging.getLogger(__name__)
Output: TypeAlias = tuple[Tensor, Tensor, Tensor]
"""(loss, logits [B], label [B]) of a step, detached."""
TakeStep: TypeAlias = Callable[[], Output]


class TrainTask(nn.Module):
    """A model with its loss, in the form that TorchRec's pipelines drive.

    ``forward(batch)`` returns ``(loss, (loss, logits, label))``, the latter detached and [B], or [B, T] of T > 1 tasks.
    The loss is that of :class:`MeanLoss` and the penalties of dense kernels, times the batch's share of its step.

    Args:
        model: ``forward(dense, sparse) -> logits``.
        linear_l2, cross_l2: L2 coefficients of the model's linear and cross kernels.
        bfloat16_device: type of the device whose matrix products are computed in bfloat16; "" for none.
    """

    def __init__(
        self, model: nn.Module, loss: "MeanLoss", linear_l2: float, cross_l2: float, bfloat16_device: str = ""
    ) -> None:
        super().__init__()
        self.model = model
        self.loss = loss
        self._bfloat16_device = bfloat16_device
        kernels = l2_kernels(model)
        self._penalties = [(linear_l2, kernel) for kernel in kernels["linear"] if linear_l2 > 0]
        self._penalties += [(cross_l2, kernel) for kernel in kernels["cross"] if cross_l2 > 0]

    def forward(self, batch: Batch) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor]]:
        device = self._bfloat16_device
        with torch.autocast(device, torch.bfloat16) if device else nullcontext():
            logits = self.model(batch.dense, batch.sparse)
        if device:  # a network of the user's own may end with a product in bfloat16
            logits = logits.float()
        loss, logits = self.loss(logits, batch)
        for coefficient, kernel in self._penalties:
            loss = loss + coefficient * batch.share * kernel.square().sum()
        return loss, (loss.detach(), logits.detach(), batch.label)


class MeanLoss(nn.Module):
    """The mean of a loss over the samples of the global batch, and the logits without those of padding.

    It returns this rank's share multiplied by the world size, because TorchRec and DDP average gradients over ranks.
    The loss is a module because TorchRec's pipeline traces the code around the tables, in which a module is one node.

    Args:
        mean_weight: mean weight of the training samples; the loss of a sample is multiplied by its weight divided by
            this mean, so that the loss has the same scale with and without weights.
        task_weights: weight of each of T > 1 tasks. The loss is then the sum over the tasks of the weight times the
            mean over the samples of the global batch whose label is known; 0 for a task without such samples.

    ``tell_samples``, where it is set, is called in every forward with the number of samples of the step's global batch.
    """

    tell_samples: Callable[[int], None] | None = None
    _task_weights: Tensor

    def __init__(
        self, world_size: int, loss: Loss = bce, mean_weight: float = 1.0, task_weights: Sequence[float] = (1.0,)
    ) -> None:
        super().__init__()
        self._world_size, self._loss, self._mean_weight = world_size, loss, mean_weight
        self._num_tasks = len(task_weights)
        if self._num_tasks > 1:
            self.register_buffer("_task_weights", torch.tensor(task_weights), persistent=False)

    def forward(self, logits: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """Returns the loss, a scalar, and the first B of the logits, [B] or [B, T]."""
        if self.tell_samples:
            self.tell_samples(round(batch.global_batch_size / batch.share))
        if self._world_size > 1:  # samples after the last label are padding; see even_slice
            logits = logits[: len(batch.label)]
        if self._num_tasks > 1:
            return self._of_tasks(logits, batch), logits
        total = self._sum(logits, batch)
        if self._world_size > 1:
            total = total * self._world_size
        return total / (batch.global_batch_size / batch.share), logits

    def _sum(self, logits: Tensor, batch: Batch) -> Tensor:
        weight = None if batch.weight is None else batch.weight / self._mean_weight
        if self._loss is bce:
            return F.binary_cross_entropy_with_logits(logits, batch.label, weight, reduction="sum")
        # Samples that are predicted may have no label, which the user's own code need not know.
        losses = self._loss(logits, batch.label if self.training else batch.label.nan_to_num())
        return (losses if weight is None else losses * weight).sum()

    def _of_tasks(self, logits: Tensor, batch: Batch) -> Tensor:
        known = ~batch.label.isnan()
        losses = torch.where(known, self._loss(logits, torch.where(known, batch.label, 0)), 0)
        if batch.weight is not None:
            losses = losses * (batch.weight / self._mean_weight)[:, None]
        count = known.sum(0)
        if self._world_size > 1:
            dist.all_reduce(count)
        return (losses.sum(0) / count.clamp_min(1) * self._task_weights).sum() * (self._world_size * batch.share)


def even_slice(batch: Batch, world_size: int) -> Batch:
    """Pads a slice of a global batch that is one sample short with a sample without ids and label.

    TorchRec's reduce-scatter of row-wise tables needs equal slices on gloo; no rank is without samples then.
    """
    if len(batch.dense) * world_size >= batch.global_batch_size:
        return batch
    dense, sparse = F.pad(batch.dense, (0, 0, 0, 1)), batch.sparse
    lengths = F.pad(sparse.lengths().view(len(sparse.keys()), -1), (0, 1)).flatten()
    padded = KeyedJaggedTensor(
        sparse.keys(),
        sparse.values(),
        sparse.weights_or_none(),
        lengths,
        length_per_key=sparse.length_per_key(),  # a sample without ids adds none
    )
    return dataclasses.replace(batch, dense=dense, sparse=padded)


class DenseAdam:
    """Optimizer of the network: Adam by torch's fused kernel, with decoupled weight decay (AdamW).

    Everything that changes from step to step is a tensor on the parameters' device, which a captured CUDA graph reads.
    Keras' form, ``lr * sqrt(1 - b2^t) / (1 - b1^t) * m / (sqrt(v) + eps)``, is torch's form after infinitely many
    steps, whose corrections ``1 - b^t`` are 1, at a learning rate that contains both corrections.

    Pipelines call it like a torch.optim.Optimizer; it takes a fifth of the host time of torch's Adam.

    ``admits`` is called once the gradients of a step are complete; False leaves the step out.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        hyperparameters: Hyperparameters,
        adam_epsilon: str,
        admits: Callable[[], bool] | None = None,
    ) -> None:
        device = next(iter(parameters.values())).device
        self._parameters, self._hyperparameters = dict(parameters), hyperparameters
        self._rate, self._rate_now = torch.zeros((), device=device), 0.0
        self._kept = torch.ones((), device=device)
        self._passes, self._passes_taken = 1, 0
        self._admits = admits or (lambda: True)
        self._corrects_in_rate = adam_epsilon == "keras"
        steps = inf if self._corrects_in_rate else 0.0
        self._state = {
            name: {
                "exp_avg": torch.zeros_like(parameter),
                "exp_avg_sq": torch.zeros_like(parameter),
                "step": torch.full((), steps, device=device),
            }
            for name, parameter in self._parameters.items()
        }

    def prepare(self, step: int, lr: float) -> None:
        """Sets the learning rate of step ``step``, counted from 0, on the device."""
        rate = lr
        if self._corrects_in_rate:
            first, second = (beta ** (step + 1) for beta in self._hyperparameters.betas)
            rate *= sqrt(1 - second) / (1 - first)
        if rate != self._rate_now:
            self._rate.fill_(rate)
            self._rate_now = rate
        if self._hyperparameters.dense_weight_decay:
            self._kept.fill_(1 - lr * self._hyperparameters.dense_weight_decay)

    def accumulate(self, passes: int) -> None:
        """Makes one step of every ``passes`` calls of :meth:`step`, whose gradients add up."""
        assert not self._passes_taken
        self._passes = passes

    def zero_grad(self) -> None:
        """Drops the gradients; has no effect between the passes of a step."""
        if not self._passes_taken:
            for parameter in self._parameters.values():
                parameter.grad = None

    def step(self) -> None:
        """Takes a step, after the last one of its passes, of the parameters that have gradients."""
        self._passes_taken = (self._passes_taken + 1) % self._passes
        if self._passes_taken or not self._admits():
            return
        trained = {name: parameter for name, parameter in self._parameters.items() if parameter.grad is not None}
        values, own = self._hyperparameters, [self._state[name] for name in trained]
        parameters: list[Tensor] = list(trained.values())
        if not parameters:
            return
        steps = [state["step"] for state in own]
        with torch.no_grad():
            if values.dense_weight_decay:  # as torch's AdamW, but the rate here may contain bias corrections
                torch._foreach_mul_(parameters, self._kept)
            if not self._corrects_in_rate:
                torch._foreach_add_(steps, 1)
            torch._fused_adam_(
                parameters,
                [parameter.grad for parameter in parameters if parameter.grad is not None],
                [state["exp_avg"] for state in own],
                [state["exp_avg_sq"] for state in own],
                [],
                steps,
                lr=self._rate,
                beta1=values.betas[0],
                beta2=values.betas[1],
                weight_decay=0.0,
                eps=values.eps,
                amsgrad=False,
                maximize=False,
            )

    def addresses(self) -> tuple[int, ...]:
        """Returns the addresses of the tensors that a captured CUDA graph of a step reads and writes."""
        moments = [tensor for own in self._state.values() for tensor in own.values()]
        tensors = (self._rate, self._kept, *self._parameters.values(), *moments)
        return tuple(tensor.data_ptr() for tensor in tensors)

    def tensors(self) -> dict[str, dict[str, Tensor]]:
        """Returns the moments of each parameter, and for torch's form its steps; they share the optimizer's memory."""
        saved = ("exp_avg", "exp_avg_sq") if self._corrects_in_rate else ("exp_avg", "exp_avg_sq", "step")
        return {name: {key: own[key] for key in saved} for name, own in self._state.items()}


def pipeline_of(
    model: nn.Module,
    optimizer: DenseAdam | Optimizer,
    process: Process,
    *,
    may_read_ahead: bool = True,
    captured: EmbeddingAdam | None = None,
    batch_size: int = 0,
) -> "Pipeline":
    """Chooses the pipeline that takes the steps of training and evaluation.

    Several processes exchange the ids of the next batch while the current one is computed. The host waits for the sizes
    of that exchange. A single process has nothing to exchange, and its reader copies the next batch to the device.

    A pipeline's ``progress(batches)`` takes a step on the next batch and returns :data:`Output`; ``reset()`` comes
    before new batches.

    Args:
        may_read_ahead: False if a batch must not be taken before the step of the batch before has ended, as online or
            with id tables; see :class:`IdTranslation`.
        captured: optimizer of the tables if steps are to be captured; see :func:`why_not_captured`.
        batch_size: number of samples of a step that is captured.
    """
    if process.world_size > 1 and may_read_ahead:
        return TrainPipelineSparseDist(model, cast("Any", optimizer), process.device)
    if captured is not None and isinstance(optimizer, DenseAdam):
        return CapturedSteps(model, optimizer, captured, process.device, batch_size)
    return SequentialSteps(model, optimizer, process.device)


def why_not_captured(plan: RunPlan, model: nn.Module, optimizer: EmbeddingAdam | LookupsHandle | None) -> str:
    """Says why the steps of a run cannot be captured as a CUDA graph; "" if they can."""
    config, process = plan.config, plan.process
    if not config.train.cuda_graph:
        return "train.cuda_graph = false"
    if config.train.accumulation > 1:
        return f"train.accumulation = {config.train.accumulation} takes several passes in a step"
    if process.device.type != "cuda":
        return "CUDA graphs exist on CUDA only"
    if process.world_size > 1:
        return "the sizes of the exchange between processes vary"
    if plan.schema.lists:
        return f"the number of ids of field {next(iter(plan.schema.lists))!r} varies"
    if any(spec.ids.kind == "collisionless" for spec in plan.tables):
        return "id tables give ids their rows between steps"
    if not isinstance(optimizer, EmbeddingAdam):
        return f'optimizer.embedding = "{config.optimizer.embedding}" counts its steps on the host'
    if not GraphedSteps(optimizer).are_possible:
        return f'optimizer.absent_rows = "{optimizer.config.absent_rows}" with clip.rule = "{config.clip.rule}"'
    if not all(map(only_exchanges, ModelInventory(model).collections.values())):
        return "column-wise tables are joined by TorchRec"
    return ""


class SequentialSteps:
    """Runs each step to its end before it takes the next batch; its profiler ranges have TorchRec's names."""

    def __init__(self, model: nn.Module, optimizer: DenseAdam | Optimizer, device: torch.device) -> None:
        self._model, self._optimizer, self._device = model, optimizer, device

    def progress(self, batches: Iterator[Batch]) -> Output:
        with profiled("## load batch ##"):
            batch = next(batches)
        return self.take(batch)

    def take(self, batch: Batch) -> Output:
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
        """Does nothing: no batch is read ahead."""


class CapturedSteps(SequentialSteps):
    """Takes the training steps of full batches as a CUDA graph, and all other steps one operation after another.

    The first steps, short batches and evaluation run as in :class:`SequentialSteps`. If the capture fails, all later
    steps do so too, and a warning says why; no step is lost or taken twice. Results do not depend on the capture.

    A replayed step copies the batch to fixed memory, launches the graph and copies its results out. The graph reads all
    values that change from step to step: see :meth:`DenseAdam.prepare` and :meth:`GraphedSteps.prepare`. ``model`` is a
    sharded TrainTask on one process; every sample has one id in each field.
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
        """Whether steps of full batches are taken as a graph now."""
        return self._graph is not None

    def progress(self, batches: Iterator[Batch]) -> Output:
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
        """Captures the step with the shapes of a batch; returns None, with a warning, if that fails."""
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
    """A captured step; ``held`` are tensors that it reads and that others may replace."""

    inputs: Batch
    replay: TakeStep
    addresses: tuple[int, ...]
    held: tuple[Tensor, ...]

    def take(self, batch: Batch) -> Output:
        for own, given in zip(_read_by_step(self.inputs), _read_by_step(batch), strict=True):
            own.copy_(given, non_blocking=True)
        loss, logits, label = self.replay()
        return loss.clone(), logits.clone(), label.clone()


def _copied(batch: Batch) -> Batch:
    """Copies a batch to its own memory, except lengths and offsets, which all batches of one id a field share."""
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
    """Returns the tensors of a batch that a training step reads, except for lengths and offsets."""
    tensors = [batch.dense, batch.label, batch.sparse.values()]
    return tensors if batch.weight is None else [*tensors, batch.weight]


class CaptureFailed(RuntimeError):
    """A step could not be captured. It has not been taken, and can be taken without a graph."""


class CudaGraphCapture:
    """Records steps as CUDA graphs, after warm-up steps on the same stream, as torch requires."""

    def __init__(self) -> None:
        self._stream = torch.cuda.Stream()

    def warm_up(self, step: TakeStep) -> Output:
        current = torch.cuda.current_stream()
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            output = step()
        current.wait_stream(self._stream)
        return output

    def capture(self, step: TakeStep) -> TakeStep:
        """Records a step without taking it; returns a function that takes it and returns the same tensors each time.

        Raises CaptureFailed if the step cannot be recorded.
        """
        gc.collect()  # remains of earlier backward passes would bring their streams into the capture
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
