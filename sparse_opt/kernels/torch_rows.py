"""Gradients of a lookup's distinct rows from the gradient of its output, in plain torch, on any device.

No step waits for the device: the number of distinct rows U stays there, and all rows' tensors are padded to the number
of ids, ``nnz``. Sizes: T features, B bags each, D the widest table, nnz ids in all.
"""

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from .layout import LookupLayout


@dataclass(frozen=True)
class RowCounts:
    """Distinct rows of a list of ids.

    Attributes:
        slot: index of each id's row among the distinct rows, int64 [nnz].
        occurrence: first occurrence of each distinct row, int64 [nnz].
        count: occurrences of each distinct row, int64 [nnz].
        real: True for the first U entries, bool [nnz]. The padding after them repeats row 0.
    """

    slot: Tensor
    occurrence: Tensor
    count: Tensor
    real: Tensor


class LookupIds(NamedTuple):
    """Ids of one lookup, sorted by row; found once, for the forward and the backward pass.

    Attributes:
        bag: bag of each id over all features, feature-major, int [nnz].
        order: index of each id in order of the rows, int64 [nnz]; a row's ids stay in the order of the batch.
        row: row of each id in that order, among the rows of all tables, int [nnz].
        begin: offset in that order of each distinct row's first id, then nnz, int [nnz + 1].
        batch: B.
    """

    bag: Tensor
    order: Tensor
    row: Tensor
    begin: Tensor
    batch: int


