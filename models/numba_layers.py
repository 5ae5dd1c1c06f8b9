"""Layers on CPU that take one pass over their inputs, and one pass for their gradient. Compiled by numba, float32.

torch's operations pass over the looked-up rows eleven times for the front's features and their gradient, which takes a
tenth of a step of 1,024 samples; and over the hidden layer of an activation unit fifteen times.

Sizes: B samples, F fields, D embedding width, P stored width of a row, N dense features, L positions of a history, H
hidden units.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import numba
import numpy as np
import torch
from torch import Tensor

_LEAST_NUMBERS = 1 << 21
"""Least numbers of inputs for each thread, which takes longer to wake up than fewer numbers take to read."""


def features_on_cpu(rows: Tensor, dense: Tensor, dim: int) -> tuple[Tensor, Tensor, Tensor]:
    """Computes the features of looked-up rows.

    Args:
        rows: float32 [B, F, P].
        dense: float32 [B, N].
        dim: D.

    Returns float32 tensors: the sum of the wide weights, [B]; the sum of the products of all pairs of embeddings, [B];
    and the embeddings and the dense features, [B, F * D + N].
    """
    samples, fields, _ = rows.shape
    wide, pairs = rows.new_empty(samples), rows.new_empty(samples)
    flat = rows.new_empty(samples, fields * dim + dense.shape[1])
    given = [tensor.detach().contiguous().numpy() for tensor in (rows, dense)]
    _in_threads(_features, rows, *given, dim, wide.numpy(), pairs.numpy(), flat.numpy())
    return wide, pairs, flat


def features_backward_on_cpu(
    rows: Tensor, dim: int, grad_wide: Tensor | None, grad_pairs: Tensor | None, grad_flat: Tensor | None
) -> Tensor:
    """Computes the gradient of the rows of :func:`features_on_cpu`, [B, F, P].

    A gradient is None if the result was not used. That of the flat features may be bfloat16.
    """
    samples, fields, _ = rows.shape
    grad_rows = torch.empty_like(rows, memory_format=torch.contiguous_format)
    wide, pairs = (rows.new_zeros(samples) if grad is None else grad for grad in (grad_wide, grad_pairs))
    flat = rows.new_zeros(samples, fields * dim) if grad_flat is None else grad_flat.float()
    given = [tensor.contiguous().numpy() for tensor in (rows, wide, pairs, flat)]
    _in_threads(_gradient, rows, *given, dim, grad_rows.numpy())
    return grad_rows


def prelu_product_on_cpu(hidden: Tensor, shift: Tensor, slope: Tensor, kernel: Tensor) -> Tensor:
    """Computes ``prelu(hidden + shift[:, None]) @ kernel``, [B, L].

    Args:
        hidden: float32 [B, L, H].
        shift: float32 [B, H].
        slope: float32 [1].
        kernel: float32 [H, 1].
    """
    out = hidden.new_empty(hidden.shape[:2])
    given = [tensor.detach().contiguous().numpy() for tensor in (hidden, shift, slope, kernel.view(-1))]
    _in_threads(_prelu_product, hidden, *given, out.numpy())
    return out


def prelu_product_backward_on_cpu(
    hidden: Tensor, shift: Tensor, slope: Tensor, kernel: Tensor, grad: Tensor
) -> tuple[Tensor, ...]:
    """Computes the gradients of the four inputs of :func:`prelu_product_on_cpu` from that of its result, [B, L]."""
    out, of_shift = (torch.empty_like(each, memory_format=torch.contiguous_format) for each in (hidden, shift))
    given = [tensor.contiguous().numpy() for tensor in (hidden, shift, slope, kernel.view(-1), grad)]
    sums = sum(_in_threads(_prelu_product_gradient, hidden, *given, out.numpy(), of_shift.numpy()))
    of_slope, of_kernel = torch.from_numpy(sums).float()
    return out, of_shift, of_slope @ kernel, of_kernel[:, None]


@cache
def _threads(count: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(count, thread_name_prefix="cowrec-layers")


def _in_threads(kernel: Callable[..., Any], inputs: Tensor, *arguments: Any) -> list[Any]:
    """Runs a kernel on equal parts of the inputs' first dimension, each in a thread; returns its results in order."""
    size, parts = len(inputs), max(1, min(torch.get_num_threads(), inputs.numel() // _LEAST_NUMBERS))
    limits = [size * part // parts for part in range(parts + 1)]
    others = [_threads(parts - 1).submit(kernel, *arguments, *limits[part : part + 2]) for part in range(1, parts)]
    return [kernel(*arguments, *limits[:2]), *(other.result() for other in others)]


@numba.njit(nogil=True, cache=True, error_model="numpy")
def _features(rows, dense, dim, wide, pairs, flat, first, last):
    """Source of the pairs: Factorization Machines (Rendle 2010), lemma 3.1."""
    fields, numbers = rows.shape[1], dense.shape[1]
    total, squares = np.empty(dim, np.float32), np.empty(dim, np.float32)
    for b in range(first, last):
        total[:] = 0
        squares[:] = 0
        wide_weights, doubled = np.float32(0), np.float32(0)
        for f in range(fields):
            for d in range(dim):
                value = rows[b, f, d]
                flat[b, f * dim + d] = value
                total[d] += value
                squares[d] += value * value
            wide_weights += rows[b, f, dim]
        for n in range(numbers):
            flat[b, fields * dim + n] = dense[b, n]
        for d in range(dim):
            doubled += total[d] * total[d] - squares[d]
        wide[b], pairs[b] = wide_weights, np.float32(0.5) * doubled


@numba.njit(nogil=True, cache=True, error_model="numpy")
def _gradient(rows, of_wide, of_pairs, of_flat, dim, out, first, last):
    fields, stored = rows.shape[1], rows.shape[2]
    total = np.empty(dim, np.float32)
    for b in range(first, last):
        total[:] = 0
        for f in range(fields):
            for d in range(dim):
                total[d] += rows[b, f, d]
        for f in range(fields):
            for d in range(dim):
                out[b, f, d] = of_flat[b, f * dim + d] + of_pairs[b] * (total[d] - rows[b, f, d])
            out[b, f, dim] = of_wide[b]
            for d in range(dim + 1, stored):
                out[b, f, d] = 0


@numba.njit(nogil=True, cache=True, error_model="numpy", fastmath={"reassoc"})
def _prelu_product(hidden, shift, slope, kernel, out, first, last):
    for b in range(first, last):
        for position in range(hidden.shape[1]):
            total = np.float32(0)
            for h in range(len(kernel)):
                value = hidden[b, position, h] + shift[b, h]
                total += (value if value > 0 else slope[0] * value) * kernel[h]
            out[b, position] = total


@numba.njit(nogil=True, cache=True, error_model="numpy")
def _prelu_product_gradient(hidden, shift, slope, kernel, grad, out, of_shift, first, last):
    """Returns sums of the gradient times the negative units and times the PReLU's outputs, float64 [2, H].

    The positions of a sample are summed in float32, the samples in float64.
    """
    size = len(kernel)
    sums = np.zeros((2, size))
    negative, activated = np.empty(size, np.float32), np.empty(size, np.float32)
    for b in range(first, last):
        negative[:] = 0
        activated[:] = 0
        of_shift[b] = 0
        for position in range(hidden.shape[1]):
            of_product = grad[b, position]
            for h in range(size):
                value = hidden[b, position, h] + shift[b, h]
                below = min(value, np.float32(0))
                of_unit = of_product * kernel[h] * (np.float32(1) if value > 0 else slope[0])
                out[b, position, h] = of_unit
                of_shift[b, h] += of_unit
                negative[h] += of_product * below
                activated[h] += of_product * (value - below + slope[0] * below)
        for h in range(size):
            sums[0, h] += negative[h]
            sums[1, h] += activated[h]
    return sums
