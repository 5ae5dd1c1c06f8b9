"""Dirty rows: those that training may have changed since the last publication."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from cowrec.trainer.runtime.peers import Peers
from cowrec.trainer.sharded_model.tables import TableSpec


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
