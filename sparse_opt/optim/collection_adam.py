"""Adam on the lookups of one sharded collection, which take their steps together, and its state for checkpoints."""

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from math import inf, isclose
from threading import get_ident
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, compiler, nn
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle
from torchrec.optim.fused import FusedOptimizer
from torchrec.optim.keyed import KeyedOptimizer

from cowrec.errors import UserError

from ..algorithm.adam import AdamConfig
from ..clipping.clipped_lookup import ClippedLookup
from ..clipping.handle import refuse_copy
from ..tbe.column_shards import copy_from_first_shards
from ..tbe.lookup import ShardedCollection, process_group_of, sharded_like_weights
from .lookup_adam import LookupAdam
from .replay import StepHistory, largest_rate

LAST_STEP, LRS, STEP = "last_step", "lrs", "step"
_MOMENTS = ("exp_avg", "exp_avg_sq")
_UPDATED_IN_BACKWARD = "_in_backward_optimizers"
"""Attribute by which ``torchrec.optim.optimizers.in_backward_optimizer_filter`` tells fused tables from others."""


class UpdatedInBackward(FusedOptimizer):
    """KeyedOptimizer of tables that the backward pass updates, at the learning rate in ``param_groups``."""

    def step(self, closure: Any = None) -> None:
        """Does nothing: the backward pass has taken the step."""

    def zero_grad(self, set_to_none: bool = False) -> None:
        """Does nothing: tables have no gradients."""

    def __deepcopy__(self, _: Any) -> "UpdatedInBackward":
        """Itself, in a copy of a model whose forward pass is refused."""
        return self


