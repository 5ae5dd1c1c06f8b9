"""Lookups of a model under a clip rule, with checks that the rule can be applied to them."""

from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from typing import Any

from torch import nn

from cowrec.sparse_opt.algorithm.clip import ClipRule
from cowrec.sparse_opt.tbe.column_shards import groups_of_columns
from cowrec.sparse_opt.tbe.discovery import (
    all_table_names,
    column_split_tables,
    find_lookups,
    inconsistent_lookups,
    lookups_of_ranks,
    meant_tables,
    replicated_tables,
    tables_on_some_ranks,
)

from .clipped_lookup import ClippedLookup


def clipped_lookups(
    model: nn.Module,
    rule: ClipRule,
    exclude: Sequence[str],
    clip_columns: int | Mapping[str, int] | None,
    *,
    optional: Sequence[str] = (),
    replicated: bool = False,
) -> list[ClippedLookup]:
    """Puts the lookups of a model under a clip rule.

    Args:
        model, rule, exclude, clip_columns: as in :func:`attach_cowclip`.
        optional: names of tables that are skipped if they cannot be clipped.
        replicated: whether data-parallel tables can be clipped.

    Raises:
        ValueError: no table at all, an unknown name, a table that cannot be clipped, or a rule that does not fit the
            sharding plan.
    """
    known = all_table_names(model)
    if not known:
        raise ValueError(
            f"{type(model).__name__} holds no TorchRec embedding tables; pass the DistributedModelParallel of a model"
            " with EmbeddingBagCollections"
        )
    given = dict.fromkeys(known, clip_columns) if isinstance(clip_columns, int) else dict(clip_columns or {})
    columns = {table: given[name] for table, name in meant_tables(model, given).items()}
    exclude, optional = list(meant_tables(model, exclude)), list(meant_tables(model, optional))
    _require_known("exclude", exclude, known)
    _require_known("clip_columns", list(columns), known)
    lookups, refusals = find_lookups(model, replicated=replicated)
    for refusal in refusals:
        if refusal.table not in optional:
            remedy = "to leave it unclipped name it in exclude"
            if refusal.table in exclude:
                remedy = "exclude leaves it unclipped, but it still needs L2 or the optimizer"
            raise ValueError(f"table {refusal.table!r} cannot be clipped: {refusal.reason}; {remedy}")
    for lookup in lookups:
        if lookup.max_gradient is not None:
            raise ValueError(
                f"table {lookup.shards[0].name!r} is under FBGEMM's gradient_clipping, which clamps the output"
                f" gradient to {lookup.max_gradient:g} after the clip has measured it; leave gradient_clipping out of"
                " fused_params"
            )
    _require_norms(model, rule, exclude)
    groups = groups_of_columns(column_split_tables(model)) if rule.scope == "row" else {}
    return [ClippedLookup(lookup, rule, columns, exclude, groups) for lookup in lookups]


def check_lookup_inputs(inputs: Mapping[str, Any]) -> None:
    """Raises ValueError for inputs of a lookup whose bags cannot be located."""
    if inputs.get("batch_size_per_feature_per_rank") is not None:
        raise ValueError(
            "variable batch size per feature cannot be clipped yet; give every feature the same batch size"
        )


def _require_norms(model: nn.Module, rule: ClipRule, exclude: Sequence[str]) -> None:
    """Raises ValueError, on all ranks alike, for a rule whose norms a lookup's backward cannot compute."""
    for table in sorted(column_split_tables(model).keys() - set(exclude)) if rule.scope == "field" else ():
        raise ValueError(
            f"clip.rule = {rule.name!r} needs the norm of the complete table {table!r}, which is sharded column-wise;"
            " shard it row- or table-wise, or name it in exclude"
        )
    if rule.scope == "row" and (pair := inconsistent_lookups(model)):
        raise ValueError(
            f"tables {pair[0]!r} and {pair[1]!r} are sharded column-wise and looked up separately, on some ranks"
            " in another order than on others, so that ranks would wait for each other's norms forever; give them the"
            " same pooling and data type, or the same ranks"
        )
    for table in sorted(tables_on_some_ranks(model) - set(exclude)) if rule.scope == "field" else ():
        raise ValueError(
            f"clip.rule = {rule.name!r} needs the norm of the complete table {table!r}, whose rows are on some"
            " ranks but not on all; shard it row- or table-wise, or name it in exclude"
        )
    for table in sorted(replicated_tables(model) - set(exclude)) if rule.scope == "global" else ():
        raise ValueError(
            f"clip.rule = {rule.name!r} needs the norm over all tables, but {table!r} is data-parallel and looked up"
            ' separately; shard it as the others, name it in exclude, or set clip.rule = "field"'
        )
    for rank, lookups in enumerate(lookups_of_ranks(model)) if rule.scope == "global" else ():
        if len(lookups) > 1:
            raise ValueError(
                f"clip.rule = {rule.name!r} needs the norm over all tables before the first is updated, but rank {rank}"
                f" looks up {lookups[0][0]!r} and {lookups[1][0]!r} separately; give all tables one collection,"
                ' sharding, pooling and data type, or set clip.rule = "field"'
            )
        if not lookups:
            raise ValueError(
                f"clip.rule = {rule.name!r} adds up the norms of all ranks, but rank {rank} holds no table and takes no"
                ' part in the backward pass; shard row-wise, train in fewer processes, or set clip.rule = "field"'
            )


def _require_known(argument: str, names: Sequence[str], known: set[str]) -> None:
    for name in names:
        if name not in known:
            nearest = get_close_matches(name, known, n=1, cutoff=0.5)
            hint = f"; did you mean {nearest[0]!r}?" if nearest else f"; known: {', '.join(sorted(known))}"
            raise ValueError(f"{argument} names table {name!r}, which the model does not have{hint}")
