"""CUDA kernels that find the distinct rows of a lookup's ids; torch_rows.py has the definition."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .layout import LookupLayout
from .torch_rows import LookupIds

_BAGS = 128
_IDS = 1024


@triton.jit(do_not_specialize=["count", "bags", "batch"])
def _locate(
    indices, offsets, layout, bag_of_id, row_of_id, outside, count, bags, batch, num_rows, BAGS: tl.constexpr
):  # fmt: skip
    bag = tl.program_id(0) * BAGS + tl.arange(0, BAGS)
    exists = bag < bags
    begin = tl.maximum(tl.load(offsets + bag, mask=exists, other=0).to(tl.int32), 0)
    end = tl.minimum(tl.load(offsets + bag + 1, mask=exists, other=0).to(tl.int32), count)
    # Ids outside all bags join the first and the last, as in FBGEMM.
    begin, end = tl.where(bag == 0, 0, begin), tl.where(bag == bags - 1, count, end)
    table = tl.load(layout.feature_table + bag // batch, mask=exists, other=0)
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
        tl.store(bag_of_id + i, bag, mask=here)
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


def find_rows_on_device(layout: LookupLayout, indices: Tensor, offsets: Tensor, outside: Tensor) -> LookupIds:
    """Computes :func:`find_rows` on CUDA; ids outside their tables are counted and become row 0, as in FBGEMM.

    Args:
        layout: the lookup's geometry.
        indices: row of each id in its table, int [nnz], at least one.
        offsets: offset of each bag in ``indices``, feature-major, int [T * B + 1].
        outside: ids outside each table so far, int64 [tables]; added to.
    """
    count, bags, device = indices.numel(), len(offsets) - 1, indices.device
    # Zeros, so that offsets that do not ascend cannot leave rows outside the tables.
    dtype = torch.int32 if layout.num_rows < 1 << 31 else torch.int64
    bag, row = torch.zeros(2, count, dtype=dtype, device=device)
    batch = bags // len(layout.feature_table)
    grid = (triton.cdiv(bags, _BAGS),)
    _locate[grid](
        indices.contiguous(),
        offsets.contiguous(),
        layout,
        bag,
        row,
        outside,
        count,
        bags,
        batch,
        layout.num_rows,
        BAGS=_BAGS,
        enable_fp_fusion=False,
    )
    row, order = torch.sort(row, stable=True)
    return LookupIds(bag, order, row, row_begins_on_device(row), batch)


def row_begins_on_device(row: Tensor) -> Tensor:
    """Computes :func:`row_begins` on CUDA for sorted rows, int [nnz], nnz >= 1."""
    changes = torch.cumsum(row[1:] != row[:-1], 0, dtype=torch.int32)
    begin = torch.empty(len(row) + 1, dtype=torch.int32, device=row.device)
    _begin_rows[(triton.cdiv(len(row) + 1, _IDS),)](changes, begin, len(row), IDS=_IDS, enable_fp_fusion=False)
    return begin
