"""CUDA kernel that replays the missed steps of embedding rows (see numba_replay.py), bit-identical to the CPU's.

A step depends on the step before it, so the longest absence sets the time: a program holds as few rows as fill a warp,
and each row starts in the first turns of the loop. The scalars of a step are loaded during the step before, because the
machine code waits for them before the root.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..algorithm.adam import AdamConstants
from .layout import REST_INTERVAL, AdamState, DeviceSteps, LookupLayout, RestThresholds, TableClips
from .triton_rows import (
    clip_factors,
    divide,
    halvings,
    load_scalars,
    programs,
    root,
    scalars_of_table,
    step_of_element,
    tables_of,
    warps,
)

ELEMENTS = 32
"""Elements of a program's rows, unless one row has more."""
_UNROLLED = 2
"""Turns that are compiled as one where a thread has one element; with four turns, fewer warps have enough registers."""


@triton.jit
def _replay_rows(
    row, exists, layout, clips, state, steps, constants, thresholds,
    COLUMNS: tl.constexpr, HALVINGS: tl.constexpr, INTERVAL: tl.constexpr, HAS_L2: tl.constexpr,
    HAS_DECAY: tl.constexpr, CLIPPED: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    step = tl.load(steps.taken)
    column = tl.arange(0, COLUMNS)
    last = tl.load(steps.last_step + row, mask=exists, other=step)
    last = tl.where(last < 0, step, last)  # a row at rest takes no steps
    behind = last < step
    table = tables_of(row, layout.first_row, layout.tables, HALVINGS)
    dim = tl.load(layout.dim + table, mask=behind, other=0)
    first_row = tl.load(layout.first_row + table, mask=behind, other=0)
    lr_factor = tl.load(steps.lr_factors + table, mask=behind, other=0.0)
    start = tl.load(layout.start + table, mask=behind, other=0) + (row - first_row) * dim
    adam_columns = tl.load(steps.adam_columns + table, mask=behind, other=0)
    inside = behind[:, None] & (column[None, :] < adam_columns[:, None])
    element = start[:, None] + column[None, :]
    w = tl.load(state.weights + element, mask=inside, other=0.0)
    m = tl.load(state.exp_avg + element, mask=inside, other=0.0)
    v = tl.load(state.exp_avg_sq + element, mask=inside, other=0.0)
    # Elements of zeros, such as a table's padding, stay zeros and take no step. The roots of their lanes are of 1.
    bits = w.to(tl.int32, bitcast=True) | m.to(tl.int32, bitcast=True) | v.to(tl.int32, bitcast=True)
    inside = bits != 0
    v = tl.where(inside, v, 1.0)
    if CLIPPED:
        measured = column[None, :] < tl.load(clips.columns + table, mask=behind, other=0)[:, None]
        r = tl.load(clips.r + table, mask=behind, other=0.0)
        floor = tl.load(clips.floor + table, mask=behind, other=0.0)
    reached = tl.where(behind, step, last)
    moving = behind
    # In a turn each row takes the step of the turn's number plus the row's shift. No row waits for the absence of
    # another to begin, and all reach multiples of INTERVAL together.
    turn = tl.min(last)
    shift = (last - turn) // INTERVAL * INTERVAL
    shifts = shift[:, None] + tl.zeros_like(bits)
    begin = last - shift
    missed = tl.where(inside, (step - last)[:, None], 0)
    end = tl.max(tl.where(behind, step - shift, turn))
    while turn < end:
        until = tl.minimum(end, (turn // INTERVAL + 1) * INTERVAL)
        following = load_scalars(steps, tl.minimum(turn + shifts, step - 1), HAS_DECAY)
        for k in tl.range(turn, until, loop_unroll_factor=UNROLL):
            scalars = scalars_of_table(following, lr_factor[:, None])
            following = load_scalars(steps, tl.minimum(k + 1 + shifts, step - 1), HAS_DECAY)
            g = constants.twice_l2 * w
            if CLIPPED:
                factor, _ = clip_factors(w, g, measured, r, floor, 1.0)
                g = tl.where(measured, g * factor[:, None], g)
            new_w, new_m, new_v = step_of_element(w, m, v, g, constants, scalars, root, divide)
            takes = (k - begin).to(tl.uint32)[:, None] < missed.to(tl.uint32)  # a negative number becomes large
            w, m, v = tl.where(takes, new_w, w), tl.where(takes, new_m, m), tl.where(takes, new_v, v)
        turn = until
        if turn % INTERVAL == 0:
            now = turn + shift
            started = moving & (last < now) & (now <= step)
            lr = tl.maximum(tl.load(steps.step_sizes + now - 1, mask=started, other=0.0), thresholds.lr)
            lr = lr * tl.where(lr_factor > 0, lr_factor, 1.0)
            rests = tl.abs(m) * lr[:, None] <= thresholds.motion
            if HAS_L2:
                rests = rests & (tl.abs(w) <= thresholds.weight)
                w = tl.where(started[:, None] & rests, 0.0, w)
            m = tl.where(started[:, None] & rests, 0.0, m)
            if HAS_DECAY:
                rests = rests & (w == 0.0)
            row_rests = started & (tl.min(rests.to(tl.int32), axis=1) == 1)
            reached = tl.where(row_rests, -now - 1, reached)
            moving = moving & (row_rests == 0)
            missed = tl.where(row_rests[:, None], 0, missed)
            end = tl.max(tl.where(moving, step - shift, turn))
    tl.store(state.weights + element, w, mask=inside)
    tl.store(state.exp_avg + element, m, mask=inside)
    tl.store(state.exp_avg_sq + element, v, mask=inside)
    tl.debug_barrier()  # all warps of a wide row have read its last step, which one of them stores
    tl.store(steps.last_step + row, reached, mask=behind)


@triton.jit(do_not_specialize=["count"])
def _replay(
    rows, begin, count, layout, clips, state, steps, constants, thresholds,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, HALVINGS: tl.constexpr, INTERVAL: tl.constexpr,
    HAS_L2: tl.constexpr, HAS_DECAY: tl.constexpr, CLIPPED: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0)
    while tl.load(begin + tl.minimum(block * ROWS, count)) < count:
        u = block * ROWS + tl.arange(0, ROWS)
        position = tl.load(begin + u, mask=u < count, other=count)
        row = tl.load(rows + position, mask=position < count, other=0).to(tl.int64)
        _replay_rows(
            row, position < count, layout, clips, state, steps, constants, thresholds,
            COLUMNS, HALVINGS, INTERVAL, HAS_L2, HAS_DECAY, CLIPPED, UNROLL,
        )  # fmt: skip
        block += tl.num_programs(0)


def replay_rows_on_device(
    row: Tensor,
    begin: Tensor,
    layout: LookupLayout,
    clips: TableClips | None,
    state: AdamState,
    steps: DeviceSteps,
    constants: AdamConstants,
    thresholds: RestThresholds,
) -> None:
    """Takes the missed steps of rows, as in :class:`LookupIds`, up to ``steps.taken``, in place.

    ``clips`` are the limits of the tables, or None if no absent row can exceed its limit.
    """
    columns = triton.next_power_of_2(layout.max_dim)
    per_program = max(1, ELEMENTS // columns)
    num_warps = warps(per_program * columns)
    arguments = (row, begin, len(row), layout, clips, state, steps, constants, thresholds)
    _replay[programs(len(row), per_program)](
        *arguments,
        ROWS=per_program,
        COLUMNS=columns,
        HALVINGS=halvings(len(layout.dim)),
        INTERVAL=REST_INTERVAL,
        HAS_L2=constants.twice_l2 > 0,
        HAS_DECAY=constants.weight_decay > 0,
        CLIPPED=clips is not None,
        UNROLL=max(1, _UNROLLED * 32 * num_warps // (per_program * columns)),
        num_warps=num_warps,
        enable_fp_fusion=False,
    )


def distinct_begins(rows: Tensor) -> Tensor:
    return torch.arange(len(rows) + 1, dtype=torch.int32, device=rows.device)
