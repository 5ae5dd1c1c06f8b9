"""Statistics of the clip: how many rows of each table are clipped, and by how much."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import nan
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from cowrec.errors import UserError

from ..kernels.layout import RowResults
from ..kernels.torch_rows import RowGradients, RowSums
from ..tbe.lookup import TableShard, TbeLookup

if TYPE_CHECKING:
    from ..kernels.numba_rows import Ratios
    from ..kernels.triton_rows import DeviceRows


_BIN_BITS = 19
"""Low bits of a float32 that do not count for its bin: 16 bins for each power of two."""
_LEAST, _MOST = 2.0**-24, 2.0**24
"""Range of the ratios that bins tell apart."""


def _bits(value: float) -> int:
    return int(np.float32(value).view(np.int32))


_FIRST_BIN = _bits(_LEAST) >> _BIN_BITS
_BINS = (_bits(_MOST) >> _BIN_BITS) - _FIRST_BIN


def bins_of(ratios: Tensor) -> Tensor:
    """Finds the bins, int64, of ratios, float32 >= 0. A bin excludes its lower bound and includes its upper bound."""
    # Floats >= 0 are ordered like their bits; 1 less, so that a bound belongs to the bin below it.
    return (((ratios.view(torch.int32) - 1) >> _BIN_BITS) - _FIRST_BIN).clamp_(0, _BINS - 1).long()


@dataclass(frozen=True)
class TableStats:
    """Clip statistics of a table, over the rows whose first columns this process holds.

    Only the first process counts the rows of a table that every process holds.

    Attributes:
        rows: rows with a gradient since attaching or resetting; a row counts once in each step that has its id.
        clipped_share: share of these rows whose gradient exceeded the limit, in [0, 1]. Under a rule for one table or
            for all tables, gradient and limit are those of the table or of all tables.
        median_ratio: median of ``||g|| / limit`` over the rows of the latest step; NaN without rows.
    """

    rows: int
    clipped_share: float
    median_ratio: float


class ClipStatistics:
    """Counts of updated and clipped rows of a lookup's tables, and the ratios of the latest step.

    ``latest_rows`` are the numbers of distinct rows in the latest step, int64 [tables], zeros unless a kernel of numba
    ran. ``outside`` are the numbers of ids outside their tables, int64 [tables], on CUDA, where no step can raise.
    """

    def __init__(self, lookup: TbeLookup):
        device = lookup.flat_weights().device
        self._lookup = lookup
        self._is_copy = lookup.is_replicated and dist.get_rank(lookup.process_group) > 0
        self._rows = torch.zeros(len(lookup.shards), dtype=torch.int64, device=device)
        self._clipped, self.outside = torch.zeros_like(self._rows), torch.zeros_like(self._rows)
        self._bins = torch.zeros(len(lookup.shards), _BINS, dtype=torch.int64, device=device)
        self.record_no_rows()
        self.latest_rows = np.zeros(len(lookup.shards), np.int64)

    def record_no_rows(self) -> None:
        self.latest = RowResults(torch.empty(0, dtype=torch.float32, device=self._rows.device), self._rows[:0])

    def reset(self) -> None:
        for counter in (self._rows, self._clipped, self._bins):
            counter.zero_()

    def shares_above(self, scales: Sequence[float]) -> dict[str, dict[float, float]]:
        """Computes the share of each table's rows whose ratio is above each scale, rounded to the nearest bin (3 %)."""
        bins = self._bins.cpu()
        first = [((_bits(scale) + (1 << _BIN_BITS - 1)) >> _BIN_BITS) - _FIRST_BIN for scale in scales]
        return {
            shard.name: {
                scale: int(own[max(begin, 0) :].sum()) / max(int(own.sum()), 1)
                for scale, begin in zip(scales, first, strict=True)
            }
            for shard, own in zip(self._lookup.shards, bins, strict=True)
            if self._is_counted(shard)
        }

    def _is_counted(self, shard: TableShard) -> bool:
        return shard.first_column == 0 and not self._is_copy  # a row counts once, whoever else holds its columns

    def record(self, ratios: Tensor, rows: RowSums | RowGradients) -> None:
        """Records ``||g|| / limit`` of each row, float [nnz], padded like the rows."""
        ones = rows.counts.real.long()
        self._rows.scatter_add_(0, rows.table, ones)
        self._clipped.scatter_add_(0, rows.table, ones * (ratios > 1))
        self.latest = RowResults(ratios.float(), torch.where(rows.counts.real, rows.table, -1))
        self._bins.view(-1).scatter_add_(0, rows.table * _BINS + bins_of(self.latest.ratio), ones)

    def record_on_device(self, results: RowResults, rows: "DeviceRows") -> None:
        rows.count(results, self._rows, self._clipped, self._bins, _BIN_BITS, _FIRST_BIN)
        self.latest = results

    def record_compiled(self, count_rows: Callable[..., tuple[Any, Any]], ratios: "Ratios", begins: np.ndarray) -> None:
        """Records the ratios that a kernel of numba_rows.py wrote, by that file's ``count_rows``."""
        self.latest_rows = ratios.rows
        counts = (self._rows.numpy(), self._clipped.numpy(), self._bins.numpy())
        values, tables = count_rows(ratios, begins, *counts, _BIN_BITS, _FIRST_BIN)
        self.latest = RowResults(torch.from_numpy(values), torch.from_numpy(tables))

    def latest_ratios(self) -> dict[str, Tensor]:
        """See :meth:`LookupsHandle.latest_ratios`."""
        latest = self.latest  # read once: another thread may train meanwhile
        ratio, table = latest.ratio.cpu(), latest.table.cpu()
        return {
            shard.name: ratio[table == index]
            for index, shard in enumerate(self._lookup.shards)
            if self._is_counted(shard)
        }

    def on_device(self) -> Tensor:
        """Returns rows, clipped rows, median ratio and ids outside of each table, float64 [4, tables]."""
        counts = (self._rows, self._clipped, self._medians(), self.outside)
        return torch.stack([values.double() for values in counts])

    def per_table(self, values: Sequence[Sequence[float]]) -> dict[str, TableStats]:
        """Makes statistics by table name of the numbers of :meth:`on_device`."""
        for shard, outside in zip(self._lookup.shards, values[3], strict=True):
            if outside:
                raise UserError(
                    f"{outside:.0f} looked-up ids were outside table {shard.name!r}, which holds {shard.rows} rows"
                    " here; row 0 was trained for them. Map ids into [0, num_embeddings) before the lookup"
                )
        return {
            shard.name: TableStats(int(rows), clipped / max(rows, 1), ratio)
            for shard, rows, clipped, ratio in zip(self._lookup.shards, *values[:3], strict=True)
            if self._is_counted(shard)
        }

    def _medians(self) -> Tensor:
        """Computes the lower median of each table's latest ratios, [tables]; NaN without rows."""
        latest = self.latest  # as above
        if not latest.ratio.numel():
            return torch.full_like(self._rows, nan, dtype=torch.float32)
        ratios, by_ratio = latest.ratio.sort()
        tables, by_table = latest.table[by_ratio].sort(stable=True)
        ratios = ratios[by_table]
        bounds = torch.searchsorted(tables, torch.arange(len(self._rows) + 1, device=tables.device).to(tables.dtype))
        first, end = bounds[:-1], bounds[1:]
        median = ratios[((first + end - 1) // 2).clamp(0, len(ratios) - 1)]
        largest = ratios[(end - 1).clamp_min(0)]  # NaN is sorted last
        return torch.where((first < end) & ~largest.isnan(), median, nan)
