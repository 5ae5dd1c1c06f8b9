"""Gradients of a lookup's distinct rows from the gradient of its output, in plain torch, on any device.

No step waits for the device: the number U of distinct rows stays on the device, and tensors of rows are padded to the
number of ids, nnz. Sizes: nnz ids, D columns of the widest table.
"""

from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from .layout import LookupBags, LookupIds, LookupLayout


@dataclass(frozen=True)
class RowCounts:
    """Distinct rows of a list of ids."""

    slot: Tensor  # index of each id's row among the distinct rows, int64 [nnz]
    occurrence: Tensor  # first occurrence of each distinct row, int64 [nnz]
    count: Tensor  # occurrences of each distinct row, int64 [nnz]
    real: Tensor  # True for the first U entries, bool [nnz]. The padding after them repeats row 0


def find_rows(layout: LookupLayout, bags: LookupBags) -> LookupIds:
    blocks, bag = bags.blocks, parts_of_positions(bags.offsets, bags.indices.numel())
    block = torch.searchsorted(blocks.first_bag, bag, right=True) - 1
    address = blocks.address[block] + (bag - blocks.first_bag[block]) * blocks.stride[block]
    row, order = torch.sort(layout.first_row[blocks.table[block]] + bags.indices.long(), stable=True)
    return LookupIds(address, order, row, row_begins(row))


def row_begins(row: Tensor) -> Tensor:
    """Finds where each distinct value of sorted rows [nnz] begins, padded with nnz: int64 [nnz + 1]."""
    slot = torch.zeros_like(row, dtype=torch.int64)
    slot[1:] = (row[1:] != row[:-1]).cumsum(0)
    return torch.searchsorted(slot, torch.arange(len(row) + 1, device=row.device))


def count_ids(ids: LookupIds) -> RowCounts:
    return _count_sorted(ids.order, ids.begin.long())


def count_rows(keys: Tensor) -> RowCounts:
    """Finds the distinct values of ``keys``, int [nnz], and their occurrences."""
    ordered, order = torch.sort(keys, stable=True)
    return _count_sorted(order, row_begins(ordered))


def _count_sorted(order: Tensor, begin: Tensor) -> RowCounts:
    count = begin[1:] - begin[:-1]
    real = count > 0
    slot = torch.empty_like(order).scatter_(0, order, parts_of_positions(begin, len(order)))
    occurrence = order[torch.where(real, begin[:-1], 0)]
    return RowCounts(slot, occurrence, torch.where(real, count, count[:1]), real)


@dataclass(frozen=True)
class RowSums:
    """Distinct rows of one backward pass and their summed gradients, padded like :class:`RowCounts`."""

    counts: RowCounts  # occurrences of the rows
    address: Tensor  # as in LookupIds; empty where rows come from several ranks
    table: Tensor  # table of each row, int64 [nnz]
    start: Tensor  # offset of each row's first element in the flat weights, int64 [nnz]
    sums: Tensor  # gradients, float64 [nnz, D], zero in the columns that a row does not have
    dtype: torch.dtype  # type to round the gradients to


@dataclass(frozen=True)
class RowGradients:
    """Distinct rows of one backward pass and their gradients, padded like :class:`RowCounts`."""

    counts: RowCounts  # occurrences of the rows
    address: Tensor  # as in LookupIds
    table: Tensor  # table of each row, int64 [nnz]
    element: Tensor  # index of each row's elements in the flat weights, int64 [nnz, D]; outside, of the first element
    inside: Tensor  # False where a row is narrower than D, bool [nnz, D]
    weight: Tensor  # weights of the rows, float [nnz, D], zero outside
    grad: Tensor  # gradients of the rows, float [nnz, D], zero outside


def row_sums(layout: LookupLayout, ids: LookupIds, id_weights: Tensor | None, output_grad: Tensor) -> RowSums:
    """Sums the output gradient over each row's occurrences: ``g[row] = sum_i id_weight[i] * output_grad[bag(i)]``."""
    dims = torch.empty_like(ids.order).scatter_(0, ids.order, layout.dim[tables_of_rows(layout, ids.row.long())])
    element, inside = _elements(ids.address, dims, layout.max_dim)
    # Summed in float64, so that a row's gradient does not depend on the order of its occurrences.
    contribution = torch.where(inside, output_grad.contiguous().view(-1)[element].double(), 0)
    if id_weights is not None:
        contribution = contribution * id_weights[:, None]
    sums = torch.zeros_like(contribution).index_add_(0, count_ids(ids).slot, contribution)
    return with_sums(layout, ids, sums, output_grad.dtype)


def weight_grads(layout: LookupLayout, ids: LookupIds, weights: Tensor, output_grad: Tensor) -> Tensor:
    """Multiplies each id's row, in the lookup's flat weights, by the output gradient of its bag; float32 [nnz]."""
    table = tables_of_rows(layout, ids.row.long())
    start = layout.start[table] + (ids.row - layout.first_row[table]) * layout.dim[table]

    def columns_at(first: Tensor, values: Tensor) -> Tensor:
        element, inside = _elements(first, layout.dim[table], layout.max_dim)
        return torch.where(inside, values[element].float(), 0)

    grads = columns_at(ids.address[ids.order].long(), output_grad.contiguous().view(-1))
    products = (columns_at(start, weights) * grads).sum(1)
    return torch.empty(len(table), dtype=torch.float32, device=weights.device).scatter_(0, ids.order, products)


