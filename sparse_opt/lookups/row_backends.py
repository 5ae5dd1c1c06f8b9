"""Work on the rows of a lookup's batches: one interface and its back ends. A lookup has one back end.

Numba on CPU and Triton on CUDA run all of the work in kernels, for float32 rows that are complete here and under rules
for single rows. :class:`TorchRows` takes the other lookups. It leaves some work to the kernels of the device: replay of
missed steps, and on CUDA finding and summing rows.
"""

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, Protocol, TypeAlias

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from ..algorithm.adam import adam_element, ftrl_constants, ftrl_element, table_scalars
from ..algorithm.clip import limits_of_norms, scales_of_norms
from ..kernels import torch_rows
from ..kernels.layout import (
    AdamRows,
    LookupBackward,
    LookupBags,
    LookupIds,
    LookupLayout,
    StaleRows,
    to_float32,
    to_numpy,
)
from ..kernels.profiling import ROW_GRADIENTS, profiled
from ..kernels.threads import balanced_groups, in_threads, threads_for
from ..kernels.torch_rows import RowGradients, RowSums, exact_root
from ..tbe.column_shards import ColumnShards
from ..tbe.lookup import TbeLookup
from .rules import TableLimits
from .statistics import ClipStatistics

Inputs: TypeAlias = Mapping[str, Any]
"""Keyword arguments of a lookup's forward: ``indices``, ``offsets``, ``per_sample_weights`` and others."""
_NO_WEIGHTS, _NO_FTRL = np.empty(0, np.float32), to_float32(ftrl_constants(None))
_WORK_OF_ROW = 4
"""Ids that take as long as one distinct row."""


class RowBackend(Protocol):
    """Work on the rows of a lookup's batches; clips record their statistics. Sizes: nnz ids.

    On CPU, methods that take ids raise ValueError for an id outside its table. ``is_capturable`` tells whether a CUDA
    graph can repeat the work: it reads all that changes from the device, and never waits.
    """

    is_capturable: bool

    def find_rows(self, bags: LookupBags) -> LookupIds:
        """Finds the rows of a lookup's ids."""

    def sum_rows(self, backward: LookupBackward) -> RowSums:
        """Finds the distinct rows of a backward pass and their gradients, for the work in torch."""

    def id_factors(self, backward: LookupBackward) -> Tensor:
        """Computes the clip factor of each id's row, float32 [nnz]."""

    def clipped_output_grad(self, backward: LookupBackward, l2: float) -> Tensor:
        """Computes an output gradient whose sum over each row's ids is ``clip(g + 2 * l2 * w)``.

        FBGEMM adds up the output gradient over a row's ids. The row's complete gradient is therefore written at one of
        its ids, and zeros at the others. Bags hold at most one id, without weights. L2 is added to columns that are not
        clipped too. The result has the shape and dtype of the output gradient.
        """

    def update(self, backward: LookupBackward, adam: AdamRows) -> None:
        """Adds L2, clips and takes the latest step of Adam on the rows of a backward pass, in place.

        Under replay, last steps are written, and rows at rest first catch up the decay of their second moments.
        """

    def catch_up(self, bags: LookupBags, adam: AdamRows) -> LookupIds | None:
        """Takes the missed steps of the ids' rows, except the decay of second moments of rows at rest.

        Returns the rows of the ids if the work has found them. Rows also catch up if an id is outside its table.
        """

    def pool(self, bags: LookupBags, inputs: Inputs, ids: LookupIds | None) -> tuple[Tensor | None, LookupIds | None]:
        """Looks rows up by the keyword arguments of FBGEMM's forward.

        Returns the output, without a gradient, or None where FBGEMM has to compute it; and the ids' rows if known.
        """

    def replay(self, rows: Tensor, adam: AdamRows) -> None:
        """Does :meth:`catch_up` for distinct rows that are behind: indices among the rows of all tables, int64 [n]."""


