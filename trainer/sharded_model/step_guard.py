"""Guards against a state that is not finite: of a training step before its updates, and of a state to save."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._shard.sharded_tensor import ShardedTensor

from cowrec.sparse_opt.tbe.inventory import ModelInventory
from cowrec.sparse_opt.tbe.lookup import TbeLookup

from ..runtime.processes import Process
from .build import dense_parameters, dense_tensors

LARGEST_GRADIENT = 1e10
"""A gradient of a larger norm counts as not finite: squares of sums over the ids of a batch might not fit float32."""
_PART = 1 << 22


class StepGuard:
    """Takes the updates of a step, or none of them if the batch would make the model's state non-finite.

    The backward pass of a step ends at the outputs of the tables' lookups. The dense optimizer then calls
    :meth:`admits`, which looks at the loss and all gradients. It either runs the rest of the backward pass, in which
    tables are updated, or drops the step and restores the buffers of the network, such as the means of a BatchNorm.
    Steps that are taken are bit-identical to those without a guard. Each step waits for the device once. All processes
    drop a step together. ``model`` is a sharded TrainTask whose lookups have their optimizers. ``reason`` tells why the
    latest step was dropped; it is "" if the step was taken.
    """

    def __init__(self, model: nn.Module, process: Process) -> None:
        self.reason = ""
        self._parameters, self._process = dense_parameters(model), process
        buffers = (tensor for tensor in dense_tensors(model).values() if not isinstance(tensor, nn.Parameter))
        self._buffers = list({id(buffer): buffer for buffer in buffers}.values())  # each once, under all its names
        self._passes: list[dict[str, tuple[Tensor, Tensor]]] = []
        self._losses: list[Tensor] = []
        self._kept: list[Tensor] = []
        model.register_forward_pre_hook(self._begin_pass)
        model.register_forward_hook(self._end_pass)
        for lookup in ModelInventory(model).lookups:
            self._cut(lookup)

    def admits(self) -> bool:
        """Takes the updates of the tables and returns True, or drops the step and sets :attr:`reason`."""
        found = list(self._measured())
        names, values = [name for name, _ in found], torch.stack([value.float() for _, value in found])
        finite = (values <= LARGEST_GRADIENT).all()  # NaN is not
        if self._process.world_size > 1:
            on_all = finite.int()
            dist.all_reduce(on_all, dist.ReduceOp.MIN)
            finite = on_all.bool()
        admitted, passes = bool(finite), self._passes
        self.reason = "" if admitted else _reason(names, values.tolist())
        self._passes, self._losses = [], []
        if admitted:
            for outputs in passes:
                held = [pair for pair in outputs.values() if pair[1].grad is not None]
                torch.autograd.backward([output for output, _ in held], [leaf.grad for _, leaf in held])
        else:
            for buffer, kept in zip(self._buffers, self._kept, strict=True):
                buffer.copy_(kept)
        return admitted

    def _measured(self) -> Iterator[tuple[str, Tensor]]:
        """Yields names of the losses and gradients, and their magnitudes or norms."""
        yield from (("the loss", loss.abs()) for loss in self._losses)
        grads = {f"the norm of the gradient of {name}": tensor.grad for name, tensor in self._parameters.items()}
        named = [(name, grad) for name, grad in grads.items() if grad is not None]
        for outputs in self._passes:
            named += [(name, leaf.grad) for name, (_, leaf) in outputs.items() if leaf.grad is not None]
        named = [(name, grad) for name, grad in named if grad.numel()]
        norms = torch._foreach_norm([grad for _, grad in named])  # many times faster than the largest element on CPU
        yield from zip((name for name, _ in named), norms, strict=True)

    def _begin_pass(self, model: nn.Module, _: Any) -> None:
        if not model.training:
            return
        if not self._passes:
            self._kept = [buffer.clone() for buffer in self._buffers]
        self._passes.append({})

    def _end_pass(self, model: nn.Module, _: Any, output: tuple[Tensor, Any]) -> None:
        if model.training:
            self._losses.append(output[0].detach())

    def _cut(self, lookup: TbeLookup) -> None:
        """Makes the outputs of a lookup leaves of the graph of the loss."""
        forward: Callable[..., Tensor] = lookup.module.forward
        name = f"the norm of the gradient of the rows of {', '.join(shard.name for shard in lookup.shards)}"

        def cut(**inputs: Any) -> Tensor:
            output = forward(**inputs)
            if not output.requires_grad:
                return output
            leaf = output.detach().requires_grad_()
            held = self._passes[-1]
            held[name if name not in held else f"{name} ({len(held)})"] = (output, leaf)
            return leaf

        lookup.module.forward = torch.compiler.disable(cut)


def _reason(names: list[str], values: list[float]) -> str:
    wrong = [f"{name} is {value:g}" for name, value in zip(names, values, strict=True) if not value <= LARGEST_GRADIENT]
    more = f" and {len(wrong) - 3} more" if len(wrong) > 3 else ""
    return "; ".join(wrong[:3]) + more if wrong else "a loss or gradient on another process is not finite"


def not_finite(state: Mapping[str, Any], process: Process) -> str:
    """Names a weight or moment that is not finite on some process; "" if none is. All processes call together."""
    found = next((name for name, values in _floating(state) if not _is_finite(values)), "")
    if process.world_size == 1:
        return found
    names: list[str] = [""] * process.world_size
    dist.all_gather_object(names, found)
    return next(filter(None, names), "")


def _is_finite(values: Tensor) -> bool:
    # A float64 sum of float32 numbers is finite only where all of them are. torch converts what it sums, so that the
    # sum of a whole table would take twice its memory.
    rows = max(1, _PART // max(1, values[:1].numel())) if values.dim() else 1
    sums = [part.sum(dtype=torch.float64) for part in (values.split(rows) if values.dim() else [values])]
    return bool(torch.stack(sums).isfinite().all())


def _floating(state: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yields names and values of the floating point tensors of a state, of sharded ones this process's shards."""
    for key, value in state.items():
        name = f"{path} {key}".strip()
        if isinstance(value, dict):
            yield from _floating(value, name)
        elif isinstance(value, ShardedTensor):
            yield from ((name, shard.tensor) for shard in value.local_shards())
        elif isinstance(value, Tensor) and value.is_floating_point():
            yield name, value
