"""Layers on CPU that take one pass over their inputs, and one pass for their gradient. Compiled by numba, float32.

torch's operations pass over the looked-up rows eleven times for the front's features and their gradient, which takes a
tenth of a step of 1,024 samples; over the hidden layer of an activation unit fifteen times; and its products of small
matrices take most of the time of an attention with narrow heads.

Sizes: B samples, F fields, D embedding width, P stored width of a row, N dense features, L positions of a history, H
hidden units or heads, n positions that an attention reads, m positions for which it has outputs, d = D / H.
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


def attention_on_cpu(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, heads: int, distance_bias: Tensor | None
) -> Tensor:
    """Computes ``cowrec.models.networks.histories.attention`` in float32, [B, m, D]."""
    out = query.new_empty(query.shape)
    arguments = _attention_arguments(query, key, value, mask, heads, distance_bias)
    _in_threads(_attention, query, *arguments, out.numpy(), work=query.numel() * key.shape[1])
    return out


def attention_backward_on_cpu(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, heads: int, distance_bias: Tensor | None, grad: Tensor
) -> tuple[Tensor | None, ...]:
    """Computes the gradients of query, key, value and bias of :func:`attention_on_cpu` from that of its result."""
    found = [each.new_empty(each.shape) for each in (query, key, value)]
    arguments = _attention_arguments(query, key, value, mask, heads, distance_bias)
    outputs = (grad.contiguous().numpy(), *(each.numpy() for each in found))
    sums = sum(_in_threads(_attention_gradient, query, *arguments, *outputs, work=query.numel() * key.shape[1]))
    return *found, None if distance_bias is None else torch.from_numpy(sums).float()


def _attention_arguments(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, heads: int, distance_bias: Tensor | None
) -> list[Any]:
    bias = query.new_empty(0) if distance_bias is None else distance_bias
    return [*(each.detach().numpy() for each in (query, key, value, mask, bias)), heads]


@cache
def _threads(count: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(count, thread_name_prefix="cowrec-layers")


def _in_threads(kernel: Callable[..., Any], inputs: Tensor, *arguments: Any, work: int = 0) -> list[Any]:
    """Runs a kernel on equal parts of the inputs' first dimension, each in a thread; returns its results in order.

    ``work`` is how many numbers the kernel reads; 0 means that the kernel reads each number of the inputs once.
    """
    size, parts = len(inputs), max(1, min(torch.get_num_threads(), (work or inputs.numel()) // _LEAST_NUMBERS))
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


_LANES = 64
"""Pairs of a sample and a head that a loop of the attention computes side by side, in the columns of its buffers."""


@numba.njit(inline="always")
def _exp(x):
    """e to the x for x in [-87, 88], and the value at the border beyond, with a relative error below 2e-7.

    numba's own cannot be computed for several numbers at once. Source: Cephes, expf.c.
    """
    x = x if not x < np.float32(-87) else np.float32(-87)  # nan stays nan
    x = x if not x > np.float32(88) else np.float32(88)
    power = np.floor(x * np.float32(1.44269504) + np.float32(0.5))
    x = x - power * np.float32(0.693359375) + power * np.float32(2.12194440e-4)
    sum_ = np.float32(1.9875691500e-4)
    sum_ = sum_ * x + np.float32(1.3981999507e-3)
    sum_ = sum_ * x + np.float32(8.3334519073e-3)
    sum_ = sum_ * x + np.float32(4.1665795894e-2)
    sum_ = sum_ * x + np.float32(1.6666665459e-1)
    sum_ = sum_ * x + np.float32(5.0000001201e-1)
    sum_ = sum_ * x * x + x + np.float32(1)
    return sum_ * np.int32((np.int32(power) + np.int32(127)) << np.int32(23)).view(np.float32)


@numba.njit(inline="always")
def _columns(positions, width):
    return np.zeros((positions, width, _LANES), np.float32)


@numba.njit(inline="always")
def _ones(positions):
    return np.ones((positions, _LANES), np.float32)


@numba.njit(nogil=True, cache=True, error_model="numpy")
def _copy(rows, columns, pair, pairs, heads, to_columns):
    """Copies pairs of a sample and a head of [B, n, D] to the columns of [n, d, _LANES], or back."""
    positions, width = columns.shape[:2]
    for lane in range(pairs):
        b, first = (pair + lane) // heads, (pair + lane) % heads * width
        for j in range(positions):
            for c in range(width):
                if to_columns:
                    columns[j, c, lane] = rows[b, j, first + c]
                else:
                    rows[b, j, first + c] = columns[j, c, lane]


@numba.njit(nogil=True, cache=True, error_model="numpy")
def _load_seen(mask, pair, pairs, heads, out):
    for lane in range(pairs):
        for j in range(len(out)):
            out[j, lane] = mask[(pair + lane) // heads, j]


@numba.njit(nogil=True, cache=True, error_model="numpy", fastmath={"contract"})
def _attention_weights(query, keys, seen, bias, position, weights, slopes, work):
    """Writes the weights of a position, [n, _LANES], and under a bias their derivatives by the scores.

    Returns the number of positions that the position may see.
    """
    count, width = keys.shape[:2]
    is_softmax = len(bias) == 0
    scale = np.float32(1 / np.sqrt(width))
    least = np.float32(-3e38)
    inverse = np.float32(1) / np.float32(count)
    if not is_softmax:
        count = position + 1
    for j in range(count):
        for lane in range(_LANES):
            weights[j, lane] = 0
        for c in range(width):
            for lane in range(_LANES):
                weights[j, lane] += query[c, lane] * keys[j, c, lane]
    if is_softmax:
        largest, total = work[0], work[1]
        for lane in range(_LANES):
            largest[lane] = least
            total[lane] = 0
        for j in range(count):
            for lane in range(_LANES):
                score = weights[j, lane] if seen[j, lane] > 0 else least
                largest[lane] = score if score > largest[lane] else largest[lane]
        for j in range(count):
            for lane in range(_LANES):
                weight = seen[j, lane] * _exp(scale * (weights[j, lane] - largest[lane]))
                weights[j, lane] = weight
                total[lane] += weight
        for j in range(count):
            for lane in range(_LANES):
                weights[j, lane] /= total[lane]
    else:
        for j in range(count):
            shift = bias[position - j]
            for lane in range(_LANES):
                score, factor = weights[j, lane] + shift, seen[j, lane] * inverse
                gate = np.float32(1) / (np.float32(1) + _exp(-score))
                weights[j, lane] = factor * (score * gate)
                slopes[j, lane] = factor * (gate * (np.float32(1) + score * (np.float32(1) - gate)))
    return count


@numba.njit(nogil=True, cache=True, error_model="numpy", fastmath={"contract"})
def _attention(query, key, value, mask, bias, heads, out, first, last):
    positions, outputs, width = key.shape[1], query.shape[1], query.shape[2] // heads
    queries, attended = _columns(outputs, width), _columns(outputs, width)
    keys, values = _columns(positions, width), _columns(positions, width)
    seen, weights, slopes, work = _ones(positions), _ones(positions), _ones(positions), _ones(2)
    for pair in range(first * heads, last * heads, _LANES):
        pairs = min(_LANES, last * heads - pair)
        _copy(query, queries, pair, pairs, heads, True)
        _copy(key, keys, pair, pairs, heads, True)
        _copy(value, values, pair, pairs, heads, True)
        _load_seen(mask, pair, pairs, heads, seen)
        attended[:] = 0
        for i in range(outputs):
            position = positions - outputs + i
            count = _attention_weights(queries[i], keys, seen, bias, position, weights, slopes, work)
            for j in range(count):
                for c in range(width):
                    for lane in range(_LANES):
                        attended[i, c, lane] += weights[j, lane] * values[j, c, lane]
        _copy(out, attended, pair, pairs, heads, False)


@numba.njit(nogil=True, cache=True, error_model="numpy", fastmath={"contract"})
def _attention_gradient(query, key, value, mask, bias, heads, grad, of_query, of_key, of_value, first, last):
    """Returns the gradient of the bias, float64 [n]."""
    positions, outputs, width = key.shape[1], query.shape[1], query.shape[2] // heads
    queries, of_queries, of_outputs = _columns(outputs, width), _columns(outputs, width), _columns(outputs, width)
    keys, of_keys = _columns(positions, width), _columns(positions, width)
    values, of_values = _columns(positions, width), _columns(positions, width)
    seen, weights, slopes, of_scores = _ones(positions), _ones(positions), _ones(positions), _ones(positions)
    work, sums = _ones(2), np.zeros((len(bias), _LANES))
    is_softmax = len(bias) == 0
    scale = np.float32(1 / np.sqrt(width))
    for pair in range(first * heads, last * heads, _LANES):
        pairs = min(_LANES, last * heads - pair)
        _copy(query, queries, pair, pairs, heads, True)
        _copy(key, keys, pair, pairs, heads, True)
        _copy(value, values, pair, pairs, heads, True)
        _load_seen(mask, pair, pairs, heads, seen)
        of_outputs[:] = 0  # no pair of an earlier block in a column beyond the pairs of this one
        _copy(grad, of_outputs, pair, pairs, heads, True)
        of_queries[:] = 0
        of_keys[:] = 0
        of_values[:] = 0
        for i in range(outputs):
            position = positions - outputs + i
            count = _attention_weights(queries[i], keys, seen, bias, position, weights, slopes, work)
            for j in range(count):
                for lane in range(_LANES):
                    of_scores[j, lane] = 0
                for c in range(width):
                    for lane in range(_LANES):
                        of_scores[j, lane] += of_outputs[i, c, lane] * values[j, c, lane]
                    for lane in range(_LANES):
                        of_values[j, c, lane] += weights[j, lane] * of_outputs[i, c, lane]
            if is_softmax:
                total = work[0]
                for lane in range(_LANES):
                    total[lane] = 0
                for j in range(count):
                    for lane in range(_LANES):
                        total[lane] += weights[j, lane] * of_scores[j, lane]
                for j in range(count):
                    for lane in range(_LANES):
                        of_scores[j, lane] = scale * (weights[j, lane] * (of_scores[j, lane] - total[lane]))
            else:
                for j in range(count):
                    for lane in range(_LANES):
                        of_scores[j, lane] *= slopes[j, lane]
                    for lane in range(_LANES):
                        sums[position - j, lane] += of_scores[j, lane]
            for j in range(count):
                for c in range(width):
                    for lane in range(_LANES):
                        of_queries[i, c, lane] += of_scores[j, lane] * keys[j, c, lane]
                    for lane in range(_LANES):
                        of_keys[j, c, lane] += of_scores[j, lane] * queries[i, c, lane]
        _copy(of_query, of_queries, pair, pairs, heads, False)
        _copy(of_key, of_keys, pair, pairs, heads, False)
        _copy(of_value, of_values, pair, pairs, heads, False)
    return sums.sum(1)
