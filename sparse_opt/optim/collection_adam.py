"""Adam on the lookups of one sharded collection, which take their steps together, and its state for checkpoints."""

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.utils.hooks import RemovableHandle
from torchrec.distributed.embeddingbag import ShardedEmbeddingBagCollection

from cowrec.sparse_opt.algorithm.adam import AdamConfig
from cowrec.sparse_opt.clipping.clipped_lookup import ClippedLookup
from cowrec.sparse_opt.tbe.column_shards import copy_from_first_shards
from cowrec.sparse_opt.tbe.sharded_state import sharded_like_weights

from .lookup_adam import LookupAdam
from .replay import Replay
from .step_history import StepHistory

_LAST_STEP, _STEP, _LRS = "last_step", "step", "lrs"


class CollectionAdam:
    """The lookups of one sharded collection under Adam. A rank may hold none of them.

    Args:
        path: the collection's path in the model, without the names of wrappers.
        collection: the collection.
        clipped: its lookups on this rank, under their clip rule.
        config: Adam's settings.
        column_ranks: ranks of the column shards of the model's tables.
        device: of the model.

    Attributes:
        lookups: Adam on each lookup.
        history: the collection's steps.
    """

    def __init__(
        self,
        path: str,
        collection: ShardedEmbeddingBagCollection,
        clipped: Sequence[ClippedLookup],
        config: AdamConfig,
        column_ranks: Mapping[str, Sequence[int]],
        device: torch.device,
    ):
        self._prefix, self._collection, self._config = f"{path}." if path else "", collection, config
        self._column_ranks = column_ranks
        self._step_hook: RemovableHandle | None = None
        self._state_hooks: list[RemovableHandle] = []
        self.history = StepHistory(config, device)
        self.lookups = [LookupAdam(each, config, self.history) for each in clipped]

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

    def hook(self) -> None:
        """Hooks into the collection: steps are completed before a forward, and rows before its ``state_dict()``."""
        self._step_hook = self._collection.register_forward_pre_hook(self.complete_step)
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
            self._collection.register_state_dict_pre_hook(before_state_dict),
            self._collection.register_load_state_dict_post_hook(after_loading),
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

    def state(self) -> dict[str, Any]:
        """The collection's part of :meth:`EmbeddingAdam.state_dict`. All ranks must call together."""
        self.complete_step()
        for adam, replay in self.replays() if self._state_hooks else self.unequal_replays():
            replay.flush(adam.step)
        with self.as_stored():
            return self._state()

    def _state(self) -> dict[str, Any]:
        steps, lrs = self._agreed_steps()
        state: dict[str, Any] = {f"{self._prefix}{_STEP}": torch.tensor(steps)}
        flats = {moment: [getattr(adam, moment) for adam in self.lookups] for moment in ("exp_avg", "exp_avg_sq")}
        if self.history.is_replayed:
            state[f"{self._prefix}{_LRS}"] = lrs
            flats[_LAST_STEP] = [replay.last_step for _, replay in self.replays()]
        for name, of_lookups in flats.items():
            per_row = name == _LAST_STEP
            dtype = torch.int32 if per_row else torch.float32
            lookups = [adam.lookup for adam in self.lookups]
            tables = sharded_like_weights(self._collection, lookups, of_lookups, dtype, per_row=per_row)
            state |= {f"{self._prefix}{table}.{name}": value for table, value in tables.items()}
        return state

    def load(self, given: Mapping[str, Any]) -> None:
        """Loads its part of a state; see :meth:`EmbeddingAdam.load_state_dict`."""
        with self.as_stored():
            own = self._state()
        missing = sorted(own.keys() - given.keys())
        if missing:
            raise ValueError(f"the optimizer's state has no {missing[0]!r}; it is of another model or absent_rows")
        replayed = [key for key in given if key.startswith(self._prefix) and key.endswith(f".{_LAST_STEP}")]
        if replayed and not self.history.is_replayed:
            raise ValueError(
                f'the state has {replayed[0]!r}: it is of absent_rows = "replay", whose rows may be behind; load it'
                " under that, and save weights and state again after flush()"
            )
        scalars = {f"{self._prefix}{_STEP}", f"{self._prefix}{_LRS}"}
        for key in own.keys() - scalars:
            if isinstance(own[key], ShardedTensor):
                for shard, given_shard in zip(own[key].local_shards(), given[key].local_shards(), strict=True):
                    shard.tensor.copy_(given_shard.tensor)
            else:
                own[key].copy_(given[key])
        for adam in self.lookups:
            adam.step = int(given[f"{self._prefix}{_STEP}"])
        self.history.forget_after(int(given[f"{self._prefix}{_STEP}"]))
        if self.history.is_replayed:
            self.history.replace(given[f"{self._prefix}{_LRS}"].numpy())
            last_steps = [
                (shard, replay.last_step_of(table))
                for adam, replay in self.replays()
                for table, shard in enumerate(adam.lookup.shards)
            ]
            copy_from_first_shards(self._column_ranks, last_steps)

    def _agreed_steps(self) -> tuple[int, Tensor]:
        """Steps taken and their learning rates (float64 [steps]), also on ranks that hold no table and took none."""
        if not dist.is_initialized() or dist.get_world_size() == 1:
            return self.step, self.history.lrs.clone()
        device = self.history.schedule.step_sizes.device
        steps = torch.tensor(self.step, device=device)
        dist.all_reduce(steps, dist.ReduceOp.MAX)
        lrs = torch.full((int(steps),), -1.0, dtype=torch.float64, device=device)
        lrs[: len(self.history.lrs)] = self.history.lrs.to(device)
        dist.all_reduce(lrs, dist.ReduceOp.MAX)
        return int(steps), lrs.cpu()
