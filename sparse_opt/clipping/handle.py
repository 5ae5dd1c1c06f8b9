"""Attachment to the lookups of a model: their forwards and backwards are replaced until the handle removes it.

torch's GradScaler multiplies the loss, and divides the gradients of parameters before their optimizer's step, which it
skips if one of them is not finite. The update of embeddings runs inside the backward, before that: row gradients are
divided by the scale before they are clipped.
"""

import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from threading import get_ident
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, compiler, nn
from torch.amp import GradScaler

from cowrec.errors import UserError

from ..kernels.layout import LookupBackward, LookupBags, LookupIds
from ..kernels.torch_rows import parts_of_positions
from ..tbe.discovery import (
    grad_scalers_in_use,
    is_pruned,
    leave_ddp,
    lookup_modules,
    sharded_collections,
)
from ..tbe.lookup import ShardedCollection
from .clipped_lookup import ClippedLookup
from .statistics import TableStats

Inputs = Mapping[str, Any]
"""Keyword arguments of a lookup's forward: ``indices``, ``offsets``, ``per_sample_weights`` and others."""
Forward = Callable[..., Tensor]

_ATTACHED = "cowrec_attached"
"""Attribute of an attached collection, a function that returns what is attached: two attachments would clip twice."""


DEFAULT_SCALES = (1.0, 0.3, 0.1, 0.03, 0.01, 1e-3, 1e-4)
"""Factors of the limits that :meth:`LookupsHandle.clipped_shares` tries."""


class LookupsHandle:
    """Clip statistics of a model, and the removal of the clip; returned by :func:`attach_cowclip`."""

    def __init__(self, lookups: Sequence[ClippedLookup], undo: Sequence[Callable[[], None]], *, is_pruned: bool):
        self._lookups, self._undo, self._is_pruned = list(lookups), list(undo), is_pruned

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
        _drop_waiting(self._lookups)
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


def _drop_waiting(lookups: Sequence[ClippedLookup], *_: Any) -> None:
    waiting = max((each.accumulation.waiting for each in lookups), default=0)
    if waiting:
        warnings.warn(f"{waiting} backward passes that waited for others were dropped", RuntimeWarning, stacklevel=3)
    for each in lookups:
        each.accumulation.drop()


def wrap_lookups(
    called: Mapping[ShardedCollection, nn.Module],
    lookups: Sequence[ClippedLookup],
    look_up: Callable[[ClippedLookup, Forward, Inputs], Tensor],
    evicted: Callable[[ClippedLookup, int, Tensor], None] = lambda *_: None,
    owner: Any = None,
) -> LookupsHandle:
    """Replaces the forward of lookups by ``look_up(clipped lookup, its forward, inputs) -> output``.

    Mean pooling becomes a sum weighted with 1/length, which is the same on every back end of FBGEMM.

    Args:
        called: the model's collections, none of them attached, and the modules whose calls run them.
        lookups: their lookups on this rank.
        look_up: new forward.
        evicted: called with a lookup, the number of a table in it, and its rows that managed collision gives to new
            ids, int64 [n].
        owner: what :func:`attached_to` returns, whose ``remove()`` detaches; by default the handle.
    """
    undo, warn_unequal = list[Callable[[], None]](), _warn_once_of_unequal_calls(lookups)
    for collection, module in called.items():
        own = [each for each in lookups if each.lookup.collection is collection]
        undo += [
            leave_ddp(collection, [each.lookup.module for each in own]),
            module.register_forward_pre_hook(compiler.disable(_guard(module, collection, own, warn_unequal))).remove,
            collection.register_load_state_dict_post_hook(partial(_drop_waiting, own)).remove,
            partial(delattr, collection, _ATTACHED),
        ]
    pruned = [collection for collection, module in called.items() if is_pruned(module)]
    for each in (each for each in lookups if each.lookup.collection not in pruned):
        undo.append(each.lookup.follow_evictions(partial(_forget, each, evicted)))
    undo += [_wrap_lookup(each, look_up) for each in lookups]
    handle = LookupsHandle(lookups, undo, is_pruned=bool(pruned))

    def attached() -> tuple[LookupsHandle, Any]:  # a function, which a copy of the model shares
        return handle, handle if owner is None else owner

    for each in called:
        setattr(each, _ATTACHED, attached)
    return handle


