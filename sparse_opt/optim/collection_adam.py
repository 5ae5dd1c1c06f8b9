"""Adam on the lookups of one sharded collection, which take their steps together, and its state for checkpoints.

Under replay, rows in memory may be behind. All rows catch up before the model's state is taken, and all moments before
the optimizer's state is taken. Before weights or moments are loaded, the rows whose memory they replace take their
missed steps, unless the new values are in that memory already. The states of model and optimizer may therefore be
taken, and loaded, in either order.
"""

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import inf, isclose
from threading import get_ident
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, compiler, nn
from torch.utils.hooks import RemovableHandle
from torchrec.optim.fused import FusedOptimizer

from cowrec.errors import UserError

from ..algorithm.adam import AdamConfig
from ..lookups.handle import refuse_copy
from ..lookups.wrapped_lookup import WrappedLookup
from ..tbe.collection import device_of, fused_optimizers, mark_updated_in_backward
from ..tbe.column_shards import copy_from_first_shards
from ..tbe.plan import ShardedCollection, Table, process_group_of
from ..tbe.state import Entry, parts_here, sharded_like_weights, tensor_entry
from .lookup_adam import LookupAdam
from .replay import StepHistory, largest_rate

LAST_STEP, LRS, STEP = "last_step", "lrs", "step"
_MOMENTS = ("exp_avg", "exp_avg_sq")


class UpdatedInBackward(FusedOptimizer):
    """KeyedOptimizer of tables that the backward pass updates at the learning rate in ``param_groups``."""

    def __init__(self, params: Mapping[str, Any], state: Mapping[Any, Any], groups: Sequence[dict[str, Any]]):
        super().__init__(params, state, groups)

    def step(self, closure: Any = None) -> None:
        """Does nothing: the backward pass has taken the step."""

    def zero_grad(self, set_to_none: bool = False) -> None:
        """Does nothing: tables have no gradients."""

    def __deepcopy__(self, _: Any) -> "UpdatedInBackward":
        """Returns itself; the forward pass of a copied model is refused."""
        return self