class NumbaRows:
    """Kernels of numba, on as many threads as torch uses."""

    is_capturable = False

    def __init__(self, lookup: TbeLookup, layout: LookupLayout, limits: TableLimits, statistics: ClipStatistics):
        from ..kernels import numba_replay, numba_rows

        self._replay_kernels: Any = numba_replay
        self._kernels: Any = numba_rows
        self._lookup, self._layout, self._statistics = lookup, layout, statistics
        self._numpy_layout, self._clips = to_numpy(layout), to_numpy(limits.clips)

    def find_rows(self, bags: LookupBags) -> LookupIds:
        return torch_rows.find_rows(self._layout, bags)

    def sum_rows(self, backward: LookupBackward) -> RowSums:
        ids = backward.ids or self.find_rows(backward.bags)
        return torch_rows.row_sums(self._layout, ids, backward.id_weights, backward.output_grad)

    def id_factors(self, backward: LookupBackward) -> Tensor:
        factors = torch.empty(backward.bags.indices.numel(), dtype=torch.float32)
        self._run(self._kernels.factors_of_ids, backward, self._lookup.flat_weights().numpy(), factors.numpy())
        return factors

    def clipped_output_grad(self, backward: LookupBackward, l2: float) -> Tensor:
        written = torch.zeros(backward.output_grad.shape, dtype=torch.float32)
        arguments = (self._lookup.flat_weights().numpy(), np.float32(2 * l2), written.view(-1).numpy())
        self._run(self._kernels.write_row_gradients, backward, *arguments)
        return written.to(backward.output_grad.dtype)

    def update(self, backward: LookupBackward, adam: AdamRows) -> None:
        ftrl = to_float32(adam.ftrl) if adam.ftrl else _NO_FTRL
        numbers = (to_float32(adam.constants), to_numpy(adam.steps), ftrl)
        self._run(self._kernels.adam_rows, backward, to_numpy(adam.state), *numbers)

    def _run(self, kernel: Any, backward: LookupBackward, *arguments: Any) -> None:
        """Sums the rows' gradients, runs a kernel on the rows of groups of tables, and records the ratios."""
        kernels, layout = self._kernels, self._numpy_layout
        bags = kernels.bags_of(backward.bags)
        # A table has about as many distinct rows in every step.
        groups = balanced_groups(bags.begins[1:] - bags.begins[:-1] + _WORK_OF_ROW * self._statistics.latest_rows)
        with profiled(ROW_GRADIENTS):
            id_weights = _NO_WEIGHTS if backward.id_weights is None else backward.id_weights.float().numpy()
            common = (layout, bags, id_weights, backward.output_grad.float().contiguous().view(-1).numpy())
            bad, sums = zip(*in_threads([partial(kernels.sum_rows, group, *common) for group in groups]), strict=True)
            self._lookup.raise_bad_id(bad, bags.begins, bags.indices)
        ratios = kernels.Ratios(np.empty(len(bags.indices), np.float32), np.zeros(len(bags.begins) - 1, np.int64))
        arguments = (layout, bags, self._clips, ratios, *arguments)
        in_threads([partial(kernel, group, own, *arguments) for group, own in zip(groups, sums, strict=True)])
        self._statistics.record_compiled(kernels.count_rows, ratios, bags.begins)

    def catch_up(self, bags: LookupBags, adam: AdamRows) -> None:
        own = self._kernels.bags_of(bags)
        keys, used = np.empty(len(own.indices), np.int64), np.zeros(len(own.begins) - 1, np.int64)
        steps = to_numpy(adam.steps)
        common = (self._numpy_layout, own, steps, keys, used)
        groups = balanced_groups(own.begins[1:] - own.begins[:-1])
        bad = in_threads([partial(self._replay_kernels.stale_rows, group, *common) for group in groups])
        found = self._replay_kernels.join_keys(keys, own.begins, used)
        # Rows that were marked before a bad id was found must catch up.
        if found:
            self._replay(keys[:found], adam, steps)
        self._lookup.raise_bad_id(bad, own.begins, own.indices)

    def pool(self, bags: LookupBags, inputs: Inputs, ids: LookupIds | None) -> tuple[Tensor | None, LookupIds | None]:
        if not self._lookup.pools_on_cpu or inputs.get("batch_size_per_feature_per_rank") is not None:
            return None, ids
        return self._lookup.pool_on_cpu(bags.indices, bags.offsets, inputs.get("per_sample_weights")), ids

    def replay(self, rows: Tensor, adam: AdamRows) -> None:
        keys = adam.steps.last_step[rows].long() << self._replay_kernels.ROW_BITS | rows
        self._replay(keys.numpy(), adam, to_numpy(adam.steps))

    def _replay(self, keys: np.ndarray, adam: AdamRows, steps: Any) -> None:
        """Takes the missed steps of distinct rows, by keys ``last_step << ROW_BITS | row``; sorts the keys."""
        keys.sort()
        rows: Any = StaleRows(*self._replay_kernels.rows_of_keys(keys, self._numpy_layout))
        state, lr_factors, columns = to_numpy(adam.state), steps.lr_factors, steps.adam_columns
        numbers = (to_float32(adam.constants), to_float32(adam.thresholds))
        # The rows that a kernel takes together have one width and one rate. Columns under FTRL miss no step.
        kinds = sorted({*zip(columns.tolist(), lr_factors.tolist(), strict=True)})
        for dim, lr_factor in kinds:
            same: Any = rows
            if len(kinds) > 1:
                tables = (columns == dim) & (lr_factors == np.float32(lr_factor))
                same = StaleRows(*(column[tables[rows.table]] for column in rows))
            work = len(same.last) * adam.step - int(same.last.sum(dtype=np.int64))
            parts = threads_for(work)
            common: tuple[Any, ...] = (parts, dim, np.float32(lr_factor), same, state, steps, *numbers)
            kernel: Any = self._replay_kernels.replay_rows
            if adam.clips_absent:
                kernel, common = self._replay_kernels.replay_clipped_rows, (*common, self._clips)
            in_threads([partial(kernel, part, *common) for part in range(parts)])


