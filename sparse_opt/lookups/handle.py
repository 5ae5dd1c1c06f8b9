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

from ..algorithm.clip import NoClip
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
"""New forward of a lookup: (FBGEMM's forward, keyword arguments of FBGEMM's forward) -> output."""

_ATTACHED = "cowrec_attached"
"""Attribute of an attached collection, a function that returns the handle: two attachments would clip twice."""
DEFAULT_SCALES = (1.0, 0.3, 0.1, 0.03, 0.01, 1e-3, 1e-4)


class LookupsHandle:
    """Attachment to a model: statistics of the clip, accumulation of passes, and removal.

    Mean pooling becomes a sum with the weights 1/length, which every back end of FBGEMM computes in the same way.

    Args:
        look_up: the new forward of each lookup.
        evicted: function of a lookup, the number of a table in the lookup, and the table's rows that managed collision
            gives to new ids, int64 [n].
    """

    def __init__(
        self,
        inventory: ModelInventory,
        lookups: Sequence[WrappedLookup],
        look_up: Mapping[WrappedLookup, LookUp],
        evicted: Callable[[WrappedLookup, int, Tensor], None] = lambda *_: None,
    ):
        self._lookups, self._undo = list(lookups), list[Callable[[], None]]()
        pruned = [collection for collection, module in inventory.called.items() if is_pruned(module)]
        self._is_pruned = bool(pruned)
        for collection, module in inventory.called.items():
            own = [wrapped for wrapped in lookups if wrapped.lookup.collection is collection]
            self._undo += [
                leave_ddp(collection, [wrapped.lookup.module for wrapped in own]),
                module.register_forward_pre_hook(compiler.disable(self._guard(module, collection, own))).remove,
                collection.register_load_state_dict_post_hook(_dropping(own)).remove,
                partial(delattr, collection, _ATTACHED),
            ]
            setattr(collection, _ATTACHED, lambda: self)  # a function, which a copy of the model shares
        for wrapped in lookups:
            if wrapped.lookup.collection not in pruned:
                self._undo.append(wrapped.lookup.follow_evictions(partial(_forget, wrapped, evicted)))
            self._undo.append(_wrap(wrapped, look_up[wrapped]))

    def stats(self) -> dict[str, TableStats]:
        """Returns statistics of each table's clip, over the rows that this process holds. Waits for the device, once.

        Raises ValueError: on CUDA, ids of earlier steps were outside their tables.
        """
        if not self._lookups:
            return {}
        on_device = [wrapped.statistics.on_device() for wrapped in self._lookups]
        values = iter(zip(*torch.cat(on_device, dim=1).tolist(), strict=True))
        found: dict[str, TableStats] = {}
        for wrapped, own in zip(self._lookups, on_device, strict=True):
            found |= wrapped.statistics.per_table(list(zip(*islice(values, own.shape[1]), strict=True)))
        return found

    def latest_ratios(self) -> dict[str, Tensor]:
        """Returns ``||g|| / limit`` of the latest step's rows here, by table, float32 on CPU. Waits for the device."""
        return {name: own for wrapped in self._lookups for name, own in wrapped.statistics.latest_ratios().items()}

    def clipped_shares(self, scales: Sequence[float] = DEFAULT_SCALES) -> dict[str, dict[float, float]]:
        """Computes the share of rows that would be clipped if all limits were ``scale`` times as large.

        The shares come from the ratios ``||g|| / limit`` of the rows of :meth:`stats`. Training with other limits would
        change these ratios. ``scale`` times the limits of CowClip(r, zeta) are those of CowClip(scale * r, scale *
        zeta). ``scales`` are from 1e-7 to 1e7, rounded by up to 3 %. Waits for the device. Returns shares in [0, 1] by
        table name and scale.

        Raises ValueError: a scale is out of range.
        """
        for scale in scales:
            if not 1e-7 <= scale <= 1e7:
                raise UserError(f"scales of limits must be in [1e-7, 1e7], got {scale}")
        return {name: own for wrapped in self._lookups for name, own in wrapped.statistics.shares_above(scales).items()}

    def reset_stats(self) -> None:
        """Begins a new window of :meth:`stats` and :meth:`clipped_shares`; the latest step remains known."""
        for wrapped in self._lookups:
            wrapped.statistics.reset()

    def __repr__(self) -> str:
        """Lists the tables of this process with their limits, without waiting for the device."""
        rules = {name: rule for wrapped in self._lookups for name, rule in wrapped.limits.rules.items()}
        limits = (f"{name}: {'unclipped' if isinstance(rule, NoClip) else repr(rule)}" for name, rule in rules.items())
        listed = ", ".join(limits) or "no table on this process"
        return f"<{type(self).__name__}, {'attached' if self._undo else 'removed'}; {listed}>"

    def accumulate(self, passes: int) -> None:
        """Makes one step of every ``passes`` backward passes: one clip over the ids of all passes, and one update.

        Divide each loss by ``passes``, so that the sum of the losses is the mean over the complete batch. Other
        optimizers accumulate gradients by themselves. All ranks must take the same number of passes. If the last step
        has fewer passes, call ``accumulate`` with their number before its first forward pass. A call drops passes that
        wait, with a warning, and so does loading a state into the model. Call ``accumulate`` again after an exception
        in a backward pass.

        Raises ValueError: ``passes`` is below 1, or above 1 under TorchRec's ITEP; or in a step, managed collision has
        given rows to new ids while passes wait.
        """
        if passes < 1:
            raise UserError(f"accumulate takes at least 1 backward pass, got {passes}")
        if passes > 1 and self._is_pruned:
            raise UserError(
                f"accumulate({passes}) would train rows that ITEP gives to other ids with the gradients of their"
                " earlier ones, which wait; take a step for each pass"
            )
        _dropping(self._lookups)()
        for wrapped in self._lookups:
            wrapped.accumulation.passes = passes

    @property
    def waiting(self) -> int:
        """Number of backward passes whose gradients wait for other passes of their step."""
        return max((wrapped.accumulation.waiting for wrapped in self._lookups), default=0)

    def remove(self) -> None:
        """Detaches from the model; the weights do not change. Calling it again has no effect."""
        self.accumulate(1)
        for undo in self._undo:
            undo()
        self._undo = []

    def _guard(
        self, attached: nn.Module, collection: ShardedCollection, lookups: Sequence[WrappedLookup]
    ) -> Callable[..., None]:
        """Makes a hook before a collection's forward pass that refuses copies, rebuilt lookups, interrupted steps."""
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
            if not torch.is_grad_enabled() or all(wrapped.forward_thread != get_ident() for wrapped in lookups):
                return  # an evaluation, perhaps within a backward pass of another thread
            waiting = {wrapped.accumulation.waiting for wrapped in lookups}
            if len(waiting) > 1:
                behind = [wrapped.lookup for wrapped in lookups if wrapped.accumulation.waiting < max(waiting)]
                names = [shard.name for lookup in behind for shard in lookup.shards]
                raise RuntimeError(
                    f"of the passes of a step, tables have {min(waiting)} or {max(waiting)}: an exception interrupted a"
                    " backward pass; then call accumulate(n) again, which drops them, and begin the step anew. Or the"
                    f" loss does not use the outputs of the tables {', '.join(map(repr, names))}: add 0 times their sum"
                    " to it"
                )

        return check


