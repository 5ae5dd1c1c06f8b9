"""The front's features on CPU in one pass over the rows, and one pass for their gradient. Compiled by numba, float32.

torch's operations pass over the rows eleven times, which takes a tenth of a step of 1,024 samples.

Sizes: B samples, F fields, D embedding width, P stored width of a row, N dense features.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import numba
import numpy as np
import torch
from torch import Tensor

_LEAST_NUMBERS = 1 << 19
"""Least numbers of rows for each further thread, which takes longer to wake up than fewer numbers take to read."""


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


@cache
def _threads(count: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(count, thread_name_prefix="cowrec-features")


def _in_threads(kernel: Callable[..., None], rows: Tensor, *arguments: Any) -> None:
    """Runs a kernel on equal parts of the samples, each in a thread."""
    samples, parts = len(rows), max(1, min(torch.get_num_threads(), rows.numel() // _LEAST_NUMBERS))
    limits = [samples * part // parts for part in range(parts + 1)]
    others = [_threads(parts - 1).submit(kernel, *arguments, *limits[part : part + 2]) for part in range(1, parts)]
    kernel(*arguments, *limits[:2])
    for other in others:
        other.result()


@numba.njit(nogil=True, cache=True, error_model="numpy")
def _features(rows, dense, dim, wide, pairs, flat, first, last):  # type: ignore[no-untyped-def]
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
def _gradient(rows, of_wide, of_pairs, of_flat, dim, out, first, last):  # type: ignore[no-untyped-def]
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
