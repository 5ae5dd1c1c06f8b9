"""Adam on the rows of one lookup: the step that its backward takes, and the missed steps of absent rows."""

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from threading import RLock

import torch
from torch import Tensor

from cowrec.errors import UserError

from ..algorithm.adam import AdamConfig, adam_constants, ftrl_constants
from ..kernels.layout import AdamRows, AdamState, DeviceSteps, LookupBackward, LookupBags, LookupIds, RowResults
from ..kernels.profiling import EMBEDDING_UPDATE, profiled
from ..kernels.torch_rows import is_behind, missed_decay
from ..lookups.backward import Forward, LossScale, ReplacedUpdate, look_up_replaced
from ..lookups.row_backends import Inputs
from ..lookups.wrapped_lookup import WrappedLookup
from ..tbe.lookup import TbeLookup
from .all_rows import update_all_rows
from .replay import StepHistory, absent_clip_binds, log_beta2, rest_thresholds

_ROWS_AT_ONCE = 1 << 22


class LookupAdam:
    """Moments and step count of one lookup, and its Adam step.

    Under ``absent_rows = "replay"``, an absent row takes its step later, when a forward pass looks the row up or when
    the table is read. The step, by L2, the first moment and weight decay, depends only on the row and on the learning
    rates of the missed steps. ``lr_factors`` are factors of the tables' learning rates, by name; 1 for other tables. A
    backward pass calls ``lr``, which returns the learning rate.
    """

    def __init__(
        self,
        wrapped: WrappedLookup,
        config: AdamConfig,
        history: StepHistory,
        lr_factors: Mapping[str, float],
        lr: Callable[[], float],
    ):
        self.wrapped, self._history, self._lr = wrapped, history, lr
        shards, weights = self.lookup.shards, self.lookup.flat_weights()
        self.replays = config.absent_rows == "replay"
        if self.replays and weights.dtype != torch.float32:
            raise UserError(
                f"replay computes missed steps in float32, but table {shards[0].name!r} is {weights.dtype}, which"
                ' rounds in each step; make the table float32 or set absent_rows = "lazy"'
            )
        self.exp_avg, self.exp_avg_sq = self.lookup.zeros_of_weights(), self.lookup.zeros_of_weights()
        self._lr_factors = torch.tensor([lr_factors.get(shard.name, 1.0) for shard in shards], dtype=torch.float32)
        self._lr_factors_here = self._lr_factors.to(weights.device)
        columns = wrapped.limits.columns if config.wide else [shard.embedding_dim for shard in shards]
        self._adam_columns = torch.tensor(columns, device=weights.device)
        rows = sum(shard.rows for shard in shards) if self.replays else 0
        self.last_step = torch.zeros(rows, dtype=torch.int32, device=weights.device)
        self._step, self._taken = 0, torch.zeros(1, dtype=torch.int32, device=weights.device)
        self._config, self._constants = config, adam_constants(config)
        self._ftrl = ftrl_constants(config.wide) if config.wide else None
        self._log_beta2 = log_beta2(config)
        self._log_beta2_here = torch.tensor([self._log_beta2], dtype=torch.float64, device=weights.device)
        limits = wrapped.limits.per_table
        self._clips_absent = any(absent_clip_binds(limit, config) for limit in limits)
        self._thresholds = rest_thresholds(config, max(self._lr_factors.tolist()), limits)
        self._captured: RowResults | None = None
        # Version of the weights' memory after the optimizer's latest write; None while managed collision writes rows.
        self._seen: int | None = self.lookup.parameter._version
        # Step at which no row was behind. While this is the latest step, others may write rows.
        self._current_at = 0
        self._lock = RLock()  # another thread may evaluate meanwhile, which makes rows catch up too

    def set_ftrl_samples(self, samples: int) -> None:
        if self._config.wide and self._config.wide.batch_size != samples:
            self._config = replace(self._config, wide=replace(self._config.wide, batch_size=samples))
            self._ftrl = ftrl_constants(self._config.wide)

    @property
    def lookup(self) -> TbeLookup:
        return self.wrapped.lookup

    @property
    def state(self) -> AdamState:
        return AdamState(self.lookup.flat_weights(), self.exp_avg, self.exp_avg_sq)

    @property
    def step(self) -> int:
        return self._step

    @step.setter
    def step(self, value: int) -> None:
        self._step = value
        self._taken.fill_(value)
        self._history.return_to(value)

    @property
    def _device_steps(self) -> DeviceSteps:
        numbers = (*self._history.step_scalars, self._lr_factors_here, self._log_beta2_here, self._adam_columns)
        return DeviceSteps(self._taken, self.last_step, *numbers)

    def _rows(self) -> AdamRows:
        numbers = (self._step, self._log_beta2, self._clips_absent, self._ftrl)
        return AdamRows(self.state, self._constants, self._thresholds, self._device_steps, *numbers)

    def look_up(self, loss_scale: LossScale, forward: Forward, inputs: Inputs) -> Tensor:
        """Runs the forward of the lookup: rows catch up and are looked up. The backward then updates them."""
        bags = self.wrapped.bags.of(inputs)
        with torch.no_grad():
            caught_up = self.catch_up(bags)
            pooled, ids = self.wrapped.rows.pool(bags, inputs, caught_up)
            output = forward(**inputs) if pooled is None else pooled
        if not torch.is_grad_enabled():
            return output
        # Passes of one step may have brought rows to different steps.
        step_of_forward = self._step if self.wrapped.accumulation.passes == 1 else -1

        def update(backward: LookupBackward) -> None:
            with profiled(EMBEDDING_UPDATE):
                self.update(backward, self._lr(), step_of_forward)

        return look_up_replaced(output, self.wrapped, bags, inputs, ReplacedUpdate(update), loss_scale, ids)

    def update(self, backward: LookupBackward, lr: float, step_of_forward: int) -> None:
        """Takes a step; ``step_of_forward`` is the step to which the forward pass brought the rows."""
        with self.writing():
            if step_of_forward < self._step:
                self.catch_up(backward.bags)
            self._step += 1
            self._taken.add_(1)  # not a number from the host, which a captured graph would repeat
            try:
                self._take_step(backward, lr)
            except BaseException:
                self.step = self._step - 1  # not taken; CollectionAdam.complete_step takes it if others have
                raise
            self._history.record(self._step, lr)

    def take_without_ids(self, lr: float) -> None:
        self.update(self.wrapped.without_ids(), lr, self._step)

    def compile(self) -> None:
        """Compiles the CPU's kernels of a step, unless they are on disk."""
        adam = self._rows()
        if self.replays and not self.last_step.is_cuda:
            self.wrapped.kernels.catch_up(self.wrapped.without_ids().bags, adam)
            self.wrapped.kernels.replay(self.last_step[:0].long(), adam)
        if self._config.absent_rows != "dense":
            self.wrapped.compile(lambda rows, nothing: rows.update(nothing, adam))

    def _take_step(self, backward: LookupBackward, lr: float) -> None:
        if self._config.absent_rows == "dense":
            scalars = self._history.scalars(self._step, lr)
            update_all_rows(self.wrapped, self.state, backward, self._config, scalars, self._lr_factors)
        else:
            self._history.prepare(self._step, lr)
            self.wrapped.rows.update(backward, self._rows())

    def catch_up(self, bags: LookupBags) -> LookupIds | None:
        """Takes the missed steps of the rows that a forward pass looks up; returns the rows if the work found them."""
        with self.writing():
            return self.wrapped.rows.catch_up(bags, self._rows()) if self.replays else None

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Marks writes of rows as the optimizer's; torch counts writes of all tensors in the weights' memory."""
        with self._lock:
            self._require_unwritten()
            try:
                yield
            finally:
                self.accept_writes()

    @property
    def is_written(self) -> bool:
        return self._seen not in (None, self.lookup.parameter._version)

    def accept_writes(self) -> None:
        """Accepts the rows as they are in memory."""
        self._seen = self.lookup.parameter._version

    def _require_unwritten(self) -> None:
        is_written = self.is_written
        self.accept_writes()
        if not (is_written and self.replays and self._step):
            return
        if self._current_at < self._step:
            names = ", ".join(sorted({shard.name for shard in self.lookup.shards}))
            raise RuntimeError(
                f"rows of table {names} were written while steps were owed; call flush() before writing, then write"
                " again: what was written would take the steps that the rows had missed"
            )
        self.flush()  # what was written may have been at rest

    def catch_up_rows(self, rows: Tensor) -> None:
        """Takes the missed steps of distinct rows, int64 [n], except the decay of second moments of rows at rest."""
        with self.writing():
            behind = rows[is_behind(self.last_step[rows], self._step)]
            if len(behind):
                self.wrapped.rows.replay(behind, self._rows())

    def catch_up_all(self) -> None:
        """Does :meth:`catch_up_rows` for every row; has no effect unless rows are replayed."""
        if self.replays:
            for table in range(len(self.lookup.shards)):
                self._catch_up_table(table)
            self._current_at = self._step

    def _catch_up_table(self, table: int) -> None:
        first = int(self.wrapped.layout.first_row[table])
        for begin, last in enumerate(self.last_step_of(table).split(_ROWS_AT_ONCE)):
            with self.writing():
                behind = is_behind(last, self._step).nonzero().flatten() + first + begin * _ROWS_AT_ONCE
                if len(behind):
                    self.wrapped.rows.replay(behind, self._rows())

    def flush(self) -> None:
        """Brings all rows and moments to the latest step; has no effect unless rows are replayed."""
        for table in range(len(self.lookup.shards)):
            self.flush_table(table)
        self._current_at = self._step

    def flush_table(self, table: int) -> None:
        if not (self.replays and self._step):
            return
        self._catch_up_table(table)
        columns = int(self._adam_columns[table])
        second = self.lookup.view_of(self.exp_avg_sq, table)[:, :columns].split(_ROWS_AT_ONCE)
        for last, part in zip(self.last_step_of(table).split(_ROWS_AT_ONCE), second, strict=True):
            part.mul_(missed_decay(last, self._step, self._log_beta2)[:, None])
            last.fill_(self._step)

    def flush_before_loading(self, loaded: Collection[int]) -> None:
        """Does :meth:`flush` before weights are loaded into tables whose memory begins at the addresses ``loaded``.

        If others have written rows, these tables hold the new weights already, and miss no step.
        """
        if self.is_written:
            self.accept_writes()
            weights = self.lookup.flat_weights()
            for table in range(len(self.lookup.shards)):
                if self.lookup.view_of(weights, table).data_ptr() in loaded:
                    self.last_step_of(table).fill_(self._step)
        self.flush()

    def last_step_of(self, table: int) -> Tensor:
        """Returns :attr:`last_step` of one table's rows, in the same memory."""
        first = int(self.wrapped.layout.first_row[table])
        return self.last_step[first : first + self.lookup.shards[table].rows]

    def mark_current(self) -> None:
        """Declares all rows to be at the latest step."""
        self.last_step.fill_(self._step)
        self._current_at = self._step
        self.accept_writes()

    def mark_behind(self) -> None:
        """Declares rows to be at the steps in :attr:`last_step`, which may be earlier ones."""
        self._current_at = -1

    def forget(self, elements: Tensor, shard: Tensor, row: Tensor) -> None:
        """Resets the state of rows of new ids.

        ``elements`` are indices in flat tensors, [n, D], ``shard`` and ``row`` the shards and the rows in them, [n].
        """
        self.exp_avg[elements] = 0
        self.exp_avg_sq[elements] = 0
        if self.replays:
            rows = self.wrapped.layout.first_row[shard.to(elements.device)] + row.to(elements.device)
            self.last_step[rows] = self._step

    def forget_rows(self, table: int, rows: Tensor) -> None:
        """Does :meth:`forget` for rows of one table, int64 [n], before managed collision writes the rows' weights."""
        self._seen = None
        row, dim = rows.to(self.last_step.device), self.lookup.shards[table].embedding_dim
        elements = self.lookup.weight_offsets[table] + row[:, None] * dim
        self.forget(elements + torch.arange(dim, device=row.device), torch.full_like(row, table), row)

    def count_step(self) -> None:
        self._step += 1
        if self._captured:
            self.wrapped.statistics.latest = self._captured

    @contextmanager
    def capturing(self) -> Iterator[None]:
        """Takes back what the host counts while kernels are recorded, because they do not run."""
        statistics = self.wrapped.statistics
        step, latest, self._captured = self._step, statistics.latest, None
        try:
            yield
            self._captured = statistics.latest  # the graph writes its results there in every replay
        finally:
            self._step, statistics.latest = step, latest

    def replaceable(self) -> tuple[Tensor, ...]:
        """Tensors that a step uses, and that others may replace after some steps."""
        return *self.state, *self._device_steps

    def read_by_graph(self) -> tuple[Tensor, ...]:
        """Tensors that a captured CUDA graph of a step reads, and that nothing else may keep alive."""
        return *self.replaceable(), *self.wrapped.bags.tensors