class CollectionAdam:
    """The lookups of one sharded collection under Adam. A rank may hold none of them.

    Attributes:
        params: weights by path, sharded as in the model's ``state_dict()``; made by :meth:`make_state`.
        groups: param_groups, of which the first one has all weights; made by :meth:`replace_fused`.
        of_param: state of each weight: ``exp_avg`` and ``exp_avg_sq``, sharded like the weight, and ``step``. Within
            :meth:`as_stored`, ``last_step`` replaces ``step``, and the last weight has ``lrs``.
    """

    def __init__(
        self,
        collection: ShardedCollection,
        tables: Mapping[str, Table],
        lookups: Sequence[WrappedLookup],
        config: AdamConfig,
        lr_factors: Mapping[str, float],
    ):
        self.collection, self._tables, self._config = collection, tables, config
        self._group = process_group_of(collection)
        self._step_hook: RemovableHandle | None = None
        self._state_hooks: list[RemovableHandle] = []
        self.history = StepHistory(
            config, lookups[0].lookup.flat_weights().device if lookups else device_of(collection)
        )
        self.lookups = [LookupAdam(wrapped, config, self.history, lr_factors, lambda: self.lr) for wrapped in lookups]
        self.params: dict[str, Tensor] = {}
        self.of_param: dict[Tensor, dict[str, Entry]] = {}
        self.groups: list[dict[str, Any]] = []
        self._largest_rate = largest_rate(config, lr_factors.values())

    @property
    def step(self) -> int:
        return max((adam.step for adam in self.lookups), default=0)

    @step.setter
    def step(self, value: int) -> None:
        for adam in self.lookups:
            adam.step = value
            adam.mark_current()
        self.history.forget_after(value)
        if self.history.is_replayed:
            self.history.replace(np.full(value, self._config.lr))

    @property
    def lr(self) -> float:
        """See :attr:`EmbeddingAdam.lr`."""
        rates = [group["lr"] for group in self.groups]
        if rates.count(rates[0]) < len(rates):
            raise UserError(
                f"param_groups of one collection have the learning rates {', '.join(f'{rate:g}' for rate in rates)},"
                " and EmbeddingAdam trains its tables at one; set the same in all of them, and give single tables"
                " another by lr_factors"
            )
        return self._checked_lr(rates[0])

    @lr.setter
    def lr(self, value: float) -> None:
        for group in self.groups:
            group["lr"] = self._checked_lr(value)

    def _checked_lr(self, value: float) -> float:
        if not 0 <= value < inf:
            raise UserError(f"EmbeddingAdam.lr must be >= 0 and finite, got {value}")
        if self.history.is_replayed and value > self._largest_rate:
            raise UserError(
                f"EmbeddingAdam.lr = {value:g} is above {self._largest_rate:g}, the largest rate for which"
                f" AdamConfig.lr = {self._config.lr:g} tells when a row is at rest; give AdamConfig a higher"
                " rate, and let the schedule begin below it"
            )
        return float(value)

    def count_step(self) -> None:
        for adam in self.lookups:
            adam.count_step()
        self.history.record(self.step, self.lr)

    def complete_step(self) -> None:
        """Brings lookups that an interrupted backward pass left behind to the step of the others, without gradients.

        Warns, or raises RuntimeError if other ranks take part in that step.
        """
        step = self.step
        behind = [adam for adam in self.lookups if adam.step < step]
        if not behind:
            return
        names = ", ".join(repr(shard.name) for adam in behind for shard in adam.lookup.shards)
        is_dense = self._config.absent_rows == "dense"
        if any(adam.wrapped.in_torch.waits_for_ranks or (is_dense and not adam.wrapped.is_local) for adam in behind):
            raise RuntimeError(
                f"an exception interrupted the backward pass of step {step} before the tables {names} took it, and"
                " other processes take part in their steps; load the latest checkpoint on all of them"
            )
        warnings.warn(
            f"an exception interrupted the backward pass of step {step}, or its loss does not use the outputs of the"
            f" tables {names}: they take that step without the batch's gradients, which other tables have applied",
            RuntimeWarning,
            stacklevel=2,
        )
        for adam in behind:
            while adam.step < step:
                adam.take_without_ids(float(self.history.lrs[adam.step]))

    # Hooks of the model.

    def hook(self, called: nn.Module) -> None:
        """Completes steps before ``called``, which runs the collection, and rows before the model's state is used."""

        def complete(*_: Any) -> None:
            # During an evaluation in another thread, the backward of some lookups may still follow.
            if any(adam.wrapped.forward_thread == get_ident() for adam in self.lookups):
                self.complete_step()

        self._step_hook = called.register_forward_pre_hook(compiler.disable(complete))
        self._hook_state()

    def _hook_state(self) -> None:
        def before_taking(called: nn.Module, *_: Any) -> None:
            if called is not self.collection:
                refuse_copy(called)
            for adam in self.lookups:
                adam.catch_up_all()

        def before_loading(called: nn.Module, state: Mapping[str, Any], *_: Any) -> None:
            if called is not self.collection:
                refuse_copy(called)
            given = {part.data_ptr() for value in state.values() for part in parts_here(value)}
            for adam in self.lookups:
                adam.flush_before_loading(given)

        self._state_hooks = [
            self.collection.register_state_dict_pre_hook(before_taking),
            self.collection.register_load_state_dict_pre_hook(before_loading),
            self.collection.register_load_state_dict_post_hook(lambda *_: self._accept_writes()),
        ]

    def unhook(self) -> None:
        for hook in (self._step_hook, *self._state_hooks):
            if hook:
                hook.remove()
        self._step_hook, self._state_hooks = None, []

    def _accept_writes(self) -> None:
        for adam in self.lookups:
            adam.accept_writes()

    # The optimizer's state.

    def make_state(self, path: str) -> None:
        """Makes ``params`` and ``of_param``; ``path`` is the collection's. All ranks must call together."""
        flats = {name: [getattr(adam, name) for adam in self.lookups] for name in _MOMENTS}
        self._moments = {name: self._sharded(of_name) for name, of_name in flats.items()}
        last_steps = [adam.last_step for adam in self.lookups]
        self._last_steps = self._sharded(last_steps, per_row=True) if self.history.is_replayed else {}
        variables = self.collection.state_dict(keep_vars=True)  # data-parallel tables as other optimizers know them
        self._keys = [key for key in variables if key.removesuffix(".weight") in self._moments[_MOMENTS[0]]]
        prefix = f"{path}." if path else ""
        self.params = {f"{prefix}{key}": variables[key] for key in self._keys}
        self.of_param = {weight: {} for weight in self.params.values()}
        self._set_entries(stored=False)

    def _sharded(self, flats: list[Tensor], *, per_row: bool = False) -> dict[str, Any]:
        lookups = [adam.lookup for adam in self.lookups]
        dtype = torch.int32 if per_row else torch.float32
        return sharded_like_weights(self.collection, lookups, flats, dtype, per_row=per_row)

    def _set_entries(self, *, stored: bool) -> None:
        """Sets the entries of the state, within :meth:`as_stored` or outside."""
        steps = 0  # steps of the collection, set by the first table's entry

        def settle() -> Tensor:
            nonlocal steps
            self.complete_step()
            for adam in self.lookups:
                adam.flush()
            steps = self._agreed_steps()
            return torch.tensor(steps)

        for number, (path, entries) in enumerate(zip(self.params, self.of_param.values(), strict=True)):
            table = self._keys[number].removesuffix(".weight")
            is_first, is_last = number == 0, number == len(self._keys) - 1
            entries.clear()
            for name in _MOMENTS:
                flush = (lambda: None) if stored else self._flush_of(table)
                entries[name] = tensor_entry(path, name, self._moments[name][table], flush)
            if stored:
                entries[LAST_STEP] = tensor_entry(path, LAST_STEP, self._last_steps[table])
            else:
                entries[STEP] = Entry(
                    settle if is_first else lambda: torch.tensor(steps),
                    (lambda given: self._restore(int(given))) if is_last else lambda _: None,
                )
            if stored and is_last:  # loaded after the last steps of all tables
                entries[LRS] = Entry(self._stored_rates, self._restore_stored)

    def _flush_of(self, table: str) -> Callable[[], None]:
        """Makes a function that brings the rows of a table up to date, before their moments are replaced."""
        own_name = table.rpartition(".")[2]

        def flush() -> None:
            for adam in self.lookups:
                for number, shard in enumerate(adam.lookup.shards):
                    if shard.table.own_name == own_name:
                        adam.flush_table(number)

        return flush

    def require_entries(self, given: Mapping[str, Mapping[str, Any]]) -> None:
        """Raises ValueError if the ``state`` of a state_dict lacks an entry, or an entry has another size."""
        for key, weight in self.params.items():
            entries, own = given.get(key, {}), self.of_param[weight]
            if missing := sorted(own.keys() - entries.keys()):
                remedy = "it is of another model"
                if LAST_STEP in entries:
                    remedy = 'its rows may be behind: load it and the weights within as_stored(), under "replay"'
                elif LAST_STEP in missing and entries:
                    remedy = "it was taken outside of as_stored(): load it and the weights there"
                raise UserError(f"the optimizer's state has no {missing[0]!r} of {key!r}; {remedy}")
            for name, entry in own.items():
                entry.check(entries[name])

    def _restore(self, steps: int) -> None:
        """Declares all loaded rows and moments to be those after step ``steps``."""
        for adam in self.lookups:
            adam.step = steps
        self.history.restart(steps)
        for adam in self.lookups:
            adam.mark_current()

    @contextmanager
    def as_stored(self) -> Iterator[None]:
        """Makes states hold rows as they are in memory, unless other ranks hold copies or columns of the rows."""
        self.complete_step()
        for adam in self.lookups:
            if adam.lookup.is_replicated or adam.lookup.splits_columns:
                adam.flush()
        self._set_entries(stored=bool(self._last_steps))
        hooks, self._state_hooks = self._state_hooks, []
        for hook in hooks:
            hook.remove()
        try:
            yield
        finally:
            self._set_entries(stored=False)
            self._accept_writes()
            if hooks:
                self._hook_state()

    def _stored_rates(self) -> list[float]:
        """Learning rates of all steps, the same on all ranks."""
        lrs, device = self.history.lrs, self.history.step_scalars.step_sizes.device
        agreed = torch.full((self._agreed_steps(),), -1.0, dtype=torch.float64, device=device)
        agreed[: len(lrs)] = lrs.to(device)
        if self._group.size() > 1:
            dist.all_reduce(agreed, dist.ReduceOp.MAX, group=self._group)
        rates: list[float] = agreed.tolist()
        return rates

    def _restore_stored(self, rates: Sequence[float]) -> None:
        """Accepts the loaded last steps of the rows, and the learning rates of all steps."""
        for adam in self.lookups:
            adam.step = len(rates)
            adam.mark_behind()
        self.history.replace(np.asarray(rates, np.float64))
        last_steps = [
            (shard, adam.last_step_of(number))
            for adam in self.lookups
            for number, shard in enumerate(adam.lookup.shards)
        ]
        split = {name: list(table.column_ranks.values()) for name, table in self._tables.items() if table.column_ranks}
        copy_from_first_shards(split, last_steps)

    def _agreed_steps(self) -> int:
        """Returns the number of steps, also on ranks that hold no table."""
        if self._group.size() == 1:
            return self.step
        steps = torch.tensor(self.step, device=self.history.step_scalars.step_sizes.device)
        dist.all_reduce(steps, dist.ReduceOp.MAX, group=self._group)
        return int(steps)

    # The model's fused optimizer.

    def require_undriven(self) -> None:
        """Raises ValueError if a scheduler or a warm-up already sets the rates of the fused optimizers."""
        sharded_with = [adam.lookup.initial_rate for adam in self.lookups]
        for group in (group for _, optimizer in fused_optimizers(self.collection) for group in optimizer.param_groups):
            if "initial_lr" in group or not any(isclose(group["lr"], rate, rel_tol=1e-6) for rate in sharded_with):
                raise UserError(
                    f"a scheduler or a warm-up of model.fused_optimizer has set the learning rate {group['lr']:g}, not"
                    " from AdamConfig.lr; make EmbeddingAdam before it, right after DistributedModelParallel"
                )

    def replace_fused(self, lr: float) -> Callable[[], None]:
        """Makes ``fused_optimizer`` drive these tables at the rate ``lr``; returns a function to undo this.

        Wrappers of the earlier optimizer drive the tables too, because the param_groups stay the same objects.
        """
        fused = fused_optimizers(self.collection)
        replaced = fused[:]
        self.groups = [group for _, optimizer in replaced for group in optimizer.param_groups] or [{}]
        earlier = [dict(group) for group in self.groups]
        weights = dict(zip(self._keys, self.params.values(), strict=True))
        for number, group in enumerate(self.groups):
            group.update(params=[] if number else list(weights.values()), lr=lr)
        optimizer = UpdatedInBackward(weights, self.of_param, self.groups)
        fused[:] = [("", optimizer)]
        unmark = mark_updated_in_backward(self.collection, optimizer)

        def undo() -> None:
            fused[:] = replaced
            for group, own in zip(self.groups, earlier, strict=True):
                group.clear()
                group.update(own)
            unmark()

        return undo
