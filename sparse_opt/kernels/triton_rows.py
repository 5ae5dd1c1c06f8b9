"""CUDA kernels for embedding rows: the replay of missed steps and the Adam step of a batch; bit-identical to the CPU's.

Written in Triton. A program loads a few rows into registers and replays them (see cpu_replay.py) or takes the step of
the batch (see cpu_adam.py). Fused multiply-adds are off and roots and divisions are correctly rounded, so that the
arithmetic of algorithm/adam.py gives the same bits on every back end.
"""

from types import FunctionType
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from cowrec.sparse_opt.algorithm.adam import AdamConstants, AdamScalars, adam_element

from .cpu_replay import DECAY_INTERVAL
from .layout import AdamState, DecayThresholds, LastSteps, LookupLayout, Schedule, StaleRows, TableClips
from .torch_rows import RowSums

_ELEMENTS = 512

# Triton looks its language up in a function's globals, and algorithm/adam.py must not import Triton.
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
def _clip(w, g, measured, r, floor, occurrences):
    """Clips gradients in their measured columns; also returns ``||g|| / limit``. Source: limits_of_norms in clip.py."""
    limit = tl.maximum(r * _norms(tl.where(measured, w, 0.0)), floor) * occurrences
    norm = _norms(tl.where(measured, g, 0.0))
    factor = tl.where(norm > limit, _divide(limit, tl.where(norm > limit, norm, 1.0)), 1.0)
    ratio = tl.where(norm > 0.0, _divide(norm, tl.where(limit > 0.0, limit, 1.0)), 0.0)
    ratio = tl.where((norm > 0.0) & (limit == 0.0), float("inf"), ratio)
    return tl.where(measured, g * factor[:, None], g), ratio


