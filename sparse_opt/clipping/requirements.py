"""Lookups of a model under a clip rule, with checks that the rule can be applied to them."""

from collections.abc import Mapping, Sequence

import torch.distributed as dist
from torch import nn

from cowrec.errors import UserError

from ..tbe.column_shards import groups_of_columns
from ..tbe.discovery import (
    all_table_names,
    column_split_tables,
    find_lookups,
    inconsistent_lookups,
    lookups_of_ranks,
    raised_on_all_ranks,
    replicated_tables,
    sharded_collections,
    table_names,
    tables_in_replica_groups,
    tables_on_some_ranks,
)
from ..tbe.lookup import ShardedCollection, TbeLookup, process_group_of
from .clipped_lookup import ClippedLookup
from .table_rules import TableRules, named_tables


def clipped_lookups(
    model: nn.Module,
    rules: TableRules,
    clip_columns: int | Mapping[str, int] | None,
    *,
    skips_unclipped: bool = False,
    is_scaled: bool = False,
) -> list[ClippedLookup]:
    """Puts the lookups of a model under clip rules.

    Args:
        model, clip_columns: as in :func:`attach_cowclip`.
        rules: rules of the model's tables.
        skips_unclipped: whether tables without a limit are skipped if they cannot be clipped.
        is_scaled: whether a GradScaler scales the loss, so that column shards agree on whether their row moves.

    Raises:
        ValueError: an unknown name, a table that cannot be clipped, or a rule that does not fit the sharding plan.
    """
    known = all_table_names(model)
    given = dict.fromkeys(known, clip_columns) if isinstance(clip_columns, int) else dict(clip_columns or {})
    columns = {table: given[name] for table, name in named_tables(model, "clip_columns", given).items()}
    unclipped = rules.unclipped(known)
    for table in sorted(tables_in_replica_groups(model)):
        raise UserError(
            f"table {table!r} is under 2D parallelism (DMPCollection), whose groups of ranks would each count the ids"
            " of their own share of the batch, and average rows that have taken different steps; use"
            " DistributedModelParallel over all ranks"
        )
    skipped = unclipped if skips_unclipped else set()
    if is_scaled:  # whose fused update would otherwise apply the gradient of the scaled loss
        sharded = [names.values() for module, names in table_names(model) if isinstance(module, ShardedCollection)]
        skipped = skipped.difference(*sharded)
    with raised_on_all_ranks(model):
        lookups = _clippable_lookups(model, skipped, unclipped)
    _require_norms(model, rules, unclipped)
    split = column_split_tables(model) if rules.scope == "row" or is_scaled else {}
    _require_partners(model, split)
    groups = groups_of_columns(split)
    with raised_on_all_ranks(model):
        return [ClippedLookup(lookup, rules, columns, groups) for lookup in lookups]


def _require_partners(model: nn.Module, split: Mapping[str, Sequence[Sequence[int]]]) -> None:
    """Raises ValueError, on all ranks alike, for column shards that would wait for each other forever.

    Lookups must run in the same order on all ranks, and in all processes, which make the shards' groups.
    """
    if split and (pair := inconsistent_lookups(model)):
        raise UserError(
            f"tables {pair[0]!r} and {pair[1]!r} are sharded column-wise and looked up separately, perhaps on some"
            " ranks in another order than on others, so that ranks would wait for each other forever; give them the"
            " same pooling, data type, kind of sharding and fused_params, or make each a collection of its own"
        )
    sizes = {process_group_of(each).size() for each in sharded_collections(model).values()}
    several = sorted(table for table, parts in split.items() if any(len(set(ranks)) > 1 for ranks in parts))
    for table in several if any(size < dist.get_world_size() for size in sizes) else ():
        raise UserError(
            f"table {table!r} is sharded column-wise over {min(sizes)} of {dist.get_world_size()} processes, which"
            " would wait for the others; shard it row- or table-wise, or the model over all of them"
        )


def _clippable_lookups(model: nn.Module, skipped: set[str], unclipped: set[str]) -> list[TbeLookup]:
    """Lookups of this rank. Raises ValueError for a table that cannot be clipped and is not skipped."""
    lookups, refusals = find_lookups(model)
    for table, reason in refusals.items():
        if table not in skipped:
            remedy = "to leave it unclipped name it in exclude"
            if table in unclipped:
                remedy = "exclude leaves it unclipped, but it still needs L2, the loss' scale or the optimizer"
            raise UserError(f"table {table!r} cannot be clipped: {reason}; {remedy}")
    for lookup in lookups:
        if lookup.max_gradient is not None:
            raise UserError(
                f"table {lookup.shards[0].name!r} is under FBGEMM's gradient_clipping, which clamps the output"
                f" gradient to {lookup.max_gradient:g} after the clip has measured it; leave gradient_clipping out of"
                " fused_params"
            )
    return lookups


def _require_norms(model: nn.Module, rule: TableRules, unclipped: set[str]) -> None:
    """Raises ValueError, on all ranks alike, for a rule whose norms a lookup's backward cannot compute."""
    parts = dict.fromkeys(tables_on_some_ranks(model), "whose rows are on some ranks but not on all")
    parts |= dict.fromkeys(column_split_tables(model), "which is sharded column-wise")
    for table in sorted(parts.keys() - unclipped) if rule.scope == "field" else ():
        raise UserError(
            f"clip.rule = {rule.name!r} needs the norm of the complete table {table!r}, {parts[table]}; shard it row-"
            " or table-wise, or name it in exclude"
        )
    for table in sorted(replicated_tables(model) - unclipped) if rule.scope == "global" else ():
        raise UserError(
            f"clip.rule = {rule.name!r} needs the norm over all tables, but {table!r} is data-parallel and looked up"
            ' separately; shard it as the others, name it in exclude, or set clip.rule = "field"'
        )
    for rank, lookups in enumerate(lookups_of_ranks(model)) if rule.scope == "global" else ():
        if len(lookups) > 1:
            raise UserError(
                f"clip.rule = {rule.name!r} needs the norm over all tables before the first is updated, but rank {rank}"
                f" looks up {lookups[0][0]!r} and {lookups[1][0]!r} separately; give all tables one collection,"
                ' sharding, pooling, data type and learning rate, or set clip.rule = "field"'
            )
        if not lookups:
            raise UserError(
                f"clip.rule = {rule.name!r} adds up the norms of all ranks, but rank {rank} holds no table and takes no"
                ' part in the backward pass; shard row-wise, train in fewer processes, or set clip.rule = "field"'
            )