def _forget(clipped: ClippedLookup, evicted: Callable[..., None], table: int, rows: Tensor) -> None:
    clipped.accumulation.forget(table, rows)
    evicted(clipped, table, rows)


def attached_to(collection: ShardedCollection) -> Any:
    """What is attached to a collection: a :class:`LookupsHandle` or an :class:`EmbeddingAdam`; None if nothing is."""
    return getattr(collection, _ATTACHED, lambda: (None, None))()[1]


def waiting_passes(collection: ShardedCollection) -> int:
    """Backward passes whose gradients wait for others of their step; see :meth:`LookupsHandle.accumulate`."""
    handle: LookupsHandle | None = getattr(collection, _ATTACHED, lambda: (None, None))()[0]
    return handle.waiting if handle else 0


def require_unattached(collections: Collection[ShardedCollection]) -> None:
    """Raises ValueError if a collection is attached already."""
    if any(map(attached_to, collections)):
        raise UserError(
            "this model's tables are attached already; call remove() of the earlier handle first, or"
            " detach_cowclip(model)"
        )


def _warn_once_of_unequal_calls(lookups: Sequence[ClippedLookup]) -> Callable[[], None]:
    """Makes a function that warns, once, if the latest ``backward()`` completed the step of some lookups alone."""
    warned = False

    def check() -> None:
        nonlocal warned
        if warned or not lookups or lookups[0].accumulation.passes == 1:  # of all alike
            return
        latest = max((each.latest_backward for each in lookups), default=-1)
        reached = [each for each in lookups if each.latest_backward == latest and each.accumulation.passes > 1]
        waiting = [shard.name for each in reached if each.accumulation.waiting for shard in each.lookup.shards]
        stepped = [shard.name for each in reached if not each.accumulation.waiting for shard in each.lookup.shards]
        if waiting and stepped:
            warned = True
            warnings.warn(
                f"a loss calls tables {', '.join(stepped)} more often than {', '.join(waiting)}: accumulate(n) counts"
                " calls, so that the first have taken their step and the others still wait; attach each collection by"
                " itself, and call accumulate(n) on each with its own number",
                RuntimeWarning,
                stacklevel=2,
            )

    return check


def refuse_copy(copied: nn.Module) -> None:
    """Raises RuntimeError for a copy of a collection that is attached."""
    raise RuntimeError(
        f"this {type(copied).__name__} is a copy of one that is attached, and would read and train the tables of that"
        " one; call remove() on what attach_cowclip returned, or on EmbeddingAdam, before the model is copied, and"
        " attach each of them"
    )


def _guard(
    attached: nn.Module,
    collection: ShardedCollection,
    lookups: Sequence[ClippedLookup],
    warn_unequal: Callable[[], None],
) -> Callable[..., None]:
    """Makes a forward pre-hook that raises RuntimeError in a copy of the model, once TorchRec has rebuilt the lookups
    of a collection, or if an exception has interrupted the accumulation of their backward passes.
    """
    wrapped = lookup_modules(collection)

    def check(called: nn.Module, *_: Any) -> None:
        if called is not attached:
            refuse_copy(called)
        if lookup_modules(collection) != wrapped:  # modules are equal to themselves alone
            raise RuntimeError(
                f"the lookups of {type(collection).__name__} were rebuilt after attaching, as by"
                " DistributedModelParallel.reshard, so that its tables would train without the clip and without"
                " EmbeddingAdam; call remove() before, and attach again after. For EmbeddingAdam save its state_dict()"
                " before, and load it into the new one"
            )
        if not torch.is_grad_enabled() or all(each.forward_thread != get_ident() for each in lookups):
            return  # an evaluation, perhaps within a backward pass of another thread
        waiting = {each.accumulation.waiting for each in lookups}
        if len(waiting) > 1:
            names = [
                each.name for some in lookups if some.accumulation.waiting < max(waiting) for each in some.lookup.shards
            ]
            raise RuntimeError(
                f"of the passes of a step, tables have {min(waiting)} or {max(waiting)}: an exception interrupted a"
                " backward pass; then call accumulate(n) again, which drops them, and begin the step anew. Or the loss"
                f" does not use the outputs of the tables {', '.join(map(repr, names))}: add 0 times their sum to it"
            )
        warn_unequal()

    return check