class TritonRows:
    """Kernels of Triton. Ids outside their tables are counted and become row 0, as in FBGEMM."""

    is_capturable = True

    def __init__(self, lookup: TbeLookup, layout: LookupLayout, limits: TableLimits, statistics: ClipStatistics):
        from ..kernels import triton_replay, triton_rows

        self._replay_kernels: Any = triton_replay
        self._kernels: Any = triton_rows
        self._lookup, self._layout, self._clips, self._statistics = lookup, layout, limits.clips, statistics

    def _on_own_device(self) -> AbstractContextManager[Any]:
        """Makes the tables' device current for Triton's launches; a new thread may have another current device."""
        device = self._layout.rows.device
        is_other = device.type == "cuda" and device.index != torch.cuda.current_device()
        return torch.cuda.device(device) if is_other else nullcontext()

    def find_rows(self, bags: LookupBags) -> LookupIds:
        with self._on_own_device():
            return self._find_rows(bags, self._statistics.outside)

    def _find_rows(self, bags: LookupBags, outside: Tensor) -> LookupIds:
        if not bags.indices.numel():
            return torch_rows.find_rows(self._layout, bags)
        ids: LookupIds = self._kernels.find_rows_on_device(self._layout, bags, outside)
        return ids

    def sum_rows(self, backward: LookupBackward) -> RowSums:
        if not backward.bags.indices.numel():
            ids = self.find_rows(backward.bags)
            return torch_rows.row_sums(self._layout, ids, backward.id_weights, backward.output_grad)
        rows = self._rows(backward)
        return torch_rows.with_sums(self._layout, rows.ids, rows.sums(), backward.output_grad.dtype)

    def _rows(self, backward: LookupBackward) -> Any:
        """DeviceRows of a backward pass, which has at least one id."""
        ids = backward.ids or self.find_rows(backward.bags)
        return self._kernels.DeviceRows(self._layout, ids, backward.id_weights, backward.output_grad)

    def id_factors(self, backward: LookupBackward) -> Tensor:
        if not backward.bags.indices.numel():
            self._statistics.record_no_rows()
            return torch.empty(0, dtype=torch.float32, device=self._layout.rows.device)
        rows = self._rows(backward)
        factors, results = rows.factors(self._clips, self._lookup.flat_weights())
        self._statistics.record_on_device(results, rows)
        of_ids: Tensor = rows.of_ids(factors)
        return of_ids

    def clipped_output_grad(self, backward: LookupBackward, l2: float) -> Tensor:
        if not backward.bags.indices.numel():
            self._statistics.record_no_rows()
            return torch.zeros_like(backward.output_grad)
        rows = self._rows(backward)
        written, results = rows.written(self._clips, self._lookup.flat_weights(), 2 * l2)
        self._statistics.record_on_device(results, rows)
        output_grad: Tensor = written
        return output_grad

    def update(self, backward: LookupBackward, adam: AdamRows) -> None:
        if not backward.bags.indices.numel():
            self._statistics.record_no_rows()
            return
        rows = self._rows(backward)
        results = rows.update(self._clips, adam.state, adam.steps, adam.constants, adam.ftrl, replays=adam.replays)
        self._statistics.record_on_device(results, rows)

    def catch_up(self, bags: LookupBags, adam: AdamRows) -> LookupIds | None:
        if not bags.indices.numel():
            return None
        with self._on_own_device():
            ids = self._find_rows(bags, self._statistics.outside)
            self._replay(ids.row, ids.begin, adam)
        return ids

    def pool(self, bags: LookupBags, inputs: Inputs, ids: LookupIds | None) -> tuple[Tensor | None, LookupIds | None]:
        if self._lookup.has_dense_gradient:
            return None, ids
        # Finding the rows counts the ids outside their tables.
        ids, output = ids or self.find_rows(bags), self._lookup.empty_output(bags, inputs)
        arguments = (inputs.get("per_sample_weights"), self._lookup.flat_weights(), output)
        with self._on_own_device():
            self._kernels.pool_rows_on_device(self._layout, bags, *arguments)
        return output, ids

    def replay(self, rows: Tensor, adam: AdamRows) -> None:
        with self._on_own_device():
            self._replay(rows, self._replay_kernels.distinct_begins(rows), adam)

    def _replay(self, row: Tensor, begin: Tensor, adam: AdamRows) -> None:
        clips, numbers = self._clips if adam.clips_absent else None, (adam.steps, adam.constants, adam.thresholds)
        self._replay_kernels.replay_rows_on_device(row, begin, self._layout, clips, adam.state, *numbers)


