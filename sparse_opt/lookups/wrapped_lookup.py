"""A wrapped lookup of a model: limits and statistics of its tables, its back end, and its waiting passes."""

import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from cowrec.errors import UserError

from ..kernels.layout import BagsOfLookup, LookupBackward
from ..tbe.column_shards import ColumnShards, Groups, column_partners
from ..tbe.lookup import TbeLookup
from .row_backends import NumbaRows, RowBackend, TorchRows, TritonRows
from .rules import TableLimits, TableRules
from .statistics import ClipStatistics


class WrappedLookup:
    """Lookup under clip rules, and the back end that works on its rows. The rules may limit none of its tables.

    Args:
        clip_columns: number of leading columns that are measured and clipped, by table name; all for other tables.
        groups: process groups of column shards, from :func:`groups_of_columns`.

    Attributes:
        latest_backward: torch's number of the latest ``backward()`` that reached the lookup; -1 before the first.
        forward_thread: thread of the forward pass before the latest ``backward()``, which is the training thread; None
            before the first.
        in_torch, kernels: work on rows in torch, which serves every lookup, and in the kernels of the device.
        rows: the back end, ``in_torch`` or ``kernels``.
    """

    def __init__(
        self, lookup: TbeLookup, rules: TableRules, clip_columns: Mapping[str, int], groups: Groups | None = None
    ):
        self.lookup, self.layout, weights = lookup, lookup.layout(), lookup.flat_weights()
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
        """Groups whose ranks agree on a step: ranks that wait for each other, and ranks with columns of one row."""
        return [self.lookup.process_group] if self.in_torch.waits_for_ranks else self._column_partners

    def without_ids(self) -> LookupBackward:
        """Makes a backward pass of one sample in which no id occurs."""
        device = self.lookup.flat_weights().device
        offsets = torch.zeros(len(self.lookup.feature_table) + 1, dtype=torch.int64, device=device)
        bags = self.bags.of({"indices": offsets[:0], "offsets": offsets})
        return LookupBackward(bags, None, torch.zeros(bags.size, dtype=torch.float32, device=device))

    def compile(self, work: Callable[[RowBackend, LookupBackward], Any]) -> None:
        """Does work on no rows, so that the CPU's kernels are compiled, if this lookup uses them."""
        if self.rows is self.kernels and not self.lookup.flat_weights().is_cuda:
            work(self.rows, self.without_ids())

    def begin_backward(self, *, is_repeated: bool, forward_thread: int) -> None:
        """Warns in the second backward pass of one forward pass, or of one ``backward()``, unless passes accumulate.

        If passes accumulate, the second backward pass of one forward pass raises RuntimeError.
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


class Accumulation:
    """Backward passes of a lookup that wait until their step has ``passes`` of them."""

    def __init__(self, bags: BagsOfLookup):
        self.passes = 1
        self._bags, self._waiting, self._finite = bags, list[LookupBackward](), list[Tensor]()

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def drop(self) -> None:
        self._waiting, self._finite = [], []

    def add(self, backward: LookupBackward, finite: Tensor | None) -> LookupBackward | None:
        """Adds a pass; returns all passes of the step as one if this was the last, else None.

        Bags are ordered by feature, then by pass, so that the ids of a row stay in their order. If ``finite``, bool [],
        is false in one pass, all gradients are zeros: a GradScaler skips the step of the other parameters too.
        """
        if self.passes == 1:
            return backward
        if backward.output_grad.dim() == 1:
            raise UserError(
                "backward passes with a variable batch size per feature cannot be accumulated; take a step for each,"
                " or give every feature the same batch size"
            )
        self._waiting.append(_copied(backward))
        if finite is not None:
            self._finite.append(finite)
        if len(self._waiting) < self.passes:
            return None
        step = self._joined(self._waiting)
        if self._finite:
            step = replace(step, output_grad=torch.where(torch.stack(self._finite).all(), step.output_grad, 0))
        self.drop()
        return step

    def _joined(self, passes: list[LookupBackward]) -> LookupBackward:
        # Where every id is a bag, a feature's ids of one pass move together.
        is_sequence = self._bags.is_sequence
        offsets = [one_pass.bags.blocks.first_bag if is_sequence else one_pass.bags.offsets for one_pass in passes]
        features = len(passes[0].bags.blocks.table)
        bags = [(len(ends) - 1) // features for ends in offsets]
        numbers = torch.arange(features * sum(bags)).split([features * size for size in bags])
        by_feature = [own.view(features, size) for own, size in zip(numbers, bags, strict=True)]
        device = offsets[0].device
        order = torch.cat(by_feature, dim=1).flatten().int()
        if device.type == "cuda":
            order = order.pin_memory().to(device, non_blocking=True)
        lengths = torch.cat([ends.diff() for ends in offsets]).long()
        ids = torch.arange(sum(one_pass.bags.indices.numel() for one_pass in passes), device=device)
        lengths, ids, _ = torch.ops.fbgemm.permute_1D_sparse_data(order, lengths, ids, None, ids.numel())
        indices = torch.cat([one_pass.bags.indices for one_pass in passes])[ids]
        given = [one_pass.id_weights for one_pass in passes if one_pass.id_weights is not None]
        weights = torch.cat(given)[ids] if given else None
        grads = torch.cat([one_pass.output_grad for one_pass in passes])
        inputs = {"indices": indices, "offsets": torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])}
        return LookupBackward(self._bags.of(inputs), weights, grads[ids] if is_sequence else grads)


def _copied(backward: LookupBackward) -> LookupBackward:
    """Copies the ids of a pass, because callers may overwrite the batch after a backward pass."""
    bags, weights = backward.bags, backward.id_weights
    blocks = bags.blocks._replace(first_bag=bags.blocks.first_bag.clone())
    bags = bags._replace(indices=bags.indices.clone(), offsets=bags.offsets.clone(), blocks=blocks)
    return replace(backward, bags=bags, id_weights=None if weights is None else weights.detach().clone(), ids=None)