def _wrap_lookup(
    clipped: ClippedLookup, look_up: Callable[[ClippedLookup, Forward, Inputs], Tensor]
) -> Callable[[], None]:
    """Replaces the forward of one lookup; returns a function that restores it."""
    module, forward, is_mean = clipped.lookup.module, clipped.lookup.module.forward, clipped.lookup.is_mean_pooled
    own = vars(module).get("forward")  # a wrapper of the user

    def wrapped(**inputs: Any) -> Tensor:
        return look_up(clipped, forward, _with_weights_of_means(inputs) if is_mean else inputs)

    def undo() -> None:
        if own is None:
            del module.forward
        else:
            module.forward = own
        if is_mean:
            clipped.lookup.pool_by(mean=True)

    if is_mean:
        clipped.lookup.pool_by(mean=False)
    module.forward = compiler.disable(wrapped)  # the kernels of numba and Triton cannot be traced
    return undo


def detach_cowclip(model: nn.Module) -> None:
    """Detaches what :func:`attach_cowclip` or :class:`EmbeddingAdam` has attached to a model, as its ``remove()`` does.

    For a handle that was lost. Has no effect where nothing is attached.
    """
    for collection in sharded_collections(model).values():
        if attached := attached_to(collection):
            attached.remove()


def _with_weights_of_means(inputs: Inputs) -> Inputs:
    """Adds the ids' weights 1/length, whose sum is a mean, to the inputs of a lookup."""
    if inputs.get("per_sample_weights") is not None:
        raise UserError("FBGEMM treats weighted ids with mean pooling differently on CPU and CUDA; use sum pooling")
    indices, offsets = inputs["indices"], inputs["offsets"]
    bag = parts_of_positions(offsets, indices.numel())
    weights = (1.0 / (offsets[1:] - offsets[:-1]).float())[bag]
    return {**inputs, "per_sample_weights": weights}


@dataclass(frozen=True)
class Unscaled:
    """A backward pass of a lookup without the loss' scale.

    Attributes:
        backward: with the output gradient of the unscaled loss, at least float32; zeros if it was not finite.
        scaled_grad: output gradient as it came, of its own type; zeros if it was not finite.
        factor: 1 / scale, float32 []; None without a scale.
        finite: whether all of the output gradient was finite, bool []; None without a scale.
    """

    backward: LookupBackward
    scaled_grad: Tensor
    factor: Tensor | None = None
    finite: Tensor | None = None


class LossScale:
    """Scale of a model's loss. Does not wait for the device.

    Args:
        scaler: scaler of the loss; None if the loss is not scaled. The first backward then warns if a scaler is in use.
    """

    def __init__(self, scaler: GradScaler | None):
        self._scaler = scaler if scaler is not None and scaler.is_enabled() else None
        self._is_checked = scaler is not None

    @property
    def is_used(self) -> bool:
        """True if the loss is scaled."""
        return self._scaler is not None

    def unscaled(self, clipped: ClippedLookup, backward: LookupBackward) -> Unscaled:
        """Divides the output gradient of a lookup by the scale."""
        grad = backward.output_grad
        if self._scaler is None:
            self._warn_once()
            return Unscaled(backward, grad)
        scale = self._scaler.scale(torch.ones((), dtype=torch.float32, device=grad.device))
        assert isinstance(scale, Tensor)
        factor, finite = scale.double().reciprocal().float(), grad.isfinite().all()
        # Ranks that wait for each other take one step together; a row's columns move together, without a limit too.
        together = [clipped.lookup.process_group] if clipped.in_torch.waits_for_ranks else clipped.column_partners
        on_all = finite.int()
        for group in together:
            dist.all_reduce(on_all, dist.ReduceOp.MIN, group=group)
        finite = on_all.bool()
        scaled = torch.where(finite, grad, 0)
        return Unscaled(replace(backward, output_grad=scaled.float() * factor), scaled, factor, finite)

    def _warn_once(self) -> None:
        if self._is_checked:
            return
        self._is_checked = True
        for scaler in grad_scalers_in_use():
            warnings.warn(
                f"a GradScaler with scale {scaler.get_scale():g} is in use, and the tables were attached without it. If"
                " it scales this model's loss, row gradients are measured and applied multiplied by that scale: pass"
                " grad_scaler=scaler to attach_cowclip or EmbeddingAdam. If it does not, pass"
                " grad_scaler=GradScaler(enabled=False)",
                RuntimeWarning,
                stacklevel=2,
            )


