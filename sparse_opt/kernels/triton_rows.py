"""CUDA kernels for the rows of a batch, written in Triton: find them, sum their gradients, clip, take the Adam step.

Fused multiply-adds are off and roots and divisions are correctly rounded, so that the arithmetic of algorithm/adam.py
gives the same bits on every back end. Numbers that change from step to step are read from the device, so that a
captured CUDA graph can repeat the launches.

Ids are sorted by row, so a row's gradient is a sum over neighbours. The sum is added up in registers, in float64, in an
order that depends on the ids alone. A frequent row may have most ids of a field. Other kernels therefore first add up
blocks of ids that belong to one row, and groups of such blocks, so that no program adds more than two partial blocks,
two partial groups, and the sums of the groups between them.
"""

from types import FunctionType
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..algorithm.adam import (
    AdamConstants,
    AdamScalars,
    FtrlConstants,
    adam_element,
    ftrl_constants,
    ftrl_element,
    table_scalars,
)
from .layout import AdamState, DeviceSteps, LookupBags, LookupIds, LookupLayout, RowResults, TableClips

MOST_PROGRAMS = 1 << 16
"""Largest grid. Programs take several blocks of rows in turn, because starting more programs costs more."""

# Triton looks its language up in a function's globals, and algorithm/adam.py must not import Triton.
step_of_element = triton.jit(FunctionType(adam_element.__code__, globals()))
ftrl_of_element = triton.jit(FunctionType(ftrl_element.__code__, globals()))
scalars_of_table = triton.jit(FunctionType(table_scalars.__code__, globals()))


@triton.jit
def load_scalars(steps, step, HAS_DECAY: tl.constexpr):
    """Returns the scalars of steps, from 0, of any shape."""
    decay = tl.load(steps.decays + step) if HAS_DECAY else tl.zeros_like(step).to(tl.float32)
    return AdamScalars(tl.load(steps.step_sizes + step), tl.load(steps.denominator_scales + step), decay)


@triton.jit
def root(value):
    """Rounds correctly. Numbers below 2^-101 are slow for the whole warp, so that masked second moments are 1."""
    return tl.sqrt_rn(value)


@triton.jit
def divide(numerator, denominator):
    """Rounds correctly. Numerators of zero, as of elements at rest, would be slow for the whole warp in ``div_rn``."""
    zero = (numerator == 0.0) & (denominator > 0.0)
    return tl.where(zero, numerator, tl.div_rn(tl.where(zero, denominator, numerator), denominator))


@triton.jit
def norms_of(rows):
    wide = rows.to(tl.float64)
    return tl.sqrt(tl.sum(wide * wide, axis=1)).to(tl.float32)


@triton.jit
def clip_factors(w, g, measured, r, floor, occurrences):
    """Returns each row's clip factor and ``||g|| / limit``. Source: limits_of_norms in clip.py."""
    limit = tl.maximum(r * norms_of(tl.where(measured, w, 0.0)), floor) * occurrences
    norm = norms_of(tl.where(measured, g, 0.0))
    factor = tl.where(norm > limit, divide(limit, tl.where(norm > limit, norm, 1.0)), 1.0)
    ratio = tl.where(norm > 0.0, divide(norm, tl.where(limit > 0.0, limit, 1.0)), 0.0)
    return factor, tl.where((norm > 0.0) & (limit == 0.0), float("inf"), ratio)


@triton.jit
def tables_of(row, first_row, tables, HALVINGS: tl.constexpr):
    """Finds the table of each row: the last one that does not begin after it."""
    table = tl.zeros_like(row)
    for k in tl.static_range(HALVINGS):
        later = table + (1 << (HALVINGS - 1 - k))
        begins = tl.load(first_row + later, mask=later < tables, other=0)
        table = tl.where((later < tables) & (begins <= row), later, table)
    return table


def halvings(tables: int) -> int:
    """Steps of the binary search in :func:`tables_of`."""
    return max(tables - 1, 0).bit_length()


