"""CUDA kernels that find the distinct rows of a lookup's ids; torch_rows.py has the definition."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .layout import LookupBags, LookupLayout
from .torch_rows import LookupIds
from .triton_shared import halvings, tables_of

_BAGS = 128
_IDS = 1024


@triton.jit(do_not_specialize=["count", "bags", "count_blocks"])
def _locate(
    indices, offsets, layout, blocks, address_of_id, row_of_id, outside, count, bags, count_blocks, num_rows,
    BAGS: tl.constexpr, HALVINGS: tl.constexpr,
):  # fmt: skip
    bag = tl.program_id(0) * BAGS + tl.arange(0, BAGS)
    exists = bag < bags
    begin = tl.maximum(tl.load(offsets + bag, mask=exists, other=0).to(tl.int32), 0)
    end = tl.minimum(tl.load(offsets + bag + 1, mask=exists, other=0).to(tl.int32), count)
    # Ids outside all bags join the first and the last, as in FBGEMM.
    begin, end = tl.where(bag == 0, 0, begin), tl.where(bag == bags - 1, count, end)
    block = tables_of(bag, blocks.first_bag, count_blocks, HALVINGS)
    table = tl.load(blocks.table + block, mask=exists, other=0)
    distance = (bag - tl.load(blocks.first_bag + block)) * tl.load(blocks.stride + block)
    address = (tl.load(blocks.address + block) + distance).to(address_of_id.dtype.element_ty)
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


@triton.jit(do_not_specialize=["count"])
def _begin_rows(changes, begin, count, IDS: tl.constexpr):
    i = tl.program_id(0) * IDS + tl.arange(0, IDS)
    slot = tl.load(changes + i - 1, mask=(i > 0) & (i < count), other=0)
    before = tl.load(changes + i - 2, mask=(i > 1) & (i < count), other=0)
    tl.store(begin + slot, i, mask=(i == 0) | ((i < count) & (slot > before)))
    rows = tl.load(changes + count - 2, mask=count > 1, other=0) + 1
    tl.store(begin + i, count, mask=(i >= rows) & (i <= count))


def find_rows_on_device(layout: LookupLayout, bags: LookupBags, outside: Tensor) -> LookupIds:
    """Computes :func:`find_rows` on CUDA; ids outside their tables are counted and become row 0, as in FBGEMM.

    Args:
        layout: the lookup's geometry.
        bags: ids, at least one.
        outside: ids outside each table so far, int64 [tables]; added to.
    """
    count, number, blocks = bags.indices.numel(), len(bags.offsets) - 1, bags.blocks
    # Zeros, so that offsets that do not ascend cannot leave rows outside the tables.
    address, row = (
        torch.zeros(count, dtype=torch.int32 if size < 1 << 31 else torch.int64, device=bags.indices.device)
        for size in (bags.size, layout.num_rows)
    )
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
    """Computes :func:`row_begins` on CUDA for sorted rows, int [nnz], nnz >= 1."""
    changes = torch.cumsum(row[1:] != row[:-1], 0, dtype=torch.int32)
    begin = torch.empty(len(row) + 1, dtype=torch.int32, device=row.device)
    _begin_rows[(triton.cdiv(len(row) + 1, _IDS),)](changes, begin, len(row), IDS=_IDS, enable_fp_fusion=False)
    return begin