def _dropping(lookups: Sequence[WrappedLookup]) -> Callable[..., None]:
    """Makes a function that drops waiting passes, with a warning."""

    def drop(*_: Any) -> None:
        if waiting := max((wrapped.accumulation.waiting for wrapped in lookups), default=0):
            message = f"{waiting} backward passes that waited for others were dropped"
            warnings.warn(message, RuntimeWarning, stacklevel=3)
        for wrapped in lookups:
            wrapped.accumulation.drop()

    return drop


def _forget(wrapped: WrappedLookup, evicted: Callable[..., None], table: int, rows: Tensor) -> None:
    if len(rows) and wrapped.accumulation.waiting:
        raise UserError(
            f"managed collision has given rows of table {wrapped.lookup.shards[table].name!r} to new ids, which would"
            " get the gradients of earlier ones that wait for their step; take a step for each backward pass"
        )
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
    """Adds ids' weights 1/length to the inputs of a lookup, so that a sum is a mean."""
    if inputs.get("per_sample_weights") is not None:
        raise UserError("FBGEMM treats weighted ids with mean pooling differently on CPU and CUDA; use sum pooling")
    indices, offsets = inputs["indices"], inputs["offsets"]
    bag = parts_of_positions(offsets, indices.numel())
    weights = (1.0 / (offsets[1:] - offsets[:-1]).float())[bag]
    return {**inputs, "per_sample_weights": weights}


def attached_to(collection: ShardedCollection) -> LookupsHandle | None:
    """Returns the handle that is attached to a collection, which may be an :class:`EmbeddingAdam`; None if none is."""
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
    """Removes the attachment of :func:`attach_cowclip` or :class:`EmbeddingAdam` from a model, if there is one."""
    for collection in ModelInventory(model).collections.values():
        if attached := attached_to(collection):
            attached.remove()
