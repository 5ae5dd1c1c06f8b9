"""Embedding tables of a run: their sizes, their initial values, and where they are in a model."""

import hashlib
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torchrec.modules.embedding_configs import EmbeddingBagConfig, PoolingType

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


def fill_tables(model: nn.Module, embedding_dim: int, std: float, seed: int) -> None:
    """Initial values N(0, std) in the embedding columns and 0 in the others.

    A block of rows is drawn from (seed, table, block), so that a row's values do not depend on who holds it.
    """
    for key, value in model.state_dict().items():
        if ".embedding_bags." not in key:
            continue
        shards: list[tuple[Tensor, Sequence[int]]] = [(value.detach(), (0, 0))]  # data-parallel
        if isinstance(value, ShardedTensor):
            shards = [(shard.tensor, shard.metadata.shard_offsets) for shard in value.local_shards()]
        for part, place in shards:
            _fill_shard(part, place, key.split(".")[-2], embedding_dim, std, seed)


def tables_of(model: nn.Module) -> dict[str, ShardedTensor | Tensor]:
    """The tables by field; rows that are replayed are brought up to date by the model's ``state_dict``."""
    return {key.split(".")[-2]: value for key, value in model.state_dict().items() if ".embedding_bags." in key}


def whole_table(table: ShardedTensor | Tensor, process: Process) -> Tensor:
    """A table in one piece on every process."""
    if not isinstance(table, ShardedTensor):  # data-parallel
        return table.detach()
    whole = torch.empty(table.size(), dtype=table.dtype, device=process.device)
    table.gather(0, whole if process.is_first else None)
    dist.broadcast(whole, 0)
    return whole


_BLOCK_ROWS = 1 << 12


def _fill_shard(rows: Tensor, place: Sequence[int], table: str, embedding_dim: int, std: float, seed: int) -> None:
    """Fills a table's part whose first row and column are ``place``."""
    rows.zero_()
    first, first_column = place
    end = first + len(rows)
    generator = torch.Generator()
    for block in range(first // _BLOCK_ROWS, -(-end // _BLOCK_ROWS)):
        digest = hashlib.sha256(f"{seed}/{table}/{block}".encode()).digest()
        generator.manual_seed(int.from_bytes(digest[:8], "little") >> 1)
        # Always the whole block: torch's first n numbers depend on how many are drawn.
        values = torch.randn(_BLOCK_ROWS, embedding_dim, generator=generator).mul_(std)
        start = block * _BLOCK_ROWS
        low, high = max(start, first), min(start + _BLOCK_ROWS, end)
        own = values[low - start : high - start, first_column : first_column + rows.shape[1]]
        rows[low - first : high - first, : own.shape[1]] = own
