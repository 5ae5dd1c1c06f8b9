"""Autograd function through which the backward pass of a lookup updates its rows."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from cowrec.sparse_opt.clipping.attach import Inputs
from cowrec.sparse_opt.kernels.profiling import profiled
from cowrec.sparse_opt.kernels.torch_rows import LookupIds
from cowrec.sparse_opt.tbe.layout import LookupBackward

from .lookup_adam import LookupAdam

EMBEDDING_UPDATE = "embedding_update"
"""Name of a lookup's backward in torch's profiler."""


class UpdateInBackward(torch.autograd.Function):
    """Identity whose backward updates the rows of a lookup and returns no gradient."""

    @staticmethod
    def forward(
        ctx: Any,
        output: Tensor,
        adam: LookupAdam,
        lr: Callable[[], float],
        inputs: Inputs,
        ids: LookupIds | None,
        _: Tensor,
    ) -> Tensor:
        ctx.adam, ctx.lr, ctx.inputs, ctx.ids, ctx.step = adam, lr, inputs, ids, adam.step
        return output.view_as(output)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, None, None, None, None, None]:
        inputs = ctx.inputs
        id_weights = inputs.get("per_sample_weights")
        backward = LookupBackward(inputs["indices"], inputs["offsets"], id_weights, grads[0], ctx.ids)
        with profiled(EMBEDDING_UPDATE):
            ctx.adam.update(backward, ctx.lr(), step_of_forward=ctx.step)
        return None, None, None, None, None, None
