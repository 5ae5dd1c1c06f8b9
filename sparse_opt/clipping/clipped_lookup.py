"""One lookup under a clip rule: row gradients and clip factors for CowClip and the embedding optimizers.

On CPU in float32 numba kernels compute them (compiled_rows.py); elsewhere, and for rules that bound more than one row's
norm, torch does (kernels/torch_rows.py and row_factors.py).
"""

from collections.abc import Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from cowrec.sparse_opt.kernels import cpu_rows
from cowrec.sparse_opt.kernels.layout import LookupBags, to_numpy
from cowrec.sparse_opt.kernels.profiling import profiled
from cowrec.sparse_opt.kernels.torch_rows import (
    LookupIds,
    RowGradients,
    RowSums,
    find_rows,
    row_sums,
    sums_of_ranks,
    weight_grads,
    with_sums,
    with_weights,
)
from cowrec.sparse_opt.tbe.column_shards import ColumnShards, Groups
from cowrec.sparse_opt.tbe.lookup import BagsOfLookup, LookupBackward, TbeLookup, layout_of

from .accumulation import Accumulation
from .compiled_rows import ROW_GRADIENTS, CompiledRows
from .row_factors import RowFactors
from .statistics import ClipStatistics
from .table_limits import TableLimits
from .table_rules import TableRules

if TYPE_CHECKING:
    from cowrec.sparse_opt.kernels.triton_update import DeviceRows