class TorchRows:
    """Work in torch, with the collectives that some plans and rules need. Sizes: T tables.

    Attributes:
        columns: sum of norms over column shards; None where rows are complete.
        gathers_rows: whether the ranks hold copies of the tables and exchange the rows of their batches.
        waits_for_ranks: whether a backward pass takes part in collectives even without ids.
    """

    is_capturable = False

    def __init__(
        self,
        lookup: TbeLookup,
        layout: LookupLayout,
        limits: TableLimits,
        statistics: ClipStatistics,
        columns: ColumnShards | None,
        device: RowBackend,
    ):
        self._lookup, self._layout, self._limits, self._statistics = lookup, layout, limits, statistics
        self.columns, self._device = columns, device
        self.gathers_rows = lookup.is_replicated and lookup.num_ranks > 1
        # A norm may include rows of other ranks.
        self._adds_up_norms = {"row": False, "field": lookup.splits_rows, "global": lookup.num_ranks > 1}[limits.scope]
        self.waits_for_ranks = self._adds_up_norms or self.gathers_rows

    def find_rows(self, bags: LookupBags) -> LookupIds:
        return self._device.find_rows(bags)

    def sum_rows(self, backward: LookupBackward) -> RowSums:
        """Finds the distinct rows of a backward pass and their gradients, over all ranks if tables are replicated."""
        with profiled(ROW_GRADIENTS):
            rows = self._device.sum_rows(backward)
            return torch_rows.sums_of_ranks(rows, self._lookup.process_group) if self.gathers_rows else rows

    def row_gradients(self, sums: RowSums) -> RowGradients:
        return torch_rows.with_weights(sums, self._layout, self._lookup.flat_weights())

    def id_factors(self, backward: LookupBackward) -> Tensor:
        rows = self.row_gradients(self.sum_rows(backward))
        return self.factors(rows)[rows.counts.slot]

    def clipped_output_grad(self, backward: LookupBackward, l2: float) -> Tensor:
        output_grad = torch.zeros_like(backward.output_grad, memory_format=torch.contiguous_format)
        rows = self._clipped(backward, l2)
        first = rows.address[rows.counts.occurrence][:, None]
        column = torch.arange(rows.grad.shape[1], device=output_grad.device)
        torch_rows.scatter_rows(output_grad.view(-1), torch.where(rows.inside, first + column, first), rows)
        return output_grad

    def dense_gradient(self, backward: LookupBackward, l2: float) -> Tensor:
        """Computes the gradient of the flat weights, float [sum rows * D], for a dense optimizer: clipped, with L2.

        The gradient of data-parallel tables is that of the global batch, for which ranks exchange the rows of their
        batches, and not complete tables as DistributedDataParallel does.
        """
        grad = torch.zeros_like(self._lookup.flat_weights())
        if backward.bags.indices.numel() or self.waits_for_ranks:
            rows = self._clipped(backward, l2)
            torch_rows.scatter_rows(grad, rows.element, rows)
        else:
            self._statistics.record_no_rows()
        return grad

    def _clipped(self, backward: LookupBackward, l2: float) -> RowGradients:
        rows = self.row_gradients(self.sum_rows(backward))
        rows.grad.add_(rows.weight, alpha=2 * l2)
        self._clip(rows)
        return rows

    def _clip(self, rows: RowGradients) -> None:
        factors = self.factors(rows)[:, None]
        rows.grad.mul_(torch.where(self._clipped_columns(rows), factors, 1))

    def id_weight_grad(self, backward: LookupBackward) -> Tensor:
        """Computes the gradient of each id's weight, float32 [nnz]: the row times the output gradient of the bag."""
        ids = backward.ids or self.find_rows(backward.bags)
        return torch_rows.weight_grads(self._layout, ids, self._lookup.flat_weights(), backward.output_grad)

    def update(self, backward: LookupBackward, adam: AdamRows) -> None:
        if not (backward.bags.indices.numel() or self.waits_for_ranks):
            self._statistics.record_no_rows()
            return
        sums = self.sum_rows(backward)
        decays = self._mark(sums, adam) if adam.replays else None
        rows, lr_factor = self.row_gradients(sums), adam.steps.lr_factors[sums.table][:, None]
        exp_avg, exp_avg_sq = adam.state.exp_avg[rows.element], adam.state.exp_avg_sq[rows.element]
        if adam.ftrl:
            alpha = adam.ftrl.alpha * lr_factor
            by_ftrl = ftrl_element(rows.weight, exp_avg_sq, rows.grad, alpha, adam.ftrl, exact_root, torch.div)
        rows.grad.add_(adam.constants.twice_l2 * rows.weight)
        self._clip(rows)
        if decays is not None:
            exp_avg_sq *= decays[:, None]
        own = table_scalars(adam.scalars, lr_factor)
        moments = (exp_avg, exp_avg_sq, rows.grad)
        stepped = adam_element(rows.weight, *moments, adam.constants, own, exact_root, torch.div)
        if adam.ftrl:
            column, (weight, squares) = torch.arange(exp_avg.shape[1], device=exp_avg.device), by_ftrl
            is_adams = column < adam.steps.adam_columns[rows.table][:, None]
            pairs = zip(stepped, (weight, torch.zeros_like(weight), squares), strict=True)
            stepped = tuple(torch.where(is_adams, *pair) for pair in pairs)
        for flat, value in zip(adam.state, stepped, strict=True):
            # Padding repeats a real row, whose elements are then written twice with the same values.
            flat[rows.element] = torch.where(rows.inside, value, value[:, :1]).to(flat.dtype)

    def _mark(self, sums: RowSums, adam: AdamRows) -> Tensor:
        """Marks rows as being at the latest step; returns the decay of second moments that they missed before, [nnz].

        Rows that only other ranks looked up first take their missed steps.
        """
        rows, last_step = torch_rows.rows_of_sums(self._layout, sums), adam.steps.last_step
        if self.gathers_rows:
            found = rows[sums.counts.real]
            adam.steps.taken.sub_(1)
            self.replay(found[torch_rows.is_behind(last_step[found], adam.step - 1)], adam._replace(step=adam.step - 1))
            adam.steps.taken.add_(1)
        decay = torch_rows.missed_decay(last_step[rows], adam.step - 1, adam.log_beta2)
        last_step.index_fill_(0, rows, adam.step)
        return decay

    def catch_up(self, bags: LookupBags, adam: AdamRows) -> LookupIds | None:
        return self._device.catch_up(bags, adam)

    def pool(self, bags: LookupBags, inputs: Inputs, ids: LookupIds | None) -> tuple[Tensor | None, LookupIds | None]:
        return self._device.pool(bags, inputs, ids)

    def replay(self, rows: Tensor, adam: AdamRows) -> None:
        if len(rows):
            self._device.replay(rows, adam)

    def factors(self, rows: RowGradients) -> Tensor:
        """Computes the clip factor of each row, float [nnz], padded like the rows, and records the ratios."""
        measured = self._clipped_columns(rows)
        if self._limits.scope != "row":
            return self.factors_of_norms(rows, *self.group_norms(self._table_squares(rows, measured))[:, rows.table])
        parts = [part.where(measured, 0) for part in (rows.grad, rows.weight)]
        norms = torch.stack([torch.linalg.vector_norm(part, dim=1, dtype=torch.float64) for part in parts])
        if self.columns:
            norms = self.columns.add_up(rows, norms.square()).sqrt()
        return self.factors_of_norms(rows, *norms)

    def factors_of_norms(self, rows: RowGradients, norms: Tensor, weight_norms: Tensor) -> Tensor:
        """Computes :meth:`factors` from the norms that bound each row, float [nnz]."""
        norms, weight_norms = norms.to(rows.grad.dtype), weight_norms.to(rows.grad.dtype)
        _, r, floor, per_occurrence = (limit[rows.table] for limit in self._limits.clips)
        limits = limits_of_norms(weight_norms, rows.counts.count, r, floor, per_occurrence)
        self._statistics.record(torch.nan_to_num(norms / limits, nan=0.0, posinf=torch.inf), rows)
        return scales_of_norms(norms, limits)

    def group_norms(self, squares: Tensor) -> Tensor:
        """Computes norms of each table or of all tables, over all ranks, from the tables' squares, float64 [2, T]."""
        squares = squares.where(~self._limits.excluded, 0)
        if self._limits.scope == "global":  # before the ranks, which may hold different numbers of tables
            squares = squares.sum(1, keepdim=True)
        if self._adds_up_norms:
            dist.all_reduce(squares, group=self._lookup.process_group)
        return squares.sqrt().expand(-1, len(self._lookup.shards))

    def _clipped_columns(self, rows: RowGradients) -> Tensor:
        """True for the columns that the clip measures and scales, bool [nnz, D]."""
        column = torch.arange(rows.grad.shape[1], device=rows.grad.device)
        return column < self._limits.clips.columns[rows.table][:, None]

    def _table_squares(self, rows: RowGradients, measured: Tensor) -> Tensor:
        """Computes squared norms of each table's gradients and weights over the batch's rows; float64 [2, T]."""
        measured = measured & rows.counts.real[:, None]
        squares = [part.double().where(measured, 0).square().sum(1) for part in (rows.grad, rows.weight)]
        zeros = torch.zeros(2, len(self._lookup.shards), dtype=torch.float64, device=measured.device)
        return zeros.index_add_(1, rows.table, torch.stack(squares))
