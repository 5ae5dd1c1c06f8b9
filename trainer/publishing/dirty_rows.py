"""Rows that training has touched since they were published last, and what they are now."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from cowrec.sparse_opt import EmbeddingAdam
from cowrec.trainer.sharded_model.tables import TableSpec, tables_of


class TouchedRows:
    """One mark a row, set when a batch has one of its ids; in one process.

    Args:
        specs: the tables.
        fields: of the batches, in their order.
    """

    def __init__(self, specs: Sequence[TableSpec], fields: Sequence[str]):
        self._specs = list(specs)
        first, firsts = 0, dict[str, int]()
        for spec in specs:
            firsts |= {field.name: first for field in spec.fields}
            first += spec.num_embeddings
        self._first_of_field = torch.tensor([firsts[name] for name in fields])
        self._marks = torch.zeros(first, dtype=torch.bool)

    def mark(self, rows: KeyedJaggedTensor) -> None:
        """Marks the rows of a batch. Waits for the device where they are on one."""
        counts = torch.tensor(rows.length_per_key())
        self._marks[rows.values().cpu() + torch.repeat_interleave(self._first_of_field, counts)] = True

    def mark_all(self) -> None:
        """Marks every row."""
        self._marks.fill_(True)

    def take(self) -> dict[str, Tensor]:
        """Marked rows of each table, int64 [n], ascending; no row is marked then."""
        found, first = {}, 0
        for spec in self._specs:
            marks = self._marks[first : first + spec.num_embeddings]
            found[spec.name] = marks.nonzero().flatten()
            marks.zero_()
            first += spec.num_embeddings
        return found


def current_rows(model: nn.Module, adam: EmbeddingAdam | None, table: str, rows: Tensor) -> Tensor:
    """Rows of a table (distinct, int64 [n]) with the steps that they missed: a copy, float32 [n, P], on the CPU."""
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