def programs(rows: int, per_program: int) -> tuple[int]:
    """Grid of a kernel that takes ``per_program`` rows at a time."""
    return (min(triton.cdiv(rows, per_program), MOST_PROGRAMS),)


def warps(elements: int) -> int:
    """Warps of a program; few, because a row's steps depend on each other."""
    return 1 if elements <= 256 else 4 if elements <= 1024 else 8


_BAGS = 128
_IDS = 1024


@triton.jit
def _bags(program, offsets, layout, blocks, count, bags, count_blocks, BAGS: tl.constexpr, HALVINGS: tl.constexpr):
    """Returns existence, begin, end, table and address of the output of a program's bags, each [BAGS]."""
    bag = program.to(tl.int64) * BAGS + tl.arange(0, BAGS)
    exists = bag < bags
    begin = tl.maximum(tl.load(offsets + bag, mask=exists, other=0).to(tl.int32), 0)
    end = tl.minimum(tl.load(offsets + bag + 1, mask=exists, other=0).to(tl.int32), count)
    # Ids outside all bags join the first and the last, as in FBGEMM.
    begin, end = tl.where(bag == 0, 0, begin), tl.where(bag == bags - 1, count, end)
    block = tables_of(bag, blocks.first_bag, count_blocks, HALVINGS)
    table = tl.load(blocks.table + block, mask=exists, other=0)
    distance = (bag - tl.load(blocks.first_bag + block)) * tl.load(blocks.stride + block)
    return exists, begin, end, table, tl.load(blocks.address + block) + distance


@triton.jit(do_not_specialize=["count", "bags", "count_blocks"])
def _locate(
    indices, offsets, layout, blocks, address_of_id, row_of_id, outside, count, bags, count_blocks, num_rows,
    BAGS: tl.constexpr, HALVINGS: tl.constexpr,
):  # fmt: skip
    _, begin, end, table, address = _bags(
        tl.program_id(0), offsets, layout, blocks, count, bags, count_blocks, BAGS, HALVINGS
    )
    address = address.to(address_of_id.dtype.element_ty)
    first = tl.load(layout.first_row + table)
    rows = tl.load(layout.rows + table)
    longest = tl.max(end - begin)
    position = 0
    while position < longest:
        i = begin + position
        here = i < end
        index = tl.load(indices + i, mask=here, other=0).to(tl.int64)
        valid = (index >= 0) & (index < rows)
        row = tl.minimum(first + tl.where(valid, index, 0), num_rows - 1)
        tl.store(address_of_id + i, address, mask=here)
        tl.store(row_of_id + i, row.to(row_of_id.dtype.element_ty), mask=here)
        tl.atomic_add(outside + table, 1, mask=here & (valid == 0))
        position += 1


