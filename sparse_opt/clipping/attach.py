"""CowClip for the stock fused optimizers of any TorchRec model: ``attach_cowclip(model, CowClip(r=1.0, zeta=1e-5))``.

FBGEMM updates a table inside the backward of its lookup, so the clip has to change what that backward reads. An
autograd function on the lookup's output computes each row's gradient from the output gradient and the ids, and from it
the row's clip factor; it then scales every id's share of the gradient by the factor of its row, through the ids'
weights. Where bags hold at most one id, it writes the row's clipped gradient, L2 included, into the output gradient
instead. Either way the fused update sees exactly the clipped row gradient. After input-dist a row-wise or table-wise
shard has the global batch's ids of its rows, so counts are global.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import islice
from math import inf
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torchrec.distributed.embeddingbag import ShardedEmbeddingBagCollection

from cowrec.sparse_opt.algorithm.clip import ClipRule
from cowrec.sparse_opt.tbe.discovery import lookup_modules
from cowrec.sparse_opt.tbe.layout import LookupBackward

from .clipped_lookup import ClippedLookup
from .requirements import check_lookup_inputs, clipped_lookups
from .single_id_bags import clipped_output_grad
from .statistics import TableStats

Inputs = Mapping[str, Any]
"""Keyword arguments of a lookup's forward: ``indices``, ``offsets``, ``per_sample_weights`` and others."""
Forward = Callable[..., Tensor]

_ATTACHED: WeakSet[nn.Module] = WeakSet()
"""Lookups whose forward is replaced: two attachments on one lookup would clip twice."""


