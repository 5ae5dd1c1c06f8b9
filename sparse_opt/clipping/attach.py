"""CowClip for the stock fused optimizers of any TorchRec model: ``attach_cowclip(model, CowClip(r=1.0, zeta=1e-5))``.

FBGEMM updates a table inside the backward of its lookup, so the clip has to act on what that backward reads. A hook on
the lookup's output computes each row's gradient from the output gradient and the ids, and from it the row's clip
factor; then every id's share of the gradient is scaled by its row's factor, through the ids' weights. Where bags hold
one id at most, the row's gradient itself, with its L2, is put into the output gradient instead. Either way the fused
update sees exactly the clipped row gradient. After input-dist a row-wise or table-wise shard has the global batch's ids
of its rows, so counts are global.
"""

from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from math import inf
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from cowrec.sparse_opt.algorithm.clip import ClipRule
from cowrec.sparse_opt.tbe.column_shards import groups_of_columns
from cowrec.sparse_opt.tbe.lookup import (
    TbeLookup,
    all_table_names,
    column_split_tables,
    contrary_lookups,
    find_lookups,
    lookups_of_ranks,
    partly_spread_tables,
    replicated_tables,
)

from .clipped_lookup import Backward, LookupRows, TableStats
from .single_id_bags import clipped_output_grad

_ATTACHED: WeakSet[nn.Module] = WeakSet()
"""Lookups that have hooks of ours: two on one lookup would clip twice."""


