"""A linear layer and its ReLU, on CPU by oneDNN.

torch hands float32 products to MKL, which reaches less than half of oneDNN's rate on some processors; and oneDNN takes
the bias and the ReLU along. Sizes: B samples, K inputs, H outputs.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_SAMPLES = 8192
"""Whose part of a kernel's gradient is computed at a time: their copies in oneDNN's tensors stay in the cache."""


def linear_relu(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """``relu(x @ weight.T + bias)``, [B, H], of x [B, K], weight [H, K] and bias [H]; under autocast in its dtype."""
    kind = x.device.type
    if torch.is_autocast_enabled(kind):
        dtype = torch.get_autocast_dtype(kind)
        x, weight, bias = x.to(dtype), weight.to(dtype), bias.to(dtype)
    by_one_dnn = kind == "cpu" and x.dtype in (torch.float32, torch.bfloat16) and torch.backends.mkldnn.is_available()
    if by_one_dnn and not torch.compiler.is_exporting():  # what is exported is to run anywhere
        return _OneDnn.apply(x, weight, bias)
    return F.relu(F.linear(x, weight, bias))


class LinearRelu(nn.Linear):
    """:func:`linear_relu` with kernel and bias of its own."""

    def forward(self, x: Tensor) -> Tensor:
        return linear_relu(x, self.weight, self.bias)


class _OneDnn(torch.autograd.Function):
    """torch calls oneDNN with a ReLU in compiled graphs alone, and not in a backward; so these are its operators."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        y = _product(x, weight, bias, "relu")
        ctx.save_for_backward(x, weight, y)
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor, Tensor]:
        x, weight, y = ctx.saved_tensors
        grad = torch.ops.aten.threshold_backward(grads[0], y, 0)
        of_x = _product(grad, weight.t(), None, "none") if ctx.needs_input_grad[0] else None
        if grad.dtype != torch.float32:  # torch's own product is oneDNN's
            return of_x, grad.t() @ x, grad.sum(0)
        of_weight, of_bias = torch.zeros_like(weight), torch.zeros_like(weight[:, 0])
        kernel = weight.to_mkldnn()  # no more than its shape is asked for
        for some, inputs in zip(grad.split(_SAMPLES), x.split(_SAMPLES), strict=True):
            parts = torch.ops.aten.mkldnn_linear_backward_weights(some.to_mkldnn(), inputs.to_mkldnn(), kernel, True)
            of_weight += parts[0].to_dense()
            of_bias += parts[1].to_dense()
        return of_x, of_weight, of_bias


def _product(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, activation, [], "")