class LookupsHandle:
    """Clip statistics of a model, and the removal of the clip; returned by :func:`attach_cowclip`."""

    def __init__(self, lookups: Sequence[ClippedLookup], undo: Sequence[Callable[[], None]]):
        self._lookups, self._undo = list(lookups), list(undo)

    def stats(self) -> dict[str, TableStats]:
        """Statistics of each table, over the rows that this process holds. Waits for the device, once.

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

    def remove(self) -> None:
        """Detaches from the model; the weights do not change. Calling it again has no effect."""
        for undo in self._undo:
            undo()
        self._undo = []


def attach_cowclip(
    model: nn.Module,
    rule: ClipRule,
    *,
    exclude: Sequence[str] = (),
    clip_columns: int | Mapping[str, int] | None = None,
    single_id_bags: bool = False,
    l2: float = 0.0,
) -> LookupsHandle:
    """Clips the row gradients of every table of a model before its fused optimizer applies them.

    The loss must be the mean over the global batch (with TorchRec's gradient division, which is on by default). The
    attachment lasts until ``handle.remove()``; evaluation is not affected.

    Rules for tables or for all of them take the norm over the rows of the batch. The processes then add up their norms
    in each backward pass, so all must take part in every step.

    Args:
        model: any module that holds EmbeddingBagCollections sharded row-, column- or table-wise under fused optimizers
            (SGD, Adagrad, row-wise Adagrad, and on CUDA all of FBGEMM's), usually a DistributedModelParallel.
        rule: one of :data:`CLIP_RULES` or another :class:`ClipRule`.
        exclude: names of tables to leave unclipped.
        clip_columns: leading columns that are measured and clipped, for all tables or by name; the others are not
            changed. Needs ``single_id_bags`` because ids' weights scale all columns of a row.
        single_id_bags: whether every bag holds at most one id and no lookup has ids' weights; saves the weights.
            Checked in every step.
        l2: coefficient of ``l2 * sum(w^2)`` in the loss, over the rows of the batch alone: ``2 * l2 * w`` is added to
            their gradient before the clip, in all columns and in excluded tables too. Rows without an id in the batch
            do not change, unlike in the paper. Needs ``single_id_bags``.

    Returns:
        A handle with ``stats()`` and ``remove()``.

    Raises:
        ValueError: the model has no table, a table cannot be clipped, a name is unknown, the model is attached already,
            or the rule does not fit the sharding plan; and in a training step: a bag holds more than one id despite
            ``single_id_bags``, or an id is outside its table.
    """
    if not 0 <= l2 < inf:
        raise ValueError(f"l2 must be >= 0 and finite, got {l2}")
    if l2 > 0 and not single_id_bags:
        raise ValueError(
            f"l2 = {l2} under a stock fused optimizer needs single_id_bags=True (the ids of a bag share one output"
            " gradient, which cannot hold the L2 of several rows); for other bags use cowrec's EmbeddingAdam, or l2 = 0"
        )
    if clip_columns is not None and not single_id_bags:
        raise ValueError(
            "clip_columns under a stock fused optimizer needs single_id_bags=True (a bag of several ids can only be"
            " scaled by complete rows); for other bags use cowrec's EmbeddingAdam, or clip all columns"
        )
    lookups = clipped_lookups(model, rule, exclude, clip_columns, optional=() if l2 > 0 else exclude)

    if l2 > 0:
        _require_float32_outputs(lookups)
    return wrap_lookups(lookups, partial(_look_up, single_id_bags, l2))


def _require_float32_outputs(lookups: Sequence[ClippedLookup]) -> None:
    for lookup in (each.lookup for each in lookups):
        if lookup.output_is_half:
            raise ValueError(
                f"table {lookup.shards[0].name!r} has outputs in half precision, whose gradient cannot hold a small L2;"
                " set output_dtype to float32, l2 = 0, or use cowrec's EmbeddingAdam"
            )


def _look_up(single_id_bags: bool, l2: float, clipped: ClippedLookup, forward: Forward, inputs: Inputs) -> Tensor:
    """Forward of a lookup under the clip."""
    given = inputs.get("per_sample_weights")
    weights = None if single_id_bags else _scalable_weights(given, inputs["indices"])
    output = forward(**inputs if weights is None else {**inputs, "per_sample_weights": weights})
    if not output.requires_grad:
        return output
    check_lookup_inputs(inputs)
    ids = (inputs["indices"], inputs["offsets"], given, weights)
    clipping: Tensor = _ClipInBackward.apply(output, *ids, clipped, single_id_bags, l2)
    return clipping


class _ClipInBackward(torch.autograd.Function):
    """Identity whose backward clips what the backward of the lookup, which follows it, reads."""

    @staticmethod
    def forward(
        ctx: Any,
        output: Tensor,
        indices: Tensor,
        offsets: Tensor,
        given: Tensor | None,
        weights: Tensor | None,
        clipped: ClippedLookup,
        single_id_bags: bool,
        l2: float,
    ) -> Tensor:
        # Saved as FBGEMM saves them: activation checkpointing then hands both backwards the same tensors.
        ctx.save_for_backward(indices, offsets, given, weights)
        ctx.clipped, ctx.single_id_bags, ctx.l2 = clipped, single_id_bags, l2
        ctx.mark_dirty(output)
        return output

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        indices, offsets, given, weights = ctx.saved_tensors
        backward = LookupBackward(indices, offsets, given, grads[0])
        grad = grads[0]
        if ctx.single_id_bags:
            _require_single_ids(backward)
            grad = clipped_output_grad(ctx.clipped, backward, ctx.l2)
        else:
            # Scaling the ids' weights scales the update. They are written anew in every backward of a forward.
            factors = ctx.clipped.id_factors(backward)
            weights.data.copy_(factors if given is None else given * factors)
        return grad, *(None,) * 7


def wrap_lookups(
    lookups: Sequence[ClippedLookup],
    look_up: Callable[[ClippedLookup, Forward, Inputs], Tensor],
) -> LookupsHandle:
    """Replaces the forward of lookups by ``look_up(clipped lookup, its forward, inputs) -> output``.

    Mean pooling becomes a sum weighted with 1/length, which is the same on every back end of FBGEMM.

    Raises:
        ValueError: a lookup is attached already.
    """
    require_unattached(lookups)
    collections = {id(each.lookup.collection): each.lookup.collection for each in lookups}
    guards = [each.register_forward_pre_hook(_refuses_rebuilt(each)).remove for each in collections.values()]
    return LookupsHandle(lookups, [*guards, *(_wrap_lookup(each, look_up) for each in lookups)])


def require_unattached(lookups: Sequence[ClippedLookup]) -> None:
    """Raises ValueError if a lookup is attached already."""
    if any(each.lookup.module in _ATTACHED for each in lookups):
        raise ValueError("this model's tables are attached already; call remove() of the earlier handle first")


def _refuses_rebuilt(collection: ShardedEmbeddingBagCollection) -> Callable[..., None]:
    """A forward pre-hook that raises RuntimeError once the lookups of a collection are not those of now."""
    wrapped = lookup_modules(collection)

    def check(*_: Any) -> None:
        if lookup_modules(collection) != wrapped:  # modules are equal to themselves alone
            raise RuntimeError(
                f"the lookups of {type(collection).__name__} were rebuilt after attaching, as by"
                " DistributedModelParallel.reshard, so that its tables would train without the clip and without"
                " EmbeddingAdam; call remove() before, and attach again after. For EmbeddingAdam save its state_dict()"
                " before, and load it into the new one"
            )

    return check


def _wrap_lookup(
    clipped: ClippedLookup, look_up: Callable[[ClippedLookup, Forward, Inputs], Tensor]
) -> Callable[[], None]:
    """Replaces the forward of one lookup; returns a function that restores it."""
    module, forward, is_mean = clipped.lookup.module, clipped.lookup.module.forward, clipped.lookup.is_mean_pooled

    def wrapped(**inputs: Any) -> Tensor:
        return look_up(clipped, forward, _with_weights_of_means(inputs) if is_mean else inputs)

    def undo() -> None:
        del module.forward
        if is_mean:
            clipped.lookup.pool_by_mean()
        _ATTACHED.discard(module)

    if is_mean:
        clipped.lookup.pool_by_weighted_sum()
    module.forward = wrapped
    _ATTACHED.add(module)
    return undo


def _require_single_ids(backward: LookupBackward) -> None:
    within = (backward.offsets[1:] - backward.offsets[:-1] <= 1).all()
    if within.is_cuda:
        torch._assert_async(within, "a bag holds more than one id but CowClip was attached with single_id_bags=True")
    elif not within:
        raise ValueError("a bag holds more than one id; attach CowClip with single_id_bags=False")
    if backward.id_weights is not None:
        raise ValueError("the lookup has ids' weights or mean pooling; attach CowClip with single_id_bags=False")


def _with_weights_of_means(inputs: Inputs) -> Inputs:
    """Adds the ids' weights 1/length, whose sum is a mean, to the inputs of a lookup."""
    if inputs.get("per_sample_weights") is not None:
        raise ValueError("FBGEMM treats weighted ids with mean pooling differently on CPU and CUDA; use sum pooling")
    indices, offsets = inputs["indices"], inputs["offsets"]
    lengths = (offsets[1:] - offsets[:-1]).long()
    weights = torch.repeat_interleave(1.0 / lengths.float(), lengths, output_size=indices.numel())
    return {**inputs, "per_sample_weights": weights}


def _scalable_weights(given: Tensor | None, indices: Tensor) -> Tensor:
    """The ids' weights, or ones, in memory of their own, which the clip may change."""
    return torch.ones(indices.numel(), device=indices.device) if given is None else given.float().clone()