@triton.jit
def _replay(
    rows, count, dims, clips, state, last_step, step, schedule, constants, thresholds,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, INTERVAL: tl.constexpr, HAS_L2: tl.constexpr, CLIPPED: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)
    exists = row < count
    last = tl.load(rows.last + row, mask=exists, other=step)
    behind = last < step
    table = tl.load(rows.table + row, mask=behind, other=0)
    start = tl.load(rows.start + row, mask=behind, other=0)
    inside = behind[:, None] & (column[None, :] < tl.load(dims + table, mask=behind, other=0)[:, None])
    element = start[:, None] + column[None, :]
    w = tl.load(state.weights + element, mask=inside, other=0.0)
    m = tl.load(state.exp_avg + element, mask=inside, other=0.0)
    v = tl.load(state.exp_avg_sq + element, mask=inside, other=0.0)
    if CLIPPED:
        measured = column[None, :] < tl.load(clips.columns + table, mask=behind, other=0)[:, None]
        r = tl.load(clips.r + table, mask=behind, other=0.0)
        floor = tl.load(clips.floor + table, mask=behind, other=0.0)
    reached = tl.where(behind, step, last)
    moving = behind
    now = tl.min(last)
    while now < step:
        until = min(step, (now // INTERVAL + 1) * INTERVAL)
        step_size = tl.load(schedule.step_sizes + now)
        while now < until:
            step_size = tl.load(schedule.step_sizes + now)
            g = constants.twice_l2 * w
            if CLIPPED:
                g, _ = _clip(w, g, measured, r, floor, 1.0)
            scalars = AdamScalars(step_size, tl.load(schedule.denominator_scales + now))
            new_w, new_m, new_v = _step_of_element(w, m, v, g, constants, scalars, _root, _divide)
            steps = (moving & (last <= now))[:, None]
            w, m, v = tl.where(steps, new_w, w), tl.where(steps, new_m, m), tl.where(steps, new_v, v)
            now += 1
        if now % INTERVAL == 0:
            started = moving & (last < now)
            decayed = tl.abs(m) * tl.maximum(step_size, thresholds.lr) <= thresholds.motion
            if HAS_L2:
                decayed = decayed & (tl.abs(w) <= thresholds.weight)
                w = tl.where(started[:, None] & decayed, 0.0, w)
            m = tl.where(started[:, None] & decayed, 0.0, m)
            row_decayed = started & (tl.min(decayed.to(tl.int32), axis=1) == 1)
            reached = tl.where(row_decayed, -now - 1, reached)
            moving = moving & (row_decayed == 0)
            if tl.max(moving.to(tl.int32)) == 0:
                now = step
    tl.store(state.weights + element, w, mask=inside)
    tl.store(state.exp_avg + element, m, mask=inside)
    tl.store(state.exp_avg_sq + element, v, mask=inside)
    tl.store(last_step + tl.load(rows.row + row, mask=behind, other=0), reached, mask=behind)


def replay_rows_on_device(
    rows: StaleRows,
    layout: LookupLayout,
    clips: TableClips | None,
    state: AdamState,
    progress: LastSteps,
    schedule: Schedule,
    constants: AdamConstants,
    thresholds: DecayThresholds,
) -> None:
    """Takes the missed steps of rows up to ``progress.step``, in place.

    Args:
        rows: rows; one whose last step is ``progress.step`` or later is left as it is.
        layout: geometry of the lookup.
        clips: limits of the tables where an absent row may exceed its limit; else None.
        state, progress: updated in place; weights float32.
    """
    columns = triton.next_power_of_2(layout.max_dim)
    per_program = max(1, _ELEMENTS // columns)
    _replay[(triton.cdiv(len(rows.start), per_program),)](
        rows,
        len(rows.start),
        layout.dim,
        clips,
        state,
        progress.last_step,
        progress.step,
        schedule,
        constants,
        thresholds,
        ROWS=per_program,
        COLUMNS=columns,
        INTERVAL=DECAY_INTERVAL,
        HAS_L2=constants.twice_l2 > 0,
        CLIPPED=clips is not None,
        enable_fp_fusion=False,
    )


class _SummedRows(NamedTuple):
    """Rows of a backward pass as the kernel takes them: tensors of :class:`RowSums`."""

    start: Tensor
    table: Tensor
    occurrences: Tensor
    real: Tensor
    sums: Tensor


@triton.jit
def _update(
    rows, count, width, decays, dims, clips, state, ratios, constants, scalars,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, REPLAYS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)
    exists = row < count
    exists = exists & (tl.load(rows.real + row, mask=exists, other=0) != 0)
    table = tl.load(rows.table + row, mask=exists, other=0)
    inside = exists[:, None] & (column[None, :] < tl.load(dims + table, mask=exists, other=0)[:, None])
    element = tl.load(rows.start + row, mask=exists, other=0)[:, None] + column[None, :]
    w = tl.load(state.weights + element, mask=inside, other=0.0)
    m = tl.load(state.exp_avg + element, mask=inside, other=0.0)
    v = tl.load(state.exp_avg_sq + element, mask=inside, other=0.0)
    if REPLAYS:
        v = v * tl.load(decays + row, mask=exists, other=1.0)[:, None]
    summed = rows.sums + row.to(tl.int64)[:, None] * width + column[None, :]
    g = tl.load(summed, mask=inside, other=0.0).to(tl.float32) + constants.twice_l2 * w
    measured = inside & (column[None, :] < tl.load(clips.columns + table, mask=exists, other=0)[:, None])
    r = tl.load(clips.r + table, mask=exists, other=0.0)
    floor = tl.load(clips.floor + table, mask=exists, other=0.0)
    occurrences = tl.load(rows.occurrences + row, mask=exists, other=1).to(tl.float32)
    occurrences = tl.where(tl.load(clips.per_occurrence + table, mask=exists, other=0) != 0, occurrences, 1.0)
    g, ratio = _clip(w, g, measured, r, floor, occurrences)
    tl.store(ratios + row, ratio, mask=exists)
    w, m, v = _step_of_element(w, m, v, g, constants, scalars, _root, _divide)
    tl.store(state.weights + element, w, mask=inside)
    tl.store(state.exp_avg + element, m, mask=inside)
    tl.store(state.exp_avg_sq + element, v, mask=inside)


def update_rows_on_device(
    rows: RowSums,
    layout: LookupLayout,
    clips: TableClips,
    decays: Tensor | None,
    state: AdamState,
    constants: AdamConstants,
    scalars: AdamScalars,
) -> Tensor:
    """Adds L2, clips and takes one Adam step on the rows of a backward pass, in place.

    Args:
        rows: distinct rows and their gradients.
        layout: geometry of the lookup.
        clips: limits of its tables.
        decays: factor of each row's second moment before the step, float32 [nnz]; None for ones.
        state: updated in place; weights float32.

    Returns:
        ``||g|| / limit`` of each row, float32 [nnz]; 0 for the padding.
    """
    columns = triton.next_power_of_2(layout.max_dim)
    per_program = max(1, _ELEMENTS // columns)
    ratios = torch.zeros(len(rows.start), device=state.weights.device)
    _update[(triton.cdiv(len(rows.start), per_program),)](
        _SummedRows(rows.start, rows.table, rows.counts.count, rows.counts.real, rows.sums),
        len(rows.start),
        rows.sums.shape[1],
        ratios if decays is None else decays,
        layout.dim,
        clips,
        state,
        ratios,
        constants,
        scalars,
        ROWS=per_program,
        COLUMNS=columns,
        REPLAYS=decays is not None,
        enable_fp_fusion=False,
    )
    return ratios