class ClippedLookup:
    """Lookup under a clip rule: limits of its tables, and row gradients and clip factors of its backward passes.

    Args:
        lookup: the lookup.
        rules: clip rules.
        clip_columns: by table name, leading columns that are measured and clipped; all where there is none.
        groups: process groups of column shards, from :func:`groups_of_columns`.

    Attributes:
        layout: geometry of the lookup.
        bags: finds the bags of its forward passes.
        accumulation: its backward passes that wait for others of their step.
        limits: limits of its tables.
        statistics: clip statistics.
        factors: clip factors in torch.
        compiled: row gradients and kernels on CPU.
        gathers_rows: whether the ranks hold copies of the tables and exchange the rows of their batches.
        uses_triton: whether Triton kernels find and sum the rows, as on CUDA.

    Raises:
        ValueError: clip_columns is out of range.
    """

    def __init__(
        self,
        lookup: TbeLookup,
        rules: TableRules,
        clip_columns: Mapping[str, int],
        groups: Groups | None = None,
    ):
        self.lookup = lookup
        self.layout = layout_of(lookup)
        dims, device = [shard.embedding_dim for shard in lookup.shards], lookup.flat_weights().device
        self.bags = BagsOfLookup(lookup.feature_table, dims, device, is_sequence=lookup.is_sequence)
        self.accumulation = Accumulation(self.bags)
        self.limits = TableLimits(lookup, rules, clip_columns)
        self.statistics = ClipStatistics(lookup)
        adds_up = rules.scope == "row" and self.limits.clipped_column_shards
        columns = ColumnShards(lookup, self.layout, groups or {}, adds_up) if adds_up else None
        self.factors = RowFactors(lookup, self.limits, columns, self.statistics)
        self.compiled = CompiledRows(lookup, self.layout, self.limits, self.statistics)
        self.gathers_rows = lookup.is_replicated and lookup.num_ranks > 1
        self.uses_triton = lookup.flat_weights().is_cuda
        if lookup.is_cached and not self.is_local:
            raise ValueError(
                f"table {lookup.shards[0].name!r} is behind FBGEMM's cache, where only rules for single rows that are"
                f" complete on their rank can be applied, not {rules.name!r} or column shards; shard it under"
                ' compute_kernel="fused_uvm"'
            )

    @cached_property
    def numpy_layout(self) -> Any:
        """:attr:`layout` as numpy arrays, on CPU."""
        return to_numpy(self.layout)

    @property
    def is_local(self) -> bool:
        """True if a row's limit and update depend only on what this process has of the row."""
        return self.limits.scope == "row" and self.factors.columns is None and not self.gathers_rows

    @property
    def waits_for_ranks(self) -> bool:
        """True if a backward pass takes part in collectives even without ids."""
        return self.factors.adds_up_norms or self.gathers_rows

    @property
    def runs_on_device(self) -> bool:
        """True if Triton kernels can do all the work on the rows of a backward pass."""
        return self.uses_triton and self.is_local and self.lookup.flat_weights().dtype == torch.float32

    def runs_compiled(self, backward: LookupBackward) -> bool:
        """True if numba kernels can do the work on the rows of a backward pass."""
        weights, grad = self.lookup.flat_weights(), backward.output_grad
        return self.is_local and not self.uses_triton and weights.dtype == grad.dtype == torch.float32

    def find_rows(self, bags: LookupBags) -> LookupIds:
        """Rows of the lookup's ids; see :func:`find_rows`."""
        if not (self.uses_triton and bags.indices.numel()):
            return find_rows(self.layout, bags)
        from cowrec.sparse_opt.kernels.triton_ids import find_rows_on_device

        return find_rows_on_device(self.layout, bags, self.statistics.outside)

    def device_rows(self, backward: LookupBackward) -> "DeviceRows":
        """Rows of a backward pass for the Triton kernels; it has at least one id."""
        from cowrec.sparse_opt.kernels.triton_update import DeviceRows

        ids = backward.ids or self.find_rows(backward.bags)
        cache = self.lookup.cache_of(ids.row)
        return DeviceRows(self.layout, ids, backward.id_weights, backward.output_grad, cache)

    def sum_rows(self, backward: LookupBackward) -> RowSums:
        """Distinct rows of a backward pass and their gradients, in torch; of replicated tables those of all ranks."""
        with profiled(ROW_GRADIENTS):
            if self.uses_triton and backward.bags.indices.numel():
                on_device = self.device_rows(backward)
                rows = with_sums(self.layout, on_device.ids, on_device.sums(), backward.output_grad.dtype)
            else:
                ids = backward.ids or self.find_rows(backward.bags)
                rows = row_sums(self.layout, ids, backward.id_weights, backward.output_grad)
            return sums_of_ranks(rows, self.lookup.process_group) if self.gathers_rows else rows

    def row_gradients(self, sums: RowSums) -> RowGradients:
        """Rows as they are now, and their gradients.

        Raises:
            ValueError: FBGEMM caches the rows.
        """
        self._require_uncached()
        return with_weights(sums, self.layout, self.lookup.flat_weights())

    def id_factors(self, backward: LookupBackward) -> Tensor:
        """Clip factor of each id's row, float [nnz].

        Raises:
            ValueError: an id is outside its table (on CPU).
        """
        if self.runs_on_device and backward.bags.indices.numel():
            rows_on_device = self.device_rows(backward)
            of_rows, results = rows_on_device.factors(self.limits.clips, self.lookup.flat_weights())
            self.statistics.record_on_device(results, rows_on_device)
            return rows_on_device.of_ids(of_rows)
        if not self.runs_compiled(backward):
            rows = self.row_gradients(self.sum_rows(backward))
            return self.factors.of_rows(rows)[rows.counts.slot]
        factors = torch.empty(backward.bags.indices.numel())
        weights = self.lookup.flat_weights().numpy()
        sums = self.compiled.sum_rows(backward)
        self.compiled.run(cpu_rows.factors_of_ids, sums, weights, factors.numpy())
        return factors

    def id_weight_grad(self, backward: LookupBackward) -> Tensor:
        """Gradient of each id's weight in its bag's sum, float32 [nnz]: its row times the gradient of the bag."""
        self._require_uncached()
        ids = backward.ids or self.find_rows(backward.bags)
        return weight_grads(self.layout, ids, self.lookup.flat_weights(), backward.output_grad)

    def _require_uncached(self) -> None:
        if self.lookup.is_cached:
            raise ValueError(
                f"table {self.lookup.shards[0].name!r} is behind FBGEMM's cache, whose rows only EmbeddingAdam under"
                ' absent_rows = "replay" or "lazy", for float32, and attach_cowclip without single_id_bags can read,'
                ' and neither for a gradient of ids\' weights; shard it under compute_kernel="fused_uvm"'
            )
