"""Attachment to the lookups of a model: their forwards are replaced until the handle removes it."""

import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import islice
from threading import get_ident
from typing import Any, TypeAlias

import torch
from torch import Tensor, compiler, nn

from cowrec.errors import UserError

from ..kernels.torch_rows import parts_of_positions
from ..tbe.collection import is_pruned, leave_ddp
from ..tbe.inventory import ModelInventory
from ..tbe.lookup import lookup_modules
from ..tbe.plan import ShardedCollection
from .backward import Forward
from .row_backends import Inputs
from .statistics import TableStats
from .wrapped_lookup import WrappedLookup

LookUp: TypeAlias = Callable[[Forward, Inputs], Tensor]
"""New forward of a lookup: (its own forward, keyword arguments of that) -> output."""

_ATTACHED = "cowrec_attached"
"""Attribute of an attached collection, a function that returns the handle: two attachments would clip twice."""
DEFAULT_SCALES = (1.0, 0.3, 0.1, 0.03, 0.01, 1e-3, 1e-4)
"""Factors of the limits that :meth:`LookupsHandle.clipped_shares` tries."""


class LookupsHandle:
    """Clip statistics of a model, and the removal of what is attached; returned by :func:`attach_cowclip`.

    Mean pooling becomes a sum weighted with 1/length, which is the same on every back end of FBGEMM.

    Args:
        inventory: of the model, none of whose collections is attached.
        lookups: its lookups on this rank.
        look_up: the new forward of each.
        evicted: called with a lookup, the number of a table in it, and its rows that managed collision gives to new
            ids, int64 [n].
    """

    def __init__(
        self,
        inventory: ModelInventory,
        lookups: Sequence[WrappedLookup],
        look_up: Mapping[WrappedLookup, LookUp],
        evicted: Callable[[WrappedLookup, int, Tensor], None] = lambda *_: None,
    ):
        self._lookups, self._undo, self._warned = list(lookups), list[Callable[[], None]](), False
        pruned = [collection for collection, module in inventory.called.items() if is_pruned(module)]
        self._is_pruned = bool(pruned)
        for collection, module in inventory.called.items():
            own = [each for each in lookups if each.lookup.collection is collection]
            self._undo += [
                leave_ddp(collection, [each.lookup.module for each in own]),
                module.register_forward_pre_hook(compiler.disable(self._guard(module, collection, own))).remove,
                collection.register_load_state_dict_post_hook(_dropping(own)).remove,
                partial(delattr, collection, _ATTACHED),
            ]
            setattr(collection, _ATTACHED, lambda: self)  # a function, which a copy of the model shares
        for each in lookups:
            if each.lookup.collection not in pruned:
                self._undo.append(each.lookup.follow_evictions(partial(_forget, each, evicted)))
            self._undo.append(_wrap(each, look_up[each]))

    def stats(self) -> dict[str, TableStats]:
        """Statistics of each table, over the rows that this process holds. Waits for the device, once.

        They tell what the clip computed, from its norms and limits. What the update then did with it is checked in the
        first steps by ``verify`` of :func:`attach_cowclip`.

        Raises:
            ValueError: on CUDA, where no step waits for the device: ids of earlier steps were outside their tables.
        """
        if not self._lookups:
            return {}
        on_device = [each.statistics.on_device() for each in self._lookups]
        values = iter(zip(*torch.cat(on_device, dim=1).tolist(), strict=True))
        found: dict[str, TableStats] = {}
        for each, own in zip(self._lookups, on_device, strict=True):
            found |= each.statistics.per_table(list(zip(*islice(values, own.shape[1]), strict=True)))
        return found

    def latest_ratios(self) -> dict[str, Tensor]:
        """``||g|| / limit`` of the rows of each table in the latest step, float32, on the CPU. Waits for the device.

        Over the rows that this process holds; a row was clipped where the ratio is above 1.
        """
        return {name: each for own in self._lookups for name, each in own.statistics.latest_ratios().items()}

    def clipped_shares(self, scales: Sequence[float] = DEFAULT_SCALES) -> dict[str, dict[float, float]]:
        """Share of each table's rows that would be clipped if all limits were ``scale`` times the present ones.

        Over the rows of :meth:`stats`, from their ratios ``||g|| / limit``, which training with other limits would
        change. Under CowClip(r, zeta), ``scale`` times the limits is CowClip(scale * r, scale * zeta). Waits for the
        device.

        Args:
            scales: factors of the limits, from 1e-7 to 1e7; each is rounded by up to 3 %.

        Returns:
            Shares in [0, 1] by scale, by table name; 0 without rows.

        Raises:
            ValueError: a scale is out of range.
        """
        for scale in scales:
            if not 1e-7 <= scale <= 1e7:
                raise UserError(f"scales of limits must be in [1e-7, 1e7], got {scale}")
        return {name: own for each in self._lookups for name, own in each.statistics.shares_above(scales).items()}

    def reset_stats(self) -> None:
        """Begins a new window of :meth:`stats` and :meth:`clipped_shares`; what is known of the latest step remains."""
        for each in self._lookups:
            each.statistics.reset()

    def __repr__(self) -> str:
        """Each table of this process with its limit, without waiting for the device."""
        tables = {name: text for each in self._lookups for name, text in each.limits.described().items()}
        listed = ", ".join(f"{name}: {text}" for name, text in tables.items()) or "no table on this process"
        return f"<{type(self).__name__}, {'attached' if self._undo else 'removed'}; {listed}>"

    def accumulate(self, passes: int) -> None:
        """Makes one step of every ``passes`` backward passes: one clip, over the ids of all of them, and one update.

        Divide each loss by ``passes``, so that their sum is the mean over the complete batch. Optimizers of other
        parameters accumulate gradients by themselves. All ranks must take the same number of passes; call it with the
        number of those that are left before a last, shorter step. Passes that wait for others are dropped with a
        warning, as they are when the model loads a state; call it too after an exception in a backward pass.

        A row that managed collision gives to a new id meanwhile is left out of the passes that wait.

        Raises:
            ValueError: ``passes`` is below 1, or several under TorchRec's ITEP.
        """
        if passes < 1:
            raise UserError(f"accumulate takes at least 1 backward pass, got {passes}")
        if passes > 1 and self._is_pruned:
            raise UserError(
                f"accumulate({passes}) would train rows that ITEP gives to other ids with the gradients of their"
                " earlier ones, which wait; take a step for each pass"
            )
        _dropping(self._lookups)()
        for each in self._lookups:
            each.accumulation.passes = passes

    @property
    def waiting(self) -> int:
        """Backward passes whose gradients wait for others of their step."""
        return max((each.accumulation.waiting for each in self._lookups), default=0)

    def remove(self) -> None:
        """Detaches from the model; the weights do not change. Calling it again has no effect."""
        self.accumulate(1)
        for undo in self._undo:
            undo()
        self._undo = []

    def _guard(
        self, attached: nn.Module, collection: ShardedCollection, lookups: Sequence[WrappedLookup]
    ) -> Callable[..., None]:
        """Makes a function that checks a forward pass of a collection, which ``attached`` runs, before it begins.

        It raises RuntimeError if the model is a copy, TorchRec has rebuilt the lookups, or an exception has interrupted
        the accumulation of backward passes.
        """
        wrapped = lookup_modules(collection)

        def check(called: nn.Module, *_: Any) -> None:
            if called is not attached:
                refuse_copy(called)
            if lookup_modules(collection) != wrapped:  # modules are equal to themselves alone
                raise RuntimeError(
                    f"the lookups of {type(collection).__name__} were rebuilt after attaching, as by"
                    " DistributedModelParallel.reshard, so that its tables would train without the clip and without"
                    " EmbeddingAdam; call remove() before, and attach again after. For EmbeddingAdam save its"
                    " state_dict() before, and load it into the new one"
                )
            if not torch.is_grad_enabled() or all(each.forward_thread != get_ident() for each in lookups):
                return  # an evaluation, perhaps within a backward pass of another thread
            waiting = {each.accumulation.waiting for each in lookups}
            if len(waiting) > 1:
                names = _names([each for each in lookups if each.accumulation.waiting < max(waiting)])
                raise RuntimeError(
                    f"of the passes of a step, tables have {min(waiting)} or {max(waiting)}: an exception interrupted a"
                    " backward pass; then call accumulate(n) again, which drops them, and begin the step anew. Or the"
                    f" loss does not use the outputs of the tables {', '.join(map(repr, names))}: add 0 times their sum"
                    " to it"
                )
            self._warn_of_unequal_calls()

        return check

    def _warn_of_unequal_calls(self) -> None:
        """Warns, once, if the latest ``backward()`` completed the step of some lookups alone."""
        if self._warned or self._lookups[0].accumulation.passes == 1:  # of all alike
            return
        latest = max(each.latest_backward for each in self._lookups)
        reached = [each for each in self._lookups if each.latest_backward == latest]
        waiting = _names([each for each in reached if each.accumulation.waiting])
        stepped = _names([each for each in reached if not each.accumulation.waiting])
        if waiting and stepped:
            self._warned = True
            warnings.warn(
                f"a loss calls tables {', '.join(stepped)} more often than {', '.join(waiting)}: accumulate(n) counts"
                " calls, so that the first have taken their step and the others still wait; attach each collection by"
                " itself, and call accumulate(n) on each with its own number",
                RuntimeWarning,
                stacklevel=2,
            )


