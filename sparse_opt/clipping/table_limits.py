"""Limits that a clip rule sets for the tables of one lookup."""

from collections.abc import Mapping
from math import inf

import torch

from cowrec.sparse_opt.kernels.layout import TableClips
from cowrec.sparse_opt.tbe.lookup import TableShard, TbeLookup

from .table_rules import TableRules


class TableLimits:
    """Limits that clip rules set for the tables of a lookup.

    Args:
        lookup: lookup that holds the tables.
        rules: clip rules.
        clip_columns: by table name, leading columns that are measured and clipped; all where there is none.

    Attributes:
        scope: the rules'.
        per_table: limit of each table.
        columns: columns of each table here that are measured and clipped.
        clips: limits and columns of the tables, as tensors.
        excluded: whether each table has no limit, bool [tables].
        clipped_column_shards: names of tables that are sharded column-wise and clipped.

    Raises:
        ValueError: clip_columns is out of range.
    """

    def __init__(self, lookup: TbeLookup, rules: TableRules, clip_columns: Mapping[str, int]):
        shards, device = lookup.shards, lookup.flat_weights().device
        self.scope, self._names = rules.scope, [shard.name for shard in shards]
        self._row_columns = [_checked_columns(shard, clip_columns.get(shard.name, shard.table_dim)) for shard in shards]
        self.columns = [
            min(max(columns - shard.first_column, 0), shard.embedding_dim)
            for shard, columns in zip(shards, self._row_columns, strict=True)
        ]
        unclipped = rules.unclipped(self._names)
        self.excluded = torch.tensor([name in unclipped for name in self._names], device=device)
        self.clips = TableClips(
            torch.tensor(self.columns, device=device),
            *(
                torch.empty(len(shards), dtype=kind, device=device)
                for kind in (torch.float32, torch.float32, torch.bool)
            ),
        )
        self.set_rules(rules)
        self.clipped_column_shards = {
            shard.name
            for shard, limit in zip(shards, self.per_table, strict=True)
            if shard.column_ranks and limit.floor < inf
        }

    def set_rules(self, rules: TableRules) -> None:
        """Takes the limits of rules, in the same tensors; later rules must be of the kinds of the first."""
        self.per_table = [
            rules.of(name).limit(columns) for name, columns in zip(self._names, self._row_columns, strict=True)
        ]
        for tensor, values in zip(self.clips[1:], zip(*self.per_table, strict=True), strict=True):
            tensor.copy_(torch.tensor(values, dtype=tensor.dtype))


def _checked_columns(shard: TableShard, columns: int) -> int:
    if not 1 <= columns <= shard.table_dim:
        raise ValueError(
            f"clip_columns of table {shard.name!r} must be in [1, {shard.table_dim}], its width, got {columns}"
        )
    return columns