@triton.jit(do_not_specialize=["count", "bags", "count_blocks"])
def _pool(
    indices, offsets, id_weights, layout, blocks, weights, out, count, bags, count_blocks,
    BAGS: tl.constexpr, COLUMNS: tl.constexpr, HALVINGS: tl.constexpr, WEIGHTED: tl.constexpr,
):  # fmt: skip
    # Programs in a row take the same samples of all features, whose outputs share sectors of memory.
    turn = tl.program_id(0)
    program = turn % count_blocks * (tl.num_programs(0) // count_blocks) + turn // count_blocks
    exists, begin, end, table, address = _bags(
        program, offsets, layout, blocks, count, bags, count_blocks, BAGS, HALVINGS
    )
    column = tl.arange(0, COLUMNS)
    rows, dim, start = tl.load(layout.rows + table), tl.load(layout.dim + table), tl.load(layout.start + table)
    inside = exists[:, None] & (column[None, :] < dim[:, None])
    pooled = tl.zeros([BAGS, COLUMNS], tl.float32)
    longest = tl.max(end - begin)
    position = 0
    while position < longest:
        i = begin + position
        here = (i < end) & (rows > 0)
        index = tl.load(indices + i, mask=here, other=0).to(tl.int64)
        element = start + tl.where((index >= 0) & (index < rows), index, 0) * dim
        w = tl.load(weights + element[:, None] + column[None, :], mask=inside & here[:, None], other=0.0).to(tl.float32)
        if WEIGHTED:
            w = w * tl.load(id_weights + i, mask=here, other=0.0).to(tl.float32)[:, None]
        pooled += w
        position += 1
    tl.store(out + address[:, None] + column[None, :], pooled.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["count"])
def _begin_rows(changes, begin, count, IDS: tl.constexpr):
    i = tl.program_id(0) * IDS + tl.arange(0, IDS)
    slot = tl.load(changes + i - 1, mask=(i > 0) & (i < count), other=0)
    before = tl.load(changes + i - 2, mask=(i > 1) & (i < count), other=0)
    tl.store(begin + slot, i, mask=(i == 0) | ((i < count) & (slot > before)))
    rows = tl.load(changes + count - 2, mask=count > 1, other=0) + 1
    tl.store(begin + i, count, mask=(i >= rows) & (i <= count))


def find_rows_on_device(layout: LookupLayout, bags: LookupBags, outside: Tensor) -> LookupIds:
    """Does :func:`find_rows` for at least one id. Ids outside their tables become row 0 and are counted."""
    count, number, blocks = bags.indices.numel(), len(bags.offsets) - 1, bags.blocks
    # Zeros, so that offsets that do not ascend cannot leave rows outside the tables.
    dtype = torch.int32 if max(bags.size, layout.num_rows) < 1 << 31 else torch.int64
    address, row = torch.zeros(2, count, dtype=dtype, device=bags.indices.device)
    _locate[(triton.cdiv(number, _BAGS),)](
        bags.indices.contiguous(),
        bags.offsets.contiguous(),
        layout,
        blocks,
        address,
        row,
        outside,
        count,
        number,
        len(blocks.table),
        layout.num_rows,
        BAGS=_BAGS,
        HALVINGS=halvings(len(blocks.table)),
        enable_fp_fusion=False,
    )
    row, order = torch.sort(row, stable=True)
    return LookupIds(address, order, row, row_begins_on_device(row))


def row_begins_on_device(row: Tensor) -> Tensor:
    """Does :func:`row_begins` on CUDA for sorted rows, int [nnz], nnz >= 1."""
    changes = torch.cumsum(row[1:] != row[:-1], 0, dtype=torch.int32)
    begin = torch.empty(len(row) + 1, dtype=torch.int32, device=row.device)
    _begin_rows[(triton.cdiv(len(row) + 1, _IDS),)](changes, begin, len(row), IDS=_IDS, enable_fp_fusion=False)
    return begin


_POOLED = 1024
"""Elements of a program's bags, unless one bag has more."""


def pool_rows_on_device(
    layout: LookupLayout, bags: LookupBags, id_weights: Tensor | None, weights: Tensor, out: Tensor
) -> None:
    """Sums the rows of each bag, in float32, into ``out``, contiguous. Ids outside their tables use row 0."""
    number, columns = len(bags.offsets) - 1, triton.next_power_of_2(layout.max_dim)
    per_program, count_blocks = max(1, _POOLED // columns), len(bags.blocks.table)
    if number:
        _pool[(count_blocks * triton.cdiv(triton.cdiv(number, per_program), count_blocks),)](
            bags.indices.contiguous(),
            bags.offsets.contiguous(),
            weights if id_weights is None else id_weights.contiguous(),
            layout,
            bags.blocks,
            weights,
            out,
            bags.indices.numel(),
            number,
            count_blocks,
            BAGS=per_program,
            COLUMNS=columns,
            HALVINGS=halvings(count_blocks),
            WEIGHTED=id_weights is not None,
            num_warps=4,
            enable_fp_fusion=False,
        )


class OutputGrad(NamedTuple):
    """Gradient of a lookup's output, and how it reaches the rows."""

    grad: Tensor  # float, contiguous, of any shape
    id_weights: Tensor  # factor of each id in its bag's sum, float [nnz]; ``grad`` where there is none


@triton.jit
def _sum_at(
    position, has, ids, output, column, dim,
    WEIGHTED: tl.constexpr,
):  # fmt: skip
    """Adds up the gradients at positions [R, I] of the sorted ids; float64 [R, COLUMNS]."""
    i = tl.load(ids.order + position, mask=has, other=0)
    address = tl.load(ids.address + i, mask=has, other=0).to(tl.int64)
    inside = has[:, :, None] & (column[None, None, :] < dim[:, None, None])
    g = tl.load(output.grad + address[:, :, None] + column[None, None, :], mask=inside, other=0.0).to(tl.float64)
    if WEIGHTED:
        g = g * tl.load(output.id_weights + i, mask=has, other=0.0).to(tl.float64)[:, :, None]
    return tl.sum(g, axis=1)


@triton.jit(do_not_specialize=["count"])
def sum_blocks(
    ids, count, output, layout, partial,
    COLUMNS: tl.constexpr, HALVINGS: tl.constexpr, WEIGHTED: tl.constexpr, BLOCK: tl.constexpr, IDS: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0)
    row = tl.load(ids.row + block * BLOCK).to(tl.int64)
    if row == tl.load(ids.row + block * BLOCK + BLOCK - 1).to(tl.int64):
        column = tl.arange(0, COLUMNS)
        table = tables_of(row + tl.zeros([1], tl.int64), layout.first_row, layout.tables, HALVINGS)
        dim = tl.load(layout.dim + table)
        sums = tl.zeros([1, COLUMNS], tl.float64)
        for first in tl.range(0, BLOCK, IDS, loop_unroll_factor=4):
            position = block * BLOCK + first + tl.arange(0, IDS)[None, :]
            sums += _sum_at(position, position < count, ids, output, column, dim, WEIGHTED)
        tl.store(
            partial + block.to(tl.int64) * layout.max_dim + column[None, :], sums, mask=column[None, :] < dim[:, None]
        )


@triton.jit
def _sum_of_sums(sums, which, has, layout, column, dim):
    """Adds up rows [R, I] of ``sums``, float64 [any, max_dim]; float64 [R, COLUMNS]."""
    inside = has[:, :, None] & (column[None, None, :] < dim[:, None, None])
    address = which.to(tl.int64)[:, :, None] * layout.max_dim + column[None, None, :]
    return tl.sum(tl.load(sums + address, mask=inside, other=0.0), axis=1)


@triton.jit(do_not_specialize=["count"])
def sum_groups(
    ids, count, layout, partial,
    COLUMNS: tl.constexpr, HALVINGS: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr, IDS: tl.constexpr,
):  # fmt: skip
    group = tl.program_id(0)
    row = tl.load(ids.row + group * (GROUP * BLOCK)).to(tl.int64)
    if row == tl.load(ids.row + group * (GROUP * BLOCK) + GROUP * BLOCK - 1).to(tl.int64):
        column = tl.arange(0, COLUMNS)
        table = tables_of(row + tl.zeros([1], tl.int64), layout.first_row, layout.tables, HALVINGS)
        dim = tl.load(layout.dim + table)
        sums = tl.zeros([1, COLUMNS], tl.float64)
        for first in tl.range(0, GROUP, IDS):
            which = first + tl.arange(0, IDS)[None, :]
            sums += _sum_of_sums(partial, group * GROUP + which, which < GROUP, layout, column, dim)
        address = (count // BLOCK + group).to(tl.int64) * layout.max_dim + column[None, :]
        tl.store(partial + address, sums, mask=column[None, :] < dim[:, None])


@triton.jit
def _whole_units(begin, end, SIZE: tl.constexpr):
    """Splits [begin, end) into whole units of ``SIZE`` and the rest before and after them.

    Returns the first unit, the end of the units, and the lengths of both rests; without a unit, all is in the first.
    """
    first = (begin + SIZE - 1) // SIZE
    last = tl.maximum(end // SIZE, first)
    has_units = first < last
    return first, last, tl.where(has_units, first * SIZE, end) - begin, tl.where(has_units, end - last * SIZE, 0)


@triton.jit
def row_sums(
    begin, end, ids, count, output, layout, partial, column, dim,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, WEIGHTED: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr,
    IDS: tl.constexpr,
):  # fmt: skip
    """Adds up the gradients of rows, given where their sorted ids begin and end; float64 [ROWS, COLUMNS].

    ``partial`` has the sums of blocks, then the sums of groups of blocks; ``GROUP`` is 0 without groups.
    """
    first, last, head, tail = _whole_units(begin, end, BLOCK)
    sums = tl.zeros([ROWS, COLUMNS], tl.float64)
    offset = tl.arange(0, IDS)[None, :]
    most = tl.max(head + tail)
    done = 0
    while done < most:
        k = done + offset
        position = tl.where(k < head[:, None], begin[:, None] + k, (end - head - tail)[:, None] + k)
        sums += _sum_at(position, k < (head + tail)[:, None], ids, output, column, dim, WEIGHTED)
        done += IDS
    head, tail = last - first, tl.zeros_like(first)
    if GROUP > 0:
        first_group, end_group, head, tail = _whole_units(first, last, GROUP)
        most = tl.max(end_group - first_group)
        done = 0
        while done < most:
            group = first_group[:, None] + done + offset
            sums += _sum_of_sums(partial, count // BLOCK + group, group < end_group[:, None], layout, column, dim)
            done += IDS
    most = tl.max(head + tail)
    done = 0
    while done < most:
        k = done + offset
        block = tl.where(k < head[:, None], first[:, None] + k, (last - head - tail)[:, None] + k)
        sums += _sum_of_sums(partial, block, k < (head + tail)[:, None], layout, column, dim)
        done += IDS
    return sums


@triton.jit
def load_rows(ids, count, block, layout, ROWS: tl.constexpr, HALVINGS: tl.constexpr):
    """Returns index, existence, begin, end, row, table, width and first element of a block of distinct rows."""
    u = block * ROWS + tl.arange(0, ROWS)
    begin = tl.load(ids.begin + u, mask=u < count, other=count)
    exists = begin < count
    row = tl.load(ids.row + begin, mask=exists, other=0).to(tl.int64)
    end = tl.load(ids.begin + u + 1, mask=exists, other=0)
    table = tables_of(row, layout.first_row, layout.tables, HALVINGS)
    dim = tl.where(exists, tl.load(layout.dim + table), 0)
    start = tl.load(layout.start + table) + (row - tl.load(layout.first_row + table)) * dim
    return u, exists, tl.where(exists, begin, 0), end, row, table, dim, start


@triton.jit(do_not_specialize=["count"])
def sum_rows(
    ids, count, output, layout, partial, sums,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, HALVINGS: tl.constexpr, WEIGHTED: tl.constexpr,
    BLOCK: tl.constexpr, GROUP: tl.constexpr, IDS: tl.constexpr,
):  # fmt: skip
    column = tl.arange(0, COLUMNS)
    block = tl.program_id(0)
    while tl.load(ids.begin + tl.minimum(block * ROWS, count)) < count:
        u, exists, begin, end, _, _, dim, _ = load_rows(ids, count, block, layout, ROWS, HALVINGS)
        summed = row_sums(
            begin, end, ids, count, output, layout, partial, column, dim,
            ROWS, COLUMNS, WEIGHTED, BLOCK, GROUP, IDS,
        )  # fmt: skip
        address = u.to(tl.int64)[:, None] * layout.max_dim + column[None, :]
        tl.store(sums + address, summed, mask=exists[:, None] & (column[None, :] < dim[:, None]))
        block += tl.num_programs(0)


BLOCK, GROUP = 64, 32
"""Neighbouring ids of a block, and neighbouring blocks of a group."""
LEAST_BLOCKS = 1024
"""Number of blocks from which they are grouped."""
IDS, MOST_ELEMENTS = 8, 2048
"""Ids of a row, and elements of these ids, that a program adds at most at a time."""
ELEMENTS = 32
"""Elements of a program's rows, unless one row has more."""
_COUNTED = 512


@triton.jit
def _clip(w, g, inside, occurrences, table, exists, clips, column):
    """Returns each row's clip factor, the ratio ``||g|| / limit``, and the clipped columns."""
    measured = inside & (column[None, :] < tl.load(clips.columns + table, mask=exists, other=0)[:, None])
    r = tl.load(clips.r + table, mask=exists, other=0.0)
    floor = tl.load(clips.floor + table, mask=exists, other=0.0)
    counts = tl.load(clips.per_occurrence + table, mask=exists, other=0) != 0
    factor, ratio = clip_factors(w, g, measured, r, floor, tl.where(counts, occurrences, 1).to(tl.float32))
    return factor, ratio, measured


@triton.jit(do_not_specialize=["count"])
def _update(
    ids, count, output, layout, partial, clips, state, steps, results, constants, ftrl,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, HALVINGS: tl.constexpr, WEIGHTED: tl.constexpr,
    REPLAYS: tl.constexpr, HAS_FTRL: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr, IDS: tl.constexpr,
):  # fmt: skip
    column = tl.arange(0, COLUMNS)
    step = tl.load(steps.taken)
    block = tl.program_id(0)
    while tl.load(ids.begin + tl.minimum(block * ROWS, count)) < count:
        u, exists, begin, end, row, table, dim, start = load_rows(ids, count, block, layout, ROWS, HALVINGS)
        inside = exists[:, None] & (column[None, :] < dim[:, None])
        element = start[:, None] + column[None, :]
        w = tl.load(state.weights + element, mask=inside, other=0.0)
        m = tl.load(state.exp_avg + element, mask=inside, other=0.0)
        v = tl.load(state.exp_avg_sq + element, mask=inside, other=1.0)
        weight, squares = w, v
        if REPLAYS:
            last = tl.load(steps.last_step + row, mask=exists, other=step)
            missed = tl.where(last < 0, step - 1 - (-last - 1), 0)
            decay = tl.exp(missed.to(tl.float64) * tl.load(steps.log_beta2)).to(tl.float32)
            v = tl.where((missed > 0)[:, None], v * decay[:, None], v)
        sums = row_sums(
            begin, end, ids, count, output, layout, partial, column, dim,
            ROWS, COLUMNS, WEIGHTED, BLOCK, GROUP, IDS,
        )  # fmt: skip
        g = sums.to(tl.float32) + constants.twice_l2 * w
        factor, ratio, measured = _clip(w, g, inside, end - begin, table, exists, clips, column)
        g = tl.where(measured, g * factor[:, None], g)
        tl.store(results.ratio + u, ratio, mask=exists)
        tl.store(results.table + u, table.to(tl.int32), mask=exists)
        lr_factor = tl.load(steps.lr_factors + table, mask=exists, other=0.0)
        scalars = scalars_of_table(load_scalars(steps, step - 1, True), lr_factor[:, None])
        w, m, v = step_of_element(w, m, v, g, constants, scalars, root, divide)
        if HAS_FTRL:
            adam = column[None, :] < tl.load(steps.adam_columns + table, mask=exists, other=0)[:, None]
            alpha = (ftrl.alpha * lr_factor)[:, None]
            weight, squares = ftrl_of_element(weight, squares, sums.to(tl.float32), alpha, ftrl, root, divide)
            w, m, v = tl.where(adam, w, weight), tl.where(adam, m, 0.0), tl.where(adam, v, squares)
        tl.store(state.weights + element, w, mask=inside)
        tl.store(state.exp_avg + element, m, mask=inside)
        tl.store(state.exp_avg_sq + element, v, mask=inside)
        if REPLAYS:  # here, because the sums in between wait until all warps have read the last steps
            tl.store(steps.last_step + row, step + tl.zeros_like(last), mask=exists)
        block += tl.num_programs(0)


@triton.jit(do_not_specialize=["count"])
def _clip_rows(
    ids, count, output, layout, partial, clips, weights, results, out, twice_l2,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, HALVINGS: tl.constexpr, WEIGHTED: tl.constexpr,
    WRITES: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr, IDS: tl.constexpr,
):  # fmt: skip
    column = tl.arange(0, COLUMNS)
    block = tl.program_id(0)
    while tl.load(ids.begin + tl.minimum(block * ROWS, count)) < count:
        u, exists, begin, end, _, table, dim, start = load_rows(ids, count, block, layout, ROWS, HALVINGS)
        inside = exists[:, None] & (column[None, :] < dim[:, None])
        element = start[:, None] + column[None, :]
        w = tl.load(weights + element, mask=inside, other=0.0).to(tl.float32)
        sums = row_sums(
            begin, end, ids, count, output, layout, partial, column, dim,
            ROWS, COLUMNS, WEIGHTED, BLOCK, GROUP, IDS,
        )  # fmt: skip
        g = sums.to(tl.float32)
        if WRITES:
            g += twice_l2 * w
        factor, ratio, measured = _clip(w, g, inside, end - begin, table, exists, clips, column)
        tl.store(results.ratio + u, ratio, mask=exists)
        tl.store(results.table + u, table.to(tl.int32), mask=exists)
        if WRITES:
            g = tl.where(measured, g * factor[:, None], g)
            first = tl.load(ids.order + begin, mask=exists, other=0)
            address = tl.load(ids.address + first, mask=exists, other=0).to(tl.int64)
            tl.store(out + address[:, None] + column[None, :], g, mask=inside)
        else:
            tl.store(out + u, factor, mask=exists)
        block += tl.num_programs(0)


@triton.jit(do_not_specialize=["count"])
def _count(
    begin, count, results, rows, clipped, bins,
    ROWS: tl.constexpr, BINS: tl.constexpr, SHIFT: tl.constexpr, FIRST: tl.constexpr,
):  # fmt: skip
    u = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    exists = tl.load(begin + u, mask=u < count, other=count) < count
    table = tl.load(results.table + u, mask=exists, other=-1)
    ratio = tl.load(results.ratio + u, mask=exists, other=0.0)
    is_clipped = ratio > 1.0
    tl.store(results.table + u, table, mask=u < count)
    bin = tl.minimum(tl.maximum(((ratio.to(tl.int32, bitcast=True) - 1) >> SHIFT) - FIRST, 0), BINS - 1)
    tl.atomic_add(bins + table.to(tl.int64) * BINS + bin, tl.full([ROWS], 1, tl.int64), mask=exists)
    # Rows are sorted by table, so a block has few of them.
    now = tl.min(tl.where(exists, table, 2147483647))
    last = tl.max(table)
    while now <= last:
        here = table == now
        tl.atomic_add(rows + now, tl.sum(here.to(tl.int64)))
        tl.atomic_add(clipped + now, tl.sum((here & is_clipped).to(tl.int64)))
        now = tl.min(tl.where(exists & (table > now), table, 2147483647))


class DeviceRows:
    """Distinct rows of a backward pass on CUDA, at least one, before their gradients are summed."""

    def __init__(self, layout: LookupLayout, ids: LookupIds, id_weights: Tensor | None, output_grad: Tensor):
        grad = output_grad.contiguous()
        self.ids, self._layout, self._count = ids, layout, len(ids.row)
        self._output = OutputGrad(grad, grad if id_weights is None else id_weights.contiguous())
        columns = triton.next_power_of_2(layout.max_dim)
        ids_at_once = max(1, min(IDS, MOST_ELEMENTS // columns))
        rows, blocks = max(1, ELEMENTS // columns), self._count // BLOCK
        groups = blocks // GROUP if blocks >= LEAST_BLOCKS else 0
        shared = {"COLUMNS": columns, "HALVINGS": halvings(len(layout.dim)), "BLOCK": BLOCK, "IDS": ids_at_once}
        shared["enable_fp_fusion"] = False
        weighted, grouped = {"WEIGHTED": id_weights is not None}, {"GROUP": GROUP if groups else 0}
        self._grid = programs(self._count, rows)
        num_warps = warps(rows * ids_at_once * columns)
        self._options = {**shared, **weighted, **grouped, "ROWS": rows, "num_warps": num_warps}
        self._partial = torch.empty(max(blocks + groups, 1), layout.max_dim, dtype=torch.float64, device=grad.device)
        of_blocks = {**shared, "num_warps": warps(ids_at_once * columns)}
        if blocks:
            sum_blocks[(blocks,)](ids, self._count, self._output, layout, self._partial, **weighted, **of_blocks)
        if groups:
            sum_groups[(groups,)](ids, self._count, layout, self._partial, **grouped, **of_blocks)

    def update(
        self,
        clips: TableClips,
        state: AdamState,
        steps: DeviceSteps,
        constants: AdamConstants,
        ftrl: FtrlConstants | None = None,
        *,
        replays: bool,
    ) -> RowResults:
        """Adds L2, clips and takes the step ``steps.taken`` of Adam, or FTRL, on the rows, in place; weights float32.

        Under replay, the rows' last steps are written, and rows at rest catch up the decay of their second moments.
        """
        results = self._results()
        arguments = (*self._arguments, clips, state, steps, results, constants, ftrl or ftrl_constants(None))
        _update[self._grid](*arguments, REPLAYS=replays, HAS_FTRL=ftrl is not None, **self._options)
        return results

    def factors(self, clips: TableClips, weights: Tensor) -> tuple[Tensor, RowResults]:
        """Computes the clip factor of each distinct row, float32 [nnz]."""
        factors = torch.empty(self._count, dtype=torch.float32, device=self.ids.row.device)
        return factors, self._clip_into(factors, clips, weights)

    def written(self, clips: TableClips, weights: Tensor, twice_l2: float) -> tuple[Tensor, RowResults]:
        """Computes an output gradient that has each row's ``clip(g + twice_l2 * w)`` at the row's first id."""
        written = torch.zeros_like(self._output.grad)
        return written, self._clip_into(written, clips, weights, twice_l2, writes=True)

    def sums(self) -> Tensor:
        """Sums the gradient of each distinct row, float64 [nnz, D], zero in the padding and beyond a row's columns."""
        sums = torch.zeros(self._count, self._layout.max_dim, dtype=torch.float64, device=self._output.grad.device)
        sum_rows[self._grid](*self._arguments, sums, **self._options)
        return sums

    def of_ids(self, values: Tensor) -> Tensor:
        """Copies a value of each distinct row, [nnz], to the row's ids in the order of the batch."""
        counts = self.ids.begin.diff()
        in_order = torch.repeat_interleave(values, counts, output_size=self._count)
        return torch.empty_like(values).scatter_(0, self.ids.order, in_order)

    def count(self, results: RowResults, rows: Tensor, clipped: Tensor, bins: Tensor, shift: int, first: int) -> None:
        """Adds up rows and clipped rows, int64 [tables], and rows by bin of their ratio, int64 [tables, bins]."""
        grid, options = (triton.cdiv(self._count, _COUNTED),), {"ROWS": _COUNTED, "enable_fp_fusion": False}
        bounds = {"BINS": bins.shape[1], "SHIFT": shift, "FIRST": first}
        _count[grid](self.ids.begin, self._count, results, rows, clipped, bins, **bounds, **options)

    def _clip_into(
        self, out: Tensor, clips: TableClips, weights: Tensor, twice_l2: float = 0.0, *, writes: bool = False
    ) -> RowResults:
        results = self._results()
        arguments = (*self._arguments, clips, weights, results, out, twice_l2)
        _clip_rows[self._grid](*arguments, WRITES=writes, **self._options)
        return results

    @property
    def _arguments(self) -> tuple[Any, ...]:
        return self.ids, self._count, self._output, self._layout, self._partial

    def _results(self) -> RowResults:
        device = self.ids.row.device
        return RowResults(
            torch.empty(self._count, device=device), torch.empty(self._count, dtype=torch.int32, device=device)
        )