class CollectionAdam:
    """The lookups of one sharded collection under Adam. A rank may hold none of them.

    Args:
        clipped: the collection's lookups on this rank.
        lr_factors: factors of the tables' learning rates, by name.
        column_ranks: ranks of the column shards of the collection's tables, for each part of their rows.

    Attributes:
        lookups: Adam on each lookup.
        history: the collection's steps.
        params: weights by path, sharded as in the model's ``state_dict()``; made by :meth:`make_state`.
        groups: param_groups; the first one has all weights. :meth:`replace_fused` makes them.
        of_param: entries ``exp_avg`` and ``exp_avg_sq`` of each weight, sharded like it, and ``step``. Where rows are
            replayed, within :meth:`as_stored`, ``last_step`` in place of ``step``, and the last weight's ``lrs``.
    """

    def __init__(
        self,
        collection: ShardedCollection,
        clipped: Sequence[ClippedLookup],
        config: AdamConfig,
        lr_factors: Mapping[str, float],
        column_ranks: Mapping[str, Sequence[Sequence[int]]],
    ):
        self.collection, self._config, self._column_ranks = collection, config, column_ranks
        self._group = process_group_of(collection)
        self._step_hook: RemovableHandle | None = None
        self._state_hooks: list[RemovableHandle] = []
        # The parameters of a rank without tables are placeholders on the CPU.
        device = clipped[0].lookup.flat_weights().device if clipped else collection._device
        self.history = StepHistory(config, torch.device(device or "cpu"))
        self.lookups = [LookupAdam(each, config, self.history, lr_factors) for each in clipped]
        self.params: dict[str, Tensor] = {}
        self.of_param: dict[Tensor, dict[str, Entry]] = {}
        self.groups: list[dict[str, Any]] = []
        self._lr_factors = lr_factors
        self._largest_rate = largest_rate(config, lr_factors.values())
        self._steps = 0
        self._is_stored = False
        """Whether entries are those of :meth:`as_stored`."""
        self._loaded_at = -1
        """Step at which moments are loaded, one after the other, and all rows have taken their missed steps."""
        self._written = False
        """Whether all weights were loaded in place, perhaps with the moments, whose missed steps are then still due."""

    @property
    def step(self) -> int:
        """Steps taken."""
        return max((adam.step for adam in self.lookups), default=0)

    @step.setter
    def step(self, value: int) -> None:
        self._written, self._loaded_at = False, -1
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
                f" AdamConfig.lr = {self._config.lr:g} tells when a row is at rest; give AdamConfig the largest"
                " learning rate of the schedule, and let the schedule begin below it"
            )
        return float(value)

    def reconfigure(self, config: AdamConfig, after: int | None) -> None:
        """Changes the settings of the coming steps; see :meth:`EmbeddingAdam.reconfigure`."""
        self._config, self._largest_rate = config, largest_rate(config, self._lr_factors.values())
        self.history.reconfigure(config, self.step if after is None else after)
        for adam in self.lookups:
            adam.reconfigure(config)

    def hook(self, called: nn.Module) -> None:
        """Completes steps before ``called``, the collection or what runs it, and rows before its state is used."""
        self._step_hook = called.register_forward_pre_hook(compiler.disable(lambda *_: self._before_forward()))
        self._hook_state()

    def take_missed_steps(self) -> None:
        """Brings the moments of weights that were loaded in place to their step, unless they were loaded too."""
        if not self._written:
            return
        self._written = False
        for adam in self._replayed():
            loaded = [view.clone() for view in _views(adam)]
            adam.flush()
            for view, weights in zip(_views(adam), loaded, strict=True):
                view.copy_(weights)
            adam.accept_writes()

    def _before_forward(self) -> None:
        self.take_missed_steps()
        # To an evaluation in another thread lookups may be behind whose backward is still to come.
        if any(adam.clipped.forward_thread == get_ident() for adam in self.lookups):
            self.complete_step()

    def unhook(self) -> None:
        """Removes the hooks."""
        for each in (self._step_hook, *self._state_hooks):
            if each:
                each.remove()
        self._step_hook, self._state_hooks = None, []

    @contextmanager
    def as_stored(self) -> Iterator[None]:
        """Makes the states, the collection's too, hold the rows as they are in memory, some of them behind.

        Rows whose shards or copies on other ranks may be at other steps are brought up to date.
        """
        self.take_missed_steps()
        self.complete_step()
        for adam in self._replayed_unequally():
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

    def _hook_state(self) -> None:
        def catch_up(called: nn.Module, *_: Any) -> None:
            if called is not self.collection:
                refuse_copy(called)
            self.take_missed_steps()
            for adam in self._replayed():
                adam.catch_up_all()

        def flush(called: nn.Module, state: Mapping[str, Any], *_: Any) -> None:
            """What is loaded has no moments, may lack weights, and may be the weights' memory, written before."""
            if called is not self.collection:
                refuse_copy(called)
            given = {each.data_ptr() for value in state.values() for each in _held_here(value)}
            replayed = [each for each in self._replayed() if each.step]
            loaded = {
                adam: [view for view in _views(adam) if view.data_ptr() in given] if adam.is_written else []
                for adam in replayed
            }
            self._accept_writes()
            if replayed and all(len(loaded[adam]) == len(adam.lookup.shards) for adam in replayed):
                self._written = True
                return
            self.take_missed_steps()
            for adam, views in loaded.items():
                values = [view.clone() for view in views]
                adam.flush()
                for view, value in zip(views, values, strict=True):
                    view.copy_(value)

        self._state_hooks = [
            self.collection.register_state_dict_pre_hook(catch_up),
            self.collection.register_load_state_dict_pre_hook(flush),
            self.collection.register_load_state_dict_post_hook(lambda *_: self._accept_writes()),
        ]

    def _accept_writes(self) -> None:
        for adam in self.lookups:
            adam.accept_writes()

    def count_step(self) -> None:
        """Counts a step that a captured CUDA graph has taken."""
        for adam in self.lookups:
            adam.count_step()
        self.history.record(self.step, self.lr)

    def _replayed(self) -> list[LookupAdam]:
        return [adam for adam in self.lookups if adam.replays]

    def _replayed_unequally(self) -> list[LookupAdam]:
        """Replayed lookups whose column shards or copies on other ranks may be at different steps."""
        return [adam for adam in self._replayed() if adam.lookup.is_replicated or adam.lookup.splits_columns]

    def complete_step(self) -> None:
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
        if any(adam.clipped.in_torch.waits_for_ranks or (is_dense and not adam.clipped.is_local) for adam in behind):
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

    def settle(self) -> int:
        """Completes the latest step and brings all rows up to date; returns the steps taken, the same on all ranks."""
        self.take_missed_steps()
        self.complete_step()
        for adam in self.lookups:
            adam.flush()
        return self._agreed_steps()

    def restore(self, steps: int) -> None:
        """Declares all rows and moments, which were loaded, to be those after step ``steps``."""
        self._written, self._loaded_at = False, -1
        for adam in self.lookups:
            adam.step = steps
        self.history.restart(steps)
        for adam in self.lookups:
            adam.mark_current()

    def stored_rates(self) -> list[float]:
        """Learning rates of all steps, the same on all ranks."""
        lrs, device = self.history.lrs, self.history.schedule.step_sizes.device
        agreed = torch.full((self._agreed_steps(),), -1.0, dtype=torch.float64, device=device)
        agreed[: len(lrs)] = lrs.to(device)
        if self._group.size() > 1:
            dist.all_reduce(agreed, dist.ReduceOp.MAX, group=self._group)
        rates: list[float] = agreed.tolist()
        return rates

    def restore_stored(self, rates: Sequence[float]) -> None:
        """Declares the loaded last steps of the rows to be valid, after steps with these learning rates."""
        self._written, self._loaded_at = False, -1
        for adam in self.lookups:
            adam.step = len(rates)
            adam.mark_behind()
        self.history.replace(np.asarray(rates, np.float64))
        last_steps = [
            (shard, adam.last_step_of(table))
            for adam in self._replayed()
            for table, shard in enumerate(adam.lookup.shards)
        ]
        copy_from_first_shards(self._column_ranks, last_steps)

    def _agreed_steps(self) -> int:
        """Steps taken, also on ranks that hold no table and took none."""
        if self._group.size() == 1:
            return self.step
        steps = torch.tensor(self.step, device=self.history.schedule.step_sizes.device)
        dist.all_reduce(steps, dist.ReduceOp.MAX, group=self._group)
        return int(steps)

    def make_state(self, path: str) -> None:
        """Makes ``params`` and ``of_param``; ``path`` is the collection's in the model, without names of wrappers.

        All ranks must call together.
        """
        kinds = {name: self._sharded([getattr(each, name) for each in self.lookups]) for name in _MOMENTS}
        last_steps = [each.last_step for each in self._replayed()]
        self._last_steps = self._sharded(last_steps, per_row=True) if self.history.is_replayed else {}
        variables = self.collection.state_dict(keep_vars=True)  # data-parallel tables as other optimizers know them
        weights = {key: weight for key, weight in variables.items() if _table(key) in kinds[_MOMENTS[0]]}
        prefix = f"{path}." if path else ""
        self.params = {f"{prefix}{key}": weight for key, weight in weights.items()}
        self.of_param = {
            weight: {
                name: _tensor_entry(f"{prefix}{key}", name, tensors[_table(key)], self._catch_up_before)
                for name, tensors in kinds.items()
            }
            for key, weight in weights.items()
        }
        self._keys, self._tables = list(weights), [_table(key) for key in weights]
        self._set_entries(stored=False)

    def require_undriven(self) -> None:
        """Raises ValueError if a scheduler or a warm-up sets the rates of the fused optimizers already."""
        sharded_with = [each.lookup.initial_rate for each in self.lookups]
        for group in (group for _, each in self._fused for group in each.param_groups):
            if "initial_lr" in group or not any(isclose(group["lr"], rate, rel_tol=1e-6) for rate in sharded_with):
                raise UserError(
                    f"a scheduler or a warm-up of model.fused_optimizer has set the learning rate {group['lr']:g}, not"
                    " from AdamConfig.lr; make EmbeddingAdam before it, right after DistributedModelParallel"
                )

    @property
    def _fused(self) -> list[tuple[str, KeyedOptimizer]]:
        """The parts of the collection's ``fused_optimizer``, which it and the model's read anew in each call."""
        optimizers: list[tuple[str, KeyedOptimizer]] = self.collection.fused_optimizer.optimizers
        return optimizers

    def replace_fused(self, lr: float) -> Callable[[], None]:
        """Makes the model's ``fused_optimizer`` drive these tables, also within wrappers that hold it already.

        These may hold its param_groups, which therefore stay, with the rate ``lr``.
        Dense tables are marked as tables whose update is fused, so that TorchRec's recipe leaves them to it.

        Returns:
            A function that undoes it.
        """
        fused, replaced = self._fused, self._fused[:]
        self.groups = [group for _, each in replaced for group in each.param_groups] or [{}]
        earlier = [dict(group) for group in self.groups]
        weights = dict(zip(self._keys, self.params.values(), strict=True))
        for number, group in enumerate(self.groups):
            group.update(params=[] if number else list(weights.values()), lr=lr)
        fused[:] = [("", UpdatedInBackward(weights, self.of_param, self.groups))]
        dense = [each for each in self.collection.parameters() if not hasattr(each, _UPDATED_IN_BACKWARD)]
        for each in dense:
            setattr(each, _UPDATED_IN_BACKWARD, [fused[0][1]])

        def undo() -> None:
            fused[:] = replaced
            for group, own in zip(self.groups, earlier, strict=True):
                group.clear()
                group.update(own)
            for each in dense:
                delattr(each, _UPDATED_IN_BACKWARD)

        return undo

    def require_entries(self, given: Mapping[str, Mapping[str, Any]]) -> None:
        """Raises ValueError if the ``state`` of a state_dict lacks an entry, or has one of another size."""
        for key, weight in self.params.items():
            entries, own = given.get(key, {}), self.of_param[weight]
            missing = sorted(own.keys() - entries.keys())
            if not missing:
                for name, entry in own.items():
                    entry.check(entries[name])
                continue
            remedy = "it is of another model"
            if LAST_STEP in entries:
                remedy = 'its rows may be behind: load it and the weights within as_stored(), under "replay"'
            elif LAST_STEP in missing and entries:
                remedy = "it was taken outside of as_stored(): load it and the weights there"
            raise UserError(f"the optimizer's state has no {missing[0]!r} of {key!r}; {remedy}")

    def _catch_up_before(self, given: Any, own: Any) -> None:
        """Brings rows up to date before the moments that their missed steps need are replaced.

        What is given in the moments' memory has been written before, and so may have been the weights.
        """
        held = [pair for pair in zip(_held_here(given), _held_here(own), strict=False) if len(pair[1])]
        in_place = any(one.data_ptr() == other.data_ptr() for one, other in held)
        if held and not (in_place or self._written or self._is_stored) and self._loaded_at != self.step:
            for adam in (each for each in self._replayed() if each.step):
                adam.flush()
            self._loaded_at = self.step

    def _set_entries(self, stored: bool) -> None:
        self._is_stored = stored
        last = len(self._tables) - 1
        for number, (key, own) in enumerate(zip(self.params, self.of_param.values(), strict=True)):
            for name in (STEP, LAST_STEP, LRS):
                own.pop(name, None)
            if stored:
                own[LAST_STEP] = _tensor_entry(key, LAST_STEP, self._last_steps[self._tables[number]])
            else:
                own[STEP] = Entry(
                    self._take_steps if number == 0 else lambda: torch.tensor(self._steps),
                    (lambda steps: self.restore(int(steps))) if number == last else lambda _: None,
                )
        if stored:  # loaded after the last steps of all tables
            own[LRS] = Entry(self.stored_rates, self.restore_stored)

    def _take_steps(self) -> Tensor:
        self._steps = self.settle()
        return torch.tensor(self._steps)

    def _sharded(self, flats: list[Tensor], *, per_row: bool = False) -> dict[str, Any]:
        dtype = torch.int32 if per_row else torch.float32
        lookups = [each.lookup for each in self.lookups]
        return sharded_like_weights(self.collection, lookups, flats, dtype, per_row=per_row)


