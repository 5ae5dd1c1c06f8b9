"""Embedding tables of a run: their sizes, how they are cut over processes, and their initial values."""

import hashlib
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, row_wise, table_wise
from torchrec.distributed.types import ShardingPlan
from torchrec.modules.embedding_configs import EmbeddingBagConfig, PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection

from cowrec.data_pipeline import Schema
from cowrec.models import physical_dim

from .processes import Process


def embedding_tables(schema: Schema, embedding_dim: int) -> list[EmbeddingBagConfig]:
    """One table per sparse field, named like the field, wide enough for the embedding and the wide weight."""
    return [
        EmbeddingBagConfig(
            name=field.name,
            num_embeddings=field.num_embeddings,
            embedding_dim=physical_dim(embedding_dim),
            feature_names=[field.name],
            # A weighted collection only sums; the reader then gives a mean-pooled field's ids the weight 1/length.
            pooling=PoolingType.MEAN if field.pooling == "mean" and not schema.is_weighted else PoolingType.SUM,
        )
        for field in schema.sparse
    ]


def sharding_plan(
    model: nn.Module, kind: str, process: Process, sharder: EmbeddingBagCollectionSharder
) -> ShardingPlan:
    """Row-wise: every table over all ranks. Table-wise: whole tables, the largest first to the emptiest rank."""
    plans = {}
    load = [0] * process.world_size
    for path, module in model.named_modules():
        if not isinstance(module, EmbeddingBagCollection):
            continue
        kinds: dict[str, Any] = {}
        for table in sorted(module.embedding_bag_configs(), key=lambda each: -each.num_embeddings):
            if kind == "row_wise":
                kinds[table.name] = row_wise(compute_kernel="fused")
            else:
                rank = load.index(min(load))
                load[rank] += table.num_embeddings
                kinds[table.name] = table_wise(rank=rank, compute_kernel="fused")
        plans[path] = construct_module_sharding_plan(
            module,
            kinds,
            sharder=sharder,
            local_size=process.local_world_size,
            world_size=process.world_size,
            device_type=process.device.type,
        )
    return ShardingPlan(plan=plans)


def fill_tables(model: nn.Module, embedding_dim: int, std: float, seed: int) -> None:
    """Initial values N(0, std) in the embedding columns and 0 in the others.

    A block of rows is drawn from (seed, table, block), so that a row's values do not depend on who holds it.
    """
    for key, value in model.state_dict().items():
        if isinstance(value, ShardedTensor):
            for shard in value.local_shards():
                table = key.split(".")[-2]
                _fill_shard(shard.tensor, shard.metadata.shard_offsets[0], table, embedding_dim, std, seed)


_BLOCK_ROWS = 1 << 12


def _fill_shard(rows: Tensor, first: int, table: str, embedding_dim: int, std: float, seed: int) -> None:
    rows.zero_()
    end = first + len(rows)
    generator = torch.Generator()
    for block in range(first // _BLOCK_ROWS, -(-end // _BLOCK_ROWS)):
        digest = hashlib.sha256(f"{seed}/{table}/{block}".encode()).digest()
        generator.manual_seed(int.from_bytes(digest[:8], "little") >> 1)
        # Always the whole block: torch's first n numbers depend on how many are drawn.
        values = torch.randn(_BLOCK_ROWS, embedding_dim, generator=generator).mul_(std)
        start = block * _BLOCK_ROWS
        low, high = max(start, first), min(start + _BLOCK_ROWS, end)
        rows[low - first : high - first, :embedding_dim] = values[low - start : high - start]
