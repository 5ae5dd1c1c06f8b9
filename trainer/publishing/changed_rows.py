"""Rows to publish: those that training may have changed, and their current values, collected on the first process.

n rows, P stored width of a table.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from cowrec.sparse_opt import EmbeddingAdam
from cowrec.trainer.runtime.peers import Peers
from cowrec.trainer.sharded_model.tables import TableSpec, local_shards, tables_of


class DirtyRows:
    """One flag per row of all tables, set when a batch of this process uses the row.

    Args:
        specs: the tables.
        fields: names of the batches' fields, in their order.
    """

    def __init__(self, specs: Sequence[TableSpec], fields: Sequence[str]):
        self._specs = list(specs)
        first, firsts = 0, dict[str, int]()
        for spec in specs:
            firsts |= {field.name: first for field in spec.fields}
            first += spec.num_embeddings
        self._first_of_field = torch.tensor([firsts[name] for name in fields])
        self._dirty = torch.zeros(first, dtype=torch.bool)

    def mark(self, rows: KeyedJaggedTensor) -> None:
        """Marks the rows of a batch. Waits for the device if they are on one."""
        counts = torch.tensor(rows.length_per_key())
        self._dirty[rows.values().cpu() + torch.repeat_interleave(self._first_of_field, counts)] = True

    def take(self, peers: Peers) -> dict[str, Tensor]:
        """Returns the rows of each table that some process has marked, int64 [n], ascending, and clears all flags.

        All processes call together and get the same rows.
        """
        found, first = {}, 0
        for chunk in peers.all_columns(self._dirty.nonzero().T):
            self._dirty[chunk[0]] = True
        for spec in self._specs:
            dirty = self._dirty[first : first + spec.num_embeddings]
            found[spec.name] = dirty.nonzero().flatten()
            dirty.zero_()
            first += spec.num_embeddings
        return found


@dataclass(frozen=True)
class TakenRows:
    """Rows of a table as they were at one step; their values are where they are stored.

    Attributes:
        shape: (n, P).
        parts: those that this process stores; on the first process all of them.
    """

    shape: tuple[int, int]
    parts: list["_Part"]


@dataclass(frozen=True)
class _Part:
    """Rows of one shard: their indices among the rows taken, int64 [k], the columns that it has, and the values,
    float32 [k, columns], on the process ``rank``, which stores them; None on the first one if it is another.
    """

    rank: int
    index: Tensor
    columns: slice
    values: Tensor | None


class CurrentRows:
    """Reads rows of a model's tables between two steps; all processes call each method together.

    Args:
        model: holds the tables.
        adam: trains them; None where FBGEMM's fused optimizer does.
        rank: of this process.
    """

    def __init__(self, model: nn.Module, adam: EmbeddingAdam | None, rank: int) -> None:
        self._model, self._adam, self._rank = model, adam, rank

    def take(self, wanted: Mapping[str, Tensor]) -> dict[str, TakenRows]:
        """Copies rows of tables, after the updates of absent rows that are still to be applied to them.

        Args:
            wanted: distinct rows of tables, int64 [n]; the same on all processes.
        """
        if self._adam:
            for table, rows in wanted.items():
                self._adam.catch_up(table, rows)
        with self._adam.as_stored() if self._adam else nullcontext():
            tables = tables_of(self._model)
        return {name: self._taken(tables[name], rows) for name, rows in wanted.items()}

    def _taken(self, table: ShardedTensor | Tensor, rows: Tensor) -> TakenRows:
        own = {tuple(offsets): shard for shard, offsets in local_shards(table)}
        parts = []
        for rank, first, (count, width) in _shards(table):
            if self._rank not in (0, rank):
                continue
            index = ((rows >= first[0]) & (rows < first[0] + count)).nonzero().flatten()
            if not len(index):
                continue
            values = None
            if rank == self._rank:
                shard = own[first]
                values = shard[(rows[index] - first[0]).to(shard.device)].float().cpu()
            parts.append(_Part(rank, index, slice(first[1], first[1] + width), values))
        return TakenRows((len(rows), table.size(1)), parts)


def assembled(taken: Sequence[TakenRows], peers: Peers) -> Tensor:
    """Brings rows of a table together: float32 [n, P] on the first process; of others the result has no meaning.

    The first process holds the result, those of the rows that it stores, and one part that it is receiving.
    """
    if not peers.is_first:
        for part in (part for each in taken for part in each.parts):
            assert part.values is not None
            peers.send(part.values, 0)
        return torch.empty(0, taken[0].shape[1])
    if len(taken) == 1 and len(taken[0].parts) == 1:
        values = taken[0].parts[0].values
        if values is not None and values.shape == taken[0].shape:
            return values
    rows, begin = torch.empty(sum(each.shape[0] for each in taken), taken[0].shape[1]), 0
    for each in taken:
        for part in each.parts:
            width, values = part.columns.stop - part.columns.start, part.values
            if values is None:
                values = peers.receive(part.rank, len(part.index), width, dtype=torch.float32)
            rows[begin + part.index, part.columns] = values
        begin += each.shape[0]
    return rows


def _shards(table: ShardedTensor | Tensor) -> Iterator[tuple[int, tuple[int, int], tuple[int, int]]]:
    """Rank, first row and column, and size of each shard of a table; of a data-parallel one the first copy."""
    if not isinstance(table, ShardedTensor):
        yield 0, (0, 0), (table.size(0), table.size(1))
        return
    for shard in table.metadata().shards_metadata:
        assert shard.placement is not None
        (row, column), (rows, columns) = shard.shard_offsets, shard.shard_sizes
        yield shard.placement.rank() or 0, (row, column), (rows, columns)
