"""The linear layer with ReLU: products and gradients against float64 torch, at sizes around oneDNN's parts."""

from itertools import product

import pytest
import torch
import torch.nn.functional as F

from cowrec.models.layers import logits_of
from cowrec.models.linear_relu import _FEW_SAMPLES, _SAMPLES, LinearRelu, affine, linear_relu


def drawn(*shapes: tuple[int, ...]) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(shapes[0][0])
    return [torch.randn(shape, generator=generator).bfloat16() for shape in shapes]


def with_gradients(function, tensors, dtype, grad) -> list[torch.Tensor]:
    leaves = [tensor.to(dtype, copy=True).requires_grad_() for tensor in tensors]
    y = function(*leaves)
    y.backward(grad.to(y.dtype))
    return [y.detach(), *(leaf.grad for leaf in leaves)]


def check_close(found, expected, tolerance: float) -> None:
    """Relative to the largest value of each tensor."""
    for one, other in zip(found, expected, strict=True):
        largest = other.abs().max().item() if other.numel() else 0.0
        torch.testing.assert_close(one.double(), other, rtol=0, atol=tolerance * max(largest, 1e-30))


@pytest.mark.parametrize("samples", [0, 1, 3, _FEW_SAMPLES, _SAMPLES + 1])
@pytest.mark.parametrize(("dtype", "library"), [*product([torch.float32], ["oneDNN", "MKL"]), (torch.bfloat16, "")])
def test_values_and_gradients_are_those_of_float64(samples, dtype, library, monkeypatch):
    """The tolerance is the rounding of sums of that many terms."""
    if library:
        monkeypatch.setattr("cowrec.models.linear_relu.BY_ONE_DNN", {dtype} if library == "oneDNN" else set())
    *tensors, grad = drawn((samples, 13), (7, 13), (7,), (samples, 7))
    found = with_gradients(linear_relu, tensors, dtype, grad)
    # Both use the same side of the ReLU, since near zero they could differ.
    side = (found[0] > 0).double()
    expected = with_gradients(lambda *leaves: F.linear(*leaves) * side, tensors, torch.float64, grad)
    assert {tensor.dtype for tensor in found} == {dtype}
    check_close(found, expected, {torch.float32: 1e-5, torch.bfloat16: 2e-2}[dtype])
    assert samples == 0 or 0 < side.mean() < 1


@pytest.mark.parametrize("shape", [(0, 3), (5,), (70, 21)])  # of the inputs before their columns
@pytest.mark.parametrize("library", ["oneDNN", "MKL"])
@pytest.mark.parametrize("has_bias", [False, True])
def test_products_of_narrow_layers_are_those_of_float64(shape, library, has_bias, monkeypatch):
    monkeypatch.setattr("cowrec.models.linear_relu.BY_ONE_DNN", {torch.float32} if library == "oneDNN" else set())
    x, grad, *parameters = drawn((*shape, 10), (*shape, 4), (10, 4), *([(4,)] if has_bias else []))
    found, expected = (
        with_gradients(affine, (x, *parameters), dtype, grad) for dtype in (torch.float32, torch.float64)
    )
    check_close(found, expected, 1e-5)
    plain = with_gradients(lambda x, kernel, bias=0: x @ kernel + bias, (x, *parameters), torch.float64, grad)
    check_close(expected, plain, 1e-12)


def test_torch_computes_bfloat16_where_one_dnn_cannot(monkeypatch):
    """oneDNN refuses such products on processors without AVX-512; torch's are as exact."""
    monkeypatch.setattr("cowrec.models.linear_relu.BY_ONE_DNN", {torch.float32})
    monkeypatch.setattr("cowrec.models.linear_relu._product", None)
    test_values_and_gradients_are_those_of_float64(3, torch.bfloat16, "", monkeypatch)


@pytest.mark.parametrize("autocast", [False, True])
def test_layers_in_one_call_have_the_values_and_gradients_of_float64(autocast):
    """Gradients have the parameters' dtype under autocast too; the tolerance is the rounding of three layers."""
    *tensors, grad = drawn((20, 6), (9, 6), (9,), (8, 9), (8,), (5, 8), (5,), (20, 5))

    def layers(x, *parameters):
        for weight, bias in zip(parameters[::2], parameters[1::2], strict=True):
            x = F.relu(F.linear(x, weight, bias))
        return x

    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        found = with_gradients(linear_relu, tensors, torch.float32, grad)
    assert found[0].dtype == (torch.bfloat16 if autocast else torch.float32)
    assert {tensor.dtype for tensor in found[1:]} == {torch.float32}
    check_close(found, with_gradients(layers, tensors, torch.float64, grad), 5e-2 if autocast else 1e-5)


def test_under_autocast_products_are_bfloat16_and_logits_float32():
    layer, kernel = LinearRelu(5, 4), torch.randn(4, 1)
    with torch.autocast("cpu", torch.bfloat16):
        hidden = layer(torch.randn(3, 5))
        logits = logits_of(hidden, kernel)
    assert (hidden.dtype, logits.dtype) == (torch.bfloat16, torch.float32)
    assert logits.tolist() == (hidden.float() @ kernel).squeeze(1).tolist()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("width", [13, 16])
def test_on_cuda_the_products_with_epilogues_are_those_of_float64(width):
    """NaN stays NaN, so that the loss shows it."""
    *tensors, grad = (tensor.cuda() for tensor in drawn((3000, width), (40, width), (40,), (7, 40), (7,), (3000, 7)))

    def layers(x, first, bias, second, shift):
        return F.relu(F.linear(F.relu(F.linear(x, first, bias)), second, shift))

    found = with_gradients(linear_relu, tensors, torch.float32, grad)
    check_close(found, with_gradients(layers, tensors, torch.float64, grad), 1e-3)  # TF32, if it is allowed
    tensors[0][0] = torch.nan
    assert linear_relu(*(tensor.float() for tensor in tensors))[0].isnan().all()