Run = Callable[[LookupBackward], Tensor | None]


def run_in_backward(
    output: Tensor,
    clipped: ClippedLookup,
    bags: LookupBags,
    id_weights: Tensor | None,
    loss_scale: LossScale,
    run: Run,
    *,
    parameter: Tensor | None = None,
    ids: LookupIds | None = None,
) -> Tensor:
    """Makes the backward of a lookup run a function.

    Args:
        output: the lookup's output, without a gradient.
        id_weights: factor of each id in its bag's sum, float [nnz]; gets its gradient if it requires one.
        run: called with the unscaled backward pass, or with all passes of a step that accumulates them; it returns the
            gradient of ``parameter``.
        parameter: weights of the lookup, where a dense optimizer applies their gradient. It has the scale of the loss.
        ids: rows of the ids, if they have been found already.

    Returns:
        The output, in the same memory.
    """
    if parameter is None:
        parameter = torch.ones(
            (), dtype=torch.float32, requires_grad=True
        )  # makes autograd record the lookup, whose inputs are integers
    recorded: Tensor = _RunInBackward.apply(output, parameter, id_weights, clipped, bags, ids, loss_scale, run)
    return recorded


def in_same_memory(ctx: Any, output: Tensor) -> Tensor:
    """Result of the forward of an autograd function that returns its input and changes only the backward."""
    if output._is_view():  # FBGEMM's of a variable batch size on CUDA, which autograd lets nobody change in place
        return output.view_as(output)
    ctx.mark_dirty(output)
    return output


class _RunInBackward(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        output: Tensor,
        parameter: Tensor,
        id_weights: Tensor | None,
        clipped: ClippedLookup,
        bags: LookupBags,
        ids: LookupIds | None,
        loss_scale: LossScale,
        run: Run,
    ) -> Tensor:
        ctx.save_for_backward(bags.indices, bags.offsets, id_weights)
        ctx.blocks, ctx.size, ctx.ids, ctx.thread = bags.blocks, bags.size, ids, get_ident()
        ctx.clipped, ctx.loss_scale, ctx.run, ctx.parameter_shape = clipped, loss_scale, run, parameter.shape
        return in_same_memory(ctx, output)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        indices, offsets, id_weights = ctx.saved_tensors
        bags = LookupBags(indices, offsets, ctx.blocks, ctx.size)
        backward = LookupBackward(bags, id_weights, grads[0], ctx.ids)
        ctx.clipped.check_backward(ctx)
        weight_grad = ctx.clipped.in_torch.id_weight_grad(backward) if ctx.needs_input_grad[2] else None
        unscaled = ctx.loss_scale.unscaled(ctx.clipped, backward)
        step = ctx.clipped.accumulation.add(unscaled.backward, unscaled.finite)
        grad = ctx.run(step) if step else None
        if unscaled.factor is not None and ctx.parameter_shape:
            # Not finite where the pass was not, so that the GradScaler skips the step.
            summand = torch.where(unscaled.finite, 0.0, torch.nan)
            grad = summand.expand(ctx.parameter_shape) if grad is None else grad / unscaled.factor + summand
        return None, grad, weight_grad, *(None,) * 5
