"""Tables of a model's collections, and their layout in the sharding plans, which is the same on all ranks.

A rank is a number in the process group of a table's collection unless it is called global.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

from torch import nn
from torch.distributed import ProcessGroup, get_global_rank
from torchrec.distributed.embedding import ShardedEmbeddingCollection
from torchrec.distributed.embeddingbag import ShardedEmbeddingBagCollection
from torchrec.distributed.types import ShardingEnv2D, ShardingType

ShardedCollection: TypeAlias = ShardedEmbeddingBagCollection | ShardedEmbeddingCollection


@dataclass(frozen=True)
class Table:
    """A table of a model."""

    # name in the model: ``own_name``, or ``<path of the collection>.<own_name>`` if several collections have that name
    name: str
    own_name: str  # name in the collection
    collection: nn.Module  # the collection, which may be unsharded
    rows: int  # rows over all ranks; 0 if they are not known
    ranks: frozenset[int] = frozenset()  # ranks that hold shards
    splits_rows: bool = False  # whether shards hold different rows
    # global ranks of a row's column shards, ascending, by the first row of each part of the rows. Grid sharding has
    # several parts; there is none where columns are not sharded
    column_ranks: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    is_replicated: bool = False  # whether every rank holds a copy and looks up its own samples in it (data-parallel)
    is_averaged: bool = False  # whether groups of ranks hold copies whose weights they average (2D parallelism)

    @property
    def is_sharded(self) -> bool:
        return isinstance(self.collection, ShardedCollection)

    @property
    def is_on_some_ranks(self) -> bool:
        """True if rows are sharded over several ranks, but not over all."""
        collection: Any = self.collection
        return self.splits_rows and len(self.ranks) != collection._env.world_size


def table_of(collection: Any, own_name: str, name: str, rows: int) -> Table:
    if not isinstance(collection, ShardedCollection):
        return Table(name, own_name, collection, rows)
    plan = collection.module_sharding_plan[own_name]
    shards = plan.sharding_spec.shards if plan.sharding_spec is not None else ()
    return Table(
        name,
        own_name,
        collection,
        rows,
        frozenset(plan.ranks or ()),
        len({shard.shard_offsets[0] for shard in shards}) > 1,
        _ranks_of_columns(collection, own_name),
        plan.sharding_type == ShardingType.DATA_PARALLEL.value,
        isinstance(collection._env, ShardingEnv2D),
    )


def _ranks_of_columns(collection: Any, table: str) -> dict[int, tuple[int, ...]]:
    """Reads :attr:`Table.column_ranks` from a plan; ``table`` is the name in the collection."""
    plan, group = collection.module_sharding_plan[table], collection._env.process_group
    shards = plan.sharding_spec.shards if plan.sharding_spec is not None else ()
    if len({shard.shard_offsets[1] for shard in shards}) < 2:
        return {}
    found: dict[int, list[int]] = {}
    for shard, rank in zip(shards, plan.ranks, strict=True):
        if not shard.shard_sizes[0]:
            continue  # shards without rows have the same first row in all parts
        found.setdefault(shard.shard_offsets[0], []).append(get_global_rank(group, rank))
    return {first_row: tuple(sorted(ranks)) for first_row, ranks in found.items()}


def process_group_of(collection: ShardedCollection) -> ProcessGroup:
    group: ProcessGroup = collection._env.process_group
    return group


class RankLookup(NamedTuple):
    """A lookup of any rank."""

    rank: int
    tables: list[str]  # names of the lookup's tables in the collection
    kind: tuple[Any, ...]  # data type and pooling, which differ between the lookups of a collection


def lookups_of_ranks(collection: Any) -> list[RankLookup]:
    """Lists the lookups of all ranks; a rank runs its lookups in this order."""
    sequences = getattr(collection, "_sharding_type_to_sharding", {}).values()
    return [
        RankLookup(rank, [table.name for table in group.embedding_tables], (group.data_type, group.pooling))
        for sharding in getattr(collection, "_embedding_shardings", sequences)
        for rank, groups in enumerate(sharding._grouped_embedding_configs_per_rank)
        for group in groups
    ]
