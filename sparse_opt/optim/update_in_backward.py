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
        ctx.save_for_backward(inputs["indices"], inputs["offsets"], inputs.get("per_sample_weights"))
        ctx.adam, ctx.lr, ctx.ids, ctx.step = adam, lr, ids, adam.step
        ctx.mark_dirty(output)
        return output

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, None, None, None, None, None]:
        indices, offsets, id_weights = ctx.saved_tensors
        backward = LookupBackward(indices, offsets, id_weights, grads[0], ctx.ids)
        with profiled(EMBEDDING_UPDATE):
            ctx.adam.update(backward, ctx.lr(), step_of_forward=ctx.step)
        return None, None, None, None, None, None