def with_sums(layout: LookupLayout, ids: LookupIds, sums: Tensor, dtype: torch.dtype) -> RowSums:
    """Distinct rows with their summed gradients, float64 [nnz, D], of an output gradient of this dtype."""
    counts = count_ids(ids)
    row = ids.row[ids.begin[:-1].clamp_max(len(ids.row) - 1).where(counts.real, 0)].long()
    table = tables_of_rows(layout, row)
    start = layout.start[table] + (row - layout.first_row[table]) * layout.dim[table]
    sums = torch.where(counts.real[:, None], sums, sums[:1])
    return RowSums(counts, ids.address, table, start, sums, torch.promote_types(dtype, torch.float32))


def sums_of_ranks(rows: RowSums, group: ProcessGroup) -> RowSums:
    """Adds up the occurrences and averages the gradients of all ranks' rows. All ranks must call together."""
    own = torch.stack([rows.start, rows.table, rows.counts.count], dim=1).double()
    packed = torch.cat([own, rows.sums], dim=1)[rows.counts.real]
    own_size = torch.tensor([len(packed)], device=packed.device)
    sizes = [torch.empty_like(own_size) for _ in range(group.size())]
    dist.all_gather(sizes, own_size, group=group)
    lengths = [int(size) for size in sizes]
    padded = packed.new_zeros(max(lengths), packed.shape[1])
    padded[: len(packed)] = packed
    gathered = [torch.empty_like(padded) for _ in lengths]
    dist.all_gather(gathered, padded, group=group)
    of_ranks = torch.cat([part[:length] for part, length in zip(gathered, lengths, strict=True)])

    start, table, occurrences = of_ranks[:, :3].long().unbind(1)
    counts = count_rows(start)
    count = torch.zeros_like(counts.count).index_add_(0, counts.slot, occurrences)
    sums = torch.zeros_like(of_ranks[:, 3:])
    for slots, values in zip(counts.slot.split(lengths), of_ranks[:, 3:].split(lengths), strict=True):
        # The rows of a rank are distinct, so that the order of the additions is that of the ranks on CUDA too.
        sums.index_add_(0, slots, values)
    sums /= len(lengths)
    return RowSums(
        replace(counts, count=torch.where(counts.real, count, count[:1])),
        rows.address[:0],
        table[counts.occurrence],
        start[counts.occurrence],
        torch.where(counts.real[:, None], sums, sums[:1]),
        rows.dtype,
    )


def with_weights(rows: RowSums, layout: LookupLayout, weights: Tensor) -> RowGradients:
    """Rounds rows' gradients and gathers the rows from the lookup's flat weights."""
    element, inside = _elements(rows.start, layout.dim[rows.table], layout.max_dim)
    weight = torch.where(inside, weights[element].to(rows.dtype), 0)
    return RowGradients(rows.counts, rows.address, rows.table, element, inside, weight, rows.sums.to(rows.dtype))


def _elements(first: Tensor, dims: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """Indices of rows' elements in a flat tensor, int [n, most], outside of the first element, and which are inside."""
    column = torch.arange(most, device=first.device)
    inside = column < dims[:, None]
    return torch.where(inside, first[:, None] + column, first[:, None]), inside


def scatter_rows(flat: Tensor, element: Tensor, rows: RowGradients) -> None:
    """Writes the gradients of rows at elements of a flat tensor, int64 [nnz, D]; outside, at the first element."""
    # Padding repeats a real row, whose elements are then written twice with the same values.
    flat[element] = torch.where(rows.inside, rows.grad, rows.grad[:, :1]).to(flat.dtype)


def tables_of_rows(layout: LookupLayout, row: Tensor) -> Tensor:
    return torch.searchsorted(layout.first_row, row, right=True) - 1


def parts_of_positions(begins: Tensor, size: int) -> Tensor:
    """Finds the part of each of ``size`` positions, int64 [size]; ``begins``, int [parts + 1], ends with ``size``."""
    # torch.repeat_interleave on CPU wakes all threads, even for a few elements.
    ends = begins[1:].long()
    return (
        torch.zeros(size + 1, dtype=torch.int64, device=begins.device)
        .scatter_add_(0, ends, torch.ones_like(ends))
        .cumsum(0)[:size]
    )


def rows_of_sums(layout: LookupLayout, sums: RowSums) -> Tensor:
    """Indices of rows among the rows of all tables, int64 [nnz]."""
    return layout.first_row[sums.table] + (sums.start - layout.start[sums.table]) // layout.dim[sums.table]


def is_behind(last: Tensor, step: int) -> Tensor:
    """True for rows with these last steps that have missed steps up to ``step`` and are not at rest, bool [n]."""
    return (last >= 0) & (last < step)


def missed_decay(last: Tensor, step: int, log_beta2: float) -> Tensor:
    """Decay of second moments that rows with these last steps missed up to ``step``, float32 [n]."""
    missed = torch.where(last < 0, step - ~last, 0)
    return torch.where(missed > 0, (missed.double() * log_beta2).exp(), 1).float()


def exact_root(values: Tensor) -> Tensor:
    """Computes correctly rounded square roots; torch's own in float32 on CPU may be off by one bit."""
    return values.double().sqrt().to(values.dtype)
