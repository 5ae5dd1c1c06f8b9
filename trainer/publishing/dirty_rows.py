"""Dirty rows: those that training may have changed since the last publication, and their current weights."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from cowrec.sparse_opt import EmbeddingAdam
from cowrec.trainer.sharded_model.tables import TableSpec, tables_of


class DirtyRows:
    """One flag per row, set when a batch uses the row; in one process.

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

    def take(self) -> dict[str, Tensor]:
        """Returns the marked rows of each table, int64 [n], ascending, and clears all flags."""
        found, first = {}, 0
        for spec in self._specs:
            dirty = self._dirty[first : first + spec.num_embeddings]
            found[spec.name] = dirty.nonzero().flatten()
            dirty.zero_()
            first += spec.num_embeddings
        return found


def current_rows(model: nn.Module, adam: EmbeddingAdam | None, table: str, rows: Tensor) -> Tensor:
    """Copies rows of a table, after the updates of absent rows that are still to be applied to them.

    Args:
        model: holds the table.
        adam: trains the table; None where FBGEMM's fused optimizer does.
        table: its name.
        rows: distinct, int64 [n].

    Returns:
        float32 [n, P], on the CPU.
    """
    if adam is None:
        value = tables_of(model)[table]
    else:
        adam.catch_up(table, rows)
        with adam.as_stored():
            value = tables_of(model)[table]
    if isinstance(value, ShardedTensor):
        (shard,) = value.local_shards()
        value = shard.tensor
    return value[rows.to(value.device)].float().cpu()
