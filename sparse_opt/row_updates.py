"""What CowClip and the embedding optimizers share: one lookup, its rule, and the work on the rows of a backward pass.

On CPU in float32 the numba kernels do it, elsewhere row_gradients.py in torch. Both give a clip factor per row and keep
the statistics that a handle reports.
"""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from . import cpu_kernels
from .clip import ClipRule, NoClip, clip_scales, row_norms
from .lookups import Lookup
from .row_gradients import LookupLayout, RowGradients, row_gradients

_NO_WEIGHTS = np.empty(0, np.float32)


@dataclass(frozen=True)
class TableStats:
    """How often a table's rows were clipped, for the rows that this process holds.

    Attributes:
        rows: rows updated since attaching; a row counts once in each step that has its id.
        clipped: share of them whose gradient was over its limit, in [0, 1].
        median_ratio: median of ``||g|| / limit`` over the rows of the latest step, above 1 where most were clipped;
            NaN without rows.
    """

    rows: int
    clipped: float
    median_ratio: float


@dataclass
class Backward:
    """What one backward pass of a lookup needs: the ids as the lookup saw them and the gradient of its output."""

    indices: Tensor
    offsets: Tensor
    id_weights: Tensor | None
    output_grad: Tensor


class LookupRows:
    """The rows of one lookup under a clip rule.

    Args:
        lookup: the lookup.
        rule: clip rule of its tables.
        clip_columns: for each table name how many leading columns are measured and clipped; all where absent.
        exclude: tables left unclipped.

    Attributes:
        column_feature: feature of each output column, int64 [sum D].
        column_is_clipped: whether that column is measured and clipped, bool [sum D].

    Raises:
        ValueError: more clip columns than the table has.
    """

    def __init__(self, lookup: Lookup, rule: ClipRule, clip_columns: Mapping[str, int], exclude: Sequence[str] = ()):
        self.lookup = lookup
        dims = [shard.embedding_dim for shard in lookup.shards]
        self.clip_columns = [
            _checked_columns(shard.name, clip_columns.get(shard.name, shard.embedding_dim), shard.embedding_dim)
            for shard in lookup.shards
        ]
        limits = [
            (NoClip() if shard.name in exclude else rule).limit(columns)
            for shard, columns in zip(lookup.shards, self.clip_columns, strict=True)
        ]
        device = lookup.flat_weights().device
        self.layout = LookupLayout(
            feature_table=torch.tensor(lookup.feature_table, device=device),
            feature_column=torch.tensor(lookup.column_offsets, device=device),
            rows=torch.tensor([shard.rows for shard in lookup.shards], device=device),
            dim=torch.tensor(dims, device=device),
            start=torch.tensor(lookup.weight_offsets, device=device),
            max_dim=max(dims),
        )
        features, starts = lookup.feature_table, lookup.column_offsets
        widths = torch.tensor([dims[table] for table in features], device=device)
        self.column_feature = torch.repeat_interleave(torch.arange(len(features), device=device), widths)
        lane = torch.arange(int(widths.sum()), device=device) - torch.tensor(starts, device=device)[self.column_feature]
        clipped = torch.tensor([self.clip_columns[table] for table in features], device=device)
        self.column_is_clipped = lane < clipped[self.column_feature]
        self._clip_columns = torch.tensor(self.clip_columns, device=device)
        self._r = torch.tensor([limit.r for limit in limits], device=device)
        self._floor = torch.tensor([limit.floor for limit in limits], device=device)
        self._per_occurrence = torch.tensor([limit.per_occurrence for limit in limits], device=device)
        self._limits = (self._clip_columns, self._r, self._floor, self._per_occurrence)
        # First and one past the last feature of each table.
        tables = np.arange(len(dims))
        self._features = np.searchsorted(features, tables, "left"), np.searchsorted(features, tables, "right")
        self._rows_seen = torch.zeros(len(dims), dtype=torch.int64, device=device)
        self._rows_clipped = torch.zeros(len(dims), dtype=torch.int64, device=device)
        self._latest = (torch.empty(0, device=device), torch.empty(0, dtype=torch.int64, device=device))

    def id_factors(self, backward: Backward) -> Tensor:
        """Clip factor of each id's row, float [nnz]. Raises ValueError for an id outside its table (on CPU)."""
        nnz = backward.indices.numel()
        if not self.runs_compiled(backward):
            rows = self.torch_gradients(backward)
            return self.torch_factors(rows)[rows.counts.slot]
        factors = torch.empty(nnz)
        self.run_kernel(cpu_kernels.factors_of_ids, backward, factors.numpy())
        return factors

    def runs_compiled(self, backward: Backward) -> bool:
        weights, grad = self.lookup.flat_weights(), backward.output_grad
        return weights.device.type == "cpu" and weights.dtype == grad.dtype == torch.float32

    def run_kernel(self, kernel: Callable[..., int], backward: Backward, *arguments: Any) -> None:
        """Runs a kernel of cpu_kernels.py over all tables, on as many threads as torch uses, and keeps the ratios."""
        batch, (first, last) = backward.output_grad.shape[0], self._features
        indices = backward.indices.long().numpy()
        offsets = backward.offsets.long().numpy()
        begins = offsets[np.append(first, last[-1]) * batch]
        ratios, used = np.empty(len(indices), np.float32), np.zeros(len(first), np.int64)
        id_weights = _NO_WEIGHTS if backward.id_weights is None else backward.id_weights.float().numpy()
        layout = self.layout
        per_table = [tensor.numpy() for tensor in (layout.rows, layout.dim, layout.start, *self._limits)]
        common = (begins, first, last, layout.feature_column.numpy(), batch, *per_table)
        lookup_arrays = (indices, offsets, id_weights, backward.output_grad.contiguous().numpy())
        weights = self.lookup.flat_weights().numpy()
        groups = _balanced_groups(np.diff(begins), torch.get_num_threads())
        inputs = (*common, *lookup_arrays, weights, *arguments, ratios, used)
        bad = _in_threads([partial(kernel, group, *inputs) for group in groups])
        for place in bad:
            if place >= 0:
                self._raise_bad_id(int(np.searchsorted(begins, place, side="right")) - 1, int(indices[place]))
        self._record_compiled(ratios, used, begins)

    def torch_gradients(self, backward: Backward) -> RowGradients:
        return row_gradients(
            self.layout,
            backward.indices,
            backward.offsets,
            backward.id_weights,
            backward.output_grad,
            self.lookup.flat_weights(),
        )

    def torch_factors(self, rows: RowGradients) -> Tensor:
        """Clip factor of each row, float [nnz], padded like the rows."""
        measured = self.clipped_lanes(rows)
        grad, weight = rows.grad.where(measured, 0), rows.weight.where(measured, 0)
        limits = (self._r[rows.table] * row_norms(weight)).clamp_min(self._floor[rows.table])
        limits = torch.where(self._per_occurrence[rows.table], limits * rows.counts.count, limits)
        ratios = torch.nan_to_num(row_norms(grad) / limits, nan=0.0, posinf=torch.inf)
        ones = rows.counts.real.long()
        self._rows_seen.scatter_add_(0, rows.table, ones)
        self._rows_clipped.scatter_add_(0, rows.table, ones * (ratios > 1))
        self._latest = (ratios.float(), torch.where(rows.counts.real, rows.table, -1))
        return clip_scales(grad, limits)

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
        }

    def _record_compiled(self, ratios: np.ndarray, used: np.ndarray, begins: np.ndarray) -> None:
        tables = np.repeat(np.arange(len(used)), used)
        first = np.repeat(begins[:-1] - (np.cumsum(used) - used), used)
        kept = ratios[first + np.arange(len(tables))]
        self._rows_seen += torch.from_numpy(used)
        self._rows_clipped += torch.from_numpy(np.bincount(tables[kept > 1], minlength=len(used)))
        self._latest = (torch.from_numpy(kept), torch.from_numpy(tables))

    def _raise_bad_id(self, table: int, row: int) -> None:
        shard = self.lookup.shards[table]
        raise ValueError(
            f"id {row} is outside table {shard.name!r}, which holds {shard.rows} rows here; "
            "map ids into [0, num_embeddings) before the lookup"
        )


def _checked_columns(table: str, columns: int, dim: int) -> int:
    if not 1 <= columns <= dim:
        raise ValueError(f"clip_columns of table {table!r} must be in [1, {dim}], its width, got {columns}")
    return columns


def _balanced_groups(work: np.ndarray, groups: int) -> list[np.ndarray]:
    """Table numbers in at most ``groups`` groups of about the same work: the largest next to the least loaded."""
    members: list[list[int]] = [[] for _ in range(min(groups, len(work)))]
    load = np.zeros(len(members))
    for table in np.argsort(work, kind="stable")[::-1]:
        lightest = int(load.argmin())
        members[lightest].append(int(table))
        load[lightest] += work[table]
    return [np.array(group) for group in members]


@cache
def _threads(count: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(count, thread_name_prefix="cowrec-rows")


def _in_threads(jobs: list[Callable[[], int]]) -> list[int]:
    if len(jobs) == 1:
        return [jobs[0]()]
    others = [_threads(len(jobs) - 1).submit(job) for job in jobs[1:]]
    return [jobs[0](), *(other.result() for other in others)]
