"""A linear layer with ReLU, computed by oneDNN on CPU.

torch computes float32 products with MKL, which reaches less than half of oneDNN's rate on some processors; oneDNN also
fuses the bias and the ReLU. Sizes: B samples, K inputs, H outputs.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_SAMPLES = 8192
"""Samples per part of a kernel's gradient, so that their copies in oneDNN's tensors stay in the cache."""
_FEW_SAMPLES = 1024
"""Most samples for which a kernel's gradient is a product of transposed tensors: the copies would cost more."""


def linear_relu(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """``relu(x @ weight.T + bias)``, [B, H], of x [B, K], weight [H, K] and bias [H]; under autocast in its dtype."""
    kind = x.device.type
    if torch.is_autocast_enabled(kind):
        dtype = torch.get_autocast_dtype(kind)
        x, weight, bias = x.to(dtype), weight.to(dtype), bias.to(dtype)
    by_one_dnn = kind == "cpu" and x.dtype in (torch.float32, torch.bfloat16) and torch.backends.mkldnn.is_available()
    if by_one_dnn and not torch.compiler.is_exporting():  # exported networks must run on any machine
        return _OneDnn.apply(x, weight, bias)
    return F.relu(F.linear(x, weight, bias))


class LinearRelu(nn.Linear):
    """A module for :func:`linear_relu` with its kernel and bias."""

    def forward(self, x: Tensor) -> Tensor:
        return linear_relu(x, self.weight, self.bias)


class _OneDnn(torch.autograd.Function):
    """Direct calls of oneDNN's operators: torch itself fuses a ReLU in compiled graphs only, and not in a backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        y = _product(x, weight, bias, "relu")
        ctx.save_for_backward(x, weight, y)
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        x, weight, y = ctx.saved_tensors
        grad = torch.ops.aten.threshold_backward(grads[0], y, 0)
        grad_x = _product(grad, weight.t(), None, "none") if ctx.needs_input_grad[0] else None
        if grad.dtype != torch.float32:  # torch computes these products with oneDNN
            return grad_x, grad.t() @ x, grad.sum(0)
        if 0 < len(grad) <= _FEW_SAMPLES:
            return grad_x, _product(grad.t(), x.t(), None, "none"), grad.sum(0)
        grad_weight = grad_bias = None
        kernel = weight.to_mkldnn()  # only its shape is read
        for some, inputs in zip(grad.split(_SAMPLES), x.split(_SAMPLES), strict=True):
            parts = torch.ops.aten.mkldnn_linear_backward_weights(some.to_mkldnn(), inputs.to_mkldnn(), kernel, True)
            weights, biases = (part.to_dense() for part in parts)
            grad_weight = weights if grad_weight is None else grad_weight.add_(weights)
            grad_bias = biases if grad_bias is None else grad_bias.add_(biases)
        return grad_x, grad_weight, grad_bias


def _product(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, activation, [], "")
