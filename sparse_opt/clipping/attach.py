"""CowClip for the stock fused optimizers of any TorchRec model: ``attach_cowclip(model, CowClip(r=1.0, zeta=1e-5))``.

FBGEMM updates a table inside the backward of its lookup, so the clip has to change what that backward reads. An
autograd function on the lookup's output computes each row's gradient from the output gradient and the ids, and from it
the row's clip factor; it then scales every id's share of the gradient by the factor of its row, through the ids'
weights. Where bags hold at most one id, it writes the row's clipped gradient, L2 included, into the output gradient
instead. Either way the fused update sees exactly the clipped row gradient. After input-dist a row-wise or table-wise
shard has the global batch's ids of its rows, so counts are global.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import inf
from threading import get_ident
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp import GradScaler

from cowrec.errors import UserError

from ..algorithm.clip import ClipRule
from ..kernels.layout import LookupBackward, LookupBags
from ..tbe.discovery import called_modules, raised_on_all_ranks
from .clipped_lookup import ClippedLookup
from .handle import (
    Forward,
    Inputs,
    LookupsHandle,
    LossScale,
    Run,
    in_same_memory,
    require_unattached,
    run_in_backward,
    wrap_lookups,
)
from .requirements import clipped_lookups
from .table_rules import table_rules
from .update_check import StepCheck, UpdateCheck


def attach_cowclip(
    model: nn.Module,
    rule: ClipRule | Mapping[str, ClipRule],
    *,
    exclude: Sequence[str] = (),
    clip_columns: int | Mapping[str, int] | None = None,
    single_id_bags: bool = False,
    l2: float = 0.0,
    grad_scaler: GradScaler | None = None,
    verify: int = 1,
) -> LookupsHandle:
    """Clips the row gradients of every table of a model before its fused optimizer applies them.

    The loss must be the mean over the global batch (with TorchRec's gradient division, which is on by default). The
    attachment lasts until ``handle.remove()``; evaluation is not affected.

    Rules for tables or for all of them take the norm over the rows of the batch; all processes then take every step.

    Args:
        model: any module that holds sharded EmbeddingBagCollections or EmbeddingCollections under fused optimizers
            (SGD, Adagrad, row-wise Adagrad, and on CUDA all of FBGEMM's), usually a DistributedModelParallel.
            Data-parallel tables get their clipped gradient, the same on all ranks, for a dense optimizer to apply.
        rule: one of :data:`CLIP_RULES` or another :class:`ClipRule`; or a mapping of table names to rules, all for rows
            or all for tables, with the rule of the tables that it does not name as ``"*"``.
        exclude: names of tables to leave unclipped.
        clip_columns: leading columns that are measured and clipped, for all tables or by name. Pooled fused tables need
            ``single_id_bags`` because ids' weights scale all columns of a row.
        single_id_bags: whether every bag holds at most one id and no lookup has ids' weights; saves the weights.
            Checked in every step.
        l2: coefficient of ``l2 * sum(w^2)`` in the loss, over the rows of the batch alone: ``2 * l2 * w`` is added to
            their gradient before the clip, in all columns and in excluded tables too. Pooled fused tables need
            ``single_id_bags``.
        grad_scaler: of the loss, if one scales it: gradients are divided by its scale before they are measured and
            applied. A lookup whose output gradient is not finite applies a gradient of zeros.
        verify: how many steps to check that clip rows, of the first hundred of each lookup, and the first step besides.
            After FBGEMM's update, a few rows must have moved as their limits allow, by a plain computation from ids and
            output gradient. Under SGD, Adagrad, row-wise Adagrad and Adam; later steps cost nothing. 0 for no check.

    Returns:
        A handle with ``stats()`` and ``remove()``.

    Raises:
        ValueError: the model has no table, a table cannot be clipped, a name is unknown, the model is attached already,
            or the rule does not fit the sharding plan; and in a step, ``single_id_bags`` is wrong.
        RuntimeError: in a backward pass, a checked row has taken another update than the clip allows.
    """
    if not 0 <= l2 < inf:
        raise UserError(f"l2 must be >= 0 and finite, got {l2}")
    if verify < 0:
        raise UserError(f"verify must be a number of steps, at least 0, got {verify}")
    loss_scale, rules = LossScale(grad_scaler), table_rules(model, rule, exclude)
    lookups = clipped_lookups(model, rules, clip_columns, skips_unclipped=l2 == 0, is_scaled=loss_scale.is_used)
    with raised_on_all_ranks(model):
        if not single_id_bags:
            _require_single_id_bags(lookups, clip_columns is not None, l2)
        _require_float32_outputs(lookups, single_id_bags, l2, grad_scaler)
    called = called_modules(model)
    require_unattached(called)
    for each in (each for each in lookups if not each.lookup.has_dense_gradient):
        if single_id_bags or each.lookup.is_sequence:
            each.compile(lambda rows, nothing: rows.clipped_output_grad(nothing, l2))
        else:
            each.compile(lambda rows, nothing: rows.id_factors(nothing))
    checks = {each: UpdateCheck(each, verify) for each in lookups}
    settings = _Settings(single_id_bags, l2, loss_scale, checks)
    return wrap_lookups(called, lookups, partial(_look_up, settings))


@dataclass(frozen=True)
class _Settings:
    """Arguments of :func:`attach_cowclip` that steps need, and the checks of the lookups."""

    single_id_bags: bool
    l2: float
    loss_scale: LossScale
    checks: Mapping[ClippedLookup, UpdateCheck]


def _require_single_id_bags(lookups: Sequence[ClippedLookup], clips_columns: bool, l2: float) -> None:
    """Raises ValueError for what bags of several ids cannot be given."""
    if not any(each.lookup.shares_output_grads for each in lookups):
        return
    if l2 > 0:
        raise UserError(
            f"l2 = {l2} under a stock fused optimizer needs single_id_bags=True (the ids of a bag share one output"
            " gradient, which cannot hold the L2 of several rows); for other bags use cowrec's EmbeddingAdam, or l2 = 0"
        )
    if clips_columns:
        raise UserError(
            "clip_columns under a stock fused optimizer needs single_id_bags=True (a bag of several ids can only be"
            " scaled by complete rows); for other bags use cowrec's EmbeddingAdam, or clip all columns"
        )


def _require_float32_outputs(
    lookups: Sequence[ClippedLookup], single_id_bags: bool, l2: float, scaler: GradScaler | None
) -> None:
    """Raises ValueError where small numbers would be written into an output gradient in half precision."""
    is_scaled = scaler is not None and scaler.is_enabled()
    for lookup in (each.lookup for each in lookups if each.lookup.output_is_half):
        if l2 > 0 or (is_scaled and (single_id_bags or lookup.is_sequence)):
            small, other = ("a small L2", "l2 = 0, ") if l2 > 0 else ("that of the unscaled loss", "")
            raise UserError(
                f"table {lookup.shards[0].name!r} has outputs in half precision, whose gradient cannot hold {small};"
                f" set output_dtype to float32, {other}or use cowrec's EmbeddingAdam"
            )


def _look_up(settings: _Settings, clipped: ClippedLookup, forward: Forward, inputs: Inputs) -> Tensor:
    """Forward of a lookup under the clip."""
    single_id_bags, loss_scale = settings.single_id_bags, settings.loss_scale
    given, bags = inputs.get("per_sample_weights"), clipped.bags.of(inputs)
    run: Run | None = None
    if clipped.lookup.has_dense_gradient:
        if single_id_bags:
            _require_single_ids(bags, given)
        run, parameter = partial(clipped.in_torch.dense_gradient, l2=settings.l2), clipped.lookup.parameter
    elif clipped.accumulation.passes > 1:
        if clipped.lookup.output_is_half and loss_scale.is_used:
            raise UserError(
                f"table {clipped.lookup.shards[0].name!r} has outputs in half precision, whose gradient cannot hold"
                " that of an unscaled loss over several passes; set output_dtype to float32, or accumulate(1)"
            )
        run, parameter = partial(_fused_step, settings, clipped, forward), None
    if run:
        output = clipped.lookup.look_up_uncounted(forward, inputs)
        return run_in_backward(output, clipped, bags, given, loss_scale, run, parameter=parameter)
    single_id_bags = single_id_bags or clipped.lookup.is_sequence
    weights = None if single_id_bags else _scalable_weights(given, bags.indices)
    features = len(clipped.lookup.feature_table)
    # Hooks on saved tensors, as those that offload activations, would give FBGEMM's backward and the clip's copies.
    with torch.autograd.graph.saved_tensors_hooks(_with_version, _of_version):
        output = forward(**inputs if weights is None else {**inputs, **_weighted(weights, features)})
        if not output.requires_grad:
            return output
        ids, check = (bags.indices, bags.offsets, given, weights), settings.checks[clipped].of_forward(output)
        clipping: Tensor = _ClipInBackward.apply(output, *ids, bags, clipped, settings, check)
    return clipping


def _weighted(weights: Tensor, features: int) -> dict[str, Tensor]:
    """Arguments for a lookup with ids' weights."""
    weighted = {"per_sample_weights": weights}
    if not (weights.is_cuda or weights.requires_grad):
        # FBGEMM computes the weights' gradient whether it is needed or not, unless told so by feature.
        weighted["feature_requires_grad"] = torch.zeros(features, dtype=torch.int32)
    return weighted


def _with_version(saved: Tensor) -> tuple[Tensor, int]:
    return saved, saved._version


def _of_version(packed: tuple[Tensor, int]) -> Tensor:
    """Checks what autograd checks of tensors that it saves itself."""
    saved, version = packed
    if saved._version != version:
        raise RuntimeError("ids or their weights were modified by an inplace operation between forward and backward")
    return saved


def _fused_step(settings: _Settings, clipped: ClippedLookup, forward: Forward, backward: LookupBackward) -> None:
    """Looks up all ids of a step again, and takes the step in the backward of that."""
    bags, own = backward.bags, clipped.accumulation
    inputs = {"indices": bags.indices, "offsets": bags.blocks.first_bag if clipped.lookup.is_sequence else bags.offsets}
    if backward.id_weights is not None:
        inputs["per_sample_weights"] = backward.id_weights
    passes, own.passes, latest, thread = own.passes, 1, clipped.latest_backward, clipped.forward_thread
    try:
        with torch.enable_grad():
            unscaled = replace(settings, loss_scale=LossScale(GradScaler(enabled=False)))
            output = _look_up(unscaled, clipped, forward, inputs)
        output.backward(backward.output_grad.to(output.dtype))
    finally:
        own.passes = passes
        clipped.latest_backward, clipped.forward_thread = latest, thread  # not those of the pass within this one


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
        bags: LookupBags,
        clipped: ClippedLookup,
        settings: _Settings,
        check: StepCheck | None,
    ) -> Tensor:
        ctx.save_for_backward(indices, offsets, given, weights)
        ctx.blocks, ctx.size, ctx.thread = bags.blocks, bags.size, get_ident()
        ctx.clipped, ctx.settings, ctx.check = clipped, settings, check
        return in_same_memory(ctx, output)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        indices, offsets, given, weights = ctx.saved_tensors
        bags = LookupBags(indices, offsets, ctx.blocks, ctx.size)
        if ctx.clipped.accumulation.passes > 1:
            raise RuntimeError(
                "accumulate(n) was called between a forward pass and its backward pass, which would take a step of its"
                " own; call it before the first forward pass of a step"
            )
        ctx.clipped.check_backward(ctx)
        settings, factors = ctx.settings, None
        unscaled = settings.loss_scale.unscaled(ctx.clipped, LookupBackward(bags, given, grads[0]))
        backward, grad = unscaled.backward, unscaled.scaled_grad
        if weights is None:  # bags of one id
            _require_single_ids(bags, given)
            grad = ctx.clipped.rows.clipped_output_grad(backward, settings.l2)
            if unscaled.finite is not None:
                grad.mul_(unscaled.finite)  # of L2
        else:
            # Scaling the ids' weights scales the update. They are written anew in every backward of a forward.
            factors = ctx.clipped.rows.id_factors(backward)
            if unscaled.factor is not None:
                factors *= unscaled.factor  # not the gradient, which may be in half precision
            weights.data.copy_(factors if given is None else given * factors)
        if ctx.check and (unscaled.finite is None or unscaled.finite):
            ctx.check.expect(backward, settings.l2, factors)
        of_given = None
        if unscaled.finite is not None and ctx.needs_input_grad[3]:  # FBGEMM's is finite, and hides the overflow
            of_given = given.new_tensor(torch.nan).where(~unscaled.finite, 0).expand_as(given)
        return grad, None, None, of_given, *(None,) * 5


def _require_single_ids(bags: LookupBags, id_weights: Tensor | None) -> None:
    within = (bags.offsets[1:] - bags.offsets[:-1] <= 1).all()
    if within.is_cuda:
        torch._assert_async(within, "a bag holds more than one id but CowClip was attached with single_id_bags=True")
    elif not within:
        raise UserError("a bag holds more than one id; attach CowClip with single_id_bags=False")
    if id_weights is not None:
        raise UserError("the lookup has ids' weights or mean pooling; attach CowClip with single_id_bags=False")


def _scalable_weights(given: Tensor | None, indices: Tensor) -> Tensor:
    """The ids' weights, or ones, in memory of their own, which the clip may change."""
    if given is None:
        return torch.ones(indices.numel(), dtype=torch.float32, device=indices.device)
    return given.float().clone()
