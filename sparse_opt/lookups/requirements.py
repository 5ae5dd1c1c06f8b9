"""Lookups of a model under clip rules, and the checks that the rules can be applied to the model."""

from collections.abc import Mapping, Sequence

import torch.distributed as dist

from cowrec.errors import UserError

from ..tbe.column_shards import groups_of_columns
from ..tbe.inventory import ModelInventory
from ..tbe.plan import process_group_of
from .rules import TableRules
from .wrapped_lookup import WrappedLookup


def lookups_under_rules(
    inventory: ModelInventory,
    rules: TableRules,
    clip_columns: int | Mapping[str, int] | None,
    *,
    skips_unclipped: bool = False,
    is_scaled: bool = False,
) -> list[WrappedLookup]:
    """Puts the lookups of a model under clip rules. All ranks must call together.

    Args:
        clip_columns: as in :func:`attach_cowclip`.
        skips_unclipped: whether a table that cannot be clipped is skipped if it has no limit.
        is_scaled: whether a GradScaler scales the loss. Column shards must then agree on whether their row moves.

    Raises ValueError: a name is unknown, a table cannot be clipped, or the rule does not fit the sharding plan.
    """
    tables = inventory.tables
    given = dict.fromkeys(tables, clip_columns) if isinstance(clip_columns, int) else dict(clip_columns or {})
    columns = {table: given[name] for table, name in inventory.named("clip_columns", given).items()}
    unclipped = rules.unclipped(tables)
    for name in sorted(name for name, table in tables.items() if table.is_averaged):
        raise UserError(
            f"table {name!r} is under 2D parallelism (DMPCollection), whose groups of ranks would each count the ids of"
            " their own share of the batch, and average rows that have taken different steps; use"
            " DistributedModelParallel over all ranks"
        )
    # Under a scale the fused update of a sharded table would otherwise apply the gradient of the scaled loss.
    skipped = {name for name in unclipped if skips_unclipped and not (is_scaled and tables[name].is_sharded)}
    with inventory.raised_on_all_ranks():
        _require_clippable(inventory, skipped, unclipped)
    _require_norms(inventory, rules, unclipped)
    split: dict[str, list[tuple[int, ...]]] = {}
    if rules.scope == "row" or is_scaled:
        split = {name: list(table.column_ranks.values()) for name, table in tables.items() if table.column_ranks}
        _require_partners(inventory, split)
    groups = groups_of_columns(split)
    with inventory.raised_on_all_ranks():
        return [WrappedLookup(lookup, rules, columns, groups) for lookup in inventory.lookups]


def _require_clippable(inventory: ModelInventory, skipped: set[str], unclipped: set[str]) -> None:
    for table, reason in inventory.unclippable.items():
        if table not in skipped:
            remedy = "to leave it unclipped name it in exclude"
            if table in unclipped:
                remedy = "exclude leaves it unclipped, but it still needs L2, the loss' scale or the optimizer"
            raise UserError(f"table {table!r} cannot be clipped: {reason}; {remedy}")
    for lookup in inventory.lookups:
        if lookup.max_gradient is not None:
            raise UserError(
                f"table {lookup.shards[0].name!r} is under FBGEMM's gradient_clipping, which clamps the output"
                f" gradient to {lookup.max_gradient:g} after the clip has measured it; leave gradient_clipping out of"
                " fused_params"
            )


def _require_norms(inventory: ModelInventory, rules: TableRules, unclipped: set[str]) -> None:
    clipped = sorted(inventory.tables.keys() - unclipped)
    for table in map(inventory.tables.get, clipped) if rules.scope == "field" else ():
        if table and (table.column_ranks or table.is_on_some_ranks):
            parts = "sharded column-wise" if table.column_ranks else "on some ranks but not on all"
            raise UserError(
                f"clip.rule = {rules.name!r} needs the norm of the complete table {table.name!r}, which is {parts};"
                " shard it row- or table-wise, or name it in exclude"
            )
    if rules.scope != "global":
        return
    for name in clipped:
        if inventory.tables[name].is_replicated:
            raise UserError(
                f"clip.rule = {rules.name!r} needs the norm over all tables, but {name!r} is data-parallel and looked"
                ' up separately; shard it as the others, name it in exclude, or set clip.rule = "field"'
            )
    for rank, lookups in enumerate(inventory.lookups_of_ranks()):
        if len(lookups) > 1:
            raise UserError(
                f"clip.rule = {rules.name!r} needs the norm over all tables before the first is updated, but rank"
                f" {rank} looks up {lookups[0][0]!r} and {lookups[1][0]!r} separately; give all tables one collection,"
                ' sharding, pooling, data type and learning rate, or set clip.rule = "field"'
            )
        if not lookups:
            raise UserError(
                f"clip.rule = {rules.name!r} adds up the norms of all ranks, but rank {rank} holds no table and takes"
                ' no part in the backward pass; shard row-wise, train in fewer processes, or set clip.rule = "field"'
            )


def _require_partners(inventory: ModelInventory, split: Mapping[str, Sequence[Sequence[int]]]) -> None:
    """Raises ValueError unless lookups of column shards run on all processes, in the same order."""
    if split and (pair := inventory.inconsistent_lookups()):
        raise UserError(
            f"tables {pair[0]!r} and {pair[1]!r} are sharded column-wise and looked up separately, perhaps on some"
            " ranks in another order than on others, so that ranks would wait for each other forever; give them the"
            " same pooling, data type, kind of sharding and fused_params, or make each a collection of its own"
        )
    world = dist.get_world_size() if split else 1
    least = min((process_group_of(collection).size() for collection in inventory.collections.values()), default=world)
    for table in sorted(name for name, parts in split.items() if any(len(set(ranks)) > 1 for ranks in parts)):
        if least < world:
            raise UserError(
                f"table {table!r} is sharded column-wise over {least} of {world} processes, which would wait for the"
                " others; shard it row- or table-wise, or the model over all of them"
            )