def _names(lookups: Sequence[WrappedLookup]) -> list[str]:
    return [shard.name for each in lookups for shard in each.lookup.shards]


def _dropping(lookups: Sequence[WrappedLookup]) -> Callable[..., None]:
    """Makes a function that drops the passes that wait, with a warning."""

    def drop(*_: Any) -> None:
        if waiting := max((each.accumulation.waiting for each in lookups), default=0):
            message = f"{waiting} backward passes that waited for others were dropped"
            warnings.warn(message, RuntimeWarning, stacklevel=3)
        for each in lookups:
            each.accumulation.drop()

    return drop


def _forget(wrapped: WrappedLookup, evicted: Callable[..., None], table: int, rows: Tensor) -> None:
    wrapped.accumulation.forget(table, rows)
    evicted(wrapped, table, rows)


def _wrap(wrapped: WrappedLookup, look_up: LookUp) -> Callable[[], None]:
    """Replaces the forward of one lookup; returns a function that restores it."""
    module, forward, is_mean = wrapped.lookup.module, wrapped.lookup.module.forward, wrapped.lookup.is_mean_pooled
    own = vars(module).get("forward")  # a wrapper of the user

    def replaced(**inputs: Any) -> Tensor:
        return look_up(forward, _with_weights_of_means(inputs) if is_mean else inputs)

    def undo() -> None:
        if own is None:
            del module.forward
        else:
            module.forward = own
        if is_mean:
            wrapped.lookup.pool_by(mean=True)

    if is_mean:
        wrapped.lookup.pool_by(mean=False)
    module.forward = compiler.disable(replaced)  # the kernels of numba and Triton cannot be traced
    return undo


