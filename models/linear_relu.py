"""Linear layers with ReLU: on CPU by oneDNN or MKL, on CUDA with bias and ReLU in the epilogue of the products.

torch computes float32 products on CPU with MKL, which reaches less than half of oneDNN's rate on an AMD EPYC. On an
Intel Xeon it needs 5 to 20 % less time for a pass over the layers, because it reads transposed factors without a copy.
Sizes: B samples, K inputs, H outputs.
"""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeAlias

import torch
import torch.fx
import torch.nn.functional as F
from torch import Tensor, nn

# One operation for TorchRec's pipeline, which traces layers with dropout between them.
torch.fx.wrap("linear_relu")

_SAMPLES = 8192
"""Samples per part of a kernel's gradient, so that their copies in oneDNN's tensors stay in the cache."""
_PACKED_FOR = 256
"""Samples for which oneDNN chooses the order of a packed kernel; other numbers of samples can use the kernel too."""
_FEW_SAMPLES = 1024
"""Most samples for which a kernel's gradient is a product of transposed tensors: the copies would cost more."""
_MANY_SAMPLES = 1 << 14
"""Samples from which a kernel is transposed for the gradient of a layer's inputs on CUDA: cuBLAS computes products in
TF32 at twice the rate if the sum runs along the rows of both factors (measured on an H100)."""
BY_ONE_DNN: set[torch.dtype] = set()
"""Types of which oneDNN computes products on this processor: bfloat16 needs AVX-512."""


def _is_intel() -> bool:
    with suppress(OSError), Path("/proc/cpuinfo").open(encoding="utf-8") as lines:
        return "GenuineIntel" in lines.read(1024)
    return False


if torch.backends.mkldnn.is_available():
    BY_ONE_DNN |= {torch.bfloat16} if torch.ops.mkldnn._is_mkldnn_bf16_supported() else set()
    BY_ONE_DNN |= set() if torch.backends.mkl.is_available() and _is_intel() else {torch.float32}


def linear_relu(x: Tensor, *weights_and_biases: Tensor, padded: Tensor | None = None) -> Tensor:
    """Applies ``x <- relu(x @ weight.T + bias)`` for each layer's weight [H, K] and bias [H], in this order.

    ``padded``, float [B, K or more], is x with columns of zeros behind it, which products read instead of x where they
    can. Returns [B, H] of x [B, K], under autocast in the dtype of autocast.
    """
    kind = x.device.type
    autocast = torch.is_autocast_enabled(kind)
    dtype = torch.get_autocast_dtype(kind) if autocast else x.dtype
    output: Tensor
    math = _math(x, dtype)
    if math and not torch.is_inference_mode_enabled():
        output = _Layers.apply(math, x.to(dtype), padded, None, *weights_and_biases)
        return output
    x, *parameters = [tensor.to(dtype) if autocast else tensor for tensor in (x, *weights_and_biases)]
    for weight, bias in _layers(parameters):
        x = math.layer(x, weight, bias) if math else F.linear(x, weight, bias).relu_()
    return x


def affine(x: Tensor, kernel: Tensor, bias: Tensor | None = None) -> Tensor:
    """``x @ kernel + bias``, [..., H], of x [..., K], kernel [K, H] and bias [H]; fast for small K and H too."""
    of_torch = torch.is_autocast_enabled(x.device.type) or torch.is_inference_mode_enabled()
    if of_torch or _math(x, x.dtype) is not _OneDnn:
        return F.linear(x, kernel.t(), bias)
    output: Tensor = _Affine.apply(x, kernel, bias)
    return output


def logits_of(x: Tensor, kernel: Tensor) -> Tensor:
    """``x @ kernel``, [B], of x [B, K] and kernel [K, 1], in the kernel's dtype under autocast too."""
    kind = x.device.type
    x = x if x.dtype == kernel.dtype else x.to(kernel.dtype)
    if not torch.is_autocast_enabled(kind):  # entering a context takes longer than a small product
        return (x @ kernel).squeeze(1)
    with torch.autocast(kind, enabled=False):
        return (x @ kernel).squeeze(1)


