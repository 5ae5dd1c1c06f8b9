"""Limits that a clip rule sets for the tables of one lookup."""

from collections.abc import Mapping, Sequence
from math import inf

import torch

from cowrec.sparse_opt.algorithm.clip import ClipRule, NoClip
from cowrec.sparse_opt.kernels.layout import TableClips
from cowrec.sparse_opt.tbe.lookup import TableShard, TbeLookup


class TableLimits:
    """Limits of a clip rule for the tables of a lookup.

    Args:
        lookup: lookup that holds the tables.
        rule: clip rule.
        clip_columns: by table name, leading columns that are measured and clipped; all where there is none.
        exclude: tables left unclipped.

    Attributes:
        scope: the rule's.
        per_table: limit of each table.
        columns: columns of each table here that are measured and clipped.
        clips: limits and columns of the tables, as tensors.
        excluded: whether each table is excluded, bool [tables].
        clipped_column_shards: names of tables that are sharded column-wise and clipped.

    Raises:
        ValueError: clip_columns is out of range.
    """

    def __init__(self, lookup: TbeLookup, rule: ClipRule, clip_columns: Mapping[str, int], exclude: Sequence[str]):
        shards, device = lookup.shards, lookup.flat_weights().device
        self.scope = rule.scope
        self._row_columns = [_checked_columns(shard, clip_columns.get(shard.name, shard.table_dim)) for shard in shards]
        self.columns = [
            min(max(columns - shard.first_column, 0), shard.embedding_dim)
            for shard, columns in zip(shards, self._row_columns, strict=True)
        ]
        self._is_excluded = [shard.name in exclude for shard in shards]
        self.excluded = torch.tensor(self._is_excluded, device=device)
        self.clips = TableClips(
            torch.tensor(self.columns, device=device),
            *(
                torch.empty(len(shards), dtype=kind, device=device)
                for kind in (torch.float32, torch.float32, torch.bool)
            ),
        )
        self.set_rule(rule)
        self.clipped_column_shards = {
            shard.name
            for shard, limit in zip(shards, self.per_table, strict=True)
            if shard.column_ranks and limit.floor < inf
        }

    def set_rule(self, rule: ClipRule) -> None:
        """Takes the limits of a rule, in the same tensors; a later rule must be of the kind of the first."""
        self.per_table = [
            (NoClip() if excluded else rule).limit(columns)
            for excluded, columns in zip(self._is_excluded, self._row_columns, strict=True)
        ]
        for tensor, values in zip(self.clips[1:], zip(*self.per_table, strict=True), strict=True):
            tensor.copy_(torch.tensor(values, dtype=tensor.dtype))


def _checked_columns(shard: TableShard, columns: int) -> int:
    if not 1 <= columns <= shard.table_dim:
        raise ValueError(
            f"clip_columns of table {shard.name!r} must be in [1, {shard.table_dim}], its width, got {columns}"
        )
    return columns
