"""One lookup of a model that is wrapped: limits and statistics of its tables, its back end, and passes that wait."""

import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.distributed import ProcessGroup

from ..kernels.layout import LookupBackward
from ..tbe.bags import BagsOfLookup, layout_of
from ..tbe.column_shards import ColumnShards, Groups, column_partners
from ..tbe.lookup import TbeLookup
from .accumulation import Accumulation
from .row_backends import NumbaRows, RowBackend, TorchRows, TritonRows
from .rules import TableLimits, TableRules
from .statistics import ClipStatistics


class WrappedLookup:
    """Lookup under clip rules, which may limit none of its tables, and the back end that works on its batches' rows.

    Args:
        clip_columns: by table name, leading columns that are measured and clipped; all where there is none.
        groups: process groups of column shards, from :func:`groups_of_columns`.

    Attributes:
        lookup: the lookup.
        layout: geometry of the lookup.
        bags: finds the bags of its forward passes.
        accumulation: its backward passes that wait for others of their step.
        limits: limits of its tables.
        statistics: clip statistics.
        latest_backward: torch's number of the latest ``backward()`` that reached it; -1 before the first.
        forward_thread: the thread of the forward pass before it, which is the one that trains; None before the first.
        in_torch: work on its rows in torch, which every lookup can do.
        kernels: work on its rows in the kernels of its device.
        rows: the back end, one of these two.

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
        self.lookup, self.layout, weights = lookup, layout_of(lookup), lookup.flat_weights()
        dims = [shard.embedding_dim for shard in lookup.shards]
        self.bags = BagsOfLookup(lookup.feature_table, dims, weights.device, is_sequence=lookup.is_sequence)
        self.accumulation = Accumulation(self.bags)
        self.limits = TableLimits(lookup, rules, clip_columns)
        self.statistics = ClipStatistics(lookup)
        self.latest_backward = -1
        self.forward_thread: int | None = None
        self._column_partners = column_partners(lookup, groups or {})
        adds_up = rules.scope == "row" and self.limits.clipped_column_shards
        columns = ColumnShards(lookup, self.layout, groups or {}, adds_up) if adds_up else None
        kind = TritonRows if weights.is_cuda else NumbaRows
        self.kernels: RowBackend = kind(lookup, self.layout, self.limits, self.statistics)
        self.in_torch = TorchRows(lookup, self.layout, self.limits, self.statistics, columns, self.kernels)
        self.rows: RowBackend = self.kernels if self.is_local and weights.dtype == torch.float32 else self.in_torch

    @property
    def is_local(self) -> bool:
        """True if a row's limit and update depend only on what this process has of the row."""
        torch_rows = self.in_torch
        return self.limits.scope == "row" and torch_rows.columns is None and not torch_rows.gathers_rows

    @property
    def step_groups(self) -> list[ProcessGroup]:
        """Groups in which ranks agree on a step: those that wait for each other, and those with columns of a row."""
        return [self.lookup.process_group] if self.in_torch.waits_for_ranks else self._column_partners

    def without_ids(self) -> LookupBackward:
        """Makes a backward pass of one sample in which no id occurs."""
        device = self.lookup.flat_weights().device
        offsets = torch.zeros(len(self.lookup.feature_table) + 1, dtype=torch.int64, device=device)
        bags = self.bags.of({"indices": offsets[:0], "offsets": offsets})
        return LookupBackward(bags, None, torch.zeros(bags.size, dtype=torch.float32, device=device))

    def compile(self, work: Callable[[RowBackend, LookupBackward], Any]) -> None:
        """Does work on no rows with the CPU's kernels, which are compiled for it, if this lookup works with them."""
        if self.rows is self.kernels and not self.lookup.flat_weights().is_cuda:
            work(self.rows, self.without_ids())

    def begin_backward(self, *, is_repeated: bool, forward_thread: int) -> None:
        """Warns in the second backward pass of one ``backward()``, unless passes are accumulated, or of one forward.

        Args:
            is_repeated: whether it is the second of one forward pass.
            forward_thread: thread of the forward pass.

        Raises:
            RuntimeError: the pass is the second of one forward, and passes are accumulated.
        """
        if is_repeated and self.accumulation.passes > 1:
            raise RuntimeError(
                "backward() was called again through the same forward pass, whose ids accumulate(n) would count again;"
                " add the losses up and call backward() once"
            )
        if is_repeated:
            warnings.warn(
                "backward() was called again through the same forward pass: the gradient of each call is clipped by"
                " itself, and applied in a step of its own; to clip their sum, in one step, add the losses up and call"
                " backward() once",
                RuntimeWarning,
                stacklevel=2,
            )
        backward, earlier = torch._C._current_graph_task_id(), self.latest_backward
        self.latest_backward, self.forward_thread = backward, forward_thread
        if backward == earlier and self.accumulation.passes == 1:
            warnings.warn(
                "the model was called several times in one loss: the gradient of each call is clipped by itself, and"
                " applied in a step of its own; to clip their sum, in one step, call accumulate(n) with the number of"
                " calls on what attach_cowclip returned, or on EmbeddingAdam",
                RuntimeWarning,
                stacklevel=2,
            )