def logits_of_layers(x: Tensor, kernel: Tensor, *weights_and_biases: Tensor, padded: Tensor | None = None) -> Tensor:
    """:func:`logits_of` of :func:`linear_relu`, with one backward pass over the last layer's outputs."""
    kind = x.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
    math = _math(x, dtype)
    if math is None or torch.is_inference_mode_enabled():
        return logits_of(linear_relu(x, *weights_and_biases), kernel)
    logits: Tensor = _Layers.apply(math, x.to(dtype), padded, kernel, *weights_and_biases)
    return logits


def _math(x: Tensor, dtype: torch.dtype) -> "_Math | None":
    """What computes products of a type; None for torch's own operations alone."""
    if uses_kernels(x):
        return _OnDevice
    # Exported networks must run on any machine; recorded ones are for few samples, where torch's product is faster.
    if x.device.type != "cpu" or torch.compiler.is_exporting() or torch.jit.is_tracing():
        return None
    return _OneDnn if dtype in BY_ONE_DNN else _OfTorch


def uses_kernels(x: Tensor) -> bool:
    """True if Triton's kernels compute passes over the samples: on CUDA, except for what torch compiles or exports."""
    return x.is_cuda and x.dtype.itemsize <= 4 and not (torch.compiler.is_compiling() or torch.jit.is_tracing())


class LinearRelu(nn.Linear):
    """A module for :func:`linear_relu` with its kernel and bias."""

    _packed: Tensor | None = None

    @property
    def kernel(self) -> Tensor:
        """The weight [H, K], packed unless autocast has to convert it."""
        return self.weight if self._packed is None or torch.is_autocast_enabled("cpu") else self._packed

    def forward(self, x: Tensor) -> Tensor:
        return linear_relu(x, self.kernel, self.bias)

    def pack(self) -> None:
        """Copies the kernel to the order in which oneDNN reads it, for inference on CPU. The weight must not change."""
        if torch.float32 in BY_ONE_DNN:
            self._packed = torch.ops.mkldnn._reorder_linear_weight(self.weight.detach(), _PACKED_FOR)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_packed"}  # which cannot be copied


class _Layers(torch.autograd.Function):
    """All layers as one operation, because autograd's own work takes as long as a layer of a small batch.

    The parameters are converted to the dtype of x. With a ``kernel``, :func:`logits_of` follows the layers.
    """

    @staticmethod
    def forward(
        ctx: Any, math: "_Math", x: Tensor, padded: Tensor | None, kernel: Tensor | None, *parameters: Tensor
    ) -> Tensor:
        converted = [parameter.to(x.dtype) for parameter in parameters]
        ctx.math, ctx.dtypes, ctx.columns = math, [parameter.dtype for parameter in parameters], x.shape[1]
        if padded is not None and padded.dtype == x.dtype:
            converted[0], x = F.pad(converted[0], (0, padded.shape[1] - ctx.columns)), padded
        inputs = [x]
        for weight, bias in _layers(converted):
            inputs.append(math.layer(inputs[-1], weight, bias))
        ctx.save_for_backward(kernel, *inputs, *converted[::2])
        return inputs[-1] if kernel is None else logits_of(inputs[-1], kernel)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        depth, math, (kernel, *tensors) = len(ctx.dtypes) // 2, ctx.math, ctx.saved_tensors
        inputs, weights = tensors[: depth + 1], tensors[depth + 1 :]
        grad, of_kernel, of_parameters = grads[0], None, list[Tensor]()
        for layer in reversed(range(depth)):
            last = layer == depth - 1
            if last and kernel is None and not grad.is_cuda:
                grad = grad.clone()  # which is written over
            grad, of_bias, sums = math.relu_backward(grad, inputs[layer + 1], kernel if last else None)
            of_kernel = sums if last else of_kernel
            of_parameters += [of_bias, math.kernel_gradient(grad, inputs[layer], weights[layer])]
            if layer or ctx.needs_input_grad[1]:
                grad = math.input_gradient(grad, weights[layer])
        if ctx.columns < inputs[0].shape[1]:
            grad, of_parameters[-1] = grad[:, : ctx.columns], of_parameters[-1][:, : ctx.columns]
        of_x = grad if ctx.needs_input_grad[1] else None
        converted = (gradient.to(dtype) for gradient, dtype in zip(reversed(of_parameters), ctx.dtypes, strict=True))
        return None, of_x, None, of_kernel, *converted


