"""What CowClip and the embedding optimizers share: one lookup, its rule, and the work on the rows of a backward pass.

On CPU in float32 the numba kernels do it, elsewhere row_gradients.py in torch, and so for rules that bound more than a
row's norm. Both give a clip factor per row and keep the statistics that a handle reports.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import inf
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import record_function

from cowrec.sparse_opt.algorithm.clip import ClipRule, NoClip, scales_of_norms
from cowrec.sparse_opt.kernels import cpu_rows
from cowrec.sparse_opt.kernels.threads import balanced_groups, in_threads
from cowrec.sparse_opt.kernels.torch_rows import (
    LookupIds,
    LookupLayout,
    RowGradients,
    RowSums,
    row_sums,
    rows_of_ids,
    sums_of_ranks,
    with_weights,
)
from cowrec.sparse_opt.tbe.column_shards import ColumnShards, Groups
from cowrec.sparse_opt.tbe.lookup import TableShard, TbeLookup

ROW_GRADIENTS = "row_gradients"
"""What torch's profiler calls the first part of the work on rows, within the update of the embeddings."""
_NO_WEIGHTS = np.empty(0, np.float32)
_WORK_OF_ROW = 4
"""Ids that take as long as one distinct row."""


@dataclass(frozen=True)
class TableStats:
    """How often a table's rows were clipped, for the rows whose first columns this process holds.

    Those of a table that every process holds are the first one's.

    Attributes:
        rows: rows updated since attaching; a row counts once in each step that has its id.
        clipped: share of them whose gradient was over its limit, in [0, 1]; where the limit is their table's or that of
            all tables, so is the gradient.
        median_ratio: median of ``||g|| / limit`` over the rows of the latest step, above 1 where most were clipped;
            NaN without rows.
    """

    rows: int
    clipped: float
    median_ratio: float


@dataclass
class Backward:
    """What one backward pass of a lookup needs: the ids as the lookup saw them and the gradient of its output.

    ``ids`` are the rows behind them where the forward pass has found them already.
    """

    indices: Tensor
    offsets: Tensor
    id_weights: Tensor | None
    output_grad: Tensor
    ids: LookupIds | None = None