def _views(adam: LookupAdam) -> list[Tensor]:
    """Weights of each of a lookup's shards."""
    return list(map(partial(adam.lookup.view_of, adam.lookup.flat_weights()), range(len(adam.lookup.shards))))


def _held_here(value: Any) -> list[Tensor]:
    """Tensors of this rank in an entry of a model's state."""
    if isinstance(value, ShardedTensor):
        return [shard.tensor for shard in value.local_shards()]
    return [value] if isinstance(value, Tensor) and not isinstance(value, DTensor) else []


class Entry:
    """Entry of a state that is computed when the state is taken, and acts when the state is loaded.

    KeyedOptimizer calls the first two functions, also where it is part of another one. The third raises ValueError for
    a value that does not fit.
    """

    def __init__(
        self, take: Callable[[], Any], load: Callable[[Any], None], check: Callable[[Any], None] = lambda _: None
    ):
        self.state_dict, self.load_state_dict, self.check = take, load, check


def _tensor_entry(key: str, name: str, own: Any, prepare: Callable[[Any, Any], None] = lambda *_: None) -> Entry:
    """Entry of a table's tensor; ``prepare`` is called before it is written, with the given one and it."""

    def check(given: Any) -> None:
        # Of the whole, and of the parts here. KeyedOptimizer would resize what is then no longer the table's memory.
        sizes, wanted = ([list(each.size()) for each in (of, *_held_here(of))] for of in (given, own))
        if sizes != wanted:
            raise UserError(
                f"the optimizer's state holds {name!r} of {key!r} in the sizes {sizes}, but the table has {wanted};"
                " load it into a model with the same tables, sharded alike"
            )

    def load(given: Any) -> None:
        check(given)
        prepare(given, own)
        KeyedOptimizer._update_param_state_dict_object({name: own}, {name: given}, [key])

    return Entry(lambda: own, load, check)


def _table(key: str) -> str:
    return key.removesuffix(".weight")
