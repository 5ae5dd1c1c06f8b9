"""Replay: embedding rows take the Adam steps that they missed when they are needed, not before.

A row without an id in the batch still moves in the published algorithm, by L2 and by its first moment, but what it does
depends on nothing but itself and the steps' learning rates. So it can do so later: when its id comes next, when it is
evaluated, or when the table is read as a whole.
"""

from collections.abc import Sequence
from dataclasses import astuple
from functools import partial
from math import inf, log

import numpy as np
import torch
from torch import Tensor

from cowrec.sparse_opt.algorithm.adam import AdamConfig, adam_constants, adam_scalars
from cowrec.sparse_opt.algorithm.clip import ClipRule, RowLimit
from cowrec.sparse_opt.clipping.clipped_lookup import LookupRows
from cowrec.sparse_opt.kernels.cpu_replay import PLACE_BITS, replay_clipped_rows, replay_rows, stale_rows
from cowrec.sparse_opt.kernels.threads import balanced_groups, in_threads
from cowrec.sparse_opt.kernels.torch_rows import LookupIds, RowSums, rows_of_ids

REST = 1e-11
"""A weight this small is at rest where L2 draws it to zero, and so is a first moment that can move it no further."""
REST_WITHOUT_L2 = 1e-20
"""Without L2 a weight stays where its first moment leaves it, so that may move it less than its last digit."""
REST_OF_FLOOR = 1e-6
"""Nor is a weight at rest before it is this small a share of the clip's floor: its norm then decides nothing."""
_ROWS_AT_ONCE = 1 << 22


def require_replayable(rule: ClipRule, config: AdamConfig, column_wise: Sequence[str]) -> None:
    """Raises ValueError, on all ranks alike, for what rows that are behind cannot follow.

    Args:
        rule: clip rule.
        config: Adam's settings.
        column_wise: clipped tables whose rows are cut into column shards.
    """
    if rule.scope != "row":
        raise ValueError(
            f"clip.rule = {rule.name!r} needs the norm of every row at every step, which absent_rows ="
            ' "replay" does not know; set it to "lazy" (the rows of the batch alone) or "dense" (all rows)'
        )
    if column_wise and _absent_clip_binds(rule.limit(1), config):
        raise ValueError(
            f"table {column_wise[0]!r} is sharded column-wise, and an absent row's L2 may exceed its limit alone"
            f" (2 * l2 = {2 * config.l2:g} is not below clip.r), which needs the norm of all its columns in every"
            ' step that it missed; lower l2, shard the table row- or table-wise, or set absent_rows = "dense"'
        )


class StepHistory:
    """Learning rates of the steps so far, and the scalars that follow from them, where the kernels read them.

    Attributes:
        step_sizes, denominator_scales: of :class:`AdamScalars`, float32 [at least the steps so far].
    """

    def __init__(self, config: AdamConfig, device: torch.device):
        self._config = config
        self._lrs = np.empty(0)
        self._steps = 0
        self.step_sizes = torch.empty(0, device=device)
        self.denominator_scales = torch.empty(0, device=device)

    @property
    def lrs(self) -> Tensor:
        """Learning rate of each step so far, float64 [steps], on CPU; shares the history's memory."""
        return torch.from_numpy(self._lrs[: self._steps])

    def record(self, step: int, lr: float) -> None:
        """Adds step ``step``, from 1, unless another lookup of the same step has done so."""
        if step <= self._steps:
            return
        self._reserve(step)
        self._lrs[step - 1], self._steps = lr, step
        scalars = adam_scalars(self._config, lr, step)
        # fill_ takes the number along with the kernel; an assignment may copy it over from the host.
        self.step_sizes[step - 1 : step].fill_(scalars.step_size)
        self.denominator_scales[step - 1 : step].fill_(scalars.denominator_scale)

    def replace(self, lrs: np.ndarray) -> None:
        """Sets the learning rates of all steps so far, float64 [steps]."""
        self._steps = len(lrs)
        self._reserve(self._steps)
        self._lrs[: self._steps] = lrs
        scalars = [astuple(adam_scalars(self._config, lr, step)) for step, lr in enumerate(lrs.tolist(), 1)]
        both = torch.tensor(scalars, dtype=torch.float32).view(-1, 2)
        self.step_sizes[: self._steps], self.denominator_scales[: self._steps] = both[:, 0], both[:, 1]

    def _reserve(self, steps: int) -> None:
        room = len(self._lrs)
        if steps > room:
            more = max(steps, 2 * room, 1024) - room
            self._lrs = np.append(self._lrs, np.empty(more))
            self.step_sizes = torch.cat([self.step_sizes, self.step_sizes.new_zeros(more)])
            self.denominator_scales = torch.cat([self.denominator_scales, self.denominator_scales.new_zeros(more)])


