"""Backward of a lookup: it runs a function in place of FBGEMM's, once for all passes of a step, on unscaled gradients.

torch's GradScaler multiplies the loss, and divides the gradients of parameters before their optimizer's step, which it
skips if one of them is not finite. The update of embeddings runs inside the backward, before that: row gradients are
divided by the scale before they are clipped.
"""

import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.amp import GradScaler

from cowrec.sparse_opt.kernels.layout import LookupBackward, LookupBags, LookupIds
from cowrec.sparse_opt.tbe.discovery import grad_scalers_in_use

from .clipped_lookup import ClippedLookup


@dataclass(frozen=True)
class Unscaled:
    """A backward pass of a lookup without the loss' scale.

    Attributes:
        backward: with the output gradient of the unscaled loss, at least float32; zeros if it was not finite.
        scaled_grad: output gradient as it came, of its own type; zeros if it was not finite.
        factor: 1 / scale, float32 []; None without a scale.
        finite: whether all of the output gradient was finite, bool []; None without a scale.
    """

    backward: LookupBackward
    scaled_grad: Tensor
    factor: Tensor | None = None
    finite: Tensor | None = None


class LossScale:
    """Scale of a model's loss. Does not wait for the device.

    Args:
        scaler: of the loss; None if the loss is not scaled, which the first backward then doubts if another is in use.
    """

    def __init__(self, scaler: GradScaler | None):
        self._scaler = scaler if scaler is not None and scaler.is_enabled() else None
        self._is_checked = scaler is not None

    @property
    def is_used(self) -> bool:
        """True if the loss is scaled."""
        return self._scaler is not None

    def unscaled(self, clipped: ClippedLookup, backward: LookupBackward) -> Unscaled:
        """Divides the output gradient of a lookup by the scale."""
        grad = backward.output_grad
        if self._scaler is None:
            self._warn_once()
            return Unscaled(backward, grad)
        scale = self._scaler.scale(torch.ones((), device=grad.device))
        assert isinstance(scale, Tensor)
        factor, finite = scale.double().reciprocal().float(), grad.isfinite().all()
        if clipped.in_torch.waits_for_ranks:  # they take one step together
            on_all = finite.int()
            dist.all_reduce(on_all, dist.ReduceOp.MIN, group=clipped.lookup.process_group)
            finite = on_all.bool()
        scaled = torch.where(finite, grad, 0)
        return Unscaled(replace(backward, output_grad=scaled.float() * factor), scaled, factor, finite)

    def _warn_once(self) -> None:
        if self._is_checked:
            return
        self._is_checked = True
        for scaler in grad_scalers_in_use():
            warnings.warn(
                f"a GradScaler with scale {scaler.get_scale():g} is in use, and the tables were attached without it. If"
                " it scales this model's loss, row gradients are measured and applied multiplied by that scale: pass"
                " grad_scaler=scaler to attach_cowclip or EmbeddingAdam. If it does not, pass"
                " grad_scaler=GradScaler(enabled=False)",
                RuntimeWarning,
                stacklevel=2,
            )


Run = Callable[[LookupBackward], Tensor | None]


def run_in_backward(
    output: Tensor,
    clipped: ClippedLookup,
    bags: LookupBags,
    id_weights: Tensor | None,
    loss_scale: LossScale,
    run: Run,
    *,
    parameter: Tensor | None = None,
    ids: LookupIds | None = None,
) -> Tensor:
    """Makes the backward of a lookup run a function.

    Args:
        output: of the lookup, without a gradient.
        clipped: the lookup.
        bags: its ids.
        id_weights: factor of each id in its bag's sum, float [nnz]; gets its gradient if it requires one.
        loss_scale: scale of the loss.
        run: called with the unscaled backward pass, or with all passes of a step that accumulates them; it returns the
            gradient of ``parameter``.
        parameter: weights of the lookup, where a dense optimizer applies their gradient. It has the scale of the loss.
        ids: rows of the ids, if they have been found already.

    Returns:
        The output, in the same memory.
    """
    if parameter is None:
        parameter = torch.ones((), requires_grad=True)  # makes autograd record the lookup, whose inputs are integers
    recorded: Tensor = _RunInBackward.apply(output, parameter, id_weights, clipped, bags, ids, loss_scale, run)
    return recorded


class _RunInBackward(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        output: Tensor,
        parameter: Tensor,
        id_weights: Tensor | None,
        clipped: ClippedLookup,
        bags: LookupBags,
        ids: LookupIds | None,
        loss_scale: LossScale,
        run: Run,
    ) -> Tensor:
        ctx.save_for_backward(bags.indices, bags.offsets, id_weights)
        ctx.blocks, ctx.size, ctx.ids = bags.blocks, bags.size, ids
        ctx.clipped, ctx.loss_scale, ctx.run, ctx.parameter_shape = clipped, loss_scale, run, parameter.shape
        ctx.mark_dirty(output)
        return output

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        indices, offsets, id_weights = ctx.saved_tensors
        bags = LookupBags(indices, offsets, ctx.blocks, ctx.size)
        backward = LookupBackward(bags, id_weights, grads[0], ctx.ids)
        weight_grad = ctx.clipped.in_torch.id_weight_grad(backward) if ctx.needs_input_grad[2] else None
        unscaled = ctx.loss_scale.unscaled(ctx.clipped, backward)
        step = ctx.clipped.accumulation.add(unscaled.backward, unscaled.finite)
        grad = ctx.run(step) if step else None
        if unscaled.factor is not None and ctx.parameter_shape:
            # Not finite where the pass was not, so that the GradScaler skips the step.
            summand = torch.where(unscaled.finite, 0.0, torch.nan)
            grad = summand.expand(ctx.parameter_shape) if grad is None else grad / unscaled.factor + summand
        return None, grad, weight_grad, *(None,) * 5
