"""Statistics of the clip: how many rows of each table are clipped, and by how much."""

from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from cowrec.sparse_opt.kernels.cpu_rows import Ratios
from cowrec.sparse_opt.kernels.torch_rows import RowGradients, RowSums
from cowrec.sparse_opt.tbe.lookup import TbeLookup


@dataclass(frozen=True)
class TableStats:
    """Clip statistics of a table, over the rows whose first columns this process holds.

    A table that every process holds is counted by the first process only.

    Attributes:
        rows: rows updated since attaching; a row counts once in each step that has its id.
        clipped: share of these rows whose gradient exceeded its limit, in [0, 1]; under a rule for tables the gradient
            and the limit are the table's or those of all tables.
        median_ratio: median of ``||g|| / limit`` over the rows of the latest step, above 1 where most were clipped;
            NaN without rows.
    """

    rows: int
    clipped: float
    median_ratio: float


class ClipStatistics:
    """Counts of updated and clipped rows of a lookup's tables, and the ratios of the latest step.

    Attributes:
        latest_rows: distinct rows of each table in the latest step, int64 [tables]; zeros unless a compiled kernel ran.
    """

    def __init__(self, lookup: TbeLookup):
        device = lookup.flat_weights().device
        self._lookup = lookup
        self._is_copy = lookup.is_replicated and dist.get_rank(lookup.process_group) > 0
        self._rows = torch.zeros(len(lookup.shards), dtype=torch.int64, device=device)
        self._clipped = torch.zeros_like(self._rows)
        self._ratios, self._tables = torch.empty(0, device=device), self._rows[:0]
        self.latest_rows = np.zeros(len(lookup.shards), np.int64)

    def record(self, ratios: Tensor, rows: RowSums | RowGradients) -> None:
        """Records ``||g|| / limit`` of each row, float [nnz], padded like the rows."""
        ones = rows.counts.real.long()
        self._rows.scatter_add_(0, rows.table, ones)
        self._clipped.scatter_add_(0, rows.table, ones * (ratios > 1))
        self._ratios, self._tables = ratios.float(), torch.where(rows.counts.real, rows.table, -1)

    def record_compiled(self, ratios: Ratios, begins: np.ndarray) -> None:
        """Records the ratios that a kernel of cpu_rows.py or cpu_adam.py wrote."""
        rows = self.latest_rows = ratios.rows
        tables = np.repeat(np.arange(len(rows)), rows)
        first = np.repeat(begins[:-1] - (np.cumsum(rows) - rows), rows)
        values = ratios.values[first + np.arange(len(tables))]
        self._rows += torch.from_numpy(rows)
        self._clipped += torch.from_numpy(np.bincount(tables[values > 1], minlength=len(rows)))
        self._ratios, self._tables = torch.from_numpy(values), torch.from_numpy(tables)

    def per_table(self) -> dict[str, TableStats]:
        """Statistics by table name. Waits for the device."""
        rows, clipped = self._rows.tolist(), self._clipped.tolist()
        return {
            shard.name: TableStats(
                rows[t], clipped[t] / max(rows[t], 1), self._ratios[self._tables == t].median().item()
            )
            for t, shard in enumerate(self._lookup.shards)
            if shard.first_column == 0 and not self._is_copy  # each row once, whoever else holds it or its columns
        }
