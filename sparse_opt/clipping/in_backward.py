"""Lookups whose backward runs a function in place of FBGEMM's, once for all passes of a step."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from cowrec.sparse_opt.kernels.layout import LookupBags
from cowrec.sparse_opt.kernels.torch_rows import LookupIds
from cowrec.sparse_opt.tbe.lookup import LookupBackward

from .clipped_lookup import ClippedLookup
from .loss_scale import LossScale

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
        weight_grad = ctx.clipped.id_weight_grad(backward) if ctx.needs_input_grad[2] else None
        unscaled = ctx.loss_scale.unscaled(ctx.clipped, backward)
        step = ctx.clipped.accumulation.add(unscaled.backward, unscaled.finite)
        grad = ctx.run(step) if step else None
        if unscaled.factor is not None and ctx.parameter_shape:
            # Not finite where the pass was not, so that the GradScaler skips the step.
            summand = torch.where(unscaled.finite, 0.0, torch.nan)
            grad = summand.expand(ctx.parameter_shape) if grad is None else grad / unscaled.factor + summand
        return None, grad, weight_grad, *(None,) * 5
