"""Replay: embedding rows take the Adam steps that they missed when they are needed.

A row without an id in the batch still changes in the published algorithm, by L2 and by its first moment, and where
asked by decoupled weight decay, but the change depends only on the row and the learning rates of the steps. It can
therefore be computed later: when the row's id occurs again, when the row is evaluated, or when the table is read.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from math import inf, log
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cowrec.sparse_opt.algorithm.adam import AdamConfig, adam_constants
from cowrec.sparse_opt.algorithm.clip import RowLimit
from cowrec.sparse_opt.clipping.clipped_lookup import ClippedLookup
from cowrec.sparse_opt.clipping.table_rules import TableRules
from cowrec.sparse_opt.kernels.cpu_replay import (
    ROW_BITS,
    join_keys,
    replay_clipped_rows,
    replay_rows,
    rows_of_keys,
    stale_rows,
)
from cowrec.sparse_opt.kernels.cpu_rows import bags_of
from cowrec.sparse_opt.kernels.layout import (
    AdamState,
    DecayThresholds,
    DeviceSteps,
    LastSteps,
    LookupBags,
    StaleRows,
    to_float32,
    to_numpy,
)
from cowrec.sparse_opt.kernels.threads import balanced_groups, in_threads, threads_for
from cowrec.sparse_opt.kernels.torch_rows import LookupIds, RowSums
from cowrec.sparse_opt.tbe.lookup import raise_bad_id

from .step_history import StepHistory

DECAYED = 1e-11
"""Largest weight that has decayed where L2 draws it to zero; likewise the change that a first moment still causes."""
DECAYED_WITHOUT_L2 = 1e-20
"""Without L2 a weight keeps what its first moment adds, so that change must be below the weight's last digit."""
DECAYED_SHARE_OF_FLOOR = 1e-6
"""Largest share of the clip's floor that a decayed weight may have: its norm then does not affect the limit."""
_ROWS_AT_ONCE = 1 << 22


def require_replayable(rules: TableRules, config: AdamConfig, column_wise: Iterable[str]) -> None:
    """Raises ValueError, on all ranks alike, for a rule or tables that cannot be replayed.

    Args:
        rules: clip rules.
        config: Adam's settings.
        column_wise: tables that are sharded column-wise.
    """
    if rules.scope != "row":
        raise ValueError(
            f"clip.rule = {rules.name!r} needs the norm of every row in every step, which absent_rows ="
            ' "replay" does not compute; set it to "lazy" (the rows of the batch alone) or "dense" (all rows)'
        )
    for table in sorted(each for each in column_wise if _absent_clip_binds(rules.of(each).limit(1), config)):
        raise ValueError(
            f"table {table!r} is sharded column-wise, and an absent row's L2 may exceed its limit alone"
            f" (2 * l2 = {2 * config.l2:g} is not below clip.r), which needs the norm of all its columns in every"
            ' step that it missed; lower l2, shard the table row- or table-wise, or set absent_rows = "dense"'
        )


