"""Adam on the rows of one lookup: the step that its backward pass takes.

The step of the batch's rows runs in numba on CPU, in Triton on CUDA and otherwise in torch; all_rows.py has the step of
all rows of the tables.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from cowrec.sparse_opt.algorithm.adam import AdamConfig, AdamScalars, adam_constants, adam_element, table_scalars
from cowrec.sparse_opt.clipping.clipped_lookup import ClippedLookup
from cowrec.sparse_opt.kernels.cpu_adam import adam_rows
from cowrec.sparse_opt.kernels.dense_adam import exact_root
from cowrec.sparse_opt.kernels.layout import (
    AdamState,
    DeviceSteps,
    LastSteps,
    LookupBags,
    RowResults,
    to_float32,
    to_numpy,
)
from cowrec.sparse_opt.kernels.torch_rows import LookupIds
from cowrec.sparse_opt.tbe.lookup import LookupBackward, TbeLookup

from .all_rows import update_all_rows
from .replay import Replay
from .step_history import StepHistory
from .table_rates import TableRates

_NO_ROWS = torch.empty(0, dtype=torch.int32)


def require_replaceable(lookups: Sequence[TbeLookup]) -> None:
    """Raises ValueError if the fused update of a lookup cannot be replaced."""
    for lookup in lookups:
        name = lookup.shards[0].name
        if not lookup.is_plain_sgd:
            raise ValueError(
                f"table {name!r} is under fused {lookup.module.optimizer.name}, whose update EmbeddingAdam would"
                " bypass; shard it under EmbOptimType.EXACT_SGD"
            )
        if lookup.prefetches:
            raise ValueError(
                f"table {name!r} is under FBGEMM's prefetch_pipeline, whose cache changes while EmbeddingAdam updates"
                " its rows; leave prefetch_pipeline out of fused_params, and train in TrainPipelineSparseDist"
            )


class LookupAdam:
    """Moments and step count of one lookup, and its Adam step.

    Args:
        clipped: the lookup under its clip rule.
        config: Adam's settings.
        history: steps of the lookup's collection.
        rates: factors of the tables' learning rates.

    Attributes:
        exp_avg, exp_avg_sq: moments, flat, float32, laid out like the weights.
        replay: last steps of the rows under "replay", else None.
    """

    def __init__(self, clipped: ClippedLookup, config: AdamConfig, history: StepHistory, rates: TableRates):
        self.clipped = clipped
        self._config, self._history = config, history
        self._constants = adam_constants(config)
        weights = self.lookup.flat_weights()
        self.exp_avg, self.exp_avg_sq = self.lookup.zeros_of_weights(), self.lookup.zeros_of_weights()
        self._lr_factors = rates.of(self.lookup)
        self._lr_factors_here = self._lr_factors.to(weights.device)
        self._step, self._taken = 0, torch.zeros(1, dtype=torch.int32, device=weights.device)
        self.replay: Replay | None = None
        if config.absent_rows == "replay":
            self.replay = Replay(clipped, config, history, self.state, self._taken, self._lr_factors)
        no_number = torch.empty(0, dtype=torch.float64, device=weights.device)
        self._no_rows = DeviceSteps(self._taken, self._taken[:0], *history.schedule, self._lr_factors_here, no_number)
        self._captured: RowResults | None = None

    @property
    def lookup(self) -> TbeLookup:
        """Lookup that holds the tables."""
        return self.clipped.lookup

    @property
    def state(self) -> AdamState:
        """Weights and moments, which share the lookup's and this object's memory."""
        return AdamState(self.lookup.flat_weights(), self.exp_avg, self.exp_avg_sq)

    @property
    def step(self) -> int:
        """Steps taken."""
        return self._step

    @step.setter
    def step(self, value: int) -> None:
        self._step = value
        self._taken.fill_(value)
        self._history.return_to(value)

    def reconfigure(self, config: AdamConfig) -> None:
        """Changes the settings of the coming steps, under the lookup's present limits. No row may be behind."""
        self._config, self._constants = config, adam_constants(config)
        if self.replay:
            self.replay.reconfigure(config)

    def catch_up(self, bags: LookupBags) -> LookupIds | None:
        """Takes the missed steps of the rows that a forward pass looks up; returns the rows if it had to find them."""
        return self.replay.catch_up(bags, self.step) if self.replay else None

    def update(self, backward: LookupBackward, lr: float, step_of_forward: int) -> None:
        """Takes a step; ``step_of_forward`` is the one that the forward pass brought the rows to."""
        if self.replay and step_of_forward < self.step:
            self.replay.catch_up(backward.bags, self.step)
        self._step += 1
        self._taken.add_(1)  # not a number from the host, which a captured graph would repeat
        try:
            self._take_step(backward, lr)
        except BaseException:
            self.step = self._step - 1  # not taken; CollectionAdam.complete_step takes it if others have
            raise
        self._history.record(self.step, lr)

    def take_without_ids(self, lr: float) -> None:
        """Takes a step in which no id occurs."""
        like = self.lookup.flat_weights()
        offsets = torch.zeros(len(self.lookup.feature_table) + 1, dtype=torch.int64, device=like.device)
        bags = self.clipped.bags.of({"indices": offsets[:0], "offsets": offsets})
        self.update(LookupBackward(bags, None, torch.zeros(bags.size, device=like.device)), lr, self.step)

    def _take_step(self, backward: LookupBackward, lr: float) -> None:
        if self.replay or self.clipped.runs_on_device:
            self._history.prepare(self.step, lr)
        scalars = self._history.scalars(self.step, lr)
        if self._config.absent_rows == "dense":
            update_all_rows(self.clipped, self.state, backward, self._config, scalars, self._lr_factors)
        elif self.clipped.runs_compiled(backward):
            self._update_compiled(backward, scalars)
        elif self.clipped.runs_on_device:
            self._update_on_device(backward)
        elif backward.bags.indices.numel() or self.clipped.waits_for_ranks:
            self._update_in_torch(backward, scalars)

    def count_step(self) -> None:
        """Counts a step that a captured CUDA graph has taken, in which no code of this class ran."""
        self._step += 1
        if self._captured:
            self.clipped.statistics.latest = self._captured

    @contextmanager
    def capturing(self) -> Iterator[None]:
        """Takes back what the host counts within, because the kernels are recorded but do not run."""
        statistics = self.clipped.statistics
        step, latest, self._captured = self._step, statistics.latest, None
        try:
            yield
            self._captured = statistics.latest  # the graph writes its results there in every replay
        finally:
            self._step, statistics.latest = step, latest

    def addresses(self) -> tuple[int, ...]:
        """Addresses of the tensors that a captured CUDA graph of a step reads and writes."""
        steps = self._device_steps
        return tuple(each.data_ptr() for each in (*self.state, *steps))

    def forget(self, elements: Tensor, shard: Tensor, row: Tensor) -> None:
        """Resets the state of rows that were given to new ids to that of rows that have taken no step.

        Args:
            elements: indices of their weights in the flat tensors, int64 [n, D].
            shard: indices of their shards in the lookup, int64 [n], on the CPU.
            row: their indices in those shards, int64 [n], on the CPU.
        """
        self.exp_avg[elements] = 0
        self.exp_avg_sq[elements] = 0
        if self.replay:
            rows = self.clipped.layout.first_row[shard.to(elements.device)] + row.to(elements.device)
            self.replay.last_step[rows] = self.step

    def _update_compiled(self, backward: LookupBackward, scalars: AdamScalars) -> None:
        progress = self.replay.progress(self.step) if self.replay else LastSteps(_NO_ROWS, self.step, 0.0)
        numbers = (to_float32(self._constants), to_float32(scalars), self._lr_factors.numpy())
        sums = self.clipped.compiled.sum_rows(backward)
        self.clipped.compiled.run(adam_rows, sums, to_numpy(self.state), *numbers, to_numpy(progress))

    def _update_on_device(self, backward: LookupBackward) -> None:
        clipped = self.clipped
        if not backward.bags.indices.numel():
            clipped.statistics.record_no_rows()
            return
        rows = clipped.device_rows(backward)
        steps, clips = self._device_steps, clipped.limits.clips
        results = rows.update(clips, self.state, steps, self._constants, replays=self.replay is not None)
        clipped.statistics.record_on_device(results, rows)

    @property
    def _device_steps(self) -> DeviceSteps:
        if self.replay:
            return self.replay.device_steps
        return self._no_rows._replace(**self._history.schedule._asdict())

    def _update_in_torch(self, backward: LookupBackward, scalars: AdamScalars) -> None:
        clipped, state = self.clipped, self.state
        sums = clipped.sum_rows(backward)
        if self.replay and clipped.gathers_rows:
            self._taken.sub_(1)
            self.replay.catch_up_sums(sums, self.step - 1)
            self._taken.add_(1)
        decays = self.replay.take_step(sums, self.step) if self.replay else None
        rows = clipped.row_gradients(sums)
        rows.grad.add_(self._constants.twice_l2 * rows.weight)
        factors = clipped.factors.of_rows(rows)[:, None]
        grad = torch.where(clipped.factors.clipped_columns(rows), rows.grad * factors, rows.grad)
        exp_avg, exp_avg_sq = state.exp_avg[rows.element], state.exp_avg_sq[rows.element]
        if decays is not None:
            exp_avg_sq *= decays[:, None]
        own = table_scalars(scalars, self._lr_factors_here[rows.table][:, None])
        stepped = adam_element(rows.weight, exp_avg, exp_avg_sq, grad, self._constants, own, exact_root, torch.div)
        for flat, value in zip(state, stepped, strict=True):
            # Padding repeats a real row, whose elements are then written twice with the same values.
            flat[rows.element] = torch.where(rows.inside, value, value[:, :1]).to(flat.dtype)