class Replay:
    """The last step of every row of one lookup, and the way to bring rows up to date.

    Args:
        rows: the lookup under its clip rule.
        config: Adam's settings.
        history: the optimizer's steps.
        exp_avg, exp_avg_sq: the rows' moments, laid out like the weights; updated in place.

    Attributes:
        last_step: step that each row took last, int32 [rows of all tables]; ``~t`` (negative) for a row that came to
            rest at step t.
        first_rows: number of each table's first row.
        uses_triton: whether the Triton kernel does the work, as it does on CUDA, or numba's.

    Raises:
        ValueError: tables that are not float32.
    """

    def __init__(self, rows: LookupRows, config: AdamConfig, history: StepHistory, exp_avg: Tensor, exp_avg_sq: Tensor):
        weights, shards = rows.lookup.flat_weights(), rows.lookup.shards
        if weights.dtype != torch.float32:
            raise ValueError(
                f"replay computes missed steps in float32, but table {shards[0].name!r} is {weights.dtype}, which"
                ' rounds each step anew; make the table float32 or set absent_rows = "lazy"'
            )
        self._rows, self._config, self._history = rows, config, history
        self._state = (weights, exp_avg, exp_avg_sq)
        self.last_step = torch.zeros(sum(shard.rows for shard in shards), dtype=torch.int32, device=weights.device)
        self.uses_triton = weights.is_cuda
        self.first_rows = np.cumsum([0, *(shard.rows for shard in shards[:-1])])
        self._first_rows = torch.from_numpy(self.first_rows).to(weights.device)
        self.log_beta2 = log(np.float32(config.betas[1])) if config.betas[1] > 0 else -inf
        limits = rows.limits
        self._absent_clip_binds = any(_absent_clip_binds(limit, config) for limit in limits)
        self._rest = _rest(config, [limit.floor for limit in limits])

    def catch_up(self, indices: Tensor, offsets: Tensor, step: int) -> LookupIds | None:
        """Brings the rows of a lookup's ids to ``step``; their second moments at rest stay as they are.

        Returns:
            The rows behind the ids, where it had to find them.

        Raises:
            ValueError: an id outside its table (on CPU).
        """
        if not self.uses_triton:
            self._bring_current_on_cpu(indices.long().numpy(), offsets.long().numpy(), step)
            return None
        if not indices.numel():
            return None
        ids = rows_of_ids(self._rows.layout, indices, offsets)
        self._bring_current_on_device(ids, step)
        return ids

    def bring_all_current(self, step: int) -> None:
        """Brings every row to ``step``; second moments of rows at rest stay as they are."""
        for first in range(0, len(self.last_step), _ROWS_AT_ONCE):
            last = self.last_step[first : first + _ROWS_AT_ONCE]
            places = ((last >= 0) & (last < step)).nonzero().flatten() + first
            if len(places):
                self._replay(_keys(places, self.last_step[places]), step)

    def bring_rows_current(self, rows: RowSums, step: int) -> None:
        """Brings the rows of a backward pass to ``step``, also those that no id of this rank asked for."""
        self.bring_places_current(self._places_of(rows.table, rows.start)[rows.counts.real], step)

    def bring_places_current(self, places: Tensor, step: int) -> None:
        """Brings distinct rows, by their numbers among those of all tables (int64 [n]), to ``step``."""
        last = self.last_step[places]
        places = places[(last >= 0) & (last < step)]
        if len(places):
            self._replay(_keys(places, self.last_step[places]), step)

    def flush(self, step: int) -> None:
        """Brings every row and all its moments to ``step``."""
        self.bring_all_current(step)
        for table in range(len(self._rows.lookup.shards)):
            last = self.last_step_of(table)
            second = self._rows.lookup.view_of(self._state[2], table)
            for some, of_some in zip(last.split(_ROWS_AT_ONCE), second.split(_ROWS_AT_ONCE), strict=True):
                of_some.mul_(self.decay_at_rest(some, step)[:, None])
                some.fill_(step)

    def last_step_of(self, table: int) -> Tensor:
        """:attr:`last_step` of one table's rows, in the same memory."""
        first = int(self.first_rows[table])
        return self.last_step[first : first + self._rows.lookup.shards[table].rows]

    def decay_at_rest(self, last: Tensor, step: int) -> Tensor:
        """What the second moment of rows with these last steps has missed up to ``step``, float32; 1 for the others."""
        asleep = torch.where(last < 0, step - ~last, 0)
        return torch.where(asleep > 0, (asleep.double() * self.log_beta2).exp(), 1).float()

    def mark_current(self, step: int) -> None:
        """Takes the rows as they are for those after ``step``."""
        self.last_step.fill_(step)

    def take_step(self, rows: RowSums, step: int) -> Tensor:
        """Marks rows as being at ``step``; returns the factor that their second moments missed before it, [nnz]."""
        places = self._places_of(rows.table, rows.start)
        decay = self.decay_at_rest(self.last_step[places], step - 1)
        self.last_step[places] = step
        return decay

    def _places_of(self, table: Tensor, start: Tensor) -> Tensor:
        """Numbers of rows of the given tables whose first elements are at ``start`` in the flat weights, int64 [n]."""
        layout = self._rows.layout
        return self._first_rows[table] + (start - layout.start[table]) // layout.dim[table]

    def _bring_current_on_cpu(self, indices: np.ndarray, offsets: np.ndarray, step: int) -> None:
        begins = self._rows.begins(offsets)
        keys, used = np.empty(len(indices), np.int64), np.zeros(len(begins) - 1, np.int64)
        rows = self._rows.layout.rows.numpy()
        last_step = self.last_step.numpy()
        groups = balanced_groups(np.diff(begins))
        common = (begins, rows, self.first_rows, indices, last_step, step, keys, used)
        bad = in_threads([partial(stale_rows, group, *common) for group in groups])
        found = np.concatenate([keys[begin : begin + n] for begin, n in zip(begins, used, strict=False)])
        # Rows that were marked before the bad id was met are brought up to date too: no row is lost.
        if len(found):
            self._replay(torch.from_numpy(found), step)
        self._rows.raise_bad_ids(bad, begins, indices)

    def _bring_current_on_device(self, ids: LookupIds, step: int) -> None:
        """Does not wait for the device: distinct rows are padded to the number of ids, and what is current stays."""
        one = ids.counts.occurrence
        place = self._places_of(ids.table[one], ids.start[one])
        lasts = self.last_step[place].where(ids.counts.real, step)
        self._replay(_keys(place, torch.where(lasts < 0, step, lasts)), step)

    def _replay(self, keys: Tensor, step: int) -> None:
        """Brings distinct rows up to date, those with the same last step side by side.

        Args:
            keys: of the rows, see :func:`_keys`; on CUDA some may be there twice, if they say that the row is current.
        """
        layout = self._rows.layout
        if self.uses_triton:
            keys = keys.sort().values
        else:
            keys.numpy().sort()
        places, lasts = keys & ((1 << PLACE_BITS) - 1), (keys >> PLACE_BITS).int()
        table = torch.searchsorted(self._first_rows, places, right=True) - 1
        dims = layout.dim[table]
        starts = layout.start[table] + (places - self._first_rows[table]) * dims
        if not self.uses_triton:
            for dim in dims.unique().tolist():
                kept = (
                    (dims == dim).nonzero().flatten() if dim != layout.max_dim or (dims != dim).any() else slice(None)
                )
                self._replay_on_cpu(dim, table[kept], starts[kept], places[kept], lasts[kept], step)
            return
        from cowrec.sparse_opt.kernels.triton_rows import replay_rows_on_device

        replay_rows_on_device(
            *(starts, places, lasts, dims),
            layout.max_dim,
            *(*self._state, self.last_step),
            step,
            *(self._history.step_sizes, self._history.denominator_scales),
            self._scalars(),
            limits=[each[table] for each in self._rows.limit_tensors] if self._absent_clip_binds else None,
        )

    def _replay_on_cpu(self, dim: int, table: Tensor, starts: Tensor, places: Tensor, lasts: Tensor, step: int) -> None:
        tensors = (starts, places, lasts, *self._state, self.last_step)
        scalars = (self._history.step_sizes.numpy(), self._history.denominator_scales.numpy())
        common = (dim, *(each.numpy() for each in tensors), step, *scalars, *map(np.float32, self._scalars()))
        parts = torch.get_num_threads()
        if self._absent_clip_binds:
            limits = (table.numpy(), *(each.numpy() for each in self._rows.limit_tensors))
            in_threads([partial(replay_clipped_rows, part, parts, *limits, *common) for part in range(parts)])
        else:
            in_threads([partial(replay_rows, part, parts, *common) for part in range(parts)])

    def _scalars(self) -> tuple[float, ...]:
        """The numbers that the kernels take behind the steps' scalars."""
        constants = adam_constants(self._config)
        rest_motion = self._rest * constants.eps * constants.rest1
        return (*astuple(constants), self._config.lr, self._rest, rest_motion)


