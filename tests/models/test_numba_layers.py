"""Layers of one pass and their gradients against plain torch in float64."""

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from cowrec.models import front, numba_layers
from cowrec.models.networks.histories import _NarrowAttention, _PreluProduct

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
"""Rounding of sums, as a share of the largest value."""
# B, F, D, N: an empty batch, one field and no dense features, odd widths, and more than a tile.
SHAPES = ((0, 3, 3, 2), (1, 1, 1, 0), (5, 26, 10, 13), (7, 5, 37, 70))


@pytest.fixture(autouse=True)
def several_threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The largest inputs are computed in two or three."""
    monkeypatch.setattr(numba_layers, "_LEAST_NUMBERS", 1 << 19)
    threads = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("shape", [*SHAPES, (5000, 26, 10, 13)])
def test_features_on_cpu_are_those_of_float64(shape: tuple[int, int, int, int]) -> None:
    compare_features(shape, torch.float32)


@pytest.mark.parametrize("shape", [(0, 2, 3), (1, 1, 1), (300, 5, 37), (1500, 20, 64)])
def test_a_prelu_and_the_product_behind_it_are_those_of_float64(shape: tuple[int, int, int]) -> None:
    torch.manual_seed(shape[0])
    samples, positions, size = shape
    shapes: list[tuple[int, ...]] = [shape, (samples, size), (1,), (size, 1)]
    leaves, grad = [torch.randn(shape) for shape in shapes], torch.randn(samples, positions)
    found, expected = ([leaf.to(kind, copy=True).requires_grad_() for leaf in leaves] for kind in (None, torch.float64))
    of_kernels = _PreluProduct.apply(*found)
    hidden, shift, slope, kernel = expected
    of_torch = (F.prelu(hidden + shift[:, None], slope) @ kernel).squeeze(2)
    of_kernels.backward(grad)
    of_torch.backward(grad.double())
    check_close(
        [of_kernels.detach(), *(leaf.grad for leaf in found)],
        [of_torch.detach(), *(leaf.grad for leaf in expected)],
        TOLERANCE[torch.float32],
    )


# B, n, m, D, H: an empty batch, one output, heads of one column, and pairs of a sample and a head beyond a block.
@pytest.mark.parametrize("shape", [(0, 2, 2, 2, 1), (1, 2, 1, 4, 4), (70, 7, 7, 12, 3), (1500, 21, 20, 10, 2)])
@pytest.mark.parametrize("size", [1, 20])  # of the numbers: weights are between 0 and 1, or close to one of both
@pytest.mark.parametrize("has_bias", [False, True])
def test_attention_is_that_of_float64(shape: tuple[int, int, int, int, int], size: int, has_bias: bool) -> None:
    samples, length, last, width, heads = shape
    generator = torch.Generator().manual_seed(samples)
    projected = size * torch.randn(samples, length, 3 * width, generator=generator)
    bias = size * torch.randn(length, generator=generator) if has_bias else None
    mask = torch.rand(samples, length, generator=generator) > 0.4
    mask[:, -1] = True
    grad = torch.randn(samples, last, width, generator=generator)

    def expected(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None) -> Tensor:
        query, key, value = (each.unflatten(2, (heads, -1)).transpose(1, 2) for each in (query, key, value))
        if bias is None:
            attended = F.scaled_dot_product_attention(query, key, value, mask[:, None, None])
        else:
            ages = torch.arange(length - last, length)[:, None] - torch.arange(length)
            weights = F.silu(query @ key.mT + bias[ages.abs()]) / length * (mask[:, None, None] & (ages >= 0))
            attended = weights @ value
        return attended.transpose(1, 2).flatten(2)

    found = []
    for kind in (torch.float32, torch.float64):
        leaf = projected.to(kind, copy=True).requires_grad_()
        own_bias = None if bias is None else bias.to(kind, copy=True).requires_grad_()
        query, key, value = leaf.chunk(3, 2)
        given = (query[:, -last:], key, value)
        out = _NarrowAttention.apply(*given, mask, heads, own_bias) if not found else expected(*given, own_bias)
        out.backward(grad.to(kind))
        of_bias = [] if own_bias is None or own_bias.grad is None else [own_bias.grad]
        found.append([out.detach(), leaf.grad, *of_bias])
    check_close(*found, tolerance=size * TOLERANCE[torch.float32])


@pytest.mark.parametrize("has_bias", [False, True])
def test_attention_shows_a_query_that_is_not_a_number(has_bias: bool) -> None:
    query, key, value = torch.randn(3, 1, 4, 2)
    query[0, 1, 0] = torch.nan
    out = numba_layers.attention_on_cpu(
        query, key, value, torch.ones(1, 4, dtype=torch.bool), 2, torch.zeros(4) if has_bias else None
    )
    assert out.isnan().nonzero().tolist() == [[0, 1, 0]]


def test_under_autocast_the_flat_features_are_rounded_and_their_gradients_are_not() -> None:
    rows, dense = torch.randn(7, 3, 8, requires_grad=True), torch.randn(7, 2)
    with torch.autocast("cpu", torch.bfloat16):
        x = front._features(rows, dense, 4, {})
    assert (x.flat.dtype, x.wide.dtype) == (torch.bfloat16, torch.float32)
    assert torch.equal(x.flat, torch.cat([rows.detach()[:, :, :4].flatten(1), dense], 1).bfloat16())
    grad = torch.randn(7, 14).bfloat16()
    (x.flat * grad).sum().backward()
    assert rows.grad is not None
    assert torch.equal(rows.grad, F.pad(grad[:, :12].float().view(7, 3, 4), (0, 4)))


def check_close(found: list[Tensor], expected: list[Tensor], tolerance: float) -> None:
    for one, other in zip(found, expected, strict=True):
        assert one.shape == other.shape
        largest = other.abs().max().item() if other.numel() else 0.0
        torch.testing.assert_close(one.double(), other.double(), rtol=0, atol=tolerance * max(largest, 1e-30))


def compare_features(shape: tuple[int, int, int, int], dtype: torch.dtype) -> None:
    samples, fields, dim, num_dense = shape
    generator = torch.Generator().manual_seed(samples)
    rows = torch.randn(samples, fields, (dim // 4 + 1) * 4, generator=generator).to(dtype)
    dense = torch.randn(samples, num_dense, generator=generator).to(dtype)

    def expected(rows: Tensor, dense: Tensor) -> tuple[Tensor, ...]:
        embeddings = rows[:, :, :dim]
        pairs = 0.5 * (embeddings.sum(1).square().sum(1) - embeddings.square().sum((1, 2)))
        return rows[:, :, dim].sum(1), torch.cat([embeddings.flatten(1), dense], 1), pairs

    def found(rows: Tensor, dense: Tensor) -> tuple[Tensor, ...]:
        x = front._features(rows, dense, dim, {})
        assert x.pairs is not None
        if x.padded is not None:
            assert x.padded.shape[1] % 8 == 0
            torch.testing.assert_close(
                x.padded, F.pad(x.flat, (0, x.padded.shape[1] - x.flat.shape[1])), rtol=0, atol=0
            )
        return x.wide, x.flat, x.pairs

    # Gradients of all results, and of those that a network uses alone.
    for used in ((0, 1, 2), (2,), (1,), (0, 2)):
        results = []
        for compute, precise in ((found, dtype), (expected, torch.float64)):
            leaves = [tensor.to(precise, copy=True).requires_grad_() for tensor in (rows, dense)]
            values = compute(*leaves)
            torch.manual_seed(1)
            grads = [torch.randn(values[i].shape).to(dtype) for i in used]
            torch.autograd.backward([values[i] for i in used], [grad.to(precise) for grad in grads])
            of_leaves = [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in leaves]
            results.append([*(value.detach() for value in values), *of_leaves])
        check_close(*results, TOLERANCE[dtype])