def _with_weights_of_means(inputs: Inputs) -> Inputs:
    """Adds the ids' weights 1/length, whose sum is a mean, to the inputs of a lookup."""
    if inputs.get("per_sample_weights") is not None:
        raise UserError("FBGEMM treats weighted ids with mean pooling differently on CPU and CUDA; use sum pooling")
    indices, offsets = inputs["indices"], inputs["offsets"]
    bag = parts_of_positions(offsets, indices.numel())
    weights = (1.0 / (offsets[1:] - offsets[:-1]).float())[bag]
    return {**inputs, "per_sample_weights": weights}


def attached_to(collection: ShardedCollection) -> LookupsHandle | None:
    """Returns what is attached to a collection: an :class:`EmbeddingAdam` or another handle; None if nothing is."""
    handle: LookupsHandle | None = getattr(collection, _ATTACHED, lambda: None)()
    return handle


def require_unattached(inventory: ModelInventory) -> None:
    """Raises ValueError if a collection is attached already."""
    if any(map(attached_to, inventory.collections.values())):
        raise UserError(
            "this model's tables are attached already; call remove() of the earlier handle first, or"
            " detach_cowclip(model)"
        )


def refuse_copy(copied: nn.Module) -> None:
    """Raises RuntimeError for a copy of a collection that is attached."""
    raise RuntimeError(
        f"this {type(copied).__name__} is a copy of one that is attached, and would read and train the tables of that"
        " one; call remove() on what attach_cowclip returned, or on EmbeddingAdam, before the model is copied, and"
        " attach each of them"
    )


def detach_cowclip(model: nn.Module) -> None:
    """Detaches what :func:`attach_cowclip` or :class:`EmbeddingAdam` has attached to a model, as its ``remove()`` does.

    For a handle that was lost. Has no effect where nothing is attached.
    """
    for collection in ModelInventory(model).collections.values():
        if attached := attached_to(collection):
            attached.remove()
