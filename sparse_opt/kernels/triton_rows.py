"""CUDA kernels for embedding rows: the steps that they missed, and the step of their batch; as on CPU, bit for bit.

Written in Triton. A program takes a few rows and holds them in registers until they are current or at rest, as in
replay_kernels.py, or have had their L2, clip and Adam step, as in cpu_kernels.py. Without fused multiply-adds, and with
the correctly rounded root and quotient, the arithmetic of adam_formula.py has one result everywhere.
"""

from collections.abc import Sequence
from types import FunctionType

import torch
import triton
import triton.language as tl
from torch import Tensor

from cowrec.sparse_opt.algorithm.adam import adam_element

from .cpu_replay import REST_INTERVAL
from .torch_rows import LookupLayout, RowSums

_ELEMENTS = 512

# Triton wants its language among a function's globals, which adam_formula.py has no reason to import.
_step_of_element = triton.jit(FunctionType(adam_element.__code__, globals()))


@triton.jit
def _root(value):
    return tl.sqrt_rn(value)


@triton.jit
def _divide(numerator, denominator):
    return tl.div_rn(numerator, denominator)


@triton.jit
def _norms(rows):
    wide = rows.to(tl.float64)
    return tl.sqrt(tl.sum(wide * wide, axis=1)).to(tl.float32)


