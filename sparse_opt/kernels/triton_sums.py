"""CUDA kernels that add up the gradients of a batch's distinct rows.

Ids are sorted by row, so a row's gradient is a sum over neighbours. It is added up in registers, in float64, in an
order that depends on the ids alone. A frequent row may have a third of the ids: another kernel first adds up the blocks
of ids that belong to one row entirely, so that no program adds more than two partial blocks and these sums.
"""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from .triton_shared import tables_of


class OutputGrad(NamedTuple):
    """Gradient of a lookup's output, and how it reaches the rows.

    Attributes:
        grad: float, contiguous, of any shape.
        id_weights: factor of each id in its bag's sum, float [nnz]; ``grad`` where there is none.
    """

    grad: Tensor
    id_weights: Tensor


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
def row_sums(
    begin, end, ids, output, layout, partial, column, dim,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, WEIGHTED: tl.constexpr, BLOCK: tl.constexpr, IDS: tl.constexpr,
):  # fmt: skip
    """Adds up the gradients of rows whose sorted ids begin and end there; float64 [ROWS, COLUMNS]."""
    first_block = (begin + BLOCK - 1) // BLOCK
    end_block = tl.maximum(end // BLOCK, first_block)
    has_blocks = first_block < end_block
    head = tl.where(has_blocks, first_block * BLOCK, end) - begin
    tail = tl.where(has_blocks, end - end_block * BLOCK, 0)
    sums = tl.zeros([ROWS, COLUMNS], tl.float64)
    offset = tl.arange(0, IDS)[None, :]
    most = tl.max(head + tail)
    done = 0
    while done < most:
        k = done + offset
        in_head = k < head[:, None]
        position = tl.where(in_head, begin[:, None] + k, (end - head - tail)[:, None] + k)
        sums += _sum_at(position, k < (head + tail)[:, None], ids, output, column, dim, WEIGHTED)
        done += IDS
    most = tl.max(end_block - first_block)
    done = 0
    while done < most:
        block = first_block[:, None] + done + offset
        has = (block < end_block[:, None])[:, :, None] & (column[None, None, :] < dim[:, None, None])
        address = block.to(tl.int64)[:, :, None] * layout.max_dim + column[None, None, :]
        sums += tl.sum(tl.load(partial + address, mask=has, other=0.0), axis=1)
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
    BLOCK: tl.constexpr, IDS: tl.constexpr,
):  # fmt: skip
    column = tl.arange(0, COLUMNS)
    block = tl.program_id(0)
    while tl.load(ids.begin + tl.minimum(block * ROWS, count)) < count:
        u, exists, begin, end, _, _, dim, _ = load_rows(ids, count, block, layout, ROWS, HALVINGS)
        summed = row_sums(begin, end, ids, output, layout, partial, column, dim, ROWS, COLUMNS, WEIGHTED, BLOCK, IDS)
        address = u.to(tl.int64)[:, None] * layout.max_dim + column[None, :]
        tl.store(sums + address, summed, mask=exists[:, None] & (column[None, :] < dim[:, None]))
        block += tl.num_programs(0)
