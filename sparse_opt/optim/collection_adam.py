"""Adam on the lookups of one sharded collection, which take their steps together."""

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.hooks import RemovableHandle

from cowrec.sparse_opt.algorithm.adam import AdamConfig
from cowrec.sparse_opt.clipping.clipped_lookup import ClippedLookup
from cowrec.sparse_opt.tbe.column_shards import copy_from_first_shards
from cowrec.sparse_opt.tbe.lookup import ShardedCollection

from .lookup_adam import LookupAdam
from .replay import Replay
from .step_history import StepHistory
from .table_rates import TableRates


class CollectionAdam:
    """The lookups of one sharded collection under Adam. A rank may hold none of them.

    Args:
        collection: the collection.
        clipped: its lookups on this rank, under their clip rule.
        config: Adam's settings.
        rates: factors of the tables' learning rates.
        column_ranks: ranks of the column shards of the collection's tables, for each part of their rows.
        device: of the model.

    Attributes:
        collection: the collection.
        lookups: Adam on each lookup.
        history: the collection's steps.
    """

    def __init__(
        self,
        collection: ShardedCollection,
        clipped: Sequence[ClippedLookup],
        config: AdamConfig,
        rates: TableRates,
        column_ranks: Mapping[str, Sequence[Sequence[int]]],
        device: torch.device,
    ):
        self.collection, self._config, self._column_ranks = collection, config, column_ranks
        self._step_hook: RemovableHandle | None = None
        self._state_hooks: list[RemovableHandle] = []
        self.history = StepHistory(config, device)
        self.lookups = [LookupAdam(each, config, self.history, rates) for each in clipped]

    @property
    def step(self) -> int:
        """Steps taken."""
        return max((adam.step for adam in self.lookups), default=0)

    @step.setter
    def step(self, value: int) -> None:
        for adam in self.lookups:
            adam.step = value
        self.history.forget_after(value)
        for _, replay in self.unequal_replays():
            replay.mark_current(value)
        if self.history.is_replayed:
            self.history.replace(np.full(value, self._config.lr))

    def reconfigure(self, config: AdamConfig, after: int | None) -> None:
        """Changes the settings of the coming steps; see :meth:`EmbeddingAdam.reconfigure`."""
        self._config = config
        self.history.reconfigure(config, self.step if after is None else after)
        for adam in self.lookups:
            adam.reconfigure(config)

    def hook(self, called: nn.Module) -> None:
        """Completes steps before ``called``, the collection or what runs it, and rows before its ``state_dict()``."""
        self._step_hook = called.register_forward_pre_hook(self.complete_step)
        self._hook_state()

    def unhook(self) -> None:
        """Removes the hooks."""
        for each in (self._step_hook, *self._state_hooks):
            if each:
                each.remove()
        self._step_hook, self._state_hooks = None, []

    @contextmanager
    def as_stored(self) -> Iterator[None]:
        """Makes the collection's ``state_dict()`` return the rows as they are in memory."""
        hooks, self._state_hooks = self._state_hooks, []
        for hook in hooks:
            hook.remove()
        try:
            yield
        finally:
            if hooks:
                self._hook_state()

    def _hook_state(self) -> None:
        def before_state_dict(*_: Any) -> None:
            for adam, replay in self.replays():
                replay.catch_up_all(adam.step)

        def after_loading(*_: Any) -> None:
            for adam, replay in self.replays():
                replay.mark_current(adam.step)

        self._state_hooks = [
            self.collection.register_state_dict_pre_hook(before_state_dict),
            self.collection.register_load_state_dict_post_hook(after_loading),
        ]

    def count_step(self, lr: float) -> None:
        """Counts a step that a captured CUDA graph has taken."""
        for adam in self.lookups:
            adam.count_step()
        self.history.record(self.step, lr)

    @contextmanager
    def capturing(self) -> Iterator[None]:
        """Takes back what the host counts while a CUDA graph of a step is captured, since none is taken."""
        step = self.step
        with ExitStack() as stack:
            for adam in self.lookups:
                stack.enter_context(adam.capturing())
            try:
                yield
            finally:
                self.history.forget_after(step)

    def replays(self) -> Iterator[tuple[LookupAdam, Replay]]:
        """Lookups whose absent rows are replayed."""
        yield from ((adam, adam.replay) for adam in self.lookups if adam.replay)

    def unequal_replays(self) -> Iterator[tuple[LookupAdam, Replay]]:
        """Replays of lookups whose column shards or copies on other ranks may be at different steps."""
        for adam, replay in self.replays():
            if adam.lookup.is_replicated or adam.lookup.splits_columns:
                yield adam, replay

    def complete_step(self, *_: Any) -> None:
        """Brings lookups that an interrupted backward pass left behind to the step that others have taken.

        They take it without the batch's gradients, with a warning.

        Raises:
            RuntimeError: other ranks take part in the step of such a lookup.
        """
        step = self.step
        behind = [adam for adam in self.lookups if adam.step < step]
        if not behind:
            return
        names = ", ".join(repr(shard.name) for adam in behind for shard in adam.lookup.shards)
        is_dense = self._config.absent_rows == "dense"
        if any(adam.clipped.waits_for_ranks or (is_dense and not adam.clipped.is_local) for adam in behind):
            raise RuntimeError(
                f"an exception interrupted the backward pass of step {step} before the tables {names} took it, and"
                " other processes take part in their steps; load the latest checkpoint on all of them"
            )
        warnings.warn(
            f"an exception interrupted the backward pass of step {step}: the tables {names} take that step without the"
            " batch's gradients, which other tables have applied",
            RuntimeWarning,
            stacklevel=2,
        )
        for adam in behind:
            while adam.step < step:
                adam.take_without_ids(self.history.lr_of(adam.step + 1))

    def settle(self) -> int:
        """Completes the latest step and brings all rows up to date; returns the number of steps, alike on all ranks."""
        self.complete_step()
        for adam, replay in self.replays():
            replay.flush(adam.step)
        return self._agreed_steps()

    def restore(self, steps: int) -> None:
        """Takes all rows and moments, which were loaded, to be those after step ``steps``."""
        for adam in self.lookups:
            adam.step = steps
        self.history.restart(steps)
        for _, replay in self.replays():
            replay.mark_current(steps)

    def stored_rates(self) -> list[float]:
        """Learning rates of all steps, alike on all ranks; leaves rows behind, except where shards or copies differ."""
        self.complete_step()
        for adam, replay in self.unequal_replays():
            replay.flush(adam.step)
        lrs, device = self.history.lrs, self.history.schedule.step_sizes.device
        agreed = torch.full((self._agreed_steps(),), -1.0, dtype=torch.float64, device=device)
        agreed[: len(lrs)] = lrs.to(device)
        if _has_peers():
            dist.all_reduce(agreed, dist.ReduceOp.MAX)
        rates: list[float] = agreed.tolist()
        return rates

    def restore_stored(self, rates: Sequence[float]) -> None:
        """Takes rows to be at their last steps, which were loaded, after steps with these learning rates."""
        for adam in self.lookups:
            adam.step = len(rates)
        self.history.replace(np.asarray(rates, np.float64))
        last_steps = [
            (shard, replay.last_step_of(table))
            for adam, replay in self.replays()
            for table, shard in enumerate(adam.lookup.shards)
        ]
        copy_from_first_shards(self._column_ranks, last_steps)

    def _agreed_steps(self) -> int:
        """Steps taken, also on ranks that hold no table and took none."""
        if not _has_peers():
            return self.step
        steps = torch.tensor(self.step, device=self.history.schedule.step_sizes.device)
        dist.all_reduce(steps, dist.ReduceOp.MAX)
        return int(steps)


def _has_peers() -> bool:
    return dist.is_initialized() and dist.get_world_size() > 1