class LookupsHandle:
    """What an attachment returns: statistics of the clipped tables, and the way back.

    ``remove()`` gives the model its own lookups again; weights stay as they are.
    """

    def __init__(self, rows: Sequence[LookupRows], hooks: Sequence[RemovableHandle], mean_pooled: Sequence[TbeLookup]):
        self._rows = list(rows)
        self._hooks = list(hooks)
        self._mean_pooled = list(mean_pooled)

    def stats(self) -> dict[str, TableStats]:
        """Statistics per table, over the rows that this process holds. Waits for the device."""
        return {name: stats for rows in self._rows for name, stats in rows.stats().items()}

    def remove(self) -> None:
        """Detaches from the model. Calling it again does nothing."""
        if not self._hooks:
            return
        for hook in self._hooks:
            hook.remove()
        for lookup in self._mean_pooled:
            lookup.pool_by_mean()
        for row in self._rows:
            _ATTACHED.discard(row.lookup.module)
        self._hooks, self._mean_pooled = [], []


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

    The loss must be the mean over the global batch (TorchRec's gradient division, on by default, does its part). One
    attachment serves forward passes until ``handle.remove()``; evaluation is not affected.

    Rules for tables or for all of them take the norm over the rows of the batch. Several processes then add their norms
    up in each backward pass, so all must train on every step.

    Args:
        model: any module that holds EmbeddingBagCollections sharded row-, column- or table-wise under fused optimizers
            (SGD, Adagrad, row-wise Adagrad, and on CUDA all of FBGEMM's), usually a DistributedModelParallel.
        rule: one of :data:`CLIP_RULES` or another :class:`ClipRule`.
        exclude: names of tables to leave unclipped.
        clip_columns: leading columns that are measured and clipped, for all tables or by name; the others pass. Needs
            ``single_id_bags`` because ids' weights scale a whole row.
        single_id_bags: a promise that no bag holds more than one id and that lookups have no ids' weights; saves the
            weights. Checked at every step.
        l2: coefficient of ``l2 * sum(w^2)`` in the loss, over the rows of the batch alone: ``2 * l2 * w`` joins their
            gradient before the clip, in all columns and in excluded tables too. Rows without an id in the batch stay as
            they are, which is not what the paper trained with. Needs ``single_id_bags``.

    Returns:
        A handle with ``stats()`` and ``remove()``.

    Raises:
        ValueError: no table at all, a table that cannot be clipped, an unknown name, an attachment already there,
            tables whose norms cannot be added up as the rule wants; and at a training step: more than one id in a bag
            despite ``single_id_bags``, or an id outside its table.
    """
    if not 0 <= l2 < inf:
        raise ValueError(f"l2 must be >= 0 and finite, got {l2}")
    if l2 > 0 and not single_id_bags:
        raise ValueError(
            f"l2 = {l2} under a stock fused optimizer needs single_id_bags=True (the ids of a bag share one output"
            " gradient, and each row's L2 is its own); for other bags use cowrec's EmbeddingAdam, or l2 = 0"
        )
    if clip_columns is not None and not single_id_bags:
        raise ValueError(
            "clip_columns under a stock fused optimizer needs single_id_bags=True (a bag of several ids can only be"
            " scaled by whole rows); for other bags use cowrec's EmbeddingAdam, or clip all columns"
        )
    rows = rows_to_clip(model, rule, exclude, clip_columns, optional=() if l2 > 0 else exclude)

    def on_output(row: LookupRows, inputs: Mapping[str, Any], output: Tensor) -> Tensor:
        output.register_hook(lambda grad: _on_output_grad(row, inputs, grad, single_id_bags, l2))
        return output

    return hook_lookups(rows, on_output, needs_id_weights=not single_id_bags)


def hook_lookups(
    rows: Sequence[LookupRows],
    on_output: Callable[[LookupRows, Mapping[str, Any], Tensor], Tensor],
    *,
    needs_id_weights: bool,
) -> LookupsHandle:
    """Installs ``on_output(rows, lookup inputs, lookup output) -> output`` on lookups, for forwards that train.

    Mean pooling becomes a sum weighted with 1/length, the same on every back end of FBGEMM.
    """
    if any(row.lookup.module in _ATTACHED for row in rows):
        raise ValueError("this model's tables are attached already; call remove() of the earlier handle first")
    hooks, mean_pooled = [], []
    for row in rows:
        tbe, is_mean = row.lookup.module, row.lookup.is_mean_pooled

        def before(_: nn.Module, args: tuple, kwargs: dict, is_mean: bool = is_mean) -> tuple[tuple, dict]:
            return args, _with_id_weights(kwargs, is_mean=is_mean, always=needs_id_weights)

        def after(_: nn.Module, args: tuple, kwargs: dict, output: Tensor, row: LookupRows = row) -> Tensor:
            return on_output(row, kwargs, output) if output.requires_grad else output

        if is_mean:
            row.lookup.pool_by_weighted_sum()
            mean_pooled.append(row.lookup)
        hooks.append(tbe.register_forward_pre_hook(before, with_kwargs=True))
        hooks.append(tbe.register_forward_hook(after, with_kwargs=True))
        _ATTACHED.add(tbe)
    return LookupsHandle(rows, hooks, mean_pooled)


def rows_to_clip(
    model: nn.Module,
    rule: ClipRule,
    exclude: Sequence[str],
    clip_columns: int | Mapping[str, int] | None,
    *,
    optional: Sequence[str] = (),
    replicated: bool = False,
) -> list[LookupRows]:
    """The model's lookups under a rule; ValueError for tables out of reach, unknown names and models without tables.

    Tables named in ``optional`` may be out of reach, and without ``replicated`` data-parallel ones are.
    """
    known = all_table_names(model)
    if not known:
        raise ValueError(
            f"{type(model).__name__} holds no TorchRec embedding tables; pass the DistributedModelParallel of a model"
            " with EmbeddingBagCollections"
        )
    columns = dict.fromkeys(known, clip_columns) if isinstance(clip_columns, int) else dict(clip_columns or {})
    _refuse_unknown("exclude", exclude, known)
    _refuse_unknown("clip_columns", list(columns), known)
    lookups, refusals = find_lookups(model, replicated=replicated)
    for refusal in refusals:
        if refusal.table not in optional:
            remedy = "to leave it unclipped name it in exclude"
            if refusal.table in exclude:
                remedy = "exclude leaves it unclipped, but L2 or the optimizer still has to reach it"
            raise ValueError(f"table {refusal.table!r} cannot be clipped: {refusal.reason}; {remedy}")
    _refuse_norms_out_of_reach(model, rule, exclude)
    groups = groups_of_columns(column_split_tables(model)) if rule.scope == "row" else {}
    return [LookupRows(lookup, rule, columns, exclude, groups) for lookup in lookups]


def check_lookup_inputs(inputs: Mapping[str, Any]) -> None:
    """Refuses the lookups whose ids cannot be told apart by the hook."""
    if inputs.get("batch_size_per_feature_per_rank") is not None:
        raise ValueError(
            "variable batch size per feature cannot be clipped yet; give every feature the same batch size"
        )


def _refuse_norms_out_of_reach(model: nn.Module, rule: ClipRule, exclude: Sequence[str]) -> None:
    """Refuses rules whose norms a lookup's backward cannot know; on all ranks alike, so that none waits for another."""
    for table in sorted(column_split_tables(model).keys() - set(exclude)) if rule.scope == "field" else ():
        raise ValueError(
            f"clip.rule = {rule.name!r} needs the norm of the whole table {table!r}, which is sharded column-wise;"
            " shard it row- or table-wise, or name it in exclude"
        )
    if rule.scope == "row" and (contrary := contrary_lookups(model)):
        raise ValueError(
            f"tables {contrary[0]!r} and {contrary[1]!r} are sharded column-wise and looked up apart, on some ranks in"
            " another order than on others, so that ranks would wait for each other's norms forever; give them the same"
            " pooling and data type, or the same ranks"
        )
    for table in sorted(partly_spread_tables(model) - set(exclude)) if rule.scope == "field" else ():
        raise ValueError(
            f"clip.rule = {rule.name!r} needs the norm of the whole table {table!r}, whose rows lie on some ranks but"
            " not on all; shard it row- or table-wise, or name it in exclude"
        )
    for table in sorted(replicated_tables(model) - set(exclude)) if rule.scope == "global" else ():
        raise ValueError(
            f"clip.rule = {rule.name!r} needs the norm over all tables, but {table!r} is data-parallel and looked up"
            ' apart; shard it as the others, name it in exclude, or set clip.rule = "field"'
        )
    for rank, lookups in enumerate(lookups_of_ranks(model)) if rule.scope == "global" else ():
        if len(lookups) > 1:
            raise ValueError(
                f"clip.rule = {rule.name!r} needs the norm over all tables before the first is updated, but rank {rank}"
                f" looks up {lookups[0][0]!r} and {lookups[1][0]!r} apart; give all tables one collection, sharding,"
                ' pooling and data type, or set clip.rule = "field"'
            )
        if not lookups:
            raise ValueError(
                f"clip.rule = {rule.name!r} adds up the norms of all ranks, but rank {rank} holds no table and takes no"
                ' part in the backward pass; shard row-wise, train in fewer processes, or set clip.rule = "field"'
            )


def _on_output_grad(
    rows: LookupRows, inputs: Mapping[str, Any], grad: Tensor, single_id_bags: bool, l2: float
) -> Tensor:
    check_lookup_inputs(inputs)
    backward = Backward(inputs["indices"], inputs["offsets"], inputs.get("per_sample_weights"), grad)
    if single_id_bags:
        _require_single_ids(backward)
        return clipped_output_grad(rows, backward, l2)
    # FBGEMM saved this tensor for its backward, which reads it after this hook: scaling the data scales the update.
    inputs["per_sample_weights"].data.mul_(rows.id_factors(backward))
    return grad


def _require_single_ids(backward: Backward) -> None:
    within = (backward.offsets[1:] - backward.offsets[:-1] <= 1).all()
    if within.is_cuda:
        torch._assert_async(within, "a bag holds more than one id but attach_cowclip was told single_id_bags=True")
    elif not within:
        raise ValueError("a bag holds more than one id; attach CowClip with single_id_bags=False")
    if backward.id_weights is not None:
        raise ValueError("the lookup has ids' weights or mean pooling; attach CowClip with single_id_bags=False")


def _with_id_weights(kwargs: dict, *, is_mean: bool, always: bool) -> dict:
    """The lookup's inputs with weights that a hook may scale: the caller's, 1/length for a mean, or ones."""
    given, indices, offsets = kwargs.get("per_sample_weights"), kwargs["indices"], kwargs["offsets"]
    if given is not None and is_mean:
        raise ValueError("weighted ids with mean pooling mean different things on CPU and CUDA; use sum pooling")
    if is_mean:
        lengths = (offsets[1:] - offsets[:-1]).long()
        weights = torch.repeat_interleave(1.0 / lengths.float(), lengths, output_size=indices.numel())
    elif given is not None:
        weights = given.float().clone()
    elif always:
        weights = torch.ones(indices.numel(), device=indices.device)
    else:
        return kwargs
    return {**kwargs, "per_sample_weights": weights}


def _refuse_unknown(argument: str, names: Sequence[str], known: set[str]) -> None:
    for name in names:
        if name not in known:
            nearest = get_close_matches(name, known, n=1, cutoff=0.5)
            hint = f"; did you mean {nearest[0]!r}?" if nearest else f"; known: {', '.join(sorted(known))}"
            raise ValueError(f"{argument} names table {name!r}, which the model does not have{hint}")
