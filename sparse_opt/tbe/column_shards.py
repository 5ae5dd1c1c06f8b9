"""Norms of rows whose columns are sharded: squares are added up over the shards of a rank and over the ranks.

Every column shard of a table gets the same ids in the same order. The ranks that hold shards of a table therefore have
the same distinct rows, and one all-reduce adds up the squares. Sums are in float64, so that the result does not depend
on the sharding of the columns.
"""

from collections.abc import Mapping, Sequence, Set
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..kernels.layout import LookupLayout
from ..kernels.torch_rows import RowGradients, count_rows
from .lookup import TableShard, TbeLookup

Groups = Mapping[tuple[int, ...], dist.ProcessGroup]
"""Process groups by their ranks, ascending."""


def groups_of_columns(tables: Mapping[str, Sequence[Sequence[int]]]) -> Groups:
    """Creates the process groups of column shards, given the ranks of each part of a table. All ranks call together."""
    world = tuple(range(dist.get_world_size())) if tables else ()
    holders = [part for parts in tables.values() for part in parts]
    several = sorted({ranks for part in holders if len(ranks := tuple(sorted(set(part)))) > 1})
    everyone: Any = dist.group.WORLD
    new_group: Any = dist.new_group
    return {ranks: everyone if ranks == world else new_group(list(ranks)) for ranks in several}


def copy_from_first_shards(
    tables: Mapping[str, Sequence[Sequence[int]]], parts: Sequence[tuple[TableShard, Tensor]]
) -> None:
    """Copies values of rows from the shard with the first column to all column shards. All ranks must call together.

    ``tables`` are as in :func:`groups_of_columns`. ``parts`` are this rank's shards, of these and other tables, with
    the values of their rows, int32, which are updated.
    """
    groups = groups_of_columns(tables)
    for name, ranks in sorted((name, tuple(part)) for name, of_rows in tables.items() for part in of_rows):
        held = [
            (shard.first_column == 0, values)
            for shard, values in parts
            if shard.name == name and shard.column_ranks == ranks
        ]
        if not held:
            continue
        least = torch.iinfo(torch.int32).min
        known = [values if is_first else torch.full_like(values, least) for is_first, values in held]
        first = torch.stack(known).amax(0)
        group = groups.get(tuple(sorted(set(ranks))))
        if group is not None:
            dist.all_reduce(first, dist.ReduceOp.MAX, group=group)
        for _, values in held:
            values.copy_(first)


def column_partners(lookup: TbeLookup, groups: Groups) -> list[dist.ProcessGroup]:
    """Groups in which a rank reduces, one after the other, to agree with all ranks that hold columns of its rows."""
    partners = {tuple(sorted(set(shard.column_ranks))) for shard in lookup.shards} & groups.keys()
    return [groups[ranks] for ranks in sorted(partners)] * (1 if lookup.has_equal_partners else dist.get_world_size())


class ColumnShards:
    """Sums of squared norms over the column shards of one lookup's rows.

    Ranks exchange only the norms of ``clipped`` tables; a rank that holds only other tables takes no part.
    """

    def __init__(self, lookup: TbeLookup, layout: LookupLayout, groups: Groups, clipped: Set[str]):
        self._layout = layout
        self._names = [shard.name for shard in lookup.shards]
        holders = {
            shard.name: tuple(sorted(set(shard.column_ranks))) if shard.name in clipped else ()
            for shard in lookup.shards
        }
        self._group_of = {name: groups.get(ranks) for name, ranks in holders.items()}
        self._first_group = next((group for group in self._group_of.values() if group), None)
        self._has_equal_partners = lookup.has_equal_partners
        # The order of the sums: tables of the same ranks are neighbours, and shards of a table share rows.
        tables = sorted(holders, key=lambda name: (holders[name], name))
        rows = {shard.name: shard.rows for shard in lookup.shards}
        ends = torch.tensor([rows[name] for name in tables]).cumsum(0).tolist()
        first = dict(zip(tables, [0, *ends], strict=False))
        device = layout.start.device
        self._first_row = torch.tensor([first[name] for name in self._names], device=device)
        ranks = list(dict.fromkeys(holders[name] for name in tables))
        self._groups = [groups.get(own) for own in ranks]
        self._group_index = torch.tensor([ranks.index(holders[name]) for name in self._names], device=device)

    def add_up(self, rows: RowGradients, squares: Tensor) -> Tensor:
        """Adds up squares over the columns here to those of complete rows, float64 [2, nnz]."""
        if self._has_equal_partners:
            return _over_ranks(squares.contiguous(), self._first_group)
        layout, table = self._layout, rows.table
        row = (rows.element[:, 0] - layout.start[table]) // layout.dim[table]
        complete = count_rows(self._first_row[table] + row)
        added = torch.zeros_like(squares).index_add_(1, complete.slot, squares.where(rows.counts.real, 0))
        group = self._group_index[table[complete.occurrence]]
        sizes = group.new_zeros(len(self._groups)).index_add_(0, group, complete.real.long()).tolist()
        parts = added[:, : sum(sizes)].split(sizes, dim=1)
        summed = [_over_ranks(part.contiguous(), to) for part, to in zip(parts, self._groups, strict=True)]
        return torch.cat(summed, dim=1)[:, complete.slot]

    def add_up_tables(self, squares: Sequence[Tensor]) -> list[Tensor]:
        """Does :meth:`add_up` for all rows of each table: float64 [2, V] for each."""
        added: dict[str, Tensor] = {}
        for name, shard_squares in sorted(zip(self._names, squares, strict=True), key=lambda pair: pair[0]):
            added[name] = added[name] + shard_squares if name in added else shard_squares
        summed = {name: _over_ranks(table.contiguous(), self._group_of[name]) for name, table in added.items()}
        return [summed[name] for name in self._names]


def _over_ranks(squares: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Adds up squares over a group, in place; ``group`` is None where this rank holds all shards."""
    if group is not None and squares.numel():
        dist.all_reduce(squares, group=group)
    return squares
