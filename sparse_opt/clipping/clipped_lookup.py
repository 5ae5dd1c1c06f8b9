"""One lookup under a clip rule: the limits of its tables, its statistics, and the back end for its rows."""

from collections.abc import Mapping

import torch

from cowrec.sparse_opt.tbe.column_shards import ColumnShards, Groups
from cowrec.sparse_opt.tbe.lookup import BagsOfLookup, TbeLookup, layout_of

from .accumulation import Accumulation
from .row_backends import NumbaRows, RowBackend, RowFactors, TorchRows, TritonRows
from .statistics import ClipStatistics
from .table_rules import TableLimits, TableRules


class ClippedLookup:
    """Lookup under a clip rule, and the back end that works on the rows of its batches.

    Args:
        clip_columns: by table name, leading columns that are measured and clipped; all where there is none.
        groups: process groups of column shards, from :func:`groups_of_columns`.

    Attributes:
        layout: geometry of the lookup.
        bags: finds the bags of its forward passes.
        accumulation: its backward passes that wait for others of their step.
        limits: limits of its tables.
        statistics: clip statistics.
        in_torch: work on its rows in torch, which every lookup can do.
        rows: the back end.

    Raises:
        ValueError: clip_columns is out of range, or FBGEMM caches rows that only torch could clip.
    """

    def __init__(
        self,
        lookup: TbeLookup,
        rules: TableRules,
        clip_columns: Mapping[str, int],
        groups: Groups | None = None,
    ):
        self.lookup, self.layout, weights = lookup, layout_of(lookup), lookup.flat_weights()
        dims = [shard.embedding_dim for shard in lookup.shards]
        self.bags = BagsOfLookup(lookup.feature_table, dims, weights.device, is_sequence=lookup.is_sequence)
        self.accumulation = Accumulation(self.bags)
        self.limits = TableLimits(lookup, rules, clip_columns)
        self.statistics = ClipStatistics(lookup)
        adds_up = rules.scope == "row" and self.limits.clipped_column_shards
        columns = ColumnShards(lookup, self.layout, groups or {}, adds_up) if adds_up else None
        factors = RowFactors(lookup, self.limits, columns, self.statistics)
        kernels = TritonRows if weights.is_cuda else NumbaRows
        device: RowBackend = kernels(lookup, self.layout, self.limits, self.statistics)
        self.in_torch = TorchRows(lookup, self.layout, factors, device)
        self.rows: RowBackend = device if self.is_local and weights.dtype == torch.float32 else self.in_torch
        if lookup.is_cached and not self.is_local:
            raise ValueError(
                f"table {lookup.shards[0].name!r} is behind FBGEMM's cache, where only rules for single rows that are"
                f" complete on their rank can be applied, not {rules.name!r} or column shards; shard it under"
                ' compute_kernel="fused_uvm"'
            )

    @property
    def is_local(self) -> bool:
        """True if a row's limit and update depend only on what this process has of the row."""
        torch_rows = self.in_torch
        return self.limits.scope == "row" and torch_rows.factors.columns is None and not torch_rows.gathers_rows
