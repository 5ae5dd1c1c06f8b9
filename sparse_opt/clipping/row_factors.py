"""Clip factors of a backward pass's rows, in torch, with the collectives that add up norms over ranks.

Sizes: nnz ids, D the widest table, T tables.
"""

import torch
import torch.distributed as dist
from torch import Tensor

from cowrec.sparse_opt.algorithm.clip import limits_of_norms, scales_of_norms
from cowrec.sparse_opt.kernels.torch_rows import RowGradients
from cowrec.sparse_opt.tbe.column_shards import ColumnShards
from cowrec.sparse_opt.tbe.lookup import TbeLookup

from .statistics import ClipStatistics
from .table_limits import TableLimits


class RowFactors:
    """Clip factors of the rows of one lookup; records their ratios in the statistics.

    Args:
        lookup: the lookup.
        limits: limits of its tables.
        columns: adds up norms over column shards; None where rows are complete.
        statistics: receives ``||g|| / limit`` of each row.

    Attributes:
        adds_up_norms: whether a norm includes rows of other ranks.
    """

    def __init__(
        self, lookup: TbeLookup, limits: TableLimits, columns: ColumnShards | None, statistics: ClipStatistics
    ):
        self.columns = columns
        self.adds_up_norms = {"row": False, "field": lookup.splits_rows, "global": lookup.num_ranks > 1}[limits.scope]
        self._lookup, self._limits, self._statistics = lookup, limits, statistics

    def of_rows(self, rows: RowGradients) -> Tensor:
        """Computes the clip factor of each row, float [nnz], padded like the rows."""
        measured = self.clipped_columns(rows)
        if self._limits.scope != "row":
            return self.of_norms(rows, *self.group_norms(self._table_squares(rows, measured))[:, rows.table])
        parts = [part.where(measured, 0) for part in (rows.grad, rows.weight)]
        norms = torch.stack([torch.linalg.vector_norm(part, dim=1, dtype=torch.float64) for part in parts])
        if self.columns:
            norms = self.columns.add_up(rows, norms.square()).sqrt()
        return self.of_norms(rows, *norms)

    def of_norms(self, rows: RowGradients, norms: Tensor, weight_norms: Tensor) -> Tensor:
        """Computes :meth:`of_rows` from the norms of gradients and weights that bound each row, float [nnz]."""
        norms, weight_norms = norms.to(rows.grad.dtype), weight_norms.to(rows.grad.dtype)
        _, r, floor, per_occurrence = (each[rows.table] for each in self._limits.clips)
        limits = limits_of_norms(weight_norms, rows.counts.count, r, floor, per_occurrence)
        self._statistics.record(torch.nan_to_num(norms / limits, nan=0.0, posinf=torch.inf), rows)
        return scales_of_norms(norms, limits)

    def group_norms(self, squares: Tensor) -> Tensor:
        """Adds up the tables' squared norms here to norms of each table, or of all together, over all ranks.

        ``squares`` is float64 [2, T], of gradients and of weights; returns [2, T]. Excluded tables do not count.
        """
        squares = squares.where(~self._limits.excluded, 0)
        if self._limits.scope == "global":  # ranks may hold different tables: only the sum has one shape on all ranks
            squares = squares.sum(1, keepdim=True)
        if self.adds_up_norms:
            dist.all_reduce(squares, group=self._lookup.process_group)
        return squares.sqrt().expand(-1, len(self._lookup.shards))

    def clipped_columns(self, rows: RowGradients) -> Tensor:
        """True for the columns that the clip measures and scales, bool [nnz, D]."""
        column = torch.arange(rows.grad.shape[1], device=rows.grad.device)
        return column < self._limits.clips.columns[rows.table][:, None]

    def _table_squares(self, rows: RowGradients, measured: Tensor) -> Tensor:
        """Squared norms of each table's gradients and weights, over its rows of the batch; float64 [2, T]."""
        measured = measured & rows.counts.real[:, None]
        squares = [part.double().where(measured, 0).square().sum(1) for part in (rows.grad, rows.weight)]
        zeros = torch.zeros(2, len(self._lookup.shards), dtype=torch.float64, device=measured.device)
        return zeros.index_add_(1, rows.table, torch.stack(squares))
