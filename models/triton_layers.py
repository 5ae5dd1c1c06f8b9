"""CUDA kernels for passes over all samples, written in Triton: the front's features, and the ReLU of a backward pass.

A kernel reads and writes its tensors once, where operators of torch need several passes. Sums have a fixed order.
Sizes: B samples, F fields, D embedding width, P stored width of a row, N dense features, H columns of a layer.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

_ELEMENTS, _MOST_CHUNK, _MOST_DENSE = 2048, 16, 64
"""Elements of a program's tile, unless one sample has more; most columns and dense features that are read at a time."""
_ROWS, _COLUMNS, _MOST_SPLITS = 32, 64, 256
"""Samples and columns of the tile of a ReLU, and the most programs that share the samples of a column."""


@triton.jit(do_not_specialize=["samples"])
def _features(
    rows, dense, wide, pairs, flat, samples, num_dense, dense_stride,
    F: tl.constexpr, P: tl.constexpr, D: tl.constexpr, FIELDS: tl.constexpr, CHUNK: tl.constexpr,
    SAMPLES: tl.constexpr, WIDTH: tl.constexpr, DENSE: tl.constexpr,
):  # fmt: skip
    sample = tl.program_id(0).to(tl.int64) * SAMPLES + tl.arange(0, SAMPLES)
    exists = sample < samples
    field = tl.arange(0, FIELDS)
    here = exists[:, None, None] & (field < F)[None, :, None]
    sum_wide, products = tl.zeros([SAMPLES], tl.float32), tl.zeros([SAMPLES], tl.float32)
    for first in tl.range(0, P, CHUNK):
        column = first + tl.arange(0, CHUNK)
        address = (sample * (F * P))[:, None, None] + (field * P)[None, :, None] + column[None, None, :]
        x = tl.load(rows + address, mask=here & (column < P)[None, None, :], other=0.0).to(tl.float32)
        embeds = (column < D)[None, None, :]
        to = (sample * WIDTH)[:, None, None] + (field * D)[None, :, None] + column[None, None, :]
        tl.store(flat + to, x.to(flat.dtype.element_ty), mask=here & embeds)
        total = tl.sum(x, axis=1)
        sum_wide += tl.sum(tl.where((column == D)[None, :], total, 0.0), axis=1)
        x = tl.where(embeds, x, 0.0)
        total = tl.where((column < D)[None, :], total, 0.0)
        products += tl.sum(total * total - tl.sum(x * x, axis=1), axis=1)
    tl.store(wide + sample, sum_wide.to(wide.dtype.element_ty), mask=exists)
    tl.store(pairs + sample, (0.5 * products).to(pairs.dtype.element_ty), mask=exists)
    for first in tl.range(0, WIDTH - F * D, DENSE):
        n = first + tl.arange(0, DENSE)
        x = tl.load(
            dense + (sample * dense_stride)[:, None] + n[None, :],
            mask=exists[:, None] & (n < num_dense)[None, :], other=0.0,
        )  # fmt: skip
        inside = exists[:, None] & (n < WIDTH - F * D)[None, :]
        tl.store(flat + (sample * WIDTH + F * D)[:, None] + n[None, :], x.to(flat.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["samples"])
def _features_backward(
    rows, grad_wide, grad_pairs, grad_flat, grad_rows, samples,
    F: tl.constexpr, P: tl.constexpr, D: tl.constexpr, FIELDS: tl.constexpr, CHUNK: tl.constexpr,
    SAMPLES: tl.constexpr, STRIDE: tl.constexpr, WIDE: tl.constexpr, PAIRS: tl.constexpr, FLAT: tl.constexpr,
):  # fmt: skip
    sample = tl.program_id(0).to(tl.int64) * SAMPLES + tl.arange(0, SAMPLES)
    exists = sample < samples
    field = tl.arange(0, FIELDS)
    here = exists[:, None, None] & (field < F)[None, :, None]
    for first in tl.range(0, P, CHUNK):
        column = first + tl.arange(0, CHUNK)
        address = (sample * (F * P))[:, None, None] + (field * P)[None, :, None] + column[None, None, :]
        embeds = here & (column < D)[None, None, :]
        grad = tl.zeros([SAMPLES, FIELDS, CHUNK], tl.float32)
        if FLAT:
            at = (sample * STRIDE)[:, None, None] + (field * D)[None, :, None] + column[None, None, :]
            grad += tl.load(grad_flat + at, mask=embeds, other=0.0).to(tl.float32)
        if PAIRS:
            x = tl.load(rows + address, mask=embeds, other=0.0).to(tl.float32)
            of_pairs = tl.load(grad_pairs + sample, mask=exists, other=0.0).to(tl.float32)
            others = tl.where(embeds, tl.sum(x, axis=1)[:, None, :] - x, 0.0)
            grad += of_pairs[:, None, None] * others
        if WIDE:
            of_wide = tl.load(grad_wide + sample, mask=exists, other=0.0).to(tl.float32)
            grad = tl.where((column == D)[None, None, :], of_wide[:, None, None], grad)
        tl.store(grad_rows + address, grad.to(grad_rows.dtype.element_ty), mask=here & (column < P)[None, None, :])


def _tile(rows: Tensor) -> dict[str, int]:
    _, fields, stored = rows.shape
    padded = triton.next_power_of_2(fields)
    chunk = min(_MOST_CHUNK, triton.next_power_of_2(stored), max(1, 2 * _ELEMENTS // padded))
    return {
        "F": fields,
        "P": stored,
        "FIELDS": padded,
        "CHUNK": chunk,
        "SAMPLES": max(1, min(_ELEMENTS // (padded * chunk), _ELEMENTS // _MOST_DENSE)),
    }


def _grid(samples: int, tile: dict[str, int]) -> tuple[int]:
    return (triton.cdiv(samples, tile["SAMPLES"]),)


def features_on_device(
    rows: Tensor, dense: Tensor, dim: int, width: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Computes the features of looked-up rows in one pass.

    Args:
        rows: float [B, F, P], contiguous; at most 32 bits a number, as for all tensors here.
        dense: float [B, N].
        dim: D.
        width: columns of the third result, at least F * D + N.
        dtype: dtype of the third result.

    Returns the sum of the wide weights, [B], and the sum of the products of all pairs of embeddings, [B], in the dtype
    of the rows; and the embeddings, the dense features and zeros, [B, width].
    """
    samples, tile, dense = len(rows), _tile(rows), dense if dense.stride(-1) == 1 else dense.contiguous()
    wide, pairs, flat = rows.new_empty(samples), rows.new_empty(samples), rows.new_empty(samples, width, dtype=dtype)
    if samples:
        _features[_grid(samples, tile)](
            *(rows, dense, wide, pairs, flat, samples, dense.shape[1], dense.stride(0)),
            **tile,
            D=dim,
            WIDTH=width,
            DENSE=min(_MOST_DENSE, triton.next_power_of_2(max(width - tile["F"] * dim, 1))),
            enable_fp_fusion=False,
        )
    return wide, pairs, flat


def features_backward_on_device(
    rows: Tensor,
    dim: int,
    grad_wide: Tensor | None = None,
    grad_pairs: Tensor | None = None,
    grad_flat: Tensor | None = None,
) -> Tensor:
    """Computes the gradient of the rows of :func:`features_on_device`, [B, F, P].

    A gradient is None if the result was not used.
    """
    samples, tile, grad_rows = len(rows), _tile(rows), torch.empty_like(rows)
    if grad_flat is not None and grad_flat.stride(-1) != 1:
        grad_flat = grad_flat.contiguous()
    if samples:
        _features_backward[_grid(samples, tile)](
            rows,
            rows if grad_wide is None else grad_wide.contiguous(),
            rows if grad_pairs is None else grad_pairs.contiguous(),
            rows if grad_flat is None else grad_flat,
            grad_rows,
            samples,
            **tile,
            D=dim,
            STRIDE=0 if grad_flat is None else grad_flat.stride(0),
            WIDE=grad_wide is not None,
            PAIRS=grad_pairs is not None,
            FLAT=grad_flat is not None,
            enable_fp_fusion=False,
        )
    return grad_rows


@triton.jit(do_not_specialize=["samples", "share"])
def _relu_backward(
    grad, output, kernel, out, sums, samples, columns, share,
    OF_LOGITS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < columns
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    if OF_LOGITS:
        of_kernel = tl.zeros([ROWS, COLUMNS], tl.float32)
        weight = tl.load(kernel + column, mask=inside, other=0.0).to(tl.float32)
    first = tl.program_id(0) * share
    done = 0
    while done < share:
        sample = first + done + tl.arange(0, ROWS)
        exists = sample < samples
        here = exists[:, None] & inside[None, :]
        address = sample.to(tl.int64)[:, None] * columns + column[None, :]
        y = tl.load(output + address, mask=here, other=0.0).to(tl.float32)
        if OF_LOGITS:
            g = tl.load(grad + sample, mask=exists, other=0.0).to(tl.float32)[:, None]
            of_kernel += g * y
            g = g * weight[None, :]
        else:
            g = tl.load(grad + address, mask=here, other=0.0).to(tl.float32)
        g = tl.where(y <= 0.0, 0.0, g)  # as torch's threshold_backward: NaN passes
        tl.store(out + address, g.to(out.dtype.element_ty), mask=here)
        total += g
        done += ROWS
    at = sums + tl.program_id(0) * columns + column
    tl.store(at, tl.sum(total, axis=0), mask=inside)
    if OF_LOGITS:
        tl.store(at + tl.num_programs(0) * columns, tl.sum(of_kernel, axis=0), mask=inside)


def relu_backward_on_device(
    grad: Tensor, output: Tensor, kernel: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Computes the backward of a ReLU, and of the logits ``output @ kernel`` if there is a kernel, in one pass.

    Args:
        grad: gradient of the ReLU's output, [B, H]; with a kernel, gradient of the logits, [B].
        output: output of the ReLU, [B, H], contiguous.
        kernel: [H, 1].

    Returns the gradient of the ReLU's input, [B, H] in the dtype of the output; the sum of that gradient over the
    samples, float32 [H]; and the gradient of the kernel, float32 [H, 1].
    """
    (samples, columns), grad = output.shape, grad.contiguous()
    splits = max(1, min(triton.cdiv(samples, _ROWS), _MOST_SPLITS))
    share = triton.cdiv(triton.cdiv(samples, splits), _ROWS) * _ROWS
    parts = 1 if kernel is None else 2
    out = torch.empty_like(output)
    sums = torch.empty(parts, splits, columns, dtype=torch.float32, device=output.device)
    _relu_backward[splits, triton.cdiv(columns, _COLUMNS)](
        *(grad, output, output if kernel is None else kernel, out, sums, samples, columns, share),
        OF_LOGITS=kernel is not None,
        ROWS=_ROWS,
        COLUMNS=_COLUMNS,
        enable_fp_fusion=False,
    )
    totals = sums.sum(1)
    return out, totals[0], None if kernel is None else totals[1][:, None]
