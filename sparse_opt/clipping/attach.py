"""CowClip for the stock fused optimizers of any TorchRec model: ``attach_cowclip(model, CowClip(r=1.0, zeta=1e-5))``.

FBGEMM updates a table inside the backward of its lookup, so the clip has to change what that backward reads. An
autograd function on the lookup's output computes each row's gradient and clip factor from the output gradient and the
ids. The function then multiplies the ids' weights by the factors of their rows, which scales the update. Where bags
hold at most one id, it writes the row's clipped gradient, L2 included, into the output gradient instead. After
TorchRec's exchange, a row-wise or table-wise shard has all ids of the global batch for its rows, so counts are global.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import inf

import torch
from torch import Tensor, nn
from torch.amp import GradScaler

from cowrec.errors import UserError

from ..algorithm.clip import ClipRule
from ..kernels.layout import LookupBackward
from ..lookups.backward import (
    Forward,
    LossScale,
    ReplacedUpdate,
    RescaledGradients,
    look_up_replaced,
    look_up_rescaled,
    require_single_ids,
)
from ..lookups.handle import LookupsHandle, require_unattached
from ..lookups.requirements import lookups_under_rules
from ..lookups.row_backends import Inputs
from ..lookups.rules import table_rules
from ..lookups.wrapped_lookup import WrappedLookup
from ..tbe.inventory import ModelInventory
from .update_check import UpdateCheck


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

    The loss must be the mean over the global batch. TorchRec's gradient division, which is on by default, is part of
    that mean. The attachment lasts until ``handle.remove()`` and does not affect evaluation. A rule for a table or for
    all tables takes the norm over the rows of the batch, and all processes must then take every step.

    Args:
        model: module with sharded EmbeddingBagCollections or EmbeddingCollections under fused optimizers (SGD, Adagrad,
            row-wise Adagrad, and on CUDA all of FBGEMM's), usually a DistributedModelParallel. Data-parallel tables get
            a clipped gradient, the same on all ranks, for a dense optimizer.
        rule: clip rule, from :data:`CLIP_RULES` or another :class:`ClipRule`; or a mapping of table names to rules, all
            for rows or all for tables, where ``"*"`` stands for all other tables.
        exclude: names of tables to leave unclipped.
        clip_columns: number of leading columns that are measured and clipped, for all tables or by name. Pooled fused
            tables need ``single_id_bags``, because ids' weights scale all columns of a row.
        single_id_bags: whether every bag holds at most one id and no lookup has ids' weights. This saves the memory of
            the weights, and is checked in every step.
        l2: coefficient of ``l2 * sum(w^2)`` in the loss, over the rows of the batch alone: ``2 * l2 * w`` is added to
            the gradient before the clip, in all columns and in excluded tables too. Pooled fused tables need
            ``single_id_bags``.
        grad_scaler: scaler of the loss, if there is one. Gradients are divided by its scale before they are measured
            and applied. A lookup whose output gradient is not finite applies a gradient of zeros.
        verify: number of steps to verify, beside the first step: steps with clipped rows, among the first hundred of a
            lookup. Under SGD, Adagrad, row-wise Adagrad and Adam, the update of some rows is compared with a plain
            computation from ids and output gradient.

    Raises:
        ValueError: the model has no table, a table cannot be clipped, a name is unknown, the model is attached already,
            or the rule does not fit the sharding plan; or in a step, ``single_id_bags`` is wrong.
        RuntimeError: in a backward pass, a verified row has taken another update than the clip allows.
    """
    if not 0 <= l2 < inf:
        raise UserError(f"l2 must be >= 0 and finite, got {l2}")
    inventory, loss_scale = ModelInventory(model), LossScale(grad_scaler)
    rules = table_rules(inventory, rule, exclude)
    lookups = lookups_under_rules(inventory, rules, clip_columns, skips_unclipped=l2 == 0, is_scaled=loss_scale.is_used)
    with inventory.raised_on_all_ranks():
        if not single_id_bags:
            _require_single_id_bags(lookups, clip_columns is not None, l2)
        _require_float32_outputs(lookups, single_id_bags, l2, loss_scale)
    require_unattached(inventory)
    for wrapped in lookups:
        if wrapped.lookup.shares_output_grads and not single_id_bags:
            wrapped.compile(lambda rows, nothing: rows.id_factors(nothing))
        elif not wrapped.lookup.has_dense_gradient:
            wrapped.compile(lambda rows, nothing: rows.clipped_output_grad(nothing, l2))
    look_up = {}
    for wrapped in lookups:
        strategy = RescaledGradients(single_id_bags, l2, UpdateCheck(wrapped, verify).of_forward)
        look_up[wrapped] = _Clip(wrapped, strategy, loss_scale).look_up
    return LookupsHandle(inventory, lookups, look_up)


def _require_single_id_bags(lookups: Sequence[WrappedLookup], clips_columns: bool, l2: float) -> None:
    if not any(wrapped.lookup.shares_output_grads for wrapped in lookups):
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
    lookups: Sequence[WrappedLookup], single_id_bags: bool, l2: float, loss_scale: LossScale
) -> None:
    for lookup in (wrapped.lookup for wrapped in lookups if wrapped.lookup.output_is_half):
        if l2 > 0 or (loss_scale.is_used and (single_id_bags or lookup.is_sequence)):
            small, other = ("a small L2", "l2 = 0, ") if l2 > 0 else ("that of the unscaled loss", "")
            raise UserError(
                f"table {lookup.shards[0].name!r} has outputs in half precision, whose gradient cannot hold {small};"
                f" set output_dtype to float32, {other}or use cowrec's EmbeddingAdam"
            )


@dataclass(frozen=True)
class _Clip:
    """The clip of a lookup."""

    wrapped: WrappedLookup
    rescaled: RescaledGradients
    loss_scale: LossScale

    def look_up(self, forward: Forward, inputs: Inputs) -> Tensor:
        wrapped, lookup, bags = self.wrapped, self.wrapped.lookup, self.wrapped.bags.of(inputs)
        if lookup.has_dense_gradient:
            if self.rescaled.single_id_bags:
                require_single_ids(bags, inputs.get("per_sample_weights"))
            strategy = ReplacedUpdate(partial(wrapped.in_torch.dense_gradient, l2=self.rescaled.l2), lookup.parameter)
        elif wrapped.accumulation.passes > 1:
            if lookup.output_is_half and self.loss_scale.is_used:
                raise UserError(
                    f"table {lookup.shards[0].name!r} has outputs in half precision, whose gradient cannot hold that of"
                    " an unscaled loss over several passes; set output_dtype to float32, or accumulate(1)"
                )
            strategy = ReplacedUpdate(partial(self._take_accumulated_step, forward))
        else:
            return look_up_rescaled(forward, wrapped, bags, inputs, self.rescaled, self.loss_scale)
        output = lookup.look_up_uncounted(forward, inputs)
        return look_up_replaced(output, wrapped, bags, inputs, strategy, self.loss_scale)

    def _take_accumulated_step(self, forward: Forward, backward: LookupBackward) -> None:
        """Looks up all ids of a step once more, and takes the step in the backward of that lookup."""
        bags = backward.bags
        offsets = bags.blocks.first_bag if self.wrapped.lookup.is_sequence else bags.offsets
        inputs = {"indices": bags.indices, "offsets": offsets}
        if backward.id_weights is not None:
            inputs["per_sample_weights"] = backward.id_weights
        with torch.enable_grad():
            output = look_up_rescaled(forward, self.wrapped, bags, inputs, self.rescaled, None)
        output.backward(backward.output_grad.to(output.dtype))