class _Affine(torch.autograd.Function):
    """:func:`affine` by oneDNN."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, kernel: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, kernel)
        return _product(x, kernel.t(), bias, "none")

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (x, kernel), grad, of_x = ctx.saved_tensors, grads[0], None
        if ctx.needs_input_grad[0]:
            of_x = _product(grad, kernel, None, "none")
        of_samples = grad.flatten(0, -2)
        of_bias = of_samples.sum(0) if ctx.needs_input_grad[2] else None
        return of_x, x.flatten(0, -2).t() @ of_samples, of_bias


class _OneDnn:
    """Direct calls of oneDNN's operators: torch itself fuses a ReLU in compiled graphs only, and not in a backward."""

    @staticmethod
    def layer(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return _product(x, weight, bias, "relu")

    @staticmethod
    def relu_backward(grad: Tensor, output: Tensor, kernel: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
        """Returns the gradient of the ReLU's input, [B, H], its sum over the samples, [H], and a kernel's gradient.

        ``grad`` is the gradient of the output, and is written over; with the kernel of :func:`logits_of` it is the
        gradient of the logits, [B].
        """
        of_kernel = None
        if kernel is not None:
            of_kernel = output.to(kernel.dtype).t() @ grad[:, None]
            grad = (grad[:, None] * kernel.t()).to(output.dtype)
        torch.ops.aten.threshold_backward.grad_input(grad, output, 0, grad_input=grad)
        return grad, grad.sum(0), of_kernel

    @staticmethod
    def input_gradient(grad: Tensor, weight: Tensor) -> Tensor:
        """``grad @ weight``, [B, K]."""
        return _product(grad, weight.t(), None, "none")

    @staticmethod
    def kernel_gradient(grad: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        """``grad.T @ x``, [H, K], of the gradient [B, H] of a layer's products and the layer's inputs [B, K]."""
        if grad.dtype != torch.float32:  # torch computes these products with oneDNN
            return grad.t() @ x
        if 0 < len(grad) <= _FEW_SAMPLES:
            return _product(grad.t(), x.t(), None, "none")
        total, kernel = torch.zeros_like(weight), weight.to_mkldnn()  # only its shape is read
        for some, inputs in zip(grad.split(_SAMPLES), x.split(_SAMPLES), strict=True):
            part, _ = torch.ops.aten.mkldnn_linear_backward_weights(some.to_mkldnn(), inputs.to_mkldnn(), kernel, False)
            total += part.to_dense()
        return total


class _OfTorch:
    """Products by torch's library, which on CPU is MKL; it reads transposed factors without a copy."""

    @staticmethod
    def layer(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return torch._addmm_activation(bias, x, weight.t())

    @staticmethod
    def relu_backward(grad: Tensor, output: Tensor, kernel: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
        return _OneDnn.relu_backward(grad, output, kernel)

    @staticmethod
    def input_gradient(grad: Tensor, weight: Tensor) -> Tensor:
        return grad @ weight

    @staticmethod
    def kernel_gradient(grad: Tensor, x: Tensor, _: Tensor) -> Tensor:
        return grad.t() @ x


class _OnDevice(_OfTorch):
    """cuBLAS with epilogues, by torch's operator that has them, and a Triton kernel for the backward of a ReLU."""

    @staticmethod
    def relu_backward(grad: Tensor, output: Tensor, kernel: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
        from .triton_layers import relu_backward_on_device

        return relu_backward_on_device(grad, output, kernel)

    @staticmethod
    def input_gradient(grad: Tensor, weight: Tensor) -> Tensor:
        if grad.dtype == torch.float32 and len(grad) >= _MANY_SAMPLES:
            return F.linear(grad, weight.t().contiguous())
        return grad @ weight


_Math: TypeAlias = type[_OneDnn] | type[_OfTorch]


def _product(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str) -> Tensor:
    output: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, activation, [], "")
    return output


def _layers(weights_and_biases: Sequence[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
    return zip(weights_and_biases[::2], weights_and_biases[1::2], strict=True)
