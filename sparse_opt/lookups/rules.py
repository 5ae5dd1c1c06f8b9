"""Clip rules of a model's tables, by their names, and the limits that they set for the tables of a lookup."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf

import torch

from cowrec.errors import UserError

from ..algorithm.clip import ClipRule, NoClip, Scope
from ..kernels.layout import TableClips
from ..tbe.inventory import ModelInventory
from ..tbe.lookup import TbeLookup

OTHERS = "*"
"""Stands in a mapping of rules for the tables that it does not name."""


@dataclass(frozen=True)
class TableRules:
    """Clip rules of tables, which bound norms of one scope."""

    default: ClipRule  # rule of the tables that are not named
    # rules of named tables, by the tables' names in the model; NoClip for excluded tables
    by_table: Mapping[str, ClipRule] = field(default_factory=dict)

    def of(self, table: str) -> ClipRule:
        return self.by_table.get(table, self.default)

    @property
    def limiting(self) -> list[ClipRule]:
        """Distinct rules that set a limit."""
        distinct: list[ClipRule] = []
        for rule in (self.default, *self.by_table.values()):
            if not isinstance(rule, NoClip) and rule not in distinct:
                distinct.append(rule)
        return distinct

    @property
    def scope(self) -> Scope:
        return next((rule.scope for rule in self.limiting), "row")

    @property
    def name(self) -> str:
        """Names of the rules, for messages."""
        return ", ".join(sorted({rule.name for rule in self.limiting})) or NoClip.name

    def unclipped(self, tables: Collection[str]) -> set[str]:
        return {table for table in tables if isinstance(self.of(table), NoClip)}


def table_rules(
    inventory: ModelInventory, rule: ClipRule | Mapping[str, ClipRule], exclude: Sequence[str]
) -> TableRules:
    """Finds the rule of each table of a model; arguments as in :func:`attach_cowclip`.

    Raises:
        TypeError: a rule is a number, the class of a rule or another object; or exclude is a string.
        ValueError: the model has no table, a name is unknown, a table has no rule or two, or rules cannot be mixed.
    """
    if not inventory.tables:
        raise UserError(
            f"{type(inventory.model).__name__} holds no TorchRec embedding tables; pass the DistributedModelParallel of"
            " a model with EmbeddingBagCollections"
        )
    given = dict(rule) if isinstance(rule, Mapping) else {OTHERS: rule}
    for given_rule in given.values():
        if isinstance(given_rule, type) or not callable(getattr(given_rule, "limit", None)):
            got = f"the class {given_rule.__name__}" if isinstance(given_rule, type) else repr(given_rule)
            raise TypeError(
                "rule must be a clip rule, such as CowClip(r=1.0, zeta=1e-5), or a mapping of table names to rules; got"
                f" {got}"
            )
    named = {table: given[name] for table, name in inventory.named("rule", given.keys() - {OTHERS}).items()}
    excluded = inventory.named("exclude", exclude)
    for table in sorted(named.keys() & excluded.keys()):
        raise UserError(f"table {table!r} has a rule and is named in exclude; name it in one of them")
    others = sorted(inventory.tables.keys() - named.keys() - excluded.keys())
    if others and OTHERS not in given:
        raise UserError(
            f"the rules name none for table {others[0]!r}; name it, or give all others a rule as {OTHERS!r}"
        )
    default = given[OTHERS] if others else NoClip()
    rules = TableRules(default, named | dict.fromkeys(excluded, NoClip()))
    first, *more = rules.limiting or [default]
    for other in more:
        if other.scope != first.scope or first.scope == "global":
            raise UserError(
                f"clip rules {first.name!r} and {other.name!r} cannot be mixed: the first bounds the norm of a"
                f" {_SCOPES[first.scope]}, the second that of a {_SCOPES[other.scope]}; mix rules for rows, or rules"
                " for tables"
            )
    return rules


_SCOPES = {"row": "row", "field": "table", "global": "gradient of all tables"}


class TableLimits:
    """Limits that clip rules set for the tables of a lookup; ``clip_columns`` as for WrappedLookup.

    Attributes:
        columns: number of columns of each table here that are measured and clipped.
        clips: limits and columns of the tables, as tensors.
        excluded: whether a table has no limit, bool [tables].
        clipped_column_shards: names of tables that are sharded column-wise and clipped.
    """

    def __init__(self, lookup: TbeLookup, rules: TableRules, clip_columns: Mapping[str, int]):
        shards, device = lookup.shards, lookup.flat_weights().device
        self.rules = {shard.name: rules.of(shard.name) for shard in shards}
        widths = [clip_columns.get(shard.name, shard.table_dim) for shard in shards]
        for shard, width in zip(shards, widths, strict=True):
            if not 1 <= width <= shard.table_dim:
                raise UserError(
                    f"clip_columns of table {shard.name!r} must be in [1, {shard.table_dim}], its width, got {width}"
                )
        self.scope = rules.scope
        self.per_table = [rules.of(shard.name).limit(width) for shard, width in zip(shards, widths, strict=True)]
        self.columns = [
            min(max(width - shard.first_column, 0), shard.embedding_dim)
            for shard, width in zip(shards, widths, strict=True)
        ]
        r, floor, per_occurrence = zip(*self.per_table, strict=True)
        self.clips = TableClips(
            torch.tensor(self.columns, device=device),
            torch.tensor(r, dtype=torch.float32, device=device),
            torch.tensor(floor, dtype=torch.float32, device=device),
            torch.tensor(per_occurrence, dtype=torch.bool, device=device),
        )
        unclipped = rules.unclipped(self.rules)
        self.excluded = torch.tensor([shard.name in unclipped for shard in shards], device=device)
        self.clipped_column_shards = {
            shard.name
            for shard, limit in zip(shards, self.per_table, strict=True)
            if shard.column_ranks and limit.floor < inf
        }
