"""Norms of rows whose columns are sharded: squares are added up over the shards, on one rank and over the ranks.

Every column shard of a table sees the same ids in the same order, so the ranks that hold its shards have the same
distinct rows, and one all-reduce among them adds up what each measured. Norms are summed in float64: the result does
not depend on how the columns are cut.
"""

from collections.abc import Mapping, Sequence, Set
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from cowrec.sparse_opt.kernels.torch_rows import LookupLayout, RowGradients, count_rows

from .lookup import TableShard, TbeLookup

Groups = Mapping[tuple[int, ...], dist.ProcessGroup]
"""Process groups by their ranks, ascending."""


def groups_of_columns(tables: Mapping[str, Sequence[int]]) -> Groups:
    """The process groups in which the column shards of some tables lie. All ranks must call together.

    Args:
        tables: ranks of each table's column shards.
    """
    world = tuple(range(dist.get_world_size())) if tables else ()
    several = sorted({ranks for holders in tables.values() if len(ranks := tuple(sorted(set(holders)))) > 1})
    everyone: Any = dist.group.WORLD
    return {ranks: everyone if ranks == world else dist.new_group(list(ranks)) for ranks in several}


def take_from_first_shards(tables: Mapping[str, Sequence[int]], parts: Sequence[tuple[TableShard, Tensor]]) -> None:
    """Gives all column shards of a row the value of the shard with its first column. All ranks must call together.

    Args:
        tables: ranks of each table's column shards.
        parts: this rank's shards, of these and other tables, and a value for each of their rows, int32; updated.
    """
    groups = groups_of_columns(tables)
    for name, ranks in sorted(tables.items()):
        held = [(shard.first_column == 0, values) for shard, values in parts if shard.name == name]
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


class ColumnShards:
    """Adds up squared norms over the column shards of one lookup's rows.

    Args:
        lookup: some of whose tables are column shards.
        layout: its geometry.
        groups: of :func:`groups_of_columns`.
        clipped: names of its tables whose norms matter. Ranks that hold no other have no ColumnShards, so that nobody
            may wait for theirs.
    """

    def __init__(self, lookup: TbeLookup, layout: LookupLayout, groups: Groups, clipped: Set[str]):
        self._layout = layout
        self._names = [shard.name for shard in lookup.shards]
        holders = {
            shard.name: tuple(sorted(set(shard.column_ranks))) if shard.name in clipped else ()
            for shard in lookup.shards
        }
        self._group_of = {name: groups.get(ranks) for name, ranks in holders.items()}
        self._of_all = next((group for group in self._group_of.values() if group), None)
        self._in_one_go = lookup.has_like_partners
        # Rows in the order in which they are added up: tables of the same ranks together, shards of a table as one.
        tables = sorted(holders, key=lambda name: (holders[name], name))
        rows = {shard.name: shard.rows for shard in lookup.shards}
        ends = torch.tensor([rows[name] for name in tables]).cumsum(0).tolist()
        first = dict(zip(tables, [0, *ends], strict=False))
        device = layout.start.device
        self._first_row = torch.tensor([first[name] for name in self._names], device=device)
        ranks = list(dict.fromkeys(holders[name] for name in tables))
        self._groups = [groups.get(each) for each in ranks]
        self._place_of_group = torch.tensor([ranks.index(holders[name]) for name in self._names], device=device)

    def add_up(self, rows: RowGradients, squares: Tensor) -> Tensor:
        """Squares over whole rows from those over their columns here, float64 [2, nnz], padded like the rows.

        Waits for the device only where ranks hold shards of different tables or several of one.
        """
        if self._in_one_go:
            return _over_ranks(squares.contiguous(), self._of_all)
        layout, table = self._layout, rows.table
        row = (rows.place[:, 0] - layout.start[table]) // layout.dim[table]
        whole = count_rows(self._first_row[table] + row)
        added = torch.zeros_like(squares).index_add_(1, whole.slot, squares.where(rows.counts.real, 0))
        group = self._place_of_group[table[whole.occurrence]]
        sizes = group.new_zeros(len(self._groups)).index_add_(0, group, whole.real.long()).tolist()
        parts = added[:, : sum(sizes)].split(sizes, dim=1)
        summed = [_over_ranks(part.contiguous(), to) for part, to in zip(parts, self._groups, strict=True)]
        return torch.cat(summed, dim=1)[:, whole.slot]

    def add_up_tables(self, squares: Sequence[Tensor]) -> list[Tensor]:
        """As :meth:`add_up` for all rows of each table, each float64 [2, V]."""
        added: dict[str, Tensor] = {}
        for name, of_shard in sorted(zip(self._names, squares, strict=True), key=lambda each: each[0]):
            added[name] = added[name] + of_shard if name in added else of_shard
        whole = {name: _over_ranks(of_table.contiguous(), self._group_of[name]) for name, of_table in added.items()}
        return [whole[name] for name in self._names]


def _over_ranks(squares: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Added up over a group, in place; ``group`` is None where this rank holds all shards."""
    if group is not None and squares.numel():
        dist.all_reduce(squares, group=group)
    return squares