@triton.jit
def _replay(
    starts, places, lasts, dims, clip_columns, rs, floors, count,
    weights, exp_avg, exp_avg_sq, last_step, step, step_sizes, denominator_scales,
    beta1, rest1, beta2, rest2, eps, twice_l2, lr, rest, rest_motion,
    ROWS: tl.constexpr, LANES: tl.constexpr, INTERVAL: tl.constexpr, HAS_L2: tl.constexpr, CLIPPED: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    lane = tl.arange(0, LANES)
    exists = row < count
    last = tl.load(lasts + row, mask=exists, other=step)
    behind = last < step
    start = tl.load(starts + row, mask=behind, other=0)
    inside = behind[:, None] & (lane[None, :] < tl.load(dims + row, mask=behind, other=0)[:, None])
    place = start[:, None] + lane[None, :]
    w = tl.load(weights + place, mask=inside, other=0.0)
    m = tl.load(exp_avg + place, mask=inside, other=0.0)
    v = tl.load(exp_avg_sq + place, mask=inside, other=0.0)
    if CLIPPED:
        measured = lane[None, :] < tl.load(clip_columns + row, mask=behind, other=0)[:, None]
        r = tl.load(rs + row, mask=behind, other=0.0)
        floor = tl.load(floors + row, mask=behind, other=0.0)
    came_to = tl.where(behind, step, last)
    moving = behind
    now = tl.min(last)
    while now < step:
        until = min(step, (now // INTERVAL + 1) * INTERVAL)
        step_size = tl.load(step_sizes + now)
        while now < until:
            step_size = tl.load(step_sizes + now)
            g = twice_l2 * w
            if CLIPPED:
                limit = tl.maximum(r * _norms(tl.where(measured, w, 0.0)), floor)
                norm = _norms(tl.where(measured, g, 0.0))
                factor = tl.where(norm > limit, _divide(limit, tl.where(norm > limit, norm, 1.0)), 1.0)
                g = tl.where(measured, g * factor[:, None], g)
            new_w, new_m, new_v = _step_of_element(
                w,
                m,
                v,
                g,
                beta1,
                rest1,
                beta2,
                rest2,
                eps,
                step_size,
                tl.load(denominator_scales + now),
                _root,
                _divide,
            )
            steps = (moving & (last <= now))[:, None]
            w, m, v = tl.where(steps, new_w, w), tl.where(steps, new_m, m), tl.where(steps, new_v, v)
            now += 1
        if now % INTERVAL == 0:
            started = moving & (last < now)
            still = tl.abs(m) * tl.maximum(step_size, lr) <= rest_motion
            if HAS_L2:
                still = still & (tl.abs(w) <= rest)
                w = tl.where(started[:, None] & still, 0.0, w)
            m = tl.where(started[:, None] & still, 0.0, m)
            at_rest = started & (tl.min(still.to(tl.int32), axis=1) == 1)
            came_to = tl.where(at_rest, -now - 1, came_to)
            moving = moving & (at_rest == 0)
            if tl.max(moving.to(tl.int32)) == 0:
                now = step
    tl.store(weights + place, w, mask=inside)
    tl.store(exp_avg + place, m, mask=inside)
    tl.store(exp_avg_sq + place, v, mask=inside)
    tl.store(last_step + tl.load(places + row, mask=behind, other=0), came_to, mask=behind)


def replay_rows_on_device(
    starts: Tensor,
    places: Tensor,
    lasts: Tensor,
    dims: Tensor,
    max_dim: int,
    weights: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    last_step: Tensor,
    step: int,
    step_sizes: Tensor,
    denominator_scales: Tensor,
    scalars: Sequence[float],
    limits: Sequence[Tensor] | None,
) -> None:
    """Brings rows from their last steps to ``step``, in place.

    Args:
        starts, places, lasts, dims: each row's first element, number in the lookup, last step (``step`` or more:
            nothing is done) and width, int [n].
        max_dim: the largest width.
        weights, exp_avg, exp_avg_sq: flat, float32.
        last_step: of all rows, int32.
        step: to bring them to.
        step_sizes, denominator_scales: of steps 1, 2, ..., float32.
        scalars: beta1, rest1, beta2, rest2, eps, twice_l2, lr, rest, rest_motion, as in replay_kernels.replay_rows.
        limits: of each row clip columns, r, floor (and whether per occurrence), [n], where an absent row may be over
            its limit; else None.
    """
    lanes = triton.next_power_of_2(max_dim)
    rows = max(1, _ELEMENTS // lanes)
    columns, r, floor, _ = limits or (dims, step_sizes, step_sizes, None)
    _replay[(triton.cdiv(len(starts), rows),)](
        *(starts, places, lasts, dims, columns, r, floor, len(starts)),
        *(weights, exp_avg, exp_avg_sq, last_step, step, step_sizes, denominator_scales, *scalars),
        ROWS=rows,
        LANES=lanes,
        INTERVAL=REST_INTERVAL,
        HAS_L2=scalars[5] > 0,
        CLIPPED=limits is not None,
        enable_fp_fusion=False,
    )


@triton.jit
def _update(
    starts, tables, counts, real, sums, decays, count, width,
    dims, clip_columns, rs, floors, per_occurrence, weights, exp_avg, exp_avg_sq, ratios,
    beta1, rest1, beta2, rest2, eps, twice_l2, step_size, denominator_scale,
    ROWS: tl.constexpr, LANES: tl.constexpr, REPLAYS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    lane = tl.arange(0, LANES)
    exists = row < count
    exists = exists & (tl.load(real + row, mask=exists, other=0) != 0)
    table = tl.load(tables + row, mask=exists, other=0)
    inside = exists[:, None] & (lane[None, :] < tl.load(dims + table, mask=exists, other=0)[:, None])
    place = tl.load(starts + row, mask=exists, other=0)[:, None] + lane[None, :]
    w = tl.load(weights + place, mask=inside, other=0.0)
    m = tl.load(exp_avg + place, mask=inside, other=0.0)
    v = tl.load(exp_avg_sq + place, mask=inside, other=0.0)
    if REPLAYS:
        v = v * tl.load(decays + row, mask=exists, other=1.0)[:, None]
    g = tl.load(sums + row.to(tl.int64)[:, None] * width + lane[None, :], mask=inside, other=0.0).to(tl.float32)
    g = g + twice_l2 * w
    measured = inside & (lane[None, :] < tl.load(clip_columns + table, mask=exists, other=0)[:, None])
    limit = _norms(tl.where(measured, w, 0.0)) * tl.load(rs + table, mask=exists, other=0.0)
    limit = tl.maximum(limit, tl.load(floors + table, mask=exists, other=0.0))
    occurrences = tl.load(counts + row, mask=exists, other=1).to(tl.float32)
    limit = tl.where(tl.load(per_occurrence + table, mask=exists, other=0) != 0, limit * occurrences, limit)
    norm = _norms(tl.where(measured, g, 0.0))
    ratio = tl.where(norm > 0.0, _divide(norm, tl.where(limit > 0.0, limit, 1.0)), 0.0)
    ratio = tl.where((norm > 0.0) & (limit == 0.0), float("inf"), ratio)
    tl.store(ratios + row, ratio, mask=exists)
    factor = tl.where(norm > limit, _divide(limit, tl.where(norm > limit, norm, 1.0)), 1.0)
    g = tl.where(measured, g * factor[:, None], g)
    w, m, v = _step_of_element(
        w, m, v, g, beta1, rest1, beta2, rest2, eps, step_size, denominator_scale, _root, _divide
    )
    tl.store(weights + place, w, mask=inside)
    tl.store(exp_avg + place, m, mask=inside)
    tl.store(exp_avg_sq + place, v, mask=inside)


def update_rows_on_device(
    rows: RowSums,
    layout: LookupLayout,
    limits: Sequence[Tensor],
    decays: Tensor | None,
    weights: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    scalars: Sequence[float],
) -> Tensor:
    """L2, clip and one Adam step on the rows of a backward pass, in place.

    Args:
        rows: distinct rows and their gradients.
        layout: the lookup's geometry.
        limits: of each table clip columns, r, floor and whether per occurrence.
        decays: factor of each row's second moment before the step, float32 [nnz]; None for ones.
        weights, exp_avg, exp_avg_sq: flat, float32.
        scalars: beta1, rest1, beta2, rest2, eps, twice_l2, step_size, denominator_scale.

    Returns:
        ``||g|| / limit`` of each row, float32 [nnz]; 0 for the padding.
    """
    lanes = triton.next_power_of_2(layout.max_dim)
    per_program = max(1, _ELEMENTS // lanes)
    ratios = torch.zeros(len(rows.start), device=weights.device)
    _update[(triton.cdiv(len(rows.start), per_program),)](
        *(rows.start, rows.table, rows.counts.count, rows.counts.real, rows.sums),
        *(ratios if decays is None else decays, len(rows.start), rows.sums.shape[1]),
        *(layout.dim, *limits, weights, exp_avg, exp_avg_sq, ratios, *scalars),
        ROWS=per_program,
        LANES=lanes,
        REPLAYS=decays is not None,
        enable_fp_fusion=False,
    )
    return ratios