class Replay:
    """Last steps of the rows of one lookup, and their catching up.

    Args:
        clipped: the lookup under its clip rule.
        config: Adam's settings.
        history: the optimizer's steps.
        state: weights and moments, updated in place.
        taken: the lookup's number of steps, int32 [1]; the steps that rows are brought to are at most this one.
        lr_factors: factors of the tables' learning rates, float32 [tables], on the CPU.

    Attributes:
        last_step: as in :class:`LastSteps`.

    Raises:
        ValueError: the tables are not float32.
    """

    def __init__(
        self,
        clipped: ClippedLookup,
        config: AdamConfig,
        history: StepHistory,
        state: AdamState,
        taken: Tensor,
        lr_factors: Tensor,
    ):
        self._clipped, self._layout, self._history, self._state = clipped, clipped.layout, history, state
        weights, shards = state.weights, clipped.lookup.shards
        if weights.dtype != torch.float32:
            raise ValueError(
                f"replay computes missed steps in float32, but table {shards[0].name!r} is {weights.dtype}, which"
                ' rounds in each step; make the table float32 or set absent_rows = "lazy"'
            )
        # The rows that a CPU kernel takes together have one width and one rate.
        kinds = list(zip((shard.embedding_dim for shard in shards), lr_factors.tolist(), strict=True))
        self._kinds = sorted(set(kinds))
        self._kind_of_table = np.array([self._kinds.index(kind) for kind in kinds])
        self.last_step = torch.zeros(sum(shard.rows for shard in shards), dtype=torch.int32, device=weights.device)
        self._taken, self._lr_factors = taken, lr_factors.to(weights.device)
        self._log_beta2_on_device = torch.empty(1, dtype=torch.float64, device=weights.device)
        self.reconfigure(config)

    def reconfigure(self, config: AdamConfig) -> None:
        """Changes the settings of the coming steps, under the lookup's present limits. No row may be behind."""
        self._log_beta2 = log(np.float32(config.betas[1])) if config.betas[1] > 0 else -inf
        self._log_beta2_on_device.fill_(self._log_beta2)
        limits = self._clipped.limits.per_table
        self._absent_clip_binds = any(_absent_clip_binds(limit, config) for limit in limits)
        self._constants = adam_constants(config)
        largest_lr = config.lr * max(lr_factor for _, lr_factor in self._kinds)
        weight = _decayed_weight(config, largest_lr, [limit.floor for limit in limits])
        motion = weight * self._constants.eps * self._constants.one_minus_beta1
        self._thresholds = DecayThresholds(config.lr, weight, motion)

    @property
    def device_steps(self) -> DeviceSteps:
        """Steps of the rows and of the optimizer, as the CUDA kernels take them."""
        numbers = (*self._history.schedule, self._lr_factors, self._log_beta2_on_device)
        return DeviceSteps(self._taken, self.last_step, *numbers)

    def progress(self, step: int) -> LastSteps:
        """Last steps of the rows, and ``step``, as the kernels take them."""
        return LastSteps(self.last_step, step, self._log_beta2)

    def catch_up(self, bags: LookupBags, step: int) -> LookupIds | None:
        """Brings the rows of a lookup's ids to ``step``, except for the second moments of decayed rows.

        Returns:
            The rows of the ids, if it had to find them.

        Raises:
            ValueError: an id is outside its table (on CPU).
        """
        if not self._clipped.uses_triton:
            self._catch_up_on_cpu(bags, step)
            return None
        if not bags.indices.numel():
            return None
        ids = self._clipped.find_rows(bags)
        self._replay_on_device(ids.row, ids.begin)
        return ids

    def catch_up_all(self, step: int) -> None:
        """Brings every row to ``step``, except for the second moments of decayed rows."""
        self._clipped.lookup.empty_cache()
        for first in range(0, len(self.last_step), _ROWS_AT_ONCE):
            last = self.last_step[first : first + _ROWS_AT_ONCE]
            self._replay_rows(((last >= 0) & (last < step)).nonzero().flatten() + first, step)

    def catch_up_sums(self, sums: RowSums, step: int) -> None:
        """Brings the rows of a backward pass to ``step``, including those that only other ranks looked up."""
        self.catch_up_rows(self._row_index(sums.table, sums.start)[sums.counts.real], step)

    def catch_up_rows(self, rows: Tensor, step: int) -> None:
        """Brings distinct rows, by their indices among the rows of all tables (int64 [n]), to ``step``."""
        last = self.last_step[rows]
        self._replay_rows(rows[(last >= 0) & (last < step)], step)

    def flush(self, step: int) -> None:
        """Brings every row and all its moments to ``step``."""
        self.catch_up_all(step)
        for table in range(len(self._clipped.lookup.shards)):
            last = self.last_step_of(table)
            second = self._clipped.lookup.view_of(self._state.exp_avg_sq, table)
            for part, part_of_second in zip(last.split(_ROWS_AT_ONCE), second.split(_ROWS_AT_ONCE), strict=True):
                part_of_second.mul_(self._missed_decay(part, step)[:, None])
                part.fill_(step)

    def last_step_of(self, table: int) -> Tensor:
        """:attr:`last_step` of one table's rows, in the same memory."""
        first = int(self._layout.first_row[table])
        return self.last_step[first : first + self._clipped.lookup.shards[table].rows]

    def mark_current(self, step: int) -> None:
        """Declares all rows, as they are, to be at ``step``."""
        self.last_step.fill_(step)

    def take_step(self, sums: RowSums, step: int) -> Tensor:
        """Marks rows as being at ``step``; returns the decay that their second moments missed before it, [nnz]."""
        rows = self._row_index(sums.table, sums.start)
        decay = self._missed_decay(self.last_step[rows], step - 1)
        self.last_step.index_fill_(0, rows, step)
        return decay

    def _missed_decay(self, last: Tensor, step: int) -> Tensor:
        """Decay of second moments that rows with these last steps missed up to ``step``, float32."""
        missed = torch.where(last < 0, step - ~last, 0)
        return torch.where(missed > 0, (missed.double() * self._log_beta2).exp(), 1).float()

    def _row_index(self, table: Tensor, start: Tensor) -> Tensor:
        """Indices of rows of the given tables whose first elements are at ``start`` in the flat weights, int64 [n]."""
        layout = self._layout
        return layout.first_row[table] + (start - layout.start[table]) // layout.dim[table]

    def _catch_up_on_cpu(self, lookup_bags: LookupBags, step: int) -> None:
        layout, bags = self._clipped.numpy_layout, bags_of(lookup_bags)
        keys, used = np.empty(len(bags.indices), np.int64), np.zeros(len(bags.begins) - 1, np.int64)
        common = (layout, bags, to_numpy(self.progress(step)), keys, used)
        groups = balanced_groups(bags.begins[1:] - bags.begins[:-1])
        bad = in_threads([partial(stale_rows, group, *common) for group in groups])
        found = join_keys(keys, bags.begins, used)
        # Rows that were marked before the bad id was found are caught up too: no row is lost.
        if found:
            self._replay(keys[:found], step)
        raise_bad_id(self._clipped.lookup, bad, bags.begins, bags.indices)

    def _replay_rows(self, rows: Tensor, step: int) -> None:
        """Takes the missed steps of distinct rows, by their indices among the rows of all tables, int64 [n]."""
        if not len(rows):
            return
        if self._clipped.uses_triton:
            from cowrec.sparse_opt.kernels.triton_replay import distinct_begins

            self._replay_on_device(rows, distinct_begins(rows))
        else:
            self._replay((self.last_step[rows].long() << ROW_BITS | rows).numpy(), step)

    def _replay(self, keys: np.ndarray, step: int) -> None:
        """Takes the missed steps of distinct rows on CPU, in the order of their last steps.

        Args:
            keys: ``last_step << ROW_BITS | row`` of each, int64 [n]; sorted in place.
        """
        keys.sort()
        rows = StaleRows(*rows_of_keys(keys, self._clipped.numpy_layout))
        if len(self._kinds) == 1:
            self._replay_on_cpu(*self._kinds[0], rows, step)
            return
        kinds = self._kind_of_table[rows.table]
        for number, kind in enumerate(self._kinds):
            same = StaleRows(*(each[kinds == number] for each in rows))
            if len(same.row):
                self._replay_on_cpu(*kind, same, step)

    def _replay_on_device(self, row: Tensor, begin: Tensor) -> None:
        from cowrec.sparse_opt.kernels.triton_replay import replay_rows_on_device

        replay_rows_on_device(
            row,
            begin,
            self._layout,
            self._clipped.limits.clips if self._absent_clip_binds else None,
            self._state,
            self._clipped.lookup.cache_of(row),
            self.device_steps,
            self._constants,
            self._thresholds,
        )

    def _replay_on_cpu(self, dim: int, lr_factor: float, rows: Any, step: int) -> None:
        tuples = (to_numpy(each) for each in (self._state, self.progress(step), self._history.schedule))
        numbers = (to_float32(self._constants), to_float32(self._thresholds))
        common: tuple[Any, ...] = (dim, np.float32(lr_factor), rows, *tuples, *numbers)
        kernel: Callable[..., None] = replay_rows
        if self._absent_clip_binds:
            kernel, common = replay_clipped_rows, (*common, to_numpy(self._clipped.limits.clips))
        parts = threads_for(len(rows.last) * step - int(rows.last.sum(dtype=np.int64)))
        in_threads([partial(kernel, part, parts, *common) for part in range(parts)])