def find_rows(layout: LookupLayout, indices: Tensor, offsets: Tensor) -> LookupIds:
    """Finds the rows of a lookup's ids.

    Args:
        layout: the lookup's geometry.
        indices: row of each id in its table, int [nnz].
        offsets: offset of each bag in ``indices``, feature-major, int [T * B + 1].
    """
    bag, batch = bag_of_ids(offsets, indices.numel()), (len(offsets) - 1) // len(layout.feature_table)
    row, order = torch.sort(layout.first_row[layout.feature_table[bag // batch]] + indices.long(), stable=True)
    return LookupIds(bag, order, row, row_begins(row), batch)


def row_begins(row: Tensor) -> Tensor:
    """Finds where each distinct value of sorted rows begins, then their number: int64 [nnz + 1] of [nnz]."""
    slot = torch.zeros_like(row, dtype=torch.int64)
    slot[1:] = (row[1:] != row[:-1]).cumsum(0)
    return torch.searchsorted(slot, torch.arange(len(row) + 1, device=row.device))


def count_ids(ids: LookupIds) -> RowCounts:
    """Counts the occurrences of the distinct rows."""
    return _count_sorted(ids.order, ids.begin.long())


def count_rows(keys: Tensor) -> RowCounts:
    """Finds the distinct values of ``keys``, int [nnz], and their occurrences."""
    ordered, order = torch.sort(keys, stable=True)
    return _count_sorted(order, row_begins(ordered))


def _count_sorted(order: Tensor, begin: Tensor) -> RowCounts:
    count = begin[1:] - begin[:-1]
    real = count > 0
    rows = torch.arange(len(order), device=order.device)
    slot_in_order = torch.repeat_interleave(rows, count, output_size=len(order))
    slot = torch.empty_like(order).scatter_(0, order, slot_in_order)
    occurrence = order[torch.where(real, begin[:-1], 0)]
    return RowCounts(slot, occurrence, torch.where(real, count, count[:1]), real)


@dataclass(frozen=True)
class RowSums:
    """Distinct rows of one backward pass and their summed gradients, padded like :class:`RowCounts`.

    Attributes:
        counts: occurrences of the rows.
        bag: bag of each id over all features, feature-major, int64 [nnz]; empty where rows come from several ranks.
        table: table of each row, int64 [nnz].
        start: offset of each row's first element in the flat weights, int64 [nnz].
        sums: gradients, float64 [nnz, D], zero in the columns that a row does not have.
        dtype: type to round the gradients to.
    """

    counts: RowCounts
    bag: Tensor
    table: Tensor
    start: Tensor
    sums: Tensor
    dtype: torch.dtype


@dataclass(frozen=True)
class RowGradients:
    """Distinct rows of one backward pass and their gradients, padded like :class:`RowCounts`.

    Attributes:
        counts: occurrences of the rows.
        bag: as in :class:`RowSums`.
        table: table of each row, int64 [nnz].
        element: index of each row's elements in the flat weights, int64 [nnz, D]; outside, of its first element.
        inside: False where a row is narrower than D, bool [nnz, D].
        weight: weights of the rows, float [nnz, D], zero outside.
        grad: gradients of the rows, float [nnz, D], zero outside.
    """

    counts: RowCounts
    bag: Tensor
    table: Tensor
    element: Tensor
    inside: Tensor
    weight: Tensor
    grad: Tensor


def row_sums(layout: LookupLayout, ids: LookupIds, id_weights: Tensor | None, output_grad: Tensor) -> RowSums:
    """Sums the output gradient over each row's occurrences: ``g[row] = sum_i id_weight[i] * output_grad[bag(i)]``.

    Args:
        layout: the lookup's geometry.
        ids: of the lookup.
        id_weights: factor of each id in its bag's sum, float [nnz]; None for ones.
        output_grad: gradient of the lookup's output, float [B, sum of the features' D].
    """
    feature, sample = ids.bag // ids.batch, ids.bag % ids.batch
    dims = layout.dim[layout.feature_table[feature]]
    inside = torch.arange(layout.max_dim, device=output_grad.device) < dims[:, None]
    column = layout.feature_column[feature][:, None] + torch.arange(layout.max_dim, device=output_grad.device)
    column = column.clamp_max(output_grad.shape[1] - 1)
    # Summed in float64, so that a row's gradient does not depend on the order of its occurrences.
    contribution = torch.where(inside, output_grad[sample[:, None], column].double(), 0)
    if id_weights is not None:
        contribution = contribution * id_weights[:, None]
    sums = torch.zeros_like(contribution).index_add_(0, count_ids(ids).slot, contribution)
    return with_sums(layout, ids, sums, output_grad.dtype)


def with_sums(layout: LookupLayout, ids: LookupIds, sums: Tensor, dtype: torch.dtype) -> RowSums:
    """Combines distinct rows with their summed gradients, float64 [nnz, D], of an output gradient of this dtype."""
    counts = count_ids(ids)
    table = layout.feature_table[ids.bag[counts.occurrence] // ids.batch]
    row = ids.row[ids.begin[:-1].clamp_max(len(ids.row) - 1).where(counts.real, 0)] - layout.first_row[table]
    start = layout.start[table] + row * layout.dim[table]
    sums = torch.where(counts.real[:, None], sums, sums[:1])
    return RowSums(counts, ids.bag, table, start, sums, torch.promote_types(dtype, torch.float32))


def sums_of_ranks(rows: RowSums, group: ProcessGroup) -> RowSums:
    """Combines the rows of all ranks of a group: adds up their occurrences and averages their gradients.

    Each rank sends its distinct rows. All ranks must call together; they wait for each other's number of rows.
    """
    own = torch.stack([rows.start, rows.table, rows.counts.count], dim=1).double()
    packed = torch.cat([own, rows.sums], dim=1)[rows.counts.real]
    sizes = [packed.new_empty(1) for _ in range(group.size())]
    dist.all_gather(sizes, packed.new_tensor([len(packed)]), group=group)
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
        rows.bag[:0],
        table[counts.occurrence],
        start[counts.occurrence],
        torch.where(counts.real[:, None], sums, sums[:1]),
        rows.dtype,
    )


def with_weights(rows: RowSums, layout: LookupLayout, weights: Tensor) -> RowGradients:
    """Rounds rows' gradients and gathers the rows from the lookup's flat weights, float [sum rows * D]."""
    column = torch.arange(layout.max_dim, device=weights.device)
    inside = column < layout.dim[rows.table][:, None]
    start = rows.start[:, None]
    element = torch.where(inside, start + column, start)
    weight = torch.where(inside, weights[element].to(rows.dtype), 0)
    return RowGradients(rows.counts, rows.bag, rows.table, element, inside, weight, rows.sums.to(rows.dtype))


def bag_of_ids(offsets: Tensor, nnz: int) -> Tensor:
    """Finds the bag of each id over all features, feature-major, int64 [nnz]; ``offsets`` int [T * B + 1]."""
    bags = torch.arange(offsets.numel() - 1, device=offsets.device)
    return torch.repeat_interleave(bags, (offsets[1:] - offsets[:-1]).long(), output_size=nnz)