class LookupRows:
    """The rows of one lookup under a clip rule.

    Args:
        lookup: the lookup.
        rule: clip rule of its tables.
        clip_columns: for each table name how many leading columns are measured and clipped; all where absent.
        exclude: tables left unclipped.
        groups: processes that hold the column shards of a table, by their ranks; see :func:`groups_of_columns`.

    Attributes:
        columns: adds norms up over the column shards of rows; None where rows are whole, or nothing is clipped.
        adds_up_norms: whether :meth:`torch_factors` adds norms up over the ranks.
        gathers_rows: whether :meth:`torch_sums` collects the rows of all ranks. Under either of the two all ranks call
            both at every step, with ids or without.
        limits: each table's limit.

    Raises:
        ValueError: more clip columns than the table has.
    """

    def __init__(
        self,
        lookup: TbeLookup,
        rule: ClipRule,
        clip_columns: Mapping[str, int],
        exclude: Sequence[str] = (),
        groups: Groups | None = None,
    ):
        self.lookup = lookup
        self.scope = rule.scope
        self.adds_up_norms = {"row": False, "field": lookup.is_split, "global": lookup.num_ranks > 1}[rule.scope]
        self.gathers_rows = lookup.is_replicated and lookup.num_ranks > 1
        self._is_copy = lookup.is_replicated and dist.get_rank(lookup.process_group) > 0
        dims = [shard.embedding_dim for shard in lookup.shards]
        of_rows = [_checked_columns(shard, clip_columns.get(shard.name, shard.table_dim)) for shard in lookup.shards]
        self.clip_columns = [
            min(max(columns - shard.first_column, 0), shard.embedding_dim)
            for shard, columns in zip(lookup.shards, of_rows, strict=True)
        ]
        self.limits = [
            (NoClip() if shard.name in exclude else rule).limit(columns)
            for shard, columns in zip(lookup.shards, of_rows, strict=True)
        ]
        device = lookup.flat_weights().device
        self.layout = LookupLayout(
            feature_table=torch.tensor(lookup.feature_table, device=device),
            feature_column=torch.tensor(lookup.column_offsets, device=device),
            rows=torch.tensor([shard.rows for shard in lookup.shards], device=device),
            dim=torch.tensor(dims, device=device),
            start=torch.tensor(lookup.weight_offsets, device=device),
            max_dim=max(dims),
            size=lookup.flat_weights().numel(),
        )
        bounded = zip(lookup.shards, self.limits, strict=True)
        clipped = {shard.name for shard, limit in bounded if shard.column_ranks and limit.floor < inf}
        adds_up = rule.scope == "row" and bool(clipped)
        self.columns = ColumnShards(lookup, self.layout, groups or {}, clipped) if adds_up else None
        self._clip_columns = torch.tensor(self.clip_columns, device=device)
        self._r = torch.tensor([limit.r for limit in self.limits], device=device)
        self._floor = torch.tensor([limit.floor for limit in self.limits], device=device)
        self._per_occurrence = torch.tensor([limit.per_occurrence for limit in self.limits], device=device)
        self._is_excluded = torch.tensor([shard.name in exclude for shard in lookup.shards], device=device)
        # First and one past the last feature of each table.
        tables = np.arange(len(dims))
        features = lookup.feature_table
        self._features = np.searchsorted(features, tables, "left"), np.searchsorted(features, tables, "right")
        self._rows_seen = torch.zeros(len(dims), dtype=torch.int64, device=device)
        self._rows_clipped = torch.zeros(len(dims), dtype=torch.int64, device=device)
        self._latest = (torch.empty(0, device=device), torch.empty(0, dtype=torch.int64, device=device))
        self._latest_used = np.zeros(len(dims), np.int64)

    @property
    def decides_alone(self) -> bool:
        """Whether what this process has of a row in a backward pass is all that its limit and update depend on."""
        return self.scope == "row" and self.columns is None and not self.gathers_rows

    @property
    def waits_for_ranks(self) -> bool:
        return self.adds_up_norms or self.gathers_rows

    def id_factors(self, backward: Backward) -> Tensor:
        """Clip factor of each id's row, float [nnz]. Raises ValueError for an id outside its table (on CPU)."""
        nnz = backward.indices.numel()
        if not self.runs_compiled(backward):
            rows = self.torch_gradients(self.torch_sums(backward))
            return self.torch_factors(rows)[rows.counts.slot]
        factors = torch.empty(nnz)
        self.run_kernel(cpu_rows.factors_of_ids, backward, factors.numpy())
        return factors

    def runs_compiled(self, backward: Backward) -> bool:
        weights, grad = self.lookup.flat_weights(), backward.output_grad
        return self.decides_alone and weights.device.type == "cpu" and weights.dtype == grad.dtype == torch.float32

    def run_kernel(self, kernel: Callable[..., None], backward: Backward, *arguments: Any) -> None:
        """Sums the gradients of the rows of all tables, and runs a kernel of cpu_rows.py on them; keeps the ratios.

        On as many threads as torch uses.

        Raises:
            ValueError: an id outside its table; no row has then changed.
        """
        indices, offsets = backward.indices.long().numpy(), backward.offsets.long().numpy()
        begins, layout = self.begins(offsets), self.layout
        # A distinct row costs several times what an id does, and steps resemble each other.
        groups = balanced_groups(np.diff(begins) + _WORK_OF_ROW * self._latest_used)
        with record_function(ROW_GRADIENTS):
            id_weights = _NO_WEIGHTS if backward.id_weights is None else backward.id_weights.float().numpy()
            output_grad = backward.output_grad.contiguous().numpy()
            inputs = (begins, *self.bags_of(backward), layout.rows.numpy(), layout.dim.numpy(), indices, offsets)
            jobs = [partial(cpu_rows.sum_rows, group, *inputs, id_weights, output_grad) for group in groups]
            bad, sums = zip(*in_threads(jobs), strict=True)
            self.raise_bad_ids(bad, begins, indices)
        ratios, used = np.empty(len(indices), np.float32), np.zeros(len(begins) - 1, np.int64)
        per_table = [each.numpy() for each in (layout.dim, layout.start, *self.limit_tensors)]
        common = (begins, *per_table, self.lookup.flat_weights().numpy(), *arguments, ratios, used)
        in_threads([partial(kernel, group, *of_group, *common) for group, of_group in zip(groups, sums, strict=True)])
        self._latest_used = used
        self._record_compiled(ratios, used, begins)

    def bags_of(self, backward: Backward) -> tuple[np.ndarray, np.ndarray, np.ndarray, int]:
        """First and one past the last feature of each table, first output column of each feature, bags per feature."""
        return *self._features, self.layout.feature_column.numpy(), backward.output_grad.shape[0]

    def begins(self, offsets: np.ndarray) -> np.ndarray:
        """Place of each table's first id, and one past the last table's, [tables + 1]; ``offsets`` as the lookup's."""
        first, last = self._features
        return offsets[np.append(first, last[-1]) * ((len(offsets) - 1) // len(self.lookup.feature_table))]

    @property
    def limit_tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Clip columns, r, floor and whether per occurrence, each [tables]."""
        return self._clip_columns, self._r, self._floor, self._per_occurrence

    def raise_bad_ids(self, bad: Sequence[int], begins: np.ndarray, indices: np.ndarray) -> None:
        """Raises ValueError for the first place in ``indices`` that a kernel found outside its table; -1 is none."""
        for place in bad:
            if place >= 0:
                table = int(np.searchsorted(begins, place, side="right")) - 1
                shard = self.lookup.shards[table]
                raise ValueError(
                    f"id {int(indices[place])} is outside table {shard.name!r}, which holds {shard.rows} rows here; "
                    "map ids into [0, num_embeddings) before the lookup"
                )

    def torch_sums(self, backward: Backward) -> RowSums:
        """The distinct rows of a backward pass and their gradients; of replicated tables, those of all ranks."""
        with record_function(ROW_GRADIENTS):
            ids = backward.ids or rows_of_ids(self.layout, backward.indices, backward.offsets)
            rows = row_sums(self.layout, ids, backward.id_weights, backward.output_grad)
            return sums_of_ranks(rows, self.lookup.process_group) if self.gathers_rows else rows

    def torch_gradients(self, rows: RowSums) -> RowGradients:
        """Those gradients beside the rows as they are now."""
        return with_weights(rows, self.layout, self.lookup.flat_weights())

    def torch_factors(self, rows: RowGradients) -> Tensor:
        """Clip factor of each row, float [nnz], padded like the rows."""
        if self.scope != "row":
            return self.factors_of_norms(rows, *self.group_norms(self._table_squares(rows))[:, rows.table])
        measured = self.clipped_lanes(rows)
        parts = [part.where(measured, 0) for part in (rows.grad, rows.weight)]
        norms = torch.stack([torch.linalg.vector_norm(part, dim=1, dtype=torch.float64) for part in parts])
        if self.columns:
            norms = self.columns.add_up(rows, norms.square()).sqrt()
        return self.factors_of_norms(rows, *norms)

    def factors_of_norms(self, rows: RowGradients, norms: Tensor, weight_norms: Tensor) -> Tensor:
        """As :meth:`torch_factors`, from the norms of the gradient and weights that bound each row, float [nnz]."""
        dtype = rows.grad.dtype
        norms, weight_norms = norms.to(dtype), weight_norms.to(dtype)
        limits = (self._r[rows.table] * weight_norms).clamp_min(self._floor[rows.table])
        limits = torch.where(self._per_occurrence[rows.table], limits * rows.counts.count, limits)
        self.keep_ratios(torch.nan_to_num(norms / limits, nan=0.0, posinf=torch.inf), rows)
        return scales_of_norms(norms, limits)

    def keep_ratios(self, ratios: Tensor, rows: RowSums | RowGradients) -> None:
        """Keeps ``||g|| / limit`` of each row, float [nnz], for the statistics."""
        ones = rows.counts.real.long()
        self._rows_seen.scatter_add_(0, rows.table, ones)
        self._rows_clipped.scatter_add_(0, rows.table, ones * (ratios > 1))
        self._latest = (ratios.float(), torch.where(rows.counts.real, rows.table, -1))

    def group_norms(self, squares: Tensor) -> Tensor:
        """Norms of each table, or of all tables together, over all ranks, from the tables' squared norms here.

        ``squares`` is float64 [2, T], of gradients and of weights; returns [2, T]. Excluded tables do not count.
        """
        squares = squares.where(~self._is_excluded, 0)
        if self.scope == "global":  # ranks may hold different tables: no more than the sum has the same shape on them
            squares = squares.sum(1, keepdim=True)
        if self.adds_up_norms:
            dist.all_reduce(squares, group=self.lookup.process_group)
        return squares.sqrt().expand(-1, len(self.lookup.shards))

    def _table_squares(self, rows: RowGradients) -> Tensor:
        """Squared norms of each table's gradients and weights, over its rows of the batch; float64 [2, T]."""
        measured = self.clipped_lanes(rows) & rows.counts.real[:, None]
        squares = [part.double().where(measured, 0).square().sum(1) for part in (rows.grad, rows.weight)]
        zeros = torch.zeros(2, len(self.lookup.shards), dtype=torch.float64, device=measured.device)
        return zeros.index_add_(1, rows.table, torch.stack(squares))

    def clipped_lanes(self, rows: RowGradients) -> Tensor:
        """True for the columns that the clip measures and scales, bool [nnz, D]."""
        lane = torch.arange(self.layout.max_dim, device=rows.grad.device)
        return lane < self._clip_columns[rows.table][:, None]

    def stats(self) -> dict[str, TableStats]:
        ratios, tables = self._latest
        seen, clipped = self._rows_seen.tolist(), self._rows_clipped.tolist()
        return {
            shard.name: TableStats(seen[t], clipped[t] / max(seen[t], 1), ratios[tables == t].median().item())
            for t, shard in enumerate(self.lookup.shards)
            if shard.first_column == 0 and not self._is_copy  # each row once, whoever else holds it or its columns
        }

    def _record_compiled(self, ratios: np.ndarray, used: np.ndarray, begins: np.ndarray) -> None:
        tables = np.repeat(np.arange(len(used)), used)
        first = np.repeat(begins[:-1] - (np.cumsum(used) - used), used)
        kept = ratios[first + np.arange(len(tables))]
        self._rows_seen += torch.from_numpy(used)
        self._rows_clipped += torch.from_numpy(np.bincount(tables[kept > 1], minlength=len(used)))
        self._latest = (torch.from_numpy(kept), torch.from_numpy(tables))


def _checked_columns(shard: TableShard, columns: int) -> int:
    if not 1 <= columns <= shard.table_dim:
        raise ValueError(
            f"clip_columns of table {shard.name!r} must be in [1, {shard.table_dim}], its width, got {columns}"
        )
    return columns
