"""Sharding plan of a collection: the lookups of all ranks, and which ranks hold the rows and columns of a table.

Like lookup.py, this file uses private attributes of TorchRec.
"""

from collections.abc import Iterator
from typing import Any

from torch.distributed import get_global_rank


def groups_of_ranks(collection: Any) -> Iterator[tuple[int, Any]]:
    """Lookups of all ranks as (rank, TorchRec's description of it), those of a rank in their order there."""
    sequences = getattr(collection, "_sharding_type_to_sharding", {}).values()
    for sharding in getattr(collection, "_embedding_shardings", sequences):
        for rank, groups in enumerate(sharding._grouped_embedding_configs_per_rank):
            yield from ((rank, group) for group in groups)


def table_names_of(group: Any) -> list[str]:
    """Names of the tables of a lookup that :func:`groups_of_ranks` found."""
    return [table.name for table in group.embedding_tables]


def ranks_of_columns(collection: Any, table: str) -> dict[int, tuple[int, ...]]:
    """Global ranks of the column shards of a table's rows, one for each, by the first of these rows.

    Several rows are first under grid sharding; none where columns are not sharded.
    """
    plan, group = collection.module_sharding_plan[table], collection._env.process_group
    shards = plan.sharding_spec.shards if plan.sharding_spec is not None else ()
    if len({shard.shard_offsets[1] for shard in shards}) < 2:
        return {}
    found: dict[int, list[int]] = {}
    for shard, rank in zip(shards, plan.ranks, strict=True):
        found.setdefault(shard.shard_offsets[0], []).append(get_global_rank(group, rank))
    return {first_row: tuple(sorted(ranks)) for first_row, ranks in found.items()}


def has_row_shards(collection: Any, table: str) -> bool:
    """True if a table has several shards with different rows."""
    spec = collection.module_sharding_plan[table].sharding_spec
    return spec is not None and len({shard.shard_offsets[0] for shard in spec.shards}) > 1
