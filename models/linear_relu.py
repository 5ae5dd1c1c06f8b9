"""Linear layers with ReLU, computed by oneDNN on CPU.

torch computes float32 products with MKL, which reaches less than half of oneDNN's rate on some processors; oneDNN also
fuses the bias and the ReLU. Sizes: B samples, K inputs, H outputs.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_SAMPLES = 8192
"""Samples per part of a kernel's gradient, so that their copies in oneDNN's tensors stay in the cache."""
_PACKED_FOR = 256
"""Samples for which oneDNN chooses the order of a packed kernel; others can use it too."""
_FEW_SAMPLES = 1024
"""Most samples for which a kernel's gradient is a product of transposed tensors: the copies would cost more."""


def linear_relu(x: Tensor, *weights_and_biases: Tensor) -> Tensor:
    """Applies ``x <- relu(x @ weight.T + bias)`` for each layer's weight [H, K] and bias [H], in this order.

    Returns:
        [B, H] of x [B, K]; under autocast in its dtype.
    """
    kind = x.device.type
    autocast = torch.is_autocast_enabled(kind)
    dtype = torch.get_autocast_dtype(kind) if autocast else x.dtype
    by_one_dnn = kind == "cpu" and dtype in (torch.float32, torch.bfloat16) and torch.backends.mkldnn.is_available()
    # Exported networks must run on any machine; recorded ones are for few samples, where torch's product is faster.
    by_one_dnn = by_one_dnn and not (torch.compiler.is_exporting() or torch.jit.is_tracing())
    if by_one_dnn and not torch.is_inference_mode_enabled():
        return _OneDnn.apply(x.to(dtype), *weights_and_biases)
    x, *parameters = [each.to(dtype) if autocast else each for each in (x, *weights_and_biases)]
    for weight, bias in _layers(parameters):
        x = _product(x, weight, bias, "relu") if by_one_dnn else F.linear(x, weight, bias).relu_()
    return x


class LinearRelu(nn.Linear):
    """A module for :func:`linear_relu` with its kernel and bias."""

    _packed: Tensor | None = None

    @property
    def kernel(self) -> Tensor:
        """The weight [H, K], packed or not; one that is packed cannot be converted."""
        return self.weight if self._packed is None or torch.is_autocast_enabled("cpu") else self._packed

    def forward(self, x: Tensor) -> Tensor:
        return linear_relu(x, self.kernel, self.bias)

    def pack(self) -> None:
        """Copies the kernel to the order in which oneDNN reads it, for inference on CPU; it must not change then."""
        if torch.backends.mkldnn.is_available():
            self._packed = torch.ops.mkldnn._reorder_linear_weight(self.weight.detach(), _PACKED_FOR)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_packed"}  # it cannot be copied


class _OneDnn(torch.autograd.Function):
    """Direct calls of oneDNN's operators: torch itself fuses a ReLU in compiled graphs only, and not in a backward.

    All layers are one operation for autograd, whose own work takes as long as a layer of a small batch. The parameters
    are converted to the dtype of x.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, *parameters: Tensor) -> Tensor:
        converted = [each.to(x.dtype) for each in parameters]
        inputs, ctx.dtypes = [x], [each.dtype for each in parameters]
        for weight, bias in _layers(converted):
            inputs.append(_product(inputs[-1], weight, bias, "relu"))
        ctx.save_for_backward(*inputs, *converted[::2])
        return inputs[-1]

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        depth = len(ctx.dtypes) // 2
        inputs, weights = ctx.saved_tensors[: depth + 1], ctx.saved_tensors[depth + 1 :]
        grad, of_parameters = grads[0], []
        for layer in reversed(range(depth)):
            grad = torch.ops.aten.threshold_backward(grad, inputs[layer + 1], 0)
            of_parameters += [grad.sum(0), _kernel_gradient(grad, inputs[layer], weights[layer])]
            if layer or ctx.needs_input_grad[0]:
                grad = _product(grad, weights[layer].t(), None, "none")
        of_x = grad if ctx.needs_input_grad[0] else None
        return of_x, *(each.to(dtype) for each, dtype in zip(reversed(of_parameters), ctx.dtypes, strict=True))


def _kernel_gradient(grad: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    """``grad.T @ x``, [H, K], of the gradient [B, H] of a layer's products and its inputs [B, K]."""
    if grad.dtype != torch.float32:  # torch computes these products with oneDNN
        return grad.t() @ x
    if 0 < len(grad) <= _FEW_SAMPLES:
        return _product(grad.t(), x.t(), None, "none")
    total, kernel = torch.zeros_like(weight), weight.to_mkldnn()  # only its shape is read
    for some, inputs in zip(grad.split(_SAMPLES), x.split(_SAMPLES), strict=True):
        part, _ = torch.ops.aten.mkldnn_linear_backward_weights(some.to_mkldnn(), inputs.to_mkldnn(), kernel, False)
        total += part.to_dense()
    return total


def _product(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, activation, [], "")


def _layers(weights_and_biases: Sequence[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
    return zip(weights_and_biases[::2], weights_and_biases[1::2], strict=True)