def _keys(places: Tensor, lasts: Tensor) -> Tensor:
    """Keys of rows with these numbers and last steps, int64 [n]: in their order rows of one last step are together."""
    return lasts.long() << PLACE_BITS | places


def _absent_clip_binds(limit: RowLimit, config: AdamConfig) -> bool:
    """Whether L2's gradient of an absent row may be over its limit: it counts once, so that is r * ||w|| at least."""
    return 2 * config.l2 > 0.999 * limit.r and config.l2 > 0 and limit.floor < inf


def _rest(config: AdamConfig, floors: Sequence[float]) -> float:
    """The largest weight that is at rest; 0 where none but zero itself is.

    Near zero Adam under L2 is the heavy-ball method on ``l2 * w^2`` with step ``lr / (sqrt(v) + eps)``, at most
    ``lr / eps``. It converges where ``2 * l2 * lr / eps < 2 * (1 + b1) / (1 - b1)`` (Polyak 1964, with the moment's
    factor 1 - b1); elsewhere a row may swell again from next to nothing once its second moment has decayed.
    """
    if config.l2 == 0:
        return REST_WITHOUT_L2
    beta1 = config.betas[0]
    if 2 * config.l2 * config.lr / config.eps > 0.9 * 2 * (1 + beta1) / (1 - beta1):
        return 0.0
    return min(REST, *(REST_OF_FLOOR * floor for floor in floors))