def _absent_clip_binds(limit: RowLimit, config: AdamConfig) -> bool:
    """True if L2's gradient of an absent row may exceed its limit, which is at least r * ||w|| (one occurrence)."""
    return 2 * config.l2 > 0.999 * limit.r and config.l2 > 0 and limit.floor < inf


def _decayed_weight(config: AdamConfig, lr: float, floors: Sequence[float]) -> float:
    """Largest weight that has decayed; 0 if only zero itself has.

    Near zero, Adam under L2 is the heavy-ball method on ``l2 * w^2`` with step ``lr / (sqrt(v) + eps)``, at most
    ``lr / eps``. It converges where ``2 * l2 * lr / eps < (2 - d) * (1 + b1) / (1 - b1)``, d being the weight decay of
    a step (Polyak 1964, with the moment's factor 1 - b1; with d by Jury's conditions on ``z^2 - (1 - d + b1 - a) * z +
    b1 * (1 - d)``, ``a = (1 - b1) * 2 * l2 * lr / eps``); elsewhere a tiny row may grow again once its second moment
    has decayed.
    """
    if config.l2 == 0:
        return DECAYED_WITHOUT_L2
    beta1 = config.betas[0]
    if 2 * config.l2 * lr / config.eps > 0.9 * (2 - lr * config.weight_decay) * (1 + beta1) / (1 - beta1):
        return 0.0
    return min(DECAYED, *(DECAYED_SHARE_OF_FLOOR * floor for floor in floors))
